"""The recipe fine-tune: an index of many lines beside wc -l, ten kills, and a training over many lines.

    python benchmarks/recipes.py [--part index|kills|train] [--lines 6000000] ...

Parts: ``index``: lines as long as recipes are written into a temporary file (about 0.6 GB a million), then wc -l and
the index take turns on the warm file; ``kills``: SIGKILL at ten moments, and the results beside an unbroken run's;
``train``: a training over the lines, its memory and waiting, beside a DataLoader that tokenises per item; each record
counted; kills, batch by batch; a file that changes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

import recipes_train
from memfit.data import JsonLines
from memfit.pipeline import Output

CONFIG = Path(__file__).parents[1] / "src/memfit_workloads/recipes/config.yaml"
SETTINGS = ("params.data.num_pairs=400", "params.epochs=6", "params.tiny.d_model=32")
INDEX = """
import sys, time, psutil
from memfit.data import JsonLines
JsonLines.__len__
own = psutil.Process()
before, start = own.memory_full_info().uss, time.perf_counter()
rows = JsonLines(sys.argv[1])
seconds = time.perf_counter() - start
print(len(rows), seconds, own.memory_full_info().uss - before)
"""


def index(folder: Path, num_lines: int) -> None:
    rng, path = random.Random(0), folder / "lines.jsonl"
    block = [
        json.dumps({"ingredients": "a" * rng.randint(80, 300), "recipe": "b" * rng.randint(150, 700)})
        for _ in range(10_000)
    ]
    text = "\n".join(block) + "\n"
    with open(path, "w") as file:
        for _ in range(num_lines // len(block)):
            file.write(text)
    ours, theirs, added = [], [], 0
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(["wc", "-l", str(path)], check=True, stdout=subprocess.DEVNULL)
        theirs.append(time.perf_counter() - start)
        done = subprocess.run([sys.executable, "-c", INDEX, str(path)], check=True, capture_output=True, text=True)
        count, seconds, more = done.stdout.split()
        assert int(count) == num_lines // len(block) * len(block)
        ours.append(float(seconds))
        added = max(added, int(more))
        (folder / "lines.jsonl.index").unlink()
    rows, picked = JsonLines(path), [rng.randrange(num_lines) for _ in range(10_000)]
    start = time.perf_counter()
    same = sum(rows[number] == json.loads(block[number % len(block)]) for number in picked)
    each = (time.perf_counter() - start) / len(picked)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    size, took = path.stat().st_size / 2**30, statistics.median(ours)
    print(f"{size:.2f} GiB: index {took:.2f} s, {ratio:.1f} times wc -l; {added / 2**20:.0f} MiB of its own memory")
    print(f"a random row {each * 1e6:.0f} us, {same} of {len(picked)} right")


def command(folder: Path) -> list[str]:
    words = [sys.executable, "-m", "memfit", "run", str(CONFIG), "--runs-dir", str(folder)]
    return [*words, *(word for one in SETTINGS for word in ("--set", one))]


def found_in(folder: Path) -> dict[str, Any]:
    """Return the results of all stages, and the bytes of the weights."""
    path = max(folder.glob("recipes/run_*"))
    found: dict[str, Any] = {}
    for one in (path / "checkpoints").glob("*.json"):
        found[one.stem] = Output(one).result
    weights = torch.load(path / "checkpoints/stage_train/latest_checkpoint.pt", weights_only=False)["model"]
    return found | {name: value.numpy().tobytes() for name, value in weights.items()}


def kills(folder: Path, num_lines: int) -> None:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    start = time.perf_counter()
    subprocess.run(command(folder / "whole"), check=True, **quiet)  # type: ignore[call-overload]
    seconds = time.perf_counter() - start
    rng, num_kills = random.Random(0), 0
    for _ in range(10):
        process = subprocess.Popen(command(folder / "killed"), **quiet)  # type: ignore[call-overload]
        end = time.monotonic() + rng.uniform(0.15, 0.5) * seconds
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        if process.poll() is None:
            below = psutil.Process(process.pid).children(recursive=True)
            for one in (process, *below):
                try:
                    os.kill(one.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()
            num_kills += 1
    subprocess.run(command(folder / "killed"), check=True, **quiet)  # type: ignore[call-overload]
    expected, found = found_in(folder / "whole"), found_in(folder / "killed")
    different = [name for name in {*expected, *found} if expected.get(name) != found.get(name)]
    print(f"{num_kills} of 10 kills; {len(different)} of {len(expected)} results and tensors differ {different[:3]}")


PARTS: dict[str, Callable[[Path, int], None]] = {"index": index, "kills": kills, "train": recipes_train.run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--lines", type=int, default=6_000_000)
    options = parser.parse_args()
    for part in options.part or PARTS:
        with tempfile.TemporaryDirectory(prefix=f"recipes-{part}-") as name:
            PARTS[part](Path(name), options.lines)


if __name__ == "__main__":
    main()
