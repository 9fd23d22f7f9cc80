"""The console of the verbs: closing the terminal or its reader does not stop a run."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich.console
import typer
from rich.segment import Segment
from typer import Option

from memfit.errors import StoppedError
from memfit.files import read_json
from memfit.masking import strip_controls
from memfit.rundir import RunDir, finite
from memfit.units import format_duration, list_some

if TYPE_CHECKING:
    from memfit.jobs import JobStatus
    from memfit.reports import Part

#: A command says after so long a silence that it goes on.
_SILENCE_SECONDS = 10.0

AsJson = Annotated[bool, Option("--json", help="Print JSON: sizes in bytes, times in seconds.")]
RunName = Annotated[
    str | None, typer.Argument(help="A run's folder, name or experiment; by default the newest.", show_default=False)
]


class Console(rich.console.Console):
    """A console that goes on when its reader ends, as ``| head`` does. Texts hold no markup and no orders to it."""

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        """Yield the pieces of what is printed."""
        for one in super().render(renderable, options):
            yield one if one.control else Segment(strip_controls(one.text), one.style)

    def on_broken_pipe(self) -> None:
        _to_nowhere(2 if self.stderr else 1)

    def say(self, text: str, style: str | None = None) -> None:
        """Print text without folding long lines."""
        self.print(text, style=style, soft_wrap=True)


def console(*, stderr: bool = False) -> Console:
    """Return a console; one that writes to a file has at least 120 columns."""
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = max(made.width, 120)
    return made


def answer(found: Any, as_json: bool, parts: Iterable[Part], log: Console | None = None) -> None:
    """Print what was found as JSON, where NaN and infinity are null; or show people a report of it."""
    if as_json:
        typer.echo(json.dumps(finite(found), indent=2, default=str))
        return
    from memfit.reports import to_text

    to_text(parts, log or console())


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal, nothing elsewhere; called with what is done and the total."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    log = console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=log, transient=True, disable=not log.is_terminal) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def heartbeat(what: str, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Print to standard error every 10 s for how long a block has run, until it ends or calls what it gets."""
    begun, ended, log = time.monotonic(), threading.Event(), console(stderr=True)

    def beat() -> None:
        while not ended.wait(None if quiet else _SILENCE_SECONDS):
            log.say(f"{what} ({format_duration(time.monotonic() - begun, short=True)})", "dim")

    def end() -> None:
        ended.set()
        thread.join()

    thread = threading.Thread(target=beat, name="memfit-heartbeat", daemon=True)
    thread.start()
    try:
        yield end
    finally:
        end()


def survive_hangup() -> None:
    """Go on without output when the terminal is closed; respect ``nohup``."""
    if signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:
        return
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
    signal.signal(signal.SIGHUP, lambda *_: _to_nowhere(*terminals))


def _to_nowhere(*descriptors: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


def how_to_go_on(run: RunDir, ended: Sequence[JobStatus]) -> str:
    """Return how to continue a stopped run, which of its jobs then start from the beginning, and what changes that."""
    text, states = f"to go on: memfit resume {run.path}", ("cancelled", "preempted")
    ran = [one for one in ended if one.state in states and one.started is not None and one.checkpointed is None]
    anew = [one.job_id for one in ran if one.exit_code != StoppedError.exit_code]
    if not anew:
        return text
    from memfit.doctor import explain_stop

    job = read_json(run.job_dir(anew[0]) / "job.json", {"command": [str], "cwd": str}) or {"command": [], "cwd": "."}
    hint = explain_stop(job["command"], cwd=Path(job["cwd"]), env=os.environ)
    text += f"\n{list_some(anew)} start{'s' * (len(anew) == 1)} from the beginning"
    return f"{text}, unless the command saves and loads checkpoints of its own; {hint}"
