"""Compare the numbers of runs: before and after a change, and over several seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from memfit.errors import UsageError, nearest
from memfit.files import read_json
from memfit.memory import Footprint
from memfit.reports._differences import Changes, find_changes, find_differences, read_manifests, read_settings
from memfit.reports._numbers import format_number, metrics_of, or_dash, plain_table, say, summarize_metrics
from memfit.reports._rates import SeedComparison, compare_seeds, wilson_interval
from memfit.reports._summary import BAD
from memfit.rundir import RunDir, read
from memfit.units import format_bytes

_NO_PROOF = "One run each proves no difference: run both with five seeds or more, and give --seeds."
#: Why there is no verdict over seeds.
_WHY = {
    "too few pairs": "Fewer than 5 pairs prove little: run more seeds.",
    "the seed changes nothing": "All runs of a side gave one number, so that they count as one run.",
}


@dataclass(frozen=True)
class Number:
    """A number that the units of a stage returned.

    Attributes:
        mean: Over the units.
        standard_error: Of the mean, over the units; None for one unit.
        n: The number of units.
    """

    mean: float
    standard_error: float | None
    n: int

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {format_number(self.standard_error)}"
        return f"{format_number(self.mean)}{error} (n {self.n})"


def read_numbers(run: RunDir) -> dict[str, Number]:
    """Return the numbers that a run's stages returned, by ``stage.number``.

    Raises:
        DamagedError: If a manifest is damaged.
    """
    made = list(read_manifests(run).values())
    found = {}
    for stage in dict.fromkeys(one["stage"] for one in made):
        units = [metrics_of(one["result"]) for one in made if one["stage"] == stage]
        for name, (mean, sd, n) in summarize_metrics(units).items():
            found[f"{stage}.{name}"] = Number(mean, None if sd is None else sd / math.sqrt(n), n)
    return found


# Before and after


def compare_numbers(a: RunDir, b: RunDir, metric: str | None = None) -> dict[str, Any]:
    """Return as JSON the numbers that both runs have (or one of them), before (B) and after (A), and the jobs of each.

    Raises:
        UsageError: If they do not share this number.

    Example:
        >>> import pathlib, tempfile
        >>> run = RunDir.create(pathlib.Path(tempfile.mkdtemp()), "demo", "0" * 64)
        >>> compare_numbers(run, run)["jobs"]["before"]
        {'completed': 0, 'n': 0, 'lower': 0.0, 'upper': 1.0}
    """
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


# A plan and a run


@dataclass(frozen=True)
class _Side:
    """What one job takes on a node, forecast or measured: the lines that its ranks share, and the others."""

    job: str
    num_ranks: int
    of_ranks: Mapping[str, int]
    others: Mapping[str, int]


def compare_plan(plan: Path | RunDir, run: RunDir) -> dict[str, Any]:
    """Return as JSON what a plan forecast and what the run took, line by line, for the largest job of each stage.

    ``error`` is the forecast against what was measured, as a share of it; None where one of the two is not known.

    Args:
        plan: What ``memfit run --plan --out`` wrote, or the ``plan.json`` of a run; or a run, whose peaks then stand
            for the forecast.
        run: The run. Where its jobs have another number of ranks on a node, one rank of each is compared.

    Raises:
        UsageError: If there is no such file, it is no plan, or the run has no measured job of a stage that was planned.
        DamagedError: If the file is no JSON.
    """
    measured, lines = _measure(run), []
    before, name = (_measure(plan), plan.path) if isinstance(plan, RunDir) else (_read_plan(plan), plan)
    largest = max(measured.values(), key=lambda one: one.of_ranks["host, peak"], default=None)
    for stage, side in before.items():
        if (own := measured.get(stage) if stage else largest) is not None:
            lines += list(_against(side, own))
    if not lines:
        raise UsageError(
            f"no job of {run.path} was measured that {name} has a forecast of.",
            rule="forecasts are compared with the peaks of the same stages.",
            remedy="compare it with a run of the config that was planned",
        )
    return {"plan": str(name), "run": str(run.path), "lines": lines}


def _measure(run: RunDir) -> dict[str, _Side]:
    """Return what the largest measured job of each stage of a run took."""
    found: dict[str, _Side] = {}
    for job in read(run).jobs.values():
        if not job.footprint:
            continue
        taken = Footprint.from_dict(job.footprint)
        host = {f"host, {phase}": peak.private_bytes for phase, peak in taken.phases.items()}
        host |= {"host, peak": taken.private_bytes, "/dev/shm": taken.parts.get("shared_memory", 0)}
        others = {"mapped": taken.shared_bytes} | ({"GPU": taken.bytes_per_device} if taken.device_bytes else {})
        if job.stage not in found or taken.private_bytes > found[job.stage].of_ranks["host, peak"]:
            found[job.stage] = _Side(job.id, max(1, len(job.ranks)), host, others)
    return found


def _read_plan(file: Path) -> dict[str, _Side]:
    """Return what a plan forecasts of each stage; of a run's own, for whichever stage it is, by an empty name."""
    found = read_json(file)
    if found is None:
        raise UsageError(
            f"there is no plan {file}.",
            rule="a plan is the file of: memfit run CONFIG --plan --out plan.json.",
            remedy="name such a file, or a run's own plan.json",
        )
    try:
        stages = found["stages"] if "stages" in found else [{"name": "", "footprint": found["footprint"]}]
        return {one["name"]: _forecast(one) for one in stages if one.get("footprint") or one.get("forecast")}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{file} is no plan: {type(error).__name__}: {error}.",
            rule="a plan is the file of: memfit run CONFIG --plan --out plan.json.",
            remedy="make it again with this version of memfit",
        ) from error


