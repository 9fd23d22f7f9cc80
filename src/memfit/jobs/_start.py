"""Starting a job's process inside its group.

A job with a group is started by vfork: the watcher is in that group for the moment of it, and whoever finds the watcher
dead ends what is in the group. One without a group, or whose group is nearly full, is forked: between fork and exec it
does the rest by itself. A fork copies the watcher's page tables, which takes as long as a brief job.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from memfit.jobs._child import ERROR, REQUEST, RESULT
from memfit.memory import JobGroup, memory_group
from memfit.rundir import write_masked
from memfit.units import MIB

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: When memory does run out, let the kernel take a job and never the shim, the supervisor or a stranger.
_OOM_SCORE_ADJ = 500
#: With less to be had in a group the watcher itself might wait at the wall there.
_ROOM_BYTES = 64 * MIB
#: What Python ignores, its program would ignore too.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_libc = ctypes.CDLL(None)


def become_subreaper() -> None:
    """Have orphaned grandchildren handed to this process, so that none escapes the watch (Linux only)."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(job: Mapping[str, Any], job_dir: Path, group: JobGroup | None, is_ended: Callable[[], bool]) -> int:
    """Start the process of a job and tell its process id; its program runs when this returns.

    Args:
        job: ``job.json``.
        job_dir: The folder of its files.
        group: The control group that it enters before its program begins.
        is_ended: Whether it is to be ended already; asked while it has no program yet.

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
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    logs = [os.open(f"{job_dir}/{name}", flags, 0o644) for name in ("out.log", "err.log")]
    env = {**_own_env(), **{os.fsencode(name): os.fsencode(value) for name, value in job["env"].items()}}
    home = _home(os.getpid()) if group is not None and group.has_room(_ROOM_BYTES) else None
    try:
        if group is not None and home is not None:
            return _spawn(job, command, env, group, home=home, logs=logs)
        return _fork(job, command, env, group, logs=logs, is_ended=is_ended)
    finally:
        for descriptor in logs:
            os.close(descriptor)


@cache
def _own_env() -> dict[bytes, bytes]:
    """The variables of this process, which changes none; as bytes, for to decode and encode all of them takes long."""
    return dict(os.environb)


@cache
def _home(pid: int) -> Path | None:
    """The group of this process, which stays where it began, if it may come back there; a fork may begin elsewhere."""
    home = memory_group()
    return home if home is not None and os.access(home / "cgroup.procs", os.W_OK) else None


def _spawn(
    job: Mapping[str, Any],
    command: list[str],
    env: Mapping[bytes, bytes],
    group: JobGroup,
    *,
    home: Path,
    logs: list[int],
) -> int:
    """Start it by vfork from inside its group; what this process handles or was given stays with this process."""
    streams = [(os.POSIX_SPAWN_DUP2, logs[0], 1), (os.POSIX_SPAWN_DUP2, logs[1], 2)]
    with contextlib.ExitStack() as stack:
        if _has_stdin(job):
            stdin = stack.enter_context(open(job["stdin"]))
            streams.append((os.POSIX_SPAWN_DUP2, stdin.fileno(), 0))
        if job["cwd"] is not None:
            stack.enter_context(_in_folder(job["cwd"]))
        program = _find_program(command[0], env)
        with group.hosting(home):
            pid = os.posix_spawn(program, command, env, file_actions=streams, setsid=True, setsigdef=_IGNORED_BY_PYTHON)
    _set_oom_score(pid)
    return pid


@contextlib.contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    """Have this process in a folder until the end of the block; it comes back to its own even if that was removed."""
    back = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        os.chdir(folder)
        try:
            yield
        finally:
            os.fchdir(back)
    finally:
        os.close(back)


def _find_program(name: str, env: Mapping[bytes, bytes]) -> str:
    """Where the job's own PATH has the program; the name itself when it is a path."""
    if os.sep in name:
        return name
    found = shutil.which(name, path=os.fsdecode(env.get(b"PATH", os.defpath.encode())))
    if found is None:  # its name alone would be looked for in the job's folder
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return found


def _has_stdin(job: Mapping[str, Any]) -> bool:
    return job["stdin"] is not None and job["attempt"] == 1


def _fork(
    job: Mapping[str, Any],
    command: list[str],
    env: Mapping[bytes, bytes],
    group: JobGroup | None,
    *,
    logs: list[int],
    is_ended: Callable[[], bool],
) -> int:
    """Start it by fork."""
    told, teller = os.pipe()  # closed by exec: its end tells that the program runs
    watcher = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _become(job, command, env, group, watcher=watcher, logs=logs, teller=teller)
    finally:
        os.close(teller)
    try:
        failure = _hear(told, pid, is_ended)
    finally:
        os.close(told)
    if failure:
        os.waitpid(pid, 0)
        number, name = json.loads(failure)
        raise OSError(number, os.strerror(number), name)
    return pid


def _hear(told: int, pid: int, is_ended: Callable[[], bool]) -> bytes:
    """What the child says of its failure, or nothing when its program runs."""
    poll = select.poll()
    poll.register(told, select.POLLIN)
    while not poll.poll(100):  # a wall below what the fork itself takes holds the child back here
        if is_ended():
            os.kill(pid, signal.SIGKILL)
    return os.read(told, 4096)


def _become(
    job: Mapping[str, Any],
    command: list[str],
    env: Mapping[bytes, bytes],
    group: JobGroup | None,
    *,
    watcher: int,
    logs: list[int],
    teller: int,
) -> NoReturn:
    """The child's part: bind it to its watcher, then become the program."""
    name = command[0]
    try:
        os.setsid()
        if sys.platform == "linux":
            # So no later attempt runs beside a job whose watcher died.
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != watcher:  # it died before that held
                os._exit(127)
            _set_oom_score("self")
        for number in _IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
        if group is not None:
            name = str(group.path)
            group.enter()
        if _has_stdin(job):
            name = job["stdin"]
            os.dup2(os.open(name, os.O_RDONLY), 0)
        os.dup2(logs[0], 1)
        os.dup2(logs[1], 2)
        if job["cwd"] is not None:
            name = job["cwd"]
            os.chdir(name)
        if job["data_limit_bytes"] is not None:
            _limit_data(int(job["data_limit_bytes"]))
        name = command[0]
        os.execvpe(name, command, env)
    except BaseException as error:
        code = error.errno if isinstance(error, OSError) and error.errno else errno.EINVAL
        os.write(teller, json.dumps([code, name]).encode())
    finally:
        os._exit(127)


def _set_oom_score(pid: int | str) -> None:
    with contextlib.suppress(OSError):
        file = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        os.write(file, str(_OOM_SCORE_ADJ).encode())
        os.close(file)


def _limit_data(wall_bytes: int) -> None:
    """Have allocations beyond the wall fail in the program itself; the hard limit stays."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = wall_bytes if hard == resource.RLIM_INFINITY else min(wall_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
