"""Faults planted in real prices are found, each by its name; the prices as they are have no red finding."""

from __future__ import annotations

import datetime
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from memfit.errors import DataError
from memfit_workloads.finance import Finding, Market, QualitySettings, check_market, forward_returns, read_market
from memfit_workloads.finance.prices import FEATURES, features_of, read_prices


@pytest.fixture(scope="module")
def whole() -> Market:
    """All 33 years, with the ranker's features, its targets, and volumes of a usual shape."""
    prices = read_prices()
    features = features_of(prices.closes)
    moved = np.abs(np.nan_to_num(forward_returns(prices.closes, 1, -1)))
    noise = np.random.default_rng(0).normal(0, 0.5, prices.closes.shape)
    return Market(
        prices.dates,
        prices.codes,
        prices.closes,
        volumes=np.round(1e6 * np.exp(noise + 20 * moved + np.arange(20) / 4)),
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
        volumes=None if market.volumes is None else market.volumes[chosen],
        features={name: values[chosen] for name, values in market.features.items()},
        targets={horizon: values[chosen] for horizon, values in market.targets.items()},
    )


def with_closes(market: Market, closes: np.ndarray) -> Market:
    """Prices with a fault that all else was computed from, so that only the prices are at fault."""
    return replace(market, closes=closes, features={}, targets={})


def names(market: Market, severity: str = "red", **bounds) -> list[str]:
    return [found.name for found in check_market(market, QualitySettings(**bounds)) if found.severity == severity]


def only(market: Market, name: str) -> Finding:
    """The one red finding, which has the name."""
    found = check_market(market)
    assert [finding.name for finding in found if finding.severity == "red"] == [name]
    assert found[0].remedy
    return found[0]


@pytest.mark.slow
def test_the_real_prices_have_no_red_finding_in_33_years_and_none_at_all_in_the_last_three(whole, clean) -> None:
    found = check_market(whole)
    # The close of RRC stood still for weeks in 1990: the stock was hardly traded.
    assert [(finding.name, finding.severity) for finding in found] == [("stale_prices", "yellow")]
    assert found[0].where[0] == "RRC: 69 dates up to 1990-04-09"
    assert check_market(clean) == ()


@pytest.mark.parametrize("feature", ["return_1", "return_5", "return_20", "distance_high_60"])
def test_a_feature_that_is_a_date_ahead_is_caught(clean: Market, feature: str) -> None:
    late = np.vstack([clean.features[feature][1:], np.full((1, 20), np.nan)])
    finding = only(replace(clean, features={**clean.features, feature: late}), "look_ahead_feature")
    assert finding.where == (feature,)


def test_a_feature_that_holds_some_of_the_future_return_under_noise_is_caught(clean: Market) -> None:
    ahead = clean.targets[5]
    noise = np.random.default_rng(0).normal(0, 3 * np.nanstd(ahead), ahead.shape)
    finding = only(replace(clean, features={"alpha": ahead + noise}), "look_ahead_feature")
    assert "5 dates after" in finding.evidence


@pytest.mark.slow
def test_a_weak_look_ahead_is_caught_by_falling_off_a_date_too_late(whole: Market) -> None:
    span = 100  # the return over 100 dates up to the next one: its rank IC with the next date is far from the bound
    past = forward_returns(whole.closes, span, -span)
    ahead = np.vstack([past[1:], np.full((1, 20), np.nan)])
    assert names(replace(whole, features={"return_100": past})) == []
    finding = only(replace(whole, features={"return_100": ahead}), "look_ahead_feature")
    assert "looks a date ahead" in finding.evidence


@pytest.mark.slow
def test_noise_is_no_look_ahead_however_many_features_there_are(clean: Market) -> None:
    rng = np.random.default_rng(0)
    noise = {f"noise_{number}": rng.standard_normal(clean.closes.shape) for number in range(20)}
    walks = {f"walk_{number}": rng.standard_normal(clean.closes.shape).cumsum(axis=0) for number in range(20)}
    assert names(replace(clean, features={**noise, **walks})) == []


