"""Lists of Python objects as mapped files: any number of processes read them, and none copies them."""

from __future__ import annotations

import errno
import json
import mmap
import operator
import os
import shutil
import sys
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from memfit.data._chunks import CHUNK_BYTES, chunk_digests
from memfit.data._encoding import Encoder, RefusedError, decode
from memfit.data._manifest import MANIFEST, Check, canonical_json, changed_block, file_facts
from memfit.data._publish import locked
from memfit.errors import DamagedError, DataError
from memfit.rundir import sync_folder
from memfit.units import format_bytes

#: The layout of the folder and the encoding. A reader refuses any other.
FORMAT_VERSION = 1

_DATA, _OFFSETS = "data.bin", "offsets.bin"
_MAGIC = b"mfpacked"
_BUFFER_BYTES = 4 << 20
_COPIED_BYTES = 1 << 12  # up to here a copy of an object's bytes is decoded sooner than the map, its arrays apart


def pack(objects: Iterable[Any], path: Path | str | None = None) -> PackedDataset:
    """The objects, written once into a folder, as a data set that every process maps and none copies.

    A list of Python objects in a data set is copied by each worker that reads it: reading an object changes its count
    of references, and with it the page it lies on (PyTorch issue 13246). These are bytes in a file instead.

    What can be packed: str, bytes, int, float, bool, None, NumPy arrays and scalars, tensors (which come back as
    arrays), and lists, tuples and dicts of all these; of each the type itself, no class derived from it. The objects
    are taken one at a time, with a few MiB of them in memory. The folder is written aside, forced to disk and renamed,
    so nobody ever sees a part of it; several processes that pack to one path do so one after another, and all but the
    first are refused.

    Args:
        objects: Any iterable of objects.
        path: The folder to make; None makes one in ``tempfile.gettempdir()`` that is removed when the data set is no
            longer used or this process ends, though not if it is killed. Where that is a tmpfs it takes memory.

    Raises:
        DataError: If an object is of another kind (its place is named), if the folder is there already, or if the disk
            is full, if ``objects`` is one text, bytes or mapping, or if the folder cannot be made. Nothing is left
            behind.

    Example:
        >>> data = pack({"text": text, "ids": np.arange(len(text))} for text in ("one", "three"))
        >>> len(data), data[1]
        (2, {'text': 'three', 'ids': array([0, 1, 2, 3, 4])})
        >>> data[-1]["ids"].flags.writeable
        False
    """
    if isinstance(objects, str | bytes | bytearray | Mapping):
        raise DataError(
            f"the objects are one {type(objects).__name__}.",
            rule="packed are the objects that an iterable gives: of a text its characters, of a dict its keys alone.",
            remedy="pack([one]) packs it as one object, pack(one.values()) the values of a dict",
        )
    if path is None:
        owned = Path(tempfile.mkdtemp(prefix="memfit-packed-"))
        try:
            return PackedDataset(_Files(_write(objects, owned / "objects"), owned))
        except BaseException:
            shutil.rmtree(owned, ignore_errors=True)
            raise
    folder = Path(path).absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{folder.parent} cannot be made: {error.strerror}.",
            rule=f"packed objects are a folder in a folder; {error.filename} is no folder, or none can be made there.",
            remedy="make that path usable, or name another one",
        ) from error
    with locked(folder):
        return PackedDataset(_Files(_write(objects, folder)))


