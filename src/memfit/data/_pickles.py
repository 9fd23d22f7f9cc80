"""Turn pickles, or what a function gives, into one packed store, and measure what ranks save by mapping it.

This module's functions run in a child process: unpickling runs whatever code a pickle names.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import pkgutil
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from filelock import Timeout

from memfit.data._packed import PackedDataset, source_of, write_packed
from memfit.data._publish import locked, panel_lock
from memfit.errors import DataError
from memfit.files import open_own
from memfit.memory import ProcReader
from memfit.units import natural_order

#: The items that are compared with the store, drawn at random from all.
NUM_COMPARED = 100
#: Ranks are measured with the first items, up to this size as a pickle: each rank holds them as Python objects.
_SAMPLE_BYTES = 16 << 20
#: So long a killed process may take to end, and to give up its lock.
_DEATH_SECONDS = 10


def pack_source(words: Sequence[str], path: str, *, ranks: int, scratch: str) -> dict[str, Any]:
    """Pack pickles or an iterable into a new folder, or find the folder that was made of the same files.

    ``words`` are files and patterns, or one ``module:function`` whose result is iterated. A pickle holds a list of
    items, or one item; one file at a time is in memory. ``ranks`` processes are measured with the list and with the
    store. ``scratch`` is the caller's folder for the measured sample. Raises `DataError`, and leaves nothing behind."""
    folder = Path(path).absolute()
    target = words[0] if len(words) == 1 and _is_target(words[0]) else ""
    files = [] if target else find_pickles(words)
    facts: list[dict[str, Any]] = []
    items = _Items(_of_target(target) if target else _of_files(files, facts))
    found = {"path": str(folder), "num_files": len(files), "source_bytes": sum(file.stat().st_size for file in files)}
    with locked(folder):
        if folder.exists() and files and _made_of(folder, files):
            data = PackedDataset.open(folder, verify="full")
            facts_now = {"num_items": len(data), "bytes": data.nbytes, "num_compared": 0, "ranks": None}
            return {**found, "reused": True, **facts_now}
        with open(Path(scratch) / "sample", "wb") as sample:
            write_packed(items.taken(sample), folder, None if target else facts, items.compare, lambda _: items.place)
    data = PackedDataset.open(folder)
    found |= {"reused": False, "num_items": len(data), "bytes": data.nbytes, "num_compared": len(items.drawn)}
    return found | {"ranks": _measure(data, Path(scratch) / "sample", items.num_sampled, ranks) if ranks else None}


def find_pickles(words: Sequence[str]) -> list[Path]:
    """Return the files that names and patterns stand for, each once, in natural order; refuse one without a file."""
    found: dict[Path, None] = {}
    for word in words:
        anchor = Path(Path(word).anchor)
        files = [Path(word)] if Path(word).is_file() else []
        if not files and set("*?[") & set(word):
            files = [file for file in anchor.glob(str(Path(word).relative_to(anchor))) if file.is_file()]
        if not files:
            raise DataError(
                f"'{word}' names no file" + (": it is a folder." if Path(word).is_dir() else "."),
                rule="a source is files, patterns that find some, or one module:function that gives an iterable.",
                remedy=f"look with ls {word}; a folder's pickles are 'folder/*.pkl'",
            )
        found |= dict.fromkeys(files)
    return sorted(found, key=natural_order)


def remove_leftovers(path: Path) -> None:
    """Remove what a killed writer of a folder left beside it, unless another one writes there now."""
    path = path.absolute()
    with suppress(Timeout, OSError), panel_lock(path).acquire(timeout=_DEATH_SECONDS) as lock:
        shutil.rmtree(path.with_name(f".{path.name}.building"), ignore_errors=True)
        if not path.exists():
            Path(lock.lock_file).unlink()


def _is_target(word: str) -> bool:
    return re.fullmatch(r"[\w.]+:[\w.]+", word) is not None and not Path(word).exists()


