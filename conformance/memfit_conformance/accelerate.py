"""A loop of Accelerate, as its example of checkpoints has it: ``examples/by_feature/checkpointing.py``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from memfit_conformance import _task as task
from memfit_conformance._strike import Trace, watch_model

#: How a checkpoint's folder or file is found, and the files in it.
CHECKPOINTS = "step[_-]*"
FILES = {"model": "model.safetensors", "optimizer": "optimizer.bin"}


def run(folder: Path, options: task.Options, trace: Trace, with_memfit: bool) -> None:
    """Train, from the newest checkpoint in the folder if there is one."""
    if options.version:
        accelerate.__version__ = options.version
    trace.reach("program")
    loading = DataLoaderConfiguration(use_seedable_sampler=options.seedable)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulation, dataloader_config=loading)
    accelerator.save_state = _saving(accelerator, trace)  # type: ignore[method-assign]
    net = task.model(options)
    watch_model(net, trace)
    optimizer, schedule = task.optimizer(net, options)
    if with_memfit:
        from memfit.integrations.accelerate import Exact

        loop: Any = Exact(accelerator, folder, seed=1, every=task.EVERY)
    else:
        loop = _Plain(accelerator, folder, options)
    loader = loop.loader(task.loader(options))
    net, optimizer, schedule, loader, valid = accelerator.prepare(
        net, optimizer, schedule, loader, task.loader(options, train=False)
    )
    made = [0]
    trace.position = lambda: made[0]
    with loop if with_memfit else nullcontext():
        trace.reach("train begins")
        for _epoch in loop.epochs(task.EPOCHS):
            for batch in loop.batches(loader):
                made[0] = loop.step
                trace.begin_batch()
                with accelerator.accumulate(net):
                    loss = net(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(net.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                trace.end_batch(batch, loss)
                loop.log(loss)
                if accelerator.sync_gradients:
                    made[0] += 1
                    trace.reach("log")
                    trace.reach("step end")
                    if options.evaluate == "steps" and made[0] % task.EVERY == 0:
                        _evaluate(net, valid, trace)
            if options.evaluate == "epoch":
                _evaluate(net, valid, trace)
            trace.reach("epoch end")
        trace.reach("train end")
    trace.end(accelerator.unwrap_model(net).state_dict(), optimizer.state_dict(), schedule.state_dict())


def _evaluate(net: Any, valid: Any, trace: Trace) -> None:
    net.eval()
    with torch.no_grad():
        for batch in valid:
            net(**batch)
    net.train()
    trace.reach("evaluated")


def _saving(accelerator: Accelerator, trace: Trace) -> Any:
    save = accelerator.save_state

    def saving(path: Any, *args: Any, **kwargs: Any) -> Any:
        trace.reach("save")
        return save(path, *args, **kwargs)

    return saving


class _Plain:
    """What the example does by hand: folders ``step_<micro-batches>``, and batches that are skipped."""

    def __init__(self, accelerator: Accelerator, folder: Path, options: task.Options) -> None:
        self.accelerator, self.folder, self.options = accelerator, folder, options
        self.size = -(-options.batches // accelerator.num_processes)
        self.step = self._batches = 0

    def loader(self, loader: Any) -> Any:
        return loader

    def log(self, loss: Any) -> None:
        self.step += self.accelerator.sync_gradients

    def epochs(self, number: int) -> Iterator[int]:
        found = self._folders()
        if found:
            self.accelerator.load_state(str(found[-1]))
            self._batches = _number(found[-1])
        size, accumulation = self.size, self.options.accumulation
        epoch, rest = divmod(self._batches, size)
        self.step = epoch * -(-size // accumulation) + rest // accumulation
        yield from range(epoch, number)

    def batches(self, loader: Any) -> Iterator[Any]:
        rest = self._batches % self.size
        for batch in self.accelerator.skip_first_batches(loader, rest) if rest else loader:
            yield batch
            self._batches += 1
            if self.accelerator.sync_gradients and self.step % task.EVERY == 0:
                self.accelerator.save_state(str(self.folder / f"step_{self._batches}"))
                for old in self._folders()[: -task.KEEP]:
                    shutil.rmtree(old)

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob("step_*"), key=_number)


def _number(path: Path) -> int:
    return int(path.name.split("_")[1])
