"""Building a panel's files: by one process at a time, written aside, checksummed and renamed into place."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memfit.data._arrow import numpy_of
from memfit.data._dtypes import encode, is_finite, missing, storage, target_dtype
from memfit.data._manifest import ASSETS, DATES, FORMAT_VERSION, Manifest, canonical_json, read_manifest
from memfit.data._publish import (
    FreeBytes,
    Progress,
    check_space,
    free_bytes,
    locked,
    progress_events,
    seal,
    source_changed,
    sweep,
    write_manifest,
    writing,
)
from memfit.data._source import Source, check_columns, decode_assets, decode_dates, decode_numbers
from memfit.data._spec import Axes, PanelSpec
from memfit.data._versions import newest
from memfit.errors import DataError

#: Raise it whenever the same source and parameters would give other values: panels built before are then a miss.
BUILD_VERSION = 1

#: Assets whose history is reckoned together where a panel lies by asset.
_ASSETS_AT_ONCE = 64

Array = npt.NDArray[Any]


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
    free: FreeBytes = free_bytes,
) -> Built:
    """Find the panel of this source and spec in a cache folder, or build it there; see `Panel.build`."""
    spec = spec.check()
    stamp = source.stamp()
    key = source_key(source, spec)
    fingerprint = fingerprint_of(key)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory.resolve() / fingerprint[:16]
    if path.exists():
        return Built(path, reused=True)
    with locked(path):
        if path.exists():
            return Built(path, reused=True)
        sweep(path)
        changed = _differences(path.parent, key)
        axes = Axes.of(source, spec)
        shape = f"{len(axes.dates)} dates x {len(axes.assets)} assets x {len(spec.features)} features"
        check_space(path.parent, f"a panel of {shape}", axes.num_bytes(spec), free(path.parent))
        with writing(path, axes.num_bytes(spec)) as aside:
            arrays = _write_arrays(aside, source, spec, axes, progress or progress_events())
            if source.stamp() != stamp:
                raise source_changed()
            write_manifest(aside, Manifest(fingerprint, key, axes.num_rows, arrays, seal(aside)))
    return Built(path, reused=False, changed=changed)


def source_key(source: Source, spec: PanelSpec) -> dict[str, Any]:
    """All that the values depend on: content of the source, columns and types, parameters, code version."""
    columns = check_columns(source, date=spec.date, asset=spec.asset, numbers=spec.numbers)
    content = source.content_digest(date=spec.date, asset=spec.asset, numbers=spec.numbers)
    versions = {"format": FORMAT_VERSION, "build_version": BUILD_VERSION}
    return {**versions, "content": content, "columns": columns, **asdict(spec)}


def fingerprint_of(key: Mapping[str, Any]) -> str:
    """64 hex digits that stand for a key."""
    return blake2b(canonical_json(key), digest_size=32).hexdigest()


def _differences(directory: Path, key: Mapping[str, Any]) -> tuple[str, ...]:
    """The parts of the key in which a new panel differs from the newest one beside it: why that one was a miss."""
    try:
        old = read_manifest(newest(directory)).key
    except DataError:
        return ()
    return tuple(name for name in key if old.get(name) != key[name])


def _write_arrays(
    aside: Path, source: Source, spec: PanelSpec, axes: Axes, progress: Progress
) -> dict[str, dict[str, Any]]:
    layout = axes.layout(spec)
    arrays = {name: create(aside / f"{name}.npy", dtype, shape) for name, (dtype, shape) in layout.items()}
    scatter(source, spec, axes, arrays, progress)
    (finish_by_date if spec.order == "date" else _finish_by_asset)(arrays, spec)
    for array in arrays.values():
        array.flush()
    np.save(aside / DATES, axes.dates)
    write_assets(aside, axes.assets)
    return {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in layout.items()}


def write_assets(folder: Path, assets: pa.Array) -> None:
    """The asset codes as JSON."""
    (folder / ASSETS).write_text(json.dumps(assets.to_pylist(), ensure_ascii=True) + "\n")


def create(path: Path, dtype: str, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A new array of zeros in a mapped ``.npy`` file."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
    allocate(path)
    return array


def allocate(path: Path) -> None:
    """Take the disk blocks of a new file that holds zeros: a full disk fails here and not as SIGBUS later."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
        for start in range(0, size, 1 << 20):
            piece = os.pread(file.fileno(), min(1 << 20, size - start), start)
            os.pwrite(file.fileno(), piece, start)