class PackedDataset(Sequence[Any]):
    """Objects in mapped files, in place of a list: made by `pack` or `PackedDataset.open`.

    An object is made anew each time it is asked for, equal to the one that was packed. Its arrays are not: they are
    read-only views of the file map (``.copy()`` one that is to be written, or for torch, which warns of such). A slice
    is a view too. A pickled data set is its path, so that each worker maps for itself, whatever the start method.

    Example:
        >>> import pickle
        >>> data = pack(["a", "b", "c", "d"])
        >>> list(data[1:3]), data[-1], "c" in data
        (['b', 'c'], 'd', True)
        >>> list(pickle.loads(pickle.dumps(data[::2])))
        ['a', 'c']
    """

    def __init__(self, files: _Files, numbers: range | None = None) -> None:
        self._files = files
        self._numbers = range(files.num_objects) if numbers is None else numbers

    @classmethod
    def open(cls, path: Path | str, *, verify: Check = "sample") -> PackedDataset:
        """The data set in a folder that `pack` made.

        Args:
            path: The folder.
            verify: ``sizes`` checks the manifest against its own checksum, and the size of each file. ``sample`` also
                checks 64 blocks of 1 MiB, which each call draws anew: all bytes of a data set of about 60 MiB. ``full``
                checks every byte.

        Raises:
            DataError: If the folder holds no packed objects.
            DamagedError: If a file is not as it was written; it is named.
        """
        data = cls(_Files(Path(path).absolute()))
        if verify == "full":
            data.verify()
        elif verify == "sample" and (changed := changed_block(data.path, data._files.facts)):
            raise _damaged(*changed)
        return data

    @property
    def path(self) -> Path:
        """The folder."""
        return self._files.path

    @property
    def nbytes(self) -> int:
        """Bytes on disk, and in the page cache when all of it was read; those of the whole folder, also of a slice."""
        return sum(int(facts["bytes"]) for facts in self._files.facts.values())

    def verify(self) -> None:
        """Read every byte and compare it with the checksums.

        Raises:
            DamagedError: Naming the first file that differs, and the 64 MiB in which it does.
        """
        self._files.verify()

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> PackedDataset: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return PackedDataset(self._files, self._numbers[index])
        return self._files.read(self._numbers[operator.index(index)])

    def __iter__(self) -> Iterator[Any]:
        return map(self._files.read, self._numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (str(self.path), self._numbers))

    def __repr__(self) -> str:
        return f"PackedDataset({str(self.path)!r}: {len(self)} objects, {format_bytes(self.nbytes)})"


def _reopen(path: str, numbers: range) -> PackedDataset:
    return PackedDataset(_Files(Path(path)), numbers)


