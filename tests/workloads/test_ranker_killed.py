"""The ranker, killed in an epoch, leaves what an unbroken run leaves; no epoch runs twice.

`make bench-ranker` kills it at ten random moments.
"""

from collections import Counter

import pytest

import kills

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

CONFIG = """
schema_version: 1
experiment: ranker
target: memfit_workloads.ranker.stages:RANKER
seed: 7
params:
  data: {source: generated, num_dates: 110, num_assets: 10, num_features: 2, lookback: 10,
         information_coefficient: 0.5, horizons: [1, 2], main_horizon: 2}
  splits: {n_splits: 2, embargo_size: 2}
  model: {patch_size: 5, width: 16, num_layers: 1, num_heads: 2}
  train: {num_epochs: 3, dates_per_batch: 2, learning_rate: 3.0e-3, ema_epochs: [2, 3], tau_days: 60.0, device: cpu}
  backtest: {horizon: 2}
  gate: {min_dates: 5, max_annual_return: 100, max_sharpe: 100, max_hit_rate: 1.0, max_rank_ic: 1.0}
"""


def test_the_ranker_killed_in_an_epoch_leaves_the_same(tmp_path):
    for name in ("quieta", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(CONFIG)
    quiet = kills.run(tmp_path / "quieta")
    killed = kills.run(tmp_path / "killed", kill_at=[kills.epoch("fold_1", 1)])

    left = kills.left_by(quiet)
    found = kills.left_by(killed)
    # The decision names the folder of its run.
    assert found.pop("stage_decision")["status"] == left["stage_decision"]["status"] == "completed"
    assert found == {name: one for name, one in left.items() if name != "stage_decision"}
    assert {"stage_decision", "blend_1", "fold_2", "fold_2/latest_checkpoint.pt", "kfold_results.feather"} < set(left)
    assert kills.epochs(quiet) == Counter((f"fold_{fold}", epoch) for fold in (1, 2) for epoch in (1, 2, 3))
    assert kills.epochs(killed) == kills.epochs(quiet)
