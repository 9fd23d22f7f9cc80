"""Padded batches of sequences of about one length, made here or ahead by worker processes, with a position."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from memfit.data._build import fingerprint_of
from memfit.data._order import Order
from memfit.data._padding import Padding, views
from memfit.data._pool import Run, WorkerPool
from memfit.data._position import PositionedLoader
from memfit.errors import DataError, UsageError

Array = npt.NDArray[Any]

_ALIGN = 64


class SequenceLoader(PositionedLoader[dict[str, Array]]):
    """Padded batches of sequences: those of about one length together, in an order drawn for each (seed, epoch).

    What batch k of an epoch holds depends on (examples, arguments, epoch, k) alone, whatever the number of workers. An
    iteration is the rest of the present epoch; after its end the next one is the same epoch from its start, until
    ``set_epoch`` names another. A batch is a dict of arrays, see `Padding`; one that is kept never changes.

    Args:
        examples: Mappings of ids and numbers, in anything with a length and an index: a list, `Tokenized`, or a
            `PackedDataset`, which no worker copies. ``pack(Tokenized(...))`` tokenises once and for all epochs.
        padding: How a batch is filled up.
        batch: Examples in a batch; the last one holds what is left. With ``max_tokens`` the most.
        max_tokens: No array of a batch has more numbers than this, filled up: memory stays the same for long and for
            short examples. The number of batches is the same in each epoch.
        shuffle: None keeps the order of the examples; a seed, a whole number, draws one for each (seed, epoch).
        bucket: When shuffled with ``batch`` alone: so many batches' worth of examples are drawn and then sorted by
            length; 1 for none. With ``max_tokens`` all are sorted, those of one width in random order.
        lengths: Of each example the length of its longest sequence; None for the examples' own ``lengths``, or to read
            all of them once where lengths are needed (``max_tokens``, ``bucket``, workers without a ``max_length``).
        num_workers: Processes that make batches ahead: see `WorkerPool`. 0 makes them here.
        pool: Workers to share with other loaders, in place of ``num_workers``. Its owner closes it.

    Attributes:
        num_workers: Processes that make batches; 0 after a fallback.

    Raises:
        DataError: If there is no example, or if one does not fit into ``max_tokens``.
        UsageError: If an argument is out of range, or if workers cannot be sent the examples.

    Example:
        >>> rows = [{"input_ids": [7] * length, "labels": length % 2} for length in (1, 5, 2, 6)]
        >>> for batch in SequenceLoader(rows, Padding(pad_id=0), batch=2, shuffle=3):
        ...     print(batch["input_ids"].shape, sorted(batch["attention_mask"].sum(axis=1)), batch["labels"].dtype)
        (2, 2) [np.int64(1), np.int64(2)] int64
        (2, 6) [np.int64(5), np.int64(6)] int64
    """

    _order_of = "examples, lengths, padding, batch, max_tokens, bucket and shuffle"

    def __init__(  # noqa: PLR0913 - what, in which batches, made by whom: a call reads as a sentence
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
        pool: WorkerPool | None = None,
    ) -> None:
        _check(len(examples), (batch, max_tokens, bucket), shuffle, num_workers, pool)
        self.examples, self.padding = examples, padding
        is_sorted = shuffle is not None and (batch is None or bucket > 1)
        has_workers = pool is not None or num_workers > 0
        widths = None
        if is_sorted or max_tokens is not None or lengths is not None or (has_workers and padding.max_length is None):
            widths = padding.width(_lengths_of(examples, lengths))
        self._order = Order(len(examples), widths, batch, max_tokens, shuffle, bucket)
        self._plan = self._order.batches(0)
        self._fields = padding.fields_of(examples[0])
        key = {"order": self._order.key(), "padding": repr(padding), "fields": [field.name for field in self._fields]}
        super().__init__(fingerprint_of(key)[:16], owns_pool=pool is None)
        if has_workers:
            most = self._order.most_size * int(padding.max_length or 0) if widths is None else self._order.most_numbers
            self._use(pool or WorkerPool(num_workers), most)

    def _use(self, pool: WorkerPool, most_numbers: int) -> None:
        size = self._order.most_size
        num_bytes = self.padding.most_bytes(self._fields, 1, most_numbers) + 2 * len(self._fields) * size * 8
        recipe = _Recipe(self.examples, self.padding, self._fields, _Layout(len(self._fields), size, num_bytes))
        try:
            pickle.dumps(recipe)
        except Exception as error:
            raise UsageError(
                f"the examples or their tokenizer cannot be sent to a worker: {error}.",
                rule="workers get both by pickle; they import functions by their names, and not the script.",
                remedy="pass a tokenizer of a library or a function of a module, or use num_workers=0",
            ) from None
        # A pool asks a recipe for its layout, reader and make alone, which this one has too.
        self._pool, self._layout, self._number = pool, recipe.layout, pool.add(cast(Any, recipe))

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._plan)

    @property
    def indices(self) -> list[Array]:
        """Of each batch of the present epoch, which examples it holds, in their order."""
        return list(self._plan)

    def _draw(self, epoch: int) -> None:
        self._plan = self._order.batches(epoch)

    def _make_next(self) -> dict[str, Array]:
        return self._make(self._plan[self._position])

    def _make(self, indices: Array) -> dict[str, Array]:
        examples = examples_at(self.examples, indices)
        return self.padding.fill(self._fields, examples, lambda nbytes: np.empty(nbytes, np.uint8))[0]

    def _from_pool(self, pool: WorkerPool) -> dict[str, Array]:
        if self._run is None:
            layout = cast(Any, self._layout)
            self._run = Run(self._number, layout, self._epoch, self._plan.__getitem__, self._position, len(self))
        indices, body, widths = pool.deliver(self._run, self._position)
        return views(self._fields, len(indices), widths.tolist(), body)

    def longest(self) -> dict[str, Array]:
        """The batch that takes most memory of all that can come. The position stays; lengths are read if unknown."""
        if self._order.widths is None:
            self._order = replace(self._order, widths=self.padding.width(_lengths_of(self.examples, None)))
        return self._make(self._order.longest())


@dataclass(frozen=True)
class _Layout:
    """How a batch lies in a slot: the width of each field, the examples it is made of, then its arrays."""

    num_fields: int
    max_size: int
    num_bytes: int

    @property
    def nbytes(self) -> int:
        return self._starts()[1] + -(-self.num_bytes // _ALIGN) * _ALIGN

    def _starts(self) -> tuple[int, int]:
        cells = -(-self.num_fields * 8 // _ALIGN) * _ALIGN
        return cells, cells + -(-self.max_size * 8 // _ALIGN) * _ALIGN

    def parts(self, memory: Array, size: int) -> tuple[Array, Array, Array]:
        """Views of a slot: (num_bytes,) uint8 of arrays, (num_fields,) int64 widths, (size,) int64 examples."""
        cells, body = self._starts()
        return memory[body:], memory[: self.num_fields * 8].view(np.int64), memory[cells:][: size * 8].view(np.int64)


@dataclass(frozen=True)
class _Recipe:
    """How batches are made from indices, in a worker."""

    examples: Sequence[Any]
    padding: Padding
    fields: Sequence[Any]
    layout: _Layout
    transform: None = None

    def reader(self) -> None:
        return None

    def make(self, reader: None, parts: tuple[Array, Array, Array], key: tuple[int, int]) -> None:
        body, widths, indices = parts
        examples = examples_at(self.examples, indices)

        def memory_of(nbytes: int) -> Array:
            if nbytes > len(body):
                raise DataError(
                    f"batch {key[1]} of epoch {key[0]} takes {nbytes} bytes.",
                    rule=f"the lengths of the examples allow {len(body)}.",
                    remedy="give each example's longest length as lengths=, or leave lengths out to have them read",
                )
            return body[:nbytes]

        _, widths[:] = self.padding.fill(self.fields, examples, memory_of)


def examples_at(examples: Any, indices: Array) -> list[Any]:
    """The examples of one batch, all at once where they can be had so."""
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


def _check(number: int, counts: tuple[Any, ...], shuffle: Any, num_workers: Any, pool: Any) -> None:
    if number == 0:
        raise DataError("there are no examples.", rule="an epoch has a batch at least.", remedy="pass some examples")
    batch, max_tokens, bucket = counts
    given = [(one, 1) for one in (batch, max_tokens) if one is not None]
    checked = [*given, (bucket, 1), (num_workers, 0), (0 if shuffle is None else shuffle, 0)]
    is_whole = all(isinstance(one, int | np.integer) and not isinstance(one, bool) for one, _ in checked)
    if not given or not is_whole or any(one < least for one, least in checked) or (pool is not None and num_workers):
        raise UsageError(
            f"a loader cannot have batch={batch!r}, max_tokens={max_tokens!r}, bucket={bucket!r}, shuffle={shuffle!r}, "
            f"num_workers={num_workers!r} and pool={pool}.",
            rule="batch, max_tokens or both are given; they and bucket are counts from 1, num_workers one from 0; "
            "shuffle is None or a seed from 0; a pool says how many workers there are.",
            remedy="correct that argument, for example batch=32 or max_tokens=8192",
        )