def test_a_price_100_times_too_high_for_a_date_is_caught_with_its_place(clean: Market) -> None:
    closes = clean.closes.copy()
    closes[300, 4] *= 100
    finding = only(with_closes(clean, closes), "price_jump")
    assert finding.count == 2
    assert finding.where[0].startswith(f"{clean.dates[300]} {clean.codes[4]}: ")


def test_a_change_of_unit_from_a_date_on_is_caught_once(clean: Market) -> None:
    closes = clean.closes.copy()
    closes[300:, 4] /= 100
    assert only(with_closes(clean, closes), "price_jump").count == 1


def test_a_jump_over_a_missing_close_is_caught(clean: Market) -> None:
    closes = clean.closes.copy()
    closes[300, 4] = np.nan
    closes[301:, 4] *= 100
    assert "price_jump" in names(with_closes(clean, closes))


def test_a_doubling_is_red_only_if_it_comes_back(clean: Market) -> None:
    closes = clean.closes.copy()
    closes[300:303, 4] *= 2.5
    assert only(with_closes(clean, closes), "price_spike").count >= 1
    stays = clean.closes.copy()
    stays[300:, 4] *= 2.5
    assert names(with_closes(clean, stays)) == []


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_percentile_ranks_in_the_volume_column_are_caught(clean: Market, scale: float) -> None:
    ranks = scale * (clean.volumes.argsort(axis=1).argsort(axis=1) + 1) / 20
    only(replace(clean, volumes=ranks), "volume_is_rank")


@pytest.mark.slow
def test_shares_of_the_highest_volume_are_no_volumes_either_and_negative_ones_are_not(clean: Market) -> None:
    only(replace(clean, volumes=clean.volumes / clean.volumes.max()), "volume_is_rank")
    negative = clean.volumes.copy()
    negative[3, 2] = -5
    assert only(replace(clean, volumes=negative), "negative_volumes").where == (f"{clean.dates[3]} {clean.codes[2]}",)


def test_duplicated_dates_are_caught_in_matrices_and_rows_in_tables(clean: Market) -> None:
    chosen = np.sort(np.append(np.arange(500), [100, 200]))
    finding = only(rows(replace(clean, features={}, targets={}), chosen), "duplicated_dates")
    assert (finding.count, finding.where) == (2, (str(clean.dates[100]), str(clean.dates[200])))

    table = long_table(clean, 60)
    again = pa.concat_tables([table, table.slice(200, 20)])
    market = read_market(again)
    assert market.closes.tolist() == clean.closes[:60].tolist()
    found = only(market, "duplicated_rows")
    assert (found.count, found.where[0]) == (20, f"{clean.dates[10]} AAPL")


def test_dates_out_of_order_and_gaps_are_said(clean: Market) -> None:
    plain = replace(clean, features={}, targets={})
    swapped = np.arange(100)
    swapped[[50, 51]] = 51, 50
    assert "dates_out_of_order" in names(rows(plain, swapped))
    assert names(rows(plain, np.r_[0:50, 70:100]), "yellow") == ["date_gap"]


@pytest.mark.slow
@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("horizon", [1, 5, 20])
def test_a_target_shifted_by_one_is_caught_and_said_so(clean: Market, shift: int, horizon: int) -> None:
    shifted = forward_returns(clean.closes, horizon, shift)
    finding = only(replace(clean, targets={**clean.targets, horizon: shifted.astype(np.float32)}), "target_shifted")
    assert f"target_h{horizon}" in finding.evidence
    assert "shifted by one" in finding.evidence
    assert ("later" if shift == 1 else "earlier") in finding.evidence


@pytest.mark.slow
def test_a_target_over_other_dates_or_backward_or_unrelated_is_caught(clean: Market) -> None:
    def with_target(values: np.ndarray) -> Market:
        return replace(clean, targets={5: values})

    assert "over 6 dates" in only(with_target(forward_returns(clean.closes, 6)), "target_horizon").evidence
    backward = only(with_target(forward_returns(clean.closes, 5, -5)), "target_shifted")
    assert "5 dates earlier" in backward.evidence
    ranks = clean.targets[5].argsort(axis=1).argsort(axis=1) / 19
    assert "rank IC" in only(with_target(ranks), "target_unknown").evidence


