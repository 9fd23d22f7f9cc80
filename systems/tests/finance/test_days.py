"""The day table says for each date and horizon what the metrics say."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

from memfit.errors import DataError
from memfit_workloads.finance import (
    Scores,
    evaluate_days,
    evaluate_folds,
    positive_rate,
    precision_at_k,
    quantile_spread,
    rank_ic,
    read_days,
    summarize,
    summarize_days,
)


def description(table: pa.Table) -> dict:
    return json.loads(table.schema.metadata[b"memfit_days"])


def made(num_dates: int = 6, num_assets: int = 10, first: str = "2024-01-01", seed: int = 0) -> Scores:
    rng = np.random.default_rng(seed)
    values = {
        f"{kind}_h{h}": rng.standard_normal((num_dates, num_assets)) for kind in ("score", "target") for h in (1, 5)
    }
    values["target_h5"][-2:] = np.nan  # not known yet
    values["score_h1"][0, 0] = values["score_h5"][0, 0] = np.nan
    dates = np.datetime64(first, "D") + np.arange(num_dates)
    return Scores(dates, tuple(f"A{number}" for number in range(num_assets)), values)


def test_each_column_is_its_metric() -> None:
    scores = made()
    days = evaluate_days(scores, horizons=[1, 5], k_ratio=0.3)
    assert days.column_names[:3] == ["fold", "date", "num_assets"]
    assert len(days.column_names) == 3 + 2 * 5
    assert days.column("date")[0].as_py() == datetime.date(2024, 1, 1)
    assert days.column("num_assets").to_pylist() == [9, 10, 10, 10, 10, 10]
    for h in (1, 5):
        pair = scores.of(f"score_h{h}"), scores.of(f"target_h{h}")
        precision, random = precision_at_k(*pair, k_ratio=0.3), positive_rate(*pair)
        for name, expected in {
            "rank_ic": rank_ic(*pair),
            "p_at_k_pos": precision,
            "random_p_at_k_pos": random,
            "delta_p_at_k_pos": precision - random,
            "spread": quantile_spread(*pair),
        }.items():
            np.testing.assert_array_equal(days.column(f"h{h}_{name}").to_numpy(), expected)
    assert np.isnan(days.column("h5_rank_ic").to_numpy()).tolist() == [False] * 4 + [True] * 2
    with pytest.raises(DataError, match="no score_h20"):
        evaluate_days(scores, horizons=[20], k_ratio=0.3)


def test_folds_are_put_together_by_date_and_may_share_dates() -> None:
    folds = {2: made(4, first="2024-01-01", seed=2), 1: made(4, first="2024-01-03", seed=1)}
    days = evaluate_folds(folds, horizons=[1], k_ratio=0.2)
    assert days.column("fold").to_pylist() == [2, 2, 1, 2, 1, 2, 1, 1]
    of_first = days.filter(pa.compute.equal(days.column("fold"), 1)).drop_columns("fold")
    assert of_first.equals(evaluate_days(folds[1], horizons=[1], k_ratio=0.2).drop_columns("fold"))


def test_tables_of_folds_are_read_and_their_universe_is_that_of_all() -> None:
    def table(codes: str, score: float | None) -> pa.Table:
        scores = [1.0, 2.0, score]
        rows = {"date": [datetime.date(2024, 1, 2)] * 3, "code": list(codes), "score_h1": scores}
        return pa.table(rows | {"target_h1": [0.1, -0.1, 0.2]})

    both = description(evaluate_folds({1: table("ABC", None), 2: table("ABD", 3.0)}, horizons=[1], k_ratio=0.2))
    assert (both["num_codes"], both["k_ratio"]) == (3, 0.2)  # C was never scored
    for codes in ("DBA", "ABC"):
        alone = description(evaluate_folds({1: table(codes, 3.0)}, horizons=[1], k_ratio=0.2))
        assert (alone == both) == (codes == "DBA")


@pytest.mark.proves("S0-37")
def test_a_day_of_random_scores_has_a_lift_of_zero_in_the_mean() -> None:
    days = evaluate_days(made(2000, 40), horizons=[1], k_ratio=0.1)
    lift = days.column("h1_delta_p_at_k_pos").to_numpy()
    assert abs(lift.mean()) < 4 * lift.std() / math.sqrt(len(lift))


@pytest.mark.proves("S2-22")
def test_each_metric_is_summarised_with_the_standard_error_of_its_horizon() -> None:
    days = evaluate_days(made(200, 20), horizons=[1, 5], k_ratio=0.2)
    found = summarize_days(days)
    assert list(found) == days.column_names[3:]
    for horizon in (1, 5):
        expected = summarize(days.column(f"h{horizon}_rank_ic").to_numpy(), horizon)
        assert found[f"h{horizon}_rank_ic"] == expected
        assert expected.standard_error > 0
    assert (found["h5_rank_ic"].num_dates, found["h5_rank_ic"].num_undefined) == (198, 2)
    twice = evaluate_folds({1: made(200, 20), 2: made(200, 20)}, horizons=[1, 5], k_ratio=0.2)
    assert summarize_days(twice)["h5_rank_ic"] == found["h5_rank_ic"]
    named = days.rename_columns([name.replace("h5_", "") for name in days.column_names])
    assert math.isnan(summarize_days(named)["rank_ic"].standard_error)


def test_a_table_in_a_folder_or_its_results_keeps_what_it_was_evaluated_with(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/stage_backtest").mkdir(parents=True)
    for name, k_ratio in (("checkpoints/stage_backtest/days.feather", 0.3), ("days.feather", 0.4)):
        pyarrow.feather.write_feather(evaluate_days(made(), horizons=[1], k_ratio=k_ratio), tmp_path / name)
        assert description(read_days(tmp_path))["k_ratio"] == k_ratio  # the folder's own goes before its results'
    assert description(read_days(tmp_path / "checkpoints/stage_backtest"))["k_ratio"] == 0.3
