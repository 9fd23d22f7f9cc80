"""A tiny training in a loop of its own, and processes in which one is stopped or killed at a batch."""

import hashlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset

from memfit.training import Loop, Trainer

NUM_SAMPLES, BATCH, NUM_EPOCHS, ACCUMULATION = 20, 4, 3, 2  # 5 batches and 3 steps an epoch: the last one of 1 batch
EVERY_TWO = {"every": 2}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.full((4,), (index + 1) / NUM_SAMPLES)


class Stream(IterableDataset):
    """Samples without an index; ``Resumable`` knows where it is."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < NUM_SAMPLES:
            self.position += 1
            yield torch.full((4,), self.position / NUM_SAMPLES)
        self.position = 0


class Sized(Stream):
    """Has a length, and exports its position by arguments alone, as litData does."""

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        self.position = 0
        yield from super().__iter__()

    def state_dict(self, num_samples):
        raise NotImplementedError

    def load_state_dict(self, state):
        raise NotImplementedError


class Resumable(Stream):
    """Each of its passes begins at what it was given last, as with Hugging Face's ``datasets``."""

    start = 0

    def __iter__(self):
        self.position = self.start
        yield from super().__iter__()

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


def masked(items):
    """A collation that draws, as one that masks words."""
    batch = torch.stack(items)
    return batch, batch * (torch.rand_like(batch) > 0.3)


def plain(items):
    batch = torch.stack(items)
    return batch, batch


def bare(rate=1e-2, width=8):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=rate)


def parts(rate=1e-2, width=8):
    model, optimizer = bare(rate, width)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def loader(collate=masked, workers=0, data=None):
    data = Samples() if data is None else data
    shuffle = not isinstance(data, IterableDataset)
    return DataLoader(data, BATCH, shuffle=shuffle, collate_fn=collate, num_workers=workers)


def ids(batch):
    return [round(float(row[0]) * NUM_SAMPLES) for row in batch[0]]


class Unwatched:
    """In place of what memfit puts around a loop."""

    batch = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def epochs(self, num):
        yield from range(num)

    def loader(self, loader):
        return loader

    def batches(self, loader):
        for self.batch, batch in enumerate(loader, start=1):
            yield batch

    __call__ = batches

    def log(self, loss=None, **numbers):
        pass


def train(  # noqa: PLR0913
    folder, at, *, mode="exact", workers=0, collate=masked, rate=1e-2, allow=(), data=None, width=8, leaves=False,
    wrap=lambda x: x, carries=False, times=EVERY_TWO,
):  # fmt: skip
    """Train a plain loop; return the hash of what it leaves, the samples of each batch, and what each evaluation drew."""
    model, optimizer, schedule = parts(rate, width)
    own = {"model": model, "optimizer": optimizer, "schedule": schedule}
    keeps = {"exact": {"seed": 1, **times}, "stop": times, "watch": {}}
    kept = folder if mode in ("exact", "stop") else None
    loop = Unwatched() if mode == "plain" else Loop(kept, allow=allow, **keeps[mode], **own)
    batches, seen, evaluated = wrap(loader(collate, workers, data)), [], {}
    for epoch in loop.epochs(NUM_EPOCHS):
        at(("begin", epoch))
        for batch in loop(batches):
            if leaves and (epoch, loop.batch) == (1, 3):
                break  # with a batch that is not wanted
            loss = model(batch[1]).square().mean()
            (loss / ACCUMULATION).backward()
            seen.append(ids(batch))
            at(("batch", epoch, loop.batch))
            number = loop.batch + carries * epoch * NUM_SAMPLES // BATCH
            if number % ACCUMULATION == 0 or (loop.batch == NUM_SAMPLES // BATCH and not carries):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            loop.log(loss)
        at(("evaluation", epoch))
        evaluated[epoch] = float(torch.rand(()))
        loop.log(score=evaluated[epoch])
    return digest(model, optimizer), seen, evaluated


def fit(folder, at, *, workers=0, rate=1e-2, width=8, preflight=False, allow_inexact=False):
    """The same by a ``Trainer``; without a folder, nothing is kept."""
    model, optimizer, schedule = parts(rate, width)
    seen, place = [], Place(at, optimizer)

    def loss(model, batch):
        if model.training:
            seen.append(ids(batch))
            place.batch()
        return model(batch[1]).square().sum(), len(batch[1])

    def evaluate(model, batches):
        place.evaluation()
        return {"score": float(torch.rand(()))}

    trainer = Trainer(
        model, loss=loss, optimizer=optimizer, schedule=schedule, checkpoint_dir=folder, seed=1, checkpoint_seconds=0.0,
        global_batch_size=BATCH * ACCUMULATION, keep_epochs=2, allow_inexact=allow_inexact,
    )  # fmt: skip
    settings = {"best_metric": "score", "preflight": preflight, "evaluate": evaluate}
    trainer.fit(loader(masked, workers, Begins(at)), [torch.ones(1)], num_epochs=NUM_EPOCHS, **settings)
    return digest(model, optimizer), seen


class Begins(Samples):
    """Tells when the first of its samples is made."""

    def __init__(self, at):
        self.at = at

    def __getitem__(self, index):
        self.at(("begin", 0))
        return super().__getitem__(index)


class Place:
    """Tells where a training is, by the steps that its optimizer has made."""

    def __init__(self, at, optimizer):
        self.at, self.optimizer, self.micro, self.last = at, optimizer, 0, None

    @property
    def steps(self):
        return max((int(state["step"]) for state in self.optimizer.state.values()), default=0)

    def batch(self):
        self.micro = self.micro + 1 if self.steps == self.last else 1
        self.last = self.steps
        self.at(("batch", self.steps // 3, 2 * (self.steps % 3) + self.micro))

    def evaluation(self):
        self.at(("evaluation", self.steps // 3 - 1))


def digest(model, optimizer) -> str:
    """The SHA-256 of weights and optimizer."""
    sha = hashlib.sha256()
    for tensor in torch.utils._pytree.tree_leaves([model.state_dict(), optimizer.state_dict()]):
        sha.update(tensor.numpy().tobytes() if isinstance(tensor, torch.Tensor) else repr(tensor).encode())
    return sha.hexdigest()


def in_child(train: Callable, folder: Path, moment=None, number=signal.SIGTERM, **options):
    """Train in a group of processes, which gets a signal at a moment; return its exit code and what ``train`` returned.

    ``number`` may be what is done at the moment in place of a signal.
    """
    reached, go_on, answer, passed = os.pipe(), os.pipe(), folder.with_suffix(".answer"), []
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            sys.stderr = open(folder.with_suffix(".err"), "a")  # noqa: SIM115 - until the process ends

            def at(now):
                if now == moment and not passed:
                    passed.append(now)
                    os.write(reached[1], b"x")
                    os.read(go_on[0], 1)

            answer.write_bytes(pickle.dumps(train(folder, at, **options)))
            code = 0
        except SystemExit as error:
            code = error.code
        except BaseException as error:
            traceback.print_exception(error)
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(reached[1])
    if os.read(reached[0], 1):
        number() if callable(number) else os.killpg(pid, number)
        os.write(go_on[1], b"x")
    for descriptor in (reached[0], *go_on):
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, pickle.loads(answer.read_bytes()) if answer.exists() else None


def said(folder: Path) -> str:
    return folder.with_suffix(".err").read_text()
