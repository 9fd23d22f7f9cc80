"""The judged ranker stops at data that are at fault, finds a signal that is there, and none that is not."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from memfit_workloads import finance
from memfit_workloads.finance import decide_on, evaluate_folds
from memfit_workloads.finance.panels import market
from memfit_workloads.finance.prices import FEATURES, daily_features
from memfit_workloads.ranker.params import RankerParams
from memfit_workloads.ranker.stages import RANKER
from stages_here import StagesHere

pytestmark = pytest.mark.slow

NUM_STOCKS = 20
MODEL = {"patch_size": 5, "width": 8, "num_layers": 1, "num_heads": 1}
JUDGED = {"k_ratio": 0.2, "backtest": {"horizon": 5, "k_ratio": 0.2}}
PARQUET = {
    "source": "parquet", "features": list(FEATURES), "targets": {1: "target_h1", 5: "target_h5"},
    "close": "close", "volume": "volume", "horizons": [5], "main_horizon": 5, "lookback": 5,
}  # fmt: skip
CONFIG = {"schema_version": 1, "target": "memfit_workloads.ranker.stages:RANKER", "seed": 3}
#: A generated market pays what it was asked to pay, which the gate would call implausible.
PLANTED = {
    "k_ratio": 0.2,
    "backtest": {"k_ratio": 0.2},
    "gate": {"max_annual_return": 100.0, "max_sharpe": 50.0},
    "data": {"source": "generated", "num_dates": 240, "num_assets": 60, "num_features": 2, "lookback": 5,
             "information_coefficient": 0.12, "horizons": [2], "main_horizon": 2},
    "splits": {"n_splits": 2, "embargo_size": 2},
    "model": MODEL,
    "train": {"num_epochs": 3, "dates_per_batch": 2, "learning_rate": 5e-3, "ema_decay": 0.9, "ema_epochs": [2, 3]},
}  # fmt: skip


@pytest.fixture(scope="module")
def stocks():
    """A year of real prices with features, targets, and volumes that were drawn."""
    table = daily_features("2015-01-01", "2015-12-31", [1, 5])
    volumes = np.random.default_rng(0).lognormal(14, 1, len(table))
    return table.append_column("volume", pa.array(volumes))


def by_date(table, name):
    """(num_dates, NUM_STOCKS): a column of rows ordered by date and code."""
    return table[name].to_numpy(zero_copy_only=False).reshape(-1, NUM_STOCKS).copy()


def with_column(table, name, values):
    array = pa.array(values.ravel(), from_pandas=True)
    return table.set_column(table.column_names.index(name), name, array)


def a_date_early(table, name):
    """A column whose every value stands a date before the one that it is of."""
    values = by_date(table, name)
    values[:-1], values[-1] = values[1:], np.nan if name.startswith("target") else 0.0
    return with_column(table, name, values)


def with_price_error(table):
    closes = by_date(table, "close")
    closes[100, 7] *= 100
    return with_column(table, "close", closes)


def with_ranks_for_volumes(table):
    ranks = by_date(table, "volume").argsort(axis=1).argsort(axis=1)
    return with_column(table, "volume", (ranks + 1) / NUM_STOCKS)


def judged(folder, table):
    """What the health check says to a file, of scores that were drawn."""
    pq.write_table(table, folder / "stocks.parquet")
    params = RankerParams(data=PARQUET | {"path": folder / "stocks.parquet"}, model=MODEL, **JUDGED)
    prepared = StagesHere(folder, RANKER, params).run("prepare")
    panel, dates = prepared.panel(), prepared.arrays("splits")["test_1"]
    scores = {
        "date": pa.array(np.repeat(panel.dates[dates], NUM_STOCKS), pa.date32()),
        "code": list(panel.assets) * len(dates),
        "score_h5": np.random.default_rng(1).standard_normal(len(dates) * NUM_STOCKS),
    }
    for horizon in (1, 5):
        known = panel.target(f"target_h{horizon}")[dates].ravel()
        scores[f"target_h{horizon}"] = pa.array(known, from_pandas=True)
    rows = pa.table(scores)
    return finance.judge_scores({1: rows}, rows, panel, market(panel, params), params)


def test_real_prices_without_a_fault_have_no_finding(tmp_path, stocks):
    found = judged(tmp_path, stocks)
    assert found.findings == ()
    assert found.verdict.colour != "red"


@pytest.mark.parametrize(
    ("plant", "names", "places"),
    [
        (lambda table: a_date_early(table, "return_1"), ["look_ahead_feature"], "return_1"),
        (lambda table: a_date_early(table, "return_20"), ["look_ahead_feature"], "return_20"),
        (with_price_error, ["price_jump"], "2015-05-28"),
        (with_ranks_for_volumes, ["volume_is_rank"], ""),
        (lambda table: a_date_early(table, "target_h5"), ["wrong_target"], ""),
    ],
    ids=["look_ahead", "look_ahead_of_20_dates", "price_100_times", "ranks_for_volumes", "wrong_target"],
)
def test_a_planted_fault_alone_is_found_by_its_name_and_the_gate_is_red(tmp_path, stocks, plant, names, places):
    found = judged(tmp_path, plant(stocks))
    assert [one.name for one in found.findings if one.severity == "red"] == names
    assert any(places in place for place in found.findings[0].where)
    assert f"data:{names[0]}" in [reason.name for reason in found.verdict.reasons if reason.colour == "red"]
    assert finance.GATE_EXIT_CODES[found.verdict.colour] == 11


def write_config(folder, table):
    """A table as a file, and a config that names it."""
    pq.write_table(table, folder / "stocks.parquet")
    data = PARQUET | {"path": str(folder / "stocks.parquet")}
    params = {"data": data, "splits": {"n_splits": 2}, "model": MODEL, "train": {"num_epochs": 1, "ema_epochs": [1]}}
    folders = {"runs_dir": str(folder / "runs"), "panels_dir": str(folder / "panels")}
    (folder / "config.yaml").write_text(
        json.dumps(CONFIG | folders | {"experiment": "stocks", "params": params | JUDGED})
    )
    return folder / "config.yaml"


@pytest.mark.long
def test_a_date_that_comes_twice_stops_the_command_before_any_fold(tmp_path, stocks):
    config = write_config(tmp_path, pa.concat_tables([stocks, stocks.slice(40 * NUM_STOCKS, NUM_STOCKS)]))
    command = [sys.executable, "-m", "memfit", "run", str(config)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "more than one row for a date and asset; the first are (2015-03-03, AAPL)" in " ".join(done.stderr.split())
    assert not list(tmp_path.glob("runs/stocks/run_*/jobs/fold_1"))


def test_volumes_without_closes_are_refused():
    with pytest.raises(ValidationError, match="volume needs close"):
        RankerParams(data=PARQUET | {"path": "stocks.parquet", "close": None})


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """All stages on a generated market with a signal."""
    here = StagesHere(tmp_path_factory.mktemp("planted"), RANKER, RankerParams.model_validate(PLANTED))
    for name in ("fold", "blend"):
        for fold in (1, 2):
            here.run(name, fold)
    return {name: here.run(name) for name in ("health", "backtest", "decision")}


def test_a_planted_signal_is_better_than_random_out_of_fold(planted):
    found = planted["backtest"].result
    assert planted["health"].facts["status"] == "completed"
    assert planted["decision"].result["verdict"] == "A better"
    assert found["metrics"]["h2_rank_ic"]["mean"] > 0.06
    assert found["summary"]["annual_active_gross"] > 0.3
    assert found["findings"] == []


def test_with_its_targets_shuffled_the_same_scores_show_no_difference(planted, tmp_path):
    table = planted["backtest"].table("scores")
    date, draw = table["date"].to_numpy(), np.random.default_rng(4).random(len(table))
    order = pa.array(np.lexsort((draw, date)))  # rows are ordered by date: others of the same date
    for name in ("target_h1", "target_h2"):
        table = table.set_column(table.column_names.index(name), name, table[name].take(order))
    tables = {fold: table.filter(pa.compute.equal(table["fold"], fold)) for fold in (1, 2)}
    days = evaluate_folds(tables, horizons=(2,), k_ratio=0.2)
    settings = RankerParams.model_validate(PLANTED)
    decision = decide_on(days, settings, name="shuffled")
    assert decision.verdict == "no difference shown"
