"""``memfit seeds``: whether a number of experiment A is higher or lower than that of B, over the seeds of both."""

from __future__ import annotations

import json
import math
import statistics
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
    0, ``too few pairs`` below 5, ``the seed changes nothing`` if neither A nor B varies. One pair has an infinite
    interval. ``pairs`` are per seed the number of A and that of B.
    """

    verdict: str
    sd_a: float
    sd_b: float
    difference: float
    lower: float
    upper: float
    n: int
    pairs: Mapping[int, tuple[float, float]]


def compare_seeds(a: Mapping[int, float], b: Mapping[int, float]) -> SeedComparison:
    """Return the mean difference of A and B over seeds, with the 95 % interval of Student's t, and a verdict.

    ``a`` and ``b`` are numbers of runs by their seed. Runs of one seed are a pair. The differences of the pairs are
    taken as independent draws of a normal distribution.

    Raises:
        DataError: If no seed is in both, or a number is not finite.
    """
    from scipy import stats  # slow to load

    pairs = {seed: (a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())}
    bad = [seed for seed, pair in pairs.items() if not all(map(math.isfinite, pair))]
    if bad or not pairs:
        known = [list_some([*map(str, sorted(side))]) or "none" for side in (a, b)]
        raise DataError(
            f"with seed {bad[0]} A is {pairs[bad[0]][0]} and B is {pairs[bad[0]][1]}."
            if bad
            else f"no seed is in both: A has {known[0]}, B has {known[1]}.",
            rule="runs are paired by their seed, and a mean needs finite numbers.",
            remedy="run B with the seeds of A: memfit run CONFIG --set seed=N",
        )
    n, sides = len(pairs), [*zip(*pairs.values(), strict=True)]
    differences = [one - other for one, other in pairs.values()]
    sd_a, sd_b, sd = (statistics.stdev(one) if n > 1 else math.nan for one in (*sides, differences))
    mean = statistics.fmean(differences)
    reach = sd / math.sqrt(n) * float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) if n > 1 else math.inf
    if n < LEAST_PAIRS:
        verdict = "too few pairs"
    elif len(set(pairs.values())) == 1:
        verdict = "the seed changes nothing"
    else:
        verdict = "A is higher" if mean > reach else "A is lower" if mean < -reach else "no difference shown"
    return SeedComparison(verdict, sd_a, sd_b, mean, mean - reach, mean + reach, n, pairs)


def _by_seed(runs: Sequence[RunDir], letter: str, metric: str) -> dict[int, RunDir]:
    """Return the newest completed run of each seed that has the number."""
    found: dict[int, RunDir] = {}
    known = set[str]()
    for run in runs:
        numbers, seed = read_numbers(run), read_settings(run).get("seed")
        known |= numbers.keys()
        if run.state == "completed" and metric in numbers and seed is not None:
            found.setdefault(seed, run)
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
    return found


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
    runs = [_by_seed(find_runs(name), letter, metric) for letter, name in (("A", a), ("B", b))]
    found = compare_seeds(*({seed: read_numbers(run)[metric].mean for seed, run in side.items()} for side in runs))
    first = next(iter(found.pairs))
    changes = find_changes(runs[0][first], runs[1][first], differs or ())
    if as_json:
        whole = {"a": a, "b": b, "metric": metric} | changes.to_dict() | asdict(found)
        typer.echo(json.dumps(finite(whole), indent=2, default=str))
        return
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    to_text(view_changes(changes), console)
    console.print(f"{found.verdict}: {metric}, A less B over {found.n} seeds", style="bold")
    interval = f"{found.difference:+.4g}, 95 % interval {found.lower:+.4g} to {found.upper:+.4g}"
    console.print(f"  difference {interval}, n {found.n}")
    if found.verdict in _WHY:
        console.print(f"  {_WHY[found.verdict]}")
    rows = [(str(seed), format_number(y), format_number(x), f"{x - y:+.4g}") for seed, (x, y) in found.pairs.items()]
    rows.append(("sd", format_number(found.sd_b), format_number(found.sd_a), ""))
    to_text([Table(("seed", "B", "A", "A less B"), rows, ())], console)
