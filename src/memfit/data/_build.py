"""Building a panel's files: by one process at a time, written aside, checksummed and renamed into place."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock, Timeout

from memfit.data._manifest import (
    ASSETS,
    DATES,
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    canonical_json,
    damaged,
    file_facts,
    read_manifest,
)
from memfit.data._source import (
    Source,
    check_columns,
    decode_assets,
    decode_dates,
    decode_numbers,
)
from memfit.errors import DataError
from memfit.rundir import record, sync_folder
from memfit.units import format_bytes

#: Raise it whenever the same source and parameters would give other values: panels built before are then a miss.
BUILD_VERSION = 1

#: What a panel takes beside its arrays: headers, labels and the manifest.
_SLACK_BYTES = 1 << 20

Progress = Callable[[int, int], None]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class PanelSpec:
    """What to build from a source: the columns by role, the type of the values, and the caller's own parameters."""

    date: str
    asset: str
    features: tuple[str, ...]
    targets: tuple[str, ...]
    dtype: str
    parameters: Mapping[str, Any]

    @property
    def numbers(self) -> tuple[str, ...]:
        return self.features + self.targets

    def check(self) -> PanelSpec:
        """This spec, its parameters as JSON gives them back; a DataError if it cannot be built."""
        for role, names in (("features", self.features), ("targets", self.targets)):
            if len(set(names)) != len(names) or (role == "features" and not names):
                raise DataError(
                    f"{role} is {list(names)}.",
                    rule="a panel has at least one feature; features are named once each, and so are targets.",
                    remedy=f"pass {role}=[...] with different column names",
                )
        if self.dtype not in ("float16", "float32", "float64"):
            raise DataError(
                f"dtype is {self.dtype}.",
                rule="a panel's values are float16, float32 or float64; missing ones are NaN.",
                remedy='pass dtype="float32"',
            )
        try:
            parameters = json.loads(json.dumps(dict(self.parameters), sort_keys=True, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the panel's parameters cannot be written as JSON: {error}",
                rule="parameters are part of the panel's fingerprint, so they are plain values.",
                remedy="pass numbers, text, lists and mappings of them",
            ) from error
        return PanelSpec(**{**self.__dict__, "parameters": parameters})


@dataclass(frozen=True)
class Built:
    """Where a panel lies, whether it was there already, and in what it differs from the newest other one there."""

    path: Path
    reused: bool
    changed: tuple[str, ...] = ()


def build_panel(
    spec: PanelSpec,
    source: Source,
    directory: Path,
    *,
    progress: Progress | None = None,
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
) -> Built:
    """Find the panel of this source and spec in a cache folder, or build it there; see `Panel.build`."""
    spec = spec.check()
    columns = check_columns(source, date=spec.date, asset=spec.asset, numbers=spec.numbers)
    stamp = source.stamp()
    content = source.content_digest(date=spec.date, asset=spec.asset, numbers=spec.numbers)
    versions = {"format": FORMAT_VERSION, "build_version": BUILD_VERSION}
    key = {**versions, "content": content, "columns": columns, **asdict(spec)}
    fingerprint = blake2b(canonical_json(key), digest_size=32).hexdigest()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory.resolve() / fingerprint[:16]
    if _is_built(path, fingerprint):
        return Built(path, reused=True)
    with FileLock(_lock_path(path)):
        if _is_built(path, fingerprint):
            return Built(path, reused=True)
        _sweep(path)
        changed = _differences(path.parent, key)
        aside = path.with_name(f".{path.name}.building")
        axes = _Axes.of(source, spec)
        _check_space(aside.parent, axes, spec, free_bytes(aside.parent))
        with _writing(aside, axes.num_bytes(spec)):
            aside.mkdir()
            arrays = _write_arrays(aside, source, spec, axes, progress or _progress_events())
            if source.stamp() != stamp:
                raise _source_changed()
            manifest = Manifest(fingerprint, key, axes.num_rows, arrays, _seal(aside))
            _write_synced(aside / MANIFEST, manifest.to_text().encode())
            sync_folder(aside)
            aside.rename(path)
        sync_folder(path.parent)
    return Built(path, reused=False, changed=changed)


def _is_built(path: Path, fingerprint: str) -> bool:
    if not path.exists():
        return False
    if read_manifest(path).fingerprint != fingerprint:
        raise damaged(path / MANIFEST, "is another panel's")
    return True


def _lock_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _sweep(path: Path) -> None:
    """Remove what killed builders left: this panel's, whose lock is held here, and others' whose lock nobody holds."""
    for aside in path.parent.glob(".*.building"):
        owner = aside.with_name(aside.name.removeprefix(".").removesuffix(".building"))
        if owner == path:
            shutil.rmtree(aside)
            continue
        try:
            with FileLock(_lock_path(owner), timeout=0):
                shutil.rmtree(aside, ignore_errors=True)
        except Timeout:
            pass


def _differences(directory: Path, key: Mapping[str, Any]) -> tuple[str, ...]:
    """The parts of the key in which a new panel differs from the newest one beside it: why that one was a miss."""
    others = sorted(directory.glob(f"*/{MANIFEST}"), key=lambda file: file.stat().st_mtime_ns)
    if not others:
        return ()
    try:
        old = read_manifest(others[-1].parent).key
    except DataError:
        return ()
    return tuple(name for name in key if old.get(name) != key[name])


@contextmanager
def _writing(aside: Path, needed: int) -> Iterator[None]:
    """Leaves nothing half-written behind, and says what a full disk needs."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = shutil.disk_usage(aside.parent).free
            raise DataError(
                f"the panel could not be written ({error.strerror}): it needs {format_bytes(needed)} ({needed} bytes) "
                f"on disk; {format_bytes(free)} ({free} bytes) are free.",
                rule=f"the file system, the quota or ulimit -f of {aside.parent} says so; nothing was left behind.",
                remedy="free space there, raise that limit, or name another cache folder",
            ) from error
        raise


@dataclass(frozen=True)
class _Axes:
    dates: npt.NDArray[np.datetime64]
    assets: pa.Array
    num_rows: int

    @classmethod
    def of(cls, source: Source, spec: PanelSpec) -> _Axes:
        """The first pass: the distinct dates and assets, sorted, and the number of rows."""
        dates = np.empty(0, "datetime64[D]")
        assets: set[str] = set()
        num_rows = 0
        for batch in source.batches([spec.date, spec.asset]):
            dates = np.union1d(dates, decode_dates(batch.column(spec.date), spec.date))
            assets.update(pc.unique(decode_assets(batch.column(spec.asset), spec.asset)).to_pylist())
            num_rows += batch.num_rows
        if not num_rows:
            raise DataError("the source has no rows.", rule="a panel has at least one.", remedy="name another source")
        return cls(dates, pa.array(sorted(assets), pa.large_string()), num_rows)

    def layout(self, spec: PanelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each mapped array."""
        cells = (len(self.dates), len(self.assets))
        value = np.dtype(spec.dtype).newbyteorder("<").str
        return {
            "values": (value, (*cells, len(spec.features))),
            "targets": (value, (*cells, len(spec.targets))),
            "present": ("|b1", cells),
            "history": ("<i4", cells),
        }

    def num_bytes(self, spec: PanelSpec) -> int:
        """What the panel takes on disk, headers and labels included."""
        return _SLACK_BYTES + sum(np.dtype(dtype).itemsize * math.prod(s) for dtype, s in self.layout(spec).values())


def _check_space(directory: Path, axes: _Axes, spec: PanelSpec, free: int) -> None:
    needed = axes.num_bytes(spec)
    if free < needed:
        raise DataError(
            f"a panel of {len(axes.dates)} dates x {len(axes.assets)} assets x {len(spec.features)} features needs "
            f"{format_bytes(needed)} ({needed} bytes) on disk; {format_bytes(free)} ({free} bytes) are free.",
            rule=f"the file system of {directory} says so; nothing was written.",
            remedy="free space there, name another cache folder, or build with fewer features or dtype='float16'",
        )


def _write_arrays(
    aside: Path, source: Source, spec: PanelSpec, axes: _Axes, progress: Progress
) -> dict[str, dict[str, Any]]:
    layout = axes.layout(spec)
    arrays = {name: _create(aside / f"{name}.npy", dtype, shape) for name, (dtype, shape) in layout.items()}
    _scatter(source, spec, axes, arrays, progress)
    _finish(arrays)
    for array in arrays.values():
        array.flush()
    np.save(aside / DATES, axes.dates)
    (aside / ASSETS).write_text(json.dumps(axes.assets.to_pylist(), ensure_ascii=True) + "\n")
    return {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in layout.items()}


def _create(path: Path, dtype: str, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A new mapped array of zeros whose disk blocks are taken: a full disk fails here and not as SIGBUS later."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.seek(array.offset)
            for start in range(array.offset, size, 1 << 20):
                file.write(bytes(min(1 << 20, size - start)))
    return array


def _progress_events() -> Progress:
    """Progress for whoever watches the run: an event at most twice a second; nothing outside a run."""
    due = 0.0

    def say(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due or done == total:
            due = time.monotonic() + 0.5
            record("progress", phase="build", done=done, total=total)

    return say


def _scatter(source: Source, spec: PanelSpec, axes: _Axes, arrays: Mapping[str, Array], progress: Progress) -> None:
    """The second pass: each row into its cell."""
    num_cells = len(axes.dates) * len(axes.assets)
    cells = {name: array.reshape(num_cells, *array.shape[2:]) for name, array in arrays.items()}
    done = 0
    for batch in source.batches([spec.date, spec.asset, *spec.numbers]):
        progress(done, axes.num_rows)
        cell = _cells_of(batch, spec, axes)
        _refuse_duplicates(cell, cells["present"], axes)
        cells["present"][cell] = True
        for name, columns in (("values", spec.features), ("targets", spec.targets)):
            if columns:
                cells[name][cell] = _block(batch, columns, np.dtype(spec.dtype))
        done += batch.num_rows
    if done != axes.num_rows:
        raise _source_changed()
    progress(done, axes.num_rows)


def _cells_of(batch: pa.RecordBatch, spec: PanelSpec, axes: _Axes) -> npt.NDArray[np.int64]:
    dates = decode_dates(batch.column(spec.date), spec.date)
    asset = pc.index_in(decode_assets(batch.column(spec.asset), spec.asset), value_set=axes.assets)
    date = np.minimum(np.searchsorted(axes.dates, dates), len(axes.dates) - 1)
    if asset.null_count or (axes.dates[date] != dates).any():
        raise _source_changed()
    return np.asarray(date * len(axes.assets) + asset.to_numpy(), np.int64)


def _refuse_duplicates(cell: npt.NDArray[np.int64], present: Array, axes: _Axes) -> None:
    again = present[cell]
    is_first = np.zeros(len(cell), bool)
    is_first[np.unique(cell, return_index=True)[1]] = True
    again |= ~is_first
    if again.any():
        date, asset = np.divmod(cell[again][:3], len(axes.assets))
        pairs = ", ".join(f"({axes.dates[d]}, {axes.assets[int(a)]})" for d, a in zip(date, asset, strict=True))
        raise DataError(
            f"the source has more than one row for a date and asset; the first are {pairs}.",
            rule="a panel has one row per date and asset.",
            remedy="drop or aggregate the duplicates in the source",
        )


def _block(batch: pa.RecordBatch, columns: tuple[str, ...], dtype: np.dtype[Any]) -> Array:
    """Columns side by side as (rows, columns); a finite value that the dtype cannot hold is an error."""
    block = np.empty((batch.num_rows, len(columns)), dtype)
    for j, name in enumerate(columns):
        numbers = decode_numbers(batch.column(name))
        with np.errstate(over="ignore"):
            block[:, j] = numbers
        lost = np.isinf(block[:, j]) & np.isfinite(numbers)
        if lost.any():
            raise DataError(
                f"column '{name}' holds {numbers[lost][0]:g}, which {dtype.name} cannot hold.",
                rule=f"the largest value of {dtype.name} is {np.finfo(dtype).max:g}.",
                remedy='pass dtype="float64", or scale the column',
            )
    return block


def _finish(arrays: Mapping[str, Array]) -> None:
    """NaN in each cell without a row, and for each cell the number of dates in a row with all features finite."""
    run = np.zeros(arrays["history"].shape[1], np.int32)
    for date, present in enumerate(arrays["present"]):
        if not present.all():
            arrays["values"][date, ~present] = np.nan
            arrays["targets"][date, ~present] = np.nan
        run = np.where(np.isfinite(arrays["values"][date]).all(axis=-1), run + 1, 0).astype(np.int32)
        arrays["history"][date] = run


def _seal(aside: Path) -> dict[str, dict[str, Any]]:
    """Force each file to disk; its size and checksums, by name."""
    files = sorted(aside.iterdir())
    for file in files:
        with open(file, "r+b") as opened:
            os.fsync(opened.fileno())
    return {file.name: file_facts(file) for file in files}


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _source_changed() -> DataError:
    return DataError(
        "the source changed while the panel was built from it.",
        rule="the fingerprint was taken of the content before; nothing was left behind.",
        remedy="let its writer finish, then run again",
    )
