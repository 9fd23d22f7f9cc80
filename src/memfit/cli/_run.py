"""``memfit run``: train a workload's folds, or run any command, under one budget."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from memfit.cli._settings import Flags, with_flags
from memfit.cli._terminal import console, survive_hangup
from memfit.errors import JobFailedError, StoppedError, UsageError
from memfit.pipeline import RunResult, resolve_settings, run_commands
from memfit.pipeline import run as run_config
from memfit.reports import LiveRun, RunView, print_summary, summarize
from memfit.rundir import RunDir

_JOB = "cmd_0001"
_PIECE_BYTES = 1 << 20
_MOST_NAMES = 5


@with_flags
def run(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="A config of folds, a YAML file.", show_default=False)] = None,
    folds: Annotated[str | None, typer.Option(help="Which folds, for example 2-5 or 1,3.", metavar="RANGE")] = None,
    *,
    flags: Flags,
) -> None:
    """Run what CONFIG says, or the command behind --, under one memory budget.

    memfit run config.yaml trains a workload's folds in parallel. The first fold runs alone until it has passed each
    phase once; what it took admits the others, as many at once as fit.

    memfit run -- python train.py --fold 3 runs any command. Its output is shown as it comes, and kept.

    The same command goes on where the last one stood. Ctrl-C once stops the jobs at a checkpoint (exit code 75),
    twice ends them now (130).

    Exit codes: 0 done, 2 bad config or input, 3 does not fit, 4 a fold failed, 75 stopped and can go on. A command that
    failed gives its own code, or 128 + n when signal n ended it.
    """
    command: tuple[str, ...] | None = context.obj
    _check_what_to_run(config, command, folds)
    log = console(stderr=flags.as_json or not config)
    survive_hangup()
    if config is None:
        result = _run_command(command or (), log, flags)
        close(result, log, as_json=flags.as_json, exit_code=_exit_code(result))
    live = LiveRun(log, quiet=flags.quiet)
    try:
        given = flags.overrides(folds=folds)
        result = run_config(config, overrides=given, new=flags.new, force=flags.force, view=live.show)
    finally:
        live.close()
    close(result, log, as_json=flags.as_json)


def _check_what_to_run(config: Path | None, command: tuple[str, ...] | None, folds: str | None) -> None:
    rule = "it runs either a config of folds, or the command behind --."
    if config is not None and command is not None:
        raise UsageError(
            f"memfit run was given both a config ({config}) and a command.",
            rule=rule,
            remedy="leave one out: memfit run config.yaml, or memfit run -- python train.py",
        )
    if config is None and not command:
        raise UsageError(
            "memfit run was given nothing to run.",
            rule=rule,
            remedy="name one: memfit run config.yaml, or memfit run -- python train.py",
        )
    if command is not None and folds is not None:
        raise UsageError(
            "a command has no folds to choose (--folds).",
            rule="--folds chooses among the folds of a config.",
            remedy=f"run the command for each: memfit map --param fold={folds.replace('-', '..')} -- ...",
        )


def _run_command(command: tuple[str, ...], log: Console, flags: Flags) -> RunResult:
    """Run one command, its output passed on: standard output stays the command's alone, unless JSON comes there."""
    settings = resolve_settings(flags.overrides())
    log._force_terminal = False  # lines alone: a table that is drawn anew would mix with the command's own output
    live, echo = LiveRun(log, quiet=flags.quiet), _Echo(to_stderr=flags.as_json)

    def view(run_dir: RunDir) -> Callable[[], None]:
        tick = live.show(run_dir)
        echo.begin(run_dir.job_dir(_JOB))

        def both() -> None:
            tick()
            echo.pass_on()

        return both

    try:
        result = run_commands(command, settings=settings, new=flags.new, force=flags.force, view=view)
    finally:
        echo.pass_on()
        live.close()
    status = result.statuses.get(_JOB)
    if status is not None and status.exit_code is not None and not (flags.quiet and status.state == "completed"):
        code = status.exit_code
        name = signal.Signals(-code).name if -code in set(signal.Signals) else -code
        log.print(f"the command was ended by {name}" if code < 0 else f"the command ended with exit code {code}")
    return result


def _exit_code(result: RunResult) -> int:
    """The command's own code when it failed, as a shell would give it: 128 + n when signal n ended it."""
    status = result.statuses.get(_JOB)
    if result.exit_code != JobFailedError.exit_code or status is None or not status.exit_code:
        return result.exit_code
    return status.exit_code if status.exit_code > 0 else 128 - status.exit_code


def close(
    result: RunResult, log: Console, *, as_json: bool, exit_code: int | None = None, view: RunView | None = None
) -> NoReturn:
    """Print what a run came to, and exit with its code, or with another; ``view`` has followed it so far."""
    run_dir = RunDir(result.path)
    if as_json:
        typer.echo(json.dumps(summarize(run_dir, view), indent=2, allow_nan=False))
    else:
        print_summary(run_dir, log, view)
        if result.exit_code == StoppedError.exit_code:
            log.print(f"\n{how_to_go_on(result)}", soft_wrap=True, markup=False)
    raise typer.Exit(result.exit_code if exit_code is None else exit_code)


def how_to_go_on(result: RunResult) -> str:
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
        for name in self._to_stderr:
            path = folder / name
            self._shown[path] = path.stat().st_size if path.exists() else 0  # an earlier attempt's

    def pass_on(self) -> None:
        for path in self._shown:
            try:
                with open(path, "rb") as file:
                    file.seek(self._shown[path])
                    left = path.stat().st_size - self._shown[path]  # a fast writer must not hold this process here
                    while left > 0 and (new := file.read(min(left, _PIECE_BYTES))):
                        left -= len(new)
                        self._shown[path] += len(new)
                        self._write(new, to_stderr=self._to_stderr[path.name])
            except FileNotFoundError:
                continue

    @staticmethod
    def _write(content: bytes, *, to_stderr: bool) -> None:
        stream = sys.stderr if to_stderr else sys.stdout
        try:
            stream.flush()
            stream.buffer.write(content)
            stream.buffer.flush()
        except BrokenPipeError:
            console(stderr=to_stderr).on_broken_pipe()
