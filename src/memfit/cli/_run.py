"""``memfit run``: run a workload, a function, or commands under one budget."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from memfit.checks import check_one_given
from memfit.cli._settings import Output, Text, flag, join, set_flag, settings_of, spell, tight_flag, with_flags
from memfit.cli._terminal import Console, answer, console, heartbeat, how_to_go_on, survive_hangup
from memfit.doctor import explain_cores
from memfit.errors import DoesNotFitError, JobFailedError, StoppedError, UsageError
from memfit.files import open_own, write_json
from memfit.pipeline import Choice, RunResult, expand
from memfit.pipeline import run as run_anything
from memfit.reports import LiveRun, summarize, view_summary
from memfit.rundir import Reader, RunDir

R = TypeVar("R")
_JOB = "cmd_0001"
_PIECE_BYTES = 1 << 20
#: The flags that choose among stages and units.
_CHOOSING = frozenset({"until", "from_", "skip", "units", "check_files"})


@dataclass(frozen=True)
class RunFlags(Output):
    """The flags of this verb, those used most first. One that gives a setting its value names it behind its option."""

    param: list[str] | None = flag("Values of {fold}, such as fold=1..5 or fold=1,3.", "NAME=VALUES")
    plan: bool = flag("Print what would run, why, and how many fit.")
    limit: Text = flag("The most memory of all jobs together.", "SIZE", "memory.limit")
    memory: Text = flag("Expected peak of one job; {name}: a parameter.", "SIZE", "memory.job")
    max_parallel: Text = flag("Run at most N jobs at once, or as many as fit.", "auto|N", "max_parallel")
    nproc: Text = flag("Processes (ranks) of each job, as of torchrun.", "N", "resources.ranks")
    backend: Text = flag("Run jobs here, or as job arrays of Slurm.", "local|slurm", "backend")
    set_: list[str] | None = set_flag()
    name: Text = flag("The experiment, a folder below the runs.", "NAME", "experiment")
    new: bool = flag("Start a new run; do not continue the newest.")
    num_gpus: Text = flag("GPUs of each job. It sees no others.", "N", "memory.num_gpus")
    gpu_memory: Text = flag("Expected peak of one job on each of its GPUs.", "SIZE", "memory.gpu_job")
    reserve: Text = flag("Memory that is kept free.", "SIZE", "memory.reserve")
    retries: Text = flag("Restarts after a kill or an out-of-memory.", "N", "retries")
    on_failure: Text = flag("After a failure: stop all jobs, or continue.", "stop|continue", "on_failure")
    runs_dir: Text = flag("The folder of all runs.", "FOLDER", "runs_dir")
    grace: Text = flag("Time to save before a stopped job is killed.", "SECONDS", "grace_seconds")
    accept_tight: bool = tight_flag()
    force: bool = flag("Also run jobs that do not fit the budget.")
    until: Text = flag("Run up to this stage.", "STAGE")
    from_: Text = flag("Run this stage and all later ones again.", "STAGE")
    skip: list[str] | None = flag("Treat this stage as done. Repeatable.", "STAGE", "skip")
    units: Text = flag("Run these units only, such as 2-5 or 1,3.", "RANGE", "units")
    on: Path | None = flag("Plan for the machine that this file describes.", "YAML")
    out: Path | None = flag("Keep the plan, for --planned.", "JSON")
    no_steps: bool = flag("Plan without first steps: start nothing.")
    planned: Text = flag("A kept plan: say what is not as in it.", "JSON", "planned")
    check_files: bool = flag("Read all kept files; make damaged ones again.")
    canary: bool = flag("Try a few steps of every phase, then stop.", None, "canary=true")
    canary_args: Text = flag("What a canary adds to the command.", "'WORDS'", "canary_args")


@with_flags
def run(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG|MODULE:FUNCTION", hidden=True, show_default=False),
    ] = None,
    *,
    flags: RunFlags,
) -> None:
    """Run a config, a function or a command within one memory budget.

    \b
    memfit run -- python train.py
    memfit run --param fold=1..5 -- python train.py --fold {fold}
    memfit run config.yaml
    memfit run config.yaml --plan --on machine.yaml --out plan.json

    memfit measures the first job and runs as many others at once as fit. The same command continues the newest run if
    not done. Ctrl-C stops the jobs at a checkpoint; a second one kills them.

    --canary tries training, a checkpoint and validation on all ranks. It says what to request, or gives 3 and what
    broke: docs/commands.md.

    Exit codes: 0 done, 2 bad input, 3 does not fit, 4 a job failed, 10 or 11 a stage ended it, 75 stopped, 79 a rank
    hung, 130 interrupted. One command: its own.
    """
    command: tuple[str, ...] | None = context.obj
    check_one_given(
        {f"a config ({source})": source, "a command": command or None},
        none="memfit run was given nothing to run",
        rule="it runs a config, a function, or the command behind --.",
        remedy="name one: memfit run config.yaml, or memfit run -- python train.py",
    )
    if command and (given := sorted(spell(name) for name in _CHOOSING if getattr(flags, name))):
        raise UsageError(
            f"a command has no stages to choose ({', '.join(given)}).",
            rule="these flags choose among the stages and units of a config.",
            remedy="give a command's units with --param fold=2..5",
        )
    what: str | Sequence[str] = command or source or ""
    combinations = expand(None, flags.param) if flags.param else ()
    settings = settings_of(flags)
    if flags.memory and "{" in flags.memory:
        settings["memory.job_of"] = settings.pop("memory.job")
    how: dict[str, Any] = {
        "overrides": join(settings, flags.set_),
        "choice": Choice(flags.until, flags.from_, check_files=flags.check_files, combinations=tuple(combinations)),
        "new": flags.new,
    }
    if not flags.plan and (flags.on or flags.out):
        raise UsageError(
            f"{'--on' if flags.on else '--out'} was given without --plan.",
            rule="a plan is made for --on and kept in --out; a run takes place here.",
            remedy="add --plan, or leave it out",
        )
    if flags.plan:
        from memfit import pipeline, reports

        if flags.out:
            flags.out.parent.mkdir(parents=True, exist_ok=True)
        steps = None if flags.no_steps else console(stderr=True).say
        plan = pipeline.plan_run(what, steps=steps, on=flags.on, **how)
        if flags.out:
            write_json(flags.out, plan.to_dict())
        answer(plan.to_dict(), flags.as_json, reports.view_run_plan(plan))
        raise typer.Exit(DoesNotFitError.exit_code if plan.fits is False else 0)
    echo = _Echo(to_stderr=flags.as_json) if command and not combinations else None
    is_told = len(combinations) > 1 and not flags.quiet
    if command and is_told and (hint := explain_cores(command, len(combinations), cwd=Path.cwd(), env=os.environ)):
        console(stderr=True).say(hint, "yellow")
    show_run(partial(run_anything, what, force=flags.force, **how), flags, echo)


def show_run(start: Callable[..., RunResult], output: Output, echo: _Echo | None = None) -> NoReturn:
    """Show a run while it goes on, print its summary, and exit with its code: of a single command, that one's own."""
    result, log, reader = follow(start, output, echo)
    code = result.exit_code if echo is None else _tell_end(result, log, quiet=output.quiet)
    reader = reader or Reader(RunDir(result.path))
    reader.read()
    state = reader.state()
    found = summarize(state) if output.as_json else {}
    parts = chain(view_summary(state, log.width, verbose=output.verbose), (result.canary or {}).get("text", ()))
    answer(found | ({"canary": result.canary} if result.canary else {}), output.as_json, parts, log)
    if result.exit_code == StoppedError.exit_code and not output.as_json:
        log.say(f"\nstopped; {how_to_go_on(RunDir(result.path), [*result.statuses.values()])}")
    raise typer.Exit(code)


