"""Whether a comparison of two forecasts rejects as often as it says, covers as it says, and finds what is there.

    make bench NAME=finance ARGS="--num-series 1000 --seed 0"

Series of daily differences with the dependence of overlapping labels: each date's is the sum of ``h`` daily shocks, of
which its neighbour shares all but one (normal, with fat tails, or skewed; or normal, in five folds with gaps between
them, over which nothing is shared). Under no true difference, the share of rejections at 5 % is the test's *size*, the
share of intervals that hold 0 their *coverage*, and the share of series on which both conditions of a decision hold
the *false decisions*; with a true difference, the share of rejections is the *power*. Beside memfit's test stand others
on the same series: one that multiplies by sqrt(n) a statistic that is divided by a standard error already, one without
lags, ``statsmodels.tsa.stattools.diebold_mariano_test`` with its Bartlett kernel, and the basic interval of ``arch``.
At the fewest dates that memfit accepts for a horizon, less is asked of the test, and as much of the decision.

Then skill is added that is 0 on average and has an autocorrelation of 0.97 from date to date: how often the test
rejects, and how often `slow_variation` names it.

The last part draws whole markets (``--num-worlds`` of each kind): 20 assets of one expected return, 1,000 dates, labels
over 5. Shown is how often scores are called better or worse than random ones, and how often a warning is given:

*no skill*: persistent scores without information, assets of one volatility; *low volatility*: assets of 13 to 63 % a
year, ranked by their last 60 returns, the calmest first; *slow skill*: a true rank IC that is 0 on average, and
varies by 0.05 with an autocorrelation of 0.97.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
from arch.bootstrap import CircularBlockBootstrap
from numpy.typing import NDArray
from scipy import stats
from statsmodels.tsa.stattools import diebold_mariano_test

from harness import parser, told
from memfit_workloads.finance import (
    Scores,
    bootstrap_interval,
    decide,
    diebold_mariano,
    evaluate_days,
    minimal_detectable_effect,
    minimum_dates,
    power,
    slow_variation,
    volatility_correlation,
)

ALPHA = 0.05
#: What is asked of size, false decisions and coverage; the second size where n is the least that memfit accepts.
SIZES, FALSE_DECISIONS, COVERAGE = ((0.03, 0.08), (0.03, 0.12)), (0.0, 0.08), (0.90, 0.97)
CASES = [(240, 5, shocks) for shocks in ("normal", "fat tails", "skewed", "five folds")]
CASES += [(num, horizon, "normal") for num, horizon in ((240, 1), (240, 10), (480, 20), (1000, 5), (60, 5), (240, 20))]
NUM_DATES, NUM_ASSETS, HORIZON = 1000, 20, 5
METRICS = ("rank_ic", "spread", "delta_p_at_k_pos")
#: What is asked of each kind of world: the most false decisions by metric, and how often each warning is given.
ASKED: dict[str, dict[str, tuple[float, float]]] = {
    "no skill": {"rank_ic": (0.0, 0.10), "spread": (0.0, 0.10), "volatility": (0.0, 0.01), "slow": (0.0, 0.12)},
    "low volatility": {"spread": (0.0, 0.10), "volatility": (0.95, 1.0)},
    "slow skill": {},  # shown alone: this little skill is seldom seen
}


def draw(rng: np.random.Generator, num_dates: int, horizon: int, shocks: str) -> NDArray[np.float64]:
    """One series with mean 0: sums of ``horizon`` neighbouring shocks of variance 1, shape (num_dates,)."""
    if shocks == "five folds":
        return np.concatenate([draw(rng, num_dates // 5, horizon, "normal") for _ in range(5)])
    num = num_dates + horizon - 1
    if shocks == "normal":
        values = rng.standard_normal(num)
    elif shocks == "fat tails":
        values = rng.standard_t(5, num) / math.sqrt(5 / 3)
    else:
        values = rng.exponential(size=num) - 1
    return np.convolve(values, np.ones(horizon), "valid")


def true_standard_error(num_dates: int, horizon: int) -> float:
    """That of the mean of such a series."""
    lags = np.arange(1, horizon)
    return float(np.sqrt((horizon + 2 * ((1 - lags / num_dates) * (horizon - lags)).sum()) / num_dates))


def rates(
    num_dates: int, horizon: int, shocks: str, *, num_series: int, seed: int, num_resamples: int = 300
) -> dict[str, float]:
    """Draw series without a true difference; the shares of rejections, decisions, and intervals that hold 0."""
    rng, counts = np.random.default_rng(seed), Counter[str]()
    for _ in range(num_series):
        series, zeros = draw(rng, num_dates, horizon, shocks), np.zeros(num_dates)
        test = diebold_mariano(series, horizon)
        found = bootstrap_interval(series, horizon, 1 - ALPHA, seed=seed, num_resamples=num_resamples)
        blocks = CircularBlockBootstrap(found.block_length, series, seed=seed)
        basic = blocks.conf_int(lambda part: part.mean(keepdims=True), num_resamples, method="basic")[:, 0]
        bartlett = diebold_mariano_test(
            zeros, series, zeros, criterion=lambda _, forecast: forecast, lags=horizon - 1, harvey_adj=True,
            horizon=horizon,
        )  # fmt: skip
        for name, is_so in {
            "size": test.p_value < ALPHA,
            "decided": test.p_value < ALPHA and not found.lower <= 0 <= found.upper,
            "root_n": 2 * stats.norm.sf(abs(test.statistic) * math.sqrt(num_dates)) < ALPHA,
            "no_lags": stats.ttest_1samp(series, 0).pvalue < ALPHA,
            "bartlett": bartlett.pvalue < ALPHA,
            "coverage": found.lower <= 0 <= found.upper,
            "basic": basic[0] <= 0 <= basic[1],
        }.items():
            counts[name] += bool(is_so)
    return {name: count / num_series for name, count in counts.items()}


def found_share(num_dates: int, horizon: int, effect: float, *, num_series: int, seed: int) -> float:
    """The share of series with a true mean of ``effect`` whose test rejects on its side."""
    rng = np.random.default_rng(seed)
    tests = (diebold_mariano(draw(rng, num_dates, horizon, "normal") + effect, horizon) for _ in range(num_series))
    return sum(test.p_value < ALPHA and test.mean > 0 for test in tests) / num_series


def steady(rng: np.random.Generator, num_dates: int, correlation: float, *shape: int) -> NDArray[np.float64]:
    """Normal values of variance 1 that keep so much of themselves from date to date, shape (num_dates, ...)."""
    values = rng.standard_normal((num_dates, *shape))
    for date in range(1, num_dates):
        values[date] = correlation * values[date - 1] + math.sqrt(1 - correlation**2) * values[date]
    return values


def slow_rates(num_dates: int, skill: float, *, num_series: int, seed: int) -> tuple[float, float]:
    """The shares of series with slow skill of this many of the noise's deviations: rejected, and called slow."""
    rng = np.random.default_rng(seed)
    rejected = named = 0
    for _ in range(num_series):
        series = draw(rng, num_dates, HORIZON, "normal") + skill * math.sqrt(HORIZON) * steady(rng, num_dates, 0.97)
        rejected += diebold_mariano(series, HORIZON).p_value < ALPHA
        named += slow_variation(series, HORIZON).is_shown
    return rejected / num_series, named / num_series