@pytest.mark.slow
def test_a_target_that_differs_here_and_there_is_yellow(clean: Market) -> None:
    targets = clean.targets[5].copy()
    targets[::30] += 0.01
    assert names(replace(clean, targets={5: targets})) == []
    assert names(replace(clean, targets={5: targets}), "yellow") == ["target_differs"]
    nothing = np.full_like(targets, np.nan)
    assert names(replace(clean, targets={5: nothing}), "yellow") == ["target_unchecked"]


def test_closes_that_are_not_above_0_or_missing_are_said(clean: Market) -> None:
    closes = clean.closes.copy()
    closes[10, 3], closes[11, 3] = 0.0, -1.0
    assert only(with_closes(clean, closes), "bad_closes").count == 2
    gaps = clean.closes.copy()
    gaps[100:200, 3:6] = np.nan
    assert names(with_closes(clean, gaps), "yellow") == ["missing_closes"]
    listed_later = clean.closes.copy()
    listed_later[:400, 3] = np.nan
    listed_later[500:, 4] = np.nan
    assert check_market(with_closes(clean, listed_later)) == ()
    assert names(with_closes(clean, np.full_like(gaps, np.nan))) == ["no_closes"]


def test_codes_that_come_twice_are_caught(clean: Market) -> None:
    codes = (*clean.codes[:-1], clean.codes[0])
    assert only(replace(clean, codes=codes), "duplicated_codes").where == (clean.codes[0],)


def test_stale_closes_are_yellow_and_much_of_it_red(clean: Market) -> None:
    closes = clean.closes.copy()
    closes[100:112, 5] = closes[100, 5]
    assert names(with_closes(clean, closes), "yellow") == ["stale_prices"]
    closes[300:] = closes[300]
    assert "stale_prices" in names(with_closes(clean, closes))


def test_the_bounds_are_settings(clean: Market) -> None:
    closes = clean.closes.copy()
    closes[300:, 4] *= 8
    assert names(with_closes(clean, closes)) == ["price_jump"]
    assert names(with_closes(clean, closes), max_jump=10) == []


def long_table(market: Market, num_dates: int) -> pa.Table:
    """The prices of the first dates as rows, and a column of the market's 5-date target."""
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
    other = pa.table(
        {
            "date": table["date"],
            "code": table["code"],
            "target_h5": clean.targets[5][:60].ravel().astype(np.float32),
            "score_h5": np.arange(1200.0),
            "momentum": pa.array(np.arange(1200)),
            "sector": ["tech"] * 1200,
        }
    ).take(np.random.default_rng(0).permutation(1200)[:900])
    stranger = {"date": [datetime.date(1980, 1, 1)], "code": ["AAPL"], "target_h5": [0.5], "score_h5": [0.0]}
    stranger |= {"momentum": [1], "sector": ["x"]}
    market = read_market(table, pa.concat_tables([other, pa.table(stranger, schema=other.schema)]))
    assert list(market.features) == ["momentum"]
    assert list(market.targets) == [5]
    known = np.isfinite(market.features["momentum"])
    assert known.sum() == 900
    assert (market.features["momentum"][known] == np.arange(1200).reshape(60, 20)[known]).all()
    assert check_market(market) == ()


def test_a_table_without_its_columns_and_arrays_of_another_shape_are_refused(clean: Market) -> None:
    with pytest.raises(DataError, match="table 0 has no column 'close'"):
        read_market(long_table(clean, 5).drop_columns(["close"]))
    with pytest.raises(DataError, match="table 1 has no column 'code'"):
        read_market(long_table(clean, 5), long_table(clean, 5).drop_columns(["code"]))
    with pytest.raises(DataError, match="volumes has the shape"):
        replace(clean, volumes=clean.volumes[1:])
