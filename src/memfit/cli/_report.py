"""``memfit report``: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli._terminal import RunName, console, heartbeat
from memfit.reports import find_run, write_page


def report(
    run: RunName = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The file; by default report.html in the run's folder.")
    ] = None,
) -> None:
    """Write a run as one HTML page: learning curves, results, memory over time, and why jobs failed.

    The page needs no network and no script, also of a run that goes on. Without a name the newest of ./runs is meant.

    \b
    memfit report
    memfit report runs/demo --out demo.html

    Exit codes: 0 done, 2 no such run.
    """
    found = find_run(run, writes=True)
    with heartbeat("reading the run"):
        path = write_page(found, out or found.path / "report.html")
    console().say(f"wrote {path}")
