"""Give training data a position: a resumed epoch goes on at its next batch.

How it gets there depends on the kind of the data, ``docs/training.md`` has the table: *indexed* (by number), *stateful*
(by its ``state_dict``), *keyed* (``KeyedSampler``), or *replayed* (run forward without training).
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, default_collate, default_convert

from memfit.errors import DataError, UsageError
from memfit.rundir import record
from memfit.training._deal import DealtOrder, own_part, refuse_distributed, remade
from memfit.training._process import preserved_rng
from memfit.training._ranks import Ranks
from memfit.training._split import Split
from memfit.training._workers import FIRST_BATCH_SECONDS, Workers, workers_in


class Batches(Protocol):
    """What can be trained on: sized, iterable once per epoch; its ``set_epoch(epoch)``, if any, is called first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


#: NumPy generators that no ``keyed_rng`` uses now: one within another has its own.
_SPARE_BITS = [np.random.MT19937(0)]


@contextmanager
def keyed_rng(*key: int) -> Iterator[None]:
    """Inside, Python, NumPy and torch on the CPU draw from a stream of this key; afterwards they go on as before.
    NumPy's bit generator is exchanged, which takes a hundredth of the time of reading its state. NumPy then forgets the
    second of a pair of normal numbers."""
    python, torch_state, bits = random.getstate(), torch.get_rng_state(), get_bit_generator()
    own = _SPARE_BITS.pop() if _SPARE_BITS else np.random.MT19937(0)
    set_bit_generator(own)
    try:
        seed_key(*key)
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torch_state)
        set_bit_generator(bits)
        _SPARE_BITS.append(own)


def seed_key(*key: int) -> int:
    """Go on inside a ``keyed_rng`` with another key, three times faster than another one; return torch's seed."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=20).digest()
    seed = int.from_bytes(digest[8:16])
    random.seed(digest[:8])
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would queue one for every GPU
    np.random.seed(int.from_bytes(digest[16:]))
    return seed


class KeyedDataset(Dataset[Any]):
    """Makes a data set's random draws depend on (seed, epoch, index) alone, in whatever process they happen.

    With a ``KeyedSampler`` in a ``DataLoader``, a fit resumes in mid-epoch at once, and ``num_workers`` may change.

    Args:
        dataset: Its ``__getitem__`` may draw from the global generators of Python, NumPy and torch (on the CPU). Its
            ``set_epoch``, if any, is called in the process that makes an item. A generator of its own is refused.
        seed: Other seeds, other draws.

    Example:
        >>> class Noisy:
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         return index + torch.rand(())
        >>> data = KeyedDataset(Noisy(), seed=1)
        >>> loader = DataLoader(data, batch_size=2, sampler=KeyedSampler(data, seed=1))
        >>> [batch.shape for batch in loader]
        [torch.Size([2]), torch.Size([2])]
        >>> data[(1, 3)] == data[(1, 3)], data[(1, 3)] == data[(2, 3)]
        (tensor(True), tensor(False))
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset = dataset
        self.seed = seed
        self._epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set the epoch."""
        self._epoch = epoch
        if (set_epoch := getattr(self.dataset, "set_epoch", None)) is not None:
            set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int] | int) -> Any:
        """Return the item of an (epoch, index) from a ``KeyedSampler``; a bare index is of epoch 0."""
        epoch, index = key if isinstance(key, tuple) else (0, key)
        if isinstance(key, tuple):
            self._follow(epoch)
        with keyed_rng(self.seed, epoch, index):
            return self.dataset[index]

    def _follow(self, epoch: int) -> None:
        if epoch != self._epoch:  # in a worker that lives on from epoch to epoch
            self.set_epoch(epoch)

    @property
    def lengths(self) -> Any:
        """The data set's own, where it has any."""
        return self.dataset.lengths


class KeyedSampler(Sampler[tuple[int, int]]):
    """Orders each epoch by (seed, epoch) alone, so that an epoch can be entered anywhere.

    Args:
        data: What is sampled; only its length counts.
        seed: Other seeds, other orders.
        shuffle: False keeps the order of ``data``.
        deterministic_collate: Say that a ``collate_fn`` other than torch's own draws nothing at random.

    Example:
        >>> sampler = KeyedSampler(range(5), seed=3)
        >>> whole = list(sampler)
        >>> sampler.skip(2)
        >>> list(sampler) == whole[2:], list(sampler) == whole
        (True, True)
    """

    def __init__(
        self, data: Sized, seed: int = 0, *, shuffle: bool = True, deterministic_collate: bool = False
    ) -> None:
        self.data = data
        self.seed = seed
        self.shuffle = shuffle
        self.deterministic_collate = deterministic_collate
        self._epoch = self._skip = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._skip = epoch, 0

    def skip(self, count: int) -> None:
        """Leave the first ``count`` samples out of the next iteration."""
        self._skip = count

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch, start, number = self._epoch, self._skip, len(self.data)
        self._skip = 0
        order = np.random.default_rng((self.seed, epoch)).permutation(number) if self.shuffle else np.arange(number)
        return ((epoch, index) for index in order[start:].tolist())


