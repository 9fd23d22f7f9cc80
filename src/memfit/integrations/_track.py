"""Show a run's epochs and ends in trackers, each from a process of its own that reads the run's events.

The run directory is the spool: what was not shown yet is shown by the next start of the run. A tracker that hangs or
fails costs the jobs nothing. It closes its own run with the cause of the end, also if the supervisor was killed.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, field_validator

from memfit.config import Settings
from memfit.errors import MissingExtraError, UsageError
from memfit.files import read_json, write_json
from memfit.integrations._trackers import TRACKERS, Name, environment
from memfit.memory import is_locked, lock_file
from memfit.rundir import EventWriter, Reader, RunDir

_POLL_SECONDS = 1.0
_LAST_SECONDS = 30.0  # the end of a run waits for its trackers at most so long
_POSITION = "tracked_{}.json"  # how much of each event file a tracker has read
_MOST_CAUSES = 3
#: The state of a run whose supervisor was killed.
_KILLED = "interrupted"


class TrackSettings(Settings):
    """Where the numbers of a run's epochs are shown, beside the run directory. ``offline``: all write into the run
    directory and send nothing. ``key_variable`` names the variable with the key of Weights & Biases; the key itself is
    refused, because settings are stored. ``project`` is MLflow's experiment."""

    to: list[Name] = Field(default_factory=list)
    offline: bool = False
    key_variable: Annotated[str, Field(min_length=1)] = "WANDB_API_KEY"
    project: str = "memfit"

    @field_validator("key_variable")
    @classmethod
    def _is_no_key(cls, value: str) -> str:
        if not value.isidentifier() or (len(value) >= 32 and not value.isupper()):
            raise ValueError("names a variable and is no key: write key_variable: WANDB_API_KEY, and export that")
        return value


class Tracking:
    """The trackers of a run that is going on. `start_trackers` makes it."""

    def __init__(self, run: RunDir, settings: TrackSettings, events: EventWriter) -> None:
        self._events, self._children = events, dict[str, subprocess.Popen[bytes]]()
        for name in dict.fromkeys(settings.to):
            log = os.open(run.path / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            command = [sys.executable, "-m", "memfit.integrations._track", str(run.path), name, settings.project]
            env = environment(name, run, offline=settings.offline)
            if name == "wandb" and not settings.offline:
                env["WANDB_API_KEY"] = os.environ[settings.key_variable]
            self._children[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, start_new_session=True
            )
            os.close(log)

    def close(self, state: str) -> None:
        """Let the trackers show what is left and close, end those that hang, and record what became of each."""
        for child in self._children.values():
            assert child.stdin is not None
            with suppress(OSError):
                child.stdin.write(state.encode())
                child.stdin.close()
        for name, child in self._children.items():
            try:
                code: int | None = child.wait(_LAST_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)  # the processes that it started, too
                child.wait()
                code = None
            if code == 0:
                self._events.write("tracked", to=name)
            else:
                why = f"did not end within {_LAST_SECONDS:.0f} s" if code is None else "failed"
                text = f"{name} {why} ({name}.log); what is missing there is shown when the run starts again"
                self._events.write("track_failed", to=name, why=why, text=text)


def start_trackers(settings: TrackSettings, run: RunDir, events: EventWriter) -> Tracking | None:
    for name in settings.to:
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError.of(name, "integrations", f"track.to: {name}")
    needed = {} if settings.offline else {"wandb": settings.key_variable, "mlflow": "MLFLOW_TRACKING_URI"}
    for tracker, variable in needed.items():
        if tracker in settings.to and not os.environ.get(variable):
            raise UsageError(
                f"track.to names {tracker}, and {variable} is not set.",
                rule="it holds the key or the server's address, unless track.offline says that nothing is to be sent.",
                remedy=f"export {variable}=..., or --set track.offline=true",
            )
    return Tracking(run, settings, events) if settings.to else None


def numbers_of(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield what an epoch's event says in numbers, by name; the parts of an inner mapping follow a slash.
    >>> dict(numbers_of({"kind": "epoch", "time": 1.0, "epoch": 2, "train_loss": 0.5, "memory": {"cpu": {"a": 3}}}))
    {'train_loss': 0.5, 'memory/cpu/a': 3.0}
    """
    for name, value in event.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in numbers_of(value))
        elif isinstance(value, int | float) and name not in ("time", "epoch", "num_epochs"):
            yield name, float(value)


class _Writer:
    """Shows a tracker what the events of a run tell from where the last process was."""

    def __init__(self, run: RunDir, name: Name, project: str) -> None:
        self.run, self.path = run, run.path / _POSITION.format(name)
        position = (read_json(self.path, {"read_bytes": {str: int}}) or {}).get("read_bytes")
        self.reader, self._told = Reader(run, offsets=position), set[str]()
        self.tracker = TRACKERS[name](run, project)

    def take(self) -> None:
        new = [event for event in self.reader.read() if event["kind"] in ("epoch", "end")]
        for event in new:
            job = str(event["job"])
            if event["kind"] == "epoch":
                self.tracker.show(job, event["epoch"], dict(numbers_of(event)))
            else:
                self._end(job, event["state"], event["cause"])
        if new:
            self.tracker.flush()
            write_json(self.path, {"read_bytes": self.reader.offsets})

    def close(self, state: str, why: str = "") -> None:
        """Show the ends that no event told, and close the tracker's run with the causes of the jobs."""
        self.take()
        jobs = self.reader.state().jobs.values()
        for job in jobs:
            if state == _KILLED and job.ended and job.id not in self._told:
                self._end(job.id, job.shown, job.cause)
        causes = [f"{job.id} {job.shown}: {job.cause}" for job in jobs if job.cause and job.shown != "completed"]
        self.tracker.close(state, "; ".join([*filter(None, [why]), *causes[:_MOST_CAUSES]]))

    def _end(self, job: str, state: str, cause: str) -> None:
        self._told.add(job)
        self.tracker.end(job, state, cause)

    def follow_without_supervisor(self) -> None:
        """Close when the last job has ended, whose watcher writes how; or when a new start shows the rest."""
        while True:
            time.sleep(_POLL_SECONDS)  # a process that dies gives up its lock a moment after its pipe
            self.take()
            alive = [job.id for job in self.reader.state().running if is_locked(self.run.job_dir(job.id) / "lock")]
            if is_locked(self.run.path / "supervisor.lock") or not alive:
                return self.close(_KILLED, "memfit itself was killed")


def main(folder: Path, name: Name, project: str) -> None:
    """Show a run until standard input ends: after a word, the state in which the supervisor ended, or without one."""
    run, ended, said = RunDir(folder), threading.Event(), list[str]()
    lock = lock_file(folder / f"{name}.lock", _LAST_SECONDS)  # that of a supervisor which was killed may close yet
    events = EventWriter(run.events_dir)
    try:
        writer = _Writer(run, name, project)
    except Exception as error:
        told = f"{name} does not work: {type(error).__name__} ({name}.log); the run goes on without it"
        events.write("track_failed", to=name, why=type(error).__name__, text=told)
        raise
    events.write("tracking", to=name)

    def wait_for_end() -> None:
        said.append(sys.stdin.buffer.read().decode())
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    while not ended.wait(_POLL_SECONDS):
        writer.take()
    if said[0]:
        writer.close(said[0])
    else:
        writer.follow_without_supervisor()
    if lock is not None:
        os.close(lock)


if __name__ == "__main__":
    main(Path(sys.argv[1]), cast(Name, sys.argv[2]), sys.argv[3])
