"""Charts as inline SVG: memory over time, lines, and a bar per job. No script, no other file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from memfit.reports._numbers import format_number
from memfit.units import GIB, KIB, MIB, TIB, format_bytes, format_duration

#: Eight colours that colour-blind readers can tell apart, on light and on dark ground (after Okabe and Ito).
COLOURS = ("#4c8bc4", "#e69f00", "#2aa876", "#cc79a7", "#d5652a", "#8a7fd1", "#7b9b3a", "#8c8c8c")
#: The style sheet that a chart needs where it is shown.
CHART_STYLE = (
    ".ink{fill:currentColor}.dim{fill:currentColor;opacity:.65}.grid{stroke:currentColor;opacity:.15}"
    ".limit{stroke:var(--bad,#d03030);stroke-dasharray:6 4;stroke-width:1.5}.bad{fill:var(--bad,#d03030)}"
    "text{font:12px system-ui,sans-serif}.head{font-weight:600}"
    ".curve{fill:none;stroke-width:1.8;stroke-linejoin:round}.at{fill:transparent}.at:hover{fill:currentColor;fill-opacity:.12}"
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 22, 26
_ROW, _BAR, _LETTER, _MOST_LETTERS = 22, 14, 7.3, 36
_LINES_SIZE = (440, 240)  # the width and height of a chart of lines; there are several beside each other
_NARROW = 600  # a narrower chart gives a bar's texts a row of their own
#: More points than this are lines without dots; more places on the x axis share what a pointer shows.
_MOST_DOTS, _MOST_PLACES = 40, 80
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
    """Return a chart of memory over time, its layers on top of each other, the lowest first, with the ``title`` inside.

    A screen reader says the ``label``. The ``limit`` has a name and bytes, and is drawn where the data come near it.
    Each of the ``marks`` is a cross at the upper edge: seconds from the start, and what a pointer shows.
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


