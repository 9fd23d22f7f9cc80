"""``memfit watch``, ``ps``, ``stop`` and ``resume``."""

from __future__ import annotations

import signal
import threading
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli._settings import Output, with_flags
from memfit.cli._terminal import AsJson, RunName, answer, console, heartbeat, how_to_go_on
from memfit.errors import InterruptedRunError
from memfit.jobs import stop as stop_run
from memfit.reports import LiveRun, find_run, find_target, list_runs, view_runs
from memfit.rundir import liveness, show_state

_STEP_SECONDS = 0.2


def watch(
    run: RunName = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also show the memory of each epoch, by phase.")] = False,
) -> None:
    """Show a run while it goes on: its jobs, their phases and their memory.

    \b
    memfit watch
    memfit watch runs/demo

    Watching changes nothing: Ctrl-C ends the watching, not the run. Without a name the newest live run is meant, of
    ./runs first.

    Exit codes: 0 the run has ended, 2 no such run, 130 the watching was interrupted.
    """
    found = find_run(run)
    log = console()
    alive = liveness(found)
    if not alive.is_live:
        going_on = "" if found.state == "completed" else f"; memfit resume {found.path} goes on with it"
        log.say(f"Run {found.path} does not run any more: {show_state(alive.state)}{going_on}")
        return
    live, interrupted = LiveRun(log, here=False, verbose=verbose), threading.Event()
    # Not as an exception, which would come in the middle of what is printed.
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        tick = live.show(found)
        if not liveness(found).is_supervised:
            log.say(f"no supervisor: its jobs go on; memfit resume {found.path} starts what waits")
        while liveness(found).is_live and not interrupted.wait(_STEP_SECONDS):
            tick()
    finally:
        live.close()
        signal.signal(signal.SIGINT, before)
    if interrupted.is_set():
        log.say("the run goes on")
        raise typer.Exit(InterruptedRunError.exit_code)
    state = "its supervisor died" if found.state == "running" else found.state
    log.say(f"Run {found.path} has ended: {show_state(state)}")


def ps(
    as_json: AsJson = False,
    all_: Annotated[bool, typer.Option("--all", help="Also list the runs below ./runs that have ended.")] = False,
) -> None:
    """List your runs on this host: the memory that each job uses, its peak and its reservation.

    \b
    memfit ps
    memfit ps --all

    Exit codes: 0 done.
    """
    found = list_runs(root=Path("runs") if all_ else None)
    none = "no run of yours is alive on this host" + ("" if all_ else "; memfit ps --all shows those that ended")
    answer([one.to_dict() for one in found], as_json, view_runs(found) if found else [none])


def stop(
    target: Annotated[
        str,
        typer.Argument(
            help="A run (folder, name or experiment), or a job of it: demo/cmd_0003.", metavar="RUN|RUN/JOB"
        ),
    ],
    now: Annotated[bool, typer.Option("--now", help="Kill it now, without a checkpoint.")] = False,
) -> None:
    """Stop a run, or one of its jobs, at a checkpoint, and wait until it has ended.

    \b
    memfit stop runs/demo
    memfit stop runs/demo/cmd_0003 --now

    Waiting jobs do not start. A job that is not done after the run's --grace seconds is killed. memfit resume continues
    the run.

    Exit codes: 0 it has ended, or nothing ran, 2 no such run, 130 the waiting was interrupted.
    """
    found, log = find_target(target), console()
    name = f"{found.run.path}/{found.job_id}" if found.job_id else str(found.run.path)
    was_live = liveness(found.run).is_live
    try:
        with heartbeat(f"waiting for {name}"):
            ended = stop_run(found.run, found.job_id, now=now)
    except KeyboardInterrupt:
        log.say(f"{name} was asked to stop all the same; memfit watch {found.run.path} shows it")
        raise typer.Exit(InterruptedRunError.exit_code) from None
    if not ended:
        stopped = was_live and found.job_id is None
        log.say(
            f"{name} has stopped: no job of it ran" if stopped else f"{name} does not run: there is nothing to stop"
        )
    for status in ended:
        log.say(f"{status.job_id} {show_state(status.state)}{f': {status.cause}' if status.cause else ''}")
    if any(status.state != "completed" for status in ended):
        log.say(how_to_go_on(found.run, ended))


@with_flags
def resume(run: Annotated[str, typer.Argument(help="A run's folder, name or experiment.")], *, output: Output) -> None:
    """Continue a run that was stopped or killed, with its own settings.

    \b
    memfit resume runs/demo
    memfit resume run_20261121_090000_0123abcd --json

    Completed jobs are kept, and jobs that still run are taken over. Interrupted jobs continue from their checkpoints.
    Failed jobs start again.

    Exit codes: 0 done, 2 bad input, 3 does not fit, 4 a job failed, 75 stopped, 130 interrupted.
    """
    from memfit.cli._run import show_run
    from memfit.pipeline import resume as resume_run

    found = find_run(run)
    if found.header.get("kind") == "tune":
        from memfit.cli._tune import show_study
        from memfit.tuning import resume_study

        show_study(partial(resume_study, found), output)
    show_run(partial(resume_run, found.path), output)
