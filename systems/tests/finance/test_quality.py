"""Faults planted in real prices are found, each by its name; the prices as they are have no red finding."""

from __future__ import annotations

import datetime
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from memfit.errors import DataError
from memfit_workloads.finance import Market, QualitySettings, check_market, forward_returns, read_market
from memfit_workloads.finance.prices import FEATURES, features_of, read_prices


@pytest.fixture(scope="module")
def whole() -> Market:
    """All 33 years, with the ranker's features, its targets, and volumes of a usual shape."""
    prices = read_prices()
    features = features_of(prices.closes)
    noise = np.random.default_rng(0).normal(0, 0.5, prices.closes.shape)
    return Market(
        prices.dates,
        prices.codes,
        prices.closes,
        volumes=np.round(1e6 * np.exp(noise + np.arange(20) / 4)),
        features={name: features[:, :, number] for number, name in enumerate(FEATURES)},
        targets={horizon: forward_returns(prices.closes, horizon) for horizon in (1, 5, 20)},
    )


@pytest.fixture(scope="module")
def clean(whole: Market) -> Market:
    """The last three years, in which nothing is found at all."""
    return rows(whole, np.arange(7557, 8313))


def rows(market: Market, chosen: np.ndarray) -> Market:
    """The market on some of its dates; targets are as they were on them."""
    return replace(
        market,
        dates=market.dates[chosen],
        closes=market.closes[chosen],
        volumes=market.volumes[chosen],
        features={name: values[chosen] for name, values in market.features.items()},
        targets={horizon: values[chosen] for horizon, values in market.targets.items()},
    )


def names(market: Market, **bounds) -> list[tuple[str, str]]:
    found = check_market(market, QualitySettings(**bounds))
    assert all(one.remedy and one.where and one.count for one in found)
    return [(one.severity, one.name) for one in found]


@pytest.mark.slow
def test_the_real_prices_have_no_red_finding_in_33_years_and_none_at_all_in_the_last_three(whole, clean) -> None:
    # The close of RRC stood still for weeks in 1990: the stock was hardly traded.
    assert names(whole) == [("yellow", "stale_prices")]
    assert check_market(whole)[0].where[0].endswith("RRC")
    assert names(clean) == []
    rng = np.random.default_rng(0)
    walks = {f"walk_{number}": rng.standard_normal(clean.closes.shape).cumsum(axis=0) for number in range(20)}
    assert names(replace(clean, features=walks)) == []


@pytest.mark.parametrize("feature", ["return_1", "return_5", "return_20", "distance_high_60"])
def test_a_feature_that_is_a_date_ahead_is_caught(clean: Market, feature: str) -> None:
    late = np.vstack([clean.features[feature][1:], np.full((1, 20), np.nan)])
    market = replace(clean, features={**clean.features, feature: late})
    assert names(market) == [("red", "look_ahead_feature")]
    assert check_market(market)[0].where == (feature,)
    assert names(market, max_feature_ic=1) == []


def test_a_feature_that_holds_some_of_the_future_return_under_noise_is_caught(clean: Market) -> None:
    ahead = clean.targets[5]
    noise = np.random.default_rng(0).normal(0, 3 * np.nanstd(ahead), ahead.shape)
    (finding,) = check_market(replace(clean, features={"alpha": ahead + noise}))
    assert "5 dates after" in finding.evidence


@pytest.mark.parametrize(
    ("cells", "change", "found", "count"),
    [
        (np.s_[300, 4], lambda old: 100 * old, "red price_jump", 2),  # up, and down again
        (np.s_[300:, 4], lambda old: old / 100, "red price_jump", 1),
        (np.s_[300:, 4], lambda old: 2.5 * old, "", 0),
        (np.s_[10, 3:5], lambda _: [0.0, -1.0], "red bad_closes", 2),
        (np.s_[100:200, 3:6], lambda _: np.nan, "yellow missing_closes", 300),
        (np.s_[:400, 3], lambda _: np.nan, "", 0),  # listed later
        (np.s_[500:, 3], lambda _: np.nan, "", 0),  # delisted
        (np.s_[100:112, 5], lambda old: old[0], "yellow stale_prices", 3),
        (np.s_[300:], lambda old: old[0], "red stale_prices", 20 * (456 - 9)),
    ],
)
def test_a_fault_in_closes_is_found_with_its_places(clean: Market, cells, change, found: str, count: int) -> None:
    closes = clean.closes.copy()
    closes[cells] = change(closes[cells])
    market = replace(clean, closes=closes, features={}, targets={})  # all else was computed from the prices
    assert [f"{one.severity} {one.name}" for one in check_market(market)] == [found] * bool(found)
    assert sum(one.count for one in check_market(market)) == count


