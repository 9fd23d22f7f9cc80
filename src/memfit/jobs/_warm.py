"""A process that has imported what jobs need, and from which their watchers and they themselves are forked.

It starts by itself: ``python -m memfit.jobs warm DESCRIPTOR``, answers over that socket, and ends with it. A forked
process shares the imported code with all others, and begins at once. This is safe only while the process has one
thread and holds nothing that a fork would share, which `why_not` looks for.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.files import write_json
from memfit.jobs._child import REQUEST, call_in_child, die_with, importing, main, read_answer
from memfit.jobs._fork import (
    close_all_but,
    draw_anew,
    end_of,
    fork,
    is_alive,
    name_process,
    start_interpreter,
    thread_env,
    wait_for_any,
)
from memfit.memory import ProcReader

#: Variables that are read when a process starts or when a library is loaded, not later.
_EARLY = ("MALLOC_", "GLIBC_", "LD_", "PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "JE_", "MIMALLOC_")
#: pyarrow's allocator has a thread of its own, and a forked process would have none.
_ONE_THREAD = thread_env(1) | {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
#: What a driver or a library that does not bear a fork shows of itself in a process. A torch for CUDA maps libcuda.so
#: when it is imported; only a driver in use holds device files.
_MAPPED = re.compile(r"/(libamdhip64|libmpi\.so|nvidia[^/]*|kfd)[^/]*$")
_HARMLESS = re.compile(r"/dev/(?:null|zero|u?random)")
#: What is imported before the fork where a stage uses it; each was seen to begin no thread.
_LIBRARIES = frozenset({"memfit", "numpy", "pandas", "pyarrow", "scipy", "sklearn", "torch", "transformers", "av"})
_IMPORT_SECONDS, _MOST_NAMES = 300.0, 400
_MESSAGE_BYTES, _PATIENCE_SECONDS = 1 << 16, 30.0
_IDLE_SECONDS = 0.005  # after so long without a question it has time to load more


class Parent:
    """The side of a run: asks the process, from any thread."""

    def __init__(self, pid: int, connection: socket.socket, env: Mapping[str, str]) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._env, self._loaded = env, set[str]()
        self.pid, self.refused = pid, ""
        weakref.finalize(self, connection.close)  # which ends it

    @classmethod
    def start(cls, target: str, env: Mapping[str, str]) -> Parent | None:
        """Start one that imports a target's module, with one thread, or none; None where this system has none."""
        if not is_alive(os.getpid()):  # before Linux 5.3 a fork cannot be followed
            return None
        env = {**env, **(_ONE_THREAD if target else {})}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_IMPORT_SECONDS)
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            words = ["warm", str(theirs.fileno()), str(os.getpid())]
            parent = cls(start_interpreter(words, theirs.fileno(), env=env, safe_path=not target), ours, env)
            stack.pop_all()
        parent.load(target.partition(":")[0])
        return parent

    def load(self, *modules: str, uses: Sequence[str] = ()) -> None:
        """Have it import modules, and what ``uses`` (``module:name``, or a module) import; it may refuse then."""
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
            pid = self._ask({"do": "call", "folder": str(folder)}).get("pid")
            while pid is not None and is_alive(pid):
                wait_for_any([pid], _PATIENCE_SECONDS)
            code = self._ask({"do": "wait", "pid": pid}).get("code", -signal.SIGKILL)
            if code == -signal.SIGKILL:  # the fork, or this process
                return call_in_child(target, arguments, self._env)
            said = (folder / "stderr").read_text(errors="replace") if (folder / "stderr").exists() else ""
            return read_answer(folder, target, code, said)

    def takes(self, env: Mapping[str, str]) -> bool:
        """Return True if a job with these variables can be forked: what is read at the start is the same in both."""
        wanted = {**os.environ, **env}
        early = {name for name in {**self._env, **wanted} if name.startswith(_EARLY)} - _ONE_THREAD.keys()
        return not self.refused and all(self._env.get(name) == wanted.get(name) for name in early)

    def start_shim(self, job_dir: Path, lock: int) -> int | None:
        """Fork the watcher of a job, which holds ``lock`` and forks the job; return its number, if this still lives."""
        return self._ask({"do": "shim", "job_dir": str(job_dir)}, lock).get("pid")

    @property
    def used_bytes(self) -> int:
        """Its private memory, which its forks share."""
        status = ProcReader().status(self.pid)
        return status.private if status is not None else 0

    def close(self) -> None:
        """Let it end without what the imported code does at its end; what it forked goes on."""
        self.refused = self.refused or "it has ended"
        self._connection.close()
        with contextlib.suppress(ChildProcessError):
            if end_of(self.pid, _PATIENCE_SECONDS) is None:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)

    def _ask(self, question: Mapping[str, Any], *descriptors: int) -> dict[str, Any]:
        with self._lock:
            try:
                socket.send_fds(self._connection, [json.dumps(question).encode()], descriptors)
                answer = self._connection.recv(_MESSAGE_BYTES)
            except OSError:
                answer = b""
        return json.loads(answer) if answer else {}


# The process itself


def serve(descriptor: int, run_pid: int) -> int:
    die_with(run_pid)
    close_all_but(descriptor)  # what the run itself has inherited
    sys.dont_write_bytecode = True  # as in a new interpreter
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    watchers: set[int] = set()
    while True:
        if not select.select([connection], [], [], _IDLE_SECONDS)[0]:  # nobody waits
            _shim()
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
            return {"pid": fork(lambda: _call(Path(question["folder"]), connection))}
        case "wait":
            return {"code": os.waitstatus_to_exitcode(os.waitpid(question["pid"], 0)[1])}
        case _:
            shim = _shim()
            return {"pid": fork(lambda: _watch(shim, question, descriptors[0], connection))}


def _shim() -> Callable[..., int]:
    """Load what watches jobs here, once, and not in each fork."""
    from memfit.jobs._shim import main

    return main


def _load(wanted: Sequence[str], own: int) -> str:
    """Import modules, and what ``module:name`` or ``module:*`` imports; say why nothing may be forked then."""
    with importing():
        _import(wanted)
    gc.collect()
    gc.freeze()
    return why_not(own)


def _import(wanted: Sequence[str]) -> None:
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
    """Say why this process should not be forked; empty if nothing speaks against it."""
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
    torch = sys.modules.get("torch")
    return "it has begun to use CUDA" if torch is not None and torch.cuda.is_initialized() else ""


def _call(folder: Path, connection: socket.socket) -> int:
    connection.close()
    die_with(os.getppid())
    _write_to(folder / "stderr", 2)
    draw_anew()
    return main(folder)


def _watch(shim: Callable[..., int], question: Mapping[str, Any], lock: int, connection: socket.socket) -> int:
    connection.close()
    job_dir = Path(question["job_dir"])
    _write_to(job_dir / "shim.log", 1, 2)
    name_process("memfit shim")
    return shim(job_dir, lock, forks=True)


def _write_to(path: Path, *streams: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in streams:
        os.dup2(descriptor, number)
    os.close(descriptor)
