"""What can be said of the next run from the runs so far."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from memfit.reports import summarize, to_text, view_summary
from memfit.rundir import read

ROOT = Path(__file__).resolve().parents[2]


def recorded(run):
    """Return the summary of a run as JSON, and what its text says of forecasts."""
    console = Console(file=io.StringIO(), width=200)
    to_text(view_summary(read(run), 200, verbose=True), console)
    lines = console.file.getvalue().splitlines()
    return summarize(read(run)), [line for line in lines if line.startswith("forecast")]


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
