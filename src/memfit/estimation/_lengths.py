"""Read how long the sequences of a data set are, and describe its batches: the longest one sets the peak. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import DataError, UsageError, check_counts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MAX_LENGTH = 1 << 24  # tokens; a larger number is an id
_FORMATS = {
    ".txt": "",
    ".csv": "csv",
    ".jsonl": "json",
    ".feather": "feather",
    ".arrow": "feather",
    ".parquet": "parquet",
}


def describe_batches(lengths: npt.NDArray[np.int64], *, batch: int, max_length: int) -> dict[str, Any]:
    """Return what batches of random sequences are like, each padded to its longest; sequences are cut to
    ``max_length``.

    ``worst_batch_tokens`` is the largest batch that can occur, ``pad_share`` the expected share of padding, ``saving``
    the share of tokens saved compared with padding to ``max_length`` (the peak stays), ``text`` the same in words."""
    import numpy as np

    check_counts(UsageError, 1, batch=batch, max_length=max_length)
    cut = np.sort(np.minimum(lengths, max_length))
    count, longest, mean = len(cut), int(cut[-1]), float(cut.mean())
    # The longest of a batch is the one at a place or below with this chance.
    width = max(float(cut @ np.diff(np.linspace(0, 1, count + 1) ** batch)), 1.0)
    truncated, pad_share, saving = float((lengths > max_length).mean()), 1 - mean / width, 1 - width / max_length
    text = (
        f"{count:,} samples, {mean:.0f} tokens on average, {longest} at most "
        f"({truncated * 100:.1f} % cut at {max_length})\n"
        f"the longest batch sets the peak: {batch} x {longest} tokens\n"
        f"padding to the longest of each batch, not to {max_length}, saves {saving * 100:.0f} % of the tokens; "
        f"{pad_share * 100:.0f} % are padding"
    )
    return {
        "num_samples": count,
        "mean_tokens": mean,
        "longest_tokens": longest,
        "truncated_share": truncated,
        "worst_batch_tokens": max(longest, 1) * min(batch, count),
        "pad_share": pad_share,
        "saving": saving,
        "text": text,
    }


def read_lengths(path: str | Path) -> npt.NDArray[np.int64]:
    """Return the lengths in a file: ``.txt`` with one whole number a line, or ``.csv``, ``.jsonl``, ``.feather``
    (``.arrow``) or ``.parquet`` with a column ``length`` or one column. A list counts as its length."""
    import pyarrow as pa
    import pyarrow.compute as pc

    path = Path(path)
    try:
        values = _read_column(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise _no_length(getattr(error, "strerror", None) or str(error).partition("\n")[0], path) from error
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = pc.list_value_length(values)
    if not pa.types.is_integer(values.type) or values.null_count or not len(values):
        missing = f"{values.null_count} of {len(values)} are missing"
        raise _no_length(f"values of type {values.type}, {missing}", path)
    found: npt.NDArray[np.int64] = values.cast(pa.int64()).to_numpy()
    if found.min() < 0 or found.max() > _MAX_LENGTH:
        raise _no_length(f"{found.min()} to {found.max()}", path)
    return found


def _read_column(path: Path) -> Any:
    import pyarrow.csv
    import pyarrow.dataset

    if path.suffix.lower() not in _FORMATS:
        raise _no_length(f"its name ends in none of {', '.join(_FORMATS)}", path)
    bare = pyarrow.dataset.CsvFileFormat(read_options=pyarrow.csv.ReadOptions(column_names=["length"]))
    kind: Any = _FORMATS[path.suffix.lower()] or bare
    table = pyarrow.dataset.dataset(str(path), format=kind)
    names = table.schema.names
    if "length" not in names and len(names) != 1:
        raise _no_length(f"columns {', '.join(names)}", path)
    return table.to_table(columns=["length" if "length" in names else names[0]]).column(0)


def _no_length(found: str, path: Path) -> DataError:
    return DataError(
        f"{path} holds no lengths: {found[:300]}.",
        rule=f"a length is a whole number of tokens from 0 to {_MAX_LENGTH}.",
        remedy="give one number for each sequence, a line each, or in a column named 'length'",
    )
