"""Whether one forecast is better than another: a paired test over dates, what it could have shown, and how many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import DataError, MissingExtraError, UsageError
from memfit.evaluation._variance import Kernel, standard_error

_PURPOSE = "a comparison of forecasts"


@dataclass(frozen=True)
class DieboldMariano:
    """A test of whether the mean of daily differences is 0.

    Attributes:
        mean: The mean difference, in the unit of the differences.
        standard_error: Of the mean, for labels that overlap; 0 where all differences are equal.
        statistic: ``mean / standard_error``; NaN where all differences are equal.
        p_value: Two-sided, by Student's t with ``num_dates - 1`` degrees of freedom; 1 where there is no statistic.
        num_dates: Number of differences.
        kernel: How the variance was estimated: ``rectangular``; ``bartlett`` where that gave no positive variance;
            ``none`` where all differences are equal.
    """

    mean: float
    standard_error: float
    statistic: float
    p_value: float
    num_dates: int
    kernel: Kernel


def minimum_dates(horizon: int) -> int:
    """The fewest dates that a comparison is made on: 12 labels that do not overlap, and 30 dates.

    With fewer, the test and the interval promise more than they hold; ``benchmarks/decision.py`` shows by how much.

    >>> minimum_dates(1), minimum_dates(5)
    (30, 60)
    """
    return max(30, 12 * horizon)


def diebold_mariano(differences: ArrayLike, horizon: int) -> DieboldMariano:
    """Test whether the mean of paired daily differences is 0, with labels that span several dates.

    The variance is that of `standard_error`: the first ``horizon - 1`` autocovariances in full, since optimal
    forecasts of overlapping labels have errors that are correlated so far and no further; the small-sample factor; and
    the Bartlett kernel where the estimate is not positive. Student's t is the reference. What the test does not see:
    how far another training of the same model would differ, and dependence over more than ``horizon - 1`` dates.
    `bootstrap_interval` sees some of the latter.

    Args:
        differences: One per date in ascending order of dates, shape (D,); NaN, where undefined, are left out. Dates of
            several folds are put together into one series: `standard_error` says why their borders do no harm.
        horizon: Dates that a label spans.

    Raises:
        DataError: If fewer than `minimum_dates` are defined, or one is infinite.
        UsageError: If the horizon is less than 1.
        MissingExtraError: If scipy or statsmodels is not installed.

    Source:
        F. Diebold, R. Mariano, Comparing predictive accuracy (1995); D. Harvey, S. Leybourne, P. Newbold, Testing the
        equality of prediction mean squared errors (1997). ``statsmodels.tsa.stattools.diebold_mariano_test`` has the
        Bartlett kernel alone, which rejects too often when labels overlap.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> overlapping = np.convolve(rng.normal(size=244), np.ones(5), "valid")
        >>> test = diebold_mariano(overlapping, horizon=5)
        >>> f"t {test.statistic:.2f}, p {test.p_value:.2f}, n {test.num_dates}"
        't ..., n 240'
    """
    try:
        from scipy.stats import t as student
    except ImportError as error:
        raise MissingExtraError.of("scipy", "evaluation", _PURPOSE) from error
    values = check_differences(differences, horizon)
    mean, num = float(values.mean()), len(values)
    error_of_mean, kernel = standard_error(values, horizon)
    if error_of_mean == 0:
        return DieboldMariano(mean, 0.0, math.nan, 1.0, num, "none")
    statistic = mean / error_of_mean
    return DieboldMariano(mean, error_of_mean, statistic, float(2 * student.sf(abs(statistic), num - 1)), num, kernel)


def check_differences(differences: ArrayLike, horizon: int) -> NDArray[np.float64]:
    """The defined differences, shape (n,), enough of them for a horizon."""
    values = np.asarray(differences, np.float64).ravel()
    values = values[~np.isnan(values)]
    if len(values) < minimum_dates(horizon) or np.isinf(values).any():
        raise DataError(
            f"{len(values)} dates are there to compare on, {int(np.isinf(values).sum())} of them infinite.",
            rule=f"labels over {horizon} dates are compared on at least {minimum_dates(horizon)} finite differences: "
            f"30, and 12 labels that do not overlap.",
            remedy="evaluate more dates or folds, or a shorter horizon",
        )
    return values


def power(effect: float, standard_error: float, num_dates: int, *, alpha: float = 0.05) -> float:
    """The probability that the two-sided test shows a true effect of this size.

    Args:
        effect: The true mean difference, in the unit of the differences.
        standard_error: Of the mean difference, above 0.
        num_dates: Number of differences.
        alpha: The p-value below which the test rejects.

    Raises:
        UsageError: If an argument is out of range.
        MissingExtraError: If scipy is not installed.

    Example:
        >>> round(power(0.02, 0.007, 240), 2)
        0.81
    """
    _check_power(standard_error, num_dates, alpha)
    return _power(abs(effect) / standard_error, num_dates, alpha)


def minimal_detectable_effect(
    standard_error: float, num_dates: int, *, alpha: float = 0.05, wanted_power: float = 0.8
) -> float:
    """The smallest true effect that the two-sided test shows with the wanted power; 0 for a standard error of 0.

    Where a test showed no difference, this is what the data could have shown: a smaller effect may well be there.

    Args:
        standard_error: Of the mean difference.
        num_dates: Number of differences.
        alpha: The p-value below which the test rejects.
        wanted_power: Above alpha, below 1.

    Raises:
        UsageError: If an argument is out of range.
        MissingExtraError: If scipy is not installed.

    Example:
        >>> round(minimal_detectable_effect(0.007, 240), 4)
        0.0197
    """
    if standard_error == 0:
        return 0.0
    _check_power(standard_error, num_dates, alpha, wanted_power)
    try:
        from scipy.optimize import brentq
    except ImportError as error:
        raise MissingExtraError.of("scipy", "evaluation", _PURPOSE) from error
    most = 1.0
    while _power(most, num_dates, alpha) < wanted_power:
        most *= 2
    return standard_error * float(brentq(lambda size: _power(size, num_dates, alpha) - wanted_power, 0.0, most))


def adjust_p_value(p_value: float, others: Sequence[float] = (), *, num_comparisons: int = 1) -> float:
    """A p-value after Holm's correction for every comparison that was tried.

    Args:
        p_value: Of the comparison in question.
        others: p-values of the other comparisons, as far as they are known.
        num_comparisons: Of all comparisons, this one among them. Those whose p-value is not known count as if they had
            this one's, which is the worst for it; with none known that is Bonferroni's correction.

    Raises:
        UsageError: If a p-value is not from 0 to 1.

    Source:
        S. Holm, A simple sequentially rejective multiple test procedure (1979).

    Example:
        >>> adjust_p_value(0.02, num_comparisons=4), adjust_p_value(0.02, [0.001, 0.4, 0.9])
        (0.08, 0.06)
    """
    values = [p_value, *others]
    if not all(0 <= value <= 1 for value in values):
        raise UsageError(
            f"the p-values are {', '.join(map(str, values))}.",
            rule="a p-value is from 0 to 1.",
            remedy="pass the p-values of tests",
        )
    smaller = sorted(value for value in others if value < p_value)
    num = max(num_comparisons, len(values))
    return min(1.0, max((num - rank) * value for rank, value in enumerate([*smaller, p_value])))


def _check_power(standard_error: float, num_dates: int, alpha: float, wanted_power: float = 0.8) -> None:
    if not (standard_error > 0 and num_dates >= 2 and 0 < alpha < wanted_power < 1):
        raise UsageError(
            f"standard error {standard_error}, {num_dates} dates, alpha {alpha}, power {wanted_power}.",
            rule="a test has a positive standard error, at least 2 dates, and 0 < alpha < power < 1.",
            remedy="take them from diebold_mariano; alpha=0.05 and a power of 0.8 are usual",
        )


def _power(size: float, num_dates: int, alpha: float) -> float:
    """The power against an effect of so many standard errors: two tails of the noncentral t distribution."""
    try:
        from scipy.stats import nct, t
    except ImportError as error:
        raise MissingExtraError.of("scipy", "evaluation", _PURPOSE) from error
    freedom = num_dates - 1
    critical = t.isf(alpha / 2, freedom)
    # The lower tail by symmetry: nct.cdf at -critical is NaN for some large effects.
    return float(nct.sf(critical, freedom, size) + nct.sf(critical, freedom, -size))
