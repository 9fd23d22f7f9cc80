"""What watching, stopping and exactness cost a step in a loop of Accelerate and in Lightning's Trainer.

    python benchmarks/other_loops.py [--size tiny] [--rounds 4] [--json FILE]

The same training on one thread, without workers: plain, watched, ``Stop``, ``Exact``, in turns. The figure is CPU time
a step, as a ratio to the plain one of the same turn; its median and all ratios are printed. In Lightning the rehearsal
before step 1 is left out. Exit status 0: each median at 10 million parameters is at most 1.02; the tiny model's count
for nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from memfit.integrations import accelerate as in_accelerate
from memfit.integrations import lightning as in_lightning

FORMS = ("plain", "watch", "stop", "exact")
#: The width of the model by size, and the steps of a turn.
SIZES = {"tiny": (16, 200), "large": (3160, 40)}
BATCH = 16
MOST = 1.02


def net(width: int) -> torch.nn.Module:
    """Return a model of about ``width`` squared parameters."""
    layers = [torch.nn.Linear(8, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 8)]
    return torch.nn.Sequential(*layers)


def _loader(steps: int) -> Any:
    data: Any = torch.rand(steps * BATCH, 8)
    return DataLoader(data, BATCH, shuffle=True)


class Module(LightningModule):
    """The model in Lightning."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = net(width)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch) - batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Clock(Callback):
    """CPU seconds of an epoch's steps."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = time.process_time()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seconds = time.process_time() - self.began


def by_lightning(form: str, width: int, steps: int, folder: str) -> float:
    """Return the CPU seconds of a step."""
    clock, loader = Clock(), _loader(steps)
    watch = [in_lightning.MemfitCallback()] if form == "watch" else []
    off: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=[clock, *watch], **off)
    options: dict[str, Any] = {"every": 10**9, "allow": ("rehearsal",)}
    if form == "stop":
        in_lightning.Stop(folder, **options).fit(trainer, Module(width), loader)
    elif form == "exact":
        in_lightning.Exact(folder, seed=1, **options).fit(trainer, Module(width), loader)
    else:
        trainer.fit(Module(width), loader)
    return clock.seconds / steps


def by_accelerate(form: str, width: int, steps: int, folder: str) -> float:
    """Return the CPU seconds of a step."""
    accelerator, model = accelerate.Accelerator(cpu=True), net(width)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    loader = _loader(steps)
    loop: Any = in_accelerate.MemfitCallback(accelerator)
    if form == "stop":
        loop = in_accelerate.Stop(accelerator, folder, every=10**9)
    elif form == "exact":
        loop = in_accelerate.Exact(accelerator, folder, seed=1, every=10**9)
        loader = loop.loader(loader)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    times = []
    for _ in [0] if form == "plain" else loop.epochs(1):
        for batch in loader if form == "plain" else loop.batches(loader):
            accelerator.backward((model(batch) - batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.process_time())
    return (times[-1] - times[0]) / (len(times) - 1)


WAYS: dict[str, Callable[[str, int, int, str], float]] = {"lightning": by_lightning, "accelerate": by_accelerate}


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES], action="append")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    found, holds = {}, True
    for size in args.size or SIZES:
        width, steps = SIZES[size]
        for name, run in WAYS.items():
            turns: list[dict[str, float]] = []
            for _ in range(args.rounds + 1):
                turn = {}
                for form in FORMS:
                    with tempfile.TemporaryDirectory() as folder:
                        turn[form] = run(form, width, steps, folder)
                turns.append(turn)
            for form in FORMS[1:]:
                ratios = [turn[form] / turn["plain"] for turn in turns[1:]]  # the first turn warms up
                middle = statistics.median(ratios)
                holds &= size == "tiny" or middle <= MOST
                found[f"{size} {name} {form}"] = ratios
                plain = statistics.median(turn["plain"] for turn in turns[1:])
                each = " ".join(f"{ratio:.3f}" for ratio in ratios)
                print(f"{size:6} {name:11} {form:6} {middle:.3f} of {plain * 1e3:.2f} ms   ({each})", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
