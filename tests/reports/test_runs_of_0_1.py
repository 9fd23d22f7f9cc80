"""Run directories that memfit 0.1 wrote stay readable: ``tests/recorded/runs_of_0_1``."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from memfit.reports import LiveRun, RunView, list_runs, print_summary, summarize
from memfit.rundir import RunDir

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "runs_of_0_1"


@pytest.fixture
def recorded(tmp_path):
    """Copies a recorded run below ``runs``, under a name as memfit gives it."""

    def copy(kind):
        path = tmp_path / "runs" / "demo" / "run_20261122_215723_55cb1260"
        shutil.copytree(RECORDED / kind, path)
        return RunDir.open(path)

    return copy


def printed(run):
    console = Console(file=io.StringIO(), width=140)
    print_summary(run, console)
    return console.file.getvalue()


def test_folds_are_shown_as_jobs_with_what_they_returned(recorded):
    run = recorded("folds")
    found, text = summarize(run), printed(run)
    assert [(job["job"], job["state"]) for job in found["jobs"]] == [
        ("prepare", "completed"), *((f"fold_{fold}", "completed") for fold in range(1, 5)),
    ]  # fmt: skip
    assert [(stage["name"], stage["counts"]) for stage in found["stages"]] == [
        ("prepare", {"completed": 1}), ("fold", {"completed": 4}),
    ]  # fmt: skip
    assert found["jobs"][1]["result"] == {"rank_ic": pytest.approx(0.0530, abs=1e-4)}
    assert found["stages"][1]["metrics"]["rank_ic"]["n"] == 4
    assert "peak 238.6 MiB in phase checkpoint (measured on fold_1); 121.7 MiB shared by all jobs" in text
    assert "mean of 4" in text and "0.0138" in text


def test_commands_are_shown_with_their_parameters_and_failures(recorded):
    run = recorded("commands")
    found, text = summarize(run), printed(run)
    assert (found["state"], found["counts"]) == ("failed", {"completed": 2, "failed": 2})
    assert [job["params"] for job in found["jobs"]][1] == {"mib": "20", "seed": "2"}
    assert "cmd_0002 mib=20 seed=2 failed: exit code 1" in text


def test_what_is_left_of_a_run_in_the_middle_is_counted(recorded):
    run = recorded("folds")
    for name in ("outcome.json", "jobs/fold_2/outcome.json"):
        (run.path / name).unlink()
    shutil.rmtree(run.path / "jobs" / "fold_4")
    view = RunView(run)
    view.read()
    rows = view.rows()
    assert view.counts(rows) == {"completed": 3, "waiting": 2}
    assert view.left("fold", rows)[0] == 2
    assert "(running)" in printed(run)


def test_its_epochs_are_told_in_lines(recorded):
    shown = Console(file=io.StringIO(), soft_wrap=True)
    live = LiveRun(shown)
    live.view = RunView(recorded("folds"))  # as a watcher that came before its first event
    live.close()
    assert "fold_1 epoch 1/3  train_loss 0.0170  valid_loss 0.0130" in shown.file.getvalue()


def test_ps_lists_it_among_the_runs_that_have_ended(recorded, tmp_path):
    run = recorded("commands")
    (found,) = list_runs(claims=tmp_path / "claims", root=run.path.parents[1])
    assert (found.state, found.counts, found.problem) == ("failed", {"completed": 2, "failed": 2}, "")
