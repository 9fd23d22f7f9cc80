"""``examine``: all checks of a place and of a command's effective environment, the worst first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from memfit.diagnosis import _checks_host as host
from memfit.diagnosis import _checks_settings as settings
from memfit.diagnosis import _checks_shm as shm
from memfit.diagnosis import _checks_workers as workers
from memfit.diagnosis._case import Case, Setup
from memfit.diagnosis._check import Check, worst_first
from memfit.diagnosis._command import Command, parse_command, which
from memfit.diagnosis._interpreter import Interpreter, ask_interpreter
from memfit.diagnosis._place import REAL_ROOT, Place
from memfit.diagnosis._script import Script, read_script
from memfit.jobs import Job, child_env
from memfit.memory import Budget
from memfit.rundir import JOB_ID_VARIABLE, RUN_DIR_VARIABLE, RunDir

_CHECKS: tuple[Callable[[Case], Iterator[Check]], ...] = (
    workers.check_fork,
    workers.check_guard,
    workers.check_threads,
    workers.check_environment,
    shm.check_shm,
    shm.check_leftovers,
    shm.check_sharing,
    host.check_budget,
    host.check_walls,
    host.check_processes,
    host.check_maps,
    host.check_address_space,
    host.check_overcommit,
    host.check_swap,
    host.check_huge_pages,
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
    parsed = parse_command(command, cwd=folder, env=given)
    added = _added(setup, place)
    inside = {**given, **added, **(parsed.env or {})}
    script = read_script(
        parsed.script,
        text=parsed.code,
        arguments=parsed.arguments,
        env=inside,
        cwd=folder,
        num_cpus=place.num_host_cpus,
    )
    if interpreter is None and place.is_real:
        interpreter = _ask(parsed, script, setup, inside, list(added))
    case = Case(place, setup, parsed, script, interpreter, given, added, folder)
    found = [check for one in _CHECKS for check in one(case)]
    return worst_first([*_unread(case), *found])


def _added(setup: Setup, place: Place) -> dict[str, str]:
    """What memfit sets for a job, without what only names the run and the job."""
    threads = setup.threads or place.budget.num_cpus
    job = Job("cmd_0001", command=("true",), threads=threads, tight_malloc=setup.tight_malloc)
    added = child_env(job, RunDir(setup.runs_dir))
    return {name: value for name, value in added.items() if name not in (RUN_DIR_VARIABLE, JOB_ID_VARIABLE)}


def _ask(
    command: Command, script: Script, setup: Setup, env: Mapping[str, str], names: list[str]
) -> Interpreter | None:
    """What the command's interpreter says; without a command, this one."""
    executable = command.interpreter if command.words else sys.executable
    if executable is None:
        return None
    modules = [name for name in _USED if name in script.imports] if setup.deep else []
    return ask_interpreter(executable, env=env, names=names, modules=modules, wanted=sorted(script.imports))


def _unread(case: Case) -> Iterator[Check]:
    """What of the command could not be read."""
    words, script = case.command.words, case.script
    if words and case.place.is_real and which(words[0], case.cwd, case.env) is None:
        what = f"there is no program '{words[0]}'"
        rule = "a command begins with a program on the PATH, or with the path of an executable file"
        yield Check("command", "problem", what, rule, "correct the name, or activate its environment", "PATH")
    reason = "loaders, forks and imports are found in the script's text"
    for error in script.errors:
        yield Check("script", "warning", f"not read: {error}", reason, "", error.partition(":")[0])
    if words and not script.files and not script.errors:
        yield Check(
            "script",
            "warning",
            f"no Python script is seen in '{' '.join(words)[:80]}'",
            reason,
            "name it: memfit doctor -- python train.py; and what its words do not tell: --workers, --batch",
            "the command",
        )
    elif script.files:
        more = f" and {len(script.files) - 1} modules beside it" if len(script.files) > 1 else ""
        finding = f"{script.files[0]}{more} read: {len(script.imports)} imports, {len(script.loaders)} loaders"
        yield Check("script", "ok", finding, reason, source=script.files[0])
