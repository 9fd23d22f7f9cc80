"""Numbers of unknown meaning as text, for a metric may be a count, a share or a loss."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def format_number(value: float) -> str:
    """A metric's value: a count without decimals, else four of them, or an exponent where those would tell nothing.

    >>> [format_number(value) for value in (545, 0.03712, -0.00002, 123456.7, 0.0)]
    ['545', '0.0371', '-2.000e-05', '1.235e+05', '0.0000']
    """
    if isinstance(value, int):
        return str(value)
    if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.4f}"


def format_column(values: Iterable[float | None], statistics: Iterable[float | None]) -> list[str]:
    """A metric's values over folds and then their statistics; of counts the statistics get one decimal.

    >>> format_column([545.0, None], [545.0, None]), format_column([1.0, 0.5], [0.75, math.nan])
    (['545', '-', '545.0', '-'], ['1.0000', '0.5000', '0.7500', 'nan'])
    """
    values = list(values)
    if all(value is None or (math.isfinite(value) and value == int(value)) for value in values):
        cells = ["-" if value is None else str(int(value)) for value in values]
        return cells + ["-" if value is None else f"{value:.1f}" for value in statistics]
    return ["-" if value is None else format_number(float(value)) for value in (*values, *statistics)]


def or_dash(value: T | None, text: Callable[[T], str]) -> str:
    return "-" if value is None else text(value)


def stamp(seconds: float) -> str:
    """Return Unix seconds as a local time; what no clock shows, as the nearest one that it does."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(0.0, seconds), 2e11)))


def short_path(path: Path) -> str:
    """Return a path relative to the current folder where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def summarize_metrics(units: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float | None, int]]:
    """Per metric the mean over units, the standard deviation (n - 1; None for one) and n."""
    found: dict[str, tuple[float, float | None, int]] = {}
    for name in dict.fromkeys(name for unit in units for name in unit):
        values = [unit[name] for unit in units if name in unit]
        sd = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
        found[name] = (statistics.fmean(values), sd if len(values) > 1 else None, len(values))
    return found


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def metrics_of(result: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in result.items() if is_number(value)}
