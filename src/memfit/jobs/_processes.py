"""A job's processes: their start inside its group, bound to its shim, and their end with all that they leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from memfit.jobs._child import ERROR, REQUEST, RESULT, die_with
from memfit.memory import JobGroup
from memfit.rundir import write_masked

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
#: When memory does run out, let the kernel take a job and never the shim, the supervisor or a stranger.
_OOM_SCORE_ADJ = "500"
#: Names of torch, the standard library's users, OpenMP and joblib, each with the number of the process that made it.
_SEGMENT = re.compile(r"(?:torch_|pym-|__KMP_REGISTERED_LIB_|joblib_memmapping_folder_)(\d+)(?:[_-]|$)")
_PATIENCE_SECONDS = 2.0
#: Helpers such as multiprocessing's resource tracker end by themselves just after their parent.
_LEAVING_SECONDS = 0.3
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})


def become_subreaper() -> None:
    """Have orphaned grandchildren handed to this process, so that none escapes the watch (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spawn(job: Mapping[str, Any], job_dir: Path, group: JobGroup | None) -> subprocess.Popen[bytes]:
    """Start the process of a job; its program runs when this returns.

    Args:
        job: ``job.json``.
        job_dir: The folder of its files.
        group: The control group that it enters before its program begins.

    Raises:
        OSError: If its program, its folder or its group cannot be had.
    """
    if job["attempt"] > 1:
        for name in (RESULT, ERROR):
            (job_dir / name).unlink(missing_ok=True)
    command = list(job["command"])
    if job["target"] is not None:
        write_masked(job_dir / REQUEST, {"target": job["target"], "arguments": job["arguments"]}, durable=False)
        command = [sys.executable, "-m", "memfit.jobs", "child", str(job_dir)]
    watcher, limit_bytes = os.getpid(), job["data_limit_bytes"]

    def become() -> None:
        die_with(watcher)  # so no later attempt runs beside a job whose watcher died
        with contextlib.suppress(OSError):  # there is none but on Linux
            Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
        if group is not None:
            group.enter()
        if limit_bytes is not None:  # allocations beyond it fail in the program itself; the hard limit stays
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    with contextlib.ExitStack() as stack:
        out, err = (stack.enter_context(open(job_dir / name, "ab")) for name in ("out.log", "err.log"))
        has_stdin = job["stdin"] is not None and job["attempt"] == 1
        stdin = stack.enter_context(open(job["stdin"] if has_stdin else os.devnull, "rb"))
        try:
            return subprocess.Popen(
                command,
                stdin=stdin,
                stdout=out,
                stderr=err,
                cwd=job["cwd"],
                env={**os.environ, **job["env"]},
                start_new_session=True,
                preexec_fn=become,
            )
        except subprocess.SubprocessError as error:  # raised in ``become``, which tells no more
            raise OSError(errno.EACCES, "it cannot enter its group", str(group.path if group else "")) from error


def end_children() -> set[int]:
    """End what the job left running, all of which this process has inherited; which processes these were."""
    ended: set[int] = set()
    now = time.monotonic()
    while _has_children() and time.monotonic() < now + _LEAVING_SECONDS + _PATIENCE_SECONDS:
        if time.monotonic() > now + _LEAVING_SECONDS:
            left = _children()
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            ended |= left
        time.sleep(0.01)
    return ended


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
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _children() -> set[int]:
    own = os.getpid()
    with contextlib.suppress(OSError):
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
        with contextlib.suppress(OSError):
            stat = path.lstat()
            if stat.st_uid != os.geteuid() or stat.st_mtime < since - 1:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(name)
    return removed
