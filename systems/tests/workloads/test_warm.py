"""The code of the workloads may be forked: what their stages import begins no thread and holds nothing open."""

from pathlib import Path

import pytest

import memfit_workloads
from memfit.pipeline import Warm, order_of_config

WORKLOADS = Path(memfit_workloads.__file__).parent


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["ranker", "forecaster", "video", "recipes"])
def test_every_stage_of_a_workload_may_start_warm(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Warm() as warm:
        order = order_of_config(WORKLOADS / name / "config.yaml", warm=warm)
        assert warm.parent is not None
        for stage in order.stages:
            warm.parent.load(uses=list(stage.code))
            assert warm.parent.refused == ""
        assert warm.parent.used_bytes > 200 << 20  # torch is there
