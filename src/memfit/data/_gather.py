"""Rows of a panel copied once, from the map into the memory of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.data._panel import Panel
from memfit.errors import DataError

Array = npt.NDArray[Any]

#: Copied at a time, so that what a copy needs beside the batch stays small: 1 MiB of places, or 2 MiB of other types.
#: Long pieces, because each one costs the time of some 100 KB copied.
_PIECE_ROWS = 1 << 17
_DECODED_BYTES = 1 << 21


class WindowReader:
    """Fills memory with windows and targets of a panel.

    A *cell* is a date and an asset in one number, ``date * num_assets + asset``: its window ends on this date.

    Args:
        panel: The panel.
        lookback: Dates per window.
        target: The target's name; None for NaN.
    """

    def __init__(self, panel: Panel, lookback: int, target: str | None) -> None:
        self.panel = panel
        self.lookback = lookback
        self.num_dates, self.num_assets, self.num_features = panel.shape
        # Panels of memfit 0.1 may lie by asset: then the rows are no view of the map, and are read cell by cell.
        is_by_date = panel.values.flags.c_contiguous
        self._rows = panel.values.reshape(-1, self.num_features) if is_by_date else None
        self._is_plain = is_by_date and panel.values.dtype == np.float32
        most_rows = _PIECE_ROWS if self._is_plain else _DECODED_BYTES // (self.num_features * 4)
        self._piece = max(1, most_rows // lookback)
        self._steps = np.arange(1 - lookback, 1) * self.num_assets
        self._history = panel.history
        self._targets = None if target is None else panel.target(target)

    def eligible(self, date: int) -> npt.NDArray[np.int64]:
        """Return the assets with a full finite window that ends on a date and, if asked for, a finite target."""
        found = self._history[date] >= self.lookback
        if self._targets is not None:
            found &= np.isfinite(self._targets[date])
        return np.flatnonzero(found)

    def read(self, cells: npt.NDArray[np.int64], windows: npt.NDArray[np.float32], targets: Array) -> None:
        """Fill the windows and targets of some cells.

        Args:
            cells: (n,), whose windows lie in the panel.
            windows: (n, lookback, num_features) float32, contiguous.
            targets: (n,) float32.

        Raises:
            DataError: If a value is beyond float32.
        """
        rows = windows.reshape(-1, self.num_features)
        for start in range(0, len(cells), self._piece):
            places = (cells[start : start + self._piece, None] + self._steps).ravel()
            at = start * self.lookback
            self._copy(places, rows[at : at + len(places)])
        if self._targets is None:
            targets.fill(np.nan)
        else:
            targets[:] = _to_float32(self._targets[np.divmod(cells, self.num_assets)])

    def _copy(self, places: npt.NDArray[np.int64], rows: npt.NDArray[np.float32]) -> None:
        if self._rows is None:
            found = self.panel.values[np.divmod(places, self.num_assets)]
            rows[:] = _to_float32(self.panel.decode(found))
        elif self._is_plain:
            # mode="clip" lets numpy write into the memory directly; the places are in range by construction.
            self._rows.take(places, 0, rows, "clip")
        else:
            rows[:] = _to_float32(self.panel.decode(self._rows[places]))


def _to_float32(values: Array) -> npt.NDArray[np.float32]:
    if values.dtype == np.float32:
        return values
    with np.errstate(over="raise"):
        try:
            return values.astype(np.float32)
        except FloatingPointError:
            raise DataError(
                f"a window holds a value beyond float32 ({np.nanmax(np.abs(values)):g}).",
                rule=f"batches are float32, up to {np.finfo(np.float32).max:g}.",
                remedy="scale the column before the panel is built",
            ) from None
