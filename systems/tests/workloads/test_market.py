"""Generated markets: the planted rank IC is there, they are the same each time, and they say what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memfit.errors import UsageError
from memfit_workloads.finance import rank_ic
from memfit_workloads.finance.generated import SIGNAL_DATES, Market, planted_signal, write_market

SMALL = Market(num_dates=60, num_assets=40, num_features=3, turnover=0.5, seed=3)


def written(path: Path, market: Market, **options: int) -> pa.Table:
    write_market(path / "market.parquet", market, **options)
    return pq.read_table(path / "market.parquet")


def dense(table: pa.Table, market: Market, column: str) -> np.ndarray:
    return table.column(column).to_numpy().reshape(market.num_dates, market.num_assets)


@pytest.mark.parametrize(("main", "planted"), [(5, 0.3), (2, -0.2), (20, 0.1)])
def test_the_measured_rank_ic_at_every_horizon_is_the_one_in_closed_form(
    tmp_path: Path, main: int, planted: float
) -> None:
    market = Market(600, 300, 1, planted, horizon=main, horizons=(1, 5, 10, 20), turnover=0.0, seed=1)
    assert market.rank_ic(main) == pytest.approx(planted, abs=1e-12)
    table = written(tmp_path, market)
    signal = planted_signal(dense(table, market, "f00"))
    for horizon in market.labels:
        measured = rank_ic(signal, dense(table, market, f"target_h{horizon}")[SIGNAL_DATES - 1 :])
        # Labels overlap, so about one date in (horizon + signal) is new.
        error = 1 / np.sqrt(299 * 596 / (horizon + SIGNAL_DATES - 1))
        assert np.nanmean(measured) == pytest.approx(market.rank_ic(horizon), abs=4 * error), horizon


def test_the_labels_of_all_horizons_are_the_returns_of_the_closes(tmp_path: Path) -> None:
    market = Market(120, 30, 2, 0.2, horizon=5, horizons=(3, 20), turnover=0.0, seed=4)
    table = written(tmp_path, market)
    closes = dense(table, market, "close")
    assert market.label_names == ("target_h1", "target_h3", "target_h5", "target_h20")
    for horizon in market.labels:
        labels = dense(table, market, f"target_h{horizon}")
        assert labels[:-horizon] == pytest.approx(closes[horizon:] / closes[:-horizon] - 1, abs=1e-6)
        assert np.isnan(labels[-horizon:]).all()
    returns = np.diff(np.log(closes), axis=0)
    assert returns.std() == pytest.approx(market.volatility, rel=0.03)


def test_a_rank_ic_that_no_return_can_have_is_refused() -> None:
    for most in (0.35, -0.35):
        with pytest.raises(UsageError, match=f"information_coefficient={most}"):
            Market(100, 10, 1, information_coefficient=most, horizon=20)
    assert Market(100, 10, 1, information_coefficient=0.2999, horizon=20).loading == pytest.approx(1, abs=0.01)


def test_the_numbers_do_not_depend_on_the_row_groups_but_on_the_seed(tmp_path: Path) -> None:
    whole = written(tmp_path, SMALL)
    for rows_per_group in (1, 7 * SMALL.num_assets + 1):
        assert written(tmp_path, SMALL, rows_per_group=rows_per_group) == whole
    assert pq.ParquetFile(tmp_path / "market.parquet").num_row_groups == 9  # 8 of 7 dates, and 4 left over
    other = written(tmp_path, replace(SMALL, seed=4))
    assert other.column("f00").to_pylist()[:50] != whole.column("f00").to_pylist()[:50]


def test_assets_that_are_listed_late_or_delisted_have_no_rows_outside_their_time(tmp_path: Path) -> None:
    table = written(tmp_path, SMALL)
    assert len(table) < SMALL.num_dates * SMALL.num_assets
    day, code = (
        table.column(name).dictionary_encode().combine_chunks().indices.to_numpy() for name in ("date", "code")
    )
    assert (np.diff(day) >= 0).all()
    stretches = [day[code == asset] for asset in np.unique(code)]
    assert all((np.diff(listed) == 1).all() for listed in stretches)  # one each, in order
    late, early = (sum(bool(listed[at] != day[at]) for listed in stretches) for at in (0, -1))
    assert (late, early) == (10, 10)  # half of the assets, half of those at each end


@pytest.mark.parametrize("wrong", [{"num_dates": 5}, {"horizon": 0}, {"horizons": (90,), "num_dates": 60}])
def test_a_market_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"{list(wrong)[-1]} is {list(wrong.values())[-1]}"):
        replace(SMALL, **wrong)
