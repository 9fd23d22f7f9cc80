"""The video classifier: under kills, with a leak on purpose, with collections on; and its decoder beside a plain one.

    python benchmarks/video.py [--part kills|leak|cleanup|decode|clips] ...

Parts: ``kills``: SIGKILL after each stage and twice in fold 3, and the results beside an unbroken run's; ``leak``:
labels drawn at random for each group, with folds of whole groups and of single videos; ``cleanup``: what each kind of
garbage collection freed and cost; ``decode``: clips a second, and memory, against decoding whole files; ``clips``:
300 clips, a tenth of them damaged, in five folds under one real limit into which two plain folds fit, killed 20 times
(needs root and a memory cgroup; at most 4 GiB).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
from pyarrow import feather

from limited import Limited, find_parent
from memfit.pipeline import Output
from memfit.rundir import RunDir
from memfit.units import format_bytes
from memfit_workloads.video.clips import make_clips
from memfit_workloads.video.decode import sample_frames

CONFIG = Path(__file__).parents[1] / "src/memfit_workloads/video/config.yaml"
#: What decoding adds to the memory of a worker that has imported torch and av, at its peak, in MiB.
ADDED = """
import sys, threading
from pathlib import Path
import av, psutil, torch
from memfit_workloads.video.decode import probe, sample_frames
own, peaks, ended = psutil.Process(), [], threading.Event()
def watch():
    while not ended.wait(0.01):
        peaks.append(own.memory_full_info().uss)
watcher = threading.Thread(target=watch)
before = own.memory_full_info().uss
watcher.start()
sample_frames(Path(sys.argv[1]), 16, 112)
ended.set()
watcher.join()
info = probe(Path(sys.argv[1]))
print(f"{info.width} x {info.height}, {info.seconds:.0f} s: adds {(max(peaks) - before) / 2**20:.1f} MiB")
"""
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
CLIPS = (
    "params.data.num_clips=300", "params.data.bad_share=0.1", "params.clip.size=32", "params.train.num_epochs=6",
)  # fmt: skip
MOST_BYTES = 4 << 30


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
    for width, height, seconds in ((1280, 720, 10), (1280, 720, 60), (640, 360, 600), (3840, 2160, 5)):
        clip = folder / "long.mp4"
        write_clip(clip, width, height, seconds)
        subprocess.run([sys.executable, "-c", ADDED, str(clip)], check=True)


def write_clip(path: Path, width: int, height: int, seconds: int) -> None:
    """Write a clip of noise that moves, at 24 frames a second."""
    noise = np.random.default_rng(0).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    picture = np.ascontiguousarray(noise.repeat(4, axis=0).repeat(4, axis=1))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(24 * seconds):
            if number % 24 == 0:
                picture = np.ascontiguousarray(np.roll(picture, 8, axis=1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def clips(folder: Path) -> None:
    parent = find_parent()
    if parent is None:
        sys.exit("clips: needs root and a memory cgroup")
    whole = run(folder / "whole", CLIPS)
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
    rng, words, num_kills = random.Random(0), command(folder / "killed", CLIPS), 0
    with Limited(parent, limit) as group:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for place in (*STAGES, "fold 3, epoch 2", "fold 3, epoch 2", *["any"] * 10):
            process = group.start(words, **quiet)
            end = time.monotonic() + rng.uniform(3, 9)
            while process.poll() is None and not (
                time.monotonic() > end if place == "any" else is_past(folder / "killed", place)
            ):
                time.sleep(0.02)
            num_kills += process.poll() is None
            while pids := (group.path / "cgroup.procs").read_text().split():
                for pid in pids:
                    os.kill(int(pid), signal.SIGKILL)
                process.wait()
                time.sleep(0.1)
        code = group.start(words, **quiet).wait()
        print(f"memfit: {num_kills} of 20 kills, exit code {code}, {group.num_oom_kills} kernel kills, charged peak "
              f"{format_bytes(group.peak_bytes)}")  # fmt: skip
    expected, found = found_in(whole), found_in(max((folder / "killed").glob("video/run_*")))
    different = [name for name in {*expected, *found} if expected.get(name) != found.get(name)]
    skipped = found["stage_load_data"]["num_skipped"]
    print(f"{len(different)} of {len(expected)} results differ {different[:3]}; {skipped} damaged clips were skipped")


PARTS: dict[str, Callable[[Path], None]] = {
    "kills": kills,
    "leak": leak,
    "cleanup": cleanup,
    "decode": decode,
    "clips": clips,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS)
    for part in parser.parse_args().part or PARTS:
        with tempfile.TemporaryDirectory(prefix=f"video-{part}-") as name:
            PARTS[part](Path(name))


if __name__ == "__main__":
    main()
