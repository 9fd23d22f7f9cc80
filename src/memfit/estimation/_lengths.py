"""How long the sequences of a data set are, and what that makes of its batches: the longest one sets the peak.

Lengths are counted, not kept: a file of any size takes memory for its different lengths alone. Loads no torch.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.errors import DataError, UsageError, nearest

_Counts = npt.NDArray[np.int64]

_MAX_LENGTH = 1 << 24  # tokens; what is above is no length but an id
_PERCENTILES = (1, 5, 25, 50, 75, 90, 95, 99)
_NAMES = ("length", "lengths", "num_tokens", "n_tokens", "tokens", "len")
_SUFFIXES = (".txt", ".csv", ".jsonl", ".feather", ".arrow", ".parquet")
_AT_ONCE = 1 << 16  # rows that are read in one piece
_MAX_SEQUENCES = 1 << 24  # that are laid out; of more, a share of each length
_LINE = 1 << 20  # bytes that a line may have


@dataclass(frozen=True)
class LengthStatistics:
    """The distribution of lengths, cut at a maximum where one was given.

    Attributes:
        count: Sequences.
        mean: Tokens of a sequence, after cutting.
        percentiles: Tokens by percent of the sequences that have as many or fewer.
        longest: Tokens of the longest, after cutting.
        truncated_share: Share of the sequences that were cut.
        histogram: Sequences by tokens, after cutting: its index is the length.
    """

    count: int
    mean: float
    percentiles: dict[int, int]
    longest: int
    truncated_share: float
    histogram: _Counts = field(repr=False, compare=False)

    @classmethod
    def of(
        cls, lengths: Iterable[int] | npt.NDArray[np.integer[Any]], max_length: int | None = None
    ) -> LengthStatistics:
        """The distribution of lengths.

        Args:
            lengths: Tokens of each sequence.
            max_length: Longer ones are cut to it.

        Raises:
            DataError: If there is no length, or one is negative or above 16 million.

        >>> found = LengthStatistics.of([2, 4, 4, 10], max_length=8)
        >>> found.count, found.mean, found.percentiles[50], found.longest, found.truncated_share
        (4, 4.5, 4, 8, 0.25)
        """
        numbers = np.asarray(lengths if isinstance(lengths, np.ndarray | Sequence) else list(lengths))
        return cls.from_histogram(_count(numbers, "the lengths"), max_length)

    @classmethod
    def from_histogram(cls, counts: _Counts, max_length: int | None = None) -> LengthStatistics:
        """The distribution by the number of sequences of each length."""
        if max_length is not None and max_length < 1:
            raise UsageError(
                f"sequences would be cut to {max_length} tokens.",
                rule="a sequence keeps at least one token.",
                remedy="give a maximum length of 1 or more",
            )
        total = int(counts.sum())
        if not total:
            raise DataError(
                "there is no length: the data set is empty.",
                rule="a distribution needs at least one sequence.",
                remedy="give one length for each sequence",
            )
        cut = 0
        if max_length is not None and len(counts) > max_length + 1:
            cut = int(counts[max_length + 1 :].sum())
            counts = counts[: max_length + 1].copy()
            counts[max_length] += cut
        sums = np.cumsum(counts)
        percentiles = {p: int(np.searchsorted(sums, -(-total * p // 100))) for p in _PERCENTILES}
        longest = int(np.flatnonzero(counts)[-1])
        mean = float(np.arange(len(counts)) @ counts / total)
        return cls(total, mean, percentiles, longest, cut / total, counts[: longest + 1])


@dataclass(frozen=True)
class BatchStatistics:
    """What batches of a data set are like, each filled up to its longest sequence.

    Attributes:
        longest: Tokens of a row of the widest batch.
        largest_tokens: Tokens of the largest batch, filled up: its rows times their width. This sets the peak.
        worst_tokens: The most that any order of the same sequences could give.
        mean_tokens: Tokens of a batch, filled up, on average.
        deviation_tokens: Their standard deviation: what makes an allocator's segments of many sizes.
        num_batches: Batches of an epoch.
        pad_share: Share of all tokens that fill up.
        pad_share_to_longest: That share if every row were filled up to the longest sequence of all, or to
            ``max_length`` where one was given.
    """

    longest: int
    largest_tokens: int
    worst_tokens: int
    mean_tokens: float
    deviation_tokens: float
    num_batches: int
    pad_share: float
    pad_share_to_longest: float

    @property
    def saving(self) -> float:
        """The share of tokens, and so of work, that filling up to the batch's longest saves.

        It is no saving of peak memory: that is set by the largest batch.
        """
        return 1 - (1 - self.pad_share_to_longest) / (1 - self.pad_share) if self.pad_share < 1 else 0.0


def simulate_batches(
    lengths: LengthStatistics,
    *,
    batch: int | None = None,
    max_tokens: int | None = None,
    bucket: int = 1,
    max_length: int | None = None,
    seed: int = 0,
) -> BatchStatistics:
    """The batches of one shuffled epoch of a data set with these lengths.

    Args:
        lengths: As read, or cut already.
        batch: Sequences in a batch; with ``max_tokens`` the most.
        max_tokens: No batch has more tokens than this, filled up: sequences are sorted by length.
        bucket: So many batches' worth of sequences are drawn and then sorted by length; 1 for batches at random.
        max_length: Longer sequences are cut to it.
        seed: Of the order.

    Of more than 16 million sequences a share of each length is laid out, rounded up.

    Raises:
        DataError: If the longest sequence alone is above ``max_tokens``.
        UsageError: If neither or a bad number is given.

    Example:
        >>> lengths = LengthStatistics.of([1, 5, 2, 6])
        >>> found = simulate_batches(lengths, batch=2, bucket=2)
        >>> found.largest_tokens, found.worst_tokens, round(found.pad_share, 3)
        (12, 12, 0.125)
    """
    _check(lengths, batch, max_tokens, bucket)
    if max_length is not None:
        lengths = LengthStatistics.from_histogram(lengths.histogram, max_length)
    _fits(lengths, max_tokens)
    share = min(1.0, _MAX_SEQUENCES / lengths.count)
    counts = np.ceil(lengths.histogram * share).astype(np.int64)  # at least one of each length: the longest is there
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    if max_tokens is not None:
        sizes, widths = _by_budget(rows, max_tokens, batch or len(rows))
        worst = int((sizes * widths).max())
    else:
        assert batch is not None
        rng = np.random.default_rng(seed)
        rng.shuffle(rows)
        group = batch * bucket
        if bucket > 1:
            whole = len(rows) // group * group
            rows[:whole] = np.sort(rows[:whole].reshape(-1, group), axis=1).ravel()
            rows[whole:] = np.sort(rows[whole:])
        starts = np.arange(0, len(rows), batch)
        widths, sizes = np.maximum.reduceat(rows, starts), np.diff(np.append(starts, len(rows)))
        worst = lengths.longest * min(batch, lengths.count)
    widths = np.maximum(widths, 1)
    tokens, real = sizes * widths, int(rows.sum())
    all_long = len(rows) * max(lengths.longest, max_length or 1)
    return BatchStatistics(
        longest=int(widths.max()),
        largest_tokens=int(tokens.max()),
        worst_tokens=max(worst, int(tokens.max())),
        mean_tokens=float(tokens.mean()),
        deviation_tokens=float(tokens.std()),
        num_batches=round(len(tokens) * lengths.count / len(rows)),
        pad_share=1 - real / int(tokens.sum()),
        pad_share_to_longest=1 - real / all_long,
    )


def describe_batches(lengths: LengthStatistics, *, batch: int, max_length: int) -> dict[str, Any]:
    """Return what batches of sequences cut at ``max_length`` are like, in numbers and, as ``text``, in words."""
    batches = simulate_batches(lengths, batch=batch, max_length=max_length)
    text = (
        f"{lengths.count:,} samples of {lengths.mean:.0f} tokens on average, {lengths.longest} at most "
        f"({lengths.truncated_share * 100:.1f} % cut at {max_length}): the peak is set by the longest batch, "
        f"{batch} x {lengths.longest} tokens. Filling up to the batch's longest in place of {max_length} saves "
        f"{batches.saving * 100:.0f} % of the tokens, and nothing of the peak; {batches.pad_share * 100:.0f} % still "
        f"fill up. A batch has {batches.mean_tokens:.0f} tokens, give or take {batches.deviation_tokens:.0f}."
    )
    return {
        "num_samples": lengths.count,
        "mean_tokens": lengths.mean,
        "longest_tokens": lengths.longest,
        "truncated_share": lengths.truncated_share,
        "mean_batch_tokens": batches.mean_tokens,
        "deviation_batch_tokens": batches.deviation_tokens,
        "largest_batch_tokens": batches.largest_tokens,
        "worst_batch_tokens": batches.worst_tokens,
        "pad_share": batches.pad_share,
        "saving": batches.saving,
        "text": text,
    }


def _check(lengths: LengthStatistics, batch: int | None, max_tokens: int | None, bucket: int) -> None:
    if batch is None and max_tokens is None:
        raise UsageError(
            "batches have no size.",
            rule="a batch is a number of sequences, or as many as a budget of tokens holds.",
            remedy="give batch or max_tokens",
        )
    for name, value in (("batch", batch), ("max_tokens", max_tokens), ("bucket", bucket)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}.", rule=f"{name} is at least 1.", remedy=f"give a {name} above 0")


def _fits(lengths: LengthStatistics, max_tokens: int | None) -> None:
    if max_tokens is not None and lengths.longest > max_tokens:
        raise DataError(
            f"the longest sequence has {lengths.longest} tokens, and a batch at most {max_tokens}.",
            rule="a batch holds one sequence at least.",
            remedy=f"give max_tokens {lengths.longest} or more, or cut sequences with max_length {max_tokens}",
        )


def _by_budget(rows: _Counts, max_tokens: int, batch: int) -> tuple[_Counts, _Counts]:
    """Sizes and widths of batches of sorted rows, each as large as the budget lets it be, the longest first."""
    sizes, widths, end = [], [], len(rows)
    while end > 0:
        width = max(int(rows[end - 1]), 1)
        size = min(max(max_tokens // width, 1), batch, end)
        sizes.append(size)
        widths.append(width)
        end -= size
    return np.array(sizes, np.int64), np.array(widths, np.int64)


def read_lengths(path: str | Path, column: str | None = None, max_length: int | None = None) -> LengthStatistics:
    """The distribution of the lengths in a file, read piece by piece.

    Args:
        path: ``.txt`` with one whole number a line; ``.csv`` with a header, or without one and of one column;
            ``.jsonl`` with a number or an object a line; ``.feather`` (``.arrow``) or ``.parquet``. A value that is a
            list counts as its length.
        column: Which column or field; None for one named length, lengths, num_tokens, n_tokens, tokens or len, or the
            only one.
        max_length: Longer sequences are cut to it.

    Raises:
        DataError: If the file or the column is not there, or holds what is no length.
    """
    path = Path(path)
    read = {".txt": _read_text, ".csv": _read_csv, ".jsonl": _read_jsonl, ".parquet": _read_parquet}.get(
        path.suffix.lower()
    )
    if path.suffix.lower() in (".feather", ".arrow"):
        read = _read_feather
    if read is None:
        raise DataError(
            f"{path} does not say by its name what it holds.",
            rule=f"lengths are read from {', '.join(_SUFFIXES)}.",
            remedy="write one length a line into a .txt file",
        )
    counts = np.zeros(0, np.int64)
    try:
        for piece in read(path, column):
            new = _count(piece, str(path))
            small, large = sorted((counts, new), key=len)
            large[: len(small)] += small
            counts = large
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}.",
            rule="lengths are read from a file.",
            remedy="check its name and its rights",
        ) from error
    except UnicodeDecodeError as error:
        raise _no_length(f"bytes that are no text at {error.start}", path, None) from error
    return LengthStatistics.from_histogram(counts, max_length)


def _count(numbers: npt.NDArray[Any], where: str) -> _Counts:
    if numbers.size == 0:
        return np.zeros(0, np.int64)
    if numbers.dtype.kind not in "iu":
        raise _no_length(f"{numbers.dtype} values", where, None)
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or high > _MAX_LENGTH:
        raise _no_length(str(low if low < 0 else high), where, None)
    return np.bincount(numbers.astype(np.int64).ravel())


def _no_length(found: str, where: object, line: int | None) -> DataError:
    place = f"{where}, line {line}," if line else f"{where}"
    return DataError(
        f"{place} holds {found[:80]}.",
        rule=f"a length is a whole number of tokens from 0 to {_MAX_LENGTH}.",
        remedy="give one number for each sequence, or name the column that has them",
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        number = 0
        while line := file.readline(_LINE):
            number += 1
            if len(line) == _LINE:
                raise _no_length(f"a line of more than {_LINE} characters", path, number)
            if line.strip():
                yield number, line


def _pieces(values: Iterable[int]) -> Iterator[npt.NDArray[np.int64]]:
    piece: list[int] = []
    for value in values:
        piece.append(value)
        if len(piece) == _AT_ONCE:
            yield np.array(piece, np.int64)
            piece = []
    yield np.array(piece, np.int64)


def _parse(text: str, path: Path, line: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise _no_length(repr(text.strip()), path, line) from None
    if not 0 <= value <= _MAX_LENGTH:
        raise _no_length(repr(value), path, line)
    return value


def _read_text(path: Path, column: str | None) -> Iterator[npt.NDArray[np.int64]]:
    if column is not None:
        raise _no_column(path, column, ())
    return _pieces(_parse(text, path, line) for line, text in _lines(path))


def _read_csv(path: Path, column: str | None) -> Iterator[npt.NDArray[np.int64]]:
    def rows() -> Iterator[tuple[int, list[str]]]:
        for line, text in _lines(path):
            yield line, next(csv.reader(io.StringIO(text)))

    def values() -> Iterator[int]:
        found = rows()
        line, first = next(found, (0, []))
        if not first:
            return
        if column is None and len(first) == 1 and first[0].strip().isdigit():
            place = 0
            yield _parse(first[0], path, line)
        else:
            place = first.index(_choose(path, column, first))
        for line, row in found:
            yield _parse(row[place] if place < len(row) else "", path, line)

    return _pieces(values())


def _read_jsonl(path: Path, column: str | None) -> Iterator[npt.NDArray[np.int64]]:
    def values() -> Iterator[int]:
        name: str | None = None
        for line, text in _lines(path):
            try:
                value = json.loads(text)
            except ValueError:
                raise _no_length(repr(text.strip()), path, line) from None
            if isinstance(value, dict):
                name = name or _choose(path, column, list(value))
                value = value.get(name)
            value = len(value) if isinstance(value, list) else value
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_LENGTH:
                raise _no_length(repr(value), path, line)
            yield value

    return _pieces(values())


def _read_feather(path: Path, column: str | None) -> Iterator[npt.NDArray[Any]]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        try:
            try:
                reader: Any = pa.ipc.open_file(mapped)
                batches: Iterable[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
            except pa.ArrowInvalid:
                mapped.seek(0)
                reader = batches = pa.ipc.open_stream(mapped)
            name = _choose(path, column, reader.schema.names)
            for batch in batches:
                yield _numbers(batch.column(name), path)
        except pa.ArrowInvalid as error:
            raise _no_length("no Arrow table", path, None) from error


def _read_parquet(path: Path, column: str | None) -> Iterator[npt.NDArray[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            name = _choose(path, column, file.schema_arrow.names)
            for batch in file.iter_batches(_AT_ONCE, columns=[name]):
                yield _numbers(batch.column(name), path)
    except pa.ArrowInvalid as error:
        raise _no_length("no Parquet table", path, None) from error


def _numbers(values: Any, path: Path) -> npt.NDArray[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        values = pc.list_value_length(values)
    elif not pa.types.is_integer(kind):
        raise _no_length(f"{kind} values", path, None)
    if values.null_count:
        raise _no_length("a missing value", path, None)
    found: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return found


def _choose(path: Path, column: str | None, names: Sequence[str]) -> str:
    if column is not None:
        if column in names:
            return column
        raise _no_column(path, column, names)
    found = next((name for name in _NAMES if name in names), names[0] if len(names) == 1 else None)
    if found is None:
        raise _no_column(path, None, names)
    return found


def _no_column(path: Path, column: str | None, names: Sequence[str]) -> DataError:
    hint = nearest(column, names) if column and names else f"known: {', '.join(map(str, names)) or 'none'}"
    return DataError(
        f"{path} has no column {column!r}."
        if column
        else f"{path} has {len(names)} columns, none of them named length.",
        rule=f"lengths are one column; {hint}",
        remedy="name the column that holds the lengths" if names else "leave the column's name out",
    )
