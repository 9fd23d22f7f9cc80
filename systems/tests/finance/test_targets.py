"""What a run lacks of the user's targets, and the stored run that proves what it reached."""

import hashlib

import pytest

from memfit.errors import ConfigError
from memfit.files import write_json
from memfit.rundir import RunDir
from memfit_workloads.finance import judge_targets

TARGETS = """\
fold.rank_ic: {target: 0.04, milestone: Phase A}
fold.loss: {target: 0.1, direction: lower}
fold.sharpe: {target: 0.05}
"""


@pytest.fixture
def judge(tmp_path):
    """Judges a run of two folds by targets."""
    (tmp_path / "targets.yaml").write_text(TARGETS)

    def found(*, state="completed", rank_ics=(0.05, 0.04), loss=0.3):
        run = RunDir.create(tmp_path / "runs", "new", "ab" * 32, {"kind": "stages"})
        write_json(run.path / "outcome.json", {"state": state})
        for number, value in enumerate(rank_ics, 1):
            made = {"stage": "fold", "job": f"fold_{number}", "parts": {}, "code": {}, "versions": {}, "digest": "d"}
            made |= {"result": {"rank_ic": value, "loss": loss}}
            write_json(run.path / "checkpoints" / f"fold_{number}.json", made)
        return run, judge_targets(tmp_path / "targets.yaml", run)

    return found


@pytest.mark.proves("S2-51")
def test_a_target_is_reached_by_a_stored_run_with_its_evidence(judge):
    run, (reached, open_, unknown) = judge()
    files = sorted((run.path / "checkpoints").glob("fold_*.json"))
    sha = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    assert reached["evidence"] == {"run": str(run.path), "config": "ab" * 32, "sha256": sha}
    assert (reached["mean"], reached["n"], reached["milestone"]) == (pytest.approx(0.045), 2, "Phase A")
    assert reached["gap"] == pytest.approx(-0.005)
    assert (open_["gap"], open_["evidence"]) == (pytest.approx(0.2), None)
    assert (unknown["mean"], unknown["gap"], unknown["evidence"]) == (None, None, None)


@pytest.mark.parametrize(("change", "gap"), [({"state": "failed"}, -0.005), ({"rank_ics": (0.03, 0.03)}, 0.01)])
def test_a_run_that_failed_or_falls_short_proves_nothing(judge, change, gap):
    _, (found, *_) = judge(**change)
    assert (found["gap"], found["evidence"]) == (pytest.approx(gap), None)


@pytest.mark.proves("S2-30")
def test_a_number_that_just_reaches_its_target_in_either_direction_is_reached(judge):
    _, (higher, lower, _) = judge(rank_ics=(0.04, 0.04), loss=0.1)
    assert [one["gap"] for one in (higher, lower)] == [0, 0]
    assert higher["evidence"] and lower["evidence"]


@pytest.mark.parametrize("text", ["fold.a: {target: high}", "fold.a: {target: 1, direction: up}", "fold.a: 0.04"])
def test_a_bad_file_of_targets_is_refused(tmp_path, text):
    (tmp_path / "targets.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"fold\.a"):
        judge_targets(tmp_path / "targets.yaml", RunDir.create(tmp_path / "runs", "new", "ab" * 32, {}))
