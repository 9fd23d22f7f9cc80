"""Deal each global batch to the ranks: one contiguous part for each, however many ranks there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Sampler

from memfit.training._split import Split


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
