"""Charts as inline SVG: memory over time, a bar per job, points and their best so far. No script, no other file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from memfit.units import GIB, KIB, MIB, TIB, format_bytes, format_duration

#: Eight colours that colour-blind readers can tell apart, on light and on dark ground (after Okabe and Ito).
COLOURS = ("#4c8bc4", "#e69f00", "#2aa876", "#cc79a7", "#d5652a", "#8a7fd1", "#7b9b3a", "#8c8c8c")
#: What a chart needs of a style sheet; a page gives these classes its own colours.
STYLE = (
    ".ink{fill:currentColor}.dim{fill:currentColor;opacity:.65}.grid{stroke:currentColor;opacity:.15}"
    ".limit{stroke:#d03030;stroke-dasharray:6 4;stroke-width:1.5}.bad{fill:#d03030}"
    "text{font:12px system-ui,sans-serif}"
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
    """A job's bar; each part has its start and end on the axis, and a colour; ``tick`` is drawn as a line."""

    name: str
    parts: Sequence[tuple[float, float, str]]
    note: str = ""
    tick: float | None = None
    is_bad: bool = False


@dataclass(frozen=True)
class Point:
    """A point of a chart: its number from the left, and its sign; one without a value lies in the row ``lane``."""

    number: int
    value: float | None
    sign: str
    colour: str
    title: str
    lane: str = ""


@dataclass(frozen=True)
class Frame:
    """The outside of a chart: what a screen reader says, a heading, the size in pixels.

    A ``styled`` one has a style sheet of its own, for a file that stands alone; ``draw_bars`` takes its own height.
    """

    label: str
    title: str = ""
    width: int = 960
    height: int = 280
    styled: bool = False


@dataclass
class _Canvas:
    """An SVG that grows."""

    frame: Frame
    height: int
    parts: list[str] = field(default_factory=list)

    def add(self, part: str) -> None:
        self.parts.append(part)

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", kind: str = "ink") -> None:
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.add(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def __str__(self) -> str:
        dark = "@media(prefers-color-scheme:dark){svg{color:#ddd}}"
        style = f"<style>svg{{color:#222}}{dark}{STYLE}</style>" if self.frame.styled else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.frame.width} {self.height}" role="img" '
            f'aria-label="{escape(self.frame.label, quote=True)}">{style}{"".join(self.parts)}</svg>'
        )


