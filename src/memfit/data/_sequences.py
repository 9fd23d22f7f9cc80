"""Padded batches of sequences of about one length, with a position to resume at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.data._build import fingerprint_of
from memfit.data._order import Order
from memfit.data._padding import Padding
from memfit.data._position import PositionedLoader
from memfit.errors import DataError, UsageError, check_counts

Array = npt.NDArray[Any]


class SequenceLoader(PositionedLoader[dict[str, Array]]):
    """Padded batches of sequences: those of about one length together, in an order drawn for each (seed, epoch).

    Batch k of an epoch depends on (examples, arguments, epoch, k) alone. It is a dict of arrays, see `Padding`. An
    iteration is the rest of the present epoch; the next one repeats that epoch until ``set_epoch`` names another.

    Args:
        examples: Mappings of ids and numbers in a list or `PackedDataset`. ``pack(map(tokenize, rows))``
            tokenises once for all epochs.
        padding: How a batch is filled up.
        batch: Examples in a batch; the last one holds what is left. With ``max_tokens`` the most.
        max_tokens: No array of a batch has more numbers than this, padding included.
        shuffle: None keeps the order of the examples; a seed, a whole number, draws one for each (seed, epoch).
        bucket: Shuffled with ``batch`` alone, examples are sorted by length within this many batches; 1 does not sort.
            With ``max_tokens`` all are sorted.
        lengths: The length of each example's longest sequence. None takes ``examples.lengths``, or reads all examples
            once if lengths are needed (``max_tokens``, ``bucket``).
        num_workers: Threads that make batches ahead, each one batch. 0 makes a batch when it is asked for.

    Attributes:
        batch_size: Examples in a batch; None with ``max_tokens``, where batches differ.

    Raises:
        DataError: If there is no example, or if one does not fit into ``max_tokens``.
        UsageError: If an argument is out of range.

    Example:
        >>> rows = [{"input_ids": [7] * length, "labels": length % 2} for length in (1, 5, 2, 6)]
        >>> for batch in SequenceLoader(rows, Padding(pad_id=0), batch=2, shuffle=3):
        ...     print(batch["input_ids"].shape, sorted(batch["attention_mask"].sum(axis=1)), batch["labels"].dtype)
        (2, 2) [np.int64(1), np.int64(2)] int64
        (2, 6) [np.int64(5), np.int64(6)] int64
    """

    _order_of = "examples, lengths, padding, batch, max_tokens, bucket and shuffle"

    def __init__(  # noqa: PLR0913 - what, in which batches, made how: a call reads as a sentence
        self,
        examples: Sequence[Any],
        padding: Padding,
        *,
        batch: int | None = None,
        max_tokens: int | None = None,
        shuffle: int | None = None,
        bucket: int = 50,
        lengths: Sequence[int] | npt.NDArray[np.integer] | None = None,
        num_workers: int = 0,
    ) -> None:
        check_counts(UsageError, 0, num_workers=num_workers)
        check_counts(UsageError, 1, batch=batch, max_tokens=max_tokens, bucket=bucket)
        check_counts(UsageError, 0, shuffle=shuffle)
        if not len(examples):
            raise DataError("there are no examples.", rule="an epoch has a batch.", remedy="pass some examples")
        if batch is None and max_tokens is None:
            raise UsageError(
                "neither batch nor max_tokens is given.",
                rule="one of them, or both, say how large a batch is.",
                remedy="pass for example batch=32 or max_tokens=8192",
            )
        self.examples, self.padding = examples, padding
        self.batch_size = batch if max_tokens is None else None
        is_sorted = shuffle is not None and (batch is None or bucket > 1)
        widths = None
        if is_sorted or max_tokens is not None or lengths is not None:
            widths = padding.width(_lengths_of(examples, lengths))
        self._order = Order(len(examples), widths, batch, max_tokens, shuffle, bucket)
        self._plan = self._order.batches(0)
        self._fields = padding.fields_of(examples[0])
        key = {"order": self._order.key(), "padding": repr(padding), "fields": [field.name for field in self._fields]}
        super().__init__(fingerprint_of(key)[:16], num_workers)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._plan)

    @property
    def indices(self) -> list[Array]:
        """The indices of the examples in each batch of the present epoch."""
        return list(self._plan)

    def _draw(self, epoch: int) -> None:
        self._plan = self._order.batches(epoch)

    def _task(self, number: int) -> Callable[[], dict[str, Array]]:
        return functools.partial(self._make, self._plan[number])

    def _make(self, indices: Array) -> dict[str, Array]:
        return self.padding.fill(self._fields, examples_at(self.examples, indices))

    def longest(self) -> dict[str, Array]:
        """The batch that takes most memory of all that can come. The position stays; lengths are read if unknown."""
        if self._order.widths is None:
            self._order = replace(self._order, widths=self.padding.width(_lengths_of(self.examples, None)))
        return self._make(self._order.longest())


def examples_at(examples: Any, indices: Array) -> list[Any]:
    """Return the examples of one batch, by one call of ``__getitems__`` if there is one."""
    if (several := getattr(examples, "__getitems__", None)) is not None:
        return list(several(indices.tolist()))
    return [examples[index] for index in indices.tolist()]


def _lengths_of(examples: Sequence[Any], lengths: Any) -> Array:
    found = getattr(examples, "lengths", None) if lengths is None else lengths
    if found is None:
        found = [
            max((len(value) for value in one.values() if hasattr(value, "__len__")), default=1) for one in examples
        ]
    array = np.asarray(found, np.int64)
    if array.shape != (len(examples),):
        raise DataError(
            f"the lengths have the shape {array.shape}, and there are {len(examples)} examples.",
            rule="there is one length for each example.",
            remedy="give the length of each example's longest sequence, or leave lengths out",
        )
    return array
