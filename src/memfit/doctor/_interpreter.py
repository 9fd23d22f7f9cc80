"""What the command's own interpreter sees in the environment that it will get; a short child tells it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: A child that says what it sees. It must run in any Python 3 and import nothing but what it is asked to.
_PROGRAM = r"""
import json, os, sys, time
names, modules, packages, wanted = json.loads(sys.argv[1])
def threads():
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0
def version(name):
    try:
        from importlib.metadata import version
        return version(name)
    except Exception:
        return None
found = {
    "version": list(sys.version_info[:3]), "executable": sys.executable, "env": {n: os.environ.get(n) for n in names},
    "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
}
import multiprocessing
found["start_method"] = multiprocessing.get_start_method()
found["packages"] = {name: version(name) for name in packages}
import importlib.util
def missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except Exception:
        return False
found["missing"] = [name for name in wanted if missing(name)]
found["threads"], found["imports"] = {"": threads()}, {}
for name in modules:
    started = time.perf_counter()
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
#: Packages whose versions are asked for; no one of them is imported for it.
PACKAGES = ("torch", "torchvision", "torchaudio", "polars", "numpy", "pyarrow")


@dataclass(frozen=True)
class Interpreter:
    """What an interpreter said of itself.

    Attributes:
        executable: The interpreter.
        version: Its version.
        start_method: The default of ``multiprocessing``.
        num_cpus: The CPUs that it may run on.
        env: The variables that were asked for, as it sees them.
        packages: The installed version of each package that was asked for, or None.
        threads: The process's threads at the start (``""``) and after each import; by use, not by import alone.
        imports: For each imported module the error, or empty when it could be imported.
        missing: The modules that were looked for and are not there; no one of them was imported for it.
        torch_threads: What ``torch.get_num_threads()`` says.
        error: Why nothing is known; empty when the rest holds.
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
    """What an interpreter sees, from a child of it that runs none of the command's code.

    Args:
        executable: The interpreter.
        env: Its whole environment.
        names: The variables to read back.
        modules: Modules to import and use once, in this order; their threads are counted.
        wanted: Modules to look for, without importing them.
        timeout_seconds: How long it may take.
    """
    request = json.dumps([list(names), list(modules), list(PACKAGES), list(wanted)])
    words = [executable, "-c", _PROGRAM, request]
    try:
        child = subprocess.Popen(
            words,
            env=dict(env),
            cwd="/",  # `-c` imports from here first: no file of the user's is to pass for a module
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return Interpreter(executable, error=f"{type(error).__name__}: {error}")
    try:
        out, said = child.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return Interpreter(executable, error=f"no answer within {timeout_seconds:g} s")
    _, mark, told = out.rpartition("\nMEMFIT ")
    if not mark:
        last = said.strip().splitlines()[-1:] or [""]
        return Interpreter(executable, error=f"exit code {child.returncode}: {last[0]}")
    found: dict[str, Any] = json.loads(told.splitlines()[0])
    found["version"] = tuple(found["version"])
    return Interpreter(**found)
