"""``memfit workflow``: one fold and a gate, then the other folds, then all of them judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from memfit.cli._run import how_to_go_on
from memfit.cli._settings import Flags, with_flags
from memfit.cli._terminal import console, survive_hangup
from memfit.errors import StoppedError
from memfit.pipeline import RunResult
from memfit.pipeline import workflow as run_workflow
from memfit.reports import LiveRun, print_summary, print_workflow, summarize, summarize_workflow
from memfit.rundir import RunDir


@with_flags
def workflow(
    config: Annotated[Path, typer.Argument(help="A config of folds whose workload gives scores.", show_default=False)],
    folds: Annotated[str | None, typer.Option(help="Which folds, for example 1-3.", metavar="RANGE")] = None,
    until: Annotated[
        str, typer.Option(help="The last phase to pass: health, folds or results.", metavar="PHASE")
    ] = "results",
    *,
    flags: Flags,
) -> None:
    """Train CONFIG's first fold, pass a gate, train the other folds, and judge them all on dates they never saw.

    memfit workflow ranker.yaml passes three phases. health: the first fold is trained, its snapshots are averaged, a
    backtest on its test dates passes the gate. folds: the others, in parallel under one memory budget. results: each
    date is scored by the model that did not see it; the scores are backtested and compared with a baseline.

    The same command goes on where the last one stood. results/ in the run's folder holds the tables and the plots.

    Exit codes: 0 done, 2 bad config or input, 3 does not fit, 4 a fold failed, 10 the gate is yellow and the config
    stops there, 11 the gate is red, 75 stopped and can go on.
    """
    log = console(stderr=flags.as_json)
    survive_hangup()
    live = LiveRun(log, quiet=flags.quiet)
    try:
        given = flags.overrides(folds=folds)
        result = run_workflow(config, overrides=given, new=flags.new, force=flags.force, until=until, view=live.show)
    finally:
        live.close()
    close_workflow(result, log, as_json=flags.as_json)


def close_workflow(result: RunResult, log: Console, *, as_json: bool) -> NoReturn:
    """Print what a workflow came to, and exit with its code."""
    run_dir = RunDir(result.path)
    if as_json:
        found = summarize(run_dir) | {"workflow": summarize_workflow(run_dir)}
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        print_summary(run_dir, log)
        print_workflow(run_dir, log)
        if result.exit_code == StoppedError.exit_code:
            log.print(f"\n{how_to_go_on(result)}", soft_wrap=True, markup=False)
    raise typer.Exit(result.exit_code)
