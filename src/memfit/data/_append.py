"""A later version of a panel: the old one's files, shared, and new ones for the dates that came after."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from memfit.data._arrow import numpy_of, text_of
from memfit.data._build import (
    Built,
    allocate,
    create,
    fingerprint_of,
    finish_by_date,
    scatter,
    source_key,
    write_assets,
)
from memfit.data._dtypes import missing
from memfit.data._manifest import ASSETS, DATES, Manifest, check_files, check_from, damaged
from memfit.data._publish import (
    FreeBytes,
    Progress,
    check_space,
    free_bytes,
    locked,
    panel_lock,
    progress_events,
    seal,
    source_changed,
    sweep,
    write_manifest,
    writing,
)
from memfit.data._segments import CUT_BYTES, array_files, file_name, header, map_array, num_bytes
from memfit.data._source import Source
from memfit.data._spec import Axes, PanelSpec
from memfit.errors import DataError

Array = npt.NDArray[Any]

#: What a file system answers that has no hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


@dataclass(frozen=True)
class Base:
    """The version to append to: its folder, manifest, dates and assets."""

    path: Path
    manifest: Manifest
    dates: npt.NDArray[np.datetime64]
    assets: tuple[str, ...]

    @property
    def spec(self) -> PanelSpec:
        key = {name: value for name, value in self.manifest.key.items() if name in PanelSpec.__dataclass_fields__}
        return PanelSpec(**{**key, "features": tuple(key["features"]), "targets": tuple(key["targets"])})


@dataclass(frozen=True)
class _Growth:
    """An array that grows by dates: the files that stay, and the bytes of its stream that a new file takes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_new: int
    kept: tuple[tuple[str, int], ...]
    last: tuple[str, int]
    start: int
    end_before: int
    end: int

    @classmethod
    def of(cls, name: str, facts: Mapping[str, Any], num_new: int) -> _Growth:
        before = tuple(facts["shape"])
        shape = (before[0] + num_new, *before[1:])
        end_before, end = num_bytes(facts["dtype"], before), num_bytes(facts["dtype"], shape)
        start = end_before // CUT_BYTES * CUT_BYTES
        files = array_files(name, facts)
        kept = tuple((file, at) for file, at in files if at < start)
        return cls(name, facts["dtype"], shape, num_new, kept, files[-1], start, end_before, end)

    @property
    def file(self) -> str:
        return file_name(self.name, self.start)

    def facts(self) -> dict[str, Any]:
        files = [*self.kept, (self.file, self.start)]
        more = {"segments": [list(file) for file in files]} if len(files) > 1 else {}
        return {"dtype": self.dtype, "shape": list(self.shape), **more}

    def create(self, base: Base, aside: Path) -> tuple[np.memmap[Any, Any], Array]:
        """The new file, mapped, with what it repeats of the old ones; and in it the new dates, all zeros."""
        old, at = self.last
        check_from(base.path / old, base.manifest.files[old], self.start - at if self.name != "history" else 0)
        with open(base.path / old, "rb") as file:
            file.seek(self.start - at)
            repeated = file.read()
        if len(repeated) != self.end_before - self.start:
            raise damaged(base.path / old, "does not end where its array does")
        path = aside / self.file
        with open(path, "wb") as file:
            file.truncate(self.end - self.start)
        allocate(path)
        content = np.memmap(path, np.uint8, "r+")
        content[: len(repeated)] = np.frombuffer(repeated, np.uint8)
        if self.start == 0:
            first = header(self.dtype, self.shape)
            content[: len(first)] = np.frombuffer(first, np.uint8)
        shape = (self.num_new, *self.shape[1:])
        return content, np.ndarray(shape, np.dtype(self.dtype), buffer=content.data, offset=len(repeated))


def append_panel(
    base: Base,
    source: Source,
    *,
    new_assets: str = "refuse",
    progress: Progress | None = None,
    free: FreeBytes = free_bytes,
) -> Built:
    """Find the version of a panel with this source's dates after its own, or write it beside it; see `Panel.append`."""
    spec = base.spec
    if spec.order == "asset":
        raise DataError(
            f"{base.path} lies by asset and cannot be appended to.",
            rule="new dates come after the old ones only where a panel lies by date.",
            remedy="build it anew from the whole source, or build it with order='date'",
        )
    stamp = source.stamp()
    key = {**source_key(source, spec), "parent": base.manifest.fingerprint}
    fingerprint = fingerprint_of(key)
    path = base.path.parent / fingerprint[:16]
    if path.exists():
        return Built(path, reused=True)
    with locked(path):
        if path.exists():
            return Built(path, reused=True)
        sweep(path)
        axes = _new_axes(base, source, spec, may_widen=new_assets == "copy")
        growths = [_Growth.of(name, facts, len(axes.dates)) for name, facts in base.manifest.arrays.items()]
        is_wider = len(axes.assets) > len(base.assets)
        whole = Axes(np.concatenate([base.dates, axes.dates]), axes.assets, base.manifest.num_rows + axes.num_rows)
        needed = whole.num_bytes(spec) if is_wider else (1 << 20) + sum(one.end - one.start for one in growths)
        check_space(path.parent, f"a version with {len(axes.dates)} more dates", needed, free(path.parent))
        with writing(path, needed) as aside:
            told = progress or progress_events()
            known: dict[str, Any] = {}
            if is_wider:
                arrays = _write_wider(base, aside, source, (axes, whole), told)
            else:
                shared = [ASSETS, *(file for growth in growths for file, _ in growth.kept)]
                known = {file: base.manifest.files[file] for file in shared}
                _share(base.path, aside, shared, free)
                _write_new(base, aside, source, axes, growths, told)
                arrays = {growth.name: growth.facts() for growth in growths}
            np.save(aside / DATES, whole.dates)
            if source.stamp() != stamp:
                raise source_changed()
            write_manifest(aside, Manifest(fingerprint, key, whole.num_rows, arrays, seal(aside, known)))
    return Built(path, reused=False)


