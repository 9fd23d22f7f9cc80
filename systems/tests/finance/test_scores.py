"""Tables of scores become matrices, or are refused."""

from __future__ import annotations

import datetime
import math

import numpy as np
import pyarrow as pa
import pytest

from memfit.errors import DataError
from memfit_workloads.finance import join_scores, read_scores

EARLIER, DAY, LATER = (datetime.date(2024, 1, day) for day in (1, 2, 3))


def table(**columns) -> pa.Table:
    rows = {"date": [DAY] * 2, "code": ["B", "A"], "score_h5": [0.2, 0.1], "target_h5": [0.3, None]}
    return pa.table(rows | columns)


def test_a_shuffled_table_comes_back_value_by_value() -> None:
    rng = np.random.default_rng(0)
    dates = np.arange("2024-01-01", "2024-01-21", dtype="datetime64[D]")
    codes = [f"{number:04d}" for number in range(15)]
    cells = rng.permutation(300)[:200]
    score = rng.standard_normal(200).astype(np.float32)
    long = pa.table(
        {
            "date": pa.array(dates[cells // 15], pa.date32()),
            "code": pa.chunked_array([[codes[cell % 15] for cell in part] for part in (cells[:70], cells[70:])]),
            "score_h1": score,
            "target_h1": np.where(score > 0, np.float32(np.nan), score),
            "fold": [1] * 200,
        }
    )
    scores = read_scores(long)
    assert scores.dates.tolist() == np.unique(dates[cells // 15]).tolist()
    assert set(scores.values) == {"score_h1", "target_h1"}
    assert scores.horizons == (1,)
    assert scores.of("score_h1").dtype == np.float64
    assert np.isfinite(scores.of("score_h1")).sum() == 200
    for cell, value in zip(cells, score, strict=True):
        row, column = np.searchsorted(scores.dates, dates[cell // 15]), scores.codes.index(codes[cell % 15])
        assert scores.of("score_h1")[row, column] == value
        assert math.isnan(scores.of("target_h1")[row, column]) == (value > 0)


def test_a_date_and_code_that_come_twice_are_named() -> None:
    with pytest.raises(DataError, match=r"1 pairs of date and code come more than once, first 2024-01-02 A"):
        read_scores(table(code=["A", "A"]))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"code": ["A", None]}, "1 of 2 rows have no code"),
        ({"date": [DAY, None]}, "1 of 2 rows have no date"),
        ({"date": ["2024-01-02", "soon"]}, "column 'date' holds text that is no date"),
        ({"date": [1.5, 2.5]}, "date is of type double"),
        ({"score_h5": [0.1, math.inf]}, "score_h5 is infinite in 1 of 2 rows, first on 2024-01-02, A"),
        ({"score_h5": ["x", "y"]}, "score_h5 is of type string"),
    ],
)
def test_values_that_cannot_be_used_are_refused(columns, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_scores(table(**columns))


def test_a_table_without_scores_and_a_horizon_that_is_absent_are_refused() -> None:
    with pytest.raises(DataError, match=r"has the columns date, code, score\."):
        read_scores(pa.table({"date": [DAY], "code": ["A"], "score": [1.0]}))
    with pytest.raises(DataError, match="no score_h1, but score_h5, target_h5"):
        read_scores(table()).of("score_h1")


def test_a_date_that_several_folds_scored_has_the_last_fold_s_scores() -> None:
    first, second = (table(date=[DAY, day], score_h5=[score] * 2) for day, score in ((DAY, 1.0), (LATER, 2.0)))
    joined = join_scores({2: second, 1: first})
    assert joined.select(["date", "code", "fold", "score_h5"]).to_pylist() == [
        {"date": DAY, "code": "B", "fold": 2, "score_h5": 2.0},
        {"date": LATER, "code": "A", "fold": 2, "score_h5": 2.0},
    ]
    early = first.set_column(0, "date", [[EARLIER] * 2])
    assert join_scores({1: early, 2: second})["fold"].to_pylist() == [1, 1, 2, 2]
