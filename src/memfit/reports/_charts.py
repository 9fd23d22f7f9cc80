"""Charts as inline SVG: memory over time, and lines by epoch. No script, no other file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain, count

from memfit.units import GIB, KIB, MIB, TIB, format_bytes, format_duration

#: Eight colours that colour-blind readers can tell apart, on light and on dark ground (after Okabe and Ito).
COLOURS = ("#4c8bc4", "#e69f00", "#2aa876", "#cc79a7", "#d5652a", "#8a7fd1", "#7b9b3a", "#8c8c8c")
#: The style sheet that a chart needs where it is shown.
CHART_STYLE = (
    ".ink{fill:currentColor}.dim{fill:currentColor;opacity:.65}.grid{stroke:currentColor;opacity:.15}"
    ".limit{stroke:var(--bad,#d03030);stroke-dasharray:6 4;stroke-width:1.5}.bad{fill:var(--bad,#d03030)}"
    "text{font:12px system-ui,sans-serif}.head{font-weight:600}"
    ".curve{fill:none;stroke-width:1.8;stroke-linejoin:round}"
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 22, 26
_LETTER = 7.3  # the width of one, about
_LINES_SIZE = (440, 240)  # the width and height of a chart of lines; there are several beside each other
_MOST_DOTS = 40  # more points than this are lines without dots
_SHOWS_LIMIT = 0.2  # above this share of a limit the chart shows the limit; below, the data fill the chart
_ABOUT_TICKS = 5


@dataclass(frozen=True)
class Layer:
    """One band of a stack: its name in the legend, its fill, and its bytes at evenly spaced times."""

    name: str
    colour: str
    values: Sequence[float]


@dataclass(frozen=True)
class Line:
    """One curve: what a pointer shows as its name, its colour, and its points; a faint one is for comparison."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False
    is_faint: bool = False


@dataclass
class _Frame:
    """The edges of a chart, the values at them, and what it drew."""

    size: tuple[int, int]
    left: float
    right: float
    top: float
    bottom: float
    xs: tuple[float, float]
    ys: tuple[float, float] = (0.0, 1.0)
    parts: list[str] = field(default_factory=list)

    def x(self, at: float) -> float:
        return self.left + (self.right - self.left) * (at - self.xs[0]) / max(self.xs[1] - self.xs[0], 1e-9)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * (value - self.ys[0]) / (self.ys[1] - self.ys[0])

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", kind: str = "ink", title: str = "") -> None:
        more = f"<title>{escape(title)}</title>" if title else ""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"'
        self.parts.append(f"<text {place}>{escape(text)}{more}</text>")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def scale(self, ticks: Mapping[float, str]) -> None:
        """Draw a grid line for each tick of the y axis, and its text."""
        for tick, text in ticks.items():
            self.line(self.left, self.y(tick), self.right, self.y(tick), "grid")
            self.text(self.left - 8, self.y(tick) + 4, text, anchor="end", kind="dim")

    def time_axis(self) -> None:
        for tick in time_ticks(self.xs[1]):
            self.line(self.x(tick), self.top, self.x(tick), self.bottom, "grid")
            text = format_duration(tick, short=True) if tick else "0"
            self.text(self.x(tick), self.bottom + 16, text, anchor="middle", kind="dim")

    def svg(self, label: str) -> str:
        box = f'viewBox="0 0 {self.size[0]} {self.size[1]}" role="img" aria-label="{escape(label, quote=True)}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(self.parts)}</svg>'


def draw_stack(
    layers: Sequence[Layer],
    seconds: float,
    label: str,
    *,
    limit: tuple[str, int] | None = None,
    marks: Sequence[tuple[float, str] | Line] = (),
    title: str = "",
    size: tuple[int, int] = (960, 280),
) -> str:
    """Return a chart of memory over time, its layers on top of each other, the lowest first, with the ``title`` inside.

    A screen reader says the ``label``. The ``limit`` has a name and bytes, and is drawn where the data come near it.
    Each of the ``marks`` is a cross at the upper edge: seconds from the start, and what a pointer shows; or a line.
    """
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    lines = [one for one in marks if isinstance(one, Line)]
    to_come = [point for line in lines for point in line.points]
    most = max([*totals, *(size for _, size in to_come)], default=0) or 1.0
    near = limit is not None and most >= _SHOWS_LIMIT * limit[1]
    end = max(most, limit[1] if limit and near else 0) * 1.06
    edges = _LEFT, size[0] - _RIGHT, _TOP + (18 if title else 0), size[1] - _BOTTOM
    frame = _Frame(size, *edges, (0.0, max([seconds, *(at for at, _ in to_come)])), (0.0, end))
    if title:
        frame.text(_LEFT, 16, title, kind="ink head")
    frame.scale({tick: format_bytes(round(tick)) for tick in byte_ticks(end)})
    frame.time_axis()
    below, xs = [0.0] * len(totals), [frame.x(seconds * at / max(1, len(totals) - 1)) for at in range(len(totals))]
    for layer in layers:
        above = [low + value for low, value in zip(below, layer.values, strict=True)]
        edge, back = ([f"{x:.1f},{frame.y(one):.1f}" for x, one in zip(xs, ys, strict=True)] for ys in (above, below))
        points = f'points="{" ".join(edge + back[::-1])}" fill="{layer.colour}" fill-opacity=".85"'
        frame.parts.append(f"<polygon {points}><title>{escape(layer.name)}</title></polygon>")
        below = above
    if limit is not None:
        text, at = f"{limit[0]}: {format_bytes(limit[1])}", frame.y(limit[1])
        if near:
            frame.line(frame.left, at, frame.right, at, "limit")
            frame.text(frame.left + 6, at - 5, text, kind="bad")
        else:
            frame.text(frame.right, frame.top - 6, f"{text}, far above this chart", anchor="end", kind="dim")
    for line in lines:
        frame.parts += _curve(line, [(frame.x(at), frame.y(size)) for at, size in line.points])
    for when, text in (one for one in marks if not isinstance(one, Line)):
        frame.text(frame.x(when), frame.top + 14, "✕", anchor="middle", kind="bad", title=text)
    return frame.svg(label)


