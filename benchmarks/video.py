"""The video classifier: under kills, with a leak on purpose, with collections on; and its decoder beside a plain one.

    python benchmarks/video.py [--part kills|leak|cleanup|decode] ...

Parts: ``kills``: SIGKILL after each stage and twice in fold 3, and the results beside an unbroken run's; ``leak``:
labels drawn at random for each group, with folds of whole groups and of single videos; ``cleanup``: what each kind of
garbage collection freed and cost; ``decode``: clips a second, and memory, against decoding whole files.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from pyarrow import feather

from memfit.pipeline import Output
from memfit.rundir import RunDir
from memfit_workloads.video.clips import make_clips
from memfit_workloads.video.decode import sample_frames

CONFIG = Path(__file__).parents[1] / "src/memfit_workloads/video/config.yaml"
SHORT = ("params.data.num_clips=96", "params.clip.size=32", "params.train.num_epochs=3", "params.data.bad_share=0.1")
STAGES = (
    "stage_load_data", "stage_create_kfold_splits", "stage_generate_augmentations", "stage_create_datasets",
    "stage_create_loaders", "stage_initialize_model", "fold_1", "fold_2",
)  # fmt: skip
PLAIN = """
import sys, time, av, numpy as np
for path in sys.argv[1:]:
    with av.open(path) as container:
        whole = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    picked = whole[np.linspace(0, len(whole) - 1, 16).astype(int)]
"""
STREAM = """
import sys
from pathlib import Path
from memfit_workloads.video.decode import sample_frames
for path in sys.argv[1:]:
    sample_frames(Path(path), 16, 112)
"""


def command(folder: Path, settings: Sequence[str], *more: str) -> list[str]:
    words = [sys.executable, "-m", "memfit", "run", str(CONFIG), "--runs-dir", str(folder), *more]
    return [*words, *(word for one in settings for word in ("--set", one))]


def run(folder: Path, settings: Sequence[str], *more: str) -> Path:
    subprocess.run(command(folder, settings, *more), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return max(folder.glob("video/run_*"))


def found_in(path: Path) -> dict[str, Any]:
    """Return the results of all stages, and the bytes of tables and arrays and of the last weights."""
    import torch

    found: dict[str, Any] = {one.stem: Output(one).result for one in (path / "checkpoints").glob("*.json")}
    for file in (path / "checkpoints").rglob("*"):
        if file.suffix in (".feather", ".npy"):
            found[str(file.relative_to(path))] = file.read_bytes()
        elif file.name == "latest_checkpoint.pt":
            weights = torch.load(file, weights_only=False)["model"]
            found[str(file.relative_to(path))] = [value.numpy().tobytes() for value in weights.values()]
    return found


def kills(folder: Path) -> None:
    expected = found_in(run(folder / "whole", SHORT))
    num_kills = 0
    words = command(folder / "killed", SHORT, "--max-parallel", "1")
    for place in (*STAGES, "fold 3, epoch 2", "fold 3, epoch 2"):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not is_past(folder / "killed", place):
            time.sleep(0.01)
        if process.poll() is None:
            below = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for one in below:
                try:
                    os.kill(one.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()
            num_kills += 1
    path = run(folder / "killed", SHORT, "--max-parallel", "1")
    found = found_in(path)
    jobs = json.loads((path / "outcome.json").read_text())["jobs"].values()
    num_ooms = sum(job["state"] == "out_of_memory" for job in jobs)
    different = [name for name in {*expected, *found} if expected.get(name) != found.get(name)]
    print(f"{num_kills} of 10 kills; {len(different)} of {len(expected)} results differ; out of memory {num_ooms}")


def is_past(folder: Path, place: str) -> bool:
    paths = list(folder.glob("video/run_*"))
    if not paths or not place.startswith("fold 3"):
        return bool(paths) and (paths[0] / "checkpoints" / f"{place}.json").exists()
    events = RunDir(paths[0]).events()
    return any(one["kind"] == "epoch" and one.get("job") == "fold_3" and one["epoch"] >= 1 for one in events)


def leak(folder: Path) -> None:
    settings = (*SHORT[:2], "params.train.labels=random", "params.train.num_epochs=25", "params.num_versions=1")
    for grouped in ("true", "false"):
        path = run(folder / grouped, (*settings, f"params.splits.grouped={grouped}"))
        table = feather.read_table(path / "kfold_results.feather")
        pooled = Output(path / "checkpoints/stage_evaluate.json").json("scores")["pooled"]["accuracy"]
        train = sum(table["train_accuracy"].to_pylist()) / len(table)
        shown = f"{pooled['value']:.3f} ({pooled['low']:.3f} to {pooled['high']:.3f})"
        print(f"random labels, grouped {grouped}: train accuracy {train:.3f}, out of fold {shown}")


def cleanup(folder: Path) -> None:
    kinds = ("before_stage=true", "after_stage=true", "after_fold=true", "after_epoch=true", "every_batches=5")
    for kind in kinds:
        path = run(folder / kind.partition("=")[0], (*SHORT, f"params.cleanup.{kind}"), "--units", "1")
        done = [event for event in RunDir(path).events() if event["kind"] == "cleanup"]
        host = sum(event["host_bytes"] for event in done) / 2**20
        seconds = sum(event["seconds"] for event in done)
        objects = sum(event["num_objects"] for event in done)
        print(f"{kind:20} {len(done):3} times, {objects} objects, {host:.1f} MiB, {seconds:.2f} s")


def decode(folder: Path) -> None:
    clips = folder / "clips"
    table = make_clips(clips, 60, 0, seconds=5.0)
    paths = [str(clips / one) for one in table["path"].to_pylist()]
    for path in paths[:2]:
        sample_frames(Path(path), 16, 112)
    for name, program in (("whole files", PLAIN), ("streamed", STREAM), ("whole files", PLAIN), ("streamed", STREAM)):
        start, most = time.perf_counter(), 0
        process = psutil.Popen([sys.executable, "-c", program, *paths])
        while process.poll() is None:
            try:
                most = max(most, process.memory_info().rss)
            except psutil.Error:
                break
            time.sleep(0.01)
        print(f"{name:12} {60 / (time.perf_counter() - start):6.1f} clips a second, peak {most / 2**20:.0f} MiB")


PARTS: dict[str, Callable[[Path], None]] = {"kills": kills, "leak": leak, "cleanup": cleanup, "decode": decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS)
    for part in parser.parse_args().part or PARTS:
        with tempfile.TemporaryDirectory(prefix=f"video-{part}-") as name:
            PARTS[part](Path(name))


if __name__ == "__main__":
    main()
