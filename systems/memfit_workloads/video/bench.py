"""The video classifier: 300 clips, a tenth of them damaged, in five folds under a limit, killed 20 times.

    make bench NAME=video

Two plain folds fit into the limit, a real one (needs root and a memory cgroup; at most 4 GiB).
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Limited, find_parent, parser
from memfit.rundir import RunDir
from memfit.units import format_bytes
from memfit_workloads.benches import command, contents, differing, run

CONFIG = Path(__file__).with_name("config.yaml")
#: A fold as it is often written: all clips decoded whole, and held while a plain loop trains.
NAIVE = """
import sys, av, numpy as np, torch
from pathlib import Path
from memfit.pipeline import Output
from memfit_workloads.video.model import ClipNet
checkpoints, fold = Path(sys.argv[1]) / "checkpoints", int(sys.argv[2])
load = Output(checkpoints / "stage_load_data.json")
folds = Output(checkpoints / "stage_create_kfold_splits.json").table("splits")["fold"].to_numpy()
videos, clips = load.table("videos"), []
for name in videos["path"].to_pylist():
    with av.open(str(load.dir / name)) as container:
        clips.append(np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]))
classes = torch.tensor(videos["class"].to_numpy()).float()
model = ClipNet(8)
optimizer = torch.optim.AdamW(model.parameters())
rows = [row for row in range(len(clips)) if folds[row] not in (0, fold)]
for epoch in range(3):
    for start in range(0, len(rows), 8):
        part = rows[start : start + 8]
        picked = [clips[row][np.linspace(0, len(clips[row]) - 1, 16).astype(int), ::4, ::5] for row in part]
        frames = torch.from_numpy(np.stack(picked)).permute(0, 1, 4, 2, 3)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(frames), classes[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
CLIPS = {"data.num_clips": 300, "data.bad_share": 0.1, "clip.size": 32, "train.num_epochs": 6}
MOST_BYTES = 4 << 30


def is_past(folder: Path, place: str) -> bool:
    """Whether a stage of the run has ended, or the third fold its first epoch."""
    for path in folder.glob("video/run_*"):
        if place != "fold 3, epoch 2":
            return (path / "checkpoints" / f"{place}.json").exists()
        events = [one for one in RunDir(path).events() if one["kind"] == "epoch" and one.get("job") == "fold_3"]
        return any(one["epoch"] >= 1 for one in events)
    return False


def clips(folder: Path) -> None:
    parent = find_parent()
    if parent is None:
        sys.exit("video: needs root and a memory cgroup")
    whole = Path(run(CONFIG, CLIPS | {"runs_dir": folder / "whole"})["run"])
    naive = [sys.executable, "-c", NAIVE, str(whole)]
    with Limited(parent, MOST_BYTES) as group:
        if group.start([*naive, "1"]).wait():
            sys.exit("the plain fold failed")
        alone = group.peak_bytes
    limit = int(2.2 * alone)
    with Limited(parent, limit) as group:
        codes = [one.wait() for one in [group.start([*naive, str(fold)]) for fold in range(1, 6)]]
        print(f"a plain fold: {format_bytes(alone)}; the limit: {format_bytes(limit)}; of five plain folds at once "
              f"{sum(code != 0 for code in codes)} died, {group.num_oom_kills} kernel kills")  # fmt: skip
    killed, rng, num_kills = folder / "killed", random.Random(0), 0
    words = command(CONFIG, CLIPS | {"runs_dir": killed})
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    stages = ("load_data", "create_kfold_splits", "generate_augmentations", "create_datasets", "create_loaders")
    places = [f"stage_{name}" for name in (*stages, "initialize_model")] + ["fold_1", "fold_2"]
    with Limited(parent, limit) as group:
        for place in [*places, *["fold 3, epoch 2"] * 2, *["any"] * 10]:
            process, end = group.start(words, **quiet), time.monotonic() + rng.uniform(3, 9)
            while process.poll() is None and not (time.monotonic() > end if place == "any" else is_past(killed, place)):
                time.sleep(0.02)
            num_kills += process.poll() is None
            group.end_all()
            process.wait()
        code = group.start(words, **quiet).wait()
        print(f"memfit: {num_kills} of 20 kills, exit code {code}, {group.num_oom_kills} kernel kills, charged peak "
              f"{format_bytes(group.peak_bytes)}")  # fmt: skip
    expected, found = contents(whole), contents(next(killed.glob("video/run_*")))
    different, skipped = differing(expected, found), found["stage_load_data"]["num_skipped"]
    print(f"{len(different)} of {len(expected)} results differ {different[:3]}; {skipped} damaged clips were skipped")


if __name__ == "__main__":
    parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="video-") as name:
        clips(Path(name))
