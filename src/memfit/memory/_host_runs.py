"""Lists this user's runs on this host and what each has reserved, so that several supervisors share one budget.

Each run has one file in a folder that only its user may open. Its supervisor holds a ``flock`` on it while it lives.
It names the groups in which its jobs run: it counts against a limit that holds for them too, and against no other. What
other users' runs take is measured with everything else on the host. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.files import open_regular, refresh
from memfit.memory._cgroup import group_id, is_below, locate
from memfit.memory._footprint import HOST, Sizes
from memfit.memory._host import HIDDEN, REAL_ROOT, read_text
from memfit.memory._locks import is_locked, lock_file, try_lock

#: Names another folder, for hosts whose /var/tmp is not the same for all of a user's processes.
CLAIMS_VARIABLE = "MEMFIT_CLAIMS_DIR"

#: Every entry is written in one piece of this length, so that a shorter one leaves no rest of a longer one.
_ENTRY_BYTES = 1 << 14
#: How long to wait for another supervisor's decision, which takes milliseconds; one that is stopped holds it longer.
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Entry:
    """One run of this user; its ``pid`` is only valid while its supervisor is ``alive``. ``boot`` is the boot_id of its
    kernel, as a container has a host name of its own. ``group`` is the folder of its jobs' parent control group;
    ``groups`` are the ids of its own memory group and each visible one above, with ``sees_root`` up to the root."""

    run: Path
    host: str
    pid: int
    started: float
    used: Sizes = field(default_factory=Counter)
    unused: Sizes = field(default_factory=Counter)
    group: str = ""
    boot: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)
    sees_root: bool = True
    alive: bool = True


def place_here(root: Path = REAL_ROOT) -> dict[str, Any]:
    """Return where the jobs of this process run, as an entry has it; ``root`` as in `Budget.read`."""
    placement = locate(root, "memory")
    boot = (read_text(root / "proc/sys/kernel/random/boot_id") or socket.gethostname()).strip()
    groups = {group_id(one.directory): str(one.directory) for one in placement.groups} if placement else {}
    return {"boot": boot, "groups": groups, "sees_root": placement is None or not placement.hidden}


def claim_counts(limit: str, mine: Entry, other: Entry) -> bool:
    """Return whether what another run holds counts against the limit of mine with this id. It does where nobody sees
    whether its jobs run under that limit: to wait loses no work."""
    if not (mine.boot == other.boot if other.boot else mine.host == other.host):
        return False
    if limit in (HOST, HIDDEN, *other.groups) or not other.groups:
        return True
    return not other.sees_root and is_below(Path(mine.groups[limit]), next(iter(other.groups)))


@dataclass(frozen=True)
class Others:
    """The other live runs of this user on this host: how many, and their sums, by the id of a limit or a device."""

    num: Counter[str] = field(default_factory=Counter)
    used: Sizes = field(default_factory=Counter)
    unused: Sizes = field(default_factory=Counter)


class Claims:
    """This run's entry in its user's list, until ``close``. If the list cannot be used, the run goes on without an
    entry, ``problem`` says why, and each change tries again."""

    def __init__(
        self, run: Path, *, folder: Path | None = None, patience_seconds: float = _PATIENCE_SECONDS, **place: Any
    ) -> None:
        self._folder, self._most_patience = _path_of(folder), patience_seconds
        self._entry = Entry(run.absolute(), socket.gethostname(), os.getpid(), time.time(), **place or place_here())
        self._path = self._folder / f"{hashlib.sha256(os.fsencode(self._entry.run)).hexdigest()[:16]}.run"
        self._descriptor: int | None = None
        self._written: Entry | None = None
        self._patience = patience_seconds
        self.problem = ""
        self._put()

    def others(self) -> Others:
        found, mine = Others(), self._entry
        for _, one in _read_all(self._folder):
            if one.run == mine.run or not claim_counts(HOST, mine, one) or not (one.alive or _is_orphaned(one.run)):
                continue
            limits = [limit for limit in (HIDDEN, *mine.groups) if claim_counts(limit, mine, one)]
            found.num.update([HOST, *limits])
            for sums, sizes in ((found.used, one.used), (found.unused, one.unused)):
                sums.update(sizes | Counter(dict.fromkeys(limits, sizes[HOST])))
        return found

    @contextmanager
    def deciding(self) -> Iterator[Others]:
        """Hold the list's lock, so that no two runs give the same free bytes away; yield what the others have. A holder
        that was stopped is waited for once, and then passed by."""
        lock = None
        with contextlib.suppress(OSError):  # no list, or a file system without locks
            lock = lock_file(_own(self._folder) / "lock", self._patience)
        self._patience = 0.0 if lock is None else self._most_patience  # a stopped holder is waited for once
        try:
            yield self.others()
        finally:
            if lock is not None:
                os.close(lock)

    def write(self, *, used: Sizes, unused: Sizes, group: str | None = None) -> None:
        """Bring the entry up to date. A later start removes what is left in ``group``."""
        group = self._entry.group if group is None else group
        self._entry = replace(self._entry, used=used.copy(), unused=unused.copy(), group=group)
        self._put()

    def close(self, *, keep: bool = False) -> None:
        """Remove the entry; with ``keep`` it stays, for jobs that go on without a supervisor."""
        if self._descriptor is None:
            return
        if not keep:
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = None

    def _put(self) -> None:
        if self._written == self._entry:
            return
        try:
            if self._descriptor is None:
                with contextlib.suppress(FileExistsError):
                    self._folder.mkdir(mode=0o700, parents=True)
                self._descriptor = lock_file(_own(self._folder) / self._path.name)
            if self._descriptor is not None:
                os.pwrite(self._descriptor, json.dumps(vars(self._entry), default=str).encode().ljust(_ENTRY_BYTES), 0)
                self._written, self.problem = self._entry, ""
        except OSError as error:  # a full disk, or a folder that is another's: tried again at the next change
            self.problem = str(error)


def list_entries(folder: Path | None = None) -> list[Entry]:
    """Return every run of this user on this host, oldest first; damaged entries are left out."""
    return sorted((entry for _, entry in _read_all(_path_of(folder))), key=lambda entry: (entry.started, entry.run))


def sweep_entries(folder: Path | None = None) -> list[Entry]:
    """Remove the entries without a supervisor and without running jobs; return them."""
    removed = []
    for path, entry in _read_all(_path_of(folder)):
        if entry.alive or entry.host != socket.gethostname() or _is_orphaned(entry.run):
            continue
        lock = lock_file(path, 0.0)
        if lock is not None:  # else the run is being resumed
            path.unlink()
            os.close(lock)
            removed.append(entry)
    return removed


def _path_of(folder: Path | None) -> Path:
    # Not $TMPDIR nor $XDG_RUNTIME_DIR: docs/project/decisions/0017-claims-are-per-user.md.
    return folder or Path(os.environ.get(CLAIMS_VARIABLE) or f"/var/tmp/memfit-{os.geteuid()}")


def _own(folder: Path) -> Path:
    """Return the folder of a list, if it is there and this user's alone; else raise OSError."""
    found = os.lstat(folder)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
        return folder
    whose = f"it belongs to uid {found.st_uid}" if found.st_uid != os.geteuid() else "others may open it (chmod 700)"
    raise PermissionError(f"{folder} is not a folder of this user alone: {whose}")


