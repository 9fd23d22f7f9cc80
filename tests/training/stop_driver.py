"""Stops a small fit at every moment in turn, goes on in a fresh trainer, and tells where the end differs.

A *moment* is an event that the fit writes, a call of the loss (in preflight, training and validation, so also at the
loader's last batch), or a state dict of the model being made, which is the inside of a save.
"""

import contextlib
import functools
import itertools
import random
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader

from memfit import rundir
from memfit.data import Loader, Padding, Panel, SequenceLoader
from memfit.errors import MemfitError, StoppedError
from memfit.training import Ema, Trainer, _journal, load_checkpoint, seed_everything
from training.crash_driver import describe


class Moments:
    """What a fit passed so far, and what happens at which of them."""

    def __init__(self, at: int = 0, act: Callable[[], None] = lambda: None) -> None:
        self.names: list[str] = []
        self.steps: list[tuple[int, int, float]] = []
        self._at, self._act = at, act

    def pass_one(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) == self._at:
            self._act()


moments = Moments()


@contextlib.contextmanager
def watched(number: int = 0, act: Callable[[], None] = lambda: None):
    """Inside, moments are counted, and ``act`` is called at one of them. Each step writes its event."""
    global moments
    moments = Moments(number, act)
    write, every = rundir.EventWriter.write, _journal._STEP_EVENT_SECONDS

    def watching(self, kind, **fields):
        write(self, kind, **fields)
        if kind == "step":
            moments.steps.append((fields["epoch"], fields["step"], fields["loss"]))
        moments.pass_one(f"event {kind} {fields.get('phase', '')}".strip())

    rundir.EventWriter.write, _journal._STEP_EVENT_SECONDS = watching, 0.0
    try:
        yield moments
    finally:
        rundir.EventWriter.write, _journal._STEP_EVENT_SECONDS = write, every


class Net(torch.nn.Module):
    """Has dropout, and a buffer that every batch it was ever trained on moves: a digest of the order of samples."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.seen.mul_(0.37).add_(x.double().sum())
        return self.layers(x)

    def get_extra_state(self):
        moments.pass_one("save")
        return 0

    def set_extra_state(self, state):
        pass


def loss(model, batch):
    moments.pass_one("loss in training" if model.training else "loss in validation")
    x = tensor_of(batch)
    noise = float(np.random.rand()) + random.random()  # draws from all global generators, beside dropout
    return ((model(x) - x.sum(dim=1, keepdim=True) + noise) ** 2).sum(), len(x)


def tensor_of(batch) -> torch.Tensor:
    if isinstance(batch, torch.Tensor):
        return batch
    if isinstance(batch, dict):
        ids = torch.from_numpy(batch["input_ids"]).float()
        return torch.stack([ids.sum(dim=1), ids.amax(dim=1)], dim=1) / 50
    return torch.from_numpy(batch.windows).flatten(1)


def on_first_batch(model, valid):
    """An evaluation of one's own that leaves its loader in the middle."""
    total, weight = loss(model, next(iter(valid)))
    return {"valid_loss": float(total) / weight}