def draw_lines(lines: Sequence[Line], title: str) -> str:
    """Return a chart of curves by epoch, the first drawn last; one has a gap where its value is not finite."""
    finite = [[point for point in line.points if math.isfinite(point[1])] for line in lines]
    xs, ys = ([point[at] for points in finite for point in points] for at in (0, 1))
    low, high = min(ys, default=0.0), max(ys, default=1.0)
    if low == high:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    margin = 0.05 * (high - low)
    low, high = low - margin, high + margin
    begin, end = min(xs, default=0.0), max(xs, default=1.0)
    begin, end = (begin, end) if end > begin else (begin - 0.5, begin + 0.5)
    places = {tick: f"{tick:g}" for tick in number_ticks(low, high)}
    left = 16 + 0.9 * _LETTER * max(map(len, places.values()), default=0)
    edges = left, _LINES_SIZE[0] - _RIGHT, _TOP + 18, _LINES_SIZE[1] - _BOTTOM
    frame = _Frame(_LINES_SIZE, *edges, (begin, end), (low, high))
    frame.text(8, 16, title, kind="ink head")
    frame.scale(places)
    for tick in number_ticks(begin, end, whole=True):
        frame.text(frame.x(tick), frame.bottom + 16, f"{tick:g}", anchor="middle", kind="dim")
    frame.text(frame.right, 16, "by epoch", anchor="end", kind="dim")
    for line, points in list(zip(lines, finite, strict=True))[::-1]:
        frame.parts += _curve(line, [(frame.x(x), frame.y(y)) for x, y in points])
    return frame.svg(title)


def _curve(line: Line, places: Sequence[tuple[float, float]]) -> Iterator[str]:
    style = f'stroke="{line.colour}"' + (' stroke-dasharray="5 4"' if line.is_dashed else "")
    style += ' opacity=".45"' if line.is_faint else ""
    if len(places) > 1:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline class="curve" points="{points}" {style}><title>{escape(line.name)}</title></polyline>'
    if len(places) <= (1 if line.is_faint or line.is_dashed else _MOST_DOTS):
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{line.colour}"/>' for x, y in places)


def time_ticks(seconds: float) -> list[float]:
    """Return round times from 0 up to a duration.

    >>> time_ticks(140)
    [0, 30, 60, 90, 120]
    """
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800)
    return _ticks(0.0, seconds, chain(steps, count(86400, 86400)))


def number_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return round numbers between two.

    >>> number_ticks(0.31, 2.4), number_ticks(1, 5, whole=True)
    ([0.5, 1.0, 1.5, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    """
    power = 10.0 ** math.floor(math.log10((high - low) / _ABOUT_TICKS))
    return _ticks(low, high, (max(power * n, float(whole)) for n in (1, 2, 5, 10)))


def byte_ticks(size: float) -> list[float]:
    """Return round sizes from 0 up to a size.

    >>> [format_bytes(int(tick)) for tick in byte_ticks(700 << 20)]
    ['0 B', '200.0 MiB', '400.0 MiB', '600.0 MiB']
    """
    unit = next((unit for unit in (TIB, GIB, MIB, KIB) if size >= unit), 1)
    return _ticks(0.0, size, (unit * 10**power * n for power in range(20) for n in (0.5, 1, 2)))


def _ticks(low: float, high: float, steps: Iterable[float]) -> list[float]:
    """Return the multiples between two of the first step that gives few of them."""
    step = next(step for step in steps if (high - low) / step <= _ABOUT_TICKS)
    return [round(step * n, 12) for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def legend(layers: Sequence[tuple[str, str]]) -> str:
    items = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in layers)
    return f'<p class="legend">{"".join(items)}</p>'
