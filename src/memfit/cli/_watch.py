"""``memfit watch``: a run that goes on, seen from another terminal."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from memfit.cli._terminal import console
from memfit.errors import InterruptedRunError
from memfit.reports import LiveRun, find_run, has_supervisor, is_live

_STEP_SECONDS = 0.2


def watch(
    run: Annotated[
        str | None,
        typer.Argument(help="A run's folder, name or experiment; the newest run when left out.", show_default=False),
    ] = None,
) -> None:
    """Show a run that goes on: its jobs, their phases, and their memory against what they have reserved.

    On a terminal a table is kept up to date; elsewhere each event is a line with its time. Watching changes nothing:
    Ctrl-C ends the watching and leaves the run as it is.

    Exit codes: 0 the run has ended, 2 no such run, 130 the watching was interrupted.
    """
    found = find_run(run)
    log = console()
    if not is_live(found):
        going_on = "" if found.state == "completed" else f"; memfit resume {found.path} goes on with it"
        state = "interrupted" if found.state == "running" else found.state
        log.say(f"Run {found.path} does not run any more: {state}{going_on}")
        return
    live, interrupted = LiveRun(log, here=False), threading.Event()
    # Not as an exception, which would come in the middle of what is printed.
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        tick = live.show(found)
        if not has_supervisor(found):
            log.say(f"no supervisor: its jobs go on; memfit resume {found.path} starts what waits")
        while is_live(found) and not interrupted.wait(_STEP_SECONDS):
            tick()
    finally:
        live.close()
        signal.signal(signal.SIGINT, before)
    if interrupted.is_set():
        log.say("the run goes on")
        raise typer.Exit(InterruptedRunError.exit_code)
    state = "its supervisor died" if found.state == "running" else found.state
    log.say(f"Run {found.path} has ended: {state}")
