"""``memfit ps``: every live run of this user on this host, and what its jobs take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from memfit.cli._terminal import AsJson, Console, console, table
from memfit.reports import Overview, list_runs
from memfit.units import format_bytes, format_duration


def ps(
    as_json: AsJson = False,
    all_: Annotated[bool, typer.Option("--all", help="Also your runs below ./runs that do not run any more.")] = False,
) -> None:
    """Show your live runs on this host and their jobs: what they use, took at most and have reserved.

    A run whose supervisor died is live as long as jobs of it run; memfit resume takes them over.

    Exit codes: 0 done.
    """
    found = list_runs(root=Path("runs") if all_ else None)
    if as_json:
        typer.echo(json.dumps([one.to_dict() for one in found], indent=2))
        return
    log = console()
    if not found:
        log.say("no run of yours is alive on this host" + ("" if all_ else "; memfit ps --all shows those that ended"))
    for one in found:
        _print(one, log)


def _print(one: Overview, log: Console) -> None:
    counts = ", ".join(f"{name} {number}" for name, number in one.counts.items()) or "no jobs"
    if one.problem:
        text = one.problem
    elif one.is_live:
        who = "none (its jobs go on; memfit resume)" if one.supervisor is None else str(one.supervisor)
        sizes = f"{format_bytes(one.used_bytes)} used of {format_bytes(one.reserved_bytes)} reserved"
        text = f"supervisor {who}; {counts}; {sizes}"
    else:
        text = f"{'interrupted' if one.state == 'running' else one.state}; {counts}"
    log.say(str(one.run.path), style="bold")
    log.say(f"  {text}")
    if one.running:
        log.print(_table(one))


def _table(one: Overview) -> Table:
    shown = table("  job", "pid", "phase", "used", "peak", "reserved", "time", left=("  job", "phase"))
    for row in one.running:
        status = row.status
        guessed = f" ~{row.guess}" if row.guess else ""
        phase = "stalled" if status.stalled else (status.phase or "starts") + guessed
        phase = f"stopped (SIGSTOP {status.stopped_pid})" if status.stopped_pid is not None else phase
        sizes = (status.used_bytes, status.peak_bytes, row.reserved_bytes)
        shown.add_row(
            Text(f"  {row.name}"),
            str(status.pid or "-"),
            phase,
            *(format_bytes(size) if size else "-" for size in sizes),
            format_duration(row.seconds, short=True) if row.seconds is not None else "-",
        )
    return shown
