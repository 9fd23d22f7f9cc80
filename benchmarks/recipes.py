"""The recipe fine-tune: ten kills, a training over many lines, and what compiling gains.

    python benchmarks/recipes.py [--part kills|train|compile] [--lines 6000000] ...

Parts: ``kills``: SIGKILL at ten moments, and the results beside an unbroken run's;
``train``: a training over the lines, its memory and waiting, beside a DataLoader that tokenises per item; each record
counted; kills, batch by batch; a file that changes; ``compile``: steps of the small T5 without and with
``torch.compile``, in turns, after all its graphs are there, with a 95 % interval by bootstrap of the rounds.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import recipes_train
from memfit.data import Padding, SequenceLoader
from memfit.pipeline import Output
from memfit.training import EpochRecord, seed_everything
from memfit_workloads.recipes import text, training
from memfit_workloads.recipes.compiling import CompiledBlocks
from memfit_workloads.recipes.params import RecipesParams

CONFIG = Path(__file__).parents[1] / "src/memfit_workloads/recipes/config.yaml"
SETTINGS = ("params.data.num_pairs=400", "params.epochs=6", "params.tiny.d_model=32")


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


class Contestant:
    """A small T5 with its optimizer, as the workload trains it."""

    def __init__(self, params: RecipesParams, vocab_size: int, *, is_compiled: bool) -> None:
        seed_everything(0)
        self.model = training.make_model(params, vocab_size).train()
        self.compiled = CompiledBlocks(self.model, torch.device("cpu")) if is_compiled else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=params.learning_rate, foreach=False)

    def epoch(self, batches: list[Any]) -> float:
        """Take a step on each batch; return the seconds."""
        start = time.perf_counter()
        for batch in batches:
            total, weight = training.loss(self.model, batch)
            (total / weight).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - start


def batches_of(folder: Path, params: RecipesParams) -> tuple[list[Any], int]:
    """Return batches of generated recipes as the workload reads them, and the size of the vocabulary."""
    text.make_recipes(folder / "recipes.jsonl", 160, 0)
    rows = map(json.loads, (folder / "recipes.jsonl").read_text().splitlines())
    pairs = [{"input_ids": row["ingredients"], "labels": row["recipe"]} for row in rows]
    tokenizer = text.train_tokenizer(pairs, params)
    ids = text.Encode(tokenizer, params)(pairs)
    return list(SequenceLoader(ids, Padding(pad_id=0), batch=8)), tokenizer.get_vocab_size()


def compiling(folder: Path, num_lines: int) -> None:
    params, num_rounds = RecipesParams(), 30
    batches, vocab_size = batches_of(folder, params)
    eager, fast = (Contestant(params, vocab_size, is_compiled=one) for one in (False, True))
    assert fast.compiled is not None
    before = psutil.Process().memory_full_info().uss
    for number in (1, 2):
        eager.epoch(batches)
        fast.epoch(batches)
        fast.compiled(EpochRecord(number, 0.0, len(batches)))
    more = psutil.Process().memory_full_info().uss - before
    times = np.array([[eager.epoch(batches), fast.epoch(batches)] for _ in range(num_rounds)])
    gains, rng = times[:, 0] / times[:, 1], np.random.default_rng(0)
    low, high = np.quantile(np.median(rng.choice(gains, (2000, num_rounds)), axis=1), [0.025, 0.975])
    each, found = np.median(times, axis=0) / len(batches), fast.compiled.summary()
    print(f"a step: {each[0] * 1e3:.1f} ms without, {each[1] * 1e3:.1f} ms with torch.compile")
    print(f"gain: {np.median(gains):.2f} times as fast (95 % {low:.2f} to {high:.2f}, {num_rounds} rounds)")
    print(
        f"warm-up {found['warm_up_seconds']:.0f} s, {found['num_graphs']} graphs, "
        f"{found['num_graphs_after_warm_up']} graphs after it; "
        f"{more / 2**20:.0f} MiB more of the process's own memory"
    )
    if each[0] > each[1]:
        print(f"the warm-up is paid back after {found['warm_up_seconds'] / (each[0] - each[1]):.0f} steps")


PARTS: dict[str, Callable[[Path, int], None]] = {
    "kills": kills,
    "train": recipes_train.run,
    "compile": compiling,
}


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
