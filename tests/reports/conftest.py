"""A run directory made by hand, at fixed times of a fixed time zone."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from memfit.files import write_json
from memfit.memory import Footprint, Growth, PhasePeak, Sample, SeriesWriter
from memfit.rundir import RunDir, level_of, scope_of
from memfit.tuning import Trial, TuneSettings

#: 2026-11-21 09:00:00 in the time zone of the tests (UTC+1).
START = 1795248000.0
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def _a_fixed_time_zone(monkeypatch):
    monkeypatch.setenv("TZ", "XXX-1")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Writes events, outcomes and results into a run directory of its own."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "demo" / "run_20261121_090000_0123abcd"
    for name in ("events", "jobs", "checkpoints"):
        (path / name).mkdir(parents=True)
    write_json(path / "run.json", {"schema_version": 2, "kind": "stages", "fingerprint": "0123abcd" * 8})
    stages = [{"name": "prepare", "each": None}, {"name": "fold", "each": "fold in prepare.folds"}]
    write_json(path / "graph.json", {"schema_version": 1, "stages": [*stages, {"name": "judge", "each": None}]})

    def event(at, kind, job=None, file="host-1-1", **fields):
        told = {"time": START + at, "job": job, "kind": kind, **fields}
        scope = scope_of(RunDir(path).header) if file == "host-1-1" else ""
        with open(path / "events" / f"{file}.jsonl", "a") as lines:
            lines.write(json.dumps(told | {"level": level_of(told, scope)}) + "\n")

    def job(job_id, state="completed", at=0, seconds=60.0, name="outcome.json", **fields):
        (path / "jobs" / job_id).mkdir(exist_ok=True)
        ended = None if state == "running" else START + at + seconds
        known = {
            "state": state,
            "started": START + at,
            "ended": ended,
            "peak_bytes": 270 * MIB,
            "cause": "",
            "attempt": 1,
        }
        write_json(path / "jobs" / job_id / name, known | fields)

    def result(job_id, **result):
        name = job_id if "_" in job_id else f"stage_{job_id}"
        write_json(path / "checkpoints" / f"{name}.json", {"result": result})

    def stage(at, name, state, *jobs, why="", seconds=0.0):
        text = f"{name} is {state}: {why}" if state == "skipped" else ""
        event(at, "stage", stage=name, state=state, why=why, jobs=jobs or [name], seconds=seconds, text=text)

    def admit(at, job_id, num_running, reserved=300 * MIB, **fields):
        told = {"reservation_bytes": reserved, "num_running": num_running, "why": "7.00 GiB may be lent"}
        event(at, "admit", job_id, **told, **fields, text=f"{job_id} starts ({num_running} running)")

    def end(at, job_id, state="completed", cause="", **fields):
        text = ": ".join(filter(None, [f"{job_id} {state}", cause]))
        event(at, "end", job_id, state=state, cause=cause, exit_code=0, **fields, text=text)

    return SimpleNamespace(
        run=RunDir.open(path),
        path=path,
        event=event,
        job=job,
        result=result,
        stage=stage,
        admit=admit,
        end=end,
        start=START,
    )


@pytest.fixture
def commands(made):
    """Makes the run one of so many commands, which differ in ``fold``, or in another parameter."""

    def make(number, name="fold"):
        combinations = [{name: str(value), "lr": "1e-3"} for value in range(1, number + 1)]
        header = {"schema_version": 2, "experiment": "demo", "kind": "commands", "combinations": combinations}
        write_json(made.path / "run.json", header | {"template": ["python", "train.py", f"{{{name}}}"]})
        return made

    return make


@pytest.fixture
def finished(made):
    """Three folds: the first alone for an hour, then two side by side, of which one was killed for memory."""
    limit = {"name": "memory.max", "source": "cgroup v2 /job", "limit_bytes": 8 * GIB}
    budget = {"binding": limit, "limits": [limit], "headroom_bytes": 7 * GIB, "reserve_bytes": GIB, "promise": "none"}
    made.event(0, "run", state="started", fingerprint="0123abcd" * 8)
    made.event(1, "budget", **budget)
    made.stage(2, "prepare", "running", why="it was not made yet")
    made.admit(2, "prepare", 1, None)
    made.end(9, "prepare")
    made.stage(9, "prepare", "completed")
    made.stage(9, "fold", "running", "fold_1", "fold_2", "fold_3", why="learning_rate 0.1 -> 0.2")
    made.stage(9, "judge", "waiting")
    made.job("prepare", at=2, seconds=7)
    made.admit(10, "fold_1", 1, None)
    made.event(1000, "epoch", "fold_1", "host-2-2", epoch=1, num_epochs=2, text="fold_1 epoch 1/2  train_loss 2.9307")
    made.event(1001, "footprint", job="fold_1", reservation_bytes=300 * MIB)
    made.event(1002, "plan", text="2 of 3 at once (no more fit)", num_parallel=2)
    made.admit(1003, "fold_2", 2, limit_bytes=8 * GIB, used_bytes=GIB, pss_bytes=512 * MIB)
    wait = {"reason": "it needs 300.0 MiB", "arithmetic": "1.0 MiB may be lent", "on": "memory"}
    made.event(1004, "wait", "fold_3", num_running=2, **wait, text="fold_3 waits: it needs 300.0 MiB")
    made.end(3522, "fold_1", limit_bytes=8 * GIB, used_bytes=600 * MIB, pss_bytes=270 * MIB)
    made.admit(3523, "fold_3", 2)
    made.end(4000, "fold_2", "out_of_memory", "killed by the kernel for memory in phase train")
    made.end(7123, "fold_3")
    made.stage(7124, "fold", "completed", "fold_1", "fold_3")
    made.stage(7124, "fold", "failed", "fold_2", why="killed by the kernel for memory in phase train")
    made.stage(7124, "judge", "skipped", why="fold_2 failed")
    made.event(7140, "run", state="failed", cpu={"busy": 0.412, "disk": 0.031})
    made.job("fold_1", at=10, seconds=3512)
    made.job("fold_2", "out_of_memory", at=1003, seconds=2997, cause="killed by the kernel for memory in phase train")
    made.job("fold_3", at=3523, seconds=3600, peak_bytes=290 * MIB)
    made.result("prepare", num_dates=2766, market="daily", folds=[1, 2, 3], report=["20 assets, 5 features"])
    made.result("fold_1", rank_ic=0.0081, rank_ic_sd=0.326, icir=0.0249, num_dates=545.0, train_loss=2.9307)
    made.result("fold_3", rank_ic=0.0333, rank_ic_sd=0.296, icir=0.1124, num_dates=544.0, train_loss=2.9434)
    footprint = Footprint(270 * MIB, 140 * MIB, phases={"load": PhasePeak(200 * MIB), "train": PhasePeak(270 * MIB)})
    write_json(made.path / "plan.json", {
        "footprint": footprint.to_dict(), "measured_on": "fold_1", "why": "2 of 3 at once (no more fit)",
        "reservation_bytes": 300 * MIB, "num_jobs": 3,
    })  # fmt: skip
    write_json(made.path / "outcome.json", {"state": "failed", "exit_code": 4})
    return made


@pytest.fixture
def study(made):
    """Makes the run a study that maximizes ``rank_ic``, and writes the records of its trials."""
    header = {"schema_version": 2, "experiment": "demo", "kind": "tune", "fingerprint": "0123abcd" * 8}
    write_json(made.path / "run.json", header)
    (made.path / "trials").mkdir()
    space = [{"name": "params.layers", "low": 1, "high": 8}, {"name": "params.batch", "choices": [32, 64, 128]}]

    def begin(**tune):
        given = {"space": space, "objective": "fold.rank_ic", "direction": "maximize", "n_trials": 40} | tune
        settings = TuneSettings.model_validate(given).model_dump(mode="json")
        limits = {"host": 8 * GIB, "device": None}
        found = {"schema_version": 1, "name": "demo", "settings": settings, "limits": limits, "basis": "0"}
        write_json(made.path / "study.json", found)
        return made.run

    def trial(number, state="completed", value=None, *, params=(2, 64), seconds=60.0, **fields):
        name = fields.pop("name", f"trial_{number:04d}" if number is not None else "canary_1")
        drawn = {"params.layers": params[0], "params.batch": params[1]} if params else {}
        measured = {"seconds": seconds, "peaks": {"fold": 270 * MIB} if params else {}} | fields.pop("measured", {})
        found = Trial(name, number, state, drawn, value=value, measured=measured, **fields)
        write_json(made.path / "trials" / f"{name}.json", found.to_dict())

    return SimpleNamespace(run=made.run, path=made.path, made=made, begin=begin, trial=trial)


@pytest.fixture
def swept(commands):
    """Four commands, two at once: one failed, one was put aside after 10 s and went on."""
    made = commands(5)
    made.event(0, "run", state="started")
    for number, at in ((1, 0), (2, 0), (3, 60), (4, 60)):
        made.admit(at, f"cmd_000{number}", 2)
    made.event(70, "aside", "cmd_0004", reason="cmd_0003 waits at its wall", now=False)
    made.event(71, "retry", "cmd_0004", attempt=2, reservation_bytes=300 * MIB, reason="it stepped aside for others")
    made.admit(80, "cmd_0004", 2)
    made.job("cmd_0001", at=0, seconds=60)
    made.job("cmd_0002", "failed", at=0, seconds=3.2, cause="exit code 7 in phase train", exit_code=7)
    made.job("cmd_0003", at=60, seconds=10)
    made.job("cmd_0004", "preempted", at=60, seconds=10, name="outcome_1.json")
    made.job("cmd_0004", at=80, seconds=20, attempt=2, peak_bytes=290 * MIB)
    (made.path / "jobs/cmd_0002/err.log").write_text("")
    (made.path / "jobs/cmd_0002/out.log").write_text("no more\n")
    made.event(105, "run", state="failed")
    write_json(made.path / "outcome.json", {"state": "failed", "exit_code": 4})
    return made


@pytest.fixture
def searched(study):
    """A study of 40 trials, of which six have ended: each in another way."""
    study.begin()
    study.trial(None, value=0.01, epochs=1)
    study.trial(0, value=0.01, epochs=3, intermediate={1: 0.004, 2: 0.01}, by_unit={"1": 0.008, "2": 0.012})
    study.trial(
        1, value=0.0341, epochs=3, params=(4, 32), intermediate={1: 0.02, 2: 0.03}, by_unit={"1": 0.03, "2": 0.0382}
    )
    study.trial(2, "pruned", 0.001, seconds=30.0, num_seen=2, intermediate={1: 0.003, 2: 0.001}, cause="worse")
    study.trial(3, "failed", kind="ValueError", cause="exit code 1: ValueError: no", job="trial_0003.fold_1")
    why = "fold takes at least 12.00 GiB by its estimate; the host has 8.00 GiB"
    small = "fold takes at least 900.0 MiB by its estimate; the host has 8.00 GiB"
    refused = [{"params": {"params.layers": 8, "params.batch": 128}, "why": why}]
    refused += [{"params": {"params.layers": 6, "params.batch": 128}, "why": small}]
    study.trial(4, "out_of_memory", refused=refused, cause="killed <by> the kernel", kind="out_of_memory")
    study.trial(5, "infeasible", params=None, seconds=0.0, refused=refused[:1], cause="25 draws cannot run")
    study.trial(6, "running", seconds=0.0)
    (study.path / "best.yaml").write_text("experiment: demo\n")
    return study


@pytest.fixture
def running(made):
    """Seven folds in the states that make the widest cells, in mid-run."""
    made.event(0, "run", state="started")
    wide = 1023 * MIB + 900 * 1024
    for fold, state in enumerate(["completed", "out_of_memory", "running", "running", "node_fail"], 8):
        made.admit(1, f"fold_{fold}", 2, wide)
        made.event(3600, "step", f"fold_{fold}", epoch=1, step=10, num_steps=100, num_epochs=100)
        made.event(7200, "step", f"fold_{fold}", epoch=12, step=50, num_steps=100, num_epochs=100)
        name = "status.json" if state == "running" else "outcome.json"
        sizes = {"peak_bytes": wide, "used_bytes": wide if state == "running" else 0}
        made.job(f"fold_{fold}", state, seconds=90000.0, name=name, phase="checkpoint", **sizes)
    return made


@pytest.fixture
def recorded(finished):
    """The three folds, with their memory, their epochs, and a restart of the third."""
    for job, samples in {
        "fold_1/memory": [("load", 0, 10), ("train", 10, 100), ("", 20, 90)],
        "fold_1/memory_2": [("load", 1590, 10), ("train", 1620, 100)],
        "fold_2/memory": [("train", 1000, 70), ("train", 1020, 90)],
    }.items():
        series = SeriesWriter(finished.path / "jobs" / f"{job}.jsonl")
        for phase, at, mib in samples:
            held = {"GPU-a": 3 << 30}
            series.append(Sample(START + at, 1, mib << 20, 0, 1 << 20, 1 << 20, phase, held, 1))
        series.close()
    for job in ("fold_1", "fold_2"):
        for epoch in (1, 2):
            numbers = {"train_loss": 1 / epoch, "valid_loss": 2 / epoch, "device_use": 0.5}
            device = {"cuda:0": {"allocated_peak_bytes": 3 * GIB, "reserved_peak_bytes": 4 * GIB}}
            phases = {"train": {"host_bytes": 900 * MIB, "devices": device}}
            memory = {"metric": "non_reclaimable", "phases": phases} if job == "fold_1" else {"weights": "a lot"}
            finished.event(1000 * epoch, "epoch", job, epoch=epoch, num_epochs=2, memory=memory, **numbers)
    finished.event(7200, "retry", "fold_3", reservation_bytes=None, attempt=2, text="fold_3 restarts")
    finished.admit(7300, "fold_3", 1)
    finished.job("fold_3", at=7300, seconds=60, attempt=2)
    return finished


@pytest.fixture
def reported(swept):
    """The four commands, of which each completed one reported its loss."""
    for fold in (1, 3):
        swept.event(fold, "epoch", f"cmd_{fold:04}", epoch=3, num_epochs=3, valid_loss=0.25 * fold)
    return swept


@pytest.fixture
def gated(made):
    """A run that a gate stopped, and a stage of two units of the command line."""
    made.event(0, "run", state="started")
    made.stage(0, "prepare", "reused", why="/runs/demo/run_1/checkpoints/stage_prepare.json", seconds=7.5)
    made.stage(1, "fold", "stopped", "fold", why="the first fold loses money")
    made.stage(1, "judge", "skipped", why="fold stopped the run: the first fold loses money")
    made.job("fold", seconds=9)
    made.result("prepare", sharpe=-1.25, sign="red", days=[1, 2])
    made.result("fold", sharpe=-1.25, report=["red: Sharpe", "sell"])
    outcome = {"state": "stopped", "exit_code": 11, "why": "the first fold loses money"}
    write_json(made.path / "outcome.json", outcome)
    return made


@pytest.fixture
def units(made):
    """A stage whose two units the command line gave."""
    header = {"schema_version": 2, "kind": "stages", "units": [{"lr": "0.1"}, {"lr": "0.2"}]}
    write_json(made.path / "run.json", header)
    write_json(made.path / "graph.json", {"stages": [{"name": "train", "each": None}]})
    for number in (1, 2):
        made.job(f"train_000{number}")
        made.result(f"train_000{number}", loss=0.5 * number)
    write_json(made.path / "outcome.json", {"state": "completed"})
    return made


@pytest.fixture
def single(commands):
    """A single command, which has ended."""
    made = commands(1)
    made.admit(0, "cmd_0001", 1, None)
    footprint = Footprint(270 * MIB, phases={"load": PhasePeak(200 * MIB), "train": PhasePeak(270 * MIB)})
    made.job("cmd_0001", seconds=12, footprint=footprint.to_dict(), phase="train")
    write_json(made.path / "outcome.json", {"state": "completed"})
    return made


@pytest.fixture
def with_ranks(made):
    """Makes the run one of a fold of two ranks, of which one was lost."""

    def make(state):
        lost = {"rank": 1, "generation": 0, "code": -9, "place": "microbatch", "step": 8}
        rank = {"pid": 70, "step": 12, "pss_bytes": 200 * MIB, "device_bytes": 0, "peak_bytes": 300 * MIB}
        ranks = [
            rank | {"rank": 0, "place": "vote"},
            rank | {"rank": 1, "place": "microbatch", "device_bytes": 2 * GIB},
        ]
        made.event(1, "run", state="started")
        made.admit(2, "fold_1", 1, GIB)
        text = "fold_1 rank 1 was ended by SIGKILL in microbatch of step 8"
        made.event(3, "rank_lost", "fold_1", file="host-70-1", **lost, text=text)
        name = "status.json" if state == "running" else "outcome.json"
        made.job("fold_1", state, name=name, ranks=ranks, used_bytes=410 * MIB)
        return made

    return make


@pytest.fixture
def growing(made):
    """A fold that grows from 80 MiB, for a minute so far, to its limit of 300 MiB in half a minute more."""
    growth = Growth("growth", 8.0 * MIB, 7.9 * MIB, 8.1 * MIB, who="rank 1", phase="train", limit_bytes=300 * MIB)
    made.growth = replace(growth, at=131.0, is_sure=True, at_time=START + 90)
    made.event(0, "run", state="started")
    made.admit(1, "fold_1", 1)
    (made.path / "jobs/fold_1").mkdir()
    series = SeriesWriter(made.path / "jobs/fold_1/memory.jsonl")
    for at in range(61):
        series.append(Sample(START + at, 1, (80 + 2 * at) * MIB, 0, MIB, MIB, "train"))
    series.close()
    made.job("fold_1", "running", name="status.json", phase="train", growth=made.growth.to_dict())
    return made


@pytest.fixture
def ranked(with_ranks):
    """A job of two ranks, which has ended."""
    made = with_ranks("completed")
    write_json(made.path / "outcome.json", {"state": "completed"})
    return made


@pytest.fixture
def ranking(with_ranks):
    """A job of two ranks, which runs."""
    return with_ranks("running")
