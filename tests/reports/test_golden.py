"""Recorded runs: each is told in every way as its file in ``golden`` says."""

import io
import json
import re
from functools import partial
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from memfit.reports import (
    LiveRun,
    Room,
    render,
    summarize,
    summarize_study,
    to_text,
    view_study,
    view_summary,
    write_page,
)
from memfit.rundir import read

GOLDEN = Path(__file__).parent / "golden"
START = 1795248000.0  # of the recorded runs


def printed(width, show):
    console = Console(file=io.StringIO(), width=width)
    show(console)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def line_by_line(page):
    """Return the text of a page: a line for each row and paragraph, a chart as its label or the values it shows."""
    text = re.sub(r"(?s)^.*<body>|<p class=.note.>Written by.*$", "", page)
    text = re.sub(r'(?s)<svg[^>]*aria-label="(.*?)"(.*?)</svg>', lambda one: _chart(one[1], one[2]), text)
    text = text.replace("</td><td", "</td> | <td")
    text = re.sub(r"<(h\d|p|tr|pre|div|summary)\b", r"\n<\1", text.replace("</th><th", "</th> | <th"))
    lines = unescape(re.sub(r"<[^>]*>", "", text)).splitlines()
    return "".join(f"{line.strip()}\n" for line in lines if line.strip())


def _chart(label, drawn):
    shown = [one.replace("\n", "; ") for one in re.findall(r"<title>(.*?)</title>", drawn, re.DOTALL)]
    return "\n".join(
        f"<p>[{one}]</p>" for one in (label, *dict.fromkeys(shown[:2]), *re.findall(r">(cmd_\w+.*?)<", drawn))
    )


def tell(run, now):
    """Return a run as JSON, as summaries or a study, as lines, and as tables while it runs, then as a page."""
    state = read(run, now=lambda: now)
    found = summarize(state) | ({"study": summarize_study(state)} if state.kind == "tune" else {})
    rows = [{name: value} for name, value in found.items() if value and name != "jobs"]
    rows = [[name for name, value in found.items() if not value], *rows, *found["jobs"]]
    yield "json", "".join(f"{json.dumps(row)}\n" for row in rows)
    for width, verbose in ((120, False), (80, True)) if state.kind != "tune" else ():
        yield f"summary {width}", printed(width, partial(to_text, view_summary(state, width, verbose=verbose)))
    if state.kind == "tune":
        yield "study", printed(80, partial(to_text, view_study(state)))
    yield "log", logged(run)
    for width in (80, 57) if state.running else ():
        table = render(state, Room(64 << 30, 14 << 30, "MemAvailable"), width=width)
        yield f"table {width}", printed(width, lambda log, table=table: log.print(table))
    if not state.running:
        yield "page", line_by_line(write_page(run, run.path / "page.html").read_text())


def logged(run):
    """Return what is printed of a run while it goes on, where there is no terminal."""
    file, contents = io.StringIO(), {path: path.read_text() for path in sorted((run.path / "events").iterdir())}
    for path in contents:
        path.write_text("")
    live = LiveRun(Console(file=file, width=80))
    live.show(run)
    for path, text in contents.items():
        path.write_text(text)
    live.close()
    return file.getvalue()


@pytest.mark.proves("S1-32", "S3-26", "S4-19")
@pytest.mark.parametrize(
    "name", ["recorded", "reported", "gated", "units", "searched", "ranked", "ranking", "single", "running"]
)
def test_a_recorded_run_is_told_as_before(name, request, tmp_path):
    made, path = request.getfixturevalue(name), GOLDEN / f"{name}.txt"
    told = "".join(f"## {title}\n{text}\n" for title, text in tell(made.run, START + 7200)).replace(
        str(tmp_path), "TMP"
    )
    if not path.exists():
        path.write_text(told)
        pytest.fail(f"{path} was written anew: read it, and run this again")
    assert told.splitlines() == path.read_text().splitlines()
