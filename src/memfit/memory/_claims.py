"""The host's list of runs: what each has lent, so that several supervisors share one budget and each run is found.

The list is a folder that every user of the host may write to (mode 1777, as ``/tmp``). A run's entry is one file, held
by an exclusive ``flock`` as long as its supervisor lives: a lock, unlike a process id, is never another's. The entry is
written in place, in blocks that are taken when it is made, so that it can be brought up to date on a full disk too; a
checksum tells a torn one. Only the standard library is imported here, as in all that a job's watcher may load.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

_SUFFIX, _HOST_LOCK = ".run", "host.lock"
_BLOCK_BYTES, _MOST_BYTES = 4096, 1 << 16
#: How long to wait for another supervisor's decision, which takes milliseconds; one that is stopped holds it longer.
_PATIENCE_SECONDS, _STEP_SECONDS = 10.0, 0.002
#: How often to look whether the jobs of a dead supervisor still run.
_ORPHANS_SECONDS = 1.0


@dataclass(frozen=True)
class Entry:
    """One run's line in the host's list.

    Attributes:
        run: The run directory.
        host: The host's name.
        uid: Whose it is: the owner of the entry's file.
        pid: The supervisor's process id; only to be used while ``alive``.
        started: When the supervisor began, in Unix seconds.
        used_bytes: What its jobs use.
        unused_bytes: What it has lent to jobs that do not use it yet.
        group: The folder of its parent control group, or empty.
        alive: Whether its supervisor lives.
    """

    run: Path
    host: str
    uid: int
    pid: int
    started: float
    used_bytes: int
    unused_bytes: int
    group: str
    alive: bool = True


@dataclass(frozen=True)
class Others:
    """All other live runs of this host together.

    Attributes:
        num: How many there are.
        used_bytes: What their jobs use.
        unused_bytes: What they have lent to jobs that do not use it yet.
    """

    num: int = 0
    used_bytes: int = 0
    unused_bytes: int = 0


class Claims:
    """This run's entry in the host's list, from now until ``close``.

    A list that cannot be written (a full disk when the run starts, a folder that another user closed) fails nothing:
    the run goes on without an entry, and tries again whenever its claims change.

    Args:
        run: The run directory.
        folder: The list; ``memfit-claims`` in the folder for temporary files when None.
        group: The folder of the run's parent control group, so that what a dead run left there can be swept.

    Example:
        >>> list_of_runs = Path(tempfile.mkdtemp())
        >>> mine, other = Claims(Path("/runs/a"), folder=list_of_runs), Claims(Path("/runs/b"), folder=list_of_runs)
        >>> other.write(used_bytes=300, unused_bytes=200)
        >>> with mine.deciding() as others:
        ...     others
        Others(num=1, used_bytes=300, unused_bytes=200)
        >>> mine.close(); other.close()
    """

    def __init__(self, run: Path, *, folder: Path | None = None, group: str = "") -> None:
        self._folder = _folder_of(folder)
        self._entry = Entry(run.absolute(), socket.gethostname(), os.geteuid(), os.getpid(), time.time(), 0, 0, group)
        name = hashlib.sha256(os.fsencode(self._entry.run)).hexdigest()[:16]
        self._path = self._folder / f"{name}-{self._entry.uid}{_SUFFIX}"
        self._descriptor: int | None = None
        self._written: Entry | None = None
        self._patience = _PATIENCE_SECONDS
        self._orphans: dict[Path, tuple[float, bool]] = {}
        self._put()

    def others(self) -> Others:
        """What all other live runs on this host took and lent."""
        found = (_look(path) for path in _files(self._folder) if path != str(self._path))
        entries = [entry for entry in found if entry is not None and self._counts(entry)]
        used_bytes = sum(entry.used_bytes for entry in entries)
        return Others(len(entries), used_bytes, sum(entry.unused_bytes for entry in entries))

    @contextmanager
    def deciding(self) -> Iterator[Others]:
        """Hold the host's lock; gives what all other live runs on this host took and lent.

        What is written within the block is seen by whoever decides next, so no two runs lend the same free bytes. A
        holder that does not go on (it was stopped) is waited for ten seconds and then passed by.
        """
        lock = self._lock_host()
        try:
            yield self.others()
        finally:
            if lock is not None:
                os.close(lock)

    def write(self, *, used_bytes: int, unused_bytes: int, group: str | None = None) -> None:
        """Bring the own entry up to date; costs nothing when nothing changed."""
        group = self._entry.group if group is None else group
        self._entry = replace(self._entry, used_bytes=used_bytes, unused_bytes=unused_bytes, group=group)
        self._put()

    def close(self, *, keep: bool = False) -> None:
        """Take the entry off the list; with ``keep`` it stays, for jobs that go on without a supervisor."""
        if self._descriptor is None:
            return
        if not keep:
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = None

    def _counts(self, entry: Entry) -> bool:
        if entry.run == self._entry.run or entry.host != self._entry.host:
            return False
        if entry.alive:
            return True
        looked, found = self._orphans.get(entry.run, (0.0, False))
        if time.monotonic() - looked > _ORPHANS_SECONDS:
            found = _is_orphaned(entry.run)
            self._orphans[entry.run] = (time.monotonic(), found)
        return found

    def _lock_host(self) -> int | None:
        """The descriptor that holds the host's lock, or None when it cannot be had."""
        try:
            _make_folder(self._folder)
            lock = _open_shared(self._folder / _HOST_LOCK)
        except OSError:
            return None
        end = time.monotonic() + self._patience
        while not _try_lock(lock):
            if time.monotonic() > end:
                os.close(lock)
                self._patience = _STEP_SECONDS  # not ten seconds again at each step
                return None
            time.sleep(_STEP_SECONDS)
        self._patience = _PATIENCE_SECONDS
        return lock

    def _put(self) -> None:
        if self._written == self._entry:
            return
        try:
            if self._descriptor is None:
                _make_folder(self._folder)
                self._descriptor = _take(self._path)
            if self._descriptor is not None:
                record = _encode(self._entry)
                if os.pwrite(self._descriptor, record, 0) == len(record):
                    self._written = self._entry
        except OSError:  # a full disk, or a folder that is not to be written to: tried again at the next change
            return


