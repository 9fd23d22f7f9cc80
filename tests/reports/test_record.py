"""What can be said of the next run from the runs so far."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from memfit.reports import summarize, to_text, view_summary
from memfit.rundir import RunDir, read

ROOT = Path(__file__).resolve().parents[2]


def recorded(run):
    """Return the summary of a run as JSON, and what its text says of forecasts and kills."""
    console = Console(file=io.StringIO(), width=200)
    to_text(view_summary(read(run), 200, verbose=True), console)
    lines = console.file.getvalue().splitlines()
    return summarize(read(run)), [line for line in lines if line.startswith(("forecast", "OOM kills"))]


def test_kills_are_counted_over_the_experiments_runs_that_ended(tmp_path):
    runs = [RunDir.create(tmp_path, "demo", f"{number}" * 64) for number in range(4)]
    assert recorded(runs[3])[1] == []
    for run, states in zip(runs[:2], (["completed"] * 3, ["completed", "out_of_memory"]), strict=True):
        jobs = {f"fold_{i}": {"state": state, "cause": ""} for i, state in enumerate(states)}
        (run.path / "outcome.json").write_text(json.dumps({"state": "failed", "jobs": jobs}))
    (runs[2].path / "outcome.json").write_text("torn")
    found, lines = recorded(runs[3])
    assert found["kills"] == {"num_killed": 1, "num_jobs": 5, "num_runs": 2}
    assert lines == ["OOM kills 1 of 5 jobs in 2 runs of this experiment ended out of memory"]


@pytest.mark.proves("C-09")
def test_the_forecasts_error_is_told_over_jobs_that_had_a_reservation_and_completed(made):
    for number, reserved in enumerate((110, 90, 130, None, 500), 1):
        made.admit(0, f"fold_{number}", 1, reserved)
        made.job(f"fold_{number}", "failed" if number == 5 else "completed", peak_bytes=100)
    found, lines = recorded(made.run)
    assert (found["forecast_error"]["num"], found["forecast_error"]["num_under"]) == (3, 1)
    assert lines == ["forecast  10 % above the peaks (median of 3 jobs); too small: 1"]


@pytest.mark.proves("S0-22")
def test_no_text_of_memfits_speaks_of_a_risk_in_percent():
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    assert not [text for text in texts if re.search(r"\d\s?%\s*(OOM )?(risk|chance|probab)", text)]
