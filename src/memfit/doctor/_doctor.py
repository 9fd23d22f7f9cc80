"""Examine a place and a command's effective environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from memfit.checks import Check, worst_first
from memfit.doctor import _checks_host as host
from memfit.doctor import _checks_settings as settings
from memfit.doctor import _checks_workers as workers
from memfit.doctor._case import Case, Setup
from memfit.doctor._command import parse_command
from memfit.doctor._interpreter import Interpreter, ask_interpreter
from memfit.doctor._place import REAL_ROOT, Place
from memfit.doctor._script import read_script
from memfit.jobs import Job, child_env, own_threads
from memfit.memory import Budget
from memfit.rundir import RunDir

_CHECKS: tuple[Callable[[Case], Iterator[Check]], ...] = (
    settings.check_command,
    workers.check_fork,
    workers.check_guard,
    workers.check_threads,
    host.check_shm,
    host.check_leftovers,
    host.check_limits,
    host.check_budget,
    host.check_walls,
    host.check_folders,
    settings.check_allocator,
)


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
    place = Place(root, Budget.read(root=root, env=given))
    job = Job(
        "cmd_0001",
        command=("true",),
        threads=setup.threads or own_threads(given) or place.budget.num_cpus,
        cuda_allocator=setup.cuda_allocator,
    )
    one = parse_command(command, cwd=folder, env=given)
    inside = {**given, **child_env(job, RunDir(setup.runs_dir)), **one.env}
    script = read_script(one.script, text=one.code, cwd=folder)
    asked, executable = interpreter, one.interpreter if one.words else sys.executable
    if asked is None and place.is_real and executable is not None:
        env = dict(inside)
        if entries := env.get("PYTHONPATH"):  # relative to the command's folder: the child starts elsewhere
            env["PYTHONPATH"] = os.pathsep.join(str(folder / entry) for entry in entries.split(os.pathsep))
        asked = ask_interpreter(
            executable, env=env, wanted=sorted({*script.imports, one.module.partition(".")[0]} - {""})
        )
    case = Case(place, setup, one, script, asked, inside, folder)
    return worst_first([check for checks in _CHECKS for check in checks(case)])
