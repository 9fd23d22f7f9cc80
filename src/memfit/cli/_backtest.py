"""``memfit backtest``: what checkpoints' scores would have earned, on dates that their models never saw."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from memfit.cli._average import expand_files
from memfit.cli._terminal import console
from memfit.errors import UsageError
from memfit.pipeline import GATE_EXIT_CODES, backtest_checkpoints
from memfit.reports import print_backtest


def backtest(  # noqa: PLR0913 - one each for what is judged, when and where it goes
    config: Annotated[Path, typer.Option(help="The config that the checkpoints were trained with.", metavar="FILE")],
    checkpoint: Annotated[
        list[str] | None,
        typer.Option("--checkpoint", "--checkpoints", help="A checkpoint, or a quoted pattern. Repeatable."),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(help="Further checkpoints.", show_default=False)] = None,
    start_date: Annotated[str | None, typer.Option(help="The first date, included.", metavar="YYYY-MM-DD")] = None,
    end_date: Annotated[str | None, typer.Option(help="The last date, included.", metavar="YYYY-MM-DD")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="A JSON file; days, trades, scores and a plot go beside it.", metavar="FILE"),
    ] = None,
    gate: Annotated[
        bool, typer.Option("--gate", help="End with the gate's exit code: 0 green, 10 yellow, 11 red.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting, for example workflow.backtest.k_ratio=0.2.", metavar="KEY=VALUE"),
    ] = None,
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"],
        typer.Option(help="How much is told: the verdict alone (ERROR) to every check (DEBUG)."),
    ] = "WARNING",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Backtest the scores of checkpoints, each on the dates that its model was not trained on.

    memfit backtest --config ranker.yaml --checkpoints 'models/fold*_blended.pt' --start-date 2020-01-01 \\
        --output results/five_folds.json

    A date is scored only by models whose training labels do not meet its own: checkpoints say what they were trained
    on. The data are checked first, then the scores are traded with costs, and shuffled and shifted scores are traded
    beside them. The gate says green, yellow or red, with reasons.

    Exit codes: 0 done, 2 bad input; with --gate 10 for yellow and 11 for red.
    """
    paths = [path.resolve() for path in expand_files((*(checkpoint or ()), *(more or ())))]
    if not paths:
        raise UsageError(
            "memfit backtest was given no checkpoint.",
            rule="what is judged are the scores of trained models.",
            remedy="name one: memfit backtest --config ranker.yaml --checkpoint runs/.../fold_1/blended.pt",
        )
    if output is not None:
        if output.suffix != ".json":
            raise UsageError(
                f"--output {output} is no JSON file.",
                rule="the result is a JSON file; scores, days, trades and a plot are named after it.",
                remedy=f"write --output {output.with_suffix('.json')}",
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(output.parent, os.W_OK | os.X_OK):
            raise UsageError(
                f"no file can be made in {output.parent}.",
                rule="the folder of --output takes six files: it is asked for before anything is scored.",
                remedy="let it be written to, or name another --output",
            )
    dates = [
        (flag, f"workflow.{name}={text}")
        for flag, name, text in (("--start-date", "start_date", start_date), ("--end-date", "end_date", end_date))
        if text
    ]
    found = backtest_checkpoints(config, paths, overrides=[*dates, *(set_ or [])], output=output)
    if as_json:
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        print_backtest(found, console(), log_level)
    if gate:
        raise typer.Exit(GATE_EXIT_CODES.get(found["verdict"]["colour"], 0))
