"""Keep lists of Python objects in mapped files that many processes read and none copies."""

from __future__ import annotations

import io
import mmap
import operator
import os
import pickle
import shutil
import struct
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.data._manifest import Check, check_files, file_facts, read_sealed, write_sealed
from memfit.data._publish import locked, writing
from memfit.errors import DataError
from memfit.units import format_bytes

_KIND = "packed objects"
#: The layout of the folder and the encoding. A reader refuses any other.
FORMAT_VERSION = 3

_DATA, _OFFSETS = "data.bin", "offsets.bin"
_BUFFER_BYTES = 1 << 20
#: Arrays begin at multiples of this in the file: the alignment of the largest of numpy's numbers.
_ALIGNMENT = 16


def pack(objects: Iterable[Any], path: Path | str | None = None) -> PackedDataset:
    """Write objects into a folder, once, as a data set that every process maps and none copies.

    A forked worker that reads a list of Python objects copies it, because reading an object changes its reference count
    (PyTorch issue 13246). These are bytes in a file instead. They may be str, bytes, int, float, bool, None, NumPy
    arrays and scalars, tensors (which come back as arrays), and lists, tuples, sets and dicts of these; no derived
    classes. They are taken one at a time. The folder appears whole or not at all.

    Args:
        objects: Any iterable of objects.
        path: The folder to make. None makes a temporary one, removed when the data set is no longer used or this
            process ends (not if it is killed). A tmpfs takes memory.

    Raises:
        DataError: If an object is of another kind (its number is named), the folder is there already or cannot be made,
            the disk is full, or ``objects`` is one text, bytes or mapping. Nothing is left behind.

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
            return PackedDataset(_Files(write_packed(objects, owned / "objects"), owned))
        except BaseException:
            shutil.rmtree(owned, ignore_errors=True)
            raise
    folder = Path(path).absolute()
    with locked(folder):
        return PackedDataset(_Files(write_packed(objects, folder)))


class PackedDataset(Sequence[Any]):
    """Objects in mapped files, in place of a list: made by `pack` or `PackedDataset.open`.

    An object is made anew each time. Its arrays are read-only views of the file map: ``.copy()`` one to write into it.
    A slice is a view too. A pickled data set is its path.

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
            verify: ``sizes`` checks the manifest and the size of each file, ``sample`` also 64 random blocks of 1 MiB,
                ``full`` every byte.

        Raises:
            DataError: If the folder holds no packed objects.
            DamagedError: If a file is not as it was written; it is named.
        """
        files = _Files(Path(path).absolute())
        check_files(files.path, files.facts, verify)
        return cls(files)

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
            DamagedError: Naming the first file that differs, and the MiB in which it does.
        """
        check_files(self.path, self._files.facts, "full")

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
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
    """A folder's files, mapped when first used. The folder ``owned`` is removed when this is no longer used."""

    def __init__(self, path: Path, owned: Path | None = None) -> None:
        fields = read_sealed(path, _KIND, [FORMAT_VERSION])
        self.path = path
        self.num_objects = int(fields["num_objects"])
        self.facts: Mapping[str, Any] = fields["files"]
        check_files(path, self.facts, "sizes")
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
        return _decode(self._data, start, end)


def _map(file: Path) -> memoryview:
    with open(file, "rb") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked worker holds a copy of what removes it
        shutil.rmtree(folder, ignore_errors=True)


def source_of(path: Path) -> Any:
    """Return what `write_packed` was given as the source of a folder's objects; None if nothing."""
    return read_sealed(path, _KIND, [FORMAT_VERSION]).get("source")


def write_packed(
    objects: Iterable[Any],
    path: Path,
    source: Any = None,
    name_of: Callable[[int], str] = "object {}".format,
) -> Path:
    """Write the folder of the objects, in place and whole; its lock is held. ``source`` is a JSON value for the
    manifest, taken when all objects are written. ``name_of`` names an object in an error."""
    if path.exists():
        raise DataError(
            f"{path} is there already.",
            rule="packed objects are written once and never changed.",
            remedy=f"open it with PackedDataset.open('{path}'), name another path, or remove it: rm -r {path}",
        )
    with writing(path, "the packed objects") as aside:
        num_objects = _write_objects(objects, aside, name_of)
        files = {name: file_facts(aside / name) for name in (_DATA, _OFFSETS)}
        fields = {"kind": _KIND, "format": FORMAT_VERSION, "num_objects": num_objects, "files": files}
        write_sealed(aside, fields | ({"source": source} if source is not None else {}))
    return path


