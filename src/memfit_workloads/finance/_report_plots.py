"""The picture of a backtest, drawn by matplotlib without any of its global state."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memfit.errors import MissingExtraError
from memfit_workloads.finance._backtest import BacktestResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _LIGHT, _GREY, _RED = "#1f5fa8", "#8fb8de", "#777777", "#b03a2e"


def plot_backtest(result: BacktestResult, *, days: pa.Table | None, verdict: str | None = None) -> bytes:
    """Return a PNG of equity and drawdown against the universe, and of the rank IC over time.

    Args:
        result: The backtest.
        days: The day table, of which the rank IC at the backtest's horizon is drawn; None leaves it out.
        verdict: The gate's colour, for the title.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError.of("matplotlib", "plots", "the picture of a backtest") from error
    ic = None if days is None else _rank_ic(days, result.settings.horizon)
    heights = [3.0, 1.6] + ([1.8] if ic is not None else [])
    figure = Figure(figsize=(12.0, 1.6 * sum(heights)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(heights), sharex=True, height_ratios=heights)
    column = {name: result.days[name].to_numpy() for name in result.days.column_names}
    _equity(rows[0], column, is_long=result.settings.side == "long")
    _drawdown(rows[1], column, is_long=result.settings.side == "long")
    if ic is not None:
        _cumulative_ic(rows[2], *ic)
    _title(figure, result, verdict)
    sink = io.BytesIO()
    figure.savefig(sink, format="png")
    return sink.getvalue()


def _title(figure: Figure, result: BacktestResult, verdict: str | None) -> None:
    settings, summary = result.settings, result.summary
    side = "long" if settings.side == "long" else "long and short"
    figure.suptitle(
        f"Backtest {summary.start} to {summary.end}" + (f": {verdict}" if verdict else "") + "\n"
        f"{side}, best {settings.k_ratio:.0%} (at least {settings.k_min}), held {settings.horizon} dates, "
        f"{settings.cost_bps:g} bp per trade\n"
        f"net {summary.annual_return:+.1%} a year, universe {summary.annual_benchmark:+.1%}; Sharpe "
        f"{summary.sharpe:.2f} ± {summary.sharpe_error:.2f} (n = {summary.num_dates}); deepest drawdown "
        f"{summary.max_drawdown:.1%}",
        fontsize=12,
    )


def _equity(axes: Axes, column: dict[str, NDArray[Any]], *, is_long: bool) -> None:
    gross = np.cumprod(1.0 + column["gross"])
    axes.plot(column["date"], gross, color=_LIGHT, linewidth=1.2, label="before costs")
    axes.plot(column["date"], column["equity"], color=_BLUE, linewidth=1.6, label="after costs")
    if is_long:
        axes.plot(column["date"], column["equity_benchmark"], color=_GREY, linewidth=1.2, label="universe")
    lines = np.concatenate([gross, column["equity"], column["equity_benchmark"]])
    if len(lines) and lines.min() > 0 and lines.max() / lines.min() > 3:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("equity (start = 1)")
    axes.set_title("Equity", loc="left", fontsize=10)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    _dated(axes)


def _drawdown(axes: Axes, column: dict[str, NDArray[Any]], *, is_long: bool) -> None:
    axes.fill_between(
        column["date"], 100 * column["drawdown"], 0, color=_RED, alpha=0.35, linewidth=0, label="after costs"
    )
    if is_long:
        universe = column["equity_benchmark"]
        depth = universe / np.maximum.accumulate(np.maximum(universe, 1.0)) - 1.0
        axes.plot(column["date"], 100 * depth, color=_GREY, linewidth=1.0, label="universe")
    axes.set_ylabel("below the last high (%)")
    axes.set_title("Drawdown", loc="left", fontsize=10)
    axes.legend(loc="lower left", frameon=False, fontsize=9)
    _dated(axes)


def _rank_ic(days: pa.Table, horizon: int) -> tuple[NDArray[Any], NDArray[np.float64], int] | None:
    """Dates, rank ICs and the horizon that they are of: the backtest's, else the first one of the table."""
    of_horizon = {int(match[1]): name for name in days.column_names if (match := re.fullmatch(r"h(\d+)_rank_ic", name))}
    if not of_horizon:
        return None
    horizon = horizon if horizon in of_horizon else next(iter(of_horizon))
    dates = days["date"].to_numpy().astype("datetime64[D]")
    values = days[of_horizon[horizon]].cast(pa.float64()).to_numpy(zero_copy_only=False)
    order = np.argsort(dates, kind="stable")
    return dates[order], values[order], horizon


def _cumulative_ic(axes: Axes, dates: NDArray[Any], ic: NDArray[np.float64], horizon: int) -> None:
    known = np.isfinite(ic)
    mean = ic[known].mean() if known.any() else np.nan
    axes.plot(dates, np.cumsum(np.where(known, ic, 0.0)), color=_BLUE, linewidth=1.4)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_ylabel("sum of daily rank ICs")
    axes.set_title(
        f"Cumulative rank IC, {horizon}-date returns (mean {mean:+.3f}, n = {known.sum()})", loc="left", fontsize=10
    )
    _dated(axes)


def _dated(axes: Axes) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(minticks=3, maxticks=8)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
