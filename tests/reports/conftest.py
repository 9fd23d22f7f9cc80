"""A run directory made by hand, at fixed times of a fixed time zone."""

import json
import time
from types import SimpleNamespace

import pytest

from memfit.files import write_json
from memfit.memory import Footprint, PhasePeak
from memfit.rundir import RunDir, level_of
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
        scope = RunDir(path).scope if file == "host-1-1" else ""
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