def _of_target(target: str) -> Iterator[tuple[str, Any]]:
    """Yield the items of what a function gives, each with its place."""
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(
            f"'{target}' names no code: {error}",
            rule="a function is written module:function, and its module is imported from this folder or installed.",
            remedy="correct the name, or give the command in the folder that holds the module",
        ) from error
    given = found() if callable(found) else found
    if isinstance(given, str | bytes | dict) or not isinstance(given, Iterable):
        raise DataError(
            f"'{target}' gives a {type(given).__name__}.",
            rule="it gives an iterable of items: a list, or a generator.",
            remedy="return a list of the items, or yield them",
        )
    yield from ((f"{target}, item {number}", item) for number, item in enumerate(given))


def _of_files(files: Sequence[Path], facts: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the items of pickles, each with its place; adds each file's facts when all of it was read."""
    for file in files:
        with _opened(file) as opened:
            about = _facts(file, opened)
            opened.seek(0)
            number, size = 0, about["bytes"]
            while opened.tell() < size:
                found = _load(file, opened)
                for item in found if type(found) is list else [found]:
                    yield f"{file}, item {number}", item
                    number += 1
                found = item = None  # else it stays until the next one is loaded
        facts.append(about)


def _opened(file: Path) -> BufferedReader:
    try:
        return cast("BufferedReader", open_own(file.resolve()))
    except OSError as error:
        raise DataError(
            f"{file} is not unpickled: {error.strerror}.",
            rule="a pickle runs code as whoever loads it, so only your own files are loaded; root loads root's alone.",
            remedy=f"look at what it holds: python -m pickletools {file}; if you trust it, copy it: cp {file} mine.pkl",
        ) from error


def _facts(file: Path, opened: BufferedReader) -> dict[str, Any]:
    digest = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"name": file.name, "bytes": os.fstat(opened.fileno()).st_size, "blake2b": digest}


def _made_of(folder: Path, files: Sequence[Path]) -> bool:
    """Return whether a folder holds what was packed of files with these names and bytes."""
    try:
        source = source_of(folder)
    except DataError:
        return False
    if source is None or [one["bytes"] for one in source] != [file.stat().st_size for file in files]:
        return False
    for file, one in zip(files, source, strict=True):
        with _opened(file) as opened:
            if _facts(file, opened) != one:
                return False
    return True


def _load(file: Path, opened: BufferedReader) -> Any:
    try:
        return pickle.load(opened)
    except MemoryError:
        raise
    except Exception as error:
        raise DataError(
            f"{file} cannot be unpickled ({type(error).__name__}: {error}).",
            rule="a file holds whole pickles, and the classes that they name can be imported in this folder.",
            remedy="name pickles alone, and give the command where the modules of their classes are found",
        ) from error


@dataclass
class _Items:
    """Items on their way into a store: their keys are checked, and what is compared and measured of them is kept.
    ``place`` is that of the last item. ``drawn`` has number and digest of the items that are compared, each as likely
    as another. The first ``num_sampled`` items are in the sample."""

    source: Iterator[tuple[str, Any]]
    place: str = ""
    drawn: list[tuple[int, str]] = field(default_factory=list)
    num_sampled: int = 0

    def taken(self, sample: BinaryIO) -> Iterator[Any]:
        keys, number, draw = None, -1, random.Random(0)
        pickler: pickle.Pickler | None = pickle.Pickler(sample, protocol=5)
        for number, (place, item) in enumerate(self.source):
            self.place, found = place, frozenset(item) if isinstance(item, dict) else None
            keys = found if number == 0 else keys
            if found != keys:
                raise _ragged(place, keys, found)
            yield item
            at = number if number < NUM_COMPARED else draw.randrange(number + 1)
            if at < NUM_COMPARED:
                self.drawn[at : at + 1] = [(number, digest_of(item))]
            if pickler is not None:
                pickler.dump(item)
                if sample.tell() <= _SAMPLE_BYTES:
                    self.num_sampled += 1
                else:
                    pickler = None  # it holds all that it wrote
        if number < 0:
            raise DataError(
                "there is no item.", rule="a store holds at least one.", remedy="name files that hold items"
            )

    def compare(self, data: PackedDataset) -> None:
        for number, digest in self.drawn:
            if digest_of(data[number]) != digest:
                raise DataError(
                    f"item {number} of all is not equal to what was packed.",
                    rule=f"{len(self.drawn)} items are read back and compared before the store gets its name.",
                    remedy="give the same command again; if it fails for the same item, report that item",
                )