def test_a_jump_over_a_missing_close_is_caught_with_its_place_unless_the_settings_allow_it(clean: Market) -> None:
    closes = clean.closes.copy()
    closes[300, 4] = np.nan
    closes[301:, 4] *= 8
    market = replace(clean, closes=closes, features={}, targets={})
    assert check_market(market)[0].where == (f"{clean.dates[301]} {clean.codes[4]}",)
    assert names(market) == [("red", "price_jump")]
    assert names(market, max_jump=10) == []


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda volumes: (volumes.argsort(axis=1).argsort(axis=1) + 1) / 20, "volume_is_rank"),
        (lambda volumes: 5.0 * (volumes.argsort(axis=1).argsort(axis=1) + 1), "volume_is_rank"),
        (lambda volumes: volumes / volumes.max(), "volume_is_rank"),
        (lambda volumes: np.where(np.arange(20) == 3, -5.0, volumes), "negative_volumes"),
    ],
)
def test_ranks_shares_and_negative_numbers_are_no_volumes(clean: Market, make, name: str) -> None:
    assert names(replace(clean, volumes=make(clean.volumes))) == [("red", name)]


def test_a_gap_in_the_dates_is_said(clean: Market) -> None:
    assert names(rows(replace(clean, features={}, targets={}), np.r_[0:350, 370:700])) == [("yellow", "date_gap")]


@pytest.mark.parametrize("horizon", [1, 5, 20])
@pytest.mark.parametrize("shift", [1, -1])
def test_a_target_shifted_by_one_is_caught(clean: Market, shift: int, horizon: int) -> None:
    shifted = forward_returns(clean.closes, horizon, shift).astype(np.float32)
    market = replace(clean, features={}, targets={**clean.targets, horizon: shifted})
    assert names(market) == [("red", "wrong_target")]
    assert f"target_h{horizon}" in check_market(market)[0].evidence


def test_a_target_that_differs_here_and_there_is_yellow_and_one_without_values_is_not_checked(clean: Market) -> None:
    targets = clean.targets[5].copy()
    targets[::30] += 0.01
    assert names(replace(clean, targets={5: targets})) == [("yellow", "wrong_target")]
    assert names(replace(clean, targets={5: np.full_like(targets, np.nan)})) == []


def long_table(market: Market, num_dates: int) -> pa.Table:
    """The prices of the first dates as rows."""
    codes = len(market.codes)
    return pa.table(
        {
            "date": pa.array(np.repeat(market.dates[:num_dates], codes)),
            "code": list(market.codes) * num_dates,
            "close": market.closes[:num_dates].ravel(),
        }
    )


def test_tables_are_joined_by_date_and_code_in_any_order(clean: Market) -> None:
    table = long_table(clean, 60)
    columns = {"date": table["date"], "code": table["code"], "target_h5": clean.targets[5][:60].ravel()}
    columns |= {"score_h5": np.arange(1200.0), "momentum": np.arange(1200), "sector": ["tech"] * 1200}
    other = pa.table(columns).take(np.random.default_rng(0).permutation(1200)[:900])
    stranger = {"date": [datetime.date(1980, 1, 1)], "code": ["AAPL"], "target_h5": [0.5], "score_h5": [0.0]}
    stranger |= {"momentum": [1], "sector": ["x"]}
    market = read_market(table, pa.concat_tables([other, pa.table(stranger, schema=other.schema)]))
    assert (list(market.features), list(market.targets)) == (["momentum"], [5])
    known = np.isfinite(market.features["momentum"])
    assert known.sum() == 900
    assert (market.features["momentum"][known] == np.arange(1200).reshape(60, 20)[known]).all()
    assert check_market(market) == ()


def test_tables_without_their_columns_or_with_a_row_twice_and_arrays_of_another_shape_are_refused(clean) -> None:
    table = long_table(clean, 5)
    with pytest.raises(DataError, match="table 0 has no column 'close'"):
        read_market(table.drop_columns(["close"]))
    with pytest.raises(DataError, match="table 1 has no column 'code'"):
        read_market(table, table.drop_columns(["code"]))
    with pytest.raises(DataError, match=f"20 pairs of date and code come more than once, first {clean.dates[2]} AAPL"):
        read_market(pa.concat_tables([table, table.slice(40, 20)]))
    with pytest.raises(DataError, match="volumes has the shape"):
        replace(clean, volumes=clean.volumes[1:])
