"""Starts a job's processes in its group, and ends them with all that they leave behind."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from memfit.files import write_masked
from memfit.jobs._child import ERROR, REQUEST, RESULT, die_with, main
from memfit.jobs._fork import begin_anew, end_of, fork_job, fork_program, wait_for_any
from memfit.jobs._ranks import run_ranks
from memfit.memory import JobGroup, ProcReader

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
#: If memory runs out, the kernel kills a job, however small it is: a job starts again, another program does not.
_OOM_SCORE_ADJ = "1000"
#: Names in /dev/shm with the number of the process that made them: torch, Python, OpenMP, joblib.
_SEGMENT = re.compile(r"(?:torch_|pym-|__KMP_REGISTERED_LIB_|joblib_memmapping_folder_)(\d+)(?:[_-]|$)")
_PATIENCE_SECONDS = 2.0
_LEAVING_SECONDS = 0.3  # helpers such as multiprocessing's resource tracker end by themselves just after their parent


def become_subreaper() -> None:
    """Inherit orphaned grandchildren, so that none escapes the watch."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spawn(
    job: Mapping[str, Any],
    job_dir: Path,
    group: JobGroup | None,
    *,
    forks: bool = False,
    patience_seconds: float = 30.0,
) -> tuple[int, bool]:
    """Start the process of a job in its group; its program runs when this returns. With ``forks`` a function's process
    is forked from this one, and gets a new interpreter if that comes to nothing. Return its number, and True if it was
    forked."""
    if job["attempt"] > 1:
        for name in (RESULT, ERROR):
            (job_dir / name).unlink(missing_ok=True)
    command = list(job["command"])
    if job["target"] is not None:
        write_masked(job_dir / REQUEST, {"target": job["target"], "arguments": job["arguments"]}, durable=False)
        command = [sys.executable, "-m", "memfit.jobs", "child", str(job_dir)]
    call = partial(main, job_dir)
    if job["ranks"] > 1:
        command = [sys.executable, "-P", "-m", "memfit.jobs", "ranks", str(job_dir)]
        call = partial(run_ranks, job_dir, forks=True)
    enter = partial(_enter, job, group, os.getpid())

    def become_function() -> None:
        status = ProcReader().status(os.getpid())
        enter(status.data if status else 0)
        begin_anew(job_dir.name, job["env"])

    with ExitStack() as stack:
        streams = []
        for stream in _open_streams(job, job_dir):
            streams.append(stream)
            stack.callback(os.close, stream)
        if forks and job["target"] is not None:
            pid, has_begun = fork_job(become_function, call, streams, patience_seconds)
            if has_begun:
                return pid, True
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            print("a fork did not come to its function: starting a new interpreter", file=sys.stderr)
        return fork_program(partial(enter, 0), command, job["env"], streams), False


def _enter(job: Mapping[str, Any], group: JobGroup | None, watcher: int, inherited_bytes: int) -> None:
    die_with(watcher)  # so that no later attempt runs beside it
    with suppress(OSError):  # a container may forbid it
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
    if group is not None:
        group.enter()
    if job["data_limit_bytes"] is not None:  # allocations beyond it fail in the program
        hard, soft = resource.getrlimit(resource.RLIMIT_DATA)[1], job["data_limit_bytes"] + inherited_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    os.chdir(job["cwd"])


def _open_streams(job: Mapping[str, Any], job_dir: Path) -> Iterator[int]:
    has_stdin = job["stdin"] is not None and job["attempt"] == 1
    yield os.open(job["stdin"] if has_stdin else os.devnull, os.O_RDONLY)
    for name in ("out.log", "err.log"):
        log = os.open(job_dir / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(log).st_size
        if size and os.pread(log, 1, size - 1) != b"\n":
            os.write(log, b"\n")  # an attempt that was killed in the middle of a line
        yield log


def end_children() -> set[int]:
    """End what the job left running, which this process has inherited; return the ended processes."""
    ended: set[int] = set()
    kill_at = time.monotonic() + _LEAVING_SECONDS
    while _has_children() and (left_seconds := kill_at + _PATIENCE_SECONDS - time.monotonic()) > 0:
        left = set(ProcReader().children(os.getpid()))
        if left_seconds <= _PATIENCE_SECONDS:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            ended |= left
        wait_for_any(left, 0.01)
    return ended


def end_group(group: JobGroup, *, keep: bool) -> None:
    """End all processes in a job's control group, and remove the group unless it is to be kept."""
    if group.pids():
        group.kill()
    if not keep:
        group.remove()


def wait_for(pids: set[int], is_over: Callable[[], bool]) -> set[int]:
    """Wait until these children have ended or it is over; return the exit codes."""
    codes: set[int] = set()
    while pids and not is_over():
        wait_for_any(pids, 0.02)
        for pid in set(pids):
            with suppress(ChildProcessError):  # not inherited, or gone
                if (code := end_of(pid, 0)) is None:
                    continue
                codes.add(code)
            pids = pids - {pid}
    return codes


def _has_children() -> bool:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def remove_segments(pids: Iterable[int], *, since: float, folder: Path = Path("/dev/shm")) -> None:
    """Remove what dead processes left in /dev/shm under names that hold their numbers. What is older than ``since``
    (Unix seconds) is of an earlier process."""
    ours = {str(pid) for pid in pids}
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return
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
