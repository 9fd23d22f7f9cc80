"""Python objects as bytes and back: plain values and arrays, each behind one byte that says its kind; no code in them.

A value is its tag and then, little-endian: nothing (None, True, False); its number (int8, int64, float64); its length
as one byte or eight, and its bytes (integers beyond 64 bits, text as UTF-8, bytes); its count and its values one after
another (lists, tuples, dicts as key, value, key, value); or the length of its dtype's text, its number of axes, that
text, the shape, zeros up to the dtype's alignment in the file, and the values in C order (arrays, NumPy's scalars).
"""

from __future__ import annotations

import ast
import struct
import sys
from functools import lru_cache
from typing import Any

import numpy as np

#: How deep lists, tuples and dicts may lie in one another; a list that holds itself goes beyond it.
MAX_DEPTH = 100

_NONE, _TRUE, _FALSE, _INT8, _INT64, _FLOAT = range(6)
_BIG, _TEXT, _BYTES, _LIST, _TUPLE, _DICT = range(6, 18, 2)  # by a length of one byte; by one of eight: the next tag
_ARRAY, _SCALAR = 18, 19

_int8 = struct.Struct("<Bb")
_int64 = struct.Struct("<Bq")
_float = struct.Struct("<Bd")
_short = struct.Struct("<BB")
_long = struct.Struct("<BQ")
_array = struct.Struct("<BHB")
_read_int8 = struct.Struct("<b").unpack_from
_read_int64 = struct.Struct("<q").unpack_from
_read_float = struct.Struct("<d").unpack_from
_read_long = struct.Struct("<Q").unpack_from
_read_array = struct.Struct("<HB").unpack_from


