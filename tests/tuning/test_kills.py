"""A study killed at random is the same study, and so is one whose trials run one at a time."""

import random
import uuid
from types import SimpleNamespace

import psutil
import pytest

import kills
from memfit.files import read_json
from memfit.rundir import liveness
from memfit.tuning import Study
from tuning.studies import KIND, SPACE, asking, config_of, ended, lay_out, left_by, saving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Two jobs fit the limit at once, where up to three want to run.
CONFIG = config_of(
    {"num_folds": 1, "num_epochs": 4, "widths_too_large": 8, "save_seconds": 0.05},
    {"n_trials": 7, "pruner_startup": 2, "num_slots": 3, "space": [*SPACE, KIND]},
    memory={"limit": "75MiB", "reserve": "16MiB"},
)
TAKEN = "it still runs and is taken over"


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """An unbroken study whose jobs run one at a time, and one that is killed four times while trials wait for memory."""
    patch, mark = pytest.MonkeyPatch(), uuid.uuid4().hex
    folder, drawn = tmp_path_factory.mktemp("studies"), random.Random(0)
    patch.setenv("MEMFIT_CLAIMS_DIR", str(folder / "claims"))
    patch.setenv("TEST_STUDY_ID", mark)
    for name in ("quiet", "killed"):
        lay_out(folder / name, CONFIG)
    hold = folder / "killed/hold"

    def holding(run):
        if ended(1)(run) and not hold.exists():
            hold.touch()  # so that two jobs are there at once, and outlive their supervisor
        return hold.exists() and sum(job.partition(".")[2].startswith("fold") for job in liveness(run).jobs) == 2

    def taken_over(run):
        return any(event["why"] == TAKEN for event in events(run, "admit"))

    quiet = kills.run(folder / "quiet", "config.yaml", "max_parallel=1", program=kills.TUNE)
    kill_at = [
        kills.Kill(kills.later(holding, drawn.uniform(0, 1)), "supervisor"),
        kills.Kill(kills.later(taken_over, drawn.uniform(0, 0.3)), "jobs", hold.unlink),
        saving(2, folder / "killed"),
        kills.Kill(lambda run: len(events(run, "run")) == 3 and asking(5)(run)),  # not as the last kill left it
    ]
    killed = kills.run(folder / "killed", kill_at=kill_at, program=kills.TUNE)
    yield SimpleNamespace(quiet=quiet, killed=killed, mark=mark)
    patch.undo()


def events(run, kind):
    return [event for event in run.events() if event["kind"] == kind]


@pytest.mark.core
@pytest.mark.proves("S2-25", "S2-53")
def test_a_study_killed_at_any_moment_is_the_unbroken_study(studies):
    quiet, killed = left_by(studies.quiet), left_by(studies.killed)
    assert killed == quiet
    states = {name: one["state"] for name, one in quiet.items() if name.startswith("trial") and "state" in one}
    assert len(states) == 7
    assert {"completed", "pruned"} <= set(states.values())
    refusals = [one["why"] for trial in Study.open(studies.quiet).trials for one in trial.refused]
    assert any("by its estimate" in why for why in refusals)
    assert any("of kind b must be 3 or more" in why for why in refusals)


def test_how_trials_are_admitted_changes_no_study(studies):
    """The comparison above says nothing if both ran alike."""
    assert {event["num_running"] for event in events(studies.quiet, "admit")} == {1}
    assert max(event["num_running"] for event in events(studies.killed, "admit")) == 2
    assert events(studies.killed, "wait")


def test_each_kill_met_what_it_was_to_meet(studies):
    starts = [event["state"] for event in events(studies.killed, "run") if event["state"] in ("started", "continued")]
    assert starts == ["started"] + 3 * ["continued"]
    retried = [event["reason"] for event in events(studies.killed, "retry")]
    assert retried and all(one.startswith("its watcher died") for one in retried)
    assert any(event["why"] == TAKEN for event in events(studies.killed, "admit"))
    assert not events(studies.quiet, "retry")


@pytest.mark.parametrize("name", ["quiet", "killed"])
def test_each_trial_reports_each_epoch_once_up_to_its_end(studies, name):
    for trial in Study.open(getattr(studies, name)).trials:
        last = 4 if trial.state == "completed" else int(trial.cause.rpartition(" ")[2])
        assert list(trial.intermediate) == list(range(1, last + 1))


@pytest.mark.parametrize("name", ["quiet", "killed"])
def test_the_stage_that_all_trials_share_ran_in_one_of_them(studies, name):
    run = getattr(studies, name)
    assert [path.parent.name for path in run.path.glob("jobs/*.prepare/job.json")] == ["trial_0000.prepare"]
    made = [read_json(path) for path in sorted(run.path.glob("checkpoints/*.prepare.json"))]
    assert len(made) == 7
    assert [one["reused_from"] is None for one in made] == [True] + 6 * [False]


def test_nothing_of_a_study_runs_on(studies):
    for run in (studies.quiet, studies.killed):
        assert liveness(run).jobs == []
        assert all(one.is_over for one in Study.open(run).trials)
        assert read_json(run.path / "outcome.json")["state"] == "completed"
    assert [process for process in psutil.process_iter() if is_of(process, studies.mark)] == []


def is_of(process, mark):
    try:
        return process.environ().get("TEST_STUDY_ID") == mark and process.pid != psutil.Process().pid
    except psutil.Error:
        return False
