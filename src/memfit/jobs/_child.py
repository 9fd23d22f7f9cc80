"""Runs a function in an interpreter of its own, which leaves a result or an error as a file."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memfit import errors
from memfit.errors import JobFailedError, MemfitError, StoppedError, UsageError
from memfit.files import read_json, read_whole, write_json
from memfit.masking import mask
from memfit.rundir import read_devices, record

REQUEST, RESULT, ERROR = "request.json", "result.json", "error.json"
#: What ``error.json`` must hold, as ``describe_error`` makes it.
ERROR_SHAPE = {"type": str, "memfit": bool, "text": str}
_MEMORY_ERRORS = ("builtins.MemoryError", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def load_target(target: str) -> Any:
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise UsageError(
            f"target '{target}' names no code.",
            rule="a target is written module:name.",
            remedy="write for example target: my_package.job:WORKLOAD",
        )
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise UsageError(
            f"target '{target}': there is no module '{error.name}'.",
            rule="a target's module is imported from the installed packages, the config's folder and this folder.",
            remedy="correct the name, or start memfit in the folder that holds the module",
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise UsageError(
                f"target '{target}': module '{module_name}' has no '{name}'.",
                rule="a target names something at the top level of its module.",
                remedy=errors.nearest(part, [known for known in dir(value) if not known.startswith("_")]),
            )
        value = getattr(value, part)
    return value


@contextmanager
def importing() -> Iterator[None]:
    """Look for no garbage meanwhile: imports leave little, and those of torch take an eighth less time then."""
    before, ours = gc.get_threshold(), (2**31 - 1, 10, 10)
    gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:  # the imported code may set its own
            gc.set_threshold(*before)


def call_in_child(
    target: str, arguments: Mapping[str, Any], env: Mapping[str, str] | None = None, *, again: bool = True
) -> Any:
    """Return a function's result, or raise its error, from a new interpreter; ``again``: once more if it is killed."""
    with tempfile.TemporaryDirectory(prefix="memfit-") as name:
        folder = Path(name)
        write_json(
            folder / REQUEST, {"target": target, "arguments": dict(arguments), "parent": os.getpid()}, durable=False
        )
        command = [sys.executable, "-m", "memfit.jobs", "child", str(folder)]
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # a second Ctrl-C is for the run, not for what writes its table
        )
        if again and done.returncode == -signal.SIGKILL:
            return call_in_child(target, arguments, env, again=False)
        return read_answer(folder, target, done.returncode, done.stderr)


def read_answer(folder: Path, target: str, exit_code: int, said: str) -> Any:
    """Return the result that a function left in its folder, or raise what `call_in_child` raises."""
    result = read_json(folder / RESULT)
    if result is not None and exit_code == 0:
        return result["result"]
    error = read_json(folder / ERROR, ERROR_SHAPE)
    if error is not None and error["memfit"]:
        raise _rebuilt(error)
    if exit_code < 0 and error is None:
        raise JobFailedError(
            f"the process that runs {target} was ended by signal {-exit_code}.",
            rule="memfit runs it in an interpreter of its own. The kernel kills one when memory is short.",
            remedy="give the same command again; if it ends so each time, free memory",
        )
    frames = re.findall(r'^  File "(.+)", line (\d+)', said, re.MULTILINE)
    where, what = ":".join(frames[-1]) if frames else target, (error or {}).get("text") or f"exit code {exit_code}"
    raise UsageError(
        f"{where} failed: {what}",
        rule=f"{target} runs in a process of its own and must end with 0.",
        remedy=f"correct that code; its last lines were:\n{mask(said)[-2000:].rstrip()}",
    )


def _rebuilt(error: Mapping[str, Any]) -> MemfitError:
    kind = getattr(errors, error["type"], None)
    kind = kind if isinstance(kind, type) and issubclass(kind, MemfitError) else MemfitError
    return kind(error["text"], rule=str(error.get("rule")), remedy=str(error.get("remedy")))


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON: its type, its last line and, for memfit's own, the three parts."""
    found: dict[str, Any] = {"type": type(error).__name__, "memfit": isinstance(error, MemfitError)}
    if isinstance(error, MemfitError):
        found |= mask({"text": error.what, "what": error.what, "rule": error.rule, "remedy": error.remedy})
        return found
    lines = traceback.format_exception_only(error)
    names = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    return {**found, "text": mask(lines[-1].strip())[:2000], "memory": not names.isdisjoint(_MEMORY_ERRORS)}


def die_with(parent: int) -> None:
    """End this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before that held
        os._exit(127)


def main(folder: Path, place: str = "") -> int:
    """Call the function that ``request.json`` names; return the exit code. Its result goes there or to ``place``."""
    place = place or f"{folder}/"
    # Python takes bytecode for that of a file of the same size and second, which may be edited after a run.
    sys.dont_write_bytecode = True
    request = read_whole(folder / REQUEST)
    if request is None:
        print(f"{folder / REQUEST} is missing", file=sys.stderr)
        return 1
    if "parent" in request:
        die_with(request["parent"])  # nobody would read its result
    try:
        with importing():
            function = load_target(request["target"])
        try:
            result = function(**request["arguments"])
        finally:
            if held := read_devices():
                record("devices", **held)
        write_json(Path(place + RESULT), {"result": json.loads(json.dumps(result))})
    except StoppedError as stopped:
        print(stopped, file=sys.stderr)
        write_json(Path(place + ERROR), describe_error(stopped))
        return stopped.exit_code
    except (Exception, SystemExit) as error:
        if isinstance(error, MemfitError):
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()
        write_json(Path(place + ERROR), describe_error(error))
        return error.exit_code if isinstance(error, MemfitError) else 1
    return 0


def raise_error_of(job_dir: Path) -> None:
    error = read_json(job_dir / ERROR, ERROR_SHAPE)
    if error is not None and error["memfit"]:
        raise _rebuilt(error)
