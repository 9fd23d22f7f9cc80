"""The judged ranker finds a signal that is there, and none that is not."""

import numpy as np
import pyarrow as pa
import pytest

from memfit_workloads.finance import decide_on, evaluate_folds
from memfit_workloads.ranker.params import RankerParams
from memfit_workloads.ranker.stages import RANKER
from stages_here import StagesHere

pytestmark = pytest.mark.slow

MODEL = {"patch_size": 5, "width": 8, "num_layers": 1, "num_heads": 1}
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
