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

from memfit.training import Loop

NUM_SAMPLES, BATCH, NUM_EPOCHS, ACCUMULATION = 20, 4, 3, 2  # 5 batches and 3 steps an epoch: the last one of 1 batch


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


def bare(rate=1e-2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=rate)


def parts(rate=1e-2):
    model, optimizer = bare(rate)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def loader(collate=masked, workers=0, data=None):
    data = Samples() if data is None else data
    shuffle = not isinstance(data, IterableDataset)
    return DataLoader(data, BATCH, shuffle=shuffle, collate_fn=collate, num_workers=workers)


def ids(batch):
    return [round(float(row[0]) * NUM_SAMPLES) for row in batch[0]]


def train(  # noqa: PLR0913
    folder, at, *, seed=1, workers=0, collate=masked, rate=1e-2, allow=(), data=None, wrap=lambda x: x, carries=False
):
    """Train a plain loop; return the hash of what it leaves, the samples of each batch, and what each evaluation drew."""
    model, optimizer, schedule = parts(rate)
    loop = Loop(folder, seed=seed, every=2, allow=allow, model=model, optimizer=optimizer, schedule=schedule)
    batches, seen, evaluated = wrap(loader(collate, workers, data)), [], {}
    for epoch in loop.epochs(NUM_EPOCHS):
        for batch in loop(batches):
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


def digest(model, optimizer) -> str:
    """The SHA-256 of weights and optimizer."""
    sha = hashlib.sha256()
    for tensor in torch.utils._pytree.tree_leaves([model.state_dict(), optimizer.state_dict()]):
        sha.update(tensor.numpy().tobytes() if isinstance(tensor, torch.Tensor) else repr(tensor).encode())
    return sha.hexdigest()


def in_child(train: Callable, folder: Path, moment=None, number=signal.SIGTERM, **options):
    """Train in a group of processes, which gets a signal at a moment; return its exit code and what ``train`` returned."""
    reached, go_on, answer = os.pipe(), os.pipe(), folder.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            sys.stderr = open(folder.with_suffix(".err"), "a")  # noqa: SIM115 - until the process ends

            def at(now):
                if now == moment:
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
        os.killpg(pid, number)
        os.write(go_on[1], b"x")
    for descriptor in (reached[0], *go_on):
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, pickle.loads(answer.read_bytes()) if answer.exists() else None


def said(folder: Path) -> str:
    return folder.with_suffix(".err").read_text()
