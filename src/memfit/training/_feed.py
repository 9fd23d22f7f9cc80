"""Feed the batches of a fit, with a position: a resumed epoch goes on at its next batch.

How it gets there depends on the data: ``docs/training.md`` has the table, and here is a class for each row. Of several
ranks, each is dealt one contiguous part of each global batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler, default_collate

from memfit.errors import DataError, UsageError
from memfit.rundir import record
from memfit.training._loaders import generators_of, parts_of, remade
from memfit.training._process import preserved_rng
from memfit.training._ranks import Ranks
from memfit.training._split import Split
from memfit.training._stream import KeyedStream, check_loader, keyed_rng, order_of, why_not_keyed
from memfit.training._workers import FIRST_BATCH_SECONDS, Workers, workers_in


class Batches(Protocol):
    """What can be trained on: sized, iterable once per epoch; its ``set_epoch(epoch)``, if any, is called first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


def is_numbered(batches: Any) -> bool:
    """Return whether batches are had by number, so that none before is made."""
    return isinstance(batches, Sequence) or (hasattr(batches, "__getitem__") and hasattr(batches, "set_epoch"))


def part_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return where the part of a rank begins and ends; parts differ by one unit at most.
    >>> [part_of(10, rank, 4) for rank in range(4)], part_of(2, 3, 4)
    ([(0, 3), (3, 6), (6, 8), (8, 10)], (2, 2))
    """
    least, more = divmod(total, size)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


def own_part(batches: Sequence[Any], split: Split, rank: int, size: int) -> list[Any]:
    """Return a rank's part of a global batch, which is made of ``batches`` one after the other.
    >>> import torch
    >>> from memfit.training import BySample
    >>> [one.tolist() for one in own_part([torch.arange(4), torch.arange(4, 8)], BySample(), 1, 3)]
    [[3], [4, 5]]
    """
    counts = [split.count(batch) for batch in batches]
    start, stop = part_of(sum(counts), rank, size)
    own, begins = [], 0
    for batch, count in zip(batches, counts, strict=True):
        first, last = max(start - begins, 0), min(stop - begins, count)
        if first < last:
            own.append(batch if last - first == count else split.take(batch, first, last))
        begins += count
    return own


def feed_of(batches: Batches, seed: int, first_batch_seconds: float = FIRST_BATCH_SECONDS) -> Feed:
    kind: type[Feed] = Feed
    if is_numbered(batches):
        kind = NumberedFeed
    elif hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict"):
        kind = StatefulFeed
    elif why_not_keyed(batches) is None:
        kind = KeyedFeed
    return kind(batches, seed, first_batch_seconds)


class Feed:
    """Reads an epoch of any batches forward to where a resume goes on, under the same draws as then."""

    def __init__(self, batches: Batches, seed: int, first_batch_seconds: float) -> None:
        self.batches = batches
        self.seed = seed
        self.loader: Any = batches
        self.workers = Workers(batches, first_batch_seconds)
        #: The samples of a batch that this rank loads; None where it loads those of all ranks.
        self.own_batch: int | None = None
        self._deal: Callable[[list[Any]], list[Any]] | None = None
        self._opened: Iterator[Any] = iter(())
        self._key = (0, 0)
        self._state: Mapping[str, Any] = {}

    def check(self) -> None:
        """Refuse batches that cannot be had a second time."""
        loader = self.batches
        if not isinstance(loader, DataLoader) or loader.num_workers == 0:
            return
        persistent = loader.persistent_workers and type(self) is Feed
        if persistent or not getattr(loader, "in_order", True):
            raise UsageError(
                f"The training loader has {'persistent_workers=True' if persistent else 'in_order=False'}.",
                rule="a resume makes an epoch's batches again: no worker may carry random state, no order be chance.",
                remedy="set it to its default, or pass allow_inexact=True to the Trainer",
            )

    def identity(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"steps per epoch in batches": len(self.batches)}
        if isinstance(loader := self.batches, DataLoader):
            facts |= {"batch_size": loader.batch_size, "sampler": type(loader.sampler).__name__}
            if not isinstance(self, KeyedFeed):
                facts["num_workers"] = loader.num_workers
        return facts

    def batches_per_step(self, global_batch_size: int | None, split: Split) -> int:
        """Return how many batches make a step over ``global_batch_size`` samples; None is one batch."""
        if global_batch_size is None:
            return 1
        size: int | None = getattr(self.loader, "batch_size", None)
        if size is None and is_numbered(self.loader):
            self.set_epoch(1)
            with preserved_rng():
                size = split.count(self.loader[0])
        if size is None or global_batch_size < size or global_batch_size % size:
            raise UsageError(
                f"global_batch_size is {global_batch_size}, and a batch of the training data has "
                f"{'a size that is not known' if size is None else size}.",
                rule="an optimizer step takes a whole number of the loader's batches.",
                remedy="pass a DataLoader with batch_size, and a global_batch_size that is a multiple of it",
            )
        return global_batch_size // size

    # --- several ranks

    def deal(self, num: int, split: Split, ranks: Ranks) -> None:
        """Deal each ``num`` batches to the ranks: each loads them whole, and takes its part."""
        if any(isinstance(one, DistributedSampler) for one in parts_of(self.batches)):
            raise UsageError(
                "The training loader has a DistributedSampler.",
                rule="each rank gets the same loader, and the Trainer deals its batches, whatever their number is.",
                remedy="leave it out: DataLoader(data, batch_size=..., shuffle=True)",
            )
        self._deal = partial(own_part, split=split, rank=ranks.rank, size=ranks.size)

    # --- an epoch

    def open(self, epoch: int, skip: int = 0, check_stop: Callable[[], object] = bool) -> None:
        """Begin an epoch at the batch after ``skip`` others; ``close`` first. ``check_stop`` is called between batches
        that are read forward; it raises if the fit should stop."""
        self.set_epoch(epoch)
        with keyed_rng(self.seed, epoch, 0):
            for generator in generators_of(self.batches):
                generator.manual_seed(int(torch.randint(2**62, ())))
            self._key = (epoch, self._enter(epoch, skip))
            self._opened = self.workers.open(f"epoch {epoch}")
        if self._key[1] == skip:
            return
        start = time.monotonic()
        while self._key[1] < skip:
            check_stop()
            if next(self, self) is self:
                raise DataError(
                    f"Epoch {epoch} ended after {self._key[1] - 1} batches, and {skip} were trained.",
                    rule="a resume in mid-epoch reads the data forward to where it was.",
                    remedy="give back the training data as they were, or pass another checkpoint_dir",
                )
        record("replay", epoch=epoch, num_batches=skip, seconds=round(time.monotonic() - start, 3))

    def _enter(self, epoch: int, skip: int) -> int:
        """Return how many batches the next iteration leaves out."""
        return 0

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the batches and of what a ``DataLoader`` is made of."""
        for part in parts_of(self.loader):
            if (set_epoch := getattr(part, "set_epoch", None)) is not None:
                set_epoch(epoch)

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        epoch, number = self._key
        self._key = (epoch, number + 1)
        with keyed_rng(self.seed, *self._key):
            return next(self._opened)

    def take(self, num: int) -> tuple[list[Any], int]:
        """Return the next ``num`` batches, of several ranks the own part of them, and how many batches these are."""
        batches = list(itertools.islice(self, num))
        return batches if self._deal is None else self._deal(batches), len(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next ``open`` needs to come back here, beside epoch and number of batches."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def worker_pids(self) -> list[int]:
        iterator = getattr(self.workers.loader, "_iterator", None)
        return [worker.pid for worker in workers_in(iterator) if worker.is_alive()]

    def close(self, *, persistent_too: bool = False) -> None:
        """End the epoch's worker processes; persistent ones only with ``persistent_too``."""
        self.workers.close(persistent_too=persistent_too)


class NumberedFeed(Feed):
    """Asks for batches by their number; they draw from the global generators."""

    def open(self, epoch: int, skip: int = 0, check_stop: Callable[[], object] = bool) -> None:
        self.set_epoch(epoch)
        self._numbers = iter(range(skip, len(self.batches)))

    def __next__(self) -> Any:
        return self.loader[next(self._numbers)]


class StatefulFeed(Feed):
    """Gives batches back the state that they had."""

    def _enter(self, epoch: int, skip: int) -> int:
        state, self._state = self._state, {}
        if not state:
            return 0
        self.loader.load_state_dict(state["loader"])
        if not skip:  # saved between two epochs, so it is at the end of the one before
            self.set_epoch(epoch)
        return skip

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict()}