def follow(start: Callable[..., R], output: Output, echo: _Echo | None = None) -> tuple[R, Console, Reader | None]:
    """Show a run while it goes on; return its result, the console, and what followed the run."""
    log = console(stderr=output.as_json or echo is not None)
    if echo is not None:
        log._force_terminal = False  # lines alone: a table would mix with the command's output
    survive_hangup()
    live = LiveRun(log, quiet=output.quiet, verbose=output.verbose)
    try:
        with heartbeat("loading the code", quiet=output.quiet or echo is not None) as loaded:

            def view(run: RunDir) -> Callable[[], None]:
                loaded()
                tick = live.show(run)
                if echo is None:
                    return tick
                echo.begin(run.job_dir(_JOB))

                def both() -> None:
                    tick()
                    echo.pass_on()

                return both

            return start(view=view), log, live.reader
    finally:
        if echo is not None:
            echo.pass_on()
        live.close()


def _tell_end(result: RunResult, log: Console, *, quiet: bool) -> int:
    """Print how a single command ended; return the code that a shell gives: 128 + n for signal n."""
    status = result.statuses.get(_JOB)
    code = None if status is None else status.exit_code
    if status is None or code is None:
        return result.exit_code
    if not (quiet and status.state == "completed"):
        name = signal.Signals(-code).name if -code in set(signal.Signals) else -code
        log.print(f"the command was ended by {name}" if code < 0 else f"the command ended with exit code {code}")
    if result.exit_code != JobFailedError.exit_code or not code:
        return result.exit_code
    return code if code > 0 else 128 - code


class _Echo:
    """Passes on what a single command writes to its logs; with ``--json`` all of it to standard error."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._to_stderr = {"out.log": to_stderr, "err.log": True}
        self._shown: dict[Path, int] = {}

    def begin(self, folder: Path) -> None:
        for path in (folder / name for name in self._to_stderr):
            self._shown[path] = path.stat().st_size if path.exists() else 0  # an earlier attempt's

    def pass_on(self) -> None:
        for path in self._shown:
            with suppress(OSError), open_own(path) as file:
                file.seek(self._shown[path])
                left = path.stat().st_size - self._shown[path]  # a fast writer must not hold this process here
                while left > 0 and (new := file.read(min(left, _PIECE_BYTES))):
                    left -= len(new)
                    self._shown[path] += len(new)
                    _write(new, to_stderr=self._to_stderr[path.name])


def _write(content: bytes, *, to_stderr: bool) -> None:
    stream = sys.stderr if to_stderr else sys.stdout
    try:
        stream.flush()
        stream.buffer.write(content)
        stream.buffer.flush()
    except BrokenPipeError:
        console(stderr=to_stderr).on_broken_pipe()