class TrainingData:
    """The training batches of one fit, with a position."""

    def __init__(self, batches: Batches, seed: int, first_batch_seconds: float = FIRST_BATCH_SECONDS) -> None:
        self.batches = batches
        self.seed = seed
        self.kind = _kind_of(batches)
        self.workers = Workers(batches, first_batch_seconds)
        self._generators = generators_of(batches)
        self._at_start: list[torch.Tensor] = []
        self._iterator: Iterator[Any] | None = None
        self._key = (0, 0)
        self._state: Mapping[str, Any] | None = None
        self._is_first = False
        self._loader: Any = batches
        self._deal: Callable[[list[Any]], list[Any]] | None = None
        self._order: DealtOrder | None = None

    def deal(self, num: int, split: Split, ranks: Ranks) -> None:
        """Deal each ``num`` batches to the ranks; of keyed data each rank then loads its own part alone."""
        loader: Any = self.batches
        refuse_distributed(loader)
        self._deal = partial(own_part, split=split, rank=ranks.rank, size=ranks.size)
        if self.kind == "keyed" and loader.batch_sampler is not None:
            self._order = DealtOrder(loader, num, ranks.rank, ranks.size)
            self._loader = remade(loader, batch_sampler=self._order)
            self.workers = Workers(self._loader, self.workers.seconds)

    @property
    def own_batch(self) -> int | None:
        """The samples of a batch that this rank loads; None where it loads those of all ranks."""
        return (
            None if self._order is None else max((stop - start for start, stop in self._order.pieces_at(0)), default=0)
        )

    def identity(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"steps per epoch in batches": len(self.batches)}
        if isinstance(self.batches, DataLoader):
            facts |= {"batch_size": self.batches.batch_size, "sampler": type(self.batches.sampler).__name__}
            if self.kind != "keyed":
                facts["num_workers"] = self.batches.num_workers
        return facts

    def batches_per_step(self, global_batch_size: int | None, split: Split) -> int:
        """Return how many batches make a step over ``global_batch_size`` samples; None is one batch."""
        if global_batch_size is None:
            return 1
        loader: Any = self.batches
        size = getattr(loader, "batch_size", None)
        if size is None and self.kind == "indexed":
            self.set_epoch(1)
            with preserved_rng(), preserved_generators(loader):
                size = split.count(loader[0])
        if size is None or global_batch_size < size or global_batch_size % size:
            raise UsageError(
                f"global_batch_size is {global_batch_size}, and a batch of the training data has "
                f"{'a size that is not known' if size is None else size}.",
                rule="an optimizer step takes a whole number of the loader's batches.",
                remedy="pass a DataLoader with batch_size, and a global_batch_size that is a multiple of it",
            )
        return global_batch_size // int(size)

    def check_replayable(self) -> None:
        """Refuse a loader whose batches cannot be had a second time."""
        refuse_own_generators(self.batches)
        loader = self.batches
        if not isinstance(loader, DataLoader) or loader.num_workers == 0:
            return
        persistent = loader.persistent_workers and self.kind == "replayed"
        if persistent or not getattr(loader, "in_order", True):
            raise UsageError(
                f"The training loader has {'persistent_workers=True' if persistent else 'in_order=False'}.",
                rule="a resume is bit-exact only if an epoch's batches can be had again: workers that live on carry "
                "random state of their own from epoch to epoch, and without an order it is chance which batch is next.",
                remedy="set it to its default, wrap the data in KeyedDataset and KeyedSampler (which allows persistent "
                "workers; deterministic_collate=True with a collate_fn), or pass allow_inexact=True to the Trainer",
            )

    def open(self, epoch: int, skip: int = 0, check_stop: Callable[[], object] = bool) -> None:
        """Begin an epoch at the batch after ``skip`` others; ``close`` first. ``check_stop`` is called between batches
        that are run forward; it raises if the fit should stop."""
        loader: Any = self.batches
        state, self._state = self._state, None
        for generator, saved in zip(self._generators, state["generators"] if state else (), strict=False):
            generator.set_state(saved)
        self._at_start = [generator.get_state() for generator in self._generators]
        self.set_epoch(epoch)
        if self.kind == "indexed":
            self._iterator = (loader[number] for number in range(skip, len(loader)))
            return
        self._key = (epoch, skip)
        if self.kind == "keyed" and skip:
            loader.sampler.skip(skip * (loader.batch_size or 1))
        elif self.kind == "stateful" and state is not None:
            loader.load_state_dict(state["loader"])
            if not skip:  # saved between two epochs, so it is at the end of the one before
                self.set_epoch(epoch)
        else:
            self._key = (epoch, 0)
        with keyed_rng(self.seed, epoch, 0):
            self._iterator = self.workers.start()
        self._is_first = True
        if self._key[1] != skip:
            self._run_forward(skip, check_stop)

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the batches and of what a ``DataLoader`` is made of."""
        for part in _parts(self.batches):
            if (set_epoch := getattr(part, "set_epoch", None)) is not None:
                set_epoch(epoch)

    def _run_forward(self, skip: int, check_stop: Callable[[], object]) -> None:
        start = time.monotonic()
        while self._key[1] < skip:
            check_stop()
            if next(self, self) is self:
                raise DataError(
                    f"Epoch {self._key[0]} ended after {self._key[1] - 1} batches, and {skip} were trained.",
                    rule="a resume in mid-epoch runs the data forward to where it was.",
                    remedy="give back the training data as they were, or pass another checkpoint_dir",
                )
        record("replay", epoch=self._key[0], num_batches=skip, seconds=round(time.monotonic() - start, 3))

    def __iter__(self) -> TrainingData:
        return self

    def __next__(self) -> Any:
        assert self._iterator is not None
        if self.kind == "indexed":
            return next(self._iterator)
        epoch, number = self._key
        self._key = (epoch, number + 1)
        with keyed_rng(self.seed, *self._key):
            if self._is_first:
                self._is_first = False
                return self.workers.first(self._iterator, f"epoch {epoch}")
            return next(self._iterator)

    def take(self, num: int) -> tuple[list[Any], int]:
        """Return the next ``num`` batches, of several ranks the own part of them, and how many batches these are."""
        if self._order is not None:
            epoch, number = self._key
            count = max(0, min(num, len(self.batches) - number))
            own = [next(self) for _ in (self._order.pieces_at(number) if count else ())]
            self._key = (epoch, number + count)
            return own, count
        batches = list(itertools.islice(self, num))
        return batches if self._deal is None else self._deal(batches), len(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next ``open`` needs to come back here, beside epoch and number of batches."""
        loader: Any = self.batches
        is_replayed = self._iterator is not None and self.kind != "indexed"
        states = self._at_start if is_replayed else [generator.get_state() for generator in self._generators]
        return {"generators": states, "loader": loader.state_dict() if self.kind == "stateful" else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["generators"]) != len(self._generators):
            raise UsageError(
                f"The training data hold {len(self._generators)} random generators, and {len(state['generators'])} are "
                "saved.",
                rule="a resume puts the generator= of loader and samplers back to where it was.",
                remedy="build the data as they were, or pass another checkpoint_dir",
            )
        self._state = state

    def worker_pids(self) -> list[int]:
        iterator = getattr(self._loader, "_iterator", None)
        return [worker.pid for worker in workers_in(iterator) if worker.is_alive()]

    def close(self, *, persistent_too: bool = False) -> None:
        """End the epoch's worker processes; persistent ones only with ``persistent_too``."""
        iterator, self._iterator = self._iterator, None
        loader: Any = self._loader
        if getattr(loader, "persistent_workers", False):
            if not persistent_too:
                return
            iterator, loader._iterator = loader._iterator, None
        self.workers.close(iterator)


