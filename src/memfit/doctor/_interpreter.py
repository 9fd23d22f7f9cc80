"""Ask the command's own interpreter, in a short child, what it sees in its environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: A child that prints what it sees. It must run in any Python 3 and import nothing but what it is asked to.
_PROGRAM = r"""
import importlib.util, json, multiprocessing, os, sys
names, modules, packages, wanted = json.loads(sys.argv[1])
def attempt(call, *words):
    try:
        return call(*words)
    except Exception:
        return None
def threads():
    return len(attempt(os.listdir, "/proc/self/task") or ())
def version(name):
    from importlib.metadata import version
    return version(name)
def is_missing(name):
    return importlib.util.find_spec(name) is None
found = {
    "version": list(sys.version_info[:3]), "executable": sys.executable, "env": {n: os.environ.get(n) for n in names},
    "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    "start_method": multiprocessing.get_start_method(), "packages": {name: attempt(version, name) for name in packages},
    "missing": [name for name in wanted if attempt(is_missing, name)], "threads": {"": threads()}, "imports": {},
}
for name in modules:
    try:
        module = __import__(name)
        if name == "torch":
            module.ones(1 << 20).sum()
            found["torch_threads"] = module.get_num_threads()
        elif name == "numpy":
            module.ones((300, 300)) @ module.ones((300, 300))
        elif name == "polars":
            module.DataFrame({"a": [1, 2]}).lazy().select(module.col("a").sum()).collect()
        found["imports"][name] = ""
    except BaseException as error:
        found["imports"][name] = type(error).__name__ + ": " + (str(error).splitlines() or [""])[0][:300]
    found["threads"][name] = threads()
print("\nMEMFIT " + json.dumps(found))
"""
#: Packages whose versions are read, without importing them.
_PACKAGES = ("torch", "torchvision", "torchaudio", "polars", "numpy", "pyarrow")


@dataclass(frozen=True)
class Interpreter:
    """What an interpreter said of itself.

    Attributes:
        start_method: The default of ``multiprocessing``.
        num_cpus: The CPUs that it may run on.
        env: The variables that memfit sets, as it sees them.
        packages: The installed version of each package, or None.
        threads: The process's threads at the start (``""``) and after each module was imported and used once.
        imports: The error of each import; empty if it worked.
        missing: The modules that cannot be found.
        torch_threads: The answer of ``torch.get_num_threads()``.
        error: Why nothing is known; else empty.
    """

    executable: str
    version: tuple[int, ...] = ()
    start_method: str = ""
    num_cpus: int = 0
    env: Mapping[str, str | None] = field(default_factory=dict)
    packages: Mapping[str, str | None] = field(default_factory=dict)
    threads: Mapping[str, int] = field(default_factory=dict)
    imports: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()
    torch_threads: int | None = None
    error: str = ""


def ask_interpreter(
    executable: str,
    *,
    env: Mapping[str, str],
    names: Sequence[str] = (),
    modules: Sequence[str] = (),
    wanted: Sequence[str] = (),
    timeout_seconds: float = 60.0,
) -> Interpreter:
    """Return what an interpreter sees; ``modules`` are used once, ``wanted`` ones only looked for."""
    request = json.dumps([list(names), list(modules), _PACKAGES, list(wanted)])
    try:
        child = subprocess.Popen(
            [executable, "-c", _PROGRAM, request],
            env=dict(env),
            cwd="/",  # `-c` imports from here first: no file of the user's is to pass for a module
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        out, said = child.communicate(timeout=timeout_seconds)
    except (OSError, ValueError) as error:
        return Interpreter(executable, error=f"{type(error).__name__}: {error}")
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return Interpreter(executable, error=f"no answer within {timeout_seconds:g} s")
    _, mark, answer = out.rpartition("\nMEMFIT ")
    if not mark:
        last = said.strip().splitlines()[-1:] or [""]
        return Interpreter(executable, error=f"exit code {child.returncode}: {last[0]}")
    found = json.loads(answer.splitlines()[0])
    return Interpreter(**{**found, "version": tuple(found["version"])})
