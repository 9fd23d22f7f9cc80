"""Send messages on a run's start, progress, out-of-memories and end, from a thread that reads the run's events."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from memfit.config import Settings
from memfit.errors import MissingExtraError, UsageError
from memfit.rundir import EventWriter, Reader, RunDir

_POLL_SECONDS = 1.0
_SEND_SECONDS = 20.0  # a service that hangs is given up after so long
_LAST_SECONDS = 30.0  # the end of a run waits for the last messages at most so long
_PAUSES = (2.0, 10.0)  # before a message is sent again
_MOST_WAITING = 20
_MOST_TEXT = 1500
#: What is told at once, by the event's kind. Epochs are told now and then.
_AT_ONCE = frozenset({"oom", "give_up", "skip", "batch_changed", "death", "fail", "growth"})
_SEND = """
import json, sys
import apprise
told = json.load(sys.stdin)
service = apprise.Apprise()
sys.exit(0 if service.add(told["address"]) and service.notify(title=told["title"], body=told["body"]) else 1)
"""


class NotifySettings(Settings):
    """Who is told how a run goes. The address (a webhook, or what apprise knows) is a secret: settings are stored, and
    only name the variable or the file that holds it. ``every_seconds``: progress at most."""

    url_variable: str = ""
    url_file: Path | None = None
    every_seconds: Annotated[float, Field(ge=1)] = 600.0

    @field_validator("url_variable", "url_file", mode="before")
    @classmethod
    def _is_no_address(cls, value: object) -> object:
        if re.search(r"://|[^\w./~-]", str(value)):
            told = "names a variable or a file, and is no address: write url_variable: NOTIFY_URL"
            raise ValueError(f"{told}, and in the shell: export NOTIFY_URL=...")
        return value


def notifier_of(settings: NotifySettings, run: RunDir, events: EventWriter) -> Notifier | None:
    """Return what tells people of a run, started; None if nobody is to be told."""
    if not settings.url_variable and settings.url_file is None:
        return None
    if importlib.util.find_spec("apprise") is None:
        raise MissingExtraError.of("apprise", "integrations", "notify")
    where = f"notify.url_variable {settings.url_variable}" if settings.url_variable else f"{settings.url_file}"
    try:
        address = os.environ[settings.url_variable] if settings.url_file is None else settings.url_file.read_text()
    except (KeyError, OSError) as error:
        raise UsageError(
            f"{where} cannot be read: {'it is not set' if isinstance(error, KeyError) else error.strerror}.",
            rule="with notify, a variable or a file holds the address that messages go to.",
            remedy="export it, or leave notify out",
        ) from None
    notifier = Notifier(run, events, address.strip(), settings.every_seconds)
    notifier.start()
    return notifier


class Notifier(threading.Thread):
    """Tells people of a run, from a thread of its own; each message is sent by a process that may fail or hang."""

    def __init__(self, run: RunDir, events: EventWriter, address: str, every_seconds: float) -> None:
        super().__init__(name="notifier", daemon=True)
        self.run_dir, self.events, self.every_seconds = run, events, every_seconds
        self._address, self._ending = address, threading.Event()
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)
        self._reader = Reader(run)
        self._progress, self._told_at = "", time.monotonic()
        self._reader.read()  # what earlier starts of this run wrote is old

    def run(self) -> None:
        self._waiting.append("started")
        while not self._ending.wait(_POLL_SECONDS):
            self._collect()
            self._send_waiting()

    def close(self, state: str) -> None:
        """Tell how the run ended, and wait for that for some seconds at most."""
        self._ending.set()
        self.join(_LAST_SECONDS)
        if self.is_alive():
            return  # a service that hangs
        self._collect()
        self._waiting.append(f"{state}. {self._progress}".strip())
        last = threading.Thread(target=self._send_waiting, daemon=True)
        last.start()
        last.join(_LAST_SECONDS)

    def _collect(self) -> None:
        for event in self._reader.read():
            text = str(event.get("text") or "")
            if event.get("kind") in _AT_ONCE and text:
                self._waiting.append(text)
            elif event.get("kind") == "epoch":
                self._progress = text or f"{event.get('job', '')} epoch {event.get('epoch')}"
        if self._progress and time.monotonic() - self._told_at >= self.every_seconds:
            self._told_at = time.monotonic()
            self._waiting.append(self._progress)

    def _send_waiting(self) -> None:
        """Send what waits as one message; what cannot be sent is noted and dropped."""
        if not self._waiting:
            return
        lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
        told = {"address": self._address, "title": f"memfit: {self.run_dir.path.name} on {socket.gethostname()}",
                "body": "\n".join(lines)[-_MOST_TEXT:]}  # fmt: skip
        why = ""
        for pause in (*_PAUSES, 0.0):
            why = _send(json.dumps(told))
            if not why:
                self.events.write("notified", num_lines=len(lines))
                return
            self._ending.wait(pause)
        self.events.write("notify_failed", why=why, num_lines=len(lines), text=f"a message could not be sent: {why}")


def _send(told: str) -> str:
    """Send a message by a process of its own, which gets the address by a pipe; return why that failed."""
    command = [sys.executable, "-c", _SEND]
    try:
        done = subprocess.run(
            command, input=told, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=_SEND_SECONDS, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {_SEND_SECONDS:.0f} s"
    except OSError as error:
        return str(error.strerror)
    return "" if done.returncode == 0 else "the service refused it"