def _kind_of(batches: Any) -> str:
    if isinstance(batches, Sequence) or (hasattr(batches, "__getitem__") and hasattr(batches, "set_epoch")):
        return "indexed"
    if hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict"):
        return "stateful"
    if (
        isinstance(batches, DataLoader)
        and isinstance(batches.dataset, KeyedDataset)
        and isinstance(batches.sampler, KeyedSampler)
        and (batches.batch_sampler is None or type(batches.batch_sampler) is BatchSampler)
        and (batches.collate_fn in (default_collate, default_convert) or batches.sampler.deterministic_collate)
    ):
        return "keyed"
    return "replayed"


def _parts(batches: Any) -> list[Any]:
    """Return the batches and what a ``DataLoader`` is made of, each once."""
    found = [batches, getattr(batches, "dataset", None), *samplers_of(batches)]
    return list({id(one): one for one in found}.values())


def generators_of(batches: Any) -> list[torch.Generator]:
    """Return the ``generator=`` of a loader and its samplers, each once."""
    held = [getattr(part, "generator", None) for part in _parts(batches)]
    held.append(getattr(batches, "synchronized_generator", None))  # of Accelerate, on several ranks
    return list({id(one): one for one in held if isinstance(one, torch.Generator)}.values())


def samplers_of(batches: Any) -> list[Any]:
    """Return the samplers that order the samples of a loader, also those that another one holds."""
    held = [getattr(batches, name, None) for name in ("sampler", "batch_sampler")]
    return [part for one in held if one is not None for part in (one, *samplers_of(one))]


def refuse_own_generators(batches: Any) -> None:
    """Refuse a data set that draws from a random generator of its own: no checkpoint holds its state."""
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    holder = getattr(batches, "dataset", batches)
    while holder is not None and not hasattr(holder, "load_state_dict"):
        for name, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, kinds) and name != "generator":
                raise UsageError(
                    f"{type(holder).__name__}.{name} is a random generator of its own ({type(value).__name__}).",
                    rule="a resume is bit-exact: it puts back the global generators and the generator= of loaders and "
                    "samplers, and no other.",
                    remedy="draw from the global generators (numpy.random, torch.rand) in a KeyedDataset, or pass "
                    "allow_inexact=True to the Trainer",
                )
        holder = getattr(holder, "dataset", None)


@contextmanager
def preserved_generators(batches: Any) -> Iterator[None]:
    """Put the generators of loader and samplers back afterwards."""
    states = [(generator, generator.get_state()) for generator in generators_of(batches)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
