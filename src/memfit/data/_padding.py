"""Turn examples of several lengths into rectangular arrays with masks; without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from memfit.errors import DataError, UsageError, check_counts

Array = npt.NDArray[Any]
Side = Literal["left", "right"]

_ATTENTION = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}


@dataclass(frozen=True)
class _Field:
    """A field of a batch: its name, padding (None for single numbers), type and mask."""

    name: str
    pad: int | None
    dtype: str = "int64"
    mask: str = ""


@dataclass(frozen=True)
class Padding:
    """Makes rectangular arrays of examples of several lengths: ``padding(examples)``.

    An example is a mapping of sequences of ids and of single numbers, all examples the same names. The batch has
    (examples, width) int64 for a sequence, and (examples,) int64 or float32 for a number. ``attention_mask`` beside
    ``input_ids`` and ``decoder_attention_mask`` beside ``decoder_input_ids`` are added: 1 for a token, 0 for padding.
    ``labels`` are padded with ``label_pad``, what ends in ``mask`` or ``type_ids`` with 0, all else with ``pad_id``.

    Attributes:
        pad_id: The id that fills ``input_ids`` up.
        label_pad: What fills ``labels`` up; -100 is what ``torch.nn.functional.cross_entropy`` leaves out.
        multiple_of: Widths are rounded up to multiples of it; 8 suits the matrix units of GPUs.
        max_length: Sequences are cut to this many ids, special ones at the end too; a tokenizer cuts with more care.
        side: Where it is filled up; ``left`` for generating with a decoder.
        truncate: Where it is cut.
        with_label_mask: Add ``label_mask``, 1 where ``labels`` has a label, for losses that know no -100.

    Raises:
        UsageError: If a number is out of range, or if ``max_length`` is no multiple of ``multiple_of``.

    Example:
        >>> padding = Padding(pad_id=0, multiple_of=4)
        >>> batch = padding([{"input_ids": [5, 6, 7], "labels": [8]}, {"input_ids": [9], "labels": [8, 1]}])
        >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
        ([[5, 6, 7, 0], [9, 0, 0, 0]], [[1, 1, 1, 0], [1, 0, 0, 0]])
        >>> batch["labels"].tolist()
        [[8, -100, -100, -100], [8, 1, -100, -100]]
    """

    pad_id: int
    label_pad: int = -100
    multiple_of: int = 1
    max_length: int | None = None
    side: Side = "right"
    truncate: Side = "right"
    with_label_mask: bool = False

    def __post_init__(self) -> None:
        check_counts(UsageError, 1, multiple_of=self.multiple_of, max_length=self.max_length)
        if (self.max_length or 0) % self.multiple_of or not {self.side, self.truncate} <= {"left", "right"}:
            raise UsageError(
                f"a padding cannot have multiple_of={self.multiple_of}, max_length={self.max_length}, "
                f"side={self.side!r} and truncate={self.truncate!r}.",
                rule="max_length is a multiple of multiple_of; sides are left and right.",
                remedy="correct that argument, for example multiple_of=8 and max_length=512",
            )

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
        """Return the batch of at least one example.

        Raises:
            DataError: If an example's fields are not those of the first, or if one holds anything but numbers.
        """
        return self.fill(self.fields_of(examples[0]), examples)

    def width(self, length: Any) -> Any:
        """Return the width that a sequence, or each of an array of lengths, is padded to."""
        most = np.iinfo(np.int64).max // 2 if self.max_length is None else self.max_length
        return -(-np.minimum(np.maximum(length, 1), most) // self.multiple_of) * self.multiple_of

    def fields_of(self, example: Mapping[str, Any]) -> tuple[_Field, ...]:
        """Return the fields of each batch, from one example."""
        if not isinstance(example, Mapping) or not example:
            raise DataError(
                f"an example is {example!r:.80}.",
                rule="an example is a mapping of names to sequences of ids and to numbers.",
                remedy='make it {"input_ids": ids}, by a tokenizer where it is a text',
            )
        fields = []
        for name, value in example.items():
            array = _checked(name, value)
            if array.ndim == 0:
                fields.append(_Field(name, None, "float32" if array.dtype.kind == "f" else "int64"))
                continue
            mask = _ATTENTION.get(name, "")
            if name == "labels":
                pad, mask = self.label_pad, "label_mask" if self.with_label_mask else ""
            else:
                pad = 0 if name.endswith(("mask", "type_ids")) else self.pad_id
            fields.append(_Field(name, pad, mask="" if mask in example else mask))
        return tuple(fields)

    def fill(self, fields: Sequence[_Field], examples: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
        """Return the batch."""
        columns = [self._column(field, examples) for field in fields]
        batch: dict[str, Array] = {}
        for field, column in zip(fields, columns, strict=True):
            if field.pad is None:
                batch[field.name] = np.array(column, field.dtype)
                continue
            lengths = np.fromiter(map(len, column), np.int64, len(column))
            width = int(self.width(lengths.max()))
            places = np.arange(width)
            filled = places < lengths[:, None] if self.side == "right" else places >= width - lengths[:, None]
            batch[field.name] = np.full(filled.shape, field.pad, field.dtype)
            batch[field.name][filled] = np.concatenate(column)
            if field.mask:
                batch[field.mask] = filled.astype(field.dtype)
        return batch

    def _column(self, field: _Field, examples: Sequence[Mapping[str, Any]]) -> list[Any]:
        column = []
        for number, example in enumerate(examples):
            if field.name not in example:
                raise DataError(
                    f"example {number} of a batch has no {field.name!r}, and {sorted(example)}.",
                    rule="all examples have the fields of the first.",
                    remedy="give each example that field, or none",
                )
            value = _checked(field.name, example[field.name])
            if (value.ndim == 0) != (field.pad is None):
                raise _bad(field.name, "a number in one example and a sequence in another")
            if self.max_length is not None and value.ndim and len(value) > self.max_length:
                value = value[: self.max_length] if self.truncate == "right" else value[-self.max_length :]
            column.append(value)
        return column


def _checked(name: str, value: Any) -> Array:
    array = np.asarray(value)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int64)
    if array.dtype.kind not in ("biuf" if array.ndim == 0 else "biu") or array.ndim > 1:
        what = f"of the shape {array.shape}" if array.ndim > 1 else f"of the type {array.dtype}"
        raise _bad(name, f"{what}: {value!r:.60}")
    return array


def _bad(name: str, what: str) -> DataError:
    return DataError(
        f"the field {name!r} of an example is {what}.",
        rule="a field is one number or one sequence of whole numbers.",
        remedy="tokenise texts first, pack(map(tokenize, rows)), and leave out what is not for the model",
    )
