"""The panel: dates x assets x features in write-once files that every process maps and none copies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memfit.data._manifest import ASSETS, DATES, Check, Manifest, check_files, damaged, newest
from memfit.errors import DataError, nearest
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.data._publish import Progress
    from memfit.data._source import SourceLike

Array = npt.NDArray[Any]


class Panel:
    """A panel of numbers by date, asset and feature, built once and mapped read-only by any number of processes.

    Every array is a read-only view of a file map: processes share its pages, and it costs no private memory. A pickled
    panel is its path. The folder never changes. Make one with `Panel.build` or `Panel.open`.

    Shapes:
        values: (num_dates, num_assets, num_features), float32; a missing value or row is NaN.
        targets: (num_dates, num_assets, num_targets), float32.
        present: (num_dates, num_assets), bool: the source had a row.
        history: (num_dates, num_assets), int32: on how many dates in a row, up to and with this one, there is a row
            and all features are finite. A window of L dates that ends here is whole when this is at least L.
        dates: (num_dates,), datetime64[D], ascending.

    Example:
        >>> import tempfile, datetime, pyarrow as pa
        >>> rows = pa.table({
        ...     "date": [datetime.date(2024, 1, 2), datetime.date(2024, 1, 2), datetime.date(2024, 1, 3)],
        ...     "code": ["AAA", "BBB", "BBB"],
        ...     "close": [1.0, 2.0, 3.0],
        ... })
        >>> panel = Panel.build(rows, tempfile.mkdtemp(), features=["close"])
        >>> panel.values[:, :, 0].tolist()
        [[1.0, 2.0], [nan, 3.0]]
        >>> panel.dates.astype(str).tolist(), panel.assets
        (['2024-01-02', '2024-01-03'], ('AAA', 'BBB'))
        >>> Panel.build(rows, panel.path.parent, features=["close"]).reused
        True
    """

    def __init__(self, path: Path, manifest: Manifest, *, reused: bool, changed: tuple[str, ...] = ()) -> None:
        self.path = path
        self.reused = reused
        self.changed = changed
        self.verified = False  # whether every byte was compared with the checksums
        self.manifest = manifest

    @classmethod
    def build(
        cls,
        source: SourceLike,
        directory: Path | str,
        *,
        index: Sequence[str] = ("date", "code"),
        features: Sequence[str],
        targets: Sequence[str] = (),
        parameters: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> Panel:
        """Return the panel of a source from the cache folder; build it there if it is missing.

        One process builds, under a lock; the others wait and map what it built. It streams the source twice, with a few
        thousand rows in memory. The folder appears whole or not at all. The next builder removes what a killed
        one left.

        The fingerprint covers the content of the source (the bytes of files, the values of a table), the columns and
        their types, parameters, and the version of this code. Every byte of a panel in the cache is checked
        before it is used again. On NFS the lock works where flock does; Lustre needs the mount option ``flock``.

        Args:
            source: A Parquet or Arrow IPC file, a folder of them, a list of them, or a table; rows in any order.
            directory: The cache folder; the panel lies in ``directory/<first 16 digits of its fingerprint>/``.
            index: The column of dates (date32, date64, timestamps on midnight in their zone, or ISO 8601 text) and that
                of asset codes (text or integers, kept as text and sorted as text).
            features: Columns of numbers (floats, integers, booleans, decimals).
            targets: Columns of numbers, kept apart from the features.
            parameters: Whatever else the values depend on, as plain values; part of the fingerprint.
            progress: Called by the process that builds with (rows done, rows in all); None writes a job's events.

        Raises:
            DataError: If a column is missing or has the wrong type or a value that cannot be held, a date and asset
                come twice, the disk is too full, or the source changes meanwhile. Nothing is left behind.
            DamagedError: If the panel is there already and is not as it was written.
        """
        # Imported here: who maps a panel needs no Arrow, and each of a loader's workers would pay for it.
        from memfit.data._build import PanelSpec, write_panel
        from memfit.data._source import Source

        spec = PanelSpec.of(index, features, targets, parameters or {})
        path, reused, changed = write_panel(spec, Source.of(source), Path(directory), progress=progress)
        panel = cls.open(path, verify="full" if reused else "sizes")
        panel.reused, panel.changed = reused, changed
        return panel

    @classmethod
    def open(cls, path: Path | str, *, verify: Check = "sample") -> Panel:
        """Return the panel in a folder.

        Args:
            path: The panel's folder.
            verify: ``sizes`` checks the manifest, file sizes, dates and assets, ``sample`` also 64 random blocks of
                1 MiB, ``full`` every byte. A pickled panel is opened with ``sizes``.

        Raises:
            DataError: If the folder is no panel.
            DamagedError: If a file is not as it was written, or if the manifest is another panel's.
        """
        folder = Path(path).resolve()
        manifest = Manifest.read(folder)
        check_files(folder, manifest.files, verify)
        panel = cls(folder, manifest, reused=True)
        panel.verified = verify == "full"
        return panel

    @classmethod
    def newest(cls, path: Path | str) -> Panel:
        """Return the panel in a folder, or the newest one in a cache folder.

        Raises:
            DataError: If there is none.
        """
        return cls.open(newest(Path(path)))

    def verify(self, *, progress: Progress | None = None) -> None:
        """Read every byte and compare it with the checksums; ``progress`` is told (bytes done, bytes in all).

        Raises:
            DamagedError: Naming the first file that differs, and the MiB in which it does.
        """
        check_files(self.path, self.manifest.files, "full", progress=progress)
        self.verified = True

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (str(self.path),))

    def __repr__(self) -> str:
        num_dates, num_assets, num_features = self.shape
        shape = f"{num_dates} dates x {num_assets} assets x {num_features} features"
        return f"Panel({str(self.path)!r}: {shape}, {format_bytes(self.nbytes)})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_dates, num_assets, num_features)."""
        num_dates, num_assets = self.manifest.arrays["present"]["shape"]
        return num_dates, num_assets, len(self.feature_names)

    @property
    def fingerprint(self) -> str:
        """64 hex digits that stand for all that the values depend on."""
        return self.manifest.fingerprint

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays: what it takes on disk, and in the page cache when all of it was read."""
        return sum(int(facts["bytes"]) for facts in self.manifest.files.values())

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(self.manifest.key["features"])

    @property
    def target_names(self) -> tuple[str, ...]:
        return tuple(self.manifest.key["targets"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The caller's own parameters, as they were given to `build`."""
        return dict(self.manifest.key["parameters"])

    @property
    def num_rows(self) -> int:
        """Rows in the source."""
        return self.manifest.num_rows

    @cached_property
    def assets(self) -> tuple[str, ...]:
        """Asset codes in order of the second axis."""
        return tuple(json.loads((self.path / ASSETS).read_bytes()))

    @cached_property
    def dates(self) -> npt.NDArray[np.datetime64]:
        return _map(self.path / DATES, "<M8[D]", (self.shape[0],))

    @cached_property
    def values(self) -> Array:
        return self._array("values")

    @cached_property
    def targets(self) -> Array:
        return self._array("targets")

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        return self._array("present")

    @cached_property
    def history(self) -> npt.NDArray[np.int32]:
        return self._array("history")

    @cached_property
    def first_dates(self) -> npt.NDArray[np.datetime64]:
        """(num_assets,): the date of each asset's first row: its listing, as far as the source knows."""
        return np.asarray(self.dates[self.present.argmax(axis=0)])

    @cached_property
    def last_dates(self) -> npt.NDArray[np.datetime64]:
        """(num_assets,): the date of each asset's last row."""
        return np.asarray(self.dates[self.shape[0] - 1 - self.present[::-1].argmax(axis=0)])

    def _array(self, name: str) -> Array:
        facts = self.manifest.arrays[name]
        return _map(self.path / f"{name}.npy", facts["dtype"], tuple(facts["shape"]))

    def target(self, name: str) -> Array:
        """A target by name: a read-only view (num_dates, num_assets).

        Raises:
            DataError: If the panel has no such target.
        """
        if name not in self.target_names:
            raise DataError(
                f"the panel has no target '{name}'.",
                rule=f"its targets were named when it was built; {nearest(name, self.target_names)}",
                remedy=f"name one of them, or build the panel with targets=['{name}']",
            )
        view: Array = self.targets[:, :, self.target_names.index(name)]
        return view


def _map(file: Path, dtype: str, shape: tuple[int, ...]) -> Array:
    try:
        array: Array = np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    except (OSError, ValueError):
        raise damaged(file, "cannot be mapped") from None
    if array.dtype != dtype or array.shape != shape:
        raise damaged(file, f"holds {array.dtype} {array.shape} instead of {dtype} {shape}")
    return array


def _reopen(path: str) -> Panel:
    """Open a pickled panel, which the process that pickled it has checked."""
    return Panel.open(path, verify="sizes")