class Augmented(torch.utils.data.Dataset):
    """Samples that differ each time by draws from every global generator, whichever process makes them."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((2,), index / 6) + random.random() + float(np.random.rand()) + torch.rand(2)


NUMS_WORKERS = itertools.cycle((0, 2))  # a fit may go on with another number


@functools.cache
def panel() -> Panel:
    rng = np.random.default_rng(0)
    days = np.repeat(np.arange(np.datetime64("2024-01-01"), np.datetime64("2024-01-09")), 4)
    table = {"date": pa.array(days), "code": list("ABCD") * 8, "close": rng.normal(size=32), "ret": rng.normal(size=32)}
    return Panel.build(pa.table(table), tempfile.mkdtemp(), features=["close"], targets=["ret"])


def panel_loaders():
    train = Loader(panel(), range(6), lookback=2, target="ret", batch=8, shuffle=4, num_workers=next(NUMS_WORKERS))
    return train, Loader(panel(), range(6, 8), lookback=2, target="ret", batch=3)


def sequence_loaders():
    rows = [{"input_ids": list(range(start, start + length))} for start, length in enumerate((1, 5, 2, 6, 3))]
    return tuple(SequenceLoader(rows, Padding(pad_id=0), batch=2, shuffle=seed) for seed in (3, 5))


def torch_loaders():
    settings = {"batch_size": 2, "shuffle": True}
    workers = {"num_workers": next(NUMS_WORKERS)}
    train = DataLoader(Augmented(), generator=torch.Generator().manual_seed(9), **workers, **settings)
    return train, DataLoader(Augmented(), generator=torch.Generator().manual_seed(8), **settings)


@dataclass(frozen=True)
class Kind:
    """A small fit: its training and validation batches, and what else it is called with.

    Attributes:
        loaders: Makes both.
        num_epochs: The epochs.
        settings: More for the ``Trainer``.
        fit: More for its ``fit``.
    """

    loaders: Callable
    num_epochs: int
    settings: dict = field(default_factory=dict)
    fit: dict = field(default_factory=dict)


EARLY = {"patience": 1, "direction": "maximize", "evaluate": on_first_batch}
KINDS = {
    "Loader": Kind(panel_loaders, 2),
    "Loader without preflight": Kind(panel_loaders, 2, fit={"preflight": False}),
    "SequenceLoader, early stop": Kind(sequence_loaders, 4, settings={"checkpoint_seconds": 0.0}, fit=EARLY),
    "DataLoader": Kind(torch_loaders, 2),
}


def fit(folder: Path, kind: Kind, loaders) -> str:
    """Everything that a fit leaves: all tensors, the random state, the history, the names of the files."""
    seed_everything(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    trainer = Trainer(
        model,
        loss=loss,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=30),
        ema=Ema(0.7),
        milestones=(1,),
        checkpoint_dir=folder,
        seed=11,
        keep_epochs=1,
        **kind.settings,
    )
    result = trainer.fit(*loaders, num_epochs=kind.num_epochs, **kind.fit)
    files = {path.name: path.stat().st_ino for path in sorted(folder.iterdir())}
    parts = [repr(result.history), repr((result.best_epoch, result.stopped_early)), *files]
    for name in {file: name for name, file in files.items()}.values():  # of hard links one
        state = load_checkpoint(folder / name)
        state.pop("fit")  # a random name
        parts.append(f"{name}: {describe(state)}")
    return "\n".join([*parts, describe(model.state_dict())])


def sweep(root: Path, kind: Kind, every: int) -> tuple[list[str], list]:
    """Stop a fit at moments in turn and go on: all moments, and those after which the end was another one.

    Each ``every``-th moment is tried, and each ``every``-th one inside of a save. Every second fit goes on with the loaders as the first one left them.
    """
    loaders = kind.loaders()
    with watched() as whole:
        expected = fit(root / "whole", kind, loaders)
    different = []
    saves = [number for number, name in enumerate(whole.names, 1) if name == "save"]
    for number in sorted({*range(every, len(whole.names) + 1, every), *saves[::every]}):
        name = whole.names[number - 1]
        folder, loaders = root / str(number), kind.loaders()
        with watched(number, stop) as before, contextlib.suppress(StoppedError):
            fit(folder, kind, loaders)
        if number % 2:
            loaders = kind.loaders()
        with watched() as after:
            try:
                end = fit(folder, kind, loaders)
            except MemfitError as error:
                end = error.what
        if end != expected:
            different.append((number, name, end if len(end) < 200 else "another end"))
        again = len(before.steps) + len(after.steps) - len(whole.steps)  # made to prove the resume
        if not 0 <= again <= 2 or before.steps[: len(before.steps) - again] + after.steps != whole.steps:
            different.append((number, name, "other steps"))
    return whole.names, different


def stop() -> None:
    signal.raise_signal(signal.SIGTERM)
