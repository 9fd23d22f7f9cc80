"""A backtest as files: ``backtest.json``, ``days.csv`` and ``backtest.png``, by matplotlib without its global state."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from memfit.config import to_plain
from memfit.errors import DataError, MissingExtraError
from memfit.files import read_json, write_atomic
from memfit_workloads.finance._backtest import BacktestResult
from memfit_workloads.finance._inference import summarize

REPORT_FILE = "backtest.json"
_BLUE, _LIGHT, _GREY, _RED = "#1f5fa8", "#8fb8de", "#777777", "#b03a2e"
_KIND = {"kind": "memfit.backtest", "schema_version": 3}


def write_backtest(
    path: Path, result: BacktestResult, *, days: pa.Table | None = None, **facts: Any
) -> tuple[Path, ...]:
    """Write a backtest as a JSON file with others beside it, each aside and then renamed; gives the files written.

    The JSON file comes last; it holds settings, summary and facts, with null for what is undefined. Beside
    ``backtest.json``, which is meant where ``path`` is a folder, lie ``days.csv`` and ``backtest.png``; beside
    ``other.json`` they are named ``other_days.csv`` and ``other.png``. The columns of the day table ``days`` go into
    ``days.csv``, its rank IC into the picture. Without matplotlib there is no picture, and a line on standard error
    says so.

    Raises:
        DataError: If the day table has a date twice.
        OSError: For example on a full disk.
    """
    file = path if path.suffix == ".json" else path / REPORT_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    paths = [beside(file, "days.csv")]
    write_atomic(paths[0], _csv(_joined(result.days, days)))
    picture, verdict = file.with_suffix(".png"), facts.get("verdict")
    try:
        write_atomic(picture, plot_backtest(result, days=days, verdict=verdict.colour if verdict else None))
        paths.append(picture)
    except MissingExtraError as error:
        print(f"no {picture.name}: {error.what} {error.remedy}", file=sys.stderr)
        picture.unlink(missing_ok=True)  # one of an earlier backtest would not belong to these numbers
    content = {"settings": result.settings, "summary": result.summary, **facts, "files": [one.name for one in paths]}
    write_atomic(file, json.dumps(plain(_KIND | content), indent=2, allow_nan=False) + "\n")
    return (*paths, file)


def read_backtest(path: Path) -> dict[str, Any]:
    """Return the content of a ``backtest.json``, or of the one in a folder.

    Raises:
        DataError: If it is not there, or of another kind or version.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    value = read_json(file) or {}
    if {name: value.get(name) for name in _KIND} != _KIND:
        raise DataError(
            f"{file} is not there, or is not a backtest of this version.",
            rule=f"this memfit reads {_KIND['kind']} of version {_KIND['schema_version']}.",
            remedy="run the backtest again, or read the file with the memfit that wrote it",
        )
    return value


def plain(value: Any) -> Any:
    """Return records, settings, dates and paths as plain values for JSON; a number that is not finite is None."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else to_plain(value)


def beside(file: Path, name: str) -> Path:
    """Return the file beside a backtest's JSON file: ``days.csv``, or ``five_days.csv`` beside ``five.json``."""
    return file.with_name(name if file.name == REPORT_FILE else f"{file.stem}_{name}")


def _joined(days: pa.Table, evaluated: pa.Table | None) -> pa.Table:
    """Return the days of the backtest with the columns of the day table beside them; null where it has no row."""
    if evaluated is None:
        return days
    dates = evaluated["date"].cast(pa.date32())
    if len(dates.unique()) < len(dates):
        raise DataError(
            "the day table has a date more than once.",
            rule="each date of a backtest is scored by the model of one fold.",
            remedy="hand in the days of one model per date",
        )
    new = [name for name in evaluated.column_names if name not in days.column_names]
    theirs = evaluated.select(new).append_column("date", dates)
    ours = days.set_column(0, "date", days["date"].cast(pa.date32()))
    return ours.join(theirs, "date").sort_by("date")


def _csv(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink, pyarrow.csv.WriteOptions(quoting_style="needed"))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def plot_backtest(result: BacktestResult, *, days: pa.Table | None, verdict: str | None = None) -> bytes:
    """Return a PNG of equity and drawdown against the universe, and of the rank IC where ``days`` have one."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError.of("matplotlib", "plots", "the picture of a backtest") from error
    days, name = pa.table({}) if days is None else days.sort_by("date"), f"h{result.settings.horizon}_rank_ic"
    heights = [3.0, 1.6] + ([1.8] if name in days.column_names else [])
    figure = Figure(figsize=(12.0, 1.6 * sum(heights)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(result, verdict), fontsize=12)
    rows = figure.subplots(len(heights), sharex=True, height_ratios=heights)
    _draw_equity(rows, result)
    if name in days.column_names:
        values = days[name].to_numpy()
        dates = days["date"].to_numpy().astype("datetime64[D]")
        rows[2].plot(dates, np.nancumsum(values), color=_BLUE, linewidth=1.4)
        rows[2].axhline(0, color="black", linewidth=0.6)
        found = summarize(values)
        title = f"Cumulative rank IC, {result.settings.horizon}-date returns (mean {found.mean:+.3f}, n = {found.num_dates})"
        rows[2].set(ylabel="sum of daily rank ICs", title=title)
    for axes in rows:
        locator = AutoDateLocator(minticks=3, maxticks=8)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.margins(x=0.01)
    sink = io.BytesIO()
    figure.savefig(sink, format="png")
    return sink.getvalue()


def _draw_equity(rows: Any, result: BacktestResult) -> None:
    dates, net, universe, below = (
        result.days[name].to_numpy() for name in ("date", "equity", "equity_benchmark", "drawdown")
    )
    gross = np.cumprod(1.0 + result.days["gross"].to_numpy())
    rows[0].plot(dates, gross, color=_LIGHT, linewidth=1.2, label="before costs")
    rows[0].plot(dates, net, color=_BLUE, linewidth=1.6, label="after costs")
    rows[1].fill_between(dates, 100 * below, 0, color=_RED, alpha=0.35, linewidth=0, label="after costs")
    depth = universe / np.maximum.accumulate(np.maximum(universe, 1.0)) - 1.0
    rows[0].plot(dates, universe, color=_GREY, linewidth=1.2, label="universe")
    rows[1].plot(dates, 100 * depth, color=_GREY, linewidth=1.0, label="universe")
    lines = np.concatenate([gross, net, universe])
    if len(lines) and lines.min() > 0 and lines.max() / lines.min() > 3:
        rows[0].set_yscale("log")
    rows[0].set(ylabel="equity (start = 1)", title="Equity")
    rows[1].set(ylabel="below the last high (%)", title="Drawdown")
    for axes in rows[:2]:
        axes.legend(frameon=False, fontsize=9)


def _title(result: BacktestResult, verdict: str | None) -> str:
    settings, summary = result.settings, result.summary
    return (
        f"Backtest {summary.start} to {summary.end}" + (f": {verdict}" if verdict else "") + "\n"
        f"best {settings.k_ratio:.0%} (at least {settings.k_min}), held "
        f"{settings.horizon} dates, {settings.cost_bps:g} bp per trade\n"
        f"net {summary.annual_return:+.1%} a year, universe {summary.annual_benchmark:+.1%}; Sharpe "
        f"{summary.sharpe:.2f} ± {summary.sharpe_error:.2f} (n = {summary.num_dates}); deepest drawdown "
        f"{summary.max_drawdown:.1%}"
    )