class DealtOrder(Sampler[list[Any]]):
    """A rank's part of each ``num`` batches of a keyed loader, in lists as long as the loader's batches at most."""

    def __init__(self, loader: DataLoader[Any], num: int, rank: int, size: int) -> None:
        self.loader, self.num, self.rank, self.size = loader, num, rank, size

    def __iter__(self) -> Iterator[list[Any]]:
        length = self.loader.batch_size or 1
        keys = iter(self.loader.sampler)
        while chunk := list(itertools.islice(keys, length * self.num)):
            for start, stop in self.pieces(len(chunk)):
                yield chunk[start:stop]

    def pieces(self, num_samples: int) -> list[tuple[int, int]]:
        length = self.loader.batch_size or 1
        start, stop = part_of(
            num_samples - (num_samples % length if self.loader.drop_last else 0), self.rank, self.size
        )
        return [(first, min(first + length, stop)) for first in range(start, stop, length)]

    def pieces_at(self, number: int) -> list[tuple[int, int]]:
        """Return the own parts of the global batch that begins at the loader's batch ``number``."""
        length, num_samples = self.loader.batch_size or 1, len(self.loader.sampler)  # type: ignore[arg-type]
        return self.pieces(min(length * self.num, num_samples - number * length))


class KeyedFeed(Feed):
    """Leaves out what was trained in the order of a ``DataLoader``, whose draws a ``KeyedStream`` has made keyed."""

    def __init__(self, batches: Any, seed: int, first_batch_seconds: float) -> None:
        super().__init__(batches, seed, first_batch_seconds)
        self.loader = self.workers.loader = KeyedStream(seed).loader(batches)
        self._dealt: DealtOrder | None = None

    def check(self) -> None:
        super().check()
        check_loader(self.loader, None)

    def deal(self, num: int, split: Split, ranks: Ranks) -> None:
        """Deal each ``num`` batches to the ranks. Each loads its own part alone, where no draw belongs to a batch."""
        super().deal(num, split, ranks)
        loader = self.loader
        draws_alone = loader.collate_fn.collate is default_collate and loader.dataset.together is None
        if draws_alone and loader.batch_size is not None:
            self._dealt = DealtOrder(loader, num, ranks.rank, ranks.size)
            self.workers.loader = remade(loader, batch_sampler=self._dealt)
            self.own_batch = max((stop - start for start, stop in self._dealt.pieces_at(0)), default=0)

    def _enter(self, epoch: int, skip: int) -> int:
        order: Any = order_of(self.loader)
        order.skip(skip * (self.loader.batch_size or 1))
        return skip

    def take(self, num: int) -> tuple[list[Any], int]:
        if self._dealt is None:
            return super().take(num)
        epoch, number = self._key
        count = max(0, min(num, len(self.batches) - number))
        own = [next(self) for _ in (self._dealt.pieces_at(number) if count else ())]
        self._key = (epoch, number + count)
        return own, count
