"""Starts a job's processes in its group, and ends them with all that they leave behind."""

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
from functools import partial
from pathlib import Path
from typing import Any

from memfit.files import write_masked
from memfit.jobs._child import ERROR, REQUEST, RESULT, die_with
from memfit.jobs._warm import Forked, fork_job
from memfit.memory import JobGroup, ProcReader

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
#: If memory runs out, the kernel kills a job and not the shim, the supervisor or another program.
_OOM_SCORE_ADJ = "500"
#: Names in /dev/shm with the number of the process that made them: torch, Python, OpenMP, joblib.
_SEGMENT = re.compile(r"(?:torch_|pym-|__KMP_REGISTERED_LIB_|joblib_memmapping_folder_)(\d+)(?:[_-]|$)")
_PATIENCE_SECONDS = 2.0
#: Helpers such as multiprocessing's resource tracker end by themselves just after their parent.
_LEAVING_SECONDS = 0.3
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})


def become_subreaper() -> None:
    """Inherit orphaned grandchildren, so that none escapes the watch (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spawn(
    job: Mapping[str, Any], job_dir: Path, group: JobGroup | None, *, forks: bool = False
) -> subprocess.Popen[bytes] | Forked:
    """Start the process of a job (``job.json``) in its group; its program runs when this returns.

    With ``forks`` the process of a function is forked from this one, unless that fails.

    Raises:
        OSError: If its program, its folder or its group is missing.
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
        die_with(watcher)  # so that no later attempt runs beside it
        with contextlib.suppress(OSError):  # Linux only
            Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
        if group is not None:
            group.enter()
        if limit_bytes is not None:  # allocations beyond it fail in the program
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            wanted = limit_bytes + (ProcReader().data_bytes(os.getpid()) if forks else 0)
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    with contextlib.ExitStack() as stack:
        private = partial(os.open, mode=0o600)
        out, err = (stack.enter_context(open(job_dir / one, "a+b", opener=private)) for one in ("out.log", "err.log"))
        for log in (out, err):
            if log.tell() and os.pread(log.fileno(), 1, log.tell() - 1) != b"\n":
                log.write(b"\n")  # an attempt that was killed in the middle of a line
                log.flush()
        has_stdin = job["stdin"] is not None and job["attempt"] == 1
        stdin = stack.enter_context(open(job["stdin"] if has_stdin else os.devnull, "rb"))
        try:
            if forks and job["target"] is not None:
                streams = [stdin.fileno(), out.fileno(), err.fileno()]
                if (forked := fork_job(job_dir, become, streams, job["cwd"], job["env"])) is not None:
                    return forked
                print("a fork did not come to its function: starting a new interpreter", file=sys.stderr)
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
        except subprocess.SubprocessError as error:  # raised in ``become``
            raise OSError(errno.EACCES, "it cannot enter its group", str(group.path if group else "")) from error


def end_children() -> set[int]:
    """End what the job left running, which this process has inherited; return the ended processes."""
    ended: set[int] = set()
    now = time.monotonic()
    while _has_children() and time.monotonic() < now + _LEAVING_SECONDS + _PATIENCE_SECONDS:
        if time.monotonic() > now + _LEAVING_SECONDS:
            left = set(ProcReader().children(os.getpid()))
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            ended |= left
        time.sleep(0.01)
    return ended


def end_group(group: JobGroup, *, keep: bool) -> None:
    """End all processes in a job's control group, and remove the group unless it is to be kept."""
    if group.pids():
        group.kill()
    if not keep:
        group.remove()


def stop_targets(pid: int) -> set[int]:
    """Return who gets the SIGTERM: the job's process and, if that is a shell, what it runs.

    A shell dies at once and passes nothing on. The other processes get none: data loader workers would die while their
    trainer saves.
    """
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return {pid}
    children = [int(word) for word in words] if name in _SHELLS else []
    return {pid}.union(*map(stop_targets, children))


def wait_for(pids: set[int], is_over: Callable[[], bool]) -> set[int]:
    """Wait until these children have ended or it is over; return the exit codes."""
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
    """Return True if any child is alive; reap the dead."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def remove_segments(pids: Iterable[int], *, since: float, folder: Path = Path("/dev/shm")) -> list[str]:
    """Remove what dead processes left in /dev/shm under names that hold their numbers; return the names.

    What is older than ``since`` (Unix seconds) belongs to an earlier process of the same number.
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