class _Files:
    """A folder's files, mapped when first used.

    Args:
        path: The folder.
        owned: A folder to remove when this is no longer used.
    """

    def __init__(self, path: Path, owned: Path | None = None) -> None:
        fields = _read_manifest(path)
        self.path = path
        self.num_objects = int(fields["num_objects"])
        self.facts: Mapping[str, Any] = fields["files"]
        for name, facts in self.facts.items():
            file = path / name
            size = file.stat().st_size if file.is_file() else None
            if size != facts["bytes"]:
                raise _damaged(file, "is not there" if size is None else f"has {size} bytes, not {facts['bytes']}")
        if owned is not None:
            weakref.finalize(self, _remove, owned, os.getpid())

    @cached_property
    def _offsets(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(_map(self.path / _OFFSETS), "<i8")

    @cached_property
    def _data(self) -> memoryview:
        return _map(self.path / _DATA)

    def read(self, number: int) -> Any:
        start, end = self._offsets[number : number + 2].tolist()
        if end - start < _COPIED_BYTES:
            return decode(bytes(self._data[start:end]), 0, self._data, start)[0]
        return decode(self._data, start, self._data, 0)[0]

    def verify(self) -> None:
        for name, facts in self.facts.items():
            file = self.path / name
            for number, (found, wanted) in enumerate(zip(chunk_digests(file), facts["chunks"], strict=True)):
                if found != wanted:
                    start = number * CHUNK_BYTES
                    end = min(start + CHUNK_BYTES, int(facts["bytes"]))
                    raise _damaged(file, f"was changed between bytes {start} and {end}")


def _map(file: Path) -> memoryview:
    with open(file, "rb") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked worker holds a copy of what removes it
        shutil.rmtree(folder, ignore_errors=True)


def _write(objects: Iterable[Any], path: Path) -> Path:
    """The folder of the objects, in place and whole."""
    if path.exists():
        raise DataError(
            f"{path} is there already.",
            rule="packed objects are written once and never changed.",
            remedy=f"open it with PackedDataset.open('{path}'), name another path, or remove it: rm -r {path}",
        )
    aside = path.with_name(f".{path.name}.packing")
    shutil.rmtree(aside, ignore_errors=True)  # of one that was killed: this process holds the lock
    with _writing(aside):
        aside.mkdir()
        num_objects = _write_objects(objects, aside)
        files = {name: file_facts(aside / name) for name in (_DATA, _OFFSETS)}
        fields = {"kind": "packed objects", "format": FORMAT_VERSION, "num_objects": num_objects, "files": files}
        with open(aside / MANIFEST, "w") as file:
            file.write(_sealed(fields))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(aside)
        aside.rename(path)
    sync_folder(path.parent)
    return path


@contextmanager
def _writing(aside: Path) -> Iterator[None]:
    """Leaves nothing half-written behind."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = format_bytes(shutil.disk_usage(aside.parent).free)
            raise DataError(
                f"the objects could not be packed ({error.strerror}): {free} are free without them.",
                rule=f"the file system, the quota or ulimit -f of {aside.parent} says so; nothing was left behind.",
                remedy="free space there, raise that limit, or pass a path elsewhere",
            ) from error
        raise


def _write_objects(objects: Iterable[Any], folder: Path) -> int:
    """The data and offsets, forced to disk; returns how many objects they are."""
    encoder = Encoder()
    encoder.buffer += _MAGIC
    offsets, number = array("q", [len(_MAGIC)]), -1
    with open(folder / _DATA, "wb", buffering=0) as data, open(folder / _OFFSETS, "wb", buffering=0) as index:

        def flush() -> None:
            if sys.byteorder == "big":
                offsets.byteswap()
            for file, content in ((data, memoryview(encoder.buffer)), (index, memoryview(offsets).cast("B"))):
                written = 0
                with content:
                    while written < len(content):
                        written += file.write(content[written:]) or 0
            encoder.start += len(encoder.buffer)
            encoder.buffer.clear()
            del offsets[:]

        for number, one in enumerate(objects):
            try:
                encoder.put(one)
            except RefusedError as error:
                raise _refused(number, error) from None
            offsets.append(encoder.start + len(encoder.buffer))
            if len(encoder.buffer) + 8 * len(offsets) >= _BUFFER_BYTES:
                flush()
        flush()
        os.fsync(data.fileno())
        os.fsync(index.fileno())
    return number + 1


def _refused(number: int, error: RefusedError) -> DataError:
    return DataError(
        f"object {number}{error.place} cannot be packed: it is {error.why}.",
        rule="packed are str, bytes, int, float, bool, None, arrays and tensors of numbers or text, and lists, tuples "
        "and dicts of them; no class derived from one, and no code.",
        remedy="convert it before, for example with dict(...), list(...), str(...) or numpy.asarray(...)",
    )


def _sealed(fields: Mapping[str, Any]) -> str:
    checksum = blake2b(canonical_json(fields), digest_size=16).hexdigest()
    return json.dumps({**fields, "checksum": checksum}, indent=1) + "\n"


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        text = None
    try:
        fields: dict[str, Any] = dict(json.loads(text or b"{}"))
    except (ValueError, TypeError):
        raise _damaged(file, "does not match its own checksum") from None
    if text is None or "arrays" in fields:
        raise DataError(
            f"{path} holds no packed objects{': it is a panel' if text else f': it has no {MANIFEST}'}.",
            rule="packed objects are a folder that memfit.data.pack renamed into place whole.",
            remedy="name such a folder, or make one: memfit.data.pack(objects, path)",
        )
    if fields.pop("checksum", None) is None or _sealed(fields).encode() != text:
        raise _damaged(file, "does not match its own checksum")
    if fields["format"] != FORMAT_VERSION:
        raise DataError(
            f"{path} has the packed format {fields['format']}.",
            rule=f"this memfit reads format {FORMAT_VERSION}.",
            remedy=f"pack the objects again, after rm -r {path}",
        )
    return fields


def _damaged(file: Path, what: str) -> DamagedError:
    return DamagedError(
        f"{file} {what}.",
        rule=f"packed objects are written once, and their {MANIFEST} holds the size and checksums of each file.",
        remedy=f"pack the objects again, after rm -r {file.parent}",
    )
