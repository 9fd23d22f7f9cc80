"""Turn pickles, or what a function gives, into one packed store.

This module's functions run in a child process: unpickling runs whatever code a pickle names.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import pkgutil
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from filelock import Timeout

from memfit.data._packed import PackedDataset, source_of, write_packed
from memfit.data._publish import locked, panel_lock
from memfit.errors import DataError
from memfit.files import open_own
from memfit.units import natural_order

#: So long a killed process may take to end, and to give up its lock.
_DEATH_SECONDS = 10


def pack_source(words: Sequence[str], path: str) -> dict[str, Any]:
    """Pack pickles or an iterable into a new folder, or find the folder that was made of the same files.

    ``words`` are files and patterns, or one ``module:function`` whose result is iterated. A pickle holds a list of
    items, or one item; one file at a time is in memory. Raises `DataError`, and leaves nothing behind."""
    folder, place = Path(path).absolute(), ""
    target = words[0] if len(words) == 1 and _is_target(words[0]) else ""
    files = [] if target else find_pickles(words)
    facts: list[dict[str, Any]] = []

    def items() -> Iterator[Any]:
        nonlocal place
        for place, item in _of_target(target) if target else _of_files(files, facts):  # noqa: B007 - an error names it
            yield item

    with locked(folder):
        reused = folder.exists() and bool(files) and _made_of(folder, files)
        if not reused:
            write_packed(items(), folder, None if target else facts, lambda _: place)
    data = PackedDataset.open(folder, verify="full" if reused else "sample")
    source_bytes = sum(file.stat().st_size for file in files)
    found = {"path": str(folder), "reused": reused, "num_files": len(files), "source_bytes": source_bytes}
    return found | {"num_items": len(data), "bytes": data.nbytes}


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
