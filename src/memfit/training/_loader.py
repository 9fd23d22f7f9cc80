"""Where an epoch of training data stands, and how a resumed one gets there again.

While a loader makes a batch in this process, the global generators draw from a stream of (seed, epoch, number), apart
from the one that dropout draws from; *indexed* data alone draw from that one. Generators that the data hold themselves
(see ``generators_of``) go on from where they were. How a resume in mid-epoch reaches its batch depends on the data:

- *indexed*: lists, and objects with ``__getitem__`` and ``set_epoch`` such as ``memfit.data.DateBatches``, by number;
- *stateful*: loaders with ``state_dict`` and ``load_state_dict`` (torchdata's ``StatefulDataLoader``), by their state;
- *keyed*: a ``DataLoader`` over ``KeyedDataset`` and ``KeyedSampler``, in the sampler, whatever its ``num_workers``;
  its ``collate_fn`` is torch's own, or was said to draw nothing, and its data set holds no generator;
- *replayed*: anything else is run forward, without training, over what is behind. Its workers' streams depend on their
  number, so that must not change.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, default_collate, default_convert

from memfit.errors import DataError, JobFailedError, UsageError
from memfit.rundir import record
from memfit.training._worker_death import workers_in
from memfit.training._worker_watch import FIRST_BATCH_SECONDS, WorkerWatch
from memfit.training._workers import workers_of


class Batches(Protocol):
    """What can be trained on: sized, iterable once per epoch; its ``set_epoch(epoch)``, if any, is called first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


_DATA_BITS = np.random.MT19937(0)


@contextmanager
def keyed_rng(*key: int) -> Iterator[None]:
    """Inside, Python, NumPy and torch on the CPU draw from a stream of this key; afterwards they go on as before.

    NumPy forgets the second of a pair of normal numbers meanwhile, as it does whenever its bit generator is exchanged,
    which takes a hundredth of the time of reading its state and putting it back.
    """
    python, torch_state, bits = random.getstate(), torch.get_rng_state(), get_bit_generator()
    digest = hashlib.blake2b(repr(key).encode(), digest_size=20).digest()
    random.seed(digest[:8])
    torch.default_generator.manual_seed(int.from_bytes(digest[8:16]))  # torch.manual_seed would queue one for every GPU
    set_bit_generator(_DATA_BITS)
    np.random.seed(int.from_bytes(digest[16:]))
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torch_state)
        set_bit_generator(bits)


class KeyedDataset(Dataset[Any]):
    """A map-style data set whose random draws depend on (seed, epoch, index) alone, in whatever process they happen.

    With a ``KeyedSampler`` in a ``DataLoader``, a fit resumes in mid-epoch at once, and ``num_workers`` may change.
    A data set with a generator of its own, which lives on from item to item, is run forward instead.

    Args:
        dataset: Its ``__getitem__`` may draw from the global generators of Python, NumPy and torch (on the CPU). Its
            ``set_epoch``, if any, is told the epoch in whatever process an item is made.
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
        """The item of an (epoch, index) as a ``KeyedSampler`` gives it; a bare index is that of epoch 0."""
        epoch, index = key if isinstance(key, tuple) else (0, key)
        if isinstance(key, tuple) and epoch != self._epoch:  # in a worker that lives on from epoch to epoch
            self.set_epoch(epoch)
        with keyed_rng(self.seed, epoch, index):
            return self.dataset[index]

    @property
    def lengths(self) -> Any:
        """The data set's own, where it has any."""
        return self.dataset.lengths


