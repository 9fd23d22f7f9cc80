"""``examine``: all checks of a place and of a command's effective environment, the worst first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from memfit.checks import Check, worst_first
from memfit.doctor import _checks_command as commands
from memfit.doctor import _checks_host as host
from memfit.doctor import _checks_settings as settings
from memfit.doctor import _checks_workers as workers
from memfit.doctor._case import Case, Setup
from memfit.doctor._command import Command
from memfit.doctor._interpreter import Interpreter, ask_interpreter
from memfit.doctor._place import REAL_ROOT, Place
from memfit.doctor._script import Outside, read_script
from memfit.doctor._shell import commands_of
from memfit.jobs import Job, child_env
from memfit.memory import Budget
from memfit.rundir import JOB_ID_VARIABLE, RUN_DIR_VARIABLE, RunDir

_CHECKS: tuple[Callable[[Case], Iterator[Check]], ...] = (
    commands.check_command,
    workers.check_fork,
    workers.check_guard,
    workers.check_threads,
    workers.check_environment,
    host.check_shm,
    host.check_leftovers,
    host.check_limits,
    host.check_budget,
    host.check_walls,
    host.check_kernel,
    host.check_folders,
    settings.check_allocator,
    settings.check_malloc,
    settings.check_debugging,
    settings.check_packages,
)
#: Imported by a deep examination when the script imports them; nothing else is.
_USED = ("numpy", "torch", "polars", "torchvision")


def examine(
    command: Sequence[str] = (),
    setup: Setup | None = None,
    *,
    root: Path = REAL_ROOT,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    interpreter: Interpreter | None = None,
) -> list[Check]:
    """What is wrong, or may go wrong, with this place and with a command in it; the worst first.

    The command is not run. Its script is read, not imported; its interpreter is started once, in the environment that
    ``memfit run`` would give it, to say what it sees.

    Args:
        command: The command; without one the place alone is examined, with this interpreter.
        setup: How the command is to run.
        root: The folder above proc and sys; in another one than ``/``, a recorded tree, no interpreter is started.
        env: The environment; this process's own when None.
        cwd: The folder that the command starts in; this process's when None.
        interpreter: What the interpreter said, instead of asking it.

    Example:
        >>> checks = examine(["python", "-c", "print(1)"])
        >>> {check.check for check in checks} >= {"fork", "threads", "/dev/shm", "budget"}
        True
    """
    setup, given = setup or Setup(), dict(os.environ if env is None else env)
    folder = Path.cwd() if cwd is None else cwd.absolute()
    place = Place(root, Budget.read(root=root, env=given))
    found: dict[Check, None] = {}  # each once: what a shell script starts shares the place
    for parsed in commands_of(command, cwd=folder, env=given):
        case = _case(parsed, setup, place, given, parsed.cwd or folder, interpreter)
        found |= dict.fromkeys(check for one in _CHECKS for check in one(case))
    return worst_first(list(found))


def _case(
    parsed: Command,
    setup: Setup,
    place: Place,
    given: Mapping[str, str],
    folder: Path,
    interpreter: Interpreter | None,
) -> Case:
    """One command with what it is given, what its script says and what its interpreter says."""
    job = Job(
        "cmd_0001",
        command=("true",),
        threads=setup.threads or place.budget.num_cpus,
        tight_malloc=setup.tight_malloc,
        cuda_allocator=setup.cuda_allocator,
    )
    names_it = (RUN_DIR_VARIABLE, JOB_ID_VARIABLE)
    added = {name: value for name, value in child_env(job, RunDir(setup.runs_dir)).items() if name not in names_it}
    inside = {**given, **added, **parsed.env}
    script = read_script(
        parsed.script, Outside(parsed.arguments, inside, place.num_host_cpus), text=parsed.code, cwd=folder
    )
    executable = parsed.interpreter if parsed.words else sys.executable
    if interpreter is None and place.is_real and executable is not None:
        if entries := inside.get("PYTHONPATH"):  # as it is meant from the command's folder: the child starts elsewhere
            inside["PYTHONPATH"] = os.pathsep.join(str(folder / one) for one in entries.split(os.pathsep))
        modules = [name for name in _USED if name in script.imports] if setup.deep else []
        wanted = {*script.imports, *filter(None, [parsed.module.partition(".")[0]])}
        names = list(added)
        interpreter = ask_interpreter(executable, env=inside, names=names, modules=modules, wanted=sorted(wanted))
    return Case(place, setup, parsed, script, interpreter, given, added, folder)
