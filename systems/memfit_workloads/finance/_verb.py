"""``memfit backtest``: what checkpoints' scores would have earned, on dates that their models never saw."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from pyarrow import feather

from memfit import config as settings_of
from memfit.errors import UsageError
from memfit.files import replacing
from memfit.jobs import load_target
from memfit.pipeline import RunConfig, Workload, call_alone, context_of
from memfit_workloads._average import expand_files
from memfit_workloads.finance._blend import score_out_of_fold
from memfit_workloads.finance._lines import judged_lines
from memfit_workloads.finance._report import beside, write_backtest
from memfit_workloads.finance._settings import JudgeSettings
from memfit_workloads.finance._stages import GATE_EXIT_CODES, Judging


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
        typer.Option(help="A JSON file; days and scores go beside it.", metavar="FILE"),
    ] = None,
    gate: Annotated[
        bool, typer.Option("--gate", help="End with the gate's exit code: 0 green, 10 yellow, 11 red.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting, for example params.backtest.k_ratio=0.2.", metavar="KEY=VALUE"),
    ] = None,
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"],
        typer.Option(help="How much is told: the verdict alone (ERROR) to every check (DEBUG)."),
    ] = "WARNING",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Backtest checkpoints on dates that they never saw.

    \b
    memfit backtest --config ranker.yaml --checkpoints 'models/fold*_blended.pt' --start-date 2020-01-01 \\
        --output results/five_folds.json

    A date is scored only by models whose training labels do not meet its own. The data are checked first, then the
    scores are traded with costs, beside shuffled and shifted ones. The gate says green, yellow or red, with reasons.

    Exit codes: 0 done, 2 bad input; with --gate 10 for yellow and 11 for red.
    """
    paths = [path.resolve() for path in expand_files((*(checkpoint or ()), *(more or ())))]
    if not paths:
        raise UsageError(
            "memfit backtest was given no checkpoint.",
            rule="what is judged are the scores of trained models.",
            remedy="name one: memfit backtest --config ranker.yaml --checkpoint runs/.../blend_1/blended.pt",
        )
    dates = [
        (flag, f"params.{name}={text}")
        for flag, name, text in (("--start-date", "start_date", start_date), ("--end-date", "end_date", end_date))
        if text
    ]
    named = None if output is None else str(output.absolute())
    arguments = {"checkpoints": [str(path) for path in paths], "output": named}
    found = call_alone(f"{__name__}:judge_checkpoints", config, arguments, overrides=[*dates, *(set_ or [])])
    if as_json:
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        if log_level in ("INFO", "DEBUG"):
            for one in found["folds"]:
                typer.echo(f"fold {one['fold']}: {one['checkpoint']} scored {one['num_dates']} dates")
        for line in judged_lines(found, log_level):
            typer.echo(line)
    if gate:
        raise typer.Exit(GATE_EXIT_CODES.get(found["verdict"]["colour"], 0))


def judge_checkpoints(target: str, resolved: str, checkpoints: Sequence[str], output: str | None) -> dict[str, Any]:
    """Judge checkpoints on the dates that their models may score; ``resolved`` is the config."""
    workload = load_target(target)
    stages = workload.stages if isinstance(workload, Workload) else ()
    owners = (getattr(stage.run, "__self__", None) for stage in stages)
    judging = next((one for one in owners if isinstance(one, Judging)), None)
    if judging is None:
        raise UsageError(
            f"the workload {target} gives no scores.",
            rule="a backtest trades the scores of a workload with the stages of memfit_workloads.finance.",
            remedy="add them: Workload(stages=(..., *finance.stages(score, market)))",
        )
    whole = settings_of.Resolved.from_json(RunConfig, resolved)
    params: JudgeSettings = settings_of.resolve_nested(whole, "params", workload.params).value
    with tempfile.TemporaryDirectory(prefix="memfit-backtest-") as folder:
        prepared = context_of(target, whole, "fold", Path(folder))[0]["prepare"]
        panel = prepared.panel()
        day = np.asarray(panel.dates).astype("datetime64[D]")
        first, last = params.start_date or day[0], params.end_date or day[-1]
        dates = np.flatnonzero((day >= np.datetime64(first, "D")) & (day <= np.datetime64(last, "D")))
        if not len(dates):
            raise UsageError(
                f"no date {params.period} can be judged.",
                rule=f"the panel has the dates {day[0]} to {day[-1]}.",
                remedy="choose another --start-date and --end-date",
            )
        tables, folds = score_out_of_fold(judging.score, panel, [Path(one) for one in checkpoints], dates, params)
        table, judged = judging.judge(tables, prepared, params)
    files = []
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        for name, content in (("scores.feather", table), ("days.feather", judged.days)):
            files.append(beside(Path(output), name))
            with replacing(files[-1]) as aside:
                feather.write_feather(content, str(aside), compression="zstd")
        facts = {"target": target, "panel": panel.fingerprint, "folds": folds}
        files += write_backtest(Path(output), judged.result, **judged.facts, **facts)
    return {**judged.to_dict(), "folds": folds, "files": [one.name for one in files]}