def _read_all(folder: Path) -> list[tuple[Path, Entry]]:
    try:
        paths = list(_own(folder).glob("*.run"))
    except OSError:
        return []
    return [(path, entry) for path in paths if (entry := _read(path)) is not None]


def _read(path: Path) -> Entry | None:
    """Return an entry, or None if it is gone, damaged or another version's."""
    try:
        descriptor = open_regular(path)
    except OSError:
        return None
    try:
        for _ in range(3):  # a write may be under way
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found = json.loads(os.pread(descriptor, _ENTRY_BYTES, 0))
                sizes = {name: Counter({**found[name]}) for name in ("used", "unused")}
                alive = not try_lock(descriptor, fcntl.LOCK_SH)
                plain = {"run": Path(found["run"]), "started": float(found["started"]), "alive": alive}
                known = {one: found[one] for one in Entry.__dataclass_fields__ if one in found}  # a later memfit's too
                return Entry(**known | plain | sizes)
            time.sleep(0.001)
    finally:
        os.close(descriptor)
    return None


def _is_orphaned(run: Path) -> bool:
    """Return True if jobs go on without a supervisor, or may do so: the run's network drive does not answer."""
    try:
        return next(live_jobs(run), None) is not None
    except OSError:
        return True


def live_jobs(run: Path) -> Iterator[str]:
    """Yield the ids of a run's jobs that have a watcher: each holds a lock in its job's folder."""
    for folder in sorted(run.glob("jobs/*")):
        # One with an outcome has ended, and its watcher ends within the instant.
        if refresh(folder) and not (folder / "outcome.json").exists() and is_locked(folder / "lock"):
            yield folder.name
