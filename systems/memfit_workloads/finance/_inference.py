"""Statistics of the mean of a daily series whose labels overlap: standard error, test, interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import DataError, UsageError, check_counts

# A long-run variance below this share of the plain one is rounding, not an estimate.
_SMALLEST_SHARE = 1e-9


@dataclass(frozen=True)
class Summary:
    """A metric over the dates on which it is defined; the others are counted. A figure that is undefined is NaN.

    ``sd`` has the divisor ``num_dates - 1``; without a horizon there is no ``standard_error`` of the mean.
    """

    mean: float
    sd: float
    num_dates: int
    standard_error: float
    num_undefined: int

    @property
    def icir(self) -> float:
        """``mean / sd`` per date. No factor makes it annual when labels overlap."""
        return self.mean / self.sd if self.sd > 0 else math.nan


def summarize(series: ArrayLike, horizon: int | None = None) -> Summary:
    """Return mean, spread and standard error of a metric over dates, shape (D,) in ascending order; NaN is undefined.

    Without the ``horizon``, the dates that a label spans, there is no standard error: overlapping labels are not
    independent.
    """
    values = np.asarray(series, np.float64).ravel()
    defined = values[~np.isnan(values)]
    num = len(defined)
    sd = float(defined.std(ddof=1)) if num > 1 else math.nan
    if num > 1 and defined.min() == defined.max():
        sd = 0.0  # rounding of the mean would leave 1e-17, and a ratio of 1e16
    return Summary(
        mean=float(defined.mean()) if num else math.nan,
        sd=sd,
        num_dates=num,
        standard_error=math.nan if horizon is None else standard_error(defined, horizon),
        num_undefined=len(values) - num,
    )


def standard_error(values: NDArray[Any], horizon: int) -> float:
    """Return the standard error of the mean of n daily values; NaN below ``max(2, 2 * horizon)`` values.

    Labels less than ``horizon`` dates apart share returns. So the variance adds the first ``horizon - 1``
    autocovariances in full (rectangular kernel), with the small-sample factor of Harvey, Leybourne and Newbold. Where
    that is not positive, the Bartlett kernel with ``2 * horizon - 1`` lags replaces it. Lags count rows: over a gap or
    a fold's border a pair only adds a covariance of about 0.

    Source:
        D. Harvey, S. Leybourne, P. Newbold, Testing the equality of prediction mean squared errors (1997), equation 9;
        D. Harvey, S. Leybourne, E. Whitehouse, Forecast evaluation tests and negative long-run variance estimates in
        small samples (2017).
    """
    check_counts(UsageError, 1, horizon=horizon)
    num = len(values)
    if num < max(2, 2 * horizon):
        return math.nan
    deviations = values - values.mean()
    if values.min() == values.max():
        return 0.0
    squares = float(deviations @ deviations)
    if horizon == 1:
        return float(np.sqrt(squares / (num - 1) / num))
    import statsmodels.stats.sandwich_covariance as hac  # slow to load

    variance = float(hac.S_hac_simple(deviations, horizon - 1, hac.weights_uniform)[0, 0])
    if variance <= _SMALLEST_SHARE * squares:
        variance = float(hac.S_hac_simple(deviations, 2 * horizon - 1, hac.weights_bartlett)[0, 0])
    factor = (num + 1 - 2 * horizon + horizon * (horizon - 1) / num) / num
    return float(np.sqrt(variance / num**2 / factor))


@dataclass(frozen=True)
class DieboldMariano:
    """A test of whether the mean of daily differences is 0, and the interval of that mean, ``lower`` to ``upper``.

    ``statistic`` is ``mean / standard_error``, NaN if all differences are equal. ``p_value`` is two-sided, 1 without a
    statistic.
    """

    mean: float
    standard_error: float
    statistic: float
    p_value: float
    lower: float
    upper: float
    num_dates: int


def minimum_dates(horizon: int) -> int:
    """Return the fewest dates that can be compared: 12 labels that do not overlap, and 30 dates."""
    return max(30, 12 * horizon)


def diebold_mariano(differences: ArrayLike, horizon: int, level: float = 0.95) -> DieboldMariano:
    """Test whether the mean of paired daily differences is 0, with labels that span several dates.

    ``differences`` (D,) are in ascending order of dates; NaN are left out. Test and interval take `standard_error`, and
    Student's t with ``num_dates - 1`` degrees of freedom. They do not see how far another training would differ, nor
    dependence over more than ``horizon - 1`` dates.

    Raises:
        DataError: If fewer than `minimum_dates` are defined, or one is infinite.
        UsageError: If the level is out of range.

    Source:
        F. Diebold, R. Mariano, Comparing predictive accuracy (1995); D. Harvey, S. Leybourne, P. Newbold, Testing the
        equality of prediction mean squared errors (1997). ``statsmodels.tsa.stattools.diebold_mariano_test`` has the
        Bartlett kernel alone, which rejects too often when labels overlap.
    """
    from scipy.stats import t as student

    if not 0 < level < 1:
        raise UsageError(f"the level is {level}.", rule="a level lies between 0 and 1.", remedy="level=0.95 is usual")
    values = np.asarray(differences, np.float64).ravel()
    values = values[~np.isnan(values)]
    if len(values) < minimum_dates(horizon) or np.isinf(values).any():
        raise DataError(
            f"{len(values)} dates are there to compare on, {int(np.isinf(values).sum())} of them infinite.",
            rule=f"labels over {horizon} dates need at least {minimum_dates(horizon)} finite differences.",
            remedy="evaluate more dates or folds, or a shorter horizon",
        )
    mean, num, error_of_mean = float(values.mean()), len(values), standard_error(values, horizon)
    statistic = mean / error_of_mean if error_of_mean > 0 else math.nan
    p_value = float(2 * student.sf(abs(statistic), num - 1)) if error_of_mean > 0 else 1.0
    reach = error_of_mean * float(student.isf((1 - level) / 2, num - 1))
    return DieboldMariano(mean, error_of_mean, statistic, p_value, mean - reach, mean + reach, num)


def sharpe(returns: ArrayLike, *, periods_per_year: float = 252) -> tuple[float, float]:
    """Return the annual Sharpe ratio of returns of periods that do not overlap, and its standard error.

    They are simple returns in excess of the risk-free rate, shape (n,), taken as uncorrelated; NaN are left out. The
    error allows for their skew and kurtosis. Below 3 returns, or where all are equal, both are NaN.

    Source: W. Sharpe, The Sharpe ratio (1994); the standard error is that of D. Bailey, M. Lopez de Prado, The Sharpe
        ratio efficient frontier (2012), after E. Mertens (2002).
    """
    from scipy import stats

    values = np.asarray(returns, np.float64).ravel()
    values = values[~np.isnan(values)]
    if len(values) < 3 or values.min() == values.max():
        return math.nan, math.nan
    ratio, year = float(values.mean() / values.std(ddof=1)), math.sqrt(periods_per_year)
    variance = 1 - stats.skew(values) * ratio + (stats.kurtosis(values, fisher=False) - 1) / 4 * ratio**2
    return ratio * year, math.sqrt(max(variance, 0.0) / (len(values) - 1)) * year
