"""What can be said of the next run from the runs so far."""

import json
import re
from pathlib import Path

import pytest

from memfit.reports import count_kills, explain_record, forecast_error
from memfit.rundir import JobState, RunDir

ROOT = Path(__file__).resolve().parents[2]


def row(peak, reserved, state="completed"):
    return JobState("fold_1", own=state, peak_bytes=peak, forecast_bytes=reserved)


def test_kills_are_counted_over_the_experiments_runs_that_ended(tmp_path):
    runs = [RunDir.create(tmp_path, "demo", f"{number}" * 64) for number in range(4)]
    for run, states in zip(runs[:2], (["completed"] * 3, ["completed", "out_of_memory"]), strict=True):
        jobs = {f"fold_{i}": {"state": state, "cause": ""} for i, state in enumerate(states)}
        (run.path / "outcome.json").write_text(json.dumps({"state": "failed", "jobs": jobs}))
    (runs[2].path / "outcome.json").write_text("torn")
    found = count_kills(runs[3])
    assert (found["num_killed"], found["num_jobs"], found["num_runs"]) == (1, 5, 2)
    assert explain_record(runs[3], []) == [
        ("OOM kills", "1 of 5 jobs in 2 runs of this experiment ended out of memory")
    ]


def test_a_record_without_a_kill_is_in_the_json_form_alone(tmp_path):
    run = RunDir.create(tmp_path, "demo", "0" * 64)
    (run.path / "outcome.json").write_text('{"state": "completed", "jobs": {"fold_1": {"state": "completed"}}}')
    assert count_kills(run)["num_jobs"] == 1 and explain_record(run, []) == []


@pytest.mark.proves("C-09")
def test_the_forecasts_error_is_told_over_jobs_that_had_a_reservation_and_completed(tmp_path):
    rows = [row(100, 110), row(100, 90), row(100, 130), row(100, None), row(100, 500, "failed")]
    found = forecast_error(rows)
    assert (found["num"], found["num_under"], round(found["median"], 6)) == (3, 1, 0.1)
    assert forecast_error([row(100, None)]) is None
    told = [("forecast", "10 % above the peaks (median of 3 jobs); too small: 1")]
    assert explain_record(RunDir.create(tmp_path, "demo", "0" * 64), rows) == told


@pytest.mark.proves("S0-22")
def test_no_text_of_memfits_speaks_of_a_risk_in_percent():
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    assert not [text for text in texts if re.search(r"\d\s?%\s*(OOM )?(risk|chance|probab)", text)]
