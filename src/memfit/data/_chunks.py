"""Hashes of a file's chunks and checksums of its blocks, so that damage is found and its place named."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

#: Files are hashed in pieces of this size.
CHUNK_BYTES = 64 << 20
_SLICE_BYTES = 1 << 20

#: Files have checksums of pieces of this size, for a quick check of some of them.
BLOCK_BYTES = 1 << 20


def chunk_digests(path: Path, first: int = 0) -> Iterator[str]:
    """A BLAKE2b hash (128 bits, hex) of each 64 MiB of a file, by up to four threads, a MiB each in memory.

    Args:
        path: The file.
        first: The number of the chunk to begin with.
    """
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    offsets = range(first * CHUNK_BYTES, path.stat().st_size, CHUNK_BYTES)
    with ThreadPoolExecutor(max_workers=min(4, num_cpus)) as pool:
        yield from pool.map(lambda offset: _digest_chunk(path, offset), offsets)


def _digest_chunk(path: Path, offset: int) -> str:
    digest, left = blake2b(digest_size=16), CHUNK_BYTES
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while left and (piece := file.read(min(left, _SLICE_BYTES))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def block_sums(path: Path, numbers: Iterable[int] | None = None) -> Iterator[str]:
    """Yield the CRC-32 (8 hex digits) of each MiB of a file, or of those with these numbers.

    It reads the file without mapping it, one block at a time.
    """
    with open(path, "rb", buffering=0) as file:
        for number in range(-(-path.stat().st_size // BLOCK_BYTES)) if numbers is None else numbers:
            yield f"{zlib.crc32(os.pread(file.fileno(), BLOCK_BYTES, number * BLOCK_BYTES)):08x}"