class KeyedSampler(Sampler[tuple[int, int]]):
    """An order of each epoch that depends on (seed, epoch) alone, and can be entered anywhere.

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
    """The training batches of one fit, with a position.

    Args:
        batches: The user's.
        seed: The trainer's.
        first_batch_seconds: How long an epoch's first batch may take while no worker of a ``DataLoader`` does anything.
    """

    def __init__(self, batches: Batches, seed: int, first_batch_seconds: float = FIRST_BATCH_SECONDS) -> None:
        self.batches = batches
        self.seed = seed
        self.kind = _kind_of(batches)
        self._generators = generators_of(batches)
        self._at_start: list[Any] = []
        self._iterator: Iterator[Any] | None = None
        self._key = (0, 0)
        self._watch = WorkerWatch(batches, first_batch_seconds)
        self._awaits_first = False

    def identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and its resume."""
        facts: dict[str, Any] = {"steps per epoch in batches": len(self.batches)}
        if isinstance(self.batches, DataLoader):
            facts |= {"batch_size": self.batches.batch_size, "sampler": type(self.batches.sampler).__name__}
            if self.kind != "keyed":
                facts["num_workers"] = self.batches.num_workers
        return facts

    def check_replayable(self) -> None:
        """Refuse a loader whose batches cannot be had a second time.

        Raises:
            UsageError: If its workers live on from epoch to epoch or hand batches over in no fixed order.
        """
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

    def open(
        self, epoch: int, skip: int = 0, state: Mapping[str, Any] | None = None, stopped: Callable[[], Any] = bool
    ) -> bool:
        """Begin an epoch at the batch after ``skip`` others; ``close`` first.

        Args:
            epoch: Counted from 1.
            skip: Batches that are behind.
            state: What ``state_dict`` gave; None in an epoch that begins without a resume.
            stopped: Asked while batches are run forward.

        Returns:
            False if ``stopped`` said so before the batch was reached.
        """
        if state is not None:
            self._set_generators(state["generators"])
        self._at_start = [_state_of(generator) for generator in self._generators]
        loader = self.batches
        self.set_epoch(epoch)
        if self.kind == "indexed":
            self._iterator = (loader[number] for number in range(skip, len(loader)))  # type: ignore[index]
            return True
        self._key = (epoch, skip)
        if self.kind == "keyed" and skip:
            loader.sampler.skip(skip * (loader.batch_size or 1))  # type: ignore[attr-defined]
        elif self.kind == "stateful" and state is not None:
            loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            if not skip:  # saved between two epochs, so it stands at the end of the one before
                self.set_epoch(epoch)
        else:
            self._key = (epoch, 0)
        has_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
        stacks = self._watch.prepare() if has_workers else ""
        living = self._workers()
        waiting = (
            self._watch.waiting(f"epoch {epoch}", living) if living else nullcontext()
        )  # a thread before a fork is a risk
        with keyed_rng(self.seed, epoch, 0), workers_of(loader, stacks), waiting:
            self._iterator = iter(loader)
        self._awaits_first = has_workers
        return self._key[1] == skip or self._run_forward(skip, stopped)

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the batches and whatever they are made of that wants to know it."""
        parts = (getattr(self.batches, name, None) for name in ("dataset", "sampler", "batch_sampler"))
        for part in (self.batches, *parts):
            if (set_epoch := getattr(part, "set_epoch", None)) is not None:
                set_epoch(epoch)

    def _run_forward(self, skip: int, stopped: Callable[[], Any]) -> bool:
        start = time.monotonic()
        while self._key[1] < skip:
            if stopped():
                return False
            if next(self, self) is self:
                raise DataError(
                    f"Epoch {self._key[0]} ended after {self._key[1] - 1} batches, and {skip} are behind.",
                    rule="a resume in mid-epoch runs the data forward to where it was.",
                    remedy="give back the training data as they were, or pass another checkpoint_dir",
                )
        record("replay", epoch=self._key[0], num_batches=skip, seconds=round(time.monotonic() - start, 3))
        return True

    def __iter__(self) -> TrainingData:
        return self

    def __next__(self) -> Any:
        assert self._iterator is not None
        if self.kind == "indexed":
            return next(self._iterator)
        epoch, number = self._key
        self._key = (epoch, number + 1)
        with keyed_rng(self.seed, *self._key):
            if not self._awaits_first:
                return next(self._iterator)
            self._awaits_first = False
            with self._watch.waiting(f"epoch {epoch}", self._workers()):
                return next(self._iterator)

    def explain(self, error: RuntimeError) -> JobFailedError | None:
        """What ended a worker, if that is what a ``DataLoader`` raised this for."""
        return self._watch.explain_death(error)

    def state_dict(self) -> dict[str, Any]:
        """What ``open`` needs to come back here, beside epoch and number of batches."""
        loader: Any = self.batches
        replayed = self._iterator is not None and self.kind != "indexed"
        states = self._at_start if replayed else [_state_of(generator) for generator in self._generators]
        return {"generators": states, "loader": loader.state_dict() if self.kind == "stateful" else None}

    def _set_generators(self, states: Sequence[Any]) -> None:
        if len(states) != len(self._generators):
            raise UsageError(
                f"The training data hold {len(self._generators)} random generators, and {len(states)} are saved.",
                rule="a resume puts the generators of loader, samplers and data set back to where they were.",
                remedy="build the data as they were, or pass another checkpoint_dir",
            )
        for generator, state in zip(self._generators, states, strict=True):
            _set_state(generator, state)

    def worker_pids(self) -> list[int]:
        """The worker processes that live on between epochs."""
        iterator = getattr(self.batches, "_iterator", None)
        return [worker.pid for worker in workers_in(iterator) if worker.is_alive()]

    def _workers(self) -> list[Any]:
        """The worker processes of this epoch, or those that live on from the last one."""
        return workers_in(self._iterator or getattr(self.batches, "_iterator", None))

    def close(self, *, persistent_too: bool = False) -> None:
        """End the epoch's worker processes, by SIGKILL where they do not end; persistent ones only if told so."""
        iterator, self._iterator = self._iterator, None
        loader: Any = self.batches
        if getattr(loader, "persistent_workers", False):
            if not persistent_too:
                return
            iterator, loader._iterator = loader._iterator, None
        workers = workers_in(iterator)
        for name in ("_shutdown_workers", "close"):
            if (end := getattr(iterator, name, None)) is not None:
                end()
                break
        for worker in workers:
            if worker.is_alive():  # busy in the user's code: what torch sends it then is blocked
                worker.kill()
                worker.join()
        self._watch.close()


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
        and not generators_of(batches.dataset)
    ):
        return "keyed"
    return "replayed"


