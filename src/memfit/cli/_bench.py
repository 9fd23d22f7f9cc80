"""``memfit bench loader``: how fast a workload's loader is beside its trainer, and how many workers are enough."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from memfit.cli._terminal import console
from memfit.errors import UsageError
from memfit.memory import Budget
from memfit.pipeline import LoaderBench, bench_loader
from memfit.units import format_bytes, parse_bytes

_HEADINGS = (
    "workers",
    "samples/s",
    "batches/s",
    "GB/s",
    "GB/s cold",
    "cached",
    "first batch",
    "waits",
    "private",
    "forecast",
    "PSS",
)
_MODE_HEADINGS = ("mode", "workers", "samples/s", "waits", "starts", "private", "data in memory", "")

bench = typer.Typer(
    help="Measure a part of a training on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@bench.callback()
def _bench() -> None:
    pass


@bench.command("loader", short_help="Measure a workload's loader, and choose its number of workers.")
def loader(  # noqa: PLR0913 - one each for what is measured and how
    config: Annotated[Path, typer.Argument(help="A config, a YAML file.", show_default=False)],
    num_workers: Annotated[str, typer.Option(help="The counts of workers to measure.", metavar="N,N,...")] = "0,1,2,4",
    seconds: Annotated[float, typer.Option(help="How long each measurement goes on.")] = 5.0,
    step_ms: Annotated[
        float | None, typer.Option(help="What a training step takes, in milliseconds, on a device of its own.")
    ] = None,
    with_model: Annotated[
        bool, typer.Option("--with-model", help="Train the workload's model on the batches.")
    ] = False,
    limit: Annotated[
        str | None, typer.Option(help="What the workers may take; what is free when left out.", metavar="SIZE")
    ] = None,
    modes: Annotated[
        bool, typer.Option("--modes", help="Compare modes: safe, preload and workers, and choose one.")
    ] = False,
    epochs: Annotated[int, typer.Option(help="With --modes: the epochs of the training they are compared over.")] = 10,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A setting of the config, for example params.data.lookback=20. Repeatable.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON; sizes in bytes, times in seconds.")
    ] = False,
) -> None:
    """Measure the loader of CONFIG's workload for each count of workers, and choose the fewest that are enough.

    Measured are samples, batches and bytes per second with the data in the page cache (warm) and dropped from it (cold;
    the share that was still there is shown), the time to the first batch, what the workers take, and beside a trainer
    (--step-ms or --with-model) the share of its time that it waits for data. A loader that is faster than the trainer
    is no bottleneck.

    --modes compares, over a training of --epochs: safe (batches are made in the training's process), preload (all data
    are read into memory before) and workers, and chooses the simplest that fits and is fast enough.

    Exit codes: 0 done, 2 bad config or input, or a workload without a loader, 3 no count of workers fits.
    """
    if step_ms is not None and with_model:
        raise UsageError(
            "--step-ms and --with-model were both given.",
            rule="the trainer is either a step of a given length or the workload's own.",
            remedy="leave one of them out",
        )
    how = LoaderBench(
        num_workers=_parse_counts(num_workers),
        seconds=seconds,
        step_seconds=None if step_ms is None else step_ms / 1e3,
        with_model=with_model,
        budget_bytes=Budget.read().lendable_bytes if limit is None else parse_bytes(limit),
        modes=modes,
        num_epochs=epochs,
    )
    found = bench_loader(config, how, overrides=set_ or [])
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found)


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


def _print(found: Mapping[str, Any]) -> None:
    log = console()
    log.print(found["data"], markup=False, soft_wrap=True)
    if "modes" in found:
        log.print(_table_of_modes(found["modes"]))
        log.print(f"\nmode: {found['choice'].splitlines()[0]}", markup=False, soft_wrap=True)
        log.print(f"(the loader may take {format_bytes(found['budget_bytes'])})", markup=False, soft_wrap=True)
        return
    log.print(_table(found["reports"]))
    chosen = next(one for one in found["reports"] if one["num_workers"] == found["num_workers"])
    log.print(f"\n{chosen['verdict']['text']}", markup=False, soft_wrap=True)
    log.print(f"num_workers: {found['choice']}", markup=False, soft_wrap=True)
    log.print(f"(the workers may take {format_bytes(found['budget_bytes'])})", markup=False, soft_wrap=True)


def _table(reports: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in _HEADINGS:
        table.add_column(name, justify="right", no_wrap=True)
    for one in reports:
        warm, cold, trained = one["warm"], one["cold"], one["trained"]
        table.add_row(
            str(one["num_workers"]),
            f"{_rate(warm, 'num_samples'):,.0f}",
            f"{_rate(warm, 'num_batches'):,.1f}",
            f"{_rate(warm, 'num_bytes') / 1e9:.3f}",
            "-" if cold is None else f"{_rate(cold, 'num_bytes') / 1e9:.3f}",
            "-" if cold is None or cold["cached_share"] is None else f"{cold['cached_share'] * 100:.0f} %",
            f"{one['start_seconds']:.2f} s",
            "-" if trained is None else f"{_rate(trained, 'wait_seconds') * 100:.1f} %",
            format_bytes(one["worker_private_bytes"]),
            "-" if one["forecast_bytes"] is None else format_bytes(one["forecast_bytes"]),
            format_bytes(one["worker_pss_bytes"]),
        )
    return table


def _table_of_modes(modes: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in _MODE_HEADINGS:
        table.add_column(name, justify="left" if name in ("mode", "") else "right", no_wrap=True)
    for one in modes:
        table.add_row(
            one["name"],
            str(one["num_workers"]),
            f"{one['samples_per_second']:,.0f}",
            f"{one['wait_share'] * 100:.1f} %",
            f"{one['start_seconds']:.2f} s",
            format_bytes(one["private_bytes"]),
            format_bytes(one["data_bytes"]),
            f"refused: {one['refused']}" if one["refused"] else "",
        )
    return table


def _rate(pace: Mapping[str, Any], name: str) -> float:
    seconds = pace["wait_seconds"] + pace["compute_seconds"]
    return float(pace[name] / seconds) if seconds else 0.0
