"""Choose the examples of each batch: those of about one length together, drawn for each (seed, epoch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.errors import DataError

Array = npt.NDArray[Any]


class Cut(Sequence[Array]):
    """The indices of each batch, cut out when asked for: a list of them takes more memory than all indices.
    >>> list(Cut(np.array([5, 3, 1]), np.array([0, 2, 3]), np.array([1, 0])))
    [array([1]), array([5, 3])]
    """

    def __init__(self, order: Array, starts: Array, places: Array) -> None:
        self._order, self._starts, self._places = order, starts, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: Any) -> Any:
        place = self._places[number]
        return self._order[self._starts[place] : self._starts[place + 1]]

    def drawn(self, generator: np.random.Generator) -> Cut:
        return Cut(self._order, self._starts, generator.permutation(len(self)))


@dataclass(frozen=True, eq=False)
class Order:
    """Which examples make which batch of which epoch. ``widths`` (number,) is what each is filled up to by itself; None
    where nothing depends on it."""

    number: int
    widths: Array | None
    batch: int | None
    max_tokens: int | None
    seed: int | None
    bucket: int

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.widths is not None and self.widths.max() > self.max_tokens:
            place = int(self.widths.argmax())
            raise DataError(
                f"example {place} takes {self.widths[place]} tokens by itself.",
                rule=f"a batch has at most max_tokens={self.max_tokens}, with what fills it up.",
                remedy="raise max_tokens, or cut long examples: Padding(max_length=...)",
            )

    def key(self) -> dict[str, Any]:
        """Return what the order depends on, as plain values."""
        is_sorted = self.max_tokens is not None or (self.seed is not None and self.bucket > 1)
        values = np.ascontiguousarray(self.widths, "<i8").tobytes() if is_sorted else b""
        numbers = [self.number, self.batch, self.max_tokens, self.seed, self.bucket]
        plain = [None if number is None else int(number) for number in numbers]
        return {"numbers": plain, "widths": blake2b(values, digest_size=16).hexdigest()}

    def batches(self, epoch: int) -> Cut:
        if self.seed is None:
            return self._cut(np.arange(self.number))
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(self.number)
        if self.max_tokens is not None:
            parts = self._cut(self._sorted(order))
        else:
            assert self.batch is not None
            if self.bucket > 1:
                size = self.bucket * self.batch
                order = np.concatenate([self._sorted(order[at : at + size]) for at in range(0, self.number, size)])
            parts = self._cut(order)
        return parts.drawn(generator)

    def _sorted(self, indices: Array) -> Array:
        assert self.widths is not None
        ordered: Array = indices[np.argsort(-self.widths[indices], kind="stable")]
        return ordered

    def _cut(self, order: Array) -> Cut:
        if self.max_tokens is None:
            equal = np.arange(0, len(order), self.batch or 1)
            return Cut(order, np.append(equal, len(order)), np.arange(len(equal)))
        assert self.widths is not None
        widths, most = self.widths[order].tolist(), self.batch or len(order)
        starts, width = [0], 0
        for place, own in enumerate(widths):
            width = max(width, own)
            size = place - starts[-1] + 1
            if size > most or size * width > self.max_tokens:
                starts.append(place)
                width = own
        return Cut(order, np.array([*starts, len(order)]), np.arange(len(starts)))

    def longest(self) -> Array:
        assert self.widths is not None
        if self.max_tokens is None:
            return self._sorted(np.arange(self.number))[: self.batch]
        widths = self.widths
        return max(self.batches(0), key=lambda part: len(part) * int(widths[part].max()))
