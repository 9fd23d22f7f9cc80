"""Kills a fit at every moment in turn, for real, and prints what the resumed fits came to.

Run as a script: one import of torch, then a forked child for each fit. A *moment* is a step, a validation, a file
opened to be written, renamed, linked or removed in the checkpoint folder, or a piece of a checkpoint written. A
checkpoint is written after every step.

The second argument says which moments are tried: 1 for all, 6 for each sixth one and each sixth inside of ``torch.save``.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from memfit.training import Ema, Trainer, load_checkpoint, seed_everything

NUM_EPOCHS, NUM_SAMPLES, BATCH_SIZE = 2, 12, 6
WATCHED = {"open", "os.rename", "os.link", "os.remove"}


class Moments:
    """Counts moments, and kills this process at the one it is set to."""

    seen = 0
    deadly = 0
    counted = frozenset({"step", "file", "piece"})
    in_save = ()  # the numbers of those inside of torch.save

    @classmethod
    def pass_one(cls, kind: str) -> None:
        if kind not in cls.counted:
            return
        cls.seen += 1
        if kind == "piece":
            cls.in_save += (cls.seen,)
        if cls.seen == cls.deadly:
            os.kill(os.getpid(), signal.SIGKILL)


class Pieces:
    """A file whose writer passes a moment now and then."""

    def __init__(self, file):
        self.file, self.flush, self.number = file, file.flush, 0

    def write(self, data):
        self.number += 1
        if self.number % 60 == 0:
            Moments.pass_one("piece")
        return self.file.write(data)


class Shuffled:
    """Batches whose order is keyed by (seed, epoch), as memfit.data does it."""

    def set_epoch(self, epoch):
        self.order = np.random.default_rng((5, epoch)).permutation(len(self))

    def __len__(self):
        return NUM_SAMPLES // BATCH_SIZE

    def __getitem__(self, number):
        return torch.randn(BATCH_SIZE, 4, generator=torch.Generator().manual_seed(int(self.order[number])))


class Augmented(torch.utils.data.Dataset):
    """Samples that differ each time by draws from every global generator, whichever process makes them."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + random.random() + float(np.random.rand()) + torch.rand(4)


class Stream(IterableDataset):
    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        return map(Augmented().__getitem__, range(NUM_SAMPLES))


class Net(torch.nn.Module):
    """Has dropout, and a buffer that every batch it was ever trained on moves: a digest of the sample order."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.seen.mul_(0.37).add_(x.double().sum())
        return self.layers(x)


def loss(model, x):
    if model.training:
        Moments.pass_one("step")
    noise = float(np.random.rand()) + random.random()  # draws from all global generators, beside dropout
    return ((model(x) - x.sum(dim=1, keepdim=True) + noise) ** 2).sum(), len(x)


def evaluate(model, valid):
    Moments.pass_one("step")
    return {"error": float(loss(model, valid)[0]) + float(torch.rand(()))}


def data_of(kind: str):
    """``indexed``, or ``<stream|keyed>-<start method>-<number of workers>``."""
    if kind == "indexed":
        return Shuffled()
    kind, method, number = kind.split("-")
    data, settings = Stream(), {}
    if kind == "keyed":
        data, settings = Augmented(), {"shuffle": True, "persistent_workers": number != "0"}
    context = None if number == "0" else method
    return DataLoader(data, BATCH_SIZE, num_workers=int(number), multiprocessing_context=context, **settings)


def fit(folder: Path, kind: str) -> str:
    """The digest of everything that a fit leaves: all tensors, the random state, the history, the best model."""
    seed_everything(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=100)
    ema = Ema(0.7)
    trainer = Trainer(
        model, loss=loss, optimizer=optimizer, schedule=schedule, ema=ema, checkpoint_dir=folder, seed=11,
        max_grad_norm=5.0, keep_epochs=1, milestones=(2,), checkpoint_seconds=0.0,
    )  # fmt: skip
    result = trainer.fit(
        data_of(kind),
        torch.ones(2, 4),
        num_epochs=NUM_EPOCHS,
        evaluate=evaluate,
        best_metric="error",
        direction="minimize",
        preflight=kind.startswith("keyed"),
    )
    parts = [repr(result.history), repr(result.best_epoch), ",".join(sorted(path.name for path in folder.iterdir()))]
    for name in ("latest", "best", "ema_epoch_2.pt"):
        state = load_checkpoint(folder / name)
        for key in ("identity", "fit", "data"):
            state.pop(key, None)
        parts.append(describe(state))
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


def in_child(folder: Path, deadly: int, kind: str = "indexed") -> tuple[int, list, str]:
    """Fit in a forked child that dies at its ``deadly``-th moment (0: never): its signal, its moments, its digest.

    The moments are how many there were, and the numbers of those inside of a save.

    Whatever worker processes it leaves are killed with it.
    """
    answer = folder.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        status = 1
        try:
            Moments.seen, Moments.deadly, Moments.in_save = 0, deadly, ()
            Moments.counted = Moments.counted if kind == "indexed" else {"step"}
            digest = fit(folder, kind)
            answer.write_text(json.dumps([[Moments.seen, Moments.in_save], digest]))
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    moments, digest = json.loads(answer.read_text()) if answer.exists() else ([0, []], f"status {status}")
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)), moments, digest


def sweep(root: Path, kind: str, resumed_as: str, every: int) -> dict:
    """Kill at the moments in turn, resume each, and tell which came to another end."""
    _, (num_moments, in_save), expected = in_child(root / f"{kind}_whole", 0, kind)
    tried = sorted({*range(min(every, num_moments), num_moments + 1, every), *in_save[::every]})
    died, different = 0, []
    for deadly in tried:
        folder = root / f"{kind}_{deadly}"
        died += in_child(folder, deadly, kind)[0] == signal.SIGKILL
        if in_child(folder, 0, resumed_as)[2] != expected:
            different.append(deadly)
    found = {"num_moments": num_moments, "num_in_save": len(in_save), "num_tried": len(tried)}
    return {"expected": expected, "died": died, "different": different, **found}


def killed_once(root: Path, kind: str, deadly: int, resumed_as: str) -> str:
    """The digest of a fit killed and resumed."""
    folder = root / f"{kind}_once"
    in_child(folder, deadly, kind)
    return in_child(folder, 0, resumed_as)[2]


def main() -> None:
    warnings.simplefilter("error")
    root, every = Path(tempfile.mkdtemp(dir=sys.argv[1])), int(sys.argv[2])
    multiprocessing.set_forkserver_preload(["torch", "memfit.training"])  # once for each fit, not for each worker
    fit(root / "first", "indexed")  # what torch imports late is imported once, before the forks

    def watch(event, arguments):
        reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in WATCHED and not reads and str(arguments[0]).startswith(str(root)):
            Moments.pass_one("file")

    sys.addaudithook(watch)
    os.fsync = lambda descriptor: None  # a killed process loses nothing that the kernel has
    plain_save = torch.save
    torch.save = lambda state, file: plain_save(state, Pieces(file))
    answer = {
        "indexed": sweep(root, "indexed", "indexed", every),
        "workers": sweep(root, "stream-fork-1", "stream-fork-1", every),
        "keyed": sweep(root, "keyed-fork-2", "keyed-fork-0", every),
        "served": killed_once(root, "stream-fork-1", 5, "stream-forkserver-1"),
    }
    chain, draws = 0, random.Random(1)
    while chain < 9 and in_child(root / "chain", draws.randrange(5, 60))[0] == signal.SIGKILL:  # some before a new save
        chain += 1
    answer["chain"] = {"kills": chain, "digest": in_child(root / "chain", 0)[2]}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