def draw_stack(
    layers: Sequence[Layer],
    seconds: float,
    frame: Frame,
    *,
    limit: tuple[str, int] | None = None,
    marks: Sequence[tuple[float, str]] = (),
    most_bytes: float | None = None,
) -> str:
    """Return a chart of memory over time, its layers on top of each other, the lowest first.

    Args:
        layers: The bands; each has as many values.
        seconds: How long the time axis is.
        frame: The outside of the chart.
        limit: The name and the bytes of a limit, drawn as a line where the data come near it.
        marks: Crosses at the upper edge: seconds from the start, and what a pointer shows.
        most_bytes: The end of the memory axis, to compare two charts.
    """
    canvas = _Canvas(frame, frame.height)
    num = max((len(layer.values) for layer in layers), default=0)
    totals = [sum(layer.values[at] for layer in layers) for at in range(num)]
    most = most_bytes or max(totals, default=0) or 1.0
    near = limit is not None and most >= _SHOWS_LIMIT * limit[1]
    end = max(most, limit[1] if limit and near else 0) * 1.06
    left, right = _LEFT, frame.width - _RIGHT
    top, bottom = _TOP + (18 if frame.title else 0), frame.height - _BOTTOM

    def x_of(at: float) -> float:
        return left + (right - left) * at / max(seconds, 1e-9)

    def y_of(size: float) -> float:
        return bottom - (bottom - top) * size / end

    if frame.title:
        canvas.add(f'<text x="{left}" y="16" class="ink" style="font-weight:600">{escape(frame.title)}</text>')
    for tick in byte_ticks(end):
        canvas.line(left, y_of(tick), right, y_of(tick), "grid")
        canvas.text(left - 8, y_of(tick) + 4, format_bytes(round(tick)), anchor="end", kind="dim")
    _draw_time(canvas, seconds, x_of, top, bottom)
    below = [0.0] * num
    for layer in layers:
        above = [low + value for low, value in zip(below, layer.values, strict=True)]
        times = [seconds * at / max(1, num - 1) for at in range(num)]
        edge = [f"{x_of(at):.1f},{y_of(size):.1f}" for at, size in zip(times, above, strict=True)]
        back = [f"{x_of(at):.1f},{y_of(size):.1f}" for at, size in zip(times, below, strict=True)][::-1]
        canvas.add(
            f'<polygon points="{" ".join(edge + back)}" fill="{layer.colour}" fill-opacity=".85">'
            f"<title>{escape(layer.name)}</title></polygon>"
        )
        below = above
    if limit is not None:
        text = f"{limit[0]}: {format_bytes(limit[1])}"
        if near:
            canvas.line(left, y_of(limit[1]), right, y_of(limit[1]), "limit")
            canvas.text(right, y_of(limit[1]) - 5, text, anchor="end", kind="bad")
        else:
            canvas.text(right, top - 6, f"{text}, far above this chart", anchor="end", kind="dim")
    for at, text in marks:
        where = f'x="{x_of(at):.1f}" y="{top + 14:.1f}" text-anchor="middle" class="bad"'
        canvas.add(f"<text {where}>✕<title>{escape(text)}</title></text>")
    return str(canvas)


def draw_bars(bars: Sequence[Bar], end: float, frame: Frame, *, axis: Literal["seconds", "bytes"]) -> str:
    """Return one bar per job, from above, on an axis of time or of memory; its height is that of the bars."""
    height = _TOP + _ROW * len(bars) + _BOTTOM
    canvas = _Canvas(frame, height)
    names = [bar.name if len(bar.name) <= _MOST_LETTERS else f"{bar.name[: _MOST_LETTERS - 1]}…" for bar in bars]
    note_width = 8 + _LETTER * max((len(bar.note) for bar in bars), default=0)
    left = 16 + _LETTER * max(map(len, names), default=0)
    right, bottom = frame.width - min(note_width, frame.width / 3), height - _BOTTOM

    def x_of(at: float) -> float:
        return left + (right - left) * at / max(end, 1e-9)

    if axis == "seconds":
        _draw_time(canvas, end, x_of, _TOP - 8, bottom)
    else:
        for tick in byte_ticks(end):
            canvas.line(x_of(tick), _TOP - 8, x_of(tick), bottom, "grid")
            canvas.text(x_of(tick), bottom + 16, format_bytes(round(tick)), anchor="middle", kind="dim")
    for number, (bar, name) in enumerate(zip(bars, names, strict=True)):
        y = _TOP + _ROW * number
        canvas.text(left - 8, y + _BAR - 3, name, anchor="end")
        for start, stop, colour in bar.parts:
            canvas.add(
                f'<rect x="{x_of(start):.1f}" y="{y}" width="{max(1.0, x_of(stop) - x_of(start)):.1f}" '
                f'height="{_BAR}" fill="{colour}"/>'
            )
        if bar.tick is not None and bar.tick <= end:
            x = x_of(bar.tick)
            canvas.add(f'<rect x="{x - 1:.1f}" y="{y - 3}" width="2.5" height="{_BAR + 6}" class="ink"/>')
        canvas.text(right + 8, y + _BAR - 3, bar.note, kind="bad" if bar.is_bad else "dim")
    return str(canvas)


