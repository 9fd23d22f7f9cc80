"""The loops of the training contract, each one small training of the same samples in a child that signals reach.

All have five batches and three steps an epoch, the last one of a single batch, and three epochs. ``train(folder, at)``
calls ``at`` with each moment that it passes, and returns the hash of what it leaves and the samples of each batch:
("begin", epoch), ("batch", epoch, number), ("evaluation", epoch), and here ("save", step), before a seal.
"""

import functools
import importlib
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from memfit.training import SealedFolder
from training import loops


@dataclass(frozen=True)
class Column:
    """One of the loops.

    Attributes:
        train: Its training, as ``module:function``.
        prefix: What its checkpoints are called.
        package: The framework that it needs.
        has_modes: Whether it can also *stop* alone, be watched, and allow what changed.
        streams: Whether in *stop* it takes a stream, which it does not run forward.
        leaves: Whether its batches may be left by ``break``.
        early: What lets it hear a signal before its first step.
        told: What it says of a rate of 0.01 that is 0.05 now.
    """

    train: str
    prefix: str = "step-"
    package: str = "torch"
    has_modes: bool = True
    streams: bool = False
    leaves: bool = False
    early: dict = field(default_factory=dict, hash=False)
    told: str = r"learning_rate: \[0.01.*\] then, \[0.05.*\] now"

    def run(self, folder, moment=None, act=signal.SIGTERM, **options):
        """Train in a child, to which ``act`` happens at a moment; how it ended, what it left, and what it said."""
        pytest.importorskip(self.package)
        module, _, name = self.train.partition(":")
        train = getattr(importlib.import_module(module), name)
        errors = folder.with_suffix(".err")
        before = len(errors.read_text()) if errors.exists() else 0
        code, left = loops.in_child(functools.partial(_told_of_saves, train), folder, moment, act, **options)
        digest, seen = (None, None) if left is None else left[:2]
        return Outcome(code, digest, seen, loops.said(folder)[before:])

    @functools.cache  # noqa: B019 - there are five
    def whole(self, **options):
        """What a training leaves that nothing stops."""
        found = self.run(Path(tempfile.mkdtemp()) / "whole", **options)
        assert found.code == 0, found.said
        return found

    def checkpoints(self, folder):
        """The steps of the checkpoints in a folder."""
        return sorted(
            int(path.parent.name.removeprefix(self.prefix)) for path in folder.glob(f"{self.prefix}*/SEAL.json")
        )

    def damage(self, folder, step):
        """Take the last byte from the largest sealed file of a checkpoint."""
        files = [one for one in (folder / f"{self.prefix}{step}").iterdir() if one.suffix != ".jsonl"]
        path = max(files, key=lambda one: one.stat().st_size)
        path.write_bytes(path.read_bytes()[:-1])


@dataclass(frozen=True)
class Outcome:
    code: int
    digest: str | None
    seen: list | None
    said: str


COLUMNS = {
    "Trainer": Column(
        "training.loops:fit",
        has_modes=False,
        early={"preflight": True},
        told="optimizer group 0, initial_lr: 0.01 then, 0.05 now",
    ),
    "Loop": Column("training.loops:train", streams=True, leaves=True),
    "transformers": Column("integrations.bert:train_by_moments", "checkpoint-", "transformers"),
    "Lightning": Column("integrations.test_lightning:train", package="lightning", streams=True),
    "Accelerate": Column("integrations.test_accelerate:train", package="accelerate", leaves=True),
}


def _told_of_saves(train, folder, at, *, late=None, num_times=1, **options):
    """Train in this child, told of warnings and of each seal, with a clock that is ten minutes ahead from ``late`` on."""
    warnings.simplefilter("default")
    warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)
    seal = SealedFolder.seal

    def sealing(self, step, facts):
        at(("save", step))
        return seal(self, step, facts)

    def telling(moment):
        at(moment)
        if moment == late:
            time.monotonic = lambda now=time.monotonic: now() + 601

    SealedFolder.seal = sealing
    return [train(folder, telling, **options) for _ in range(num_times)][-1]