def _write_objects(objects: Iterable[Any], folder: Path, name_of: Callable[[int], str]) -> int:
    """Write the data and offsets, forced to disk; returns how many objects they are."""
    encoder, number = _Encoder(), -1
    with (
        open(folder / _DATA, "wb", buffering=_BUFFER_BYTES) as data,
        open(folder / _OFFSETS, "wb", buffering=_BUFFER_BYTES) as index,
    ):
        data.write(bytes(_ALIGNMENT))  # an empty file cannot be mapped
        index.write(struct.pack("<q", data.tell()))
        for number, one in enumerate(objects):
            try:
                data.write(encoder.encode(one, data.tell()))
            except (_RefusedError, RecursionError) as error:
                raise _refused(name_of(number), error) from None
            index.write(struct.pack("<q", data.tell()))
        for file in (data, index):
            file.flush()
            os.fsync(file.fileno())
    return number + 1


class _RefusedError(Exception):
    """A value of a kind that is not packed."""


def _refused(name: str, error: Exception) -> DataError:
    what = "nested too deep" if isinstance(error, RecursionError) else f"or holds {error}"
    return DataError(
        f"{name} cannot be packed: it is {what}.",
        rule="packed are str, bytes, int, float, bool, None, arrays and tensors of numbers or text, and lists, tuples, "
        "sets and dicts of them; no class derived from one, and no code.",
        remedy="convert it before, for example with dict(...), list(...), str(...) or numpy.asarray(...)",
    )


class _Encoder(pickle.Pickler):
    """Encodes one object after another: a table of the places of its arrays, a pickle without code, the arrays."""

    def __init__(self) -> None:
        self._stream = io.BytesIO()
        self._arrays: list[bytes] = []
        super().__init__(self._stream, protocol=5, buffer_callback=self._keep)

    def _keep(self, buffer: pickle.PickleBuffer) -> None:
        self._arrays.append(bytes(buffer))

    def encode(self, value: Any, start: int) -> bytes:
        self._stream.seek(0)
        self._stream.truncate()
        self._arrays.clear()
        self.clear_memo()
        self.dump(value)
        content = self._stream.getvalue()
        at = start + 4 + 16 * len(self._arrays) + len(content)
        places, parts = [], [content]
        for one in self._arrays:
            gap = -at % _ALIGNMENT
            places += [at + gap, len(one)]
            parts += [bytes(gap), one]
            at += gap + len(one)
        return b"".join([struct.pack(f"<I{len(places)}Q", len(self._arrays), *places), *parts])

    def reducer_override(self, value: Any) -> Any:
        """Encode arrays; refuse what pickle would write as the call of a function."""
        kind, torch = type(value), sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            try:
                found = value.numpy(force=True)
            except (TypeError, RuntimeError) as error:
                raise _RefusedError(f"a tensor of {value.dtype}, {value.layout} ({error})") from None
        elif kind is np.ndarray or kind is np.memmap or isinstance(value, np.generic):
            found = np.asarray(value)
            if isinstance(value, np.str_ | np.bytes_) and len(found[()]) != len(value):
                raise _RefusedError(f"a numpy.{kind.__name__} that ends with a zero, which NumPy's arrays drop")
        elif value is _make_array:
            return NotImplemented  # as pickle does: by its name, which is all that a reader takes
        else:
            raise _RefusedError(f"a value of the type {kind.__module__}.{kind.__qualname__}")
        dtype = np.lib.format.dtype_to_descr(found.dtype) if found.dtype.names else found.dtype.str
        if found.dtype.hasobject or _dtype_of(dtype) != found.dtype:
            raise _RefusedError(f"an array of the dtype {found.dtype}")
        content = pickle.PickleBuffer(found.tobytes())
        return _make_array, (content, dtype, found.shape, isinstance(value, np.generic))


class _Decoder(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != (__name__, _make_array.__name__):
            raise pickle.UnpicklingError(f"packed objects hold no code, but these name {module}.{name}")
        return _make_array


def _decode(data: memoryview, start: int, end: int) -> Any:
    """Return the object of a part of the file; its arrays are views of the file."""
    (num_arrays,) = struct.unpack_from("<I", data, start)
    places = struct.unpack_from(f"<{2 * num_arrays}Q", data, start + 4)
    arrays = [data[at : at + size] for at, size in zip(places[::2], places[1::2], strict=True)]
    content = data[start + 4 + 16 * num_arrays : places[0] if places else end]
    return _Decoder(io.BytesIO(content), buffers=arrays).load()


def _make_array(content: Any, dtype: Any, shape: tuple[int, ...], is_scalar: bool) -> Any:
    found: Any = np.ndarray(shape, _dtype_of(dtype), content)
    return found[()].copy() if is_scalar else found


def _dtype_of(described: Any) -> np.dtype[Any]:
    return np.lib.format.descr_to_dtype(described) if isinstance(described, list) else np.dtype(described)