_PARTS = ("sampler", "batch_sampler", "dataset")
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_SHARED = (torch.default_generator, np.random.mtrand._rand, random._inst)


def generators_of(batches: Any) -> list[Any]:
    """The generators that batches, their samplers and data sets hold, each once; they live on from epoch to epoch.

    Those of Python, NumPy and torch are found that are attributes of these objects, or of a data set within a data set.
    Workers draw from copies, made when they start, of what this process holds: these are brought back with it. What
    cannot be seen: a generator in a list or another object, of another library, or of a worker that lives on.
    """
    found: dict[int, Any] = {}
    todo = [batches]
    for holder in todo:
        attributes = getattr(holder, "__dict__", {})
        for value in attributes.values():
            if isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom):
                found[id(value)] = value
        parts = (attributes.get(name) for name in _PARTS)
        todo += [part for part in parts if part is not None and not any(part is other for other in todo)]
    return [one for one in found.values() if not any(one is shared for shared in _SHARED)]


@contextmanager
def preserved_generators(batches: Any) -> Iterator[None]:
    """Whatever the batches' own generators draw inside, they go on afterwards as if nothing had."""
    states = [(generator, _state_of(generator)) for generator in generators_of(batches)]
    try:
        yield
    finally:
        for generator, state in states:
            _set_state(generator, state)


def _state_of(generator: Any) -> Any:
    """A generator's state as a tensor or plain values, which a safe load accepts."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return _plain(_numpy_state(generator))


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _like(_numpy_state(generator), state)
    else:
        generator.set_state(_like(_numpy_state(generator), state))


def _numpy_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _like(now: Any, plain: Any) -> Any:
    """A plain state with arrays where the generator's present one has them."""
    if isinstance(now, dict):
        return {name: _like(now[name], value) for name, value in plain.items()}
    return np.array(plain, now.dtype) if isinstance(now, np.ndarray) else plain
