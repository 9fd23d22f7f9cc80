"""``memfit run`` and ``memfit map``: run a workload's stages, a function, or commands under one budget."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer import Option

from memfit.cli._settings import Flags, Text, with_flags
from memfit.cli._terminal import Console, console, survive_hangup
from memfit.errors import DoesNotFitError, JobFailedError, StoppedError, UsageError
from memfit.masking import mask
from memfit.pipeline import Choice, RunPlan, RunResult, expand, plan_commands, plan_run, resolve_settings, run_commands
from memfit.pipeline import run as run_config
from memfit.reports import LiveRun, RunView, print_run_plan, print_summary, summarize
from memfit.rundir import RunDir

_JOB = "cmd_0001"
_PIECE_BYTES = 1 << 20
_MOST_NAMES = 5
#: The flags that choose among stages and units.
_CHOOSING = frozenset({"until", "stage", "from_", "skip", "units"})


@dataclass(frozen=True)
class RunFlags(Flags):
    """The flags of this verb alone: which stages and units of a config are run."""

    until: Annotated[Text, Option(help="The last stage.", metavar="STAGE")] = None
    stage: Annotated[Text, Option(help="This stage alone; all that it needs must be valid.", metavar="STAGE")] = None
    from_: Annotated[Text, Option("--from", help="This stage and all after it again.", metavar="STAGE")] = None
    skip: Annotated[list[str] | None, Option(help="A stage that counts as passed. Repeatable.", metavar="STAGE")] = None
    units: Annotated[Text, Option(help="Units (folds, files ...), such as 2-5 or 1,3.", metavar="RANGE")] = None


@with_flags
def run(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(help="A config, a YAML file; or a function, module:name.", metavar="CONFIG", show_default=False),
    ] = None,
    *,
    flags: RunFlags,
) -> None:
    """Run what CONFIG says, a function, or the command behind --, under one memory budget.

    memfit run config.yaml runs the stages of a workload: what is valid is kept, what changed runs again. The first unit
    of a stage (a fold, for example) is measured; as many others run at once as fit.

    memfit run train:train --param fold=1..5 runs a plain function once for each value.

    memfit run -- python train.py --fold 3 runs any command. Its output is shown as it comes, and kept. With --param it
    runs once for each combination: memfit run --param fold=1..5 -- python train.py --fold {fold}

    The same command goes on where the last one stood. Ctrl-C once stops the jobs at a checkpoint (exit code 75),
    twice ends them now (130).

    Exit codes: 0 done, 2 bad config or input, 3 does not fit, 4 a job failed, 10 or 11 a stage stopped the run, 75
    stopped and can go on. A single command that failed gives its own code, or 128 + n when signal n ended it.
    """
    command: tuple[str, ...] | None = context.obj
    if bool(command) == (source is not None):
        raise UsageError(
            f"memfit run was given {f'both a config ({source}) and a command' if command else 'nothing to run'}.",
            rule="it runs either a config or a function, or the command behind --.",
            remedy="name one: memfit run config.yaml, or memfit run -- python train.py",
        )
    if command:
        _check_no_stages(flags)
        start_commands(context, command, flags)
    combinations = expand(None, flags.param or [], flags.param_file) if flags.param or flags.param_file else ()
    choice = Choice(until=flags.until, only=flags.stage, anew=flags.from_, combinations=tuple(combinations))
    given = flags.overrides(
        units=flags.units and json.dumps(flags.units), skip=json.dumps(flags.skip) if flags.skip else None
    )
    if flags.plan:
        again = _start_of(context, but=_CHOOSING | {"new"})
        _close_plan(plan_run(source or "", overrides=given, choice=choice, new=flags.new, start=again), flags)
    start = partial(run_config, source or "", overrides=given, choice=choice, new=flags.new, force=flags.force)
    show_run(start, quiet=flags.quiet, as_json=flags.as_json)


@with_flags
def map_(context: typer.Context, *, flags: Flags) -> None:
    """Run the command behind -- for every combination of parameters, under one memory budget.

    memfit map --param fold=1..5 --param lr=1e-3,1e-4 -- python train.py --fold {fold} --lr {lr}

    Values are ranges (1..5, 1..9..2), lists, or both; quotes as in CSV keep a comma: name="a,b". {name} is replaced
    wherever it stands in the command; all other braces stay. The first commands are measured; as many run at once as
    fit. The same command goes on where the last one stood, with what is not done yet.

    Exit codes: 0 done, 2 bad input, 3 does not fit, 4 a command failed, 75 stopped and can go on.
    """
    command: tuple[str, ...] | None = context.obj
    if not command:
        raise UsageError(
            "memfit map was given no command.",
            rule="the command stands behind --, with a {name} for each parameter.",
            remedy="write for example: memfit map --param fold=1..5 -- python train.py --fold {fold}",
        )
    if not flags.param and flags.param_file is None:
        raise UsageError(
            "memfit map was given no parameter.",
            rule="it runs a command for every combination of its parameters.",
            remedy="add for example --param fold=1..5, or run it once: memfit run -- ...",
        )
    start_commands(context, command, flags)


def show_run(start: Callable[..., RunResult], *, quiet: bool, as_json: bool) -> NoReturn:
    """Show a run while it goes on, print what it came to, and exit with its code."""
    log = console(stderr=as_json)
    survive_hangup()
    live = LiveRun(log, quiet=quiet)
    try:
        result = start(view=live.show)
    finally:
        live.close()
    _close(result, log, live.view, as_json=as_json, exit_code=result.exit_code)


def _check_no_stages(flags: RunFlags) -> None:
    given = sorted(f"--{name.strip('_')}" for name in _CHOOSING if getattr(flags, name))
    if given:
        raise UsageError(
            f"a command has no stages to choose ({', '.join(given)}).",
            rule="these flags choose among the stages and units of a config.",
            remedy="leave them out; give a command's units with --param fold=2..5",
        )


def _start_of(context: typer.Context, *, but: AbstractSet[str]) -> str:
    """The command line as it was given, less some parameters, and less those of what is printed."""
    words = ["memfit", "run"]
    for one in sorted(context.command.params, key=lambda one: one.param_type_name):  # arguments, then options
        source = context.get_parameter_source(one.name or "")
        if source is None or source.name != "COMMANDLINE" or one.name in but | {"plan", "quiet", "as_json"}:
            continue
        value = context.params[one.name or ""]
        flag = one.opts[:1] if one.param_type_name == "option" else []
        for each in value if isinstance(value, list | tuple) else [value]:
            words += flag if each is True else [*flag, str(each)]
    return shlex.join(mask(words))


def start_commands(context: typer.Context, command: tuple[str, ...], flags: Flags) -> NoReturn:
    """Run a command, once or for every combination of parameters, and exit with the run's code."""
    settings, params, param_file = resolve_settings(flags.overrides()), flags.param or [], flags.param_file
    if flags.plan:
        one = _start_of(context, but={"param", "param_file", "new"})
        _close_plan(
            plan_commands(command, params=params, param_file=param_file, settings=settings, new=flags.new, start=one),
            flags,
        )
    run_them = partial(
        run_commands, command, params=params, param_file=param_file, settings=settings, new=flags.new, force=flags.force
    )
    if params or param_file is not None:
        show_run(run_them, quiet=flags.quiet, as_json=flags.as_json)
    _show_command(run_them, quiet=flags.quiet, as_json=flags.as_json)


