"""The mean of a daily series and its standard error, right also when the labels of neighbouring dates overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memfit.errors import MissingExtraError, UsageError

Kernel = Literal["rectangular", "bartlett", "none"]
#: Dates beyond the overlap of labels on which a slow variation is looked for: two months of trading.
SLOW_DATES = 40
# One-sided, 5 %: so many steady series are called slow by chance.
_SLOW_FROM = 1.645
# A long-run variance below this share of the plain one is rounding, not an estimate.
_SMALLEST_SHARE = 1e-9


@dataclass(frozen=True)
class Summary:
    """A metric over dates. A figure that is undefined is NaN.

    Attributes:
        mean: Mean over the dates on which the metric is defined.
        sd: Standard deviation over those dates, with divisor ``num_dates - 1``.
        num_dates: Number of dates on which the metric is defined.
        standard_error: Standard error of the mean, of `standard_error`; NaN where the horizon is not known.
        num_undefined: Number of dates that were left out.
    """

    mean: float
    sd: float
    num_dates: int
    standard_error: float
    num_undefined: int


def summarize(series: ArrayLike, horizon: int | None = None) -> Summary:
    """Mean, spread and standard error of a metric over dates.

    Args:
        series: The metric of each date in ascending order, shape (D,); NaN where it is undefined.
        horizon: Number of dates that a label spans. Without it no standard error is given: taking overlapping labels
            as independent would make it too small, by about the square root of the horizon.

    Raises:
        UsageError: If the horizon is less than 1.
        MissingExtraError: If the horizon is more than 1 and statsmodels is not installed.

    Example:
        >>> summarize([0.25, 0.75, float("nan"), 0.5], horizon=1)
        Summary(mean=0.5, sd=0.25, num_dates=3, standard_error=0.144..., num_undefined=1)
    """
    values = np.asarray(series, np.float64).ravel()
    defined = values[~np.isnan(values)]
    num = len(defined)
    sd = float(defined.std(ddof=1)) if num > 1 else float("nan")
    if num > 1 and defined.min() == defined.max():
        sd = 0.0  # rounding of the mean would leave 1e-17, and a ratio of 1e16
    return Summary(
        mean=float(defined.mean()) if num else float("nan"),
        sd=sd,
        num_dates=num,
        standard_error=float("nan") if horizon is None else standard_error(defined, horizon)[0],
        num_undefined=len(values) - num,
    )


def standard_error(values: NDArray[Any], horizon: int) -> tuple[float, Kernel]:
    """The standard error of the mean of a daily series whose labels span ``horizon`` dates, and the kernel it took.

    Labels of dates less than ``horizon`` apart share returns, so the variance of the mean adds the autocovariances of
    the first ``horizon - 1`` lags, each in full (the rectangular kernel), and is enlarged by the small-sample factor
    of Harvey, Leybourne and Newbold. With a horizon of 1 that is exactly sd / sqrt(n). The rectangular kernel does not
    promise a positive variance; where it gives none, the Bartlett kernel with ``2 * horizon - 1`` lags is taken, which
    is positive unless all values are equal. Equal values have the standard error 0, without a kernel.

    Lags count rows. Dates that are absent, and the borders of folds, bring rows together that lie further apart, never
    the reverse: every pair whose labels overlap is counted, and a pair over a gap adds a covariance of about 0.

    Args:
        values: Shape (n,), finite, in ascending order of dates.
        horizon: Dates that a label spans, at least 1.

    Returns:
        NaN where there are fewer than ``max(2, 2 * horizon)`` values.

    Raises:
        UsageError: If the horizon is less than 1.
        MissingExtraError: If the horizon is more than 1 and statsmodels is not installed.

    Source:
        D. Harvey, S. Leybourne, P. Newbold, Testing the equality of prediction mean squared errors (1997), equation 9;
        D. Harvey, S. Leybourne, E. Whitehouse, Forecast evaluation tests and negative long-run variance estimates in
        small samples (2017), for the Bartlett kernel in place of a variance that is not positive.

    Example:
        >>> standard_error(np.array([1.0, 2.0, 3.0, 4.0]), 1)
        (0.645..., 'rectangular')
        >>> standard_error(np.array([1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0]), 2)
        (0.243..., 'rectangular')
    """
    if horizon < 1:
        raise UsageError(
            f"the horizon is {horizon}.",
            rule="a label spans at least one date.",
            remedy="name the number of dates that a label looks ahead",
        )
    num = len(values)
    if num < max(2, 2 * horizon):
        return float("nan"), "none"
    deviations = values - values.mean()
    if values.min() == values.max():
        return 0.0, "none"
    squares = float(deviations @ deviations)
    if horizon == 1:
        return float(np.sqrt(squares / (num - 1) / num)), "rectangular"
    uniform, bartlett, total = _sums_of_lags()
    kernel: Kernel = "rectangular"
    variance = float(total(deviations, horizon - 1, uniform)[0, 0])
    if variance <= _SMALLEST_SHARE * squares:
        kernel = "bartlett"
        variance = float(total(deviations, 2 * horizon - 1, bartlett)[0, 0])
    factor = (num + 1 - 2 * horizon + horizon * (horizon - 1) / num) / num
    return float(np.sqrt(variance / num**2 / factor)), kernel


@dataclass(frozen=True)
class SlowVariation:
    """Whether a series stays above or below its mean for longer than its labels overlap.

    Attributes:
        statistic: Sum of the autocorrelations beyond the overlap, in its standard errors under none; NaN where unknown.
        error_factor: How many times as large the standard error of the mean is with them; NaN where unknown.
        is_shown: The statistic is above 1.645. By chance that is so in 5 % of series without slow variation.
    """

    statistic: float
    error_factor: float
    is_shown: bool


def slow_variation(values: NDArray[Any], horizon: int) -> SlowVariation:
    """Test a daily series for dependence beyond the overlap of its labels.

    Overlapping labels explain the autocorrelations of the first ``horizon - 1`` lags, and `standard_error` counts only
    these. Skill that comes and goes over weeks adds positive ones after them. The next `SLOW_DATES` lags, at most an
    eighth of the dates, are added up, each corrected for the mean that was taken off.

    Args:
        values: Shape (n,), finite, in ascending order of dates.
        horizon: Dates that a label spans, at least 1.

    Source:
        M. Bartlett, On the theoretical specification and sampling properties of autocorrelated time-series (1946), for
        the variance of the sum.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> noise, skill = rng.normal(size=1000), np.repeat(rng.normal(size=20), 50)
        >>> slow_variation(noise, 1).is_shown, slow_variation(noise + skill, 1).is_shown
        (False, True)
    """
    num, num_lags = len(values), min(SLOW_DATES, len(values) // 8)
    error = standard_error(values, horizon)[0]
    if not error > 0 or num_lags < 1:
        return SlowVariation(float("nan"), float("nan"), is_shown=False)
    deviations = values - values.mean()
    lags = np.arange(horizon + num_lags)
    products = [deviations[: num - lag] @ deviations[lag:] / (num - lag) for lag in lags]
    correlations = np.array(products) / products[0]
    # The mean that was taken off makes each covariance smaller, by the mean's variance.
    total = correlations[horizon:].sum() + num_lags * error**2 / products[0]
    near = np.concatenate([correlations[1:horizon][::-1], correlations[:horizon]])
    of_lag = np.convolve(near, near)
    distance = np.abs(np.arange(len(of_lag)) - len(of_lag) // 2)
    spread = np.sqrt((np.maximum(num_lags - distance, 0) * of_lag).sum() / num)
    statistic = float(total / spread)
    factor = float(np.sqrt(max(0.0, 1 + 2 * total * products[0] / (num * error**2))))
    return SlowVariation(statistic, factor, is_shown=statistic > _SLOW_FROM)


def _sums_of_lags() -> tuple[Any, Any, Any]:
    try:
        from statsmodels.stats.sandwich_covariance import S_hac_simple, weights_bartlett, weights_uniform
    except ImportError as error:
        raise MissingExtraError.of(
            "statsmodels", "evaluation", "a standard error of labels that span several dates"
        ) from error
    return weights_uniform, weights_bartlett, S_hac_simple
