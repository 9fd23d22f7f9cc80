"""What a report is made of, and the two forms of it: text on a console, and HTML."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

_MOST_LINES = 30  # a longer table of a page is folded


@dataclass(frozen=True)
class Facts:
    """Names with a text each, which begins at a column."""

    rows: Sequence[tuple[str, str]]
    width: int = 10


@dataclass(frozen=True)
class Table:
    """A table: the columns named in ``left`` hold words. A page leaves out empty ones, and folds many rows.

    A console shows each row in its style, if there are ``styles``.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str]
    what: str = "figures"
    fold: Collection[str] = ()  # columns that break between words on a narrow terminal
    styles: Sequence[str] = ()


@dataclass(frozen=True)
class Note:
    """A line, or a few."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart as HTML; a console shows none."""

    html: str


@dataclass(frozen=True)
class Inset:
    """Parts that a console shows further to the right."""

    parts: Iterable[Part]
    indent: int


Part = Facts | Table | Note | Chart | Inset | str


def to_text(parts: Iterable[Part], console: Console, indent: int = 0) -> None:
    """Print parts one below the other; a text is a note."""
    for part in parts:
        if isinstance(part, Inset):
            to_text(part.parts, console, indent + part.indent)
        elif isinstance(part, str):
            say(console, f"{'':<{indent}}{part}")
        elif isinstance(part, Facts):
            for name, text in part.rows:
                console.print(Text.assemble((f"{name:<{part.width}}", "bold"), text), soft_wrap=True)
        elif isinstance(part, Table):
            rows = [[*map(Text, row)] for row in part.rows]
            table = plain_table(*part.headings, rows=rows, left=part.left, fold=part.fold)
            for row, style in zip(table.rows, part.styles, strict=False):
                row.style = style
            console.print(Padding(table, (0, 0, 0, indent), expand=False) if indent else table)
        elif isinstance(part, Note):
            say(console, f"{'':<{indent}}{part.text}", part.style)


def to_html(parts: Iterable[Part]) -> str:
    return "".join(map(_html, parts))


def _html(part: Part) -> str:
    if isinstance(part, Chart):
        return part.html
    if isinstance(part, Inset):
        return to_html(part.parts)
    part = Note(part) if isinstance(part, str) else part
    if isinstance(part, Note):
        kind = {"red": ' class="failed"', "dim": ' class="note"'}.get(part.style, "")
        return f"<p{kind}>{escape(part.text.strip())}</p>" if part.text else ""
    if isinstance(part, Facts):
        if len(part.rows) == 1:
            return "<p><b>{}</b> {}</p>".format(*map(escape, part.rows[0]))
        part = Table(("", ""), part.rows, ("",))
    shown = [at for at in range(len(part.headings)) if any(row[at] not in ("", "-") for row in part.rows)]
    kinds = ["" if part.headings[at] in part.left else ' class="number"' for at in shown]
    lines = [
        "".join(f"<{tag}{kind}>{escape(row[at])}</{tag}>" for kind, at in zip(kinds, shown, strict=True))
        for tag, row in (("th", part.headings), *(("td", row) for row in part.rows))
    ]
    table = f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'
    if len(part.rows) <= _MOST_LINES:
        return table
    return f"<details><summary>{len(part.rows)} {part.what}</summary>{table}</details>"


def plain_table(
    *headings: str,
    rows: Iterable[Sequence[str | Text]] = (),
    left: Collection[str] = (),
    fold: Collection[str] = (),
    gap: int = 2,
) -> RichTable:
    """Return a table without lines; the columns named in ``left`` hold words, and those in ``fold`` may break."""
    table = RichTable(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for name in headings:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in fold)
        table.columns[-1].overflow = "fold" if name in fold else "ellipsis"
    for row in rows:
        table.add_row(*row)
    return table


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print text without markup and without folding long lines."""
    console.print(text, style=style, markup=False, soft_wrap=True)
