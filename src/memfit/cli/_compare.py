"""``memfit compare``: what differs between A and B, and whether one is better than the other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from memfit.cli._settings import with_flags
from memfit.cli._terminal import AsJson, Console, answer
from memfit.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from memfit.evaluation import Decision
    from memfit.rundir import RunDir

#: What was found, as JSON, and how to show it to people.
Answer = tuple[dict[str, Any], Callable[[Console], object]]


@dataclass(frozen=True)
class Flags:
    """The flags of this verb."""

    metric: Annotated[
        str | None, Option(help="A column of days, higher is better; or STAGE.NUMBER of runs.", metavar="NAME")
    ] = None
    differs: Annotated[
        list[str] | None,
        Option(help="Accept one more difference: a setting, code or data. Repeatable.", metavar="NAME"),
    ] = None
    seeds: Annotated[
        bool, Option("--seeds", help="A and B are experiments: compare their completed runs, paired by seed.")
    ] = False
    targets: Annotated[
        Path | None, Option(help="Show how far both runs are from the targets in this file.", metavar="FILE")
    ] = None
    horizon: Annotated[int | None, Option(help="Dates of a label; else as in h5_...", metavar="DATES", min=1)] = None
    level: Annotated[float, Option(help="Confidence level of the interval; alpha of the test is 1 - level.")] = 0.95
    record: Annotated[Path | None, Option(help="Counts comparisons; else the user's, by data.", metavar="FILE")] = None
    as_json: AsJson = False


@with_flags
def compare(
    a: Annotated[
        str,
        typer.Argument(help="A run's folder, an experiment, or a day table (.feather, .csv, .parquet).", metavar="A"),
    ],
    b: Annotated[
        str, typer.Argument(help="What it is compared with: the same, or for days the word random.", metavar="B")
    ],
    *,
    flags: Flags,
) -> None:
    """Say what differs between A and B, and whether one is better. B is the baseline.

    \b
    memfit compare runs/new runs/baseline --targets targets.yaml
    memfit compare adamw sgd --seeds --metric fold.rank_ic --differs params.lr
    memfit compare runs/new random --metric h5_rank_ic

    Two runs may differ in one setting, in code or in data. Each further difference must be named with --differs.
    Settings that change no result do not count. Of an experiment, the newest run is taken, or with --seeds every one.

    One run each is shown without a verdict. With --seeds, A is higher or lower if the interval of the mean difference
    leaves out 0, from 5 pairs on. By days, A is better if the Diebold-Mariano test rejects, after Holm's correction
    for every comparison in the record, and a block bootstrap's interval for the difference lies above 0. A run's
    folder holds days.feather, or checkpoints/stage_backtest/days.feather.

    Exit codes: 0 done, whatever the verdict, 2 bad input, a difference that is not named, or too few dates.
    """
    if flags.targets and (flags.seeds or flags.metric):
        raise UsageError(
            f"--targets is given with {'--seeds' if flags.seeds else '--metric'}.",
            rule="targets name their own numbers, and are compared with one run each.",
            remedy="leave one of the two out",
        )
    found, show = _by_seeds(a, b, flags) if flags.seeds else _by_runs(a, b, flags)
    answer({"a": a, "b": b} | found, flags.as_json, show)


def _by_seeds(a: str, b: str, flags: Flags) -> Answer:
    from memfit.reports import compare_over_seeds, find_runs, print_changes, print_seeds

    if flags.metric is None:
        raise UsageError(
            "--seeds is given without --metric.",
            rule="one number is compared over seeds: STAGE.NUMBER.",
            remedy=f"memfit compare {a} {b} lists the numbers",
        )
    found = compare_over_seeds(find_runs(a), find_runs(b), flags.metric, flags.differs or (), flags.level)

    def show(log: Console) -> None:
        print_changes(found.changes, log)
        print_seeds(found, log)

    return found.to_dict(), show


def _by_runs(a: str, b: str, flags: Flags) -> Answer:
    from memfit.reports import (
        compare_numbers,
        find_changes,
        judge_targets,
        print_before_after,
        print_changes,
        print_targets,
        read_targets,
    )

    run_a, run_b = _run_of(a), _run_of(b)
    if run_a is None or run_b is None:
        if flags.differs or flags.targets or flags.metric is None:
            raise UsageError(
                f"{b if run_a else a} is no run{'' if flags.metric else ', and --metric is missing'}.",
                rule="day tables are compared by --metric alone; settings, code, data and targets belong to runs.",
                remedy="name a run's folder or an experiment, or give --metric COLUMN",
            )
        return _by_days((a, run_a), (b, run_b), flags, flags.metric)
    changes = find_changes(run_a, run_b, flags.differs or ())
    found = changes.to_dict() | {"run_a": str(run_a.path), "run_b": str(run_b.path)}
    more: dict[str, Any]
    show: Callable[[Console], object]
    if flags.targets:
        gaps = judge_targets(read_targets(flags.targets), run_a, run_b)
        more, show = {"targets": [one.to_dict() for one in gaps]}, partial(print_targets, gaps)
    elif flags.metric is None or "." in flags.metric:
        numbers = compare_numbers(run_a, run_b, flags.metric)
        more, show = numbers.to_dict(), partial(print_before_after, numbers)
    else:
        more, show = _by_days((a, run_a), (b, run_b), flags, flags.metric)

    def show_all(log: Console) -> None:
        print_changes(changes, log)
        show(log)

    return found | more, show_all


def _run_of(word: str) -> RunDir | None:
    """Return the run that a word means, or None if it means a day table, a folder with one, or random."""
    from memfit.reports import find_run

    path = Path(word)
    is_run = (path / "run.json").exists() or next(path.glob("run_*/run.json"), None) is not None
    if word == "random" or (path.exists() and not is_run):
        return None
    try:
        return find_run(word)
    except UsageError:
        if path.suffix and not is_run:  # the name of a file that is not there
            return None
        raise


def _name(word: str, run: RunDir | None) -> str:
    """Return what names a run for good: its folder, where the word names the newest of an experiment."""
    return word if run is None or Path(word, "run.json").exists() else str(run.path)


def _by_days(a: tuple[str, RunDir | None], b: tuple[str, RunDir | None], flags: Flags, metric: str) -> Answer:
    from memfit.evaluation import decide_on_record, read_days, record_of

    horizon = _horizon(metric, flags.horizon)
    names = _name(*a), _name(*b)
    days_a = read_days(a[1].path if a[1] else Path(a[0]))
    days_b: pa.Table | Literal["random"] = "random"
    if b[0] != "random":
        days_b = read_days(b[1].path if b[1] else Path(b[0]))
    record = flags.record or record_of(days_a, days_b, metric)
    decision = decide_on_record(days_a, days_b, metric, horizon, record=record, level=flags.level, names=names)
    return {"record": str(record)} | decision.to_dict(), partial(_print, decision, names, record)


def _horizon(metric: str, given: int | None) -> int:
    """Return how many dates the metric's labels span, as given or as its name says."""
    found = re.match(r"h([1-9]\d*)_", metric)
    named = int(found[1]) if found else None
    if given is not None and given < (named or 1):
        raise UsageError(
            f"--horizon {given} is less than the {named} dates that {metric} names.",
            rule="labels that overlap make neighbouring dates alike; taken as fewer dates they understate the error.",
            remedy="leave --horizon out",
        )
    horizon = given or named
    if horizon is None:
        raise UsageError(
            f"{metric} does not say how many dates its labels span.",
            rule="the test needs it, and reads it from names such as h5_rank_ic.",
            remedy="--horizon 1 for a metric of single days",
        )
    return horizon


def _print(decision: Decision, names: tuple[str, str], record: Path, log: Console) -> None:
    log.say(f"{decision.verdict}: {decision.metric}, A less B", style="bold")
    for letter, name, mean in zip("AB", names, (decision.mean_a, decision.mean_b), strict=True):
        log.say(f"  {letter}  {mean:+.5f}  {name}")
    for title, text in decision.explain().items():
        log.say(f"  {title:<15}{text}" + (f"  ({record})" if title == "comparisons" else ""))