class RefusedError(Exception):
    """A value that has no encoding.

    Attributes:
        why: What it is.
        place: Where it lies in the object, for example ``['words'][3]``.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.place = ""


class Encoder:
    """Appends values to a buffer that its owner empties.

    Attributes:
        buffer: The bytes since it was last emptied.
        start: The place in the file of the buffer's first byte, which the alignment of arrays counts from.

    Example:
        >>> encoder = Encoder()
        >>> encoder.put({"id": 7, "words": ["a", "b"]})
        >>> decode(bytes(encoder.buffer), 0, memoryview(encoder.buffer), 0)[0]
        {'id': 7, 'words': ['a', 'b']}
    """

    def __init__(self, start: int = 0) -> None:
        self.buffer = bytearray()
        self.start = start

    def put(self, value: Any, depth: int = 0) -> None:
        """Append one value.

        Raises:
            RefusedError: If it, or one within it, is of a kind that has no encoding.
        """
        kind = type(value)
        if kind is str:
            self._sized(_TEXT, value.encode("utf-8", "surrogatepass"))
        elif kind is int:
            self._integer(value)
        elif kind is float:
            self.buffer += _float.pack(_FLOAT, value)
        elif kind is dict:
            self._mapping(value, depth)
        elif kind is list or kind is tuple:
            self._sequence(_LIST if kind is list else _TUPLE, value, depth)
        elif kind is bytes:
            self._sized(_BYTES, value)
        elif value is None or kind is bool:
            self.buffer.append(_NONE if value is None else _TRUE if value else _FALSE)
        else:
            self._numbers(value, kind)

    def _integer(self, value: int) -> None:
        if -128 <= value < 128:
            self.buffer += _int8.pack(_INT8, value)
        elif -(1 << 63) <= value < 1 << 63:
            self.buffer += _int64.pack(_INT64, value)
        else:
            self._sized(_BIG, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))

    def _sized(self, tag: int, content: bytes) -> None:
        self._count(tag, len(content))
        self.buffer += content

    def _count(self, tag: int, count: int) -> None:
        self.buffer += _short.pack(tag, count) if count < 256 else _long.pack(tag + 1, count)

    def _sequence(self, tag: int, values: Any, depth: int) -> None:
        _check_depth(depth)
        self._count(tag, len(values))
        for number, value in enumerate(values):
            try:
                self.put(value, depth + 1)
            except RefusedError as error:
                error.place = f"[{number}]{error.place}"
                raise

    def _mapping(self, values: dict[Any, Any], depth: int) -> None:
        _check_depth(depth)
        self._count(_DICT, len(values))
        for key, value in values.items():
            try:
                self.put(key, depth + 1)
                self.put(value, depth + 1)
            except RefusedError as error:
                error.place = f"[{key!r}]{error.place}"
                raise

    def _numbers(self, value: Any, kind: type) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            try:
                array = value.numpy(force=True)
            except (TypeError, RuntimeError) as error:
                raise RefusedError(f"a tensor of {value.dtype}, {value.layout} ({error})") from None
        elif kind is np.ndarray or kind is np.memmap or isinstance(value, np.generic):
            array = np.asarray(value)
            if isinstance(value, np.str_ | np.bytes_) and len(array[()]) != len(value):
                raise RefusedError(f"a numpy.{kind.__name__} that ends with a zero, which NumPy's arrays drop")
        else:
            raise RefusedError(f"a value of the type {kind.__module__}.{kind.__qualname__}")
        text = repr(np.lib.format.dtype_to_descr(array.dtype) if array.dtype.names else array.dtype.str).encode()
        if array.dtype.hasobject or len(text) >= 1 << 16 or _dtype_of(text) != array.dtype:
            raise RefusedError(f"an array of the dtype {array.dtype}")
        self.buffer += _array.pack(_SCALAR if isinstance(value, np.generic) else _ARRAY, len(text), array.ndim)
        self.buffer += text + struct.pack(f"<{array.ndim}Q", *array.shape)
        self.buffer += bytes(-(self.start + len(self.buffer)) % array.dtype.alignment)
        self.buffer += array.tobytes()


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise RefusedError(f"nested more than {MAX_DEPTH} deep")


@lru_cache(maxsize=1024)
def _dtype_of(text: bytes) -> np.dtype[Any]:
    descr = ast.literal_eval(text.decode())
    return np.lib.format.descr_to_dtype(descr) if isinstance(descr, list) else np.dtype(descr)


def decode(raw: bytes | memoryview, at: int, file: memoryview, start: int) -> tuple[Any, int]:
    """A value, and the place after it. Arrays are views of the file.

    Args:
        raw: A part of the file, or all of it; of bytes a small value is had sooner.
        at: The place of its tag in ``raw``.
        file: The whole file.
        start: The place of ``raw`` in the file.
    """
    tag = raw[at]
    at += 1
    if tag == _TEXT:
        end = at + 1 + raw[at]
        return str(raw[at + 1 : end], "utf-8", "surrogatepass"), end
    if tag < _BIG:
        return _decode_fixed(tag, raw, at)
    if tag >= _ARRAY:
        return _decode_array(tag, raw, at, file, start)
    if tag & 1:
        (count,) = _read_long(raw, at)
        tag -= 1
        at += 8
    else:
        count = raw[at]
        at += 1
    if tag == _DICT:
        mapping: dict[Any, Any] = {}
        for _ in range(count):
            key, at = decode(raw, at, file, start)
            mapping[key], at = decode(raw, at, file, start)
        return mapping, at
    if tag in (_LIST, _TUPLE):
        values: list[Any] = []
        for _ in range(count):
            value, at = decode(raw, at, file, start)
            values.append(value)
        return (values if tag == _LIST else tuple(values)), at
    content = raw[at : at + count]
    if tag == _TEXT:
        return str(content, "utf-8", "surrogatepass"), at + count
    return (bytes(content) if tag == _BYTES else int.from_bytes(content, "little", signed=True)), at + count


def _decode_fixed(tag: int, raw: bytes | memoryview, at: int) -> tuple[Any, int]:
    if tag == _INT8:
        return _read_int8(raw, at)[0], at + 1
    if tag == _INT64:
        return _read_int64(raw, at)[0], at + 8
    if tag == _FLOAT:
        return _read_float(raw, at)[0], at + 8
    return (None, True, False)[tag], at


def _decode_array(tag: int, raw: bytes | memoryview, at: int, file: memoryview, start: int) -> tuple[Any, int]:
    length, ndim = _read_array(raw, at)
    at += 3
    dtype = _dtype_of(bytes(raw[at : at + length]))
    at += length
    shape = struct.unpack_from(f"<{ndim}Q", raw, at)
    at += 8 * ndim
    at += -(start + at) % dtype.alignment
    array: Any = np.ndarray(shape, dtype, file, start + at)
    return (array[()].copy() if tag == _SCALAR else array), at + array.nbytes
