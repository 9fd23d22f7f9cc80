"""``memfit compare``: what differs between runs A and B, and their numbers before and after, or over several seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from memfit.cli._settings import with_flags
from memfit.cli._terminal import AsJson, Console, answer
from memfit.errors import UsageError

#: What was found, as JSON, and how to show it to people.
Answer = tuple[dict[str, Any], Callable[[Console], object]]


@dataclass(frozen=True)
class Flags:
    """The flags of this verb."""

    metric: Annotated[str | None, Option(help="Compare this number of the runs alone.", metavar="STAGE.NUMBER")] = None
    differs: Annotated[
        list[str] | None,
        Option(help="Accept one more difference: a setting, code or data. Repeatable.", metavar="NAME"),
    ] = None
    seeds: Annotated[
        bool, Option("--seeds", help="A and B are experiments: compare their completed runs, paired by seed.")
    ] = False
    plan: Annotated[
        bool, Option("--plan", help="A is the plan of B: a plan.json, or a run with its measured memory.")
    ] = False
    as_json: AsJson = False


@with_flags
def compare(
    a: Annotated[str, typer.Argument(help="A run's folder, an experiment, or a plan.json.", metavar="A")],
    b: Annotated[str, typer.Argument(help="What it is compared with: a run or an experiment.", metavar="B")],
    *,
    flags: Flags,
) -> None:
    """Say what differs between A and B, and what became of their numbers. B is the baseline.

    \b
    memfit compare runs/new runs/baseline
    memfit compare adamw sgd --seeds --metric fold.rank_ic --differs params.lr
    memfit compare plan.json runs/new

    Two runs may differ in one setting, in code or in data. Each further difference must be named with --differs.
    Settings that change no result do not count. Of an experiment, the newest run is taken, or with --seeds every one.

    One run each is shown without a verdict. With --seeds, A is higher or lower if the interval of the mean difference
    leaves out 0, from 5 pairs on.

    If A is a plan (run --plan --out plan.json, or a run's plan.json), its forecast of memory stands beside what B took.
    With --plan, A may be a run: what it took then stands for the forecast.

    Exit codes: 0 done, whatever the verdict, 2 bad input, or a further difference without --differs.
    """
    if flags.plan or a.endswith(".json"):
        found, show = _by_plan(a, b, flags)
    else:
        found, show = _by_seeds(a, b, flags) if flags.seeds else _by_runs(a, b, flags)
    answer({"a": a, "b": b} | found, flags.as_json, show)


def _by_plan(a: str, b: str, flags: Flags) -> Answer:
    from memfit.reports import compare_plan, find_run, print_plan_comparison

    if flags.seeds or flags.metric or flags.differs:
        raise UsageError(
            f"--seeds, --metric or --differs was given with the plan {a}.",
            rule="of a plan, the forecast of memory is compared.",
            remedy=f"memfit compare {a} {b}",
        )
    found = compare_plan(Path(a) if a.endswith(".json") else find_run(a), find_run(b))
    return found, partial(print_plan_comparison, found)


def _by_seeds(a: str, b: str, flags: Flags) -> Answer:
    from memfit.reports import compare_over_seeds, find_runs, print_changes, print_seeds

    if flags.metric is None:
        raise UsageError(
            "--seeds is given without --metric.",
            rule="one number is compared over seeds: STAGE.NUMBER.",
            remedy=f"memfit compare {a} {b} lists the numbers",
        )
    found = compare_over_seeds(find_runs(a), find_runs(b), flags.metric, flags.differs or ())

    def show(log: Console) -> None:
        print_changes(found.changes, log)
        print_seeds(found, log)

    return found.to_dict(), show


def _by_runs(a: str, b: str, flags: Flags) -> Answer:
    from memfit.reports import compare_numbers, find_changes, find_run, print_before_after, print_changes

    run_a, run_b = find_run(a), find_run(b)
    changes = find_changes(run_a, run_b, flags.differs or ())
    numbers = compare_numbers(run_a, run_b, flags.metric)

    def show(log: Console) -> None:
        print_changes(changes, log)
        print_before_after(numbers, log)

    paths = {"run_a": str(run_a.path), "run_b": str(run_b.path)}
    return changes.to_dict() | paths | numbers, show