def _ragged(place: str, first: frozenset[Any] | None, found: frozenset[Any] | None) -> DataError:
    if first is None or found is None:
        what = "it is a dict, and the first item is none" if first is None else "it is no dict, as the first item is"
    else:
        parts = [("lacks", first - found), ("also has", found - first)]
        what = "it " + " and ".join(f"{verb} {', '.join(sorted(map(repr, some)))}" for verb, some in parts if some)
    return DataError(
        f"{place}: {what}.",
        rule="all items of a store have the keys of the first one.",
        remedy="give every item the same keys, with None where there is no value; or pack two stores",
    )


def digest_of(value: Any) -> str:
    """Return a hash of an object's types and content, the same for a tensor as for its array."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest.update, value, ())
    return digest.hexdigest()


def _feed(update: Callable[[bytes], object], value: Any, above: tuple[int, ...]) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.numpy(force=True)
    kind = "array" if isinstance(value, np.ndarray) else type(value).__name__
    parts: list[Any] = []
    if isinstance(value, np.ndarray | np.generic):
        found = np.asarray(value)
        kind, content = f"{kind} {found.dtype!r} {found.shape}", found.tobytes()
    elif id(value) in above:  # a list that holds itself
        kind, content = "above", b"%d" % above.index(id(value))
    elif isinstance(value, dict | list | tuple | set | frozenset):
        if isinstance(value, dict):
            parts = [part for pair in value.items() for part in pair]
        else:
            parts = sorted(map(digest_of, value)) if isinstance(value, set | frozenset) else list(value)
        content = b"%d" % len(parts)
    elif isinstance(value, bytes | bytearray):
        content = bytes(value)
    else:  # text of any characters; an int's decimal digits have a limit
        text = f"{value:x}" if type(value) is int else value if isinstance(value, str) else repr(value)
        content = text.encode("utf-8", "surrogatepass")
    update(f"{kind}:{len(content)}:".encode())
    update(content)
    for part in parts:
        _feed(update, part, (*above, id(value)))


def _measure(data: PackedDataset, sample: Path, count: int, ranks: int) -> dict[str, Any] | None:
    """Return what processes hold with a list of the first items and with the store: sums of PSS above empty ones. None
    where it cannot be measured: not on Linux, or if the first item alone is larger than the sample may be."""
    reader, sizes = ProcReader(), {}
    if not count or reader.rollup(os.getpid()) is None:
        return None
    for what in ("empty", "list", "store"):
        words = [what, str(sample), str(data.path), str(count)]
        command = [sys.executable, "-c", f"from {__name__} import hold; hold()", *words]
        with ExitStack() as stack:
            pipe = subprocess.PIPE
            started = [stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe)) for _ in range(ranks)]
            if not all(one.stdout is not None and one.stdout.readline() for one in started):
                return None
            sizes[what] = sum(found.pss for one in started if (found := reader.rollup(one.pid)) is not None)
    above = {f"{what}_bytes": max(0, sizes[what] - sizes["empty"]) for what in ("list", "store")}
    return {"num_ranks": ranks, "num_items": count, "empty_bytes": sizes["empty"], **above}


def hold() -> None:
    """Be a rank: hold the first items, say so, and stay until stdin ends."""
    what, sample, path, count = sys.argv[1:]
    held: Any = None
    if what == "list":
        with open(sample, "rb") as file:
            unpickler = pickle.Unpickler(file)
            held = [unpickler.load() for _ in range(int(count))]
    elif what == "store":
        held = PackedDataset.open(path, verify="sizes")
        for number in range(int(count)):
            pickle.dumps(held[number])  # it reads the arrays too, which are views of the file
    print("ready", flush=True)
    sys.stdin.read()
