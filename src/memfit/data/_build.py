"""Write a panel's files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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
    file_facts,
    newest,
)
from memfit.data._publish import (
    Progress,
    locked,
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
from memfit.errors import DataError

Array = npt.NDArray[Any]

#: Raise it whenever the same source and parameters would give other values: panels built before are then a miss.
BUILD_VERSION = 1

Facts = Mapping[str, Any]  # ``dtype`` and ``shape`` of an array, as a manifest has them
#: What a panel takes beside its arrays (labels and the manifest), and the header of an array's file.
_SLACK_BYTES, _HEADER_BYTES = 1 << 20, 128


@dataclass(frozen=True)
class PanelSpec:
    """What to build from a source: columns by role, and the caller's own parameters."""

    date: str
    asset: str
    features: tuple[str, ...]
    targets: tuple[str, ...]
    dtype: str = "float32"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, index: Any, features: Any, targets: Any, parameters: Mapping[str, Any]) -> PanelSpec:
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
            plain = json.loads(json.dumps(dict(parameters), sort_keys=True, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the panel's parameters cannot be written as JSON: {error}",
                rule="parameters are part of the panel's fingerprint, so they are plain values.",
                remedy="pass numbers, text, lists and mappings of them",
            ) from error
        return cls(names[0], names[1], tuple(features), tuple(targets), parameters=plain)

    @property
    def numbers(self) -> tuple[str, ...]:
        return self.features + self.targets

    def arrays(self, num_dates: int, num_assets: int) -> dict[str, Facts]:
        cells = [num_dates, num_assets]
        return {
            "values": {"dtype": "<f4", "shape": [*cells, len(self.features)]},
            "targets": {"dtype": "<f4", "shape": [*cells, len(self.targets)]},
            "present": {"dtype": "|b1", "shape": cells},
            "history": {"dtype": "<i4", "shape": cells},
        }


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


def write_panel(
    spec: PanelSpec, source: Source, directory: Path, *, progress: Progress | None = None
) -> tuple[Path, bool, tuple[str, ...]]:
    """Find the panel of a source in a cache folder, or write it there. Return its folder, whether it was there already,
    and in what it differs from the newest other one there."""
    stamp = source.stamp()
    key = _key(spec, source)
    fingerprint = fingerprint_of(key)
    path = directory.resolve() / fingerprint[:16]
    if path.exists():
        return path, True, ()
    with locked(path):
        if path.exists():
            return path, True, ()
        sweep(path)
        changed = _differences(path.parent, key)
        axes = Axes.of(source, spec.date, spec.asset)
        arrays = spec.arrays(len(axes.dates), len(axes.assets))
        shape = f"{len(axes.dates)} dates x {len(axes.assets)} assets x {len(spec.features)} features"
        needed = _SLACK_BYTES + sum(map(_num_bytes, arrays.values()))
        with writing(path, f"a panel of {shape}", needed) as aside:
            _write_arrays(aside, spec, source, axes, arrays, progress or (lambda done, total: None))
            if source.stamp() != stamp:
                raise source_changed()
            Manifest(fingerprint, key, axes.num_rows, arrays, _force(aside)).write(aside)
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
    aside: Path, spec: PanelSpec, source: Source, axes: Axes, facts: Mapping[str, Facts], say: Progress
) -> None:
    arrays = {name: _create(aside / f"{name}.npy", one) for name, one in facts.items()}
    _scatter(source, spec, axes, arrays, say)
    _finish(arrays)
    for array in arrays.values():
        array.flush()
    np.save(aside / DATES, axes.dates)
    (aside / ASSETS).write_text(json.dumps(axes.assets.to_pylist(), ensure_ascii=True) + "\n")


def _num_bytes(facts: Facts) -> int:
    return _HEADER_BYTES + np.dtype(facts["dtype"]).itemsize * math.prod(facts["shape"])


def _create(path: Path, facts: Facts) -> np.memmap[Any, Any]:
    """Return a map of a new file of zeros that has its disk blocks: a full disk fails here, not as SIGBUS later."""
    array = np.lib.format.open_memmap(path, "w+", facts["dtype"], tuple(facts["shape"]))
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


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
                cells[name][cell] = _block(batch, columns)
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


def _block(batch: pa.RecordBatch, columns: tuple[str, ...]) -> Array:
    """Return columns side by side as (rows, columns), as they are stored."""
    block = np.empty((batch.num_rows, len(columns)), np.float32)
    for j, name in enumerate(columns):
        numbers = decode_numbers(batch.column(name))
        with np.errstate(over="ignore"):
            block[:, j] = numbers
        lost = np.isinf(block[:, j]) & np.isfinite(numbers)
        if lost.any():
            raise DataError(
                f"column '{name}' holds {numbers[lost][0]:g}, which float32 cannot hold.",
                rule=f"the largest value of float32 is {np.finfo(np.float32).max:g}.",
                remedy="scale the column",
            )
    return block


def _finish(arrays: Mapping[str, Array]) -> None:
    """Fill cells without a row, and count each cell's full dates in a row."""
    run = np.zeros(arrays["history"].shape[1], np.int32)
    for date, present in enumerate(arrays["present"]):
        values = arrays["values"][date]
        if not present.all():
            values[~present] = np.nan
            arrays["targets"][date, ~present] = np.nan
        full = present & np.isfinite(values).all(axis=-1)
        run = np.where(full, run + 1, 0).astype(np.int32)
        arrays["history"][date] = run
