"""Kills a fit at every moment in turn, for real, and prints what the resumed fits came to.

Run as a script: one import of torch, then a forked child for each fit. A *moment* is a step, a validation, a file
opened, renamed, linked or removed in the checkpoint folder, or a piece of a checkpoint written.
"""

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

from memfit.training import Trainer, _checkpoint, load_checkpoint, seed_everything

NUM_EPOCHS = 3
WATCHED = {"open", "os.rename", "os.link", "os.remove"}


class Moments:
    """Counts moments, and kills this process at the one it is set to."""

    seen = 0
    deadly = 0

    @classmethod
    def pass_one(cls) -> None:
        cls.seen += 1
        if cls.seen == cls.deadly:
            os.kill(os.getpid(), signal.SIGKILL)


class Shuffled:
    """Batches whose order is keyed by (seed, epoch), as memfit.data does it."""

    def set_epoch(self, epoch):
        self.order = np.random.default_rng((5, epoch)).permutation(len(self))

    def __len__(self):
        return 3

    def __iter__(self):
        for index in self.order:
            generator = torch.Generator().manual_seed(int(index))
            yield torch.randn(6, 4, generator=generator)


def loss(model, x):
    if model.training:
        Moments.pass_one()
    noise = float(np.random.rand()) + random.random()  # draws from all global generators, beside dropout
    return ((model(x) - x.sum(dim=1, keepdim=True) + noise) ** 2).sum(), len(x)


def evaluate(model, valid):
    Moments.pass_one()
    return {"error": float(loss(model, valid)[0]) + float(torch.rand(()))}


def fit(folder: Path) -> str:
    """The digest of everything that a fit leaves: all tensors, the random state, the history, the best model."""
    seed_everything(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    trainer = Trainer(model, loss=loss, checkpoint_dir=folder, seed=11, max_grad_norm=5.0, keep_epochs=1)
    result = trainer.fit(
        Shuffled(),
        torch.ones(2, 4),
        num_epochs=NUM_EPOCHS,
        evaluate=evaluate,
        best_metric="error",
        direction="minimize",
    )
    parts = [repr(result.history), repr(result.best_epoch), ",".join(sorted(path.name for path in folder.iterdir()))]
    for name in ("latest_checkpoint.pt", "best_model.pt"):
        state = load_checkpoint(folder / name)
        parts.append(describe([state["epoch"], state["model"], state["optimizer"], state["rng"], state["history"]]))
    parts.append(describe(model.state_dict()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def describe(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.contiguous().numpy().tobytes().hex()}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(describe, value)) + "]"
    return repr(value)


def in_child(folder: Path, deadly: int) -> tuple[int, int, str]:
    """Fit in a forked child that dies at its ``deadly``-th moment (0: never): its signal, its moments, its digest."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        status = 1
        try:
            Moments.seen, Moments.deadly = 0, deadly
            digest = fit(folder)
            os.write(writer, f"{Moments.seen} {digest}".encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader) as pipe:
        seen, _, digest = pipe.read().partition(" ")
    _, status = os.waitpid(pid, 0)
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)), int(seen or 0), digest


def main() -> None:
    warnings.simplefilter("error")
    root = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    fit(root / "first")  # what torch imports late is imported once, before the forks

    def watch(event, arguments):
        if event in WATCHED and str(arguments[0]).startswith(str(root)):
            Moments.pass_one()

    sys.addaudithook(watch)
    plain_write = _checkpoint._HashingFile.write

    def write(self, data):
        self.pieces = getattr(self, "pieces", 0) + 1
        if self.pieces % 40 == 0:
            Moments.pass_one()
        return plain_write(self, data)

    _checkpoint._HashingFile.write = write
    _, num_moments, expected = in_child(root / "whole", 0)
    died, different = 0, []
    for deadly in range(1, num_moments + 1):
        folder = root / f"killed_{deadly}"
        died += in_child(folder, deadly)[0] == signal.SIGKILL
        if in_child(folder, 0)[2] != expected:
            different.append(deadly)
    chain, draws = 0, random.Random(1)
    while chain < 300 and in_child(root / "chain", draws.randrange(5, 30))[0] == signal.SIGKILL:
        chain += 1
    chained = in_child(root / "chain", 0)[2]
    print(json.dumps({
        "expected": expected, "num_moments": num_moments, "died": died, "different": different,
        "chain": chain, "chained": chained,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
