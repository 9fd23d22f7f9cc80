"""Real studies over the small workload: how trials end, what their records say, and how a study goes on."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kills
import memfit
from jobs.contract import is_alive, wait_until
from memfit.config import read_file
from memfit.errors import ConfigError, DoesNotFitError, JobFailedError, UsageError
from memfit.files import read_json
from memfit.jobs import ENDED, read_status, stop
from memfit.rundir import RunDir, liveness
from memfit.tuning import Study, Trial, of_command, read_trial, resume_study, tune, write_trial
from tuning.studies import SPACE, config_of, lay_out
from tuning.study_workload import MIB

pytestmark = pytest.mark.slow

WIDTHS = {"name": "params.width", "choices": [1, 2, 3, 4, 5]}


def trials_of(result):
    return Study.open(RunDir(result.path)).trials


def events(run, kind):
    return [event for event in run.events() if event["kind"] == kind]


def jobs_of(run):
    """The jobs that were started."""
    return sorted(path.parent.name for path in run.path.glob("jobs/*/job.json"))


# Ends of trials


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A study of four trials, then of six, then of two: widths 2, 4 (a NaN), 3 (a bug), 5 (out of memory), 2 and 1."""
    folder, patch = tmp_path_factory.mktemp("mixed"), pytest.MonkeyPatch()
    patch.setenv("MEMFIT_CLAIMS_DIR", str(folder / "claims"))
    params = {"widths_that_fail": [3], "widths_without_value": [4], "hold_mib_per_width": 30, "width": 1}
    params |= {"api_key": "s3cr3t-of-mine"}
    searched = {"space": [WIDTHS], "sampler": "random", "seed": 12, "epochs": "params.num_epochs", "report": "half"}
    memory = {"limit": "176MiB", "reserve": "16MiB"}
    with contextlib.chdir(folder):
        path = lay_out(folder, config_of(params, searched, memory=memory, retries=0))
        first = tune(path, overrides=["tune.n_trials=4"])
        before = trials_of(first)
        results = [first, tune(path, overrides=["tune.n_trials=6"])]
        jobs = jobs_of(RunDir(first.path))
        results.append(tune(path, overrides=["tune.n_trials=2"]))
        assert jobs_of(RunDir(first.path)) == jobs
        yield results, before
    patch.undo()


def test_a_study_goes_on_with_more_trials_and_is_done_with_fewer(mixed):
    results, before = mixed
    assert {one.path for one in results} == {results[0].path}
    assert [(one.state, one.exit_code) for one in results] == [("completed", 0)] * 3
    trials = trials_of(results[0])
    assert [one.number for one in trials] == list(range(6))
    assert trials[:4] == before
    assert [one.params["params.width"] for one in trials] == [2, 4, 3, 5, 2, 1]


@pytest.mark.proves("S2-03", "C-37")
def test_a_trial_that_fails_says_how_has_no_value_and_the_study_goes_on(mixed):
    _, without, failed, too_large, *others = trials_of(mixed[0][0])
    assert (failed.state, failed.kind, failed.job, failed.value) == ("failed", "ValueError", "trial_0002.fold_1", None)
    assert "a planted bug at width 3" in failed.cause
    assert (without.state, without.kind, without.value) == ("failed", "NoObjective", None)
    assert without.cause == "loss is nan in the result of trial_0001.fold_1"
    assert (too_large.state, too_large.value, too_large.measured["failed_stage"]) == ("out_of_memory", None, "fold")
    assert [one.state for one in others] == ["completed", "completed"]


@pytest.mark.proves("S2-32")
def test_records_have_what_was_measured_by_stage_and_what_the_metric_named_report_gave(mixed):
    trial = trials_of(mixed[0][0])[0]
    assert trial.measured["peaks"]["fold"] > 60 * MIB
    assert trial.measured["estimates"] == {"fold": 30 * MIB}
    assert trial.measured["seconds"] > 0 and trial.measured["started"] < trial.measured["ended"]
    assert list(trial.intermediate) == [1, 2, 3] and trial.by_unit == {"1": trial.value}
    assert trial.intermediate[3] == trial.value / 2


