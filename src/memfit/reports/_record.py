"""How well memfit kept its word: jobs killed for memory over past runs, and reservations against peaks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from memfit.errors import MemfitError
from memfit.reports._run_view import JobRow
from memfit.rundir import RunDir, read_json

#: The newest runs of an experiment, which are counted.
_MOST_RUNS = 50


def count_kills(run: RunDir) -> dict[str, Any]:
    """How many jobs of this run's experiment ended out of memory; runs that have not ended are left out."""
    ended: list[list[str]] = []
    for other in RunDir.all(run.path.parents[1], run.path.parent.name)[:_MOST_RUNS]:
        with suppress(MemfitError):
            jobs = (read_json(other.path / "outcome.json", {"jobs": {str: {"state": str}}}) or {}).get("jobs", {})
            ended.append([job["state"] for job in jobs.values() if job["state"] not in ("pending", "running")])
    states = [state for run_states in ended for state in run_states]
    return {"num_killed": states.count("out_of_memory"), "num_jobs": len(states), "num_runs": sum(map(bool, ended))}


def forecast_error(rows: Sequence[JobRow]) -> dict[str, Any] | None:
    """By how much the reservations of completed jobs missed their peaks, as shares of the peaks; None without any.

    Above 0 a reservation was too large, below 0 too small.
    """
    errors = [
        row.reserved_bytes / row.status.peak_bytes - 1
        for row in rows
        if row.reserved_bytes and row.status.peak_bytes and row.status.state == "completed"
    ]
    if not errors:
        return None
    num_under = sum(error < 0 for error in errors)
    spread = {"low": min(errors), "median": statistics.median(errors), "high": max(errors)}
    return {"num": len(errors), "num_under": num_under, **spread}


def explain(run: RunDir, rows: Sequence[JobRow]) -> list[tuple[str, str]]:
    """Both in words, with the sample that each rests on; kills only if there were any."""
    lines, error, kills = [], forecast_error(rows), count_kills(run)
    if error is not None:
        side = "above" if error["median"] >= 0 else "below"
        jobs = f"{error['num']} job{'s' if error['num'] > 1 else ''}"
        text = f"reservations were {abs(100 * error['median']):.0f} % {side} the peaks (median of {jobs})"
        lines.append(("forecast", f"{text}; too small: {error['num_under']}"))
    if kills["num_killed"]:
        runs = "1 run" if kills["num_runs"] == 1 else f"{kills['num_runs']} runs"
        text = f"{kills['num_killed']} of {kills['num_jobs']} jobs in {runs} of this experiment ended out of memory"
        lines.append(("record", text))
    return lines
