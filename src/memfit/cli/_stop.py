"""``memfit stop``: have a run or one of its jobs checkpoint and end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from memfit.cli._terminal import console
from memfit.errors import InterruptedRunError
from memfit.jobs import stop as stop_run
from memfit.reports import find_target, is_live
from memfit.units import format_duration

_TELL_SECONDS = 5.0


def stop(
    target: Annotated[
        str,
        typer.Argument(help="A run (folder, name or experiment) or a job (RUN/cmd_0003 or its id).", metavar="RUN|JOB"),
    ],
    now: Annotated[bool, typer.Option("--now", help="End it at once, without a checkpoint.")] = False,
) -> None:
    """Ask a run, or one of its jobs, to checkpoint and end, and wait until it has.

    It works with and without a supervisor. A job that waits for its turn is not started any more. The run goes on with
    memfit resume, such a job too. Asking twice is as asking once: only --now ends a job without its checkpoint.

    Exit codes: 0 it has ended, or there was nothing to stop, 2 no such run, 130 the waiting was interrupted.
    """
    found, log = find_target(target), console()
    name = f"{found.run.path}/{found.job_id}" if found.job_id else str(found.run.path)
    began = told = time.monotonic()

    def on_tick(left: Sequence[str]) -> None:
        nonlocal told
        if time.monotonic() - told < _TELL_SECONDS:
            return
        told = time.monotonic()
        jobs = f"{', '.join(left[:8])}{' ...' if len(left) > 8 else ''}" if left else "its supervisor"
        log.say(f"waiting for {jobs} ({format_duration(told - began)})")

    was_live = is_live(found.run)
    try:
        ended = stop_run(found.run, found.job_id, now=now, on_tick=on_tick)
    except KeyboardInterrupt:
        log.say(f"{name} was asked to stop all the same; memfit watch {found.run.path} shows it")
        raise typer.Exit(InterruptedRunError.exit_code) from None
    if not ended:
        stopped = was_live and found.job_id is None
        log.say(
            f"{name} has stopped: no job of it ran" if stopped else f"{name} does not run: there is nothing to stop"
        )
    for status in ended:
        log.say(f"{status.job_id} {status.state}{f': {status.cause}' if status.cause else ''}")
    if any(status.state != "completed" for status in ended):
        log.say(f"to go on: memfit resume {found.run.path}")
