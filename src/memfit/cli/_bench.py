"""``memfit bench loader``: how fast a workload's loader is, and how many workers are enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from memfit.cli._settings import Set, with_flags
from memfit.cli._terminal import AsJson, Console, answer
from memfit.errors import UsageError
from memfit.memory import Budget
from memfit.pipeline import LoaderBench, bench_loader
from memfit.reports import or_dash, plain_table
from memfit.units import format_bytes, parse_bytes

bench = typer.Typer(
    help="Measure a part of a training on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@bench.callback()
def _bench() -> None:
    pass


@dataclass(frozen=True)
class Flags:
    """The flags of this verb."""

    num_workers: Annotated[str, Option(help="Numbers of workers to measure.", metavar="N,N,...")] = "0,1,2,4"
    seconds: Annotated[float, Option(help="Seconds of each measurement.")] = 5.0
    step_ms: Annotated[float | None, Option(help="Milliseconds of a training step on a GPU.")] = None
    with_model: Annotated[bool, Option("--with-model", help="Train the workload's model on the batches.")] = False
    limit: Annotated[str | None, Option(help="Memory of the workers; by default what is free.", metavar="SIZE")] = None
    modes: Annotated[bool, Option("--modes", help="Compare safe, preload and workers, and choose one.")] = False
    epochs: Annotated[int, Option(help="With --modes: epochs of the training.")] = 10
    set_: Set = None
    as_json: AsJson = False


@bench.command("loader", short_help="Measure a workload's loader, and choose its number of workers.")
@with_flags
def loader(
    config: Annotated[Path, typer.Argument(help="A config, a YAML file.", show_default=False)], *, flags: Flags
) -> None:
    """Measure a workload's loader with several numbers of workers, and choose the fewest that are enough.

    \b
    memfit bench loader config.yaml --step-ms 120
    memfit bench loader config.yaml --modes --with-model

    It prints the samples and bytes per second with the data in the page cache (warm) and not (cold), the memory of the
    workers, and how long a trainer waits for data. --modes compares safe (a batch is made when it is asked for),
    preload (all data in memory) and workers.

    Exit codes: 0 done, 2 bad config or input, or a workload without a loader, 3 no number of workers fits.
    """
    if flags.step_ms is not None and flags.with_model:
        raise UsageError(
            "--step-ms and --with-model were both given.",
            rule="the trainer is either a step of a given length or the workload's own.",
            remedy="leave one of them out",
        )
    how = LoaderBench(
        num_workers=_parse_counts(flags.num_workers),
        seconds=flags.seconds,
        step_seconds=None if flags.step_ms is None else flags.step_ms / 1e3,
        with_model=flags.with_model,
        budget_bytes=Budget.read().lendable_bytes if flags.limit is None else parse_bytes(flags.limit),
        modes=flags.modes,
        num_epochs=flags.epochs,
    )
    found = bench_loader(config, how, overrides=flags.set_ or [])
    answer(found, flags.as_json, partial(_print, found))


def _parse_counts(text: str) -> tuple[int, ...]:
    """Counts of workers.

    >>> _parse_counts("0,2")
    (0, 2)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(
            f"--num-workers {text} is no list of counts.",
            rule="counts of workers are whole numbers from 0, with commas between them.",
            remedy="write for example --num-workers 0,1,2,4",
        )
    return tuple(int(word) for word in words)


def _print(found: Mapping[str, Any], log: Console) -> None:
    with_modes = "modes" in found
    log.say(found["data"])
    columns = _OF_MODES if with_modes else _OF_COUNTS
    shown = plain_table(*columns, left=("mode", ""))
    for one in found["modes" if with_modes else "reports"]:
        shown.add_row(*(text(one) for text in columns.values()))
    log.print(shown)
    log.print()
    size = format_bytes(found["budget_bytes"])
    if with_modes:
        log.say(f"mode: {found['choice'].splitlines()[0]}\n(the loader may take {size})")
        return
    chosen = next(one for one in found["reports"] if one["num_workers"] == found["num_workers"])
    log.say(f"{chosen['verdict']['text']}\nnum_workers: {found['choice']}\n(the workers may take {size})")


def _rate(pace: Mapping[str, Any], name: str) -> float:
    seconds = pace["wait_seconds"] + pace["compute_seconds"]
    return float(pace[name] / seconds) if seconds else 0.0


#: The columns of the tables: what each says of a report.
_OF_COUNTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "workers": lambda one: str(one["num_workers"]),
    "samples/s": lambda one: f"{_rate(one['warm'], 'num_samples'):,.0f}",
    "batches/s": lambda one: f"{_rate(one['warm'], 'num_batches'):,.1f}",
    "GB/s": lambda one: f"{_rate(one['warm'], 'num_bytes') / 1e9:.3f}",
    "GB/s cold": lambda one: or_dash(one["cold"], lambda cold: f"{_rate(cold, 'num_bytes') / 1e9:.3f}"),
    "cached": lambda one: or_dash((one["cold"] or {}).get("cached_share"), lambda share: f"{share * 100:.0f} %"),
    "first batch": lambda one: f"{one['start_seconds']:.2f} s",
    "waits": lambda one: or_dash(one["trained"], lambda pace: f"{_rate(pace, 'wait_seconds') * 100:.1f} %"),
    "private": lambda one: format_bytes(one["worker_private_bytes"]),
    "forecast": lambda one: or_dash(one["forecast_bytes"], format_bytes),
    "PSS": lambda one: format_bytes(one["worker_pss_bytes"]),
}
_OF_MODES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "mode": lambda one: one["name"],
    "workers": lambda one: str(one["num_workers"]),
    "samples/s": lambda one: f"{one['samples_per_second']:,.0f}",
    "waits": lambda one: or_dash(one["wait_share"], lambda share: f"{share * 100:.1f} %"),
    "starts": lambda one: f"{one['start_seconds']:.2f} s",
    "private": lambda one: format_bytes(one["private_bytes"]),
    "data in memory": lambda one: format_bytes(one["data_bytes"]),
    "": lambda one: f"refused: {one['refused']}" if one["refused"] else "",
}
