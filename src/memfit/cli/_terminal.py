"""What the verbs share of the terminal: a console whose reader may go, and a hangup that ends nothing."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import rich.console
from typer import Option

AsJson = Annotated[bool, Option("--json", help="Print it as JSON; sizes in bytes, times in seconds.")]


class Console(rich.console.Console):
    """A console whose reader may go: ``| head``, and a Ctrl-C that also ends ``| tee``, leave the run as it is."""

    def on_broken_pipe(self) -> None:
        _to_nowhere(2 if self.stderr else 1)

    def say(self, text: str, style: str | None = None) -> None:
        """Print text as it is: it may hold brackets, and a long line is not folded."""
        self.print(text, style=style, markup=False, soft_wrap=True)


def console(*, stderr: bool = False) -> Console:
    """A console that does not fold tables at 80 columns where the output goes to a file."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = max(made.width, 120)
    return made


def survive_hangup() -> None:
    """Go on unseen when the terminal is closed; ``nohup`` stays as it is."""
    if signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:
        return
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
    signal.signal(signal.SIGHUP, lambda *_: _to_nowhere(*terminals))


def _to_nowhere(*descriptors: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)
