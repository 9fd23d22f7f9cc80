"""Ask the command's own interpreter, in a short child, how it starts processes and which modules it finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: A child that prints what it sees. It must run in any Python 3 and import nothing but the standard library.
_PROGRAM = r"""
import importlib.util, json, multiprocessing, sys
wanted = json.loads(sys.argv[1])
def is_missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except Exception:
        return False
found = {
    "version": list(sys.version_info[:3]), "executable": sys.executable,
    "start_method": multiprocessing.get_start_method(), "missing": [name for name in wanted if is_missing(name)],
}
print("\nMEMFIT " + json.dumps(found))
"""


@dataclass(frozen=True)
class Interpreter:
    """What an interpreter said of itself."""

    executable: str
    version: tuple[int, ...] = ()
    start_method: str = ""  # the default of ``multiprocessing``
    missing: Sequence[str] = ()  # modules that cannot be found
    error: str = ""  # why nothing is known


def ask_interpreter(
    executable: str,
    *,
    env: Mapping[str, str],
    wanted: Sequence[str] = (),
    timeout_seconds: float = 60.0,
) -> Interpreter:
    """Return what an interpreter says, and which of the ``wanted`` modules it cannot find; none is imported."""
    try:
        child = subprocess.Popen(
            [executable, "-c", _PROGRAM, json.dumps([*wanted])],
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
