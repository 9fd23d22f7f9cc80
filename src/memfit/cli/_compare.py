"""``memfit compare``: what differs between runs A and B, and their numbers before and after."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from memfit.cli._terminal import AsJson, answer


def compare(
    a: Annotated[str, typer.Argument(help="A run's folder, or an experiment.", metavar="A")],
    b: Annotated[str, typer.Argument(help="What it is compared with: a run or an experiment.", metavar="B")],
    metric: Annotated[str | None, Option(help="Compare this number of the runs alone.", metavar="STAGE.NUMBER")] = None,
    differs: Annotated[
        list[str] | None,
        Option(help="Accept one more difference: a setting, code or data. Repeatable.", metavar="NAME"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what differs between A and B, and what became of their numbers. B is the baseline.

    \b
    memfit compare runs/new runs/baseline
    memfit compare adamw sgd --metric fold.rank_ic --differs params.lr

    Two runs may differ in one setting, in code or in data. Each further difference must be named with --differs.
    Settings that change no result do not count. Of an experiment, the newest run is taken.
    One run each is shown without a verdict.

    Exit codes: 0 done, whatever the verdict, 2 bad input, or a further difference without --differs.
    """
    from memfit.reports import compare_numbers, find_changes, find_run, view_before_after, view_changes

    run_a, run_b = find_run(a), find_run(b)
    changes = find_changes(run_a, run_b, differs or ())
    numbers = compare_numbers(run_a, run_b, metric)
    paths = {"run_a": str(run_a.path), "run_b": str(run_b.path)}
    found = {"a": a, "b": b} | changes.to_dict() | paths | numbers
    answer(found, as_json, [*view_changes(changes), *view_before_after(numbers)])
