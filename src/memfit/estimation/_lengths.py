"""Read how long the sequences of a data set are, and describe its batches: the longest one sets the peak. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import DataError, UsageError, check_counts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MAX_LENGTH = 1 << 24  # tokens; a larger number is an id


def describe_batches(lengths: npt.NDArray[np.int64], *, batch: int, max_length: int) -> dict[str, Any]:
    """Return what batches of random sequences are like, each padded to its longest; sequences are cut to
    ``max_length``.

    ``pad_share`` is the expected share of padding, ``saving`` the share of tokens saved compared with padding to
    ``max_length`` (the peak stays), ``text`` the same in words."""
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
        "pad_share": pad_share,
        "saving": saving,
        "text": text,
    }


def read_lengths(path: str | Path) -> npt.NDArray[np.int64]:
    """Return the lengths in a text file, one whole number a line."""
    import numpy as np

    try:
        found = np.array([int(word) for word in Path(path).read_text(encoding="utf-8").split()], np.int64)
    except OSError as error:
        what = error.strerror or str(error)
    except (ValueError, OverflowError) as error:
        what = str(error)
    else:
        if len(found) and found.min() >= 0 and found.max() <= _MAX_LENGTH:
            return found
        what = f"{found.min()} to {found.max()}" if len(found) else "it is empty"
    raise DataError(
        f"{path} holds no lengths: {what[:300]}.",
        rule=f"a length is a whole number of tokens from 0 to {_MAX_LENGTH}.",
        remedy="write one number for each sequence, a line each",
    )
