"""Order the versions of panels in a cache folder, and remove old ones."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from memfit.data._manifest import MANIFEST, Manifest
from memfit.data._publish import panel_lock, sweep
from memfit.errors import DataError, check_counts


@dataclass(frozen=True)
class Version:
    """What was decided about a version in a cache folder.

    Attributes:
        path: Its folder.
        removed: Whether it was removed; with ``dry_run``, whether it would be.
        reason: Why it stays; empty for one that goes.
        freed_bytes: The bytes of its files, if it goes.
    """

    path: Path
    removed: bool
    reason: str
    freed_bytes: int


def versions(directory: Path) -> list[Path]:
    """Return the folders of the panels in a cache folder, oldest first.

    A version comes after the one that it was appended to. Times order only unrelated panels: a copy changes them.
    """
    times = {file.parent.resolve(): file.stat().st_mtime_ns for file in directory.glob(f"[!.]*/{MANIFEST}")}
    parents = {path: _parent(path) for path in times}
    made, depth = dict(times), dict.fromkeys(times, 0)
    for path, time in times.items():
        ancestor = parents[path]
        while ancestor in parents and depth[path] < len(parents):
            made[ancestor], depth[path] = min(made[ancestor], time), depth[path] + 1
            ancestor = parents[ancestor]
    return sorted(times, key=lambda path: (made[path], depth[path], path))


def _parent(path: Path) -> Path | None:
    """Return the folder of the version that a panel was appended to."""
    with suppress(DataError, OSError):
        if parent := Manifest.read(path).key.get("parent"):
            return path.with_name(parent[:16])
    return None


def newest(path: Path) -> Path:
    if (path / MANIFEST).exists():
        return path
    found = versions(path)
    if not found:
        raise DataError(
            f"{path} holds no panel." if path.is_dir() else f"{path} is no folder.",
            rule=f"a panel is a folder with a {MANIFEST}; a cache folder holds such folders.",
            remedy=f"build one there: memfit panel build SOURCE --index date,code --features ... -o {path}",
        )
    return found[-1]


def prune(
    directory: Path | str, *, keep: int = 1, dry_run: bool = False, proc: Path = Path("/proc")
) -> tuple[Version, ...]:
    """Remove the old panels of a cache folder, and what killed writers left there.

    The newest ``keep`` stay. So does one whose lock is held, or that a process has mapped (``/proc/<pid>/maps``, as far
    as this user may look).

    Args:
        directory: The cache folder.
        keep: How many of the newest stay, at least 1.
        dry_run: Only say what would be removed.
        proc: Where the kernel lists processes.

    Returns:
        What was decided about each version, oldest first.

    Raises:
        DataError: If ``keep`` is below 1 or there is no panel.

    Example:
        >>> import tempfile, pyarrow as pa
        >>> from memfit.data import Panel
        >>> folder = tempfile.mkdtemp()
        >>> for value in (1.0, 2.0):
        ...     rows = pa.table({"date": ["2024-01-02"], "code": ["A"], "close": [value]})
        ...     panel = Panel.build(rows, folder, features=["close"])
        >>> [version.removed for version in prune(folder)]
        [True, False]
    """
    check_counts(DataError, 1, keep=keep)
    folder = Path(directory)
    newest(folder)
    found = versions(folder)
    files = {path: [file.stat() for file in path.iterdir()] for path in found}
    decided = []
    for number, path in enumerate(found):
        if number >= len(found) - keep:
            reason = f"is among the newest {keep}" if keep > 1 else "is the newest"
        else:
            reason = _remove(path, [file.st_ino for file in files[path]], proc, dry_run=dry_run)
        freed = 0 if reason else sum(file.st_size for file in files[path])
        decided.append(Version(path, not reason, reason, freed))
    if not dry_run:
        sweep(folder.resolve() / "-")
    return tuple(decided)


def _remove(path: Path, inodes: Sequence[int], proc: Path, *, dry_run: bool) -> str:
    """Remove a panel's folder, or return why it has to stay."""
    try:
        with panel_lock(path).acquire(timeout=0):
            users = _users(path.name, inodes, proc)
            if not users and not dry_run:
                # Who maps it between the look and the renaming is seen by the second look.
                aside = path.rename(path.with_name(f".{path.name}.removing"))
                users = _users(aside.name, inodes, proc)
                if users:
                    aside.rename(path)
                else:
                    shutil.rmtree(aside)
    except Timeout:
        return "is being written or copied: its lock is held"
    return f"is mapped by {', '.join(f'process {pid}' for pid in users[:3])}" if users else ""


def _users(folder: str, inodes: Sequence[int], proc: Path) -> list[int]:
    wanted = {str(inode) for inode in inodes}
    found = []
    for entry in proc.glob("[0-9]*") if proc.is_dir() else ():
        try:
            lines = (entry / "maps").read_bytes().decode(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            parts = line.split(maxsplit=5)
            if len(parts) == 6 and parts[4] in wanted and Path(parts[5]).parent.name == folder:
                found.append(int(entry.name))
                break
    return found