def _show_command(start: Callable[..., RunResult], *, quiet: bool, as_json: bool) -> NoReturn:
    """Pass on what a single command prints, and exit with its code; standard output is its own, or the JSON's."""
    log = console(stderr=True)
    log._force_terminal = False  # lines alone: a table that is drawn anew would mix with the command's own output
    survive_hangup()
    live, echo = LiveRun(log, quiet=quiet), _Echo(to_stderr=as_json)

    def view(run_dir: RunDir) -> Callable[[], None]:
        tick = live.show(run_dir)
        echo.begin(run_dir.job_dir(_JOB))

        def both() -> None:
            tick()
            echo.pass_on()

        return both

    try:
        result = start(view=view)
    finally:
        echo.pass_on()
        live.close()
    _close(result, log, live.view, as_json=as_json, exit_code=_tell_end(result, log, quiet=quiet))


def _tell_end(result: RunResult, log: Console, *, quiet: bool) -> int:
    """Print how a single command ended; its own code when it failed, as a shell gives it: 128 + n for signal n."""
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


def _close_plan(plan: RunPlan, flags: Flags) -> NoReturn:
    """Print what would run and how much of it fits, and exit: with 3 when a job does not fit even alone."""
    if flags.as_json:
        typer.echo(json.dumps(plan.to_dict(), indent=2))
    else:
        print_run_plan(plan, console())
    raise typer.Exit(0 if plan.fits else DoesNotFitError.exit_code)


def _close(result: RunResult, log: Console, view: RunView | None, *, as_json: bool, exit_code: int) -> NoReturn:
    """Print what a run came to, and exit; ``view`` has followed it so far."""
    run_dir = RunDir(result.path)
    if as_json:
        typer.echo(json.dumps(summarize(run_dir, view), indent=2, allow_nan=False))
    else:
        print_summary(run_dir, log, view)
        if result.exit_code == StoppedError.exit_code:
            log.say(f"\n{_how_to_go_on(result)}")
    raise typer.Exit(exit_code)


def _how_to_go_on(result: RunResult) -> str:
    """Say how a run that was stopped goes on, and which of its jobs then start from the beginning."""
    anew = [
        status.job_id
        for status in result.statuses.values()
        if status.state == "cancelled" and status.started is not None and status.checkpointed is None
    ]
    text = f"stopped; to go on: memfit resume {result.path}"
    if not anew:
        return text
    names = ", ".join(anew[:_MOST_NAMES]) + (f" and {len(anew) - _MOST_NAMES} more" if len(anew) > _MOST_NAMES else "")
    start = "starts" if len(anew) == 1 else "start"
    return f"{text}\n{names} {start} again from the beginning: no checkpoint was reported (exit code 75)"


class _Echo:
    """Passes on what a job writes to its logs, from when it begins."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._to_stderr = {"out.log": to_stderr, "err.log": True}
        self._shown: dict[Path, int] = {}

    def begin(self, folder: Path) -> None:
        for path in (folder / name for name in self._to_stderr):
            self._shown[path] = path.stat().st_size if path.exists() else 0  # an earlier attempt's

    def pass_on(self) -> None:
        for path in self._shown:
            with suppress(FileNotFoundError), open(path, "rb") as file:
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
