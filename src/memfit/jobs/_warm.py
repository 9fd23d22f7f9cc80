"""A process that has imported what jobs need, and from which their watchers and they themselves are forked.

It starts by itself: ``python -m memfit.jobs warm DESCRIPTOR``, answers over that socket, and ends with it. A forked
process shares the imported code with all others, and begins at once. This is safe only while the process has one
thread and holds nothing that a fork would share, which `why_not` looks for.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import importlib
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.files import write_json
from memfit.jobs._child import REQUEST, die_with, keep_no_bytecode, main, read_answer
from memfit.jobs._threads import thread_env
from memfit.memory import ProcReader

#: Variables that are read when a process starts or when a library is loaded, not later.
_EARLY = ("MALLOC_", "GLIBC_", "LD_", "PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "JE_", "MIMALLOC_")
#: pyarrow's allocator has a thread of its own, and a forked process would have none.
_ONE_THREAD = thread_env(1) | {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
#: What a driver or a library that does not bear a fork shows of itself in a process.
_MAPPED = re.compile(r"/(libcuda\.so|libamdhip64|libmpi\.so|nvidia[^/]*|kfd)[^/]*$")
_HARMLESS = re.compile(r"/dev/(?:null|zero|u?random)")
#: What is imported before the fork where a stage uses it; each was seen to begin no thread.
_LIBRARIES = frozenset({"memfit", "numpy", "pandas", "pyarrow", "scipy", "sklearn", "torch", "transformers", "av"})
_PR_SET_NAME = 15  # linux/prctl.h
_IMPORT_SECONDS, _MOST_NAMES = 300.0, 400
_MESSAGE_BYTES, _PATIENCE_SECONDS = 1 << 16, 30.0


class Parent:
    """The side of a run: asks the process, from any thread.

    Attributes:
        pid: Its number.
        refused: Why no job may be forked from it; empty if it may be.
    """

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, env: Mapping[str, str]) -> None:
        self._process, self._connection, self._lock = process, connection, threading.Lock()
        self._env, self._loaded = env, set[str]()
        self.pid, self.refused = process.pid, ""

    @classmethod
    def start(cls, target: str, env: Mapping[str, str]) -> Parent | None:
        """Start one that imports a target's module; None where this system has none.

        Args:
            target: The workload as ``module:name``.
            env: Its whole environment, but for the number of threads, which is 1.
        """
        if not _can_fork():
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_IMPORT_SECONDS)
        env = {**env, **_ONE_THREAD}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "memfit.jobs", "warm", str(theirs.fileno()), str(os.getpid())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        parent = cls(process, ours, env)
        parent.load(target.partition(":")[0])
        return parent

    def load(self, *modules: str, uses: Sequence[str] = ()) -> None:
        """Have it import modules, and the libraries that code of the user's uses; it may refuse then.

        Args:
            uses: Definitions (``module:name``), or whole modules.
        """
        wanted = sorted({*modules, *(one if ":" in one else f"{one}:*" for one in uses)} - self._loaded)
        for part in (wanted[at : at + _MOST_NAMES] for at in range(0, len(wanted), _MOST_NAMES)):
            if self.refused:
                return
            self._loaded.update(part)
            answer = self._ask({"do": "load", "names": part})
            self.refused = answer.get("refused", "it has ended")

    def call(self, target: str, arguments: Mapping[str, Any]) -> Any:
        """Return what a function returns in a fork of it; as `call_in_child`, with the same errors."""
        with tempfile.TemporaryDirectory(prefix="memfit-") as name:
            folder = Path(name)
            write_json(folder / REQUEST, {"target": target, "arguments": dict(arguments)}, durable=False)
            reading, writing = os.pipe()
            with open(reading, "rb") as end:
                try:
                    pid = self._ask({"do": "call", "folder": str(folder)}, writing).get("pid")
                finally:
                    os.close(writing)
                end.read()  # until that process has ended
            code = self._ask({"do": "wait", "pid": pid}).get("code", -signal.SIGKILL)
            said = (folder / "stderr").read_text(errors="replace") if (folder / "stderr").exists() else ""
            return read_answer(folder, target, code, said)

    def takes(self, env: Mapping[str, str]) -> bool:
        """Return True if a job with these variables can be forked: what is read at the start is the same in both."""
        wanted = {**os.environ, **env}
        early = {name for name in {**self._env, **wanted} if name.startswith(_EARLY)} - _ONE_THREAD.keys()
        return not self.refused and all(self._env.get(name) == wanted.get(name) for name in early)

    def start_shim(self, job_dir: Path, lock: int) -> None:
        """Fork the watcher of a job, with the job's lock; the job is forked from it.

        Raises:
            OSError: If it could not be forked, or the process has ended.
        """
        if "pid" not in self._ask({"do": "shim", "job_dir": str(job_dir)}, lock):
            raise OSError("the process from which jobs are forked has ended")

    @property
    def used_bytes(self) -> int:
        """Its private memory, which its forks share."""
        status = ProcReader().status(self.pid)
        return status.private if status is not None else 0

    def close(self, *, now: bool = False) -> None:
        """Let it end, or end it ``now``, without what the imported code does at its end; what it forked goes on."""
        self.refused = self.refused or "it has ended"
        self._connection.close()
        if now:
            self._process.kill()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, question: Mapping[str, Any], *descriptors: int) -> dict[str, Any]:
        """Return the answer; empty when the process has ended."""
        with self._lock:
            try:
                socket.send_fds(self._connection, [json.dumps(question).encode()], descriptors)
                answer = self._connection.recv(_MESSAGE_BYTES)
            except OSError:
                answer = b""
        return json.loads(answer) if answer else {}


def _can_fork() -> bool:
    """Return True where a fork can be followed as this module does (Linux 5.3)."""
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            os.close(os.pidfd_open(os.getpid()))
            return True
    return False


# The process itself


def serve(descriptor: int, run_pid: int) -> int:
    """Answer until the other side closes the socket."""
    die_with(run_pid)
    keep_no_bytecode()
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    watchers: set[int] = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
        watchers = {pid for pid in watchers if not os.waitpid(pid, os.WNOHANG)[0]}
        if not data:
            return 0
        question = json.loads(data)
        answer = _answer(question, descriptors, connection)
        if question["do"] == "shim":
            watchers.add(answer["pid"])
        for one in descriptors:
            os.close(one)
        connection.send(json.dumps(answer).encode())


def _answer(question: Mapping[str, Any], descriptors: Sequence[int], connection: socket.socket) -> dict[str, Any]:
    match question["do"]:
        case "load":
            return {"refused": _load(question["names"], connection.fileno())}
        case "call":
            return {"pid": _fork(lambda: _call(Path(question["folder"])), connection)}
        case "wait":
            return {"code": os.waitstatus_to_exitcode(os.waitpid(question["pid"], 0)[1])}
        case _:
            return {"pid": _fork(lambda: _watch(Path(question["job_dir"]), descriptors[0]), connection)}


def _load(wanted: Sequence[str], own: int) -> str:
    """Import modules, and what ``module:name`` or ``module:*`` imports; say why nothing may be forked then."""
    import gc

    named: dict[str, set[str]] = {}
    for one in wanted:
        module, is_definition, name = one.partition(":")
        if is_definition:
            named.setdefault(module, set()).add(name)
        else:
            with contextlib.suppress(Exception, SystemExit):  # a call tells of it
                importlib.import_module(module)
    found = set[tuple[str, str]]().union(*(_imports(module, names) for module, names in named.items()))
    for module, name in sorted(found):
        if module.partition(".")[0] in _LIBRARIES:
            with contextlib.suppress(Exception):  # the job tells of it
                getattr(importlib.import_module(module), name, None)
    if "torch" in sys.modules and ("memfit.training" in sys.modules or ("torch", "optim") in found):
        importlib.import_module("torch._dynamo")  # every optimizer does; it takes a second
    gc.collect()
    gc.freeze()
    return why_not(own)


def _imports(module: str, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the modules and names that some definitions of a module import or look up, and its own first lines."""
    import ast
    from importlib.util import find_spec

    spec = find_spec(module)
    if spec is None or not (spec.origin or "").endswith(".py"):
        return
    for top in ast.parse(Path(str(spec.origin)).read_bytes()).body:
        if isinstance(top, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not {top.name, "*"} & names:
            continue
        for node in ast.walk(top):
            if isinstance(node, ast.Import):
                yield from ((one.name, "") for one in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from ((str(node.module), one.name) for one in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield node.value.id, node.attr  # memfit.Trainer


def why_not(*own: int) -> str:
    """Say why this process should not be forked; empty if nothing speaks against it.

    Args:
        own: Descriptors that are known.
    """
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads > 1:
        return f"it has {num_threads} threads after the imports"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if found := _MAPPED.search(line):
                return f"it has loaded {found[0].strip('/')}"
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            path = str(link.readlink())
            if int(link.name) not in own and not _HARMLESS.fullmatch(path):  # forks would share its position
                return f"it holds {path} open"
    return ""


def _fork(run: Callable[[], int], connection: socket.socket) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        connection.close()
        forget_exits()
        os.setsid()
        code = run()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        leave(code)
    raise AssertionError  # it has left


def _call(folder: Path) -> int:
    die_with(os.getppid())
    descriptor = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    draw_anew()
    return main(folder)


def _watch(job_dir: Path, lock: int) -> int:
    log = os.open(job_dir / "shim.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _name(b"memfit shim")
    from memfit.jobs import _shim

    return _shim.main(job_dir, lock, forks=True)


def _name(name: bytes) -> None:
    """Give this process a name in ``top`` and ``ps``, of which 15 bytes are kept; its command line stays."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def leave(code: int) -> None:
    """End this process as an interpreter ends, but for what it has inherited."""
    try:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does after a fork
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
    finally:
        os._exit(code & 0xFF)


def forget_exits() -> None:
    """Leave what the code imported so far does at its end to the process that imported it.

    What this process registers from now on runs at its end, and so do the ends of logging and of child processes.
    """
    atexit._clear()
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # temporary folders, for example
        one.atexit = False
    if weakref.finalize._registered_with_atexit:  # type: ignore[attr-defined]
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    for module, name in (("logging", "shutdown"), ("multiprocessing.util", "_exit_function")):
        if module in sys.modules:
            atexit.register(getattr(sys.modules[module], name))


def draw_anew() -> None:
    """Seed what draws random numbers, as a new interpreter does, or all forks would draw the same."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


class Forked:
    """The process of a job that was forked from its watcher; in its place stands ``subprocess.Popen`` elsewhere.

    Attributes:
        returncode: Its exit code, negative for a signal; None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._descriptor = os.pidfd_open(pid)

    returncode: int | None

    def wait(self, seconds: float) -> int:
        """Return its exit code.

        Raises:
            subprocess.TimeoutExpired: If it still runs after so many seconds.
        """
        if self.returncode is None:
            if not select.select([self._descriptor], [], [], seconds)[0]:
                raise subprocess.TimeoutExpired("a forked job", seconds)
            os.close(self._descriptor)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def fork_job(
    job_dir: Path, become: Callable[[], None], streams: Sequence[int], cwd: str, env: Mapping[str, str]
) -> Forked | None:
    """Fork the process of a function's job; None if it did not come to its function.

    Args:
        become: Called in it first; it may raise an OSError.
        streams: Descriptors of its standard input, output and error.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            _begin_job(job_dir.name, become, streams, cwd, env, writing)
            code = main(job_dir)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            leave(code)
    os.close(writing)
    with open(reading, "rb") as began:
        ready, _, _ = select.select([began], [], [], _PATIENCE_SECONDS)
        said = began.read() if ready else b""
    if said == b"began":
        return Forked(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if said:
        number, _, name = said.decode().partition(" ")
        raise OSError(int(number), os.strerror(int(number)), name)
    return None


def _begin_job(
    job_id: str, become: Callable[[], None], streams: Sequence[int], cwd: str, env: Mapping[str, str], told: int
) -> None:
    """Make this process what a new interpreter would be."""
    try:
        forget_exits()
        os.setsid()
        become()
        for asked in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(asked, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        told = os.dup2(told, len(streams))
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # paths would be held by what lists them
            if int(name) > told:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        os.chdir(cwd)
        os.environ.update(env)
        _name(job_id.encode())
        _set_threads(int(env.get("OMP_NUM_THREADS", "1")))
        draw_anew()
    except OSError as error:
        os.write(told, f"{error.errno or errno.EIO} {error.filename or ''}".encode())
        os._exit(127)
    os.write(told, b"began")
    os.close(told)


def _set_threads(threads: int) -> None:
    """Give the libraries that are loaded, with one thread each, as many as a job wants."""
    if threads > 1:
        import threadpoolctl

        threadpoolctl.threadpool_limits(threads)
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(threads)
