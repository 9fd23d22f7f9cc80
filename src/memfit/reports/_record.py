"""How well memfit kept its word: jobs killed for memory over past runs, and reservations against peaks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from memfit.errors import MemfitError
from memfit.reports._run_view import JobRow
from memfit.rundir import RunDir, read_json

#: The newest runs of an experiment, which are counted.
_MOST_RUNS = 50
_Z_95 = 1.959964


def interval(num: int, num_all: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson's score interval).

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927).

    >>> [round(bound, 3) for bound in interval(0, 20)], interval(0, 0)
    ([0.0, 0.161], (0.0, 1.0))
    """
    if not num_all:
        return 0.0, 1.0
    square = _Z_95**2
    middle = (num + square / 2) / (num_all + square)
    spread = _Z_95 * math.sqrt(num * (num_all - num) / num_all + square / 4) / (num_all + square)
    return (max(0.0, middle - spread) if num else 0.0), (min(1.0, middle + spread) if num < num_all else 1.0)


def count_kills(run: RunDir) -> dict[str, Any]:
    """How many jobs of this run's experiment ended out of memory; runs that have not ended are left out."""
    num_killed = num_jobs = num_runs = 0
    for path in sorted(run.path.parent.glob("run_*"), reverse=True)[:_MOST_RUNS]:
        try:
            jobs = (read_json(path / "outcome.json", {"jobs": {str: {"state": str}}}) or {}).get("jobs", {})
        except MemfitError:
            continue
        ended = [job["state"] for job in jobs.values() if job["state"] not in ("pending", "running")]
        num_runs, num_jobs = num_runs + bool(ended), num_jobs + len(ended)
        num_killed += ended.count("out_of_memory")
    low, high = interval(num_killed, num_jobs)
    return {"num_killed": num_killed, "num_jobs": num_jobs, "num_runs": num_runs, "low": low, "high": high}


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
        lines.append(("record", f"{text} (95 % interval {100 * kills['low']:.1f} to {100 * kills['high']:.1f} %)"))
    return lines
