"""``memfit compare``: whether A is better than B, on the dates that both have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from memfit.cli._settings import with_flags
from memfit.cli._terminal import AsJson, Console, answer
from memfit.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from memfit.evaluation import Decision


@dataclass(frozen=True)
class Flags:
    """The flags of this verb."""

    metric: Annotated[str, Option(help="The column to compare; higher is better.", metavar="COLUMN")]
    horizon: Annotated[int | None, Option(help="Dates of a label; by default as in h5_...", metavar="DATES", min=1)] = (
        None
    )
    level: Annotated[float, Option(help="Confidence level of the interval; alpha of the test is 1 - level.")] = 0.95
    record: Annotated[Path, Option(help="The file that lists and counts all comparisons.", metavar="FILE")] = Path(
        "comparisons.jsonl"
    )
    as_json: AsJson = False


@with_flags
def compare(
    a: Annotated[str, typer.Argument(help="A day table (.feather, .csv, .parquet), or a run's folder.", metavar="A")],
    b: Annotated[str, typer.Argument(help="The baseline: the same, or the word random.", metavar="B")],
    *,
    flags: Flags,
) -> None:
    """Say whether A is better than B on a metric, on the dates that both have.

    \b
    memfit compare runs/new runs/baseline --metric h5_rank_ic
    memfit compare runs/new random --metric h5_rank_ic

    A is better if the Diebold-Mariano test rejects, after Holm's correction for every comparison in the record, and a
    block bootstrap's interval for the difference lies above 0. Otherwise the smallest effect that these dates could
    show is printed. A run's folder holds days.feather, also in results/.

    Exit codes: 0 done, whatever the verdict, 2 bad input, or too few dates.
    """
    from memfit.evaluation import decide_on_record, read_days

    horizon = _horizon(flags.metric, flags.horizon)
    days_a = read_days(Path(a))
    days_b: pa.Table | Literal["random"] = "random" if b == "random" else read_days(Path(b))
    decision = decide_on_record(
        days_a, days_b, flags.metric, horizon, record=flags.record, level=flags.level, names=(a, b)
    )
    found = {"a": a, "b": b, "record": str(flags.record)} | decision.to_dict()
    answer(found, flags.as_json, partial(_print, decision, (a, b), flags.record))


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
