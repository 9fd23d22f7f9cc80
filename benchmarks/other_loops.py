"""What watching, stopping and exactness cost a step in transformers' and Lightning's Trainers and in Accelerate's loop.

    python benchmarks/other_loops.py [--size tiny] [--framework transformers] [--rounds 4] [--json FILE]

The same training on one thread, without workers: plain, watched, stoppable, exact, in turns; in transformers also exact
with ``recover=True``. The figure is the median CPU time of a turn's steps, as a ratio to the plain turn's; its median
and all ratios are printed. The rehearsal before step 1 is left out, but in Accelerate's loop, which has none.
Exit status 0: each median at 10 million parameters is at most 1.02; the tiny model's count for nothing.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from memfit.integrations import accelerate as in_accelerate
from memfit.integrations import huggingface as in_transformers
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
    """CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.process_time())


def by_lightning(form: str, width: int, steps: int, folder: str) -> list[float]:
    """Return the CPU seconds at the end of each step."""
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
    return clock.times


def by_accelerate(form: str, width: int, steps: int, folder: str) -> list[float]:
    """Return the CPU seconds at the end of each step."""
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
    return times


class WithLoss(torch.nn.Module):
    """The model in transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = net(width)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - x).square().mean()}


class StepClock(transformers.TrainerCallback):
    """CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.process_time())


def by_transformers(form: str, width: int, steps: int, folder: str) -> list[float]:
    """Return the CPU seconds at the end of each step."""
    clock = StepClock()
    off: dict[str, Any] = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
    args = transformers.TrainingArguments(
        folder, num_train_epochs=1, per_device_train_batch_size=BATCH, use_cpu=True, dataloader_pin_memory=False, **off
    )
    data: Any = [{"x": row} for row in torch.rand(steps * BATCH, 8)]
    watch = [in_transformers.MemfitCallback()] if form == "watch" else []
    trainer = transformers.Trainer(WithLoss(width), args, train_dataset=data, callbacks=[clock, *watch])
    if form == "stop":
        in_transformers.stoppable(trainer, allow=("rehearsal",))
    elif form in ("exact", "recover"):
        in_transformers.exact(trainer, recover=form == "recover", allow=("rehearsal",))
    trainer.train()
    return clock.times


WAYS: dict[str, Callable[[str, int, int, str], list[float]]] = {
    "transformers": by_transformers,
    "lightning": by_lightning,
    "accelerate": by_accelerate,
}


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES], action="append")
    parser.add_argument("--framework", choices=[*WAYS], action="append")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    found, holds = {}, True
    for size in args.size or SIZES:
        width, steps = SIZES[size]
        for name in args.framework or WAYS:
            run, forms = WAYS[name], (*FORMS, "recover") if name == "transformers" else FORMS
            turns: list[dict[str, float]] = []
            for _ in range(args.rounds + 1):
                turn = {}
                for form in forms:
                    with tempfile.TemporaryDirectory() as folder:
                        times = run(form, width, steps, folder)
                    turn[form] = statistics.median(after - before for before, after in pairwise(times))
                turns.append(turn)
            for form in forms[1:]:
                ratios = [turn[form] / turn["plain"] for turn in turns[1:]]  # the first turn warms up
                middle = statistics.median(ratios)
                holds &= size == "tiny" or middle <= MOST
                found[f"{size} {name} {form}"] = ratios
                plain = statistics.median(turn["plain"] for turn in turns[1:])
                each = " ".join(f"{ratio:.3f}" for ratio in ratios)
                print(f"{size:6} {name:12} {form:7} {middle:.3f} of {plain * 1e3:.2f} ms   ({each})", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
