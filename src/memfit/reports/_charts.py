"""Charts as inline SVG: memory over time, and a bar per job. No script, no other file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from memfit.units import GIB, KIB, MIB, TIB, format_bytes, format_duration

#: Eight colours that colour-blind readers can tell apart, on light and on dark ground (after Okabe and Ito).
COLOURS = ("#4c8bc4", "#e69f00", "#2aa876", "#cc79a7", "#d5652a", "#8a7fd1", "#7b9b3a", "#8c8c8c")
#: The style sheet that a chart needs where it is shown.
CHART_STYLE = (
    ".ink{fill:currentColor}.dim{fill:currentColor;opacity:.65}.grid{stroke:currentColor;opacity:.15}"
    ".limit{stroke:#d03030;stroke-dasharray:6 4;stroke-width:1.5}.bad{fill:#d03030}"
    "text{font:12px system-ui,sans-serif}.head{font-weight:600}"
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 22, 26
_ROW, _BAR, _LETTER, _MOST_LETTERS = 22, 14, 7.3, 36
#: Above this share of a limit the chart shows the limit; below, the data fill the chart.
_SHOWS_LIMIT = 0.2
_ABOUT_TICKS = 5


@dataclass(frozen=True)
class Layer:
    """One band of a stack: its name in the legend, its fill, and its bytes at evenly spaced times."""

    name: str
    colour: str
    values: Sequence[float]


@dataclass(frozen=True)
class Bar:
    """A job's bar; each part has its start and end in seconds, and a colour."""

    name: str
    parts: Sequence[tuple[float, float, str]]
    note: str
    is_bad: bool


def draw_stack(
    layers: Sequence[Layer],
    seconds: float,
    label: str,
    *,
    limit: tuple[str, int] | None = None,
    marks: Sequence[tuple[float, str]] = (),
    title: str = "",
    size: tuple[int, int] = (960, 280),
) -> str:
    """Return a chart of memory over time, its layers on top of each other, the lowest first.

    Args:
        layers: The bands; each has as many values.
        seconds: How long the time axis is.
        label: What a screen reader says.
        limit: The name and the bytes of a limit, drawn as a line where the data come near it.
        marks: Crosses at the upper edge: seconds from the start, and what a pointer shows.
        title: A heading inside the chart.
        size: Width and height in pixels.
    """
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    most = max(totals, default=0) or 1.0
    near = limit is not None and most >= _SHOWS_LIMIT * limit[1]
    end = max(most, limit[1] if limit and near else 0) * 1.06
    left, right, top, bottom = _LEFT, size[0] - _RIGHT, _TOP + (18 if title else 0), size[1] - _BOTTOM

    def x_of(at: float) -> float:
        return left + (right - left) * at / max(seconds, 1e-9)

    def y_of(memory: float) -> float:
        return bottom - (bottom - top) * memory / end

    parts = [_text(left, 16, title, kind="ink head")] if title else []
    for tick in byte_ticks(end):
        parts.append(_line(left, y_of(tick), right, y_of(tick), "grid"))
        parts.append(_text(left - 8, y_of(tick) + 4, format_bytes(round(tick)), anchor="end", kind="dim"))
    parts += _time_axis(seconds, x_of, top, bottom)
    below, xs = [0.0] * len(totals), [x_of(seconds * at / max(1, len(totals) - 1)) for at in range(len(totals))]
    for layer in layers:
        above = [low + value for low, value in zip(below, layer.values, strict=True)]
        edge, back = ([f"{x:.1f},{y_of(one):.1f}" for x, one in zip(xs, ys, strict=True)] for ys in (above, below))
        points = f'points="{" ".join(edge + back[::-1])}" fill="{layer.colour}" fill-opacity=".85"'
        parts.append(f"<polygon {points}><title>{escape(layer.name)}</title></polygon>")
        below = above
    if limit is not None:
        text = f"{limit[0]}: {format_bytes(limit[1])}"
        if near:
            parts.append(_line(left, y_of(limit[1]), right, y_of(limit[1]), "limit"))
            parts.append(_text(left + 6, y_of(limit[1]) - 5, text, kind="bad"))
        else:
            parts.append(_text(right, top - 6, f"{text}, far above this chart", anchor="end", kind="dim"))
    parts += [_text(x_of(at), top + 14, "✕", anchor="middle", kind="bad", title=text) for at, text in marks]
    return _svg(parts, label, size)