@pytest.mark.proves("S2-38")
def test_a_study_begins_with_short_trials_of_the_configs_own_settings(mixed):
    run = RunDir(mixed[0][0].path)
    canaries = [read_trial(run, f"canary_{number}") for number in (1, 3)]
    assert [(one.state, one.epochs, one.params) for one in canaries] == [("completed", 1, {}), ("completed", 3, {})]
    admitted = [event["job"].partition(".")[0] for event in events(run, "admit")]
    assert list(dict.fromkeys(admitted)) == ["canary_1", "canary_3", *dict.fromkeys(admitted[3:])]
    assert "canary_1.prepare" in jobs_of(run) and "canary_3.prepare" not in jobs_of(run)


@pytest.mark.proves("S2-47")
def test_the_best_config_runs_and_gives_the_value_of_the_best_trial(mixed):
    results, _ = mixed
    best = results[1].best
    assert best.name == Study.open(RunDir(results[0].path)).best.name == "trial_0005"
    path = results[0].path / "best.yaml"
    assert not path.stat().st_mode & 0o77  # it holds a secret, as config.yaml does
    assert read_file(path)["params"]["width"] == best.params["params.width"]
    assert f"trial_0005 of the study in this folder: fold.loss {best.value:.6g}" in path.read_text()
    result = memfit.run(path)
    assert result.exit_code == 0
    assert result.metrics["fold_1"]["loss"] == best.value


def test_a_study_goes_on_from_its_directory_with_other_code_only_anew(mixed, monkeypatch, tmp_path):
    results, _ = mixed
    run = RunDir(results[0].path)
    monkeypatch.chdir(tmp_path)
    again = resume_study(run)  # as many trials as the config in it says
    assert (again.path, again.exit_code, jobs_of(run)) == (run.path, 0, jobs_of(run))
    code = Path(run.header["cwd"]) / "study_workload.py"
    text = code.read_text()
    code.write_text(text.replace("0.1 * params.width", "0.2 * params.width"))
    try:
        with pytest.raises(UsageError) as caught:
            resume_study(run)
    finally:
        code.write_text(text)
    assert "the code or the data of the study" in caught.value.what and "--new" in caught.value.remedy


