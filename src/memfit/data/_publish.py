"""Write a folder whole or not at all: one writer at a time, aside, forced to disk, renamed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from memfit.errors import DataError
from memfit.files import sync_folder
from memfit.units import format_bytes

Progress = Callable[[int, int], None]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def panel_lock(path: Path) -> FileLock:
    return FileLock(path.with_name(f".{path.name}.lock"))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder that is written; after an error remove the lock's file while it is held."""
    lock = panel_lock(path)
    try:  # where none can be made, FileLock may wait for it for good
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(lock.lock_file, os.O_RDWR | os.O_CREAT, 0o644))
    except OSError as error:
        raise DataError(
            f"nothing can be written in {path.parent}: {error.strerror}.",
            rule=f"a folder is written under the lock of a file beside it, here {lock.lock_file}.",
            remedy="make that path usable, or name another one",
        ) from error
    with lock:
        try:
            yield
        except BaseException:
            with suppress(OSError):
                Path(lock.lock_file).unlink()
            raise


def sweep(path: Path) -> None:
    """Remove what killed writers of other panels left in a cache folder: those whose lock is free."""
    for aside in path.parent.glob(".*.building"):
        owner = aside.with_name(aside.name.removeprefix(".").removesuffix(".building"))
        if owner != path:
            with suppress(Timeout), panel_lock(owner).acquire(timeout=0):
                shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def writing(path: Path, what: str, needed: int | None = None) -> Iterator[Path]:
    """Give a folder to write into, under its lock; rename it into place at the end, remove it after an error. That of a
    full disk becomes a DataError which says ``what`` was to be written."""
    aside = path.with_name(f".{path.name}.building")
    shutil.rmtree(aside, ignore_errors=True)  # of a writer that was killed: its lock is held here
    try:
        aside.mkdir()
        yield aside
        sync_folder(aside)
        aside.rename(path)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if not isinstance(error, OSError) or error.errno not in _FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        need = "" if needed is None else f" it needs {format_bytes(needed)} ({needed} bytes) on disk;"
        raise DataError(
            f"{what} could not be written ({error.strerror}):{need} {format_bytes(free)} ({free} bytes) are free.",
            rule=f"the file system, the quota or ulimit -f of {path.parent} says so; nothing was left behind.",
            remedy="free space there, raise that limit, name another folder, or give fewer columns or objects",
        ) from error
    sync_folder(path.parent)


def source_changed() -> DataError:
    return DataError(
        "the source changed while the panel was built from it.",
        rule="the fingerprint was taken of the content before; nothing was left behind.",
        remedy="let its writer finish, then run again",
    )
