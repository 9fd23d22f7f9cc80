"""What the systems' benchmarks compare by, without a run."""

import sys
from pathlib import Path

import torch

from memfit.files import write_json
from memfit.training import save_checkpoint
from stages_here import digest_of

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from memfit_workloads.benches import contents, differing


def test_runs_are_compared_by_the_bytes_of_their_tensors_and_by_their_results(tmp_path):
    told = {"schema_version": 1, "stage": "fold", "job": "fold_1", "status": "completed", "why": "", "key": ""}
    told |= {"exit_code": 0, "parts": {}, "settings": {}, "code": {}, "outputs": [], "seconds": 1.0}
    told |= {"unforeseen": {}, "reused_from": None}
    left = []
    for run, values, effect in (("first", [float("nan"), 0.0], 0.1), ("second", [float("nan"), -0.0], 0.2)):
        folder = tmp_path / run / "checkpoints" / "fold_1"
        folder.mkdir(parents=True)
        state = {"memfit_checkpoint": 1, "epoch": 1, "fit": "x", "identity": {}}
        state |= {"model": {name: torch.tensor(value) for name, value in zip("ab", values, strict=True)}}
        save_checkpoint(folder / "latest_checkpoint.pt", state)
        made = {"result": {"effect": effect}, "digest": digest_of({"effect": effect}, [])}
        write_json(folder.with_suffix(".json"), told | made)
        left.append(contents(tmp_path / run))
    save_checkpoint(tmp_path / "first/checkpoints/fold_1/ema_epoch_1.pt", state)
    assert differing(left[0], left[0]) == []
    assert differing(*left) == ["fold_1", "fold_1/latest_checkpoint.pt['model']['b']"]
    names = differing(contents(tmp_path / "first"), left[0])
    assert names == ["fold_1/ema_epoch_1.pt['model']['a']", "fold_1/ema_epoch_1.pt['model']['b']"]
