"""``memfit run``: train a workload's folds in parallel under one budget."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from memfit.errors import ConfigError, StoppedError
from memfit.pipeline import run as run_config
from memfit.reports import LiveRun, print_summary, summarize
from memfit.rundir import RunDir


def run(  # noqa: PLR0913 - one flag each
    config: Annotated[Path, typer.Argument(help="The run's config, a YAML file.", show_default=False)],
    max_parallel: Annotated[
        str | None, typer.Option(help="The most folds at once, or 'auto' for as many as fit.", metavar="auto|N")
    ] = None,
    folds: Annotated[str | None, typer.Option(help="Which folds, for example 2-5 or 1,3.", metavar="RANGE")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting, for example params.train.num_epochs=3. Repeatable.", metavar="KEY=VALUE"
        ),
    ] = None,
    on_failure: Annotated[
        str | None,
        typer.Option(help="When a fold fails: go on with the others, or stop them.", metavar="stop|continue"),
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Start over instead of going on with the newest run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Run also what does not fit the budget.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON; the log goes to stderr.")] = False,
) -> None:
    """Train a workload's folds in parallel under one memory budget.

    The first fold runs alone until it has passed each phase once; what it took admits the others, as many at once as
    fit. The same command goes on where the last one stood. Ctrl-C once stops the folds at a checkpoint (exit code 75),
    twice ends them now (130).

    Exit codes: 0 done, 2 bad config or input, 3 does not fit, 4 a fold failed, 75 stopped and can go on.
    """
    flags = {"max_parallel": max_parallel, "folds": folds, "on_failure": on_failure}
    for given in set_ or []:
        name = given.partition("=")[0]
        if flags.get(name) is not None:
            raise ConfigError(
                f"{name} is given twice: --{name.replace('_', '-')} {flags[name]} and --set {given}.",
                rule="a setting has one value on the command line.",
                remedy=f"leave out --set {given}",
            )
    overrides = [*(f"{name}={value}" for name, value in flags.items() if value is not None), *(set_ or [])]
    console = _console(stderr=as_json)
    live = LiveRun(console)
    _survive_hangup()
    try:
        result = run_config(config, overrides=overrides, new=new, force=force, view=live.show)
    finally:
        live.close()
    run_dir = RunDir(result.path)
    if as_json:
        typer.echo(json.dumps(summarize(run_dir), indent=2, allow_nan=False))
    else:
        print_summary(run_dir, console)
        if result.exit_code == StoppedError.exit_code:
            console.print("\nstopped; the same command goes on from here")
    raise typer.Exit(result.exit_code)


class _Console(Console):
    """A console whose reader may go: ``| head``, and a Ctrl-C that also ends ``| tee``, leave the run as it is."""

    def on_broken_pipe(self) -> None:
        _to_nowhere(2 if self.stderr else 1)


def _to_nowhere(*descriptors: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


def _survive_hangup() -> None:
    """Go on unseen when the terminal is closed; ``nohup`` stays as it is."""
    if signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:
        return
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
    signal.signal(signal.SIGHUP, lambda *_: _to_nowhere(*terminals))


def _console(*, stderr: bool) -> Console:
    """A console that does not fold tables at 80 columns where the output goes to a file."""
    console = _Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    return console