def draw_lines(
    lines: Sequence[Line],
    title: str,
    *,
    seconds: float = 0.0,
    y_text: Callable[[float], str] | None = None,
    ticks: Callable[[float, float], Sequence[float]] | None = None,
) -> str:
    """Return a chart of curves, whose values a pointer shows; where one has a value that is not finite, it has a gap.

    The first curve is drawn last. The x axis is so many ``seconds`` long, or counts epochs. With ``ticks``, which are
    round values between two, the chart begins at 0, else at the lowest value.
    """
    finite = [[point for point in line.points if math.isfinite(point[1])] for line in lines]
    xs, ys = ([point[at] for points in finite for point in points] for at in (0, 1))
    low, high = (min(ys, default=0.0), max(ys, default=1.0)) if ticks is None else (0.0, max(ys, default=0.0) or 1.0)
    if low == high:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    margin = 0.05 * (high - low)
    low, high = low - margin * (ticks is None), high + margin
    begin, end = (min(xs, default=0.0), max(xs, default=1.0)) if not seconds else (0.0, seconds)
    begin, end = (begin, end) if end > begin else (begin - 0.5, begin + 0.5)
    places = {tick: (y_text or "{:g}".format)(tick) for tick in (ticks or number_ticks)(low, high)}
    left = 16 + 0.9 * _LETTER * max(map(len, places.values()), default=0)
    right, top, bottom = _LINES_SIZE[0] - _RIGHT, _TOP + 18, _LINES_SIZE[1] - _BOTTOM

    def x_of(at: float) -> float:
        return left + (right - left) * (at - begin) / (end - begin)

    def y_of(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    parts = [_text(8, 16, title, kind="ink head")]
    for tick, text in places.items():
        parts.append(_line(left, y_of(tick), right, y_of(tick), "grid"))
        parts.append(_text(left - 8, y_of(tick) + 4, text, anchor="end", kind="dim"))
    if seconds:
        parts += _time_axis(seconds, x_of, top, bottom)
    else:
        for tick in number_ticks(begin, end, whole=True):
            parts.append(_text(x_of(tick), bottom + 16, f"{tick:g}", anchor="middle", kind="dim"))
        parts.append(_text(right, 16, "by epoch", anchor="end", kind="dim"))
    for line, points in list(zip(lines, finite, strict=True))[::-1]:
        parts += _curve(line, [(x_of(x), y_of(y)) for x, y in points])
    frame = (x_of, top, bottom, right)
    parts += _shown_at(lines, finite, frame, y_text or format_number, "" if seconds else "epoch")
    return _svg(parts, title, _LINES_SIZE)


def _curve(line: Line, places: Sequence[tuple[float, float]]) -> Iterator[str]:
    style = f'stroke="{line.colour}"' + (' stroke-dasharray="5 4"' if line.is_dashed else "")
    style += ' opacity=".45"' if line.is_faint else ""
    if len(places) > 1:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline class="curve" points="{points}" {style}/>'
    if len(places) <= (1 if line.is_faint or line.is_dashed else _MOST_DOTS):
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{line.colour}"/>' for x, y in places)


def _shown_at(
    lines: Sequence[Line],
    finite: Sequence[Sequence[tuple[float, float]]],
    frame: tuple[Callable[[float], float], float, float, float],
    y_text: Callable[[float], str],
    x_name: str,
) -> Iterator[str]:
    """Yield a band for each place of the x axis: a pointer in it shows the values there."""
    x_of, top, bottom, right = frame
    known = sorted({x for points in finite for x, _ in points})
    known = known[:: math.ceil(len(known) / _MOST_PLACES) or 1]
    edges = [x_of(x) for x in known]
    for at, x in enumerate(known):
        start = (edges[at - 1] + edges[at]) / 2 if at else edges[at] - 8
        stop = (edges[at] + edges[at + 1]) / 2 if at + 1 < len(edges) else min(edges[at] + 8, right + 8)
        said = [f"{x_name} {x:g}" if x_name else f"after {format_duration(x, short=True)}"]
        for line, points in zip(lines, finite, strict=True):
            until = x if x_name else (known[at + 1] if at + 1 < len(known) else math.inf)
            here = [y for px, y in points if px == x or (not x_name and x <= px < until)]
            said += [f"{line.name}: {y_text(here[-1])}"] if here and not (line.is_faint and len(said) > 12) else []
        place = f'x="{start:.1f}" y="{top}" width="{stop - start:.1f}" height="{bottom - top}"'
        yield f'<rect class="at" {place}><title>{escape(chr(10).join(said))}</title></rect>'


def draw_bars(bars: Sequence[Bar], seconds: float, label: str, width: int = 960) -> str:
    """Return one bar per job over time, from above. In a narrow chart, the text of a job stands above its bar."""
    is_narrow = width < _NARROW
    row, below = (2 * _ROW - 4, 16) if is_narrow else (_ROW, 0)
    height = _TOP + row * len(bars) + _BOTTOM
    names = [bar.name if len(bar.name) <= _MOST_LETTERS else f"{bar.name[: _MOST_LETTERS - 1]}…" for bar in bars]
    left, right = 8.0, width - 8.0
    if not is_narrow:
        left += 8 + _LETTER * max(map(len, names), default=0)
        right = width - min(8 + _LETTER * max((len(bar.note) for bar in bars), default=0), width / 3)

    def x_of(at: float) -> float:
        return left + (right - left) * at / max(seconds, 1e-9)

    parts = _time_axis(seconds, x_of, _TOP - 8, height - _BOTTOM)
    for number, (bar, name) in enumerate(zip(bars, names, strict=True)):
        y = _TOP + row * number
        name_at, note_at = (left, right) if is_narrow else (left - 8, right + 8)
        anchors = ("start", "end") if is_narrow else ("end", "start")
        parts.append(_text(name_at, y + _BAR - 3, name, anchor=anchors[0]))
        parts.append(_text(note_at, y + _BAR - 3, bar.note, anchor=anchors[1], kind="bad" if bar.is_bad else "dim"))
        for start, stop, colour in bar.parts:
            place = f'x="{x_of(start):.1f}" y="{y + below}" width="{max(1.0, x_of(stop) - x_of(start)):.1f}"'
            parts.append(f'<rect {place} height="{_BAR}" fill="{colour}"/>')
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
    return _multiples(step, seconds)


def number_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return round numbers between two.

    >>> number_ticks(0.31, 2.4), number_ticks(1, 5, whole=True)
    ([0.5, 1.0, 1.5, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    """
    power = 10.0 ** math.floor(math.log10((high - low) / _ABOUT_TICKS))
    steps = [power * n for n in (1, 2, 5, 10) if not whole or power * n >= 1] or [1.0]
    step = next((step for step in steps if (high - low) / step <= _ABOUT_TICKS), steps[-1])
    return [round(step * n, 12) for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def byte_ticks(size: float) -> list[float]:
    """Return round sizes from 0 up to a size.

    >>> [format_bytes(int(tick)) for tick in byte_ticks(700 << 20)]
    ['0 B', '200.0 MiB', '400.0 MiB', '600.0 MiB']
    """
    unit = next((unit for unit in (TIB, GIB, MIB, KIB) if size >= unit), 1)
    step = next(unit * 10**power * n for power in range(20) for n in (0.5, 1, 2) if size / (unit * 10**power * n) <= 5)
    return _multiples(step, size)


def _multiples(step: float, end: float) -> list[float]:
    return [float(step * number) for number in range(int(end / step) + 1)]


def legend(layers: Sequence[tuple[str, str]]) -> str:
    """Return a legend as HTML, from names and colours."""
    items = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in layers)
    return f'<p class="legend">{"".join(items)}</p>'