def list_entries(folder: Path | None = None) -> list[Entry]:
    """Every run in the host's list, those of other users too, oldest first; what is damaged is passed over.

    Args:
        folder: The list; ``memfit-claims`` in the folder for temporary files when None.
    """
    entries = [entry for path in _files(_folder_of(folder)) if (entry := _look(path)) is not None]
    return sorted(entries, key=lambda entry: (entry.started, entry.run))


def sweep_entries(folder: Path | None = None) -> list[Entry]:
    """Take this user's entries off the list whose supervisor is dead and of which no job runs any more.

    Returns:
        What was taken off, so that what those runs left in their control groups can be swept too.
    """
    folder, removed = _folder_of(folder), []
    for path in folder.glob(f"*{_SUFFIX}"):
        descriptor = _open_own(path)
        if descriptor is None:
            continue
        try:
            if not _try_lock(descriptor) or not _is_at(descriptor, path):
                continue  # its supervisor lives, or another sweep was here first
            entry = _decode(os.pread(descriptor, _MOST_BYTES, 0), os.geteuid())
            if entry is None and time.time() - os.fstat(descriptor).st_mtime < _PATIENCE_SECONDS:
                continue  # being made
            if entry is not None and (entry.host != socket.gethostname() or _is_orphaned(entry.run)):
                continue
            with contextlib.suppress(OSError):
                path.unlink()
                removed += [entry] if entry is not None else []
        finally:
            os.close(descriptor)
    return removed


def _files(folder: Path) -> list[str]:
    try:
        return [found.path for found in os.scandir(folder) if found.name.endswith(_SUFFIX)]
    except OSError:
        return []


def _folder_of(folder: Path | None) -> Path:
    return Path(tempfile.gettempdir()) / "memfit-claims" if folder is None else folder


def _make_folder(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True)
        folder.chmod(0o1777)  # mkdir's own mode is cut by the umask


def _open_shared(path: Path) -> int:
    """A file to lock that any user may have made: the kernel refuses O_CREAT on another's (protected_regular)."""
    for _ in range(3):
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with contextlib.suppress(FileExistsError):
            made = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
            os.fchmod(made, 0o644)
            return made
    raise FileNotFoundError(path)


def _take(path: Path) -> int | None:
    """The own entry's file, made if need be, with its lock; None while another process holds it."""
    for _ in range(50):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        if _try_lock(descriptor) and _is_at(descriptor, path):
            os.fchmod(descriptor, 0o644)
            return descriptor
        os.close(descriptor)
        time.sleep(_STEP_SECONDS)  # a look by list_entries holds a shared lock for an instant
    return None


def _open_own(path: Path) -> int | None:
    """A file of this user's, or None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    return None


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _look(path: str) -> Entry | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            return None
        for _ in range(3):  # a write may be under way
            entry = _decode(os.pread(descriptor, _MOST_BYTES, 0), found.st_uid)
            if entry is not None:
                return replace(entry, alive=not _try_lock(descriptor, fcntl.LOCK_SH))
            time.sleep(_STEP_SECONDS / 2)
        return None
    finally:
        os.close(descriptor)


def _encode(entry: Entry) -> bytes:
    """An entry as one line after its checksum, filled up to whole blocks."""
    fields = vars(entry) | {"run": str(entry.run)}
    text = json.dumps({name: value for name, value in fields.items() if name not in ("alive", "uid")}).encode()
    line = b"%08x %s\n" % (zlib.crc32(text), text)
    return line.ljust(-(-len(line) // _BLOCK_BYTES) * _BLOCK_BYTES)


def _decode(record: bytes, uid: int) -> Entry | None:
    """The entry in a record; None when it is torn, damaged or of another version.

    >>> entry = Entry(Path("/runs/a"), "host", 7, 42, 0.0, 5, 9, "")
    >>> _decode(_encode(entry), 7) == entry, _decode(_encode(entry).replace(b"42", b"43"), 7)
    (True, None)
    """
    checksum, _, text = record.partition(b"\n")[0].partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            return None
        found = json.loads(text)
        entry = Entry(**found | {"run": Path(found["run"]), "uid": uid})
        sizes = (entry.pid, entry.used_bytes, entry.unused_bytes)
        is_whole = all(type(size) is int and size >= 0 for size in sizes) and isinstance(entry.started, int | float)
        return entry if is_whole and entry.run.is_absolute() and isinstance(entry.group, str) else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _is_orphaned(run: Path) -> bool:
    return next(live_jobs(run), None) is not None


def live_jobs(run: Path) -> Iterator[str]:
    """The ids of a run's jobs that have a watcher: each holds a lock in its job's folder."""
    for path in sorted(run.glob("jobs/*/lock")):
        if (path.parent / "outcome.json").exists():
            continue  # it has ended, and its watcher ends within the instant
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            is_held = not _try_lock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)
        if is_held:
            yield path.parent.name
