"""Forks of this process: one that runs another program, or one that goes on as if its interpreter were new."""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import random
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_NAME = 15  # linux/prctl.h
_BEGAN = b"began"
#: What numerical libraries read once, when they are loaded.
_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "POLARS_MAX_THREADS",
    "RAYON_NUM_THREADS",
)
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})


def thread_env(threads: int) -> dict[str, str]:
    return dict.fromkeys(_THREADS, str(threads))


def own_threads(env: Mapping[str, str]) -> int:
    """Return how many threads the user's own OMP_NUM_THREADS gives a process; 0 if it gives none."""
    text = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdecimal() else 0


def wait_for_any(pids: Iterable[int], seconds: float) -> None:
    """Wait until one of these processes has ended, and at most so long; always so long before Linux 5.3."""
    # Not select, which knows 1,024 descriptors.
    ends, poll = [end for pid in pids for end in end_descriptors(pid)], select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    poll.poll(1000 * max(0.0, seconds))
    for end in ends:
        os.close(end)


def is_alive(pid: int) -> bool:
    """Return True if a process has not ended; False before Linux 5.3."""
    for end in end_descriptors(pid):
        poll = select.poll()
        poll.register(end, select.POLLIN)
        has_ended = poll.poll(0)
        os.close(end)
        return not has_ended
    return False


def end_descriptors(pid: int) -> list[int]:
    """Return a descriptor that is readable once a process has ended; none if it is gone, or before Linux 5.3."""
    with suppress(AttributeError, OSError):
        return [os.pidfd_open(pid)]
    return []


def end_of(pid: int, seconds: float) -> int | None:
    """Return the exit code of a child, negative for a signal; None if it still runs after so many seconds."""
    found, status = os.waitpid(pid, os.WNOHANG)
    if not found:
        wait_for_any([pid], seconds)
        found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def stop_targets(pid: int) -> set[int]:
    """Return who gets the SIGTERM. A shell passes nothing on, so what it runs gets it too. Data loader workers get
    none: they would die while their trainer saves."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return {pid}
    children = [int(word) for word in words] if name in _SHELLS else []
    return {pid}.union(*map(stop_targets, children))


def start_interpreter(
    words: Sequence[str], descriptor: int, *, env: Mapping[str, str], log: str = os.devnull, safe_path: bool = True
) -> int:
    """Start ``python -m memfit.jobs`` in a session of its own; return its number. With ``safe_path`` it imports nothing
    from this folder, where a file may be named like one of Python's modules."""
    command = [sys.executable, *["-P"][: int(safe_path)], "-m", "memfit.jobs", *words]
    streams = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    os.set_inheritable(descriptor, True)
    try:
        # Not subprocess, which complains of a child that outlives its parent.
        return os.posix_spawn(sys.executable, command, env, file_actions=streams, setsid=True)
    finally:
        os.set_inheritable(descriptor, False)


def fork(run: Callable[[], int]) -> int:
    """Fork this process; return the number of the new one, which leads a session and ends with what ``run`` returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        _forget_exits()
        os.setsid()
        code = run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        leave(code)
    raise AssertionError  # it has left


def fork_job(
    prepare: Callable[[], None], call: Callable[[], int], streams: Sequence[int], seconds: float | None = None
) -> tuple[int, bool]:
    """Fork a process that prepares itself and calls a function, without other descriptors than these streams. Return
    its number, and True if it came to the function in so many seconds (None for any). Raise an OSError of
    ``prepare``."""
    reading, told = os.pipe()

    def run() -> int:
        try:
            for number, descriptor in enumerate(streams):
                os.dup2(descriptor, number)
            close_all_but(told)
            prepare()
        except OSError as error:
            os.write(told, os.fsencode(f"{error.errno or errno.EIO} {error.filename or ''}"))
            os._exit(127)
        os.write(told, _BEGAN)
        os.close(told)
        return call()

    pid = fork(run)
    os.close(told)
    with open(reading, "rb") as answer:
        said = answer.read() if select.select([answer], [], [], seconds)[0] else b""
    if said in (b"", _BEGAN):
        return pid, said == _BEGAN
    os.waitpid(pid, 0)
    number, _, name = os.fsdecode(said).partition(" ")
    raise OSError(int(number), os.strerror(int(number)), name)


def fork_program(
    prepare: Callable[[], None], command: list[str], env: Mapping[str, str], streams: Sequence[int]
) -> int:
    """Fork a process that prepares itself and becomes a program with these variables on top; as `fork_job`."""

    def become() -> None:
        prepare()
        for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(one, signal.SIG_DFL)
        try:
            os.execvpe(command[0], command, {**os.environ, **env})
        except OSError as error:
            raise OSError(error.errno, error.strerror, command[0]) from None

    return fork_job(become, lambda: 127, streams)[0]


def close_all_but(descriptor: int) -> None:
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))


def begin_anew(job_id: str, env: Mapping[str, str]) -> None:
    """Make this fork what a new interpreter of a job would be."""
    for asked in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(asked, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    name_process(job_id)
    if (threads := int(env.get("OMP_NUM_THREADS", "1"))) > 1:  # the libraries that are loaded have one each
        import threadpoolctl

        threadpoolctl.threadpool_limits(threads)
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(threads)
    draw_anew()


def draw_anew() -> None:
    """Seed what draws random numbers, as a new interpreter does, or all forks would draw the same."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def name_process(name: str) -> None:
    """Give this process a name in ``top`` and ``ps``, which keep 15 bytes of it; its command line stays."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _forget_exits() -> None:
    """Leave what the imported code does at its end to the process that imported it, but for logging and children."""
    atexit._clear()
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # temporary folders, for example
        one.atexit = False
    if weakref.finalize._registered_with_atexit:  # type: ignore[attr-defined]
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    for module, name in (("logging", "shutdown"), ("multiprocessing.util", "_exit_function")):
        if module in sys.modules:
            atexit.register(getattr(sys.modules[module], name))


def leave(code: int) -> None:
    """End this process as an interpreter ends, but for what it has inherited."""
    try:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does after a fork
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
    finally:
        os._exit(code & 0xFF)
