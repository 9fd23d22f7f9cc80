"""Locks on files: the kernel frees a lock when its holder ends, so a held lock proves that the holder lives."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from memfit.files import AWAY, REFUSED, open_regular


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(path: Path | str, seconds: float = 0.2) -> int | None:
    """Lock a file, made if need be, until the returned descriptor is closed; None if another process holds the lock.
    Waits at most ``seconds``: a process that looks whether the file is locked holds the lock for a moment."""
    until = time.monotonic() + seconds
    while True:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        if try_lock(descriptor) and is_at(descriptor, path):
            return descriptor
        os.close(descriptor)
        if time.monotonic() > until:
            return None
        time.sleep(0.01)


def is_locked(path: Path | str) -> bool:
    """Return whether a process holds a lock on this file; OSError if it cannot be asked, as on a dead network drive."""
    try:
        descriptor = open_regular(path)
    except OSError as error:
        if error.errno in REFUSED | {errno.ENOENT, errno.ENOTDIR}:
            return False
        raise
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def is_lost(descriptor: int) -> bool:
    """Return True if the server of a network drive has forgotten a lock that this process took on an open file. Only
    writes through its descriptor fail then. A server that does not answer shows the same. Seen with NFS 4.2."""
    try:
        os.pwrite(descriptor, b"\n", 0)
        os.fsync(descriptor)
    except OSError as error:
        return error.errno in AWAY
    return False


def is_at(descriptor: int, path: Path | str) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), Path(path).lstat())
    return False
