"""The panel: dates x assets x features in write-once files that every process maps and none copies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from memfit.data._build import PanelSpec, build_panel
from memfit.data._manifest import ASSETS, DATES, Manifest, check_files, damaged, read_manifest
from memfit.data._source import Source, SourceLike
from memfit.errors import DataError, nearest
from memfit.units import format_bytes

Array = npt.NDArray[Any]


class Panel:
    """A panel of numbers by date, asset and feature, built once and mapped read-only by any number of processes.

    Every array is a view of a file map: it costs no private memory, processes share its pages, and writing into it
    fails. Files are mapped when first used. A pickled panel is its path, so that each process maps for itself.

    The folder holds plain ``.npy`` files, ``assets.json`` and ``manifest.json``; it is never changed after it was
    renamed into place. Make one with `Panel.build` or `Panel.open`.

    Shapes:
        values: (num_dates, num_assets, num_features), the build's dtype; a missing value or row is NaN.
        targets: (num_dates, num_assets, num_targets), the same.
        present: (num_dates, num_assets), bool: the source had a row.
        history: (num_dates, num_assets), int32: on how many dates in a row, up to and with this one, all features
            are finite. A window of L dates that ends here is whole when this is at least L.
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
        self._manifest = manifest

    @classmethod
    def build(  # noqa: PLR0913 - the columns by role are one argument each, so that a call reads as a sentence
        cls,
        source: SourceLike,
        directory: Path | str,
        *,
        date: str = "date",
        asset: str = "code",
        features: Sequence[str],
        targets: Sequence[str] = (),
        dtype: str = "float32",
        parameters: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Panel:
        """The panel of a source, taken from the cache folder if it is there and built into it otherwise.

        However many processes ask at once, exactly one builds (an advisory lock beside the panel, which the kernel
        frees when its holder dies); the others wait and map what it built. It streams: a first pass collects dates
        and assets, a second puts each row into its cell of a mapped file, with a few thousand rows in memory. The
        folder is written aside, forced to disk and renamed, so nobody ever sees a part of it; what a killed builder
        left is removed by the next one.

        A panel is found by its fingerprint: the content of the source, the columns and their types, dtype,
        parameters, and the version of this code. Of files the content is their bytes, so the same values encoded
        anew are a miss; of a table it is the values of the columns used. A panel that lies in the cache is checked as
        by `Panel.open`; call `verify` to have all of it read. Old panels are left where they are.

        On NFS the lock works where flock does (Linux maps it to the server's locks); Lustre needs the mount option
        ``flock``.

        Args:
            source: A Parquet or Arrow IPC file, a folder of them, a list of them, or a table; rows in any order.
            directory: The cache folder; the panel lies in ``directory/<first 16 digits of its fingerprint>/``.
            date: The column of dates: date32, date64, timestamps on midnight (in their zone), or ISO 8601 text.
            asset: The column of asset codes: text or integers, kept as text and sorted as text.
            features: Columns of numbers (floats, integers, booleans, decimals).
            targets: Columns of numbers, kept apart from the features.
            dtype: ``float32``, ``float64`` or ``float16``.
            parameters: Whatever else the values depend on, as plain values; part of the fingerprint.
            progress: Called by the process that builds with (rows done, rows in all) in the second pass; in a job of
                a run these are its events when None.

        Raises:
            DataError: If a column is not there, has the wrong type or a value that cannot be held, if a date and
                asset come twice, if there is too little room on disk (with the bytes needed and free), or if the
                source changes meanwhile. Nothing is left behind.
            DamagedError: If the panel lies there already and is not as it was written.
        """
        spec = PanelSpec(date, asset, tuple(features), tuple(targets), np.dtype(dtype).name, parameters or {})
        built = build_panel(spec, Source.of(source), Path(directory), progress=progress)
        panel = cls.open(built.path)
        panel.reused, panel.changed = built.reused, built.changed
        return panel

    @classmethod
    def open(cls, path: Path | str, *, verify: Literal["sizes", "full"] = "sizes") -> Panel:
        """The panel in a folder.

        Args:
            path: The panel's folder.
            verify: ``sizes`` checks the manifest against its own checksum, the size of each file, and the dates and
                assets in full: a few milliseconds. ``full`` reads and checks every byte, as the process that
                prepares a run does once.

        Raises:
            DataError: If the folder is no panel.
            DamagedError: If a file is not as it was written; it is named.
        """
        folder = Path(path).resolve()
        manifest = read_manifest(folder)
        check_files(folder, manifest, full=verify == "full")
        return cls(folder, manifest, reused=True)

    def verify(self) -> None:
        """Read every byte and compare it with the checksums.

        Raises:
            DamagedError: Naming the first file that differs, and the 64 MiB in which it does.
        """
        check_files(self.path, self._manifest, full=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Panel.open, (str(self.path),))

    def __repr__(self) -> str:
        num_dates, num_assets, num_features = self.shape
        shape = f"{num_dates} dates x {num_assets} assets x {num_features} features"
        return f"Panel({str(self.path)!r}: {shape}, {format_bytes(self.nbytes)})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_dates, num_assets, num_features)."""
        num_dates, num_assets, num_features = self._manifest.arrays["values"]["shape"]
        return num_dates, num_assets, num_features

    @property
    def fingerprint(self) -> str:
        """64 hex digits that stand for all that the values depend on."""
        return self._manifest.fingerprint

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays: what it takes on disk, and in the page cache when all of it was read."""
        return sum(int(facts["bytes"]) for facts in self._manifest.files.values())

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(self._manifest.key["features"])

    @property
    def target_names(self) -> tuple[str, ...]:
        return tuple(self._manifest.key["targets"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The caller's own parameters, as they were given to `build`."""
        return dict(self._manifest.key["parameters"])

    @property
    def num_rows(self) -> int:
        """Rows in the source."""
        return self._manifest.num_rows

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

    def _array(self, name: str) -> Array:
        facts = self._manifest.arrays[name]
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
    """A read-only array that is a view of a file map (PROT_READ, shared)."""
    try:
        array: Array = np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    except (OSError, ValueError):
        raise damaged(file, "cannot be mapped") from None
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise damaged(file, f"holds {array.dtype} {array.shape} instead of {dtype} {shape}")
    return array