def draw_bars(bars: Sequence[Bar], seconds: float, label: str, width: int = 960) -> str:
    """Return one bar per job over time, from above; its height is that of the bars."""
    height = _TOP + _ROW * len(bars) + _BOTTOM
    names = [bar.name if len(bar.name) <= _MOST_LETTERS else f"{bar.name[: _MOST_LETTERS - 1]}…" for bar in bars]
    left = 16 + _LETTER * max(map(len, names), default=0)
    right = width - min(8 + _LETTER * max((len(bar.note) for bar in bars), default=0), width / 3)

    def x_of(at: float) -> float:
        return left + (right - left) * at / max(seconds, 1e-9)

    parts = _time_axis(seconds, x_of, _TOP - 8, height - _BOTTOM)
    for number, (bar, name) in enumerate(zip(bars, names, strict=True)):
        y = _TOP + _ROW * number
        parts.append(_text(left - 8, y + _BAR - 3, name, anchor="end"))
        for start, stop, colour in bar.parts:
            place = f'x="{x_of(start):.1f}" y="{y}" width="{max(1.0, x_of(stop) - x_of(start)):.1f}"'
            parts.append(f'<rect {place} height="{_BAR}" fill="{colour}"/>')
        parts.append(_text(right + 8, y + _BAR - 3, bar.note, kind="bad" if bar.is_bad else "dim"))
    return _svg(parts, label, (width, height))


def _svg(parts: Sequence[str], label: str, size: tuple[int, int]) -> str:
    box = f'viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(label, quote=True)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "ink", title: str = "") -> str:
    more = f"<title>{escape(title)}</title>" if title else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"'
    return f"<text {place}>{escape(text)}{more}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _time_axis(seconds: float, x_of: Callable[[float], float], top: float, bottom: float) -> list[str]:
    parts = []
    for tick in time_ticks(seconds):
        text = format_duration(tick, short=True) if tick else "0"
        parts.append(_line(x_of(tick), top, x_of(tick), bottom, "grid"))
        parts.append(_text(x_of(tick), bottom + 16, text, anchor="middle", kind="dim"))
    return parts


def time_ticks(seconds: float) -> list[float]:
    """Return round times from 0 up to a duration.

    >>> time_ticks(140)
    [0.0, 30.0, 60.0, 90.0, 120.0]
    """
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
    step = next((step for step in steps if seconds / step <= _ABOUT_TICKS), 86400 * math.ceil(seconds / 86400 / 5))
    return list(_multiples(step, seconds))


def byte_ticks(size: float) -> list[float]:
    """Return round sizes from 0 up to a size.

    >>> [format_bytes(int(tick)) for tick in byte_ticks(700 << 20)]
    ['0 B', '200.0 MiB', '400.0 MiB', '600.0 MiB']
    """
    unit = next((unit for unit in (TIB, GIB, MIB, KIB) if size >= unit), 1)
    step = next(unit * 10**power * n for power in range(20) for n in (0.5, 1, 2) if size / (unit * 10**power * n) <= 5)
    return list(_multiples(step, size))


def _multiples(step: float, end: float) -> Iterator[float]:
    for number in range(int(end / step) + 1):
        yield float(step * number)


def legend(layers: Sequence[tuple[str, str]]) -> str:
    """Return a legend as HTML, from names and colours."""
    items = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in layers)
    return f'<p class="legend">{"".join(items)}</p>'
