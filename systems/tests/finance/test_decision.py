"""The decision between two day tables: both conditions, the pairing, and what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest

from memfit.errors import DataError, UsageError
from memfit_workloads.finance import Scores, decide, diebold_mariano, evaluate_days

METRIC = "h5_delta_p_at_k_pos"


def overlapping(seed: int, num: int = 240, horizon: int = 5) -> np.ndarray:
    return np.convolve(np.random.default_rng(seed).standard_normal(num + horizon - 1), np.ones(horizon), "valid") / 50


def days(values, first: str = "2024-01-01", **columns) -> pa.Table:
    dates = np.datetime64(first, "D") + np.arange(len(values))
    return pa.table({"date": pa.array(dates, pa.date32()), METRIC: values} | columns)


NOISE, OTHER = overlapping(0), overlapping(1)


def test_a_clear_difference_is_shown_on_its_side() -> None:
    better = decide(days(NOISE + 0.1), days(OTHER), METRIC, 5)
    assert better.verdict == "A better"
    assert better.test.mean == pytest.approx((NOISE + 0.1 - OTHER).mean())
    assert better.test.lower > 0
    worse = decide(days(OTHER), days(NOISE + 0.1), METRIC, 5)
    assert worse.verdict == "B better"
    assert (worse.test.lower, worse.test.upper) == (
        pytest.approx(-better.test.upper),
        pytest.approx(-better.test.lower),
    )
    assert decide(days(NOISE), days(OTHER), METRIC, 5).verdict == "no difference shown"


@pytest.mark.proves("S0-40")
def test_the_figures_are_those_of_the_test_and_the_interval() -> None:
    found = decide(days(NOISE + 0.02), days(OTHER), METRIC, 5, level=0.9)
    differences = NOISE + 0.02 - OTHER
    assert found.test == diebold_mariano(differences, 5, 0.9)
    assert found.adjusted_p_value == found.test.p_value


def test_the_interval_alone_does_not_decide() -> None:
    a, b = days(NOISE + 0.04), days(OTHER)
    clear = decide(a, b, METRIC, 5)
    tried = decide(a, b, METRIC, 5, other_p_values=[0.9] * int(0.06 / clear.test.p_value))
    assert (tried.test.lower, tried.test.upper) == (clear.test.lower, clear.test.upper)
    assert tried.adjusted_p_value > 0.05
    assert tried.verdict == "no difference shown"


def test_known_results_of_other_comparisons_enter_by_holm() -> None:
    alone = decide(days(NOISE + 0.05), days(OTHER), METRIC, 5)
    for others, factor in (([0.9, 1e-12], 2), ([0.9, 0.9], 3), ([alone.test.p_value * 0.99, 0.9], 2.97)):
        found = decide(days(NOISE + 0.05), days(OTHER), METRIC, 5, other_p_values=others)
        assert found.num_comparisons == 3
        assert found.adjusted_p_value == pytest.approx(factor * alone.test.p_value)  # never below that of a smaller one


def test_only_dates_that_both_have_are_paired_and_the_rest_is_counted() -> None:
    a, b = days(np.append(NOISE, math.nan)), days(np.append([7.0] * 3, OTHER[:-2]), first="2023-12-29")
    found = decide(a, b, METRIC, 5)
    assert (found.test.num_dates, found.num_dropped) == (238, 6)
    assert found.test.mean == pytest.approx((NOISE[:-2] - OTHER[:-2]).mean())
    holes = NOISE.copy()
    holes[[5, 9]] = math.nan
    found = decide(days(holes), days(OTHER), METRIC, 5)
    assert (found.test.num_dates, found.num_dropped) == (238, 2)


def test_random_scores_are_a_baseline_where_their_expectation_is_known() -> None:
    found = decide(days(NOISE + 0.1), "random", METRIC, 5)
    assert found.verdict == "A better"
    assert found.test.mean == pytest.approx((NOISE + 0.1).mean())
    shares = pa.table({"date": days(NOISE).column("date"), "h5_p_at_k_pos": NOISE + 0.5})
    with pytest.raises(UsageError, match="h5_p_at_k_pos is not known beforehand"):
        decide(shares, "random", "h5_p_at_k_pos", 5)


def test_every_field_goes_into_json() -> None:
    found = decide(days(NOISE), days(OTHER), METRIC, 5)
    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (written["effect"], written["lower"], written["num_dates"]) == (found.test.mean, found.test.lower, 240)


def made(num_assets: int, k_ratio: float, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    dates = np.datetime64("2024-01-01", "D") + np.arange(100)
    values = {name: rng.standard_normal((100, num_assets)) for name in ("score_h5", "target_h5")}
    return evaluate_days(
        Scores(dates, tuple(f"A{i:03d}" for i in range(num_assets)), values), horizons=[5], k_ratio=k_ratio
    )


def test_tables_that_were_evaluated_otherwise_are_refused() -> None:
    assert decide(made(20, 0.2), made(20, 0.2, seed=1), METRIC, 5).test.num_dates == 100
    with pytest.raises(DataError, match=r"A was evaluated with k_ratio 0\.2, and B with 0\.1"):
        decide(made(20, 0.2), made(20, 0.1), METRIC, 5)
    with pytest.raises(DataError, match="A was evaluated with num_codes 20, and B with 21"):
        decide(made(20, 0.2), made(21, 0.2), METRIC, 5)
    unknown = made(21, 0.1).replace_schema_metadata(None)
    assert decide(made(20, 0.2), unknown, METRIC, 5).test.num_dates == 100


def test_too_few_dates_are_refused_with_their_number() -> None:
    with pytest.raises(DataError, match="59 dates are there to compare on"):
        decide(days(np.append(NOISE[:59], math.nan)), days(OTHER), METRIC, 5)
    with pytest.raises(DataError, match="0 dates are there"):
        decide(days(NOISE), days(OTHER, first="2030-01-01"), METRIC, 5)


def test_columns_that_make_no_sense_are_refused() -> None:
    with pytest.raises(DataError, match="did you mean 'h5_delta_p_at_k_pos'"):
        decide(days(NOISE), days(OTHER), "h5_delta_p_at_k", 5)
    with pytest.raises(DataError, match="A has no column date"):
        decide(days(NOISE).drop_columns("date"), days(OTHER), METRIC, 5)
    with pytest.raises(DataError, match="of type string"):
        decide(days(["x"] * 240), days(OTHER), METRIC, 5)
