"""Examine a place and a command's effective environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from memfit.checks import VERDICTS, Check
from memfit.doctor import _checks_host as host
from memfit.doctor import _checks_script as script
from memfit.doctor._case import REAL_ROOT, Case, Interpreter, Setup
from memfit.doctor._command import parse_command
from memfit.doctor._script import read_script
from memfit.jobs import Job, child_env, own_threads
from memfit.memory import Budget
from memfit.rundir import RunDir

_CHECKS = (
    script.check_command,
    script.check_fork,
    script.check_guard,
    script.check_threads,
    host.check_shm,
    host.check_limits,
    host.check_budget,
    host.check_walls,
    host.check_folders,
    script.check_allocator,
)
#: What an interpreter says of itself, in any Python 3.
_PROGRAM = "import sys, multiprocessing as m; print('\\nMEMFIT %d.%d' % sys.version_info[:2], m.get_start_method())"


def examine(
    command: Sequence[str] = (),
    setup: Setup | None = None,
    *,
    root: Path = REAL_ROOT,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    interpreter: Interpreter | None = None,
) -> list[Check]:
    """Return what is wrong, or may go wrong, with this place and with a command in it; the worst first.

    The command is not run. Its script is read, not imported. Its interpreter is started once, in the environment that
    ``memfit run`` would give it. Below another ``root``, a recorded tree, none is started.
    """
    setup, given = setup or Setup(), dict(os.environ if env is None else env)
    folder = Path.cwd() if cwd is None else cwd.absolute()
    budget = Budget.read(root=root, env=given)
    threads = setup.threads or own_threads(given) or budget.num_cpus
    job = Job("cmd_0001", command=("true",), threads=threads, cuda_allocator=setup.cuda_allocator)
    one = parse_command(command, cwd=folder, env=given)
    inside = {**given, **child_env(job, RunDir(setup.runs_dir)), **one.env}
    text = read_script(one, folder)
    executable = one.interpreter if one.words else sys.executable
    if interpreter is None and root == REAL_ROOT and executable is not None:
        interpreter = ask_interpreter(executable, env=inside)
    case = Case(root, budget, setup, one, text, interpreter, inside, folder)
    return sorted((one for checks in _CHECKS for one in checks(case)), key=lambda one: -VERDICTS.index(one.verdict))


def ask_interpreter(executable: str, *, env: Mapping[str, str], timeout_seconds: float = 60.0) -> Interpreter:
    try:
        child = subprocess.Popen(
            [executable, "-c", _PROGRAM],
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
        return Interpreter(error=f"{type(error).__name__}: {error}")
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return Interpreter(error=f"no answer within {timeout_seconds:g} s")
    _, mark, answer = out.rpartition("\nMEMFIT ")
    if not mark:
        last = said.strip().splitlines()[-1:] or [""]
        return Interpreter(error=f"exit code {child.returncode}: {last[0]}")
    return Interpreter(*answer.split()[:2])
