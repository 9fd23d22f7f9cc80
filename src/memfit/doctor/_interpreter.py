"""Ask the command's own interpreter, in a short child, what it sees in its environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: A child that prints what it sees. It must run in any Python 3 and import nothing but the standard library.
_PROGRAM = r"""
import importlib.util, json, multiprocessing, os, sys
names, packages, wanted = json.loads(sys.argv[1])
def attempt(call, *words):
    try:
        return call(*words)
    except Exception:
        return None
def version(name):
    from importlib.metadata import version
    return version(name)
def is_missing(name):
    return importlib.util.find_spec(name) is None
found = {
    "version": list(sys.version_info[:3]), "executable": sys.executable, "env": {n: os.environ.get(n) for n in names},
    "start_method": multiprocessing.get_start_method(), "packages": {name: attempt(version, name) for name in packages},
    "missing": [name for name in wanted if attempt(is_missing, name)],
}
print("\nMEMFIT " + json.dumps(found))
"""
#: Packages whose versions are read, without importing them.
_PACKAGES = ("torch", "polars", "numpy", "pyarrow")


@dataclass(frozen=True)
class Interpreter:
    """What an interpreter said of itself.

    Attributes:
        start_method: The default of ``multiprocessing``.
        env: The variables that memfit sets, as it sees them.
        packages: The installed version of each package, or None.
        missing: The modules that cannot be found.
        error: Why nothing is known; else empty.
    """

    executable: str
    version: tuple[int, ...] = ()
    start_method: str = ""
    env: Mapping[str, str | None] = field(default_factory=dict)
    packages: Mapping[str, str | None] = field(default_factory=dict)
    missing: Sequence[str] = ()
    error: str = ""


def ask_interpreter(
    executable: str,
    *,
    env: Mapping[str, str],
    names: Sequence[str] = (),
    wanted: Sequence[str] = (),
    timeout_seconds: float = 60.0,
) -> Interpreter:
    """Return what an interpreter sees, and which of the ``wanted`` modules it cannot find; none is imported."""
    request = json.dumps([list(names), _PACKAGES, list(wanted)])
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
