"""The ranker, killed in an epoch, leaves what its stages leave in one process; no epoch runs twice."""

import json
from collections import Counter

import pytest

import kills
from memfit_workloads.ranker.params import RankerParams
from memfit_workloads.ranker.stages import RANKER
from stages_here import StagesHere

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

PARAMS = {
    "data": {"source": "generated", "num_dates": 110, "num_assets": 10, "num_features": 2, "lookback": 10,
             "information_coefficient": 0.5, "horizons": [1, 2], "main_horizon": 2},
    "splits": {"n_splits": 2, "embargo_size": 2},
    "model": {"patch_size": 5, "width": 16, "num_layers": 1, "num_heads": 2},
    "train": {"num_epochs": 3, "dates_per_batch": 2, "learning_rate": 3.0e-3, "ema_epochs": [2, 3], "tau_days": 60.0,
              "device": "cpu"},
    "backtest": {"horizon": 2},
    "gate": {"min_dates": 5, "max_annual_return": 100, "max_sharpe": 100},
}  # fmt: skip


@pytest.mark.proves("S0-48")
def test_the_ranker_killed_in_an_epoch_leaves_what_its_stages_leave_here(tmp_path, one_thread):
    here = StagesHere(tmp_path / "here", RANKER, RankerParams.model_validate(PARAMS), seed=7)
    for fold in (1, 2):
        here.run("fold", fold)
        here.run("blend", fold)
    for name in ("health", "backtest"):
        here.run(name)
    content = {"schema_version": 1, "experiment": "ranker", "target": "memfit_workloads.ranker.stages:RANKER"}
    (tmp_path / "config.yaml").write_text(json.dumps(content | {"seed": 7, "params": PARAMS}))
    killed = kills.run(tmp_path, kill_at=[kills.epoch("fold_1", 1)])

    left, found = (kills.numbers_in(one) for one in (here.run_dir, killed.path))
    assert found.pop("stage_decision")["metric"] == "h2_rank_ic"
    assert found == left
    assert {"blend_1", "fold_2", "fold_2/latest", "stage_backtest"} < set(left)
    assert (killed.path / "kfold_results.feather").is_file()
    assert kills.epochs(killed) == Counter((f"fold_{fold}", epoch) for fold in (1, 2) for epoch in (1, 2, 3))
