"""Read how long the sequences of a data set are, and describe its batches: the longest one sets the peak.

Lengths are counted, not kept: a file of any size takes memory for its different lengths only. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import DataError, UsageError, check_counts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Counts = npt.NDArray[np.int64]

_MAX_LENGTH = 1 << 24  # tokens; a larger number is an id
_NAMES = ("length", "lengths", "num_tokens", "n_tokens", "tokens", "len")
_FORMATS = {".csv": "csv", ".jsonl": "json", ".feather": "feather", ".arrow": "feather", ".parquet": "parquet"}
_AT_ONCE = 1 << 16  # rows that are read in one piece
_MAX_SEQUENCES = 1 << 24  # that are put in order; of more, a share of each length


@dataclass(frozen=True)
class LengthStatistics:
    """The distribution of lengths, cut at a maximum if one was given.

    Attributes:
        count: Sequences.
        mean: Tokens of a sequence, after cutting.
        longest: Tokens of the longest, after cutting.
        truncated_share: Share of the sequences that were cut.
        histogram: Sequences by tokens, after cutting: its index is the length.
    """

    count: int
    mean: float
    longest: int
    truncated_share: float
    histogram: _Counts = field(repr=False, compare=False)

    @classmethod
    def from_histogram(cls, counts: _Counts, max_length: int | None = None) -> LengthStatistics:
        """Return the distribution by the number of sequences of each length.

        Args:
            counts: Sequences by tokens: the index is the length.
            max_length: Longer ones are cut to it.

        Raises:
            DataError: There is no length.

        >>> import numpy as np
        >>> found = LengthStatistics.from_histogram(np.bincount([2, 4, 4, 10]), max_length=8)
        >>> found.count, found.mean, found.longest, found.truncated_share
        (4, 4.5, 8, 0.25)
        """
        import numpy as np

        check_counts(UsageError, 1, max_length=max_length)
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
        longest = int(np.flatnonzero(counts)[-1])
        mean = float(np.arange(len(counts)) @ counts / total)
        return cls(total, mean, longest, cut / total, counts[: longest + 1])


def describe_batches(lengths: LengthStatistics, *, batch: int, max_length: int, seed: int = 0) -> dict[str, Any]:
    """Return what the batches of one shuffled epoch are like, each padded to its longest sequence.

    Args:
        lengths: As read. Of more than 16 million sequences a share of each length counts, rounded up.
        batch: Sequences of a batch.
        max_length: Longer sequences are cut to it.
        seed: Of the order.

    Returns:
        Numbers, and ``text`` with the same in words. ``largest_batch_tokens`` is the largest batch of this order,
        ``worst_batch_tokens`` of any order; ``saving`` is the share of tokens that padding to the batch's longest
        saves, compared with padding to ``max_length``. It does not lower the peak.

    >>> import numpy as np
    >>> lengths = LengthStatistics.from_histogram(np.bincount([4, 4, 4, 4]))
    >>> describe_batches(lengths, batch=2, max_length=8)["saving"]
    0.5
    """
    import numpy as np

    check_counts(UsageError, 1, batch=batch)
    if lengths.longest > max_length:
        lengths = LengthStatistics.from_histogram(lengths.histogram, max_length)
    share = min(1.0, _MAX_SEQUENCES / lengths.count)
    counts = np.ceil(lengths.histogram * share).astype(np.int64)  # at least one of each length: the longest is there
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    np.random.default_rng(seed).shuffle(rows)
    starts = np.arange(0, len(rows), batch)
    widths = np.maximum(np.maximum.reduceat(rows, starts), 1)
    tokens = np.diff(np.append(starts, len(rows))) * widths
    padded, real = int(tokens.sum()), int(rows.sum())
    pad_share, saving = 1 - real / padded, 1 - padded / (len(rows) * max_length)
    text = (
        f"{lengths.count:,} samples, {lengths.mean:.0f} tokens on average, {lengths.longest} at most "
        f"({lengths.truncated_share * 100:.1f} % cut at {max_length})\n"
        f"the longest batch sets the peak: {batch} x {lengths.longest} tokens\n"
        f"padding to the longest of each batch, not to {max_length}, saves {saving * 100:.0f} % of the tokens; "
        f"{pad_share * 100:.0f} % are padding"
    )
    return {
        "num_samples": lengths.count,
        "mean_tokens": lengths.mean,
        "longest_tokens": lengths.longest,
        "truncated_share": lengths.truncated_share,
        "mean_batch_tokens": float(tokens.mean()),
        "deviation_batch_tokens": float(tokens.std()),
        "largest_batch_tokens": int(tokens.max()),
        "worst_batch_tokens": max(lengths.longest, 1) * min(batch, lengths.count),
        "pad_share": pad_share,
        "saving": saving,
        "text": text,
    }


def read_lengths(path: str | Path, max_length: int | None = None) -> LengthStatistics:
    """Return the distribution of the lengths in a file, read piece by piece.

    Args:
        path: ``.txt`` with one whole number a line, or a table: ``.csv``, ``.jsonl`` with an object a line,
            ``.feather`` (``.arrow``) or ``.parquet``. The column is the one named length, lengths, num_tokens,
            n_tokens, tokens or len, or the only one. A value that is a list counts as its length.
        max_length: Longer sequences are cut to it.

    Raises:
        DataError: The file or the column is missing, or holds other values than lengths.
    """
    import numpy as np
    import pyarrow as pa

    path = Path(path)
    counts = np.zeros(0, np.int64)
    try:
        table = _open(path)
        names = table.schema.names
        name = next((name for name in _NAMES if name in names), names[0] if len(names) == 1 else None)
        if name is None:
            raise DataError(
                f"{path} has {len(names)} columns, none of them named length.",
                rule=f"lengths are one column; known: {', '.join(names)}",
                remedy="name the column that holds the lengths 'length'",
            )
        for piece in table.to_batches(columns=[name], batch_size=_AT_ONCE, batch_readahead=1, use_threads=False):
            small, large = sorted((counts, _count(piece.column(0), path)), key=len)
            large[: len(small)] += small
            counts = large
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}.",
            rule="lengths are read from a file.",
            remedy="check its name and its rights",
        ) from error
    except pa.ArrowInvalid as error:
        raise _no_length(str(error).rpartition("Invalid: ")[2].partition("\n")[0], path) from error
    return LengthStatistics.from_histogram(counts, max_length)


def _open(path: Path) -> Any:
    """Return the file as a data set of pyarrow, which reads it piece by piece."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.dataset

    suffix = path.suffix.lower()
    if suffix != ".txt" and suffix not in _FORMATS:
        raise DataError(
            f"{path} does not say by its name what it holds.",
            rule=f"lengths are read from .txt, {', '.join(_FORMATS)}.",
            remedy="write one length a line into a .txt file",
        )
    kind: Any = _FORMATS.get(suffix, "csv")
    if kind == "csv":
        with path.open("rb") as file:
            first = file.readline(80).strip()
        if suffix == ".txt" or first.isdigit():  # one column without a header
            kind = pyarrow.dataset.CsvFileFormat(
                read_options=pyarrow.csv.ReadOptions(column_names=["length"]),
                convert_options=pyarrow.csv.ConvertOptions(column_types={"length": pa.int64()}),
            )
    return pyarrow.dataset.dataset(str(path), format=kind)


def _count(values: Any, path: Path) -> _Counts:
    """Return how many values of a column there are of each length."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        values = pc.list_value_length(values)
    elif not pa.types.is_integer(kind):
        raise _no_length(f"{kind} values", path)
    if values.null_count:
        raise _no_length("a missing value", path)
    numbers: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    if low < 0 or high > _MAX_LENGTH:
        raise _no_length(str(low if low < 0 else high), path)
    return np.bincount(numbers.astype(np.int64))


def _no_length(found: str, path: Path) -> DataError:
    return DataError(
        f"{path} holds no lengths: {found[:160]}.",
        rule=f"a length is a whole number of tokens from 0 to {_MAX_LENGTH}.",
        remedy="give one number for each sequence, in a column named 'length'",
    )
