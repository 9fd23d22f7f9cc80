"""``memfit.pipeline.run_commands``: any command, once or for every combination of parameters, under one budget."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memfit import config
from memfit.errors import DamagedError, UsageError
from memfit.jobs import Job, JobStatus, read_status
from memfit.memory import Budget, Footprint
from memfit.pipeline._config import CommandSettings, kept_allocator, of_commands, resolve_with_allocator
from memfit.pipeline._grid import expand, fill
from memfit.pipeline._supervise import CONTINUED, Known, RunResult, View, supervised, take_up
from memfit.pipeline._workflow import resume_folds
from memfit.rundir import RunDir, damaged, read_whole, write_masked

_INTERPRETER = re.compile(r"(?:python|pypy)[0-9.]*|(?:ba|da|z|k)?sh|torchrun|Rscript|julia|node|perl|ruby")
_SCRIPT = re.compile(r".+\.(?:py|sh|R|jl|js|pl|rb)")


@dataclass(frozen=True)
class _Order:
    """A resolved order to run commands."""

    template: tuple[str, ...]
    combinations: Sequence[Mapping[str, str]]
    cwd: str
    settings: CommandSettings
    origins: Mapping[str, str]

    @cached_property
    def fingerprint(self) -> str:
        """By what is run and where; not by how many at once."""
        content = {"template": self.template, "combinations": self.combinations, "cwd": self.cwd}
        return config.fingerprint(content)

    @property
    def facts(self) -> dict[str, Any]:
        """For ``run.json``: all that ``resume`` needs."""
        return {
            "kind": "commands",
            "template": list(self.template),
            "combinations": list(self.combinations),
            "cwd": self.cwd,
            "settings": self.settings.model_dump(mode="json"),
            "origins": dict(self.origins),
        }


def resolve_settings(
    overrides: Sequence[config.Override] = (), env: Mapping[str, str] | None = None
) -> config.Resolved[CommandSettings]:
    """The settings of a run of commands, each with its origin: overrides before environment before defaults.

    Raises:
        ConfigError: If one is unknown or has a bad value.
    """
    env = of_commands(os.environ if env is None else env)
    return resolve_with_allocator(CommandSettings, env=env, overrides=overrides)


def run_commands(
    command: Sequence[str],
    *,
    params: Sequence[str] = (),
    param_file: Path | None = None,
    settings: config.Resolved[CommandSettings] | None = None,
    new: bool = False,
    force: bool = False,
    view: View | None = None,
) -> RunResult:
    """Run a command for every combination of parameters under one memory budget, or go on with the run that stands.

    The newest run of the same command, parameters and folder goes on unless it is finished: what is done is kept, what
    still runs is taken over. SIGINT and SIGTERM ask the commands to stop; a second one ends them at once.

    Args:
        command: The command; ``{name}`` stands for the value of a parameter.
        params: Texts such as ``fold=1..5`` and ``lr=1e-3,1e-4``.
        param_file: A CSV file with a header whose rows are combinations, crossed with ``params``.
        settings: How they are run; from ``MEMFIT_`` variables and defaults when None.
        new: Start over in a new run directory.
        force: Run also what does not fit the budget.
        view: Makes, from the run directory, a function that is called ten times a second while jobs run.

    Returns:
        The result; failed commands are told in it and not raised.

    Raises:
        UsageError: If parameters, settings or the program are bad, or another process runs this run.
        DoesNotFitError: If no command fits the budget even alone.
    """
    settings = settings or resolve_settings()
    words = [*command, *filter(None, [settings.value.memory.job_of])]
    order = _order(command, expand(words, params, param_file), settings)
    run, state = take_up(order.settings, order.fingerprint, order.facts, new=new, keeps=_is_unfinished)
    return _go_on(order, run, state, force=force, view=view)


def resume(run: Path, *, view: View | None = None) -> RunResult:
    """Go on with a run, of folds or of commands, in the folder and with the settings that it was started with.

    Raises:
        UsageError: If there is no such run, its folder is gone, or another process runs it.
    """
    run_dir = RunDir.open(run)
    cwd = Path(run_dir.header.get("cwd") or ".")
    if not cwd.is_dir():
        raise UsageError(
            f"{cwd} is not there, where {run_dir.path} was started.",
            rule="a run goes on in the folder in which it was started, for its paths begin there.",
            remedy=f"make that folder again: mkdir -p {cwd}",
        )
    with contextlib.chdir(cwd):
        if run_dir.header.get("kind") != "commands":
            return resume_folds(run_dir, view)
        header = _read_facts(run_dir)
        try:
            settings = CommandSettings.model_validate(header["settings"])
        except ValidationError as error:
            raise damaged(run_dir.path / "run.json", f"has other settings than this memfit: {error}") from error
        order = _Order(
            tuple(header["template"]), header["combinations"], header["cwd"], settings, dict(header["origins"])
        )
        return _go_on(order, run_dir, CONTINUED, force=False, view=view)


#: What ``run.json`` holds for a run of commands.
_FACTS = {
    "template": [str],
    "combinations": [{str: str}],
    "cwd": str,
    "settings": {"memory": {"tight_malloc": bool}},
    "origins": {str: str},
}


def _read_facts(run: RunDir) -> dict[str, Any]:
    return read_whole(run.path / "run.json", _FACTS) or {}


def _order(
    command: Sequence[str], combinations: Sequence[Mapping[str, str]], resolved: config.Resolved[CommandSettings]
) -> _Order:
    for (program,) in dict.fromkeys(fill(command[:1], combination) for combination in combinations):
        if shutil.which(program) is None:
            path = Path(program)
            what = f"'{program}' is a folder" if path.is_dir() else f"'{program}' is not executable"
            raise UsageError(
                f"{what if path.exists() else f'there is no program {program!r}'}.",
                rule="a command begins with a program: one on the PATH, or the path of an executable file.",
                remedy="correct the name, make the file executable (chmod +x), or name what runs it: python, sh",
            )
    settings, origins = resolved.value, dict(resolved.origins)
    if _own_stdin(combinations) is not None:
        settings = settings.model_copy(update={"retries": 0})
        origins["retries"] = "standard input can be read once"
    if not settings.experiment:
        settings = settings.model_copy(update={"experiment": name_of(command)})
        origins["experiment"] = "the program's name"
    if len(combinations) == 1 and not combinations[0] and origins["threads_per_job"] == config.DEFAULT:
        settings = settings.model_copy(update={"threads_per_job": Budget.read().num_cpus})
        origins["threads_per_job"] = "all cores, for the only job"
    return _Order(tuple(command), combinations, str(Path.cwd()), settings, origins)


def _own_stdin(combinations: Sequence[Mapping[str, str]]) -> str | None:
    """The pipe or file that a single command is to read as this process reads it; None for a terminal or nothing."""
    if len(combinations) != 1 or combinations[0]:
        return None
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return None
    return f"/proc/{os.getpid()}/fd/0" if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else None


def name_of(command: Sequence[str]) -> str:
    """What a command is called: its script or module, else its program.

    >>> name_of(["python3", "-u", "jobs/train.py", "--fold", "3"]), name_of(["python", "-m", "a.b"]), name_of(["/b/x"])
    ('train', 'a.b', 'x')
    """
    name = Path(command[0]).name
    if _INTERPRETER.fullmatch(name):
        pairs = zip(command[1:], [*command[2:], ""], strict=True)
        for word, following in pairs:
            if word == "-c":
                break
            if word == "-m" or _SCRIPT.fullmatch(word):
                name = following if word == "-m" else Path(word).name
                break
    name = Path(name).stem if _SCRIPT.fullmatch(name) else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:80] or "command"


def _is_unfinished(run: RunDir) -> bool:
    with contextlib.suppress(DamagedError):  # each job's own outcome says what is done
        return run.state != "completed"
    return True


def _go_on(order: _Order, run: RunDir, state: str, *, force: bool, view: View | None) -> RunResult:
    settings, facts = order.settings, order.facts
    told = {"state": state, "fingerprint": order.fingerprint}
    with supervised(run, settings, force=force, view=view, told=told) as supervisor:
        before = _read_facts(run)
        if before["settings"] != facts["settings"]:
            write_masked(run.path / "run.json", before | facts)
        if kept := kept_allocator(settings, order.origins):
            supervisor.journal.write("plan", why=kept)
        jobs = _jobs(order)
        done = {
            job.id: status
            for job in jobs
            if not supervisor.backend.is_running(job.id) and (status := read_status(run, job.id)).state == "completed"
        }
        left = [job for job in jobs if job.id not in done]
        if not left:
            supervisor.journal.write("done", num_done=len(jobs))
        same_malloc = before["settings"]["memory"]["tight_malloc"] == settings.memory.tight_malloc
        known = _known(jobs, done) if same_malloc else ()
        ended = supervisor.schedule(left, known=known, num_planned=len(jobs), none_done=len(left) == len(jobs))
        return supervisor.settle({job.id: JobStatus(job.id, "pending") for job in jobs} | done | ended)


def _jobs(order: _Order) -> list[Job]:
    settings, memory = order.settings, order.settings.memory

    def declared(combination: Mapping[str, str]) -> Footprint | None:
        size = fill([memory.job_of], combination)[0] if memory.job_of else memory.job
        return Footprint.declared(size) if size else None

    return [
        Job(
            f"cmd_{number:04d}",
            command=fill(order.template, combination),
            params=combination,
            footprint=declared(combination),
            threads=settings.threads_per_job,
            tight_malloc=memory.tight_malloc,
            cuda_allocator=memory.cuda_allocator,
            cwd=order.cwd,
            stdin=_own_stdin(order.combinations),
            device_bytes=memory.gpu_job,
        )
        for number, combination in enumerate(order.combinations, start=1)
    ]


def _known(jobs: Sequence[Job], done: Mapping[str, JobStatus]) -> Known:
    """What the finished commands took."""
    return [
        (dict(job.params), status.footprint)
        for job in jobs
        if (status := done.get(job.id)) is not None and status.footprint is not None
    ]
