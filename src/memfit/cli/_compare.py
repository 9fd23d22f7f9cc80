"""``memfit compare``: whether A is better than B, on the dates that both have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from memfit.cli._terminal import console
from memfit.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from memfit.evaluation import Decision


def compare(  # noqa: PLR0913 - one each for what is compared, how, and where it is listed
    a: Annotated[str, typer.Argument(help="A day table (.feather, .csv, .parquet), or a run's folder.", metavar="A")],
    b: Annotated[str, typer.Argument(help="The baseline: the same, or the word random.", metavar="B")],
    metric: Annotated[str, typer.Option(help="The column to compare; higher is better.", metavar="COLUMN")],
    horizon: Annotated[
        int | None,
        typer.Option(help="Dates that a label spans; without it the number in h5_...", metavar="DATES", min=1),
    ] = None,
    level: Annotated[float, typer.Option(help="Of the interval; the test's alpha is 1 less it.")] = 0.95,
    record: Annotated[
        Path, typer.Option(help="Where the comparisons that were tried are listed and counted.", metavar="FILE")
    ] = Path("comparisons.jsonl"),
    common_assets: Annotated[
        bool, typer.Option("--common-assets", help="Evaluate both anew on the assets that both scored.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say whether A is better than B on a metric, by the dates that both have.

    memfit compare runs/new runs/baseline --metric h5_rank_ic

    A run's folder holds days.feather, or has it in results/. A is better when two conditions hold: the paired test of
    Diebold and Mariano, right for labels that overlap, rejects after Holm's correction for every comparison in the
    record; and a block bootstrap's interval for the difference lies above 0. B is better likewise. Otherwise no
    difference is shown, and the smallest effect that these dates could show is given.

    Runs that scored different assets are refused; with --common-assets the scores beside both day tables are evaluated
    anew, on the dates and assets that both have.

    Exit codes: 0 done, whatever the verdict; 2 bad input, or too few dates.
    """
    from memfit.evaluation import common_days, decide_on_record, read_days

    if horizon is None:
        found = re.match(r"h([1-9]\d*)_", metric)
        if not found:
            raise UsageError(
                f"{metric} does not say how many dates its labels span.",
                rule="the test needs it, and reads it from names such as h5_rank_ic.",
                remedy="--horizon 1 for a metric of single days",
            )
        horizon = int(found[1])
    named = re.match(r"h([1-9]\d*)_", metric)
    if named and horizon < int(named[1]):
        raise UsageError(
            f"--horizon {horizon} is less than the {named[1]} dates that {metric} names.",
            rule="labels that overlap make neighbouring dates alike; taken as fewer dates they understate the error.",
            remedy="leave --horizon out",
        )
    days_b: pa.Table | Literal["random"] = "random"
    if common_assets and b != "random":
        days_a, days_b = common_days(Path(a), Path(b))
    else:
        days_a, days_b = read_days(Path(a)), days_b if b == "random" else read_days(Path(b))
    decision = decide_on_record(days_a, days_b, metric, horizon, record=record, level=level, names=(a, b))
    if as_json:
        typer.echo(json.dumps({"a": a, "b": b, "record": str(record)} | decision.to_dict(), indent=2))
        return
    _print(decision, (a, b), record, console())


def _print(decision: Decision, names: tuple[str, str], record: Path, log: Console) -> None:
    log.print(f"{decision.verdict}: {decision.metric}, A less B", style="bold", markup=False)
    for letter, name, mean in zip("AB", names, (decision.mean_a, decision.mean_b), strict=True):
        log.print(f"  {letter}  {mean:+.5f}  {name}", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for title, text in _rows(decision, record):
        table.add_row(f"  {title}", text)
    log.print(table)


def _rows(decision: Decision, record: Path) -> list[tuple[str, str]]:
    """What the table says, a title and a text each."""
    interval = f"{decision.lower:+.5f} to {decision.upper:+.5f}  (blocks of {decision.block_length} dates)"
    alpha = f"{1 - decision.level:.3g}"
    kernel = "" if decision.kernel == "rectangular" else f", {decision.kernel} kernel"
    tried = "this one alone" if decision.num_comparisons == 1 else f"{decision.num_comparisons} tried"
    dropped = [
        f"{number} {text}"
        for number, text in (
            (decision.num_only_a, "only in A"),
            (decision.num_only_b, "only in B"),
            (decision.num_undefined, "undefined"),
        )
        if number
    ]
    rows = [
        ("effect", f"{decision.effect:+.5f} ± {decision.standard_error:.5f} standard error"),
        (f"{decision.level * 100:.4g} % interval", interval),
        (
            "test",
            f"t {decision.statistic:+.2f}, {_p(decision.p_value)}, labels over {decision.horizon} dates{kernel}",
        ),
        ("comparisons", f"{tried}; {_p(decision.adjusted_p_value)} after Holm, against {alpha}  ({record})"),
        ("could show", f"an effect of {decision.minimal_detectable_effect:.5f}, 4 times in 5"),
        ("dates", f"{decision.num_dates} paired; dropped: {', '.join(dropped) or 'none'}"),
    ]
    if decision.num_folds > 1:
        effects = ", ".join(f"{one.effect:+.5f} (fold {one.fold}, {one.num_dates})" for one in decision.folds)
        rows.append(("by fold", effects))
    if decision.num_other_assets:
        rows.append(("note", f"on {decision.num_other_assets} dates A and B scored different numbers of assets"))
    if decision.slow_note:
        rows.append(("warning", decision.slow_note))
    return rows


def _p(value: float) -> str:
    """A p-value to four places.

    >>> _p(0.03), _p(1e-9)
    ('p 0.0300', 'p < 0.0001')
    """
    return f"p {value:.4f}" if value >= 1e-4 else "p < 0.0001"
