"""``memfit tune`` as a command: what it searches, what it prints, its exit codes."""

import json
import sys

import pytest

from cli.conftest import check_refused
from memfit.rundir import RunDir
from memfit.tuning import read_trial, read_trials

FUNCTION = """
from memfit.rundir import record

def train(ctx, rate: float = 0.5, num_epochs: int = 3) -> dict:
    for epoch in range(1, num_epochs + 1):
        record("epoch", epoch=epoch, num_epochs=num_epochs, loss=rate / epoch)
    return {"loss": rate}
"""
TUNE = """
experiment: searched
target: job:train
tune:
  space:
    - {name: params.rate, low: 0.1, high: 0.9}
  objective: train.loss
  direction: minimize
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
    (run.path / "trials/trial_0004.json").unlink()  # as if it had been stopped before that
    assert memfit("resume", run.path).exit_code == 0
    assert [trial.state for trial in read_trials(run)] == ["completed"] * 5


@pytest.mark.slow
def test_flags_set_what_the_section_names_and_short_trials_come_first(memfit, tmp_path):
    (tmp_path / "job.py").write_text(FUNCTION)
    (tmp_path / "search.yaml").write_text(TUNE)
    words = ["--max-epochs", 2, "--n-trials", 2, "--study-name", "2.50", "--set", "runs_dir=here"]
    assert memfit("tune", "search.yaml", *words).exit_code == 0
    [run] = RunDir.all(tmp_path / "here", "2.50")
    assert read_trial(run, "canary_1").state == "completed"
    assert read_trial(run, "canary_3") is None  # the trials are shorter
    assert [(trial.state, trial.epochs) for trial in read_trials(run)] == [("completed", 2)] * 2


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
    check_refused(memfit("tune", *words), text)
