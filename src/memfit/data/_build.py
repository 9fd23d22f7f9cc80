"""Write a panel's files: a build, or a later version with the arrays of the one before it and its own new dates.

A build is an append to nothing.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memfit.data._manifest import (
    ASSETS,
    DATES,
    FORMAT_VERSION,
    Manifest,
    canonical_json,
    check_files,
    file_facts,
)
from memfit.data._publish import (
    Progress,
    check_space,
    locked,
    panel_lock,
    source_changed,
    sweep,
    writing,
)
from memfit.data._source import (
    Source,
    check_columns,
    decode_assets,
    decode_dates,
    decode_numbers,
    numpy_of,
    text_of,
)
from memfit.data._versions import newest
from memfit.errors import DataError

Array = npt.NDArray[Any]

#: Raise it whenever the same source and parameters would give other values: panels built before are then a miss.
BUILD_VERSION = 1

Facts = Mapping[str, Any]  # ``dtype`` and ``shape`` of an array, as a manifest has them
_FLOATS = ("float16", "float32", "float64")
#: What a panel takes beside its arrays: labels and the manifest.
_SLACK_BYTES = 1 << 20
_COPIED_BYTES = 64 << 20
#: What a kernel answers that cannot copy a range between these files.
_NO_COPY = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)


@dataclass(frozen=True)
class PanelSpec:
    """What to build from a source: columns by role, the type of the values, and the caller's own parameters."""

    date: str
    asset: str
    features: tuple[str, ...]
    targets: tuple[str, ...]
    dtype: str
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, index: Any, features: Any, targets: Any, dtype: Any, parameters: Mapping[str, Any]) -> PanelSpec:
        """Return the spec of a build, its parameters as JSON gives them back."""
        names = () if isinstance(index, str) else tuple(index)
        if len(names) != 2 or names[0] == names[1] or not all(isinstance(name, str) for name in names):
            raise DataError(
                f"index is {index!r}.",
                rule="it names two different columns: that of dates and that of asset codes.",
                remedy='pass index=("date", "code"), or --index date,code',
            )
        for role, columns in (("features", features), ("targets", targets)):
            if len(set(columns)) != len(columns) or (role == "features" and not columns):
                raise DataError(
                    f"{role} is {list(columns)}.",
                    rule="a panel has at least one feature; features are named once each, and so are targets.",
                    remedy=f"pass {role}=[...] with different column names",
                )
        try:
            kind = str(np.dtype(dtype))
        except TypeError:
            kind = str(dtype)
        if kind not in _FLOATS:
            raise DataError(
                f"dtype is {kind}.",
                rule=f"a panel's values are {', '.join(_FLOATS)}; a missing one is NaN.",
                remedy='pass dtype="float32"; float64 holds whole numbers up to 2**53 exactly',
            )
        try:
            plain = json.loads(json.dumps(dict(parameters), sort_keys=True, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the panel's parameters cannot be written as JSON: {error}",
                rule="parameters are part of the panel's fingerprint, so they are plain values.",
                remedy="pass numbers, text, lists and mappings of them",
            ) from error
        return cls(names[0], names[1], tuple(features), tuple(targets), kind, plain)

    @classmethod
    def of_panel(cls, manifest: Manifest) -> PanelSpec:
        found = {name: manifest.key[name] for name in cls.__dataclass_fields__}
        return cls(**found | {role: tuple(found[role]) for role in ("features", "targets")})

    @property
    def numbers(self) -> tuple[str, ...]:
        return self.features + self.targets

    def empty_arrays(self, num_assets: int) -> dict[str, dict[str, Any]]:
        dtype = np.dtype(self.dtype).newbyteorder("<").str
        return {
            "values": {"dtype": dtype, "shape": [0, num_assets, len(self.features)]},
            "targets": {"dtype": dtype, "shape": [0, num_assets, len(self.targets)]},
            "present": {"dtype": "|b1", "shape": [0, num_assets]},
            "history": {"dtype": "<i4", "shape": [0, num_assets]},
        }


@dataclass(frozen=True)
class Base:
    """What a later version needs of a panel: (num_dates,) dates, asset codes, (num_assets,) the last history."""

    path: Path
    manifest: Manifest
    dates: npt.NDArray[np.datetime64]
    assets: tuple[str, ...]
    history: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Axes:
    """The dates and assets of a source, sorted, and the number of its rows."""

    dates: npt.NDArray[np.datetime64]
    assets: pa.Array
    num_rows: int

    @classmethod
    def of(cls, source: Source, date: str, asset: str) -> Axes:
        """The first pass over a source."""
        dates = np.empty(0, "datetime64[D]")
        assets: set[str] = set()
        num_rows = 0
        for batch in source.batches([date, asset]):
            dates = np.union1d(dates, decode_dates(batch.column(date), date))
            assets.update(pc.unique(decode_assets(batch.column(asset), asset)).to_pylist())
            num_rows += batch.num_rows
        if not num_rows:
            raise DataError("the source has no rows.", rule="a panel has at least one.", remedy="name another source")
        return cls(dates, text_of(sorted(assets)), num_rows)

    def check_later(self, base: Base) -> None:
        """Refuse dates that are not after a panel's last one, and assets that it has not."""
        last, old = base.dates[-1], self.dates[self.dates <= base.dates[-1]]
        if len(old):
            raise DataError(
                f"{len(old)} of the source's {len(self.dates)} dates are not after the panel's last, {last}; "
                f"the first is {old[0]}.",
                rule="a later version has the old one's dates as they are.",
                remedy=f"pass only rows after {last}, or build a panel anew from the whole source",
            )
        unknown = sorted(set(self.assets.to_pylist()).difference(base.assets))
        if unknown:
            raise DataError(
                f"the source has {len(unknown)} assets that the panel has not: {', '.join(unknown[:5])}"
                + (", ..." if len(unknown) > 5 else "."),
                rule="every date of a panel has room for the same assets, so that a new one changes the layout of all.",
                remedy="build a panel anew from the whole source, or drop those rows",
            )


def _header(facts: Facts) -> bytes:
    """Return the header of an array's file, ``.npy``; its length does not depend on the number of dates."""
    text, shape = io.BytesIO(), tuple(facts["shape"])
    np.lib.format.write_array_header_1_0(text, {"descr": facts["dtype"], "fortran_order": False, "shape": shape})
    return text.getvalue()


def _num_bytes(facts: Facts) -> int:
    return len(_header(facts)) + np.dtype(facts["dtype"]).itemsize * math.prod(facts["shape"])


def _create(name: str, facts: Facts, num_new: int, base: Base | None, aside: Path) -> np.memmap[Any, Any]:
    """Write the header and the old dates of an array that grows by dates; return a map of the new ones, all zeros."""
    path, (num_dates, *shape) = aside / f"{name}.npy", facts["shape"]
    if base is not None:
        _copy(base.path / path.name, path)
    with open(path, "r+b" if base else "wb") as file:
        file.write(_header(facts))
        file.truncate(_num_bytes(facts))
    start = _num_bytes({**facts, "shape": [num_dates - num_new, *shape]})
    _allocate(path, start)
    return np.memmap(path, facts["dtype"], "r+", start, (num_new, *shape))


def _copy(old: Path, new: Path) -> None:
    """Copy a file inside the kernel; a file system that can clone shares the blocks of both."""
    with open(old, "rb", buffering=0) as source, open(new, "wb", buffering=0) as target:
        try:
            while os.copy_file_range(source.fileno(), target.fileno(), _COPIED_BYTES):
                pass
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_COPY:
                raise
            shutil.copyfileobj(source, target)  # from where the kernel has stopped


def write_panel(
    spec: PanelSpec,
    source: Source,
    directory: Path,
    *,
    base: Base | None = None,
    progress: Progress | None = None,
) -> tuple[Path, bool, tuple[str, ...]]:
    """Find the panel of a source in a cache folder, or write it there; with a base, the source has later dates. Return
    its folder, whether it was there already, and in what it differs from the newest other one there."""
    stamp = source.stamp()
    key = _key(spec, source) | ({"parent": base.manifest.fingerprint} if base else {})
    fingerprint = fingerprint_of(key)
    path = directory.resolve() / fingerprint[:16]
    if path.exists():
        return path, True, ()
    with locked(path):
        if path.exists():
            return path, True, ()
        sweep(path)
        changed = () if base else _differences(path.parent, key)
        axes = Axes.of(source, spec.date, spec.asset)
        num_rows = axes.num_rows
        if base:
            axes.check_later(base)
            axes = Axes(axes.dates, text_of(base.assets), num_rows)
            num_rows += base.manifest.num_rows
        arrays, num_new = base.manifest.arrays if base else spec.empty_arrays(len(axes.assets)), len(axes.dates)
        grown = {
            name: {**facts, "shape": [facts["shape"][0] + num_new, *facts["shape"][1:]]}
            for name, facts in arrays.items()
        }
        shape = f"{len(axes.dates)} dates x {len(axes.assets)} assets x {len(spec.features)} features"
        what = f"a version with {len(axes.dates)} more dates" if base else f"a panel of {shape}"
        needed = _SLACK_BYTES + sum(map(_num_bytes, grown.values()))
        check_space(path.parent, what, needed)
        with writing(path, "the panel", needed) as aside:
            _write_arrays(base, aside, spec, source, axes, grown, progress or (lambda done, total: None))
            if source.stamp() != stamp:
                raise source_changed()
            files = _force(aside)
            Manifest(fingerprint, key, num_rows, grown, files).write(aside)
    return path, False, changed


def _key(spec: PanelSpec, source: Source) -> dict[str, Any]:
    columns = check_columns(source, date=spec.date, asset=spec.asset, numbers=spec.numbers)
    content = source.content_digest(date=spec.date, asset=spec.asset, numbers=spec.numbers)
    versions = {"format": FORMAT_VERSION, "build_version": BUILD_VERSION}
    return {**versions, "content": content, "columns": columns, **asdict(spec), "order": "date"}


def fingerprint_of(key: Mapping[str, Any]) -> str:
    return blake2b(canonical_json(key), digest_size=32).hexdigest()


def _differences(directory: Path, key: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts of the key in which a new panel differs from the newest one beside it."""
    try:
        old = Manifest.read(newest(directory)).key
    except DataError:
        return ()
    return tuple(name for name in key if old.get(name) != key[name])


def _force(aside: Path) -> dict[str, Any]:
    """Force each file to disk; return the size and checksums of all by name."""
    files = {}
    for file in sorted(aside.iterdir()):
        with open(file, "r+b") as opened:
            os.fsync(opened.fileno())
        files[file.name] = file_facts(file)
    return files


def _write_arrays(
    base: Base | None,
    aside: Path,
    spec: PanelSpec,
    source: Source,
    axes: Axes,
    grown: Mapping[str, Facts],
    say: Progress,
) -> None:
    with panel_lock(base.path) if base else nullcontext():  # so that nobody removes the old version meanwhile
        if base:
            check_files(base.path, base.manifest.files, "full")  # new checksums would vouch for damage
        arrays = {name: _create(name, facts, len(axes.dates), base, aside) for name, facts in grown.items()}
    _scatter(source, spec, axes, arrays, say)
    _finish(arrays, base.history if base else None)
    for array in arrays.values():
        array.flush()
    np.save(aside / DATES, np.concatenate([base.dates, axes.dates]) if base else axes.dates)
    (aside / ASSETS).write_text(json.dumps(axes.assets.to_pylist(), ensure_ascii=True) + "\n")


def _allocate(path: Path, start: int) -> None:
    """Take the disk blocks of a file that holds zeros from a byte on: a full disk fails here, not as SIGBUS later."""
    size = path.stat().st_size
    if size == start:
        return
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), start, size - start)


def _scatter(source: Source, spec: PanelSpec, axes: Axes, arrays: Mapping[str, Array], progress: Progress) -> None:
    """The second pass over a source: each row into its cell."""
    num_assets = len(axes.assets)
    cells = {name: array.reshape(len(axes.dates) * num_assets, *array.shape[2:]) for name, array in arrays.items()}
    done = 0
    for batch in source.batches([spec.date, spec.asset, *spec.numbers]):
        progress(done, axes.num_rows)
        date, asset = _places(batch, spec, axes)
        cell = date * num_assets + asset
        _refuse_duplicates(cell, cells["present"], axes)
        cells["present"][cell] = True
        for name, columns in (("values", spec.features), ("targets", spec.targets)):
            if columns:
                cells[name][cell] = _block(batch, columns, spec.dtype)
        done += batch.num_rows
    if done != axes.num_rows:
        raise source_changed()
    progress(done, axes.num_rows)


def _places(batch: pa.RecordBatch, spec: PanelSpec, axes: Axes) -> tuple[Array, Array]:
    dates = decode_dates(batch.column(spec.date), spec.date)
    asset = pc.index_in(decode_assets(batch.column(spec.asset), spec.asset), value_set=axes.assets)
    date = np.minimum(np.searchsorted(axes.dates, dates), len(axes.dates) - 1)
    if asset.null_count or (axes.dates[date] != dates).any():
        raise source_changed()
    return date, numpy_of(asset).astype(np.int64)


def _refuse_duplicates(cell: npt.NDArray[np.int64], present: Array, axes: Axes) -> None:
    again = np.ones(len(cell), bool)
    again[np.unique(cell, return_index=True)[1]] = False
    again |= present[cell]
    if again.any():
        date, asset = np.divmod(cell[again][:3], len(axes.assets))
        pairs = ", ".join(f"({axes.dates[d]}, {axes.assets[int(a)]})" for d, a in zip(date, asset, strict=True))
        raise DataError(
            f"the source has more than one row for a date and asset; the first are {pairs}.",
            rule="a panel has one row per date and asset.",
            remedy="drop or aggregate the duplicates in the source",
        )


def _block(batch: pa.RecordBatch, columns: tuple[str, ...], dtype: str) -> Array:
    """Return columns side by side as (rows, columns), as they are stored."""
    block = np.empty((batch.num_rows, len(columns)), dtype)
    for j, name in enumerate(columns):
        numbers = decode_numbers(batch.column(name))
        with np.errstate(over="ignore"):
            block[:, j] = numbers
        lost = np.isinf(block[:, j]) & np.isfinite(numbers)
        if lost.any():
            raise DataError(
                f"column '{name}' holds {numbers[lost][0]:g}, which {dtype} cannot hold.",
                rule=f"the largest value of {dtype} is {np.finfo(dtype).max:g}.",
                remedy='pass dtype="float64", or scale the column',
            )
    return block


def _finish(arrays: Mapping[str, Array], before: Array | None) -> None:
    """Fill cells without a row, and count each cell's full dates in a row, from (num_assets,) ``before`` on."""
    run = np.zeros(arrays["history"].shape[1], np.int32) if before is None else before
    for date, present in enumerate(arrays["present"]):
        values = arrays["values"][date]
        if not present.all():
            values[~present] = np.nan
            arrays["targets"][date, ~present] = np.nan
        full = present & np.isfinite(values).all(axis=-1)
        run = np.where(full, run + 1, 0).astype(np.int32)
        arrays["history"][date] = run