def scatter(source: Source, spec: PanelSpec, axes: Axes, arrays: Mapping[str, Array], progress: Progress) -> None:
    """The second pass over a source: each row into its cell of arrays as they lie in their files."""
    num_dates, num_assets = arrays["present"].shape
    num_cells = num_dates * num_assets
    cells = {name: array.reshape(num_cells, *array.shape[2:]) for name, array in arrays.items()}
    dtypes = {"values": spec.dtype, "targets": target_dtype(spec.dtype)}
    done = 0
    for batch in source.batches([spec.date, spec.asset, *spec.numbers]):
        progress(done, axes.num_rows)
        date, asset = _places(batch, spec, axes)
        cell = date * num_assets + asset
        _refuse_duplicates(cell, cells["present"], axes)
        cells["present"][cell] = True
        place = cell if spec.order == "date" else asset * num_dates + date
        for name, columns in (("values", spec.features), ("targets", spec.targets)):
            if columns:
                cells[name][place] = _block(batch, columns, dtypes[name])
        done += batch.num_rows
    if done != axes.num_rows:
        raise source_changed()
    progress(done, axes.num_rows)


def _places(batch: pa.RecordBatch, spec: PanelSpec, axes: Axes) -> tuple[Array, Array]:
    """Each row's date and asset, as indices."""
    dates = decode_dates(batch.column(spec.date), spec.date)
    asset = pc.index_in(decode_assets(batch.column(spec.asset), spec.asset), value_set=axes.assets)
    date = np.minimum(np.searchsorted(axes.dates, dates), len(axes.dates) - 1)
    if asset.null_count or (axes.dates[date] != dates).any():
        raise source_changed()
    return date, numpy_of(asset).astype(np.int64)


def _refuse_duplicates(cell: npt.NDArray[np.int64], present: Array, axes: Axes) -> None:
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


def _block(batch: pa.RecordBatch, columns: tuple[str, ...], dtype: str) -> Array:
    """Columns side by side as (rows, columns), as they are stored."""
    block = np.empty((batch.num_rows, len(columns)), storage(dtype))
    for j, name in enumerate(columns):
        block[:, j] = encode(dtype, decode_numbers(batch.column(name)), name)
    return block


def finish_by_date(arrays: Mapping[str, Array], spec: PanelSpec, before: Array | None = None) -> None:
    """What stands for missing in each cell without a row, and for each cell the number of full dates in a row.

    Args:
        arrays: As they lie in their files, by date.
        spec: What they hold.
        before: (num_assets,) the history of the date before the first one, if there is one.
    """
    run = np.zeros(arrays["history"].shape[1], np.int32) if before is None else before
    for date, present in enumerate(arrays["present"]):
        values = arrays["values"][date]
        if not present.all():
            values[~present] = missing(spec.dtype)
            arrays["targets"][date, ~present] = np.nan
        full = present & is_finite(spec.dtype, values).all(axis=-1)
        run = np.where(full, run + 1, 0).astype(np.int32)
        arrays["history"][date] = run


def _finish_by_asset(arrays: Mapping[str, Array], spec: PanelSpec) -> None:
    """The same where all dates of one asset lie together."""
    num_dates, num_assets = arrays["present"].shape
    number = np.arange(1, num_dates + 1, dtype=np.int32)
    for start in range(0, num_assets, _ASSETS_AT_ONCE):
        part = slice(start, start + _ASSETS_AT_ONCE)
        full = np.ascontiguousarray(arrays["present"][:, part].T)
        for asset, present in enumerate(full, start):
            values = arrays["values"][asset]
            values[~present] = missing(spec.dtype)
            arrays["targets"][asset, ~present] = np.nan
            present &= is_finite(spec.dtype, values).all(axis=-1)
        last_gap = np.maximum.accumulate(np.where(full, 0, number), axis=1)
        arrays["history"][:, part] = (number - last_gap).T
