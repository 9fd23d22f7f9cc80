"""Real prices against the raw file, and no look into the future."""

from __future__ import annotations

import csv
import datetime
import gzip
import importlib.util
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import DataError
from memfit_workloads.finance.prices import FEATURES, daily_features, features_of


@pytest.fixture(scope="module")
def raw() -> list[dict[str, str]]:
    """The file read by other means: the standard library's gzip and csv."""
    spec = importlib.util.find_spec("skfolio")
    with gzip.open(Path(spec.origin).parent / "datasets/data/sp500_dataset.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def standardised(values: dict[str, float], code: str) -> float:
    return (values[code] - statistics.fmean(values.values())) / statistics.pstdev(values.values())


@pytest.mark.parametrize(("day", "code"), [("2008-10-10", "JPM"), ("2020-03-16", "XOM")])
def test_features_and_target_are_what_the_raw_file_gives_by_hand(
    raw: list[dict[str, str]], day: str, code: str
) -> None:
    now = [row["Date"] for row in raw].index(day)
    codes = [name for name in raw[0] if name != "Date"]

    def close(name: str, offset: int) -> float:
        return float(raw[now + offset][name])

    def volatility(name: str) -> float:
        return statistics.stdev(close(name, -k) / close(name, -k - 1) - 1 for k in range(20))

    by_hand = {f"return_{n}": {c: close(c, 0) / close(c, -n) - 1 for c in codes} for n in (1, 5, 20)}
    by_hand["volatility_20"] = {c: volatility(c) for c in codes}
    by_hand["distance_high_60"] = {c: close(c, 0) / max(close(c, -k) for k in range(60)) - 1 for c in codes}

    rows = daily_features("2005-01-01", "2020-12-31", horizons=[1, 5]).to_pylist()
    [row] = [row for row in rows if str(row["date"]) == day and row["code"] == code]
    for feature in FEATURES:
        assert row[feature] == pytest.approx(standardised(by_hand[feature], code), rel=1e-5, abs=1e-6)
    for horizon in (1, 5):
        assert row[f"target_h{horizon}"] == pytest.approx(close(code, horizon) / close(code, 0) - 1, rel=1e-6)
    assert row["close"] == close(code, 0)


def test_the_rows_are_every_trading_day_and_asset_from_the_first_with_a_full_history_on_in_order(raw) -> None:
    table = daily_features(datetime.date(1980, 3, 1), "1990-06-30", horizons=[2])
    days = [row["Date"] for row in raw[59:] if row["Date"] <= "1990-06-30"]
    codes = sorted(name for name in raw[0] if name != "Date")
    assert table.column_names == ["date", "code", *FEATURES, "close", "target_h2"]
    assert [(str(row["date"]), row["code"]) for row in table.to_pylist()] == [(d, c) for d in days for c in codes]


def test_a_later_end_resolves_the_labels_that_end_after_the_earlier_one_and_changes_nothing_else() -> None:
    early = daily_features("2015-01-01", "2015-06-30", horizons=[1, 7])
    late = daily_features("2015-01-01", "2015-12-31", horizons=[1, 7]).slice(0, early.num_rows)
    for horizon in (1, 7):
        before, after = (table.column(f"target_h{horizon}").to_numpy() for table in (early, late))
        assert np.isnan(before[-20 * horizon :]).all()
        assert not np.isnan(after).any()
        assert (before[: -20 * horizon] == after[: -20 * horizon]).all()
    targets = ["target_h1", "target_h7"]
    assert late.drop_columns(targets) == early.drop_columns(targets)


@settings(max_examples=40, deadline=None)
@given(st.integers(59, 119), st.integers(0, 2**32))
def test_prices_after_a_date_change_no_feature_up_to_it(now: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    closes = np.exp(rng.normal(0, 0.02, (120, 6)).cumsum(axis=0))
    changed = closes.copy()
    changed[now + 1 :] *= rng.uniform(0.1, 10, changed[now + 1 :].shape)
    before, after = features_of(closes), features_of(changed)
    assert np.isnan(before[:59]).all()
    assert before[59 : now + 1].tobytes() == after[59 : now + 1].tobytes()
    if now < 119:
        assert not np.array_equal(before[now + 1], after[now + 1])


def test_a_date_of_equal_assets_has_features_of_zero_and_one_without_a_history_has_none() -> None:
    closes = np.repeat(np.exp(np.random.default_rng(0).normal(0, 0.02, 70).cumsum())[:, None], 3, axis=1)
    assert (features_of(closes)[59:] == 0).all()
    assert np.isnan(features_of(closes[:59])).all()


@pytest.mark.parametrize(
    ("start", "end", "horizons"),
    [("2015-12-31", "2015-01-01", [5]), ("2023-01-01", "2024-01-01", [5]), ("2015-01-05", "2015-01-09", [1, 5]),
     ("2015-01-01", "2015-12-31", [0, 5]), ("1990-01-02", "1990-03-01", [1])],
)  # fmt: skip
def test_a_time_without_a_labelled_row_is_refused(start: str, end: str, horizons: list[int]) -> None:
    with pytest.raises(DataError, match="dates with features lie") as caught:
        daily_features(start, end, horizons)
    assert "1990-03-27 to 2022-12-28" in caught.value.remedy


@pytest.mark.slow
def test_prices_are_read_without_skfolios_code_and_where_pandas_is_not_installed() -> None:
    code = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'")

sys.meta_path.insert(0, Without())
from memfit_workloads.finance.prices import daily_features
print(daily_features("2015-01-01", "2015-12-31", [5]).num_rows, {"skfolio", "sklearn"} & set(sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["5040", "set()"]