# Pruning


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A study of three trials of which one fits the limit at a time; the others would take ten seconds more."""
    folder, patch = tmp_path_factory.mktemp("pruned"), pytest.MonkeyPatch()
    patch.setenv("MEMFIT_CLAIMS_DIR", str(folder / "claims"))
    searched = {"space": SPACE[:1], "sampler": "random", "seed": 53, "pruner_startup": 1}
    params = {"num_epochs": 40, "epoch_seconds": 0.04}
    with contextlib.chdir(folder):
        path = lay_out(folder, config_of(params, searched, memory={"limit": "56MiB", "reserve": "16MiB"}))
        result = tune(path, overrides=["tune.n_trials=4", "warm=never"])
    yield result
    patch.undo()


@pytest.mark.proves("S2-46")
def test_pruning_ends_the_process_at_once_and_the_record_at_the_epoch(pruned):
    run, trial = RunDir(pruned.path), trials_of(pruned)[2]
    assert (trial.state, list(trial.intermediate)) == ("pruned", [1, 2])
    assert trial.cause == "worse than the median of earlier trials at epoch 2"
    assert trial.value == trial.intermediate[2] and trial.by_unit == {}
    state = read_json(run.path / "checkpoints" / f"{trial.name}.fold_1/state.json")
    assert state["epoch"] < 40 and not is_alive(state["pid"])
    assert read_status(run, f"{trial.name}.fold_1").state == "cancelled"
    assert not (run.path / "checkpoints" / f"{trial.name}.fold_1.json").exists()


def test_a_pruned_trials_memory_goes_to_the_next_trial(pruned):
    run = RunDir(pruned.path)
    admitted = {event["job"]: event for event in events(run, "admit")}
    ended = {event["job"]: event["time"] for event in events(run, "end")}
    assert {event["num_running"] for event in admitted.values()} == {1}
    assert {event["on"] for event in events(run, "wait")} == {"memory"}
    following = admitted["trial_0003.fold_1"]
    assert following["time"] >= ended["trial_0002.fold_1"]
    free = re.search(r"available = ([\d.]+) MiB free .* 0 B reserved", following["why"])
    assert free is not None and float(free[1]) > 40  # of 56
    assert trials_of(pruned)[3].is_over


# Refusals


def test_what_is_of_one_run_is_no_setting_of_a_study(study, tmp_path):
    for name, value in (("planned", "plan.json"), ("canary", "true")):
        with pytest.raises(ConfigError, match=f"memfit tune was given {name}") as caught:
            tune(study(), overrides=[f"{name}={value}"])
        assert caught.value.rule and f"remove it (--set {name}=" in caught.value.remedy
    assert RunDir.all(tmp_path / "runs", "study") == []


def test_names_that_are_not_there_are_refused_before_anything_is_made(study, tmp_path):
    for tune_section, said in (
        ({"space": [{"name": "params.depth", "low": 1, "high": 2}]}, "'params.depth', which is not there"),
        ({"objective": "blend.loss"}, "there is no stage 'blend'"),
        ({"epochs": "params.kind"}, "tune.epochs names params.kind, which is 'a'"),
        ({"epochs": "params.num_epoch"}, "'params.num_epoch', which is not there"),
    ):
        with pytest.raises(ConfigError) as caught:
            tune(study(tune=tune_section))
        assert said in caught.value.what and caught.value.rule and caught.value.remedy
    assert RunDir.all(tmp_path / "runs", "study") == []


def test_a_study_whose_draws_never_fit_has_failed_and_says_the_last_reason(study, monkeypatch):
    monkeypatch.setattr("memfit.tuning._sweep._MOST_DRAWS", 3)
    result = tune(study({"widths_too_large": 0}, {"n_trials": 2}))
    assert (result.state, result.exit_code, result.best) == ("failed", 4, None)
    for trial in trials_of(result):
        assert (trial.state, len(trial.refused), trial.params) == ("infeasible", 3, {})
        why = "fold takes at least 1.00 TiB by its estimate; the host has 1008.0 MiB"
        assert trial.cause == f"3 draws cannot run; the last: {why}" and trial.refused[0]["why"] == why
    assert jobs_of(RunDir(result.path)) == []


@pytest.mark.proves("S2-03")
def test_refused_draws_are_read_after_a_restart_and_not_decided_again(study):
    path = study({"num_epochs": 1}, {"num_slots": 1, "sampler": "random"})
    plain = tune(path, overrides=["tune.n_trials=2"])
    run = RunDir(plain.path)
    told = trials_of(plain)[1]
    # As a kill leaves it after one refused draw. These settings fit, as the study has just shown.
    refused = [{"params": dict(told.params), "why": "it was too large then"}]
    write_trial(run, Trial("trial_0001", 1, num_seen=1, refused=refused))
    again = trials_of(tune(path, overrides=["tune.n_trials=2"]))[1]
    assert (again.refused, again.state) == (refused, "completed")
    assert again.params != told.params


def test_a_trial_that_found_no_memory_to_start_with_is_no_failure_and_starts_later(study):
    estimates = {"name": "params.estimate_mib", "choices": [30, 31, 300]}
    path = study({"num_epochs": 1}, {"space": [estimates], "sampler": "random", "seed": 19, "num_slots": 1})
    run = RunDir(tune(path, overrides=["tune.n_trials=1"]).path)
    with pytest.raises(DoesNotFitError) as caught:
        tune(path, overrides=["memory.limit=200MiB"])
    assert "trial_0002.fold_1 needs 330.0 MiB of host memory" in caught.value.what  # a tenth more than the least
    assert [one.state for one in Study.open(run).trials] == ["completed", "completed", "running"]
    result = tune(path)
    assert (result.path, [one.state for one in trials_of(result)]) == (run.path, ["completed"] * 3)


def test_a_trial_reserves_more_than_it_takes_at_least_but_not_more_than_there_is(study):
    estimates = {"name": "params.estimate_mib", "choices": [950]}
    path = study({"num_epochs": 1}, {"space": [estimates], "num_slots": 1})
    run = RunDir(tune(path, overrides=["tune.n_trials=1"]).path)
    admitted = {one["job"]: one["reservation_bytes"] for one in events(run, "admit")}
    assert admitted["trial_0000.fold_1"] == Study.open(run).limits["host"]
    assert 950 * MIB < Study.open(run).limits["host"] < 1.1 * 950 * MIB


def test_the_largest_waiting_trial_starts_first_and_the_draws_are_as_ever(study):
    estimates = {"name": "params.estimate_mib", "choices": [600, 700, 800]}
    path = study({"epoch_seconds": 0.3}, {"space": [estimates], "num_slots": 3, "sampler": "random", "seed": 17})
    Path("hold").touch()  # until all have been drawn

    def let_go(run):
        def look():
            told = {job for event in events(run, "stage") for job in event["jobs"]}
            if told >= {f"trial_{n:04d}.prepare" for n in range(3)}:
                Path("hold").unlink(missing_ok=True)

        return look

    result = tune(path, view=let_go)
    assert [one.params["params.estimate_mib"] for one in trials_of(result)] == [800, 600, 700]
    started = [one["job"] for one in events(RunDir(result.path), "admit") if ".fold" in one["job"]]
    assert started == ["trial_0000.fold_1", "trial_0002.fold_1", "trial_0001.fold_1"]


# Canaries


@pytest.mark.parametrize(
    ("params", "num_starts", "said"),
    [
        ({"widths_that_fail": [4]}, 2, "canary_1, the trial before the search, is failed"),
        ({"num_reported": 2}, 1, "canary_3, the trial before the search, reported 2 of 3 epochs"),
    ],
)
def test_settings_that_do_not_train_start_no_trial_at_this_start_and_the_next(study, params, num_starts, said):
    path = study(params, {"epochs": "params.num_epochs"})
    for _ in range(num_starts):
        with pytest.raises(JobFailedError) as caught:
            tune(path)
        assert said in caught.value.what and caught.value.exit_code == 4
        assert "memfit diagnose" in caught.value.remedy
    (run,) = RunDir.all(Path("runs"), "study")
    assert Study.open(run).trials == [] and run.state == "failed"
    assert not [job for job in jobs_of(run) if job.startswith("trial")]


# Other ends


LINES = """case {params.width} in
2) echo loss: 99; truncate -s 1T /proc/self/fd/1; echo; echo loss: $((2 * {unit})); echo;;
3) echo a planted bug >&2; exit $(({unit} == 2 ? 5 : 0));;
4) echo loss: nan; echo done;;
5) echo loss: 1; echo '{"loss": NaN}' > {dir}/result.json;;
esac"""


@pytest.mark.core
def test_stages_of_commands_are_searched_by_the_last_line_that_each_unit_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fold = {"each": "fold in params.folds", "needs": ["prepare"], "run": LINES}
    config = {"experiment": "lines", "stages": {"prepare": {"run": "echo 1 >{dir}/rows"}, "fold": fold}, "retries": 0}
    section = {"objective": "fold.loss", "direction": "minimize", "n_trials": 6, "num_slots": 1, "sampler": "random"}
    section |= {"space": [{"name": "params.width", "choices": [2, 3, 4, 5]}], "seed": 2}
    Path("config.yaml").write_text(json.dumps(config | {"params": {"folds": [1, 2], "width": 1}, "tune": section}))
    result = tune(Path("config.yaml"))
    assert (result.state, result.exit_code, result.best.name) == ("completed", 0, "trial_0003")
    none, trials = ("failed", None, {}), trials_of(result)
    assert [(one.params["params.width"], one.state, one.value, dict(one.by_unit)) for one in trials] == [
        (4, *none), (5, *none), (4, *none), (2, "completed", 3.0, {"1": 2.0, "2": 4.0}), (4, *none), (3, *none),
    ]  # fmt: skip
    said = [(one.kind, one.job, one.measured.get("failed_stage"), one.cause) for one in trials]
    lacks = "loss is not in the result, reports and last line of trial_0000.fold_1"
    assert said[0] == ("NoObjective", "trial_0000.fold_1", None, lacks)
    assert said[1] == ("NoObjective", "trial_0001.fold_1", None, "loss is nan in the result of trial_0001.fold_1")
    assert [said[3], said[5]] == [
        ("", "", None, ""),
        ("failed", "trial_0005.fold_2", "fold", "exit code 5: a planted bug"),
    ]
    started = [f"trial_000{number}.fold_{unit}" for number in (0, 1, 3, 5) for unit in (1, 2)]  # 2 and 4 are as 0
    assert jobs_of(RunDir(result.path)) == sorted([*started, "trial_0000.prepare"])
    assert tune(Path("config.yaml")).path == result.path and trials_of(result) == trials


@pytest.mark.parametrize(("report", "said"), [("value=10**400, step=1", "inf"), ("value=1e200, step=1", r"1e\+200")])
def test_a_report_that_is_no_number_of_sane_size_fails_its_trial_with_the_reason(tmp_path, monkeypatch, report, said):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import os, sys\nfrom memfit.rundir import record\nfirst = not os.path.exists('ran')\nopen('ran', 'w').close()\n"
        "for step in (-1, 10**40): record('report', name='loss', step=step, value=10**400)\n"
        f"record('report', name='loss', {report}) if first else record('report', name='loss', value=0.5, step=1)\n"
    )
    section = {"objective": "trial.loss", "direction": "minimize", "n_trials": 2, "num_slots": 1}
    result = tune(of_command([sys.executable, "train.py", "{lr}"], ["lr=0.1..0.9"], "lines", section))
    failed, completed = trials_of(result)
    assert (failed.state, failed.kind, completed.value, result.exit_code) == ("failed", "NoObjective", 0.5, 0)
    assert re.fullmatch(f"loss is {said} in the result of trial_0000.trial", failed.cause)


# Stops


@contextlib.contextmanager
def running(folder, *overrides):
    """A study in a process of its own."""
    words = [sys.executable, "-c", kills.TUNE, "config.yaml", *overrides]
    with open(folder / "supervisor.log", "ab") as log:
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def only_run(folder):
    wait_until(lambda: list(folder.glob("runs/study/run_*/run.json")))
    (path,) = folder.glob("runs/study/run_*")
    return RunDir(path)


def test_ctrl_c_while_trials_wait_for_a_shared_stage_leaves_them_to_the_next_start(study, tmp_path):
    path = study({"prepare_seconds": 1.0, "num_epochs": 2}, {"n_trials": 2})
    with running(tmp_path) as process:
        run = only_run(tmp_path)
        wait_until(lambda: read_trial(run, "trial_0001") is not None and "trial_0000.prepare" in liveness(run).jobs)
        wait_until(lambda: any(event.get("job") == "trial_0000.prepare" for event in events(run, "phase")))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 75
    assert run.state == "preempted" and liveness(run).jobs == []
    assert [one.state for one in Study.open(run).trials] == ["running"] * 2
    params = [dict(one.params) for one in Study.open(run).trials]
    result = tune(path)
    assert (result.path, result.exit_code) == (run.path, 0)
    assert [(one.state, dict(one.params)) for one in trials_of(result)] == [("completed", one) for one in params]


def test_a_trial_that_is_stopped_alone_waits_for_the_next_start(study, tmp_path, monkeypatch):
    study({"num_epochs": 2}, {"n_trials": 2, "num_slots": 1})
    Path("hold").touch()
    with running(tmp_path) as process:
        run = only_run(tmp_path)
        wait_until(lambda: "trial_0000.fold_1" in liveness(run).jobs)
        stop(run, "trial_0000.fold_1", now=True)
        assert process.wait(60) == 75
    assert [(one.name, one.state) for one in Study.open(run).trials] == [("trial_0000", "running")]
    assert read_status(run, "trial_0000.fold_1").attempt == 1
    Path("hold").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = resume_study(run)
    assert (result.exit_code, [one.state for one in trials_of(result)]) == (0, ["completed"] * 2)


def test_jobs_of_trials_that_are_no_longer_asked_for_are_stopped(study, tmp_path):
    path = study({"num_epochs": 2, "epoch_seconds": 0.1}, {"n_trials": 2})
    Path("hold").touch()
    with running(tmp_path) as process:
        run = only_run(tmp_path)
        wait_until(lambda: all(read_status(run, f"trial_000{number}.fold_1").pid for number in range(2)))
        process.send_signal(signal.SIGKILL)
        process.wait()
    end = time.monotonic() + 20

    def let_go(run):
        def look():
            if read_status(run, "trial_0001.fold_1").state in ENDED or time.monotonic() > end:
                Path("hold").unlink(missing_ok=True)

        return look

    result = tune(path, overrides=["tune.n_trials=1"], view=let_go)
    assert (result.exit_code, result.best.name) == (0, "trial_0000")
    assert read_status(run, "trial_0001.fold_1").state != "completed" and liveness(run).jobs == []
    assert any(
        "trial_0001.fold_1 still runs and this run does not need it" in event["text"] for event in events(run, "plan")
    )
