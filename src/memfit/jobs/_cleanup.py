"""What a job leaves behind: processes, and segments in /dev/shm that are named after a process of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from memfit.memory import JobGroup

#: Names of torch, the standard library's users, OpenMP and joblib, each with the number of the process that made it.
_SEGMENT = re.compile(r"(?:torch_|pym-|__KMP_REGISTERED_LIB_|joblib_memmapping_folder_)(\d+)(?:[_-]|$)")
_PATIENCE_SECONDS = 2.0
#: Helpers such as multiprocessing's resource tracker end by themselves just after their parent.
_LEAVING_SECONDS = 0.3
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})


def end_children() -> set[int]:
    """End what the job left running, all of which this process has inherited; which processes these were."""
    ended: set[int] = set()
    now = time.monotonic()
    while _has_children() and time.monotonic() < now + _LEAVING_SECONDS + _PATIENCE_SECONDS:
        if time.monotonic() > now + _LEAVING_SECONDS:
            left = _children()
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            ended |= left
        time.sleep(0.01)
    return ended


def end_session(pid: int) -> None:
    """End the processes that a job's first process started and that are still in its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_group(group: JobGroup, *, keep: bool) -> None:
    """End all processes in a job's control group and remove the group, unless it is to be kept."""
    if group.pids():
        group.kill()
    if not keep:
        group.remove()


def stop_targets(pid: int) -> set[int]:
    """Who is to hear that a job is to stop: its process and, where that is a shell, what the shell runs as well.

    A shell dies of SIGTERM at once, and what it runs hears of nothing. All processes of the job are not asked: the
    workers of a data loader would die of it under a trainer that is about to save.
    """
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return {pid}
    children = [int(word) for word in words] if name in _SHELLS else []
    return {pid}.union(*map(stop_targets, children))


def wait_for(pids: set[int], is_over: Callable[[], bool]) -> set[int]:
    """Wait until these children have ended or it is over; the exit codes of those that ended."""
    codes: set[int] = set()
    while pids and not is_over():
        for pid in list(pids):
            try:
                found, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # not inherited, or gone
                pids = pids - {pid}
                continue
            if found:
                codes.add(os.waitstatus_to_exitcode(status))
                pids = pids - {pid}
        time.sleep(0.02)
    return codes


def _has_children() -> bool:
    """Whether any child is alive; reaps the dead."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _children() -> set[int]:
    own = os.getpid()
    with suppress(OSError):
        return {int(word) for word in Path(f"/proc/{own}/task/{own}/children").read_text().split()}
    return set()


def remove_segments(pids: Iterable[int], *, since: float, folder: Path = Path("/dev/shm")) -> list[str]:
    """Remove what dead processes left in /dev/shm under names that hold their numbers; the names.

    Args:
        pids: The job's processes.
        since: Unix seconds of its start; what is older is another process's that had the same number.
        folder: Where shared memory has its names.
    """
    removed: list[str] = []
    ours = {str(pid) for pid in pids}
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return removed
    for name in names:
        found = _SEGMENT.match(name)
        if not found or found[1] not in ours or Path(f"/proc/{found[1]}").exists():
            continue
        path = folder / name
        with suppress(OSError):
            stat = path.lstat()
            if stat.st_uid != os.geteuid() or stat.st_mtime < since - 1:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(name)
    return removed
