"""Make every random number of a training a function of its seed and position, whatever loop trains.

No random state is saved or put back: order is a function of (seed, epoch), an item of (seed, epoch, index), a batch's
collation of (seed, epoch, indices), and the model's draws of (seed, step). Workers, evaluations and the draws of others
then change nothing, and a training may go on with another number of workers.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import multiprocessing.context
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, default_convert

from memfit.errors import UsageError
from memfit.training._deal import remade
from memfit.training._keyed import KeyedDataset, keyed_rng, seed_key
from memfit.training._process import STOP_SIGNALS

#: The version of what is drawn under which key. Another one would be another training.
STREAM = 1
#: What stands in a key where an item has its index.
_ORDER, _COLLATION, _BATCH = -1, -2, -3


class KeyedStream:
    """The random numbers of one training, for a loop that is not memfit's. Each rank draws its own numbers in the
    model; order, items and collation know no rank."""

    version = STREAM

    def __init__(self, seed: int, rank: int = 0) -> None:
        self.seed, self.rank = seed, rank

    def step(self, number: int) -> None:
        """Seed the global generators of Python, NumPy and torch, on every device, for the optimizer step ``number``."""
        # torch.manual_seed formats a traceback for each unused device
        seed = seed_key(self.seed, _ORDER, number, *[self.rank] * (self.rank > 0))
        for device in (torch.cuda, torch.xpu):
            if device.is_initialized():
                device.manual_seed_all(seed)

    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader that gives the same samples under keys, by workers that no stop signal reaches. A loader
        without an index, with a position of its own, or that gives batches in any order is refused."""
        _refuse(loader)
        options: dict[str, Any] = {"dataset": _KeyedItems(loader.dataset, self.seed)}
        is_single = loader.batch_size is None and loader.batch_sampler is None
        if not is_single:
            options["collate_fn"] = _KeyedCollate(loader.collate_fn, self.seed)
        if is_single or (type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None):
            options |= {"sampler": KeyedOrder(loader.sampler, self.seed)}
            options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        else:
            options["batch_sampler"] = KeyedOrder(loader.batch_sampler, self.seed, of_batches=True)
        made = remade(loader, **options)
        deaf_workers(made)
        return made


def stream_identity(stream: KeyedStream | None) -> dict[str, Any]:
    """Return what of a training's random numbers must not change between a checkpoint and its resume; None: no keys.
    With another number of threads the kernels of a CPU add in another order.
    >>> sorted(stream_identity(KeyedStream(1))), set(stream_identity(None).values())
    (['num_threads', 'seed', 'stream'], {None})
    """
    if stream is None:
        return {"seed": None, "stream": None, "num_threads": None}
    return {"seed": stream.seed, "stream": stream.version, "num_threads": torch.get_num_threads()}


