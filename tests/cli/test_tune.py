"""``memfit tune`` as a command: what it searches, what it prints, its exit codes."""

import json
import os
import signal
import subprocess
import sys

import pytest

from jobs.contract import wait_until
from memfit.rundir import RunDir
from memfit.tuning import read_trial, read_trials

TUNE = """
tune:
  space:
    - {name: params.num_dates, low: 30, high: 60}
  objective: fold.mean_x
  direction: maximize
  n_trials: 3
  epochs: params.num_epochs
"""
OBJECTIVE = "import sys, time; time.sleep(float(sys.argv[2])); print('loss', (float(sys.argv[1]) - 0.3) ** 2)\n"
SEARCH = ("--param", "rate=0.01..1.0:log", "--objective", "loss", "--minimize", "--study-name", "rates")


def command(seconds):
    return ("--", sys.executable, "objective.py", "{rate}", seconds)


@pytest.mark.slow
def test_a_commands_parameters_are_searched_by_its_last_line_and_the_best_runs_again(memfit, tmp_path):
    (tmp_path / "objective.py").write_text(OBJECTIVE)
    done = memfit("tune", *SEARCH, "--n-trials", 4, *command(0))
    assert (done.exit_code, done.err) == (0, "")
    [run] = RunDir.all(tmp_path / "runs", "rates")
    trials = read_trials(run)
    assert [trial.state for trial in trials] == ["completed"] * 4
    assert all(trial.value == pytest.approx((trial.params["params.rate"] - 0.3) ** 2) for trial in trials)
    best = min(trials, key=lambda trial: trial.value)
    assert f"({best.name})" in done.out
    status = json.loads(memfit("tune", "--status", "rates", "--json").out)
    assert (status["n_trials"], status["best"]["trial"]) == (4, best.name)
    again = memfit("run", run.path / "best.yaml", "--json")
    assert (again.exit_code, json.loads(again.out)["counts"]) == (0, {"completed": 1})
    assert memfit("tune", *SEARCH, "--n-trials", 5, *command(0)).exit_code == 0
    assert [trial.params for trial in read_trials(run)][:4] == [trial.params for trial in trials]
    assert len(read_trials(run)) == 5


@pytest.mark.slow
def test_flags_set_what_the_section_names_and_short_trials_come_first(memfit, config, tmp_path):
    path = config(TUNE, num_epochs=3)
    done = memfit("tune", path, "--max-epochs", 2, "--n-trials", 2, "--study-name", "two", "--set", "runs_dir=here")
    assert done.exit_code == 0
    [run] = RunDir.all(tmp_path / "here", "two")
    assert read_trial(run, "canary_1").state == "completed"
    assert read_trial(run, "canary_3") is None  # the trials are shorter
    assert [(trial.state, trial.epochs) for trial in read_trials(run)] == [("completed", 2)] * 2


@pytest.mark.slow
def test_a_search_whose_own_settings_fail_starts_no_trial(memfit, config, tmp_path):
    done = memfit("tune", config(TUNE, fail_fold=1))
    assert done.exit_code == 4
    assert "canary_1, the trial before the search, is failed" in done.err
    [run] = RunDir.all(tmp_path / "runs", "tiny")
    assert (read_trials(run), run.state) == ([], "failed")


@pytest.mark.slow
def test_a_stopped_search_goes_on_with_resume(memfit, tmp_path):
    (tmp_path / "objective.py").write_text(OBJECTIVE)
    words = [*SEARCH, "--n-trials", "3", "--set", "tune.num_slots=1", *command("1")]
    process = subprocess.Popen(
        [sys.executable, "-m", "memfit", "tune", *map(str, words)], stdout=subprocess.DEVNULL, cwd=tmp_path
    )
    try:
        wait_until(
            lambda: any(trial.is_over for run in RunDir.all(tmp_path / "runs", "rates") for trial in read_trials(run))
        )
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 75
    finally:
        process.kill()
        process.wait()
    [run] = RunDir.all(tmp_path / "runs", "rates")
    before = [trial for trial in read_trials(run) if trial.is_over]
    assert 0 < len(before) < 3
    assert memfit("resume", run.path).exit_code == 0
    assert [trial.state for trial in read_trials(run)] == ["completed"] * 3
    assert read_trials(run)[: len(before)] == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "given nothing to search"),
        (["--param", "rate=1..2", *command(0)], "a command and no --objective"),
        (["--objective", "loss", *command(0)], "a command and no --param"),
        ([*SEARCH, "--", "true"], "the parameter rate is not used by the command"),
        (["--param", "rate", "--objective", "loss", *command(0)], "--param rate is not name=values"),
        (["config.yaml"], "has no section tune"),
        (["config.yaml", "--set", "tune.space=[]"], "tune.space"),
        (["--status", "nowhere"], "nowhere"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_three_parts(memfit, config, words, text):
    config()
    done = memfit("tune", *words)
    assert (done.exit_code, done.out) == (2, "")
    assert text in done.err
    assert "\n  rule: " in done.err
    assert "\n  do:   " in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ("num_dates, low: 30", "nun_dates, low: 30"),
        ("fold.mean_x", "fald.mean_x"),
        ("epochs: params.num_epochs", "epochs: params.nun_epochs"),
    ],
)
def test_names_that_are_not_there_are_refused_before_a_run_is_made(memfit, config, tmp_path, changed, text):
    done = memfit("tune", config(TUNE.replace(changed, text)))
    assert done.exit_code == 2
    assert text.partition(",")[0].rpartition(" ")[2].rpartition(".")[2][:4] in done.err
    assert not (tmp_path / "runs").exists()