def _forecast(stage: Mapping[str, Any]) -> _Side:
    forecast = stage.get("forecast")
    if forecast is None:
        return _Side("", 0, {"host, peak": int(stage["footprint"]["private_bytes"])}, {})
    peaks, lines = forecast["phases"], forecast["lines"]
    host = {f"host, {phase}": size for phase, size in peaks.items()} | {"host, peak": max(peaks.values())}
    host["/dev/shm"] = sum(line["node_bytes"] for line in lines if line["in_shm"])
    on_gpu = [line["amount"]["bytes"] for line in lines if line["amount"]["place"] == "device"]
    others = {"mapped": forecast["mapped_bytes"]} | ({"GPU": max(on_gpu)} if on_gpu else {})
    return _Side("", forecast["layout"]["tasks_per_node"], host, others)


def _against(before: _Side, after: _Side) -> Iterator[dict[str, Any]]:
    """Yield the lines of a stage: its phases, its peak, /dev/shm, what is mapped, and each GPU."""
    is_same = before.num_ranks in (0, after.num_ranks)
    of, by, among = ("a node", 1, 1) if is_same else ("each rank", before.num_ranks, after.num_ranks)
    rows = [(one, of, by, among, before.of_ranks, after.of_ranks) for one in {**before.of_ranks, **after.of_ranks}]
    others = {**before.others, **after.others}
    scopes = {"mapped": "a node", "GPU": "each GPU"}
    rows += [(one, scopes[one], 1, 1, before.others, after.others) for one in others]
    for name, scope, divided, shared, planned, taken in rows:
        forecast = planned[name] // divided if name in planned else None
        measured = taken[name] // shared if name in taken else None
        error = forecast / measured - 1 if forecast is not None and measured else None
        sizes = {"forecast_bytes": forecast, "measured_bytes": measured, "error": error}
        yield {"job": after.job, "line": name, "of": scope, **sizes}


def print_plan_comparison(found: Mapping[str, Any], console: Console) -> None:
    """Print the table of forecast and measurement, and what neither has."""
    rows = []
    for line in found["lines"]:
        sizes = [or_dash(line[name], format_bytes) for name in ("forecast_bytes", "measured_bytes")]
        rows.append((f"{line['job']}: {line['line']}", line["of"], *sizes, or_dash(line["error"], "{:+.0%}".format)))
    console.print(plain_table("line", "of", "forecast", "measured", "error", rows=rows, left=("line", "of")))
    say(console, "The next plan of this config counts with these peaks.  -: not forecast, or not seen in the run.")


