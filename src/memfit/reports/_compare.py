"""Compare the numbers of two runs: before and after a change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from memfit.errors import UsageError, nearest
from memfit.reports._differences import read_manifests
from memfit.reports._numbers import format_number, metrics_of, summarize_metrics
from memfit.reports._parts import plain_table, say
from memfit.reports._rates import wilson_interval
from memfit.reports._summary import BAD
from memfit.rundir import RunDir, read

_NO_PROOF = "One run each proves no difference: run both with five seeds or more."


@dataclass(frozen=True)
class Number:
    """A number that the units of a stage returned."""

    mean: float  # over the units
    standard_error: float | None  # of the mean, over the units; None for one unit
    n: int  # the number of units

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {format_number(self.standard_error)}"
        return f"{format_number(self.mean)}{error} (n {self.n})"


def read_numbers(run: RunDir) -> dict[str, Number]:
    """Return the numbers that a run's stages returned, by ``stage.number``."""
    made = list(read_manifests(run).values())
    found = {}
    for stage in dict.fromkeys(one["stage"] for one in made):
        units = [metrics_of(one["result"]) for one in made if one["stage"] == stage]
        for name, (mean, sd, n) in summarize_metrics(units).items():
            found[f"{stage}.{name}"] = Number(mean, None if sd is None else sd / math.sqrt(n), n)
    return found


# Before and after


def compare_numbers(a: RunDir, b: RunDir, metric: str | None = None) -> dict[str, Any]:
    """Return as JSON the numbers that both runs have (or one of them), before (B) and after (A), and their jobs."""
    before, after = read_numbers(b), read_numbers(a)
    shared = {name: {"before": asdict(before[name]), "after": asdict(after[name])} for name in before if name in after}
    if metric is not None:
        if metric not in shared:
            raise _no_number(metric, shared)
        shared = {metric: shared[metric]}
    return {"numbers": shared, "jobs": {"before": _completed(b), "after": _completed(a)}, "verdict": None}


def _completed(run: RunDir) -> dict[str, float]:
    """Return how many jobs completed of those that ended, with Wilson's interval of the rate."""
    counts = read(run).counts
    done, n = counts.get("completed", 0), sum(counts.get(state, 0) for state in ("completed", *BAD))
    lower, upper = wilson_interval(done, n)
    return {"completed": done, "n": n, "lower": lower, "upper": upper}


def _no_number(metric: str, known: Iterable[str]) -> UsageError:
    known = list(known)
    return UsageError(
        f"A and B have no number {metric} in common.",
        rule="a number is named stage.number, as the stage returned it.",
        remedy=nearest(metric, known) if known else "run A and B to their end first",
    )


def print_before_after(found: Mapping[str, Any], console: Console) -> None:
    """Print the table of before and after, without a verdict."""
    jobs = (
        f"{one['completed']} of {one['n']} ({one['lower']:.0%} to {one['upper']:.0%})" for one in found["jobs"].values()
    )
    rows = [("jobs completed", *jobs, "")]
    for name, sides in found["numbers"].items():
        before, after = (Number(**side) for side in sides.values())
        rows.append((name, str(before), str(after), f"{after.mean - before.mean:+.4g}"))
    console.print(plain_table("number", "before (B)", "after (A)", "A less B", rows=rows, left=("number",)))
    say(console, _NO_PROOF if found["numbers"] else "No number is in both runs.")
    say(console, "±: standard error over n units. Jobs: 95 % interval of the rate.")