def draw_points(points: Sequence[Point], steps: Sequence[tuple[int, float]], frame: Frame, *, label: str = "") -> str:
    """Return points by their numbers, rows below for those without a value, and a line that goes up or down in steps.

    Args:
        points: The points; at least one.
        steps: The corners of the line: from this number on, it has this value. The last one bears ``label``.
        frame: The outside of the chart.
        label: What stands at the end of the line.
    """
    lanes = list(dict.fromkeys(point.lane for point in points if point.value is None))
    canvas = _Canvas(frame, frame.height + _ROW * len(lanes))
    values = [point.value for point in points if point.value is not None] or [0.0]
    margin = 0.08 * (max(values) - min(values)) or abs(max(values)) or 1.0
    low, high = min(values) - margin, max(values) + margin
    left = max(_LEFT, 16 + _LETTER * max(map(len, lanes), default=0))
    right, top, bottom = frame.width - _RIGHT, _TOP, frame.height - _BOTTOM
    last = max(point.number for point in points)

    def x_of(number: float) -> float:
        return left + (right - left) * (number + 0.5) / (last + 1)

    def y_of(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    for text, tick in number_ticks(low, high):
        canvas.line(left, y_of(tick), right, y_of(tick), "grid")
        canvas.text(left - 8, y_of(tick) + 4, text, anchor="end", kind="dim")
    rows = {lane: bottom + _ROW * (at + 0.6) for at, lane in enumerate(lanes)}
    for lane, y in rows.items():
        canvas.text(left - 8, y + 4, lane, anchor="end", kind="dim")
    for number in range(0, last + 1, max(1, math.ceil((last + 1) / 12))):
        canvas.text(x_of(number), canvas.height - 6, str(number), anchor="middle", kind="dim")
    if steps:
        ends = [*(number for number, _ in steps[1:]), last + 0.5]
        path = [
            f"{x_of(x):.1f},{y_of(value):.1f}" for (at, value), end in zip(steps, ends, strict=True) for x in (at, end)
        ]
        canvas.add(f'<polyline points="{" ".join(path)}" fill="none" stroke="{COLOURS[2]}" stroke-width="2"/>')
        above = steps[-1][1] > (low + high) / 2  # where no better point can be
        canvas.text(right, y_of(steps[-1][1]) + (-8 if above else 18), label, anchor="end")
    for point in points:
        y = rows[point.lane] if point.value is None else y_of(point.value)
        where = f'x="{x_of(point.number):.1f}" y="{y + 4:.1f}" text-anchor="middle" fill="{point.colour}"'
        canvas.add(f"<text {where}>{escape(point.sign)}<title>{escape(point.title)}</title></text>")
    return str(canvas)


def _draw_time(canvas: _Canvas, seconds: float, x_of: Callable[[float], float], top: float, bottom: float) -> None:
    for tick in time_ticks(seconds):
        x = x_of(tick)
        canvas.line(x, top, x, bottom, "grid")
        canvas.text(x, bottom + 16, format_duration(tick, short=True) if tick else "0", anchor="middle", kind="dim")


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


def number_ticks(low: float, high: float) -> list[tuple[str, float]]:
    """Return round numbers between two numbers, and their texts.

    >>> number_ticks(-0.012, 0.034)
    [('-0.01', -0.01), ('0.00', 0.0), ('0.01', 0.01), ('0.02', 0.02), ('0.03', 0.03)]
    """
    power = math.floor(math.log10((high - low) / _ABOUT_TICKS))
    step = next(step for n in (1, 2, 5, 10) if (high - low) / (step := n * 10.0**power) <= _ABOUT_TICKS + 1)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    numbers = (at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1))
    return [(f"{number:.{digits}f}", round(number, digits)) for number in numbers]


def _multiples(step: float, end: float) -> Iterator[float]:
    for number in range(int(end / step) + 1):
        yield float(step * number)


def legend(layers: Sequence[tuple[str, str]]) -> str:
    """Return a legend as HTML, from names and colours."""
    items = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in layers)
    return f'<p class="legend">{"".join(items)}</p>'