def _new_axes(base: Base, source: Source, spec: PanelSpec, *, may_widen: bool) -> Axes:
    """The source's dates, all after the panel's own; and the panel's assets with those that are new."""
    axes = Axes.of(source, spec)
    old = axes.dates[axes.dates <= base.dates[-1]]
    if len(old):
        raise DataError(
            f"{len(old)} of the source's {len(axes.dates)} dates are not after the panel's last, {base.dates[-1]}; "
            f"the first is {old[0]}.",
            rule="a later version shares the old one's bytes, so what is there can be neither restated nor added to.",
            remedy=f"pass only rows after {base.dates[-1]}, or build a panel anew from the whole source",
        )
    unknown = sorted(set(axes.assets.to_pylist()).difference(base.assets))
    if unknown and not may_widen:
        raise DataError(
            f"the source has {len(unknown)} assets that the panel has not: {', '.join(unknown[:5])}"
            + (", ..." if len(unknown) > 5 else "."),
            rule="every date of a panel has room for the same assets, so that a new one changes the layout of all.",
            remedy="have the old dates copied into a wider panel (new_assets='copy', --new-assets copy), which shares "
            "nothing; or drop those rows",
        )
    return Axes(axes.dates, text_of(sorted({*base.assets, *unknown})), axes.num_rows)


def _write_wider(
    base: Base, aside: Path, source: Source, axes: tuple[Axes, Axes], progress: Progress
) -> dict[str, dict[str, Any]]:
    """All arrays anew with room for more assets: the old dates copied, after all of them were checked, and new ones."""
    check_files(base.path, base.manifest, "full")
    spec, (later, whole), num_old = base.spec, axes, len(base.dates)
    layout = whole.layout(spec)
    arrays = {name: create(aside / f"{name}.npy", dtype, shape) for name, (dtype, shape) in layout.items()}
    old = {name: map_array(base.path, name, facts) for name, facts in base.manifest.arrays.items()}
    place = numpy_of(pc.index_in(text_of(base.assets), value_set=whole.assets))
    for date in range(num_old):
        arrays["values"][date] = missing(spec.dtype)
        arrays["targets"][date] = np.nan
        for name, array in arrays.items():
            array[date, place] = old[name][date]
    new = {name: array[num_old:] for name, array in arrays.items()}
    scatter(source, spec, later, new, progress)
    finish_by_date(new, spec, np.array(arrays["history"][num_old - 1]))
    for array in arrays.values():
        array.flush()
    write_assets(aside, whole.assets)
    return {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in layout.items()}


def _share(old: Path, new: Path, files: list[str], free: FreeBytes) -> None:
    """Name the old version's files in the new folder too; where the file system has no links, copy them."""
    with panel_lock(old):  # so that nobody removes the old version meanwhile
        for number, file in enumerate(files):
            try:
                os.link(old / file, new / file)
            except FileNotFoundError:
                raise damaged(old / file, "is not there") from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _copy(old, new, files[number:], free)
                return


def _copy(old: Path, new: Path, files: list[str], free: FreeBytes) -> None:
    needed = sum((old / file).stat().st_size for file in files)
    check_space(new.parent, "a copy of the old version, for want of hard links,", needed, free(new.parent))
    for file in files:
        shutil.copyfile(old / file, new / file)
        with open(new / file, "r+b") as copied:
            os.fsync(copied.fileno())


def _write_new(base: Base, aside: Path, source: Source, axes: Axes, growths: list[_Growth], progress: Progress) -> None:
    created = {growth.name: growth.create(base, aside) for growth in growths}
    arrays = {name: rows for name, (_, rows) in created.items()}
    scatter(source, base.spec, axes, arrays, progress)
    before = map_array(base.path, "history", base.manifest.arrays["history"])[-1]
    finish_by_date(arrays, base.spec, np.array(before))
    for content, _ in created.values():
        content.flush()
