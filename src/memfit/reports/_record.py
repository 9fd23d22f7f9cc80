"""How far memfit could be relied on so far: jobs killed for memory over past runs, and forecasts against peaks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memfit.errors import MemfitError
from memfit.reports._run_view import JobRow
from memfit.rundir import RunDir, read_json

#: So many runs of an experiment are counted, the newest first.
_MOST_RUNS = 50
_Z_95 = 1.959964


@dataclass(frozen=True)
class Kills:
    """How many jobs ended for lack of memory, with what can be said of the next one.

    Attributes:
        num_killed: Jobs that ended out of memory.
        num_jobs: Jobs that ended at all.
        num_runs: Runs that were counted.
        low, high: The 95 % interval of the share (Wilson's score interval).

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927).
    """

    num_killed: int
    num_jobs: int
    num_runs: int
    low: float
    high: float

    @classmethod
    def count(cls, num_killed: int, num_jobs: int, num_runs: int) -> Kills:
        """The interval that follows from a count.

        >>> kills = Kills.count(0, 20, 4)
        >>> kills.low, round(kills.high, 3)
        (0.0, 0.161)
        """
        if not num_jobs:
            return cls(0, 0, num_runs, 0.0, 1.0)
        share, square = num_killed / num_jobs, _Z_95**2
        middle = share + square / (2 * num_jobs)
        spread = _Z_95 * math.sqrt(share * (1 - share) / num_jobs + square / (4 * num_jobs**2))
        bottom = 1 + square / num_jobs
        low = 0.0 if num_killed == 0 else max(0.0, (middle - spread) / bottom)
        return cls(num_killed, num_jobs, num_runs, low, min(1.0, (middle + spread) / bottom))

    def explain(self) -> str:
        """The count in words: no share without the sample that it rests on.

        >>> Kills.count(1, 40, 3).explain()
        '1 of 40 jobs in 3 runs of this experiment ended out of memory (95 % interval 0.4 to 12.9 %)'
        """
        runs = "1 run" if self.num_runs == 1 else f"{self.num_runs} runs"
        interval = f"(95 % interval {100 * self.low:.1f} to {100 * self.high:.1f} %)"
        return f"{self.num_killed} of {self.num_jobs} jobs in {runs} of this experiment ended out of memory {interval}"


def count_kills(run: RunDir) -> Kills:
    """The count over this run's experiment; runs that cannot be read or have not ended are left out."""
    num_killed = num_jobs = num_runs = 0
    for path in sorted(run.path.parent.glob("run_*"), reverse=True)[:_MOST_RUNS]:
        try:
            jobs = (read_json(path / "outcome.json") or {}).get("jobs")
        except MemfitError:
            continue
        if isinstance(jobs, dict):
            states = [job.get("state") for job in jobs.values() if isinstance(job, dict)]
            ended = [state for state in states if state not in ("pending", "running", None)]
            num_runs, num_jobs = num_runs + bool(ended), num_jobs + len(ended)
            num_killed += ended.count("out_of_memory")
    return Kills.count(num_killed, num_jobs, num_runs)


@dataclass(frozen=True)
class ForecastError:
    """By how much reservations missed the peaks, as shares of the peaks: above 0 is too much, below too little.

    Attributes:
        num: Jobs with a reservation and a peak.
        num_under: Those whose peak was above the reservation.
        low, median, high: The errors.
    """

    num: int
    num_under: int
    low: float
    median: float
    high: float

    def explain(self) -> str:
        """The errors in words.

        >>> ForecastError(8, 0, 0.01, 0.1, 0.25).explain()
        'reservations were 10 % above the peaks (median; 1 to 25 % over 8 jobs), 0 of them too small'
        """
        side = "above" if self.median >= 0 else "below"
        spread = f"{100 * self.low:.0f} to {100 * self.high:.0f} % over {self.num} job{'s' if self.num > 1 else ''}"
        return (
            f"reservations were {abs(100 * self.median):.0f} % {side} the peaks (median; {spread}), "
            f"{self.num_under} of them too small"
        )


def forecast_error(rows: Sequence[JobRow]) -> ForecastError | None:
    """The errors of a run's completed jobs; None when none had a reservation."""
    errors = [
        row.reserved_bytes / row.status.peak_bytes - 1
        for row in rows
        if row.reserved_bytes and row.status.peak_bytes and row.status.state == "completed"
    ]
    if not errors:
        return None
    num_under = sum(error < 0 for error in errors)
    return ForecastError(len(errors), num_under, min(errors), statistics.median(errors), max(errors))


def to_dict(run: RunDir, rows: Sequence[JobRow]) -> dict[str, Any]:
    """Both as JSON."""
    error = forecast_error(rows)
    return {"kills": asdict(count_kills(run)), "forecast_error": asdict(error) if error else None}