def world(rng: np.random.Generator, kind: str) -> tuple[Scores, NDArray[np.float64]]:
    """One market with its scores, and its daily returns, shape (NUM_DATES, NUM_ASSETS)."""
    num_days = 60 + NUM_DATES + HORIZON
    volatility = np.linspace(0.008, 0.04, NUM_ASSETS) if kind == "low volatility" else np.full(NUM_ASSETS, 0.02)
    shocks = rng.standard_normal((num_days, NUM_ASSETS)) * volatility
    daily = np.exp(0.0004 + shocks - volatility**2 / 2) - 1
    windows = np.lib.stride_tricks.sliding_window_view
    ahead = np.prod(1 + windows(daily[60:], HORIZON, axis=0), axis=2)[:NUM_DATES] - 1
    if kind == "low volatility":
        scores = -windows(daily[:-1], 60, axis=0).std(axis=2)[:NUM_DATES]
    else:
        scores = steady(rng, NUM_DATES, 0.95, NUM_ASSETS)
    if kind == "slow skill":
        scores = scores + 0.05 * steady(rng, NUM_DATES, 0.97, 1) * (ahead - ahead.mean()) / ahead.std()
    dates = np.datetime64("2020-01-01") + np.arange(NUM_DATES)
    codes = tuple(f"A{number:02d}" for number in range(NUM_ASSETS))
    return Scores(dates, codes, {"score_h5": scores, "target_h5": ahead}), daily[60:][:NUM_DATES]