# Seeds


@dataclass(frozen=True)
class SeedRuns:
    """Two experiments compared over seeds: what differs, the number, the statistics, and which runs were left out."""

    metric: str
    changes: Changes
    statistics: SeedComparison
    left_out: Mapping[str, Mapping[str, int]]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {"metric": self.metric, "left_out": self.left_out} | self.changes.to_dict() | self.statistics.to_dict()


def compare_over_seeds(a: Sequence[RunDir], b: Sequence[RunDir], metric: str, named: Sequence[str] = ()) -> SeedRuns:
    """Compare a number of two experiments over the seeds that both ran to the end.

    Args:
        a: The runs of A, newest first; of one seed, the newest counts.
        b: The runs of B.
        metric: The number, as ``stage.number``.
        named: The differences that the user named.

    Raises:
        UsageError: If the runs of a side differ in more than the seed, or A and B in more than one thing not named.
        DataError: If no seed is in both.
    """
    (runs_a, left_a), (runs_b, left_b) = (_by_seed(side, letter, metric) for side, letter in ((a, "A"), (b, "B")))
    means = [{seed: read_numbers(run)[metric].mean for seed, run in runs.items()} for runs in (runs_a, runs_b)]
    statistics = compare_seeds(*means)
    first = next(iter(statistics.pairs))
    changes = find_changes(runs_a[first], runs_b[first], named)
    return SeedRuns(metric, changes, statistics, {"A": left_a, "B": left_b})


def _by_seed(runs: Sequence[RunDir], letter: str, metric: str) -> tuple[dict[int, RunDir], Counter[str]]:
    """Return the newest run of each seed that has the number, and why how many others are left out."""
    found: dict[int, RunDir] = {}
    left, known = Counter[str](), dict[str, Number]()
    for run in runs:
        numbers, seed = read_numbers(run), read_settings(run).get("seed")
        known |= numbers
        if run.state != "completed":
            left["not completed"] += 1
        elif metric not in numbers or seed is None:
            left[f"without {metric} or a seed"] += 1
        elif seed in found:
            left["older, of the same seed"] += 1
        else:
            found[seed] = run
    if not found and metric not in known:
        raise _no_number(metric, known)
    every = list(found.values())
    for run in every[1:]:
        if changes := [one for one in find_differences(run, every[0]) if one.name != "seed"]:
            raise UsageError(
                f"the runs of {letter} differ among themselves: {'; '.join(map(str, changes))}.",
                rule="runs of one side share everything but the seed.",
                remedy="give each variant an experiment of its own: memfit run CONFIG --name VARIANT --set seed=N",
            )
    return found, left


def print_seeds(found: SeedRuns, console: Console) -> None:
    """Print the verdict, the interval, and the table of seeds."""
    own = found.statistics
    say(console, f"{own.verdict}: {found.metric}, A less B over {own.n} seeds", "bold")
    interval = f"95 % interval {own.lower:+.4g} to {own.upper:+.4g}, n {own.n}"
    say(console, f"  difference {own.difference:+.4g}, {interval}")
    if own.verdict in _WHY:
        say(console, f"  {_WHY[own.verdict]}")
    for letter, left in found.left_out.items():
        if left:
            say(console, f"  left out of {letter}: {', '.join(f'{n} {why}' for why, n in left.items())}")
    if own.unpaired:
        say(console, f"  seeds of one side only: {', '.join(map(str, own.unpaired))}")
    pairs = {**{str(seed): pair for seed, pair in own.pairs.items()}, "mean": (own.mean_a, own.mean_b)}
    rows = [(name, format_number(b), format_number(a), f"{a - b:+.4g}") for name, (a, b) in pairs.items()]
    rows.append(("sd", format_number(own.sd_b), format_number(own.sd_a), ""))
    console.print(plain_table("seed", "B", "A", "A less B", rows=rows))