class KeyedOrder(Sampler[Any]):
    """Gives what a sampler, or a batch sampler, gives under the key (seed, epoch), each index with its epoch. Indices
    are numbers, texts, or tuples and lists of them; arrays and tensors become lists."""

    def __init__(self, sampler: Any, seed: int, *, of_batches: bool = False) -> None:
        self.sampler, self.seed, self.of_batches = sampler, seed, of_batches
        self.epoch = self._skip = 0
        self._rank, self._size = 0, 1

    def deal(self, rank: int, size: int) -> None:
        """Give every ``size``-th sample (or batch) from ``rank`` on; the first ones again, so that all have as many.
        >>> order = KeyedOrder(torch.utils.data.SequentialSampler(range(5)), seed=3)
        >>> order.deal(1, 2)
        >>> list(order), len(order)
        ([(0, 1), (0, 3), (0, 0)], 3)
        """
        self._rank, self._size = rank, size

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of this epoch, counted from 0; another than before begins at its start."""
        if epoch != self.epoch:  # a framework may tell it again
            self.epoch, self._skip = epoch, 0

    def skip(self, count: int) -> None:
        """Leave the first ``count`` samples (of a batch sampler: batches) out of the next iteration."""
        self._skip = count

    def __len__(self) -> int:
        return -(-len(self.sampler) // self._size)

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.epoch, self._skip
        self._skip = 0
        # a batch sampler that is handed on by a framework may hold the one that draws
        inner = [self.sampler, getattr(self.sampler, "sampler", None), getattr(self.sampler, "batch_sampler", None)]
        with keyed_rng(self.seed, epoch, _ORDER):
            for one in inner:
                if hasattr(one, "set_epoch"):
                    one.set_epoch(epoch)
                if isinstance(generator := getattr(one, "generator", None), torch.Generator):
                    generator.manual_seed(int(torch.randint(2**62, ())))
            order = list(self.sampler)
        if self._size > 1:
            count = -(-len(order) // self._size) * self._size
            order = list(itertools.islice(itertools.cycle(order), self._rank, count, self._size))
        for one in order[start:]:
            yield [(epoch, _index(index)) for index in one] if self.of_batches else (epoch, _index(one))


def _index(one: Any) -> Any:
    """Return an index as plain values, whose ``repr`` is the same in each process.
    >>> _index((np.int64(3), "left", torch.tensor([1, 2])))
    (3, 'left', [1, 2])
    """
    if isinstance(one, np.ndarray | np.generic | torch.Tensor):
        return one.tolist()
    if isinstance(one, tuple | list):
        return getattr(one, "_make", type(one))(map(_index, one))
    if isinstance(one, int | float | str | bytes | None):
        return one
    raise UsageError(
        f"The sampler gives a {type(one).__name__} as an index.",
        rule="exact: what an item draws is a function of seed, epoch and index, so an index is plain values.",
        remedy="give numbers, texts, or tuples of them",
    )


class _Batch(list[Any]):
    key: tuple[int, ...] = ()


class _KeyedItems(KeyedDataset):
    """Makes the items of a batch at once, and tells its collation their key."""

    def __getitem__(self, key: Any) -> Any:
        """Return an item, or what the data set has for a list of indices: ``batch_size=None`` and a batch sampler."""
        epoch, indices = key
        if not isinstance(indices, list):
            return super().__getitem__(key)
        self._follow(epoch)
        with keyed_rng(self.seed, epoch, _BATCH, *indices):
            return self.dataset[indices]

    def __getitems__(self, keys: Sequence[Any]) -> _Batch:
        keys = [(0, key) if isinstance(key, int) else key for key in keys]  # those of a probe have no epoch
        indices = [index for _, index in keys]
        if callable(together := getattr(self.dataset, "__getitems__", None)):
            (epoch, _), *_ = keys
            self._follow(epoch)
            with keyed_rng(self.seed, epoch, _BATCH, *indices):
                batch = _Batch(together(indices))
        else:
            batch = _Batch()
            with keyed_rng(self.seed, *keys[0]):
                for epoch, index in keys:
                    self._follow(epoch)
                    seed_key(self.seed, epoch, index)
                    batch.append(self.dataset[index])
        batch.key = (keys[0][0], _COLLATION, *indices)
        return batch


class _KeyedCollate:
    """Lets a collation draw by the key of its batch."""

    def __init__(self, collate: Callable[[Any], Any], seed: int) -> None:
        self.collate = collate
        self.seed = seed

    def __call__(self, items: Any) -> Any:
        if not isinstance(items, _Batch):
            return self.collate(items)
        with keyed_rng(self.seed, *items.key):
            return self.collate(list(items))


def _refuse(loader: Any) -> None:
    remedy = "only stop and resume such a training (the step before exact), or give its data an index"
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        kind = type(getattr(loader, "dataset", loader)).__name__
        why = f"The training data are a stream ({kind}): their samples have no index."
    elif not getattr(loader, "in_order", True):
        why, remedy = "The training loader has in_order=False.", "leave it at its default"
    elif hasattr(loader, "state_dict"):
        why = f"The training loader ({type(loader).__name__}) keeps a position of its own."
        remedy = "pass a plain torch.utils.data.DataLoader: its position is kept for it"
    elif loader.batch_size is None and loader.batch_sampler is None and loader.collate_fn is not default_convert:
        why = "The training loader has batch_size=None and a collate_fn."
        remedy = "let the data set make what its collate_fn makes, or pass a batch_sampler"
    else:
        try:
            len(loader)
            return
        except Exception:
            why = "The training loader's sampler has no length, so it may have no end."
            remedy = "give it a __len__: the samples of an epoch"
    raise UsageError(
        why,
        rule="exact: each sample is a function of seed, epoch and index, drawn in an order that is known.",
        remedy=remedy,
    )


def deaf_workers(loader: Any) -> Any:
    """Return a loader whose workers no signal reaches that stops a training: batches would be lost with them. What
    Slurm, ``timeout`` or a terminal sends goes to all processes of a job. Torch ends them by SIGKILL then."""
    if not getattr(loader, "num_workers", 0):
        return loader
    context: Any = loader.multiprocessing_context or multiprocessing.get_context(multiprocessing.get_start_method())
    if issubclass(context.Process, _Deaf):
        return loader
    resource_tracker.ensure_running()  # it unblocks SIGTERM when it is started
    loader.multiprocessing_context = deaf = copy.copy(context)
    deaf.Process = _DEAF[context.get_start_method()]
    return loader


class _Deaf:
    """A process that has the stop signals blocked from its first moment on."""

    def start(self) -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*STOP_SIGNALS, signal.SIGINT])
        try:
            super().start()  # type: ignore[misc]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        process: Any = self
        process._popen.terminate = process._popen.kill

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [*STOP_SIGNALS, signal.SIGINT])  # not inherited from a fork server
        super().run()  # type: ignore[misc]


class _DeafFork(_Deaf, multiprocessing.context.ForkProcess):
    pass


class _DeafSpawn(_Deaf, multiprocessing.context.SpawnProcess):
    pass


class _DeafForkServer(_Deaf, multiprocessing.context.ForkServerProcess):
    pass


_DEAF = {"fork": _DeafFork, "spawn": _DeafSpawn, "forkserver": _DeafForkServer}