def world_rates(kind: str, *, num_worlds: int, seed: int) -> dict[str, float]:
    """The shares of worlds with a verdict, by metric, and with each warning; ``slow`` is of the rank IC."""
    rng, counts = np.random.default_rng(seed), Counter[str]()
    for _ in range(num_worlds):
        scores, daily = world(rng, kind)
        days = evaluate_days(scores, horizons=[HORIZON], k_ratio=0.2)
        found = {metric: decide(days, "random", f"h5_{metric}", HORIZON) for metric in METRICS}
        is_decided = {metric: one.verdict != "no difference shown" for metric, one in found.items()}
        slow = found["rank_ic"].slow.is_shown
        warned = {"volatility": volatility_correlation(scores.of("score_h5"), daily).warns, "slow": slow}
        warned |= {f"better by {metric}": one.verdict == "A better" for metric, one in found.items()}
        for name, is_so in (is_decided | warned | {"slow where decided": slow and is_decided["rank_ic"]}).items():
            counts[name] += is_so
    return {name: count / num_worlds for name, count in counts.items()}


def judge(text: str, value: float, bounds: tuple[float, float]) -> bool:
    return told(bounds[0] <= value <= bounds[1], f"{text}: {value:.3f} ({bounds[0]:.2f} to {bounds[1]:.2f})")


def judge_worlds(options: argparse.Namespace) -> Iterator[bool]:
    """Print what is decided and warned of in whole markets, and yield whether it is what is asked."""
    for kind, asked in ASKED.items():
        found = world_rates(kind, num_worlds=options.num_worlds, seed=options.seed)
        print(f"\n{kind}: " + ", ".join(f"{name} {share:.3f}" for name, share in found.items()), flush=True)
        yield from (judge(f"{kind}: {name}", found[name], bounds) for name, bounds in asked.items())


def judge_series(options: argparse.Namespace) -> Iterator[bool]:
    """Print size, coverage and power on series, and yield whether they are what is asked."""
    size = {"num_series": options.num_series, "seed": options.seed}
    for num_dates, horizon, shocks in CASES:
        found, case = rates(num_dates, horizon, shocks, **size), f"n {num_dates}, h {horizon}, {shocks}"
        yield judge(f"{case}: size", found["size"], SIZES[num_dates == minimum_dates(horizon)])
        yield judge(f"{case}: false decisions", found["decided"], FALSE_DECISIONS)
        yield judge(f"{case}: coverage", found["coverage"], COVERAGE)
        others = ", ".join(f"{name} {found[name]:.3f}" for name in ("root_n", "no_lags", "bartlett"))
        print(f"       others: size {others}; coverage of the basic interval {found['basic']:.3f}", flush=True)
    print("\npower at n 240, h 5, by the true effect in standard errors: simulated beside foreseen")
    error = true_standard_error(240, 5)
    for errors in (0.0, 1.0, 2.0, 2.8, 4.0):
        share = found_share(240, 5, errors * error, **size)
        print(f"       {errors:.1f}: {share:.3f} {power(errors * error, error, 240):.3f}")
    effect = minimal_detectable_effect(error, 240)
    text = f"power at the minimal detectable effect ({effect / error:.2f} standard errors)"
    yield judge(text, found_share(240, 5, effect, **size), (0.76, 0.86))
    for num_dates in (240, 1000, 2700):
        for skill, asked in ((0.0, (0.0, 0.10)), (0.25, (0.0, 1.0)), (0.5, (0.7 if num_dates >= 1000 else 0.0, 1.0))):
            rejected, named = slow_rates(num_dates, skill, **size)
            case = f"n {num_dates}, h {HORIZON}, slow skill of {skill:g} deviations of the noise"
            yield judge(f"{case}: rejected {rejected:.3f}, called slow", named, asked)


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--num-series", type=int, default=1000, help="series a case")
    given.add_argument("--num-worlds", type=int, default=200, help="whole markets a kind")
    given.add_argument("--seed", type=int, default=0)
    options = given.parse_args()
    sys.exit(not all([*judge_series(options), *judge_worlds(options)]))


if __name__ == "__main__":
    main()
