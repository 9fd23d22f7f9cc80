"""Statistics of runs: an interval for a rate, and whether A is higher than B over paired seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memfit.errors import DataError, MissingExtraError
from memfit.units import list_some

#: Fewer pairs of runs than this give no verdict.
LEAST_PAIRS = 5
#: The share of intervals that hold the true value.
LEVEL = 0.95


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Return the lower and upper end of a 95 % interval for a rate, by Wilson's score method.

    It stays within 0 and 1, and has a width also where all or none succeeded: one success of one proves little.

    Args:
        successes: How many of the n succeeded.
        n: How many were tried. With 0 nothing is known: the interval is 0 to 1.

    Source:
        E. Wilson, Probable inference, the law of succession, and statistical inference (1927).

    Example:
        >>> [round(end, 3) for end in wilson_interval(1, 1)], [round(end, 3) for end in wilson_interval(20, 20)]
        ([0.207, 1.0], [0.839, 1.0])
    """
    if n == 0:
        return 0.0, 1.0
    squared = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
    middle = successes + squared / 2
    reach = math.sqrt(squared * (successes * (n - successes) / n + squared / 4))
    lower, upper = (middle - reach) / (n + squared), (middle + reach) / (n + squared)
    return (lower if successes else 0.0, upper if successes < n else 1.0)  # exact, where rounding leaves 1e-17


@dataclass(frozen=True)
class SeedComparison:
    """A number of A less that of B, over the seeds that both have.

    Attributes:
        verdict: ``A is higher`` or ``A is lower`` if the interval leaves out 0, ``no difference shown`` if it holds 0,
            ``too few pairs`` below 5, ``the seed changes nothing`` if neither A nor B varies.
        sd_a: Standard deviation of A over the paired seeds: how stable it is. NaN for one pair.
        sd_b: The same of B.
        difference: The mean of A less B over the pairs.
        standard_error: Of the difference; NaN for one pair.
        lower: Lower end of its interval; -inf for one pair.
        upper: Upper end; inf for one pair.
        n: The number of pairs.
        pairs: Per seed the number of A and that of B.
        unpaired: The seeds that only A or only B has.
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

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return asdict(self)


def compare_seeds(a: Mapping[int, float], b: Mapping[int, float]) -> SeedComparison:
    """Return the mean difference of A and B over seeds, with the 95 % interval of Student's t, and a verdict.

    Runs of one seed are a pair. The differences of the pairs are taken as independent draws of a normal distribution.

    Args:
        a: The number of each run of A, by its seed.
        b: The same of B.

    Raises:
        DataError: If no seed is in both, or a number is not finite.
        MissingExtraError: If scipy is not installed.

    Source:
        Student, The probable error of a mean (1908).

    Example:
        >>> found = compare_seeds({1: 0.5, 2: 0.7, 3: 0.6, 4: 0.8, 5: 0.9}, {1: 0.4, 2: 0.5, 3: 0.5, 4: 0.6, 5: 0.7})
        >>> found.verdict, f"{found.difference:.2f} ({found.lower:.3f} to {found.upper:.3f}), n {found.n}"
        ('A is higher', '0.16 (0.092 to 0.228), n 5')
    """
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingExtraError.of("scipy", "evaluation", "an interval over seeds") from error
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
    sds = [statistics.stdev(side) if n > 1 else math.nan for side in sides]
    return SeedComparison(
        verdict=verdict,
        mean_a=statistics.fmean(sides[0]),
        mean_b=statistics.fmean(sides[1]),
        sd_a=sds[0],
        sd_b=sds[1],
        difference=mean,
        standard_error=scale,
        lower=lower,
        upper=upper,
        n=n,
        pairs=pairs,
        unpaired=tuple(sorted(a.keys() ^ b.keys())),
    )
