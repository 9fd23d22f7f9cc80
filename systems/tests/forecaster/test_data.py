"""The forecaster's folds, graph, regime and sectors: from the past alone."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memfit.data import Panel
from memfit_workloads.finance.panels import DataParams, num_features, sectors_of
from memfit_workloads.forecaster.data import (
    day_weights,
    largest_day,
    neighbours_of,
    volatility_ranks,
    write_neighbours,
)
from memfit_workloads.forecaster.params import ForecasterParams
from memfit_workloads.forecaster.stages import FORECASTER
from stages_here import StagesHere

GENERATED = {"source": "generated", "num_dates": 120, "num_assets": 12, "num_features": 2, "lookback": 10,
             "information_coefficient": 0.4, "horizons": (1, 4), "main_horizon": 4}  # fmt: skip


def some_returns(num_dates=200, num_assets=9, missing=0.05):
    random = np.random.default_rng(0)
    groups = random.normal(size=(num_dates, num_assets)).repeat(3, axis=1)[:, :num_assets]  # three assets move alike
    returns = random.normal(size=(num_dates, num_assets)) + groups
    returns[random.random(returns.shape) < missing] = np.nan
    return returns.astype(np.float32)


def test_the_neighbours_are_those_of_the_highest_correlation_by_numpy():
    past = some_returns(60, missing=0.0)
    close = np.corrcoef(past.T.astype(np.float64))
    np.fill_diagonal(close, -np.inf)
    assert neighbours_of(past, 3).tolist() == np.argsort(-close, axis=1)[:, :3].tolist()
    assert {tuple(sorted(row)) for row in neighbours_of(past, 2).tolist()[:3]} == {(1, 2), (0, 2), (0, 1)}


def test_an_asset_without_half_of_its_returns_is_nobodys_neighbour_and_has_none():
    past = some_returns(40, missing=0.0)
    past[:21, 4] = np.nan
    past[:, 5] = 0.5  # never changes
    found = neighbours_of(past, 8)
    assert not np.isin(found, (4, 5)).any()
    assert (found[[4, 5]] == -1).all()
    assert (found[0] >= 0).sum() == 6


def test_more_neighbours_than_assets_leave_places_empty():
    assert neighbours_of(some_returns(30, 3, 0.0), 5)[:, 2:].tolist() == [[-1] * 3] * 3


def test_the_graph_of_a_date_does_not_change_with_what_comes_after_it(tmp_path):
    returns = some_returns()
    changed = returns.copy()
    changed[150:] = np.random.default_rng(1).normal(size=changed[150:].shape)  # known from date 151 on
    for name, values in (("one", returns), ("other", changed)):
        write_neighbours(tmp_path / f"{name}.npy", values, 3, 40)
    one, other = np.load(tmp_path / "one.npy"), np.load(tmp_path / "other.npy")
    assert one.dtype == np.int16 and one.shape == (200, 9, 3)
    assert (one[:40] == -1).all() and (one[40:] >= 0).all()
    assert np.array_equal(one[:151], other[:151])
    assert not np.array_equal(one[151:], other[151:])


@pytest.mark.proves("S2-42")
def test_the_regime_of_a_date_does_not_change_with_what_comes_after_it():
    returns = some_returns(400, 5)
    changed = returns.copy()
    changed[300:] *= 50
    one, other = volatility_ranks(returns), volatility_ranks(changed)
    assert np.array_equal(one[:301], other[:301])
    assert (other[302:310] > 0.99).all() and not np.array_equal(one[302:310], other[302:310])
    assert np.array_equal(day_weights(one, 0.7)[:301], day_weights(other, 0.7)[:301])


def test_a_regime_ranks_the_volatility_of_the_last_dates_among_those_before():
    returns = some_returns(300, 4, 0.0).astype(np.float64)
    market = np.append(np.nan, returns.mean(axis=1)[:-1])
    volatility = np.array([market[date - 19 : date + 1].std() if date >= 20 else np.nan for date in range(300)])
    for date in (100, 299):
        expected = np.mean(volatility[20:date] < volatility[date])
        assert volatility_ranks(returns)[date] == pytest.approx(expected, abs=1e-6)
    assert (volatility_ranks(returns)[:80] == 0.5).all()


def test_weights_are_exactly_one_when_the_regime_is_switched_off():
    assert (day_weights(np.linspace(0, 1, 7, dtype=np.float32), 0.0) == 1).all()
    weights = day_weights(np.array([0.1, 0.9], np.float32), 0.5)
    assert weights[0] > 1 > weights[1] > 0


def test_the_sector_of_an_asset_in_a_file_is_that_of_its_first_date(tmp_path):
    days = np.array(["2024-01-04", "2024-01-02", "2024-01-02", "2024-01-04", "2024-01-03"], "datetime64[D]")
    rows = {"date": days, "code": ["A", "A", "B", "B", "C"], "x": np.ones(5), "y": np.ones(5)}
    rows["kind"] = ["energy", "banks", "energy", "energy", None]
    pq.write_table(pa.table(rows), tmp_path / "mine.parquet", row_group_size=2)
    panel = Panel.build(tmp_path / "mine.parquet", tmp_path, features=["x"], targets=["y"])
    data = DataParams(source="parquet", path=tmp_path / "mine.parquet", features=("x",), targets={1: "y"},
                        horizons=(1,), main_horizon=1, sector="kind")  # fmt: skip
    assert sectors_of(panel, data).tolist() == [0, 1, -1]
    assert (num_features(data), largest_day(data)) == (1, 2)
    assert sectors_of(panel, DataParams()).tolist() == [-1] * 3


@pytest.mark.proves("S2-45")
@pytest.mark.slow
def test_prepare_saves_purged_folds_neighbours_and_sectors_of_the_packaged_prices(tmp_path):
    data = {"start": "2020-01-01", "end": "2021-06-30", "lookback": 10}
    params = ForecasterParams(data=data, splits={"n_splits": 3, "embargo_size": 3}, graph={"neighbours": 2})
    output = StagesHere(tmp_path, FORECASTER, params).run("prepare")
    splits, neighbours = output.arrays("splits"), np.load(output.path("neighbours"))
    assert [one["fold"] for one in output.result["folds"]] == [1, 2, 3]
    for fold in (1, 2, 3):
        train, test = splits[f"train_{fold}"], splits[f"test_{fold}"]
        assert np.abs(train[:, None] - test[None, :]).min() > 20
    panel, sectors = output.panel(), output.arrays("days")["sectors"]
    of = dict(zip(panel.assets, sectors.tolist(), strict=True))
    assert of["CVX"] == of["XOM"] != of["JPM"] == of["BAC"] and min(sectors) == 0
    last = {panel.assets[place] for place in neighbours[-1][panel.assets.index("XOM")]}
    assert "CVX" in last
