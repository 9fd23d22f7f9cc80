"""``memfit seeds``: whether a number of experiment A is higher or lower than that of B, over the seeds of both."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console

from memfit.errors import DataError, UsageError, nearest
from memfit.reports import (
    Table,
    find_changes,
    find_differences,
    find_runs,
    format_number,
    read_numbers,
    read_settings,
    to_text,
    view_changes,
)
from memfit.rundir import RunDir, finite
from memfit.units import list_some

#: Fewer pairs of runs than this give no verdict.
LEAST_PAIRS = 5
#: The share of intervals that hold the true value.
LEVEL = 0.95
#: Why there is no verdict over seeds.
_WHY = {
    "too few pairs": "Fewer than 5 pairs prove little: run more seeds.",
    "the seed changes nothing": "All runs of a side gave one number, so that they count as one run.",
}


@dataclass(frozen=True)
class SeedComparison:
    """A number of A less that of B, over the seeds that both have, whose standard deviations are ``sd_a`` and ``sd_b``.

    The verdict is ``A is higher`` or ``A is lower`` if the interval leaves out 0, ``no difference shown`` if it holds
    0, ``too few pairs`` below 5, ``the seed changes nothing`` if neither A nor B varies. One pair has NaN for errors,
    and an infinite interval. ``pairs`` are per seed the number of A and that of B; ``unpaired`` the seeds that only A
    or only B has.
    """

    verdict: str
    mean_a: float
    mean_b: float
    sd_a: float
    sd_b: float
    difference: float
    standard_error: float
    lower: float
    upper: float
    n: int
    pairs: Mapping[int, tuple[float, float]]
    unpaired: tuple[int, ...]


def compare_seeds(a: Mapping[int, float], b: Mapping[int, float]) -> SeedComparison:
    """Return the mean difference of A and B over seeds, with the 95 % interval of Student's t, and a verdict.

    ``a`` and ``b`` are numbers of runs by their seed. Runs of one seed are a pair. The differences of the pairs are
    taken as independent draws of a normal distribution.

    Raises:
        DataError: If no seed is in both, or a number is not finite.
    """
    from scipy import stats  # slow to load

    pairs = {seed: (a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())}
    if not pairs:
        known = [list_some([*map(str, sorted(side))]) or "none" for side in (a, b)]
        raise DataError(
            f"no seed is in both: A has {known[0]}, B has {known[1]}.",
            rule="runs are paired by their seed.",
            remedy="run B with the seeds of A: memfit run CONFIG --set seed=N",
        )
    if bad := [seed for seed, pair in pairs.items() if not all(map(math.isfinite, pair))]:
        raise DataError(
            f"with seed {bad[0]} A is {pairs[bad[0]][0]} and B is {pairs[bad[0]][1]}.",
            rule="a mean needs finite numbers.",
            remedy="choose another number, or find out why this run has none",
        )
    n, differences = len(pairs), [one - other for one, other in pairs.values()]
    mean = statistics.fmean(differences)
    scale = statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.nan
    reach = scale * float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) if n > 1 else math.inf
    lower, upper = mean - reach, mean + reach
    if n < LEAST_PAIRS:
        verdict = "too few pairs"
    elif len(set(pairs.values())) == 1:
        verdict = "the seed changes nothing"
    else:
        verdict = "A is higher" if lower > 0 else "A is lower" if upper < 0 else "no difference shown"
    sides = list(zip(*pairs.values(), strict=True))
    (mean_a, mean_b), unpaired = map(statistics.fmean, sides), tuple(sorted(a.keys() ^ b.keys()))
    sd_a, sd_b = (statistics.stdev(side) if n > 1 else math.nan for side in sides)
    return SeedComparison(verdict, mean_a, mean_b, sd_a, sd_b, mean, scale, lower, upper, n, pairs, unpaired)


def _by_seed(runs: Sequence[RunDir], letter: str, metric: str) -> tuple[dict[int, RunDir], Counter[str]]:
    """Return the newest run of each seed that has the number, and why how many others are left out."""
    found: dict[int, RunDir] = {}
    left, known = Counter[str](), set[str]()
    for run in runs:
        numbers, seed = read_numbers(run), read_settings(run).get("seed")
        known |= numbers.keys()
        if run.state != "completed":
            left["not completed"] += 1
        elif metric not in numbers or seed is None:
            left[f"without {metric} or a seed"] += 1
        elif seed in found:
            left["older, of the same seed"] += 1
        else:
            found[seed] = run
    if not found and metric not in known:
        raise UsageError(
            f"{letter} has no number {metric}.",
            rule="a number is named stage.number, as the stage returned it.",
            remedy=nearest(metric, sorted(known)) if known else "run A and B to their end first",
        )
    every = list(found.values())
    for run in every[1:]:
        if changes := [one for one in find_differences(run, every[0]) if one.name != "seed"]:
            raise UsageError(
                f"the runs of {letter} differ among themselves: {'; '.join(map(str, changes))}.",
                rule="runs of one side share everything but the seed.",
                remedy="give each variant an experiment of its own: memfit run CONFIG --name VARIANT --set seed=N",
            )
    return found, left


def print_seeds(own: SeedComparison, metric: str, left_out: Mapping[str, Mapping[str, int]], console: Console) -> None:
    console.print(f"{own.verdict}: {metric}, A less B over {own.n} seeds", style="bold")
    console.print(f"  difference {own.difference:+.4g}, 95 % interval {own.lower:+.4g} to {own.upper:+.4g}, n {own.n}")
    if own.verdict in _WHY:
        console.print(f"  {_WHY[own.verdict]}")
    for letter, left in left_out.items():
        if left:
            console.print(f"  left out of {letter}: {', '.join(f'{n} {why}' for why, n in left.items())}")
    if own.unpaired:
        console.print(f"  seeds of one side only: {', '.join(map(str, own.unpaired))}")
    pairs = {**{str(seed): pair for seed, pair in own.pairs.items()}, "mean": (own.mean_a, own.mean_b)}
    rows = [(name, format_number(b), format_number(a), f"{a - b:+.4g}") for name, (a, b) in pairs.items()]
    rows.append(("sd", format_number(own.sd_b), format_number(own.sd_a), ""))
    to_text([Table(("seed", "B", "A", "A less B"), rows, ())], console)


def seeds(
    a: Annotated[str, typer.Argument(help="An experiment.", metavar="A")],
    b: Annotated[str, typer.Argument(help="The experiment that it is compared with.", metavar="B")],
    metric: Annotated[str, typer.Option(help="The number that is compared.", metavar="STAGE.NUMBER")],
    differs: Annotated[
        list[str] | None,
        typer.Option(help="Accept one more difference: a setting, code or data. Repeatable.", metavar="NAME"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the completed runs of two experiments, paired by seed. B is the baseline.

    \b
    memfit seeds adamw sgd --metric fold.rank_ic --differs params.lr

    A is higher or lower if the 95 % interval of the mean difference leaves out 0, from 5 pairs on. memfit compare A B
    lists the numbers of two runs.

    Exit codes: 0 done, whatever the verdict, 2 bad input, or a further difference without --differs.
    """
    runs, left_out = [], {}
    for letter, name in (("A", a), ("B", b)):
        side, left_out[letter] = _by_seed(find_runs(name), letter, metric)
        runs.append(side)
    found = compare_seeds(*({seed: read_numbers(run)[metric].mean for seed, run in side.items()} for side in runs))
    first = next(iter(found.pairs))
    changes = find_changes(runs[0][first], runs[1][first], differs or ())
    if as_json:
        whole = {"a": a, "b": b, "metric": metric, "left_out": left_out} | changes.to_dict() | asdict(found)
        typer.echo(json.dumps(finite(whole), indent=2, default=str))
        return
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    to_text(view_changes(changes), console)
    print_seeds(found, metric, left_out, console)
