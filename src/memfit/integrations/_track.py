"""Show a run's epochs in TensorBoard and Weights & Biases, from a process that reads the run's events.

The run directory is the spool: what was not shown yet is shown by the next start of the run. A tracker that hangs or
fails costs the jobs nothing.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from memfit.config import Settings
from memfit.errors import MissingExtraError, UsageError
from memfit.files import read_json, write_json
from memfit.rundir import EventWriter, Reader, RunDir

_POLL_SECONDS = 1.0
_LAST_SECONDS = 30.0  # the end of a run waits for its trackers at most so long
_POSITION = "tracked_{}.json"  # how much of each event file a tracker has read
Name = Literal["tensorboard", "wandb"]


class TrackSettings(Settings):
    """Where the numbers of a run's epochs are shown, beside the run directory.

    Attributes:
        to: ``tensorboard``, ``wandb``, or both.
        offline: Weights & Biases writes into the run directory and sends nothing; no key is needed.
        key_variable: The variable that holds the key of Weights & Biases. The key itself is refused: settings are
            stored.
        project: The project there.
    """

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
            env = {**os.environ, "WANDB_SILENT": "true", "WANDB_MODE": "offline" if settings.offline else "online"}
            if name == "wandb" and not settings.offline:
                env["WANDB_API_KEY"] = os.environ[settings.key_variable]
            self._children[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, start_new_session=True
            )
            os.close(log)

    def close(self) -> None:
        """Let the trackers show what is left, end those that hang, and record what became of each."""
        for child in self._children.values():
            assert child.stdin is not None
            with suppress(OSError):
                child.stdin.close()  # tells it that the run has ended
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
    """Start the trackers of a run; None if it has none.

    Raises:
        UsageError: If Weights & Biases has no key and ``offline`` is not set.
        MissingExtraError: If a tracker is not installed.
    """
    for name in settings.to:
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError.of(name, "integrations", f"track.to: {name}")
    if "wandb" in settings.to and not settings.offline and not os.environ.get(settings.key_variable):
        raise UsageError(
            f"track.to names wandb, and {settings.key_variable} is not set.",
            rule="Weights & Biases needs a key, unless track.offline says that nothing is to be sent.",
            remedy=f"export {settings.key_variable}, or --set track.offline=true",
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


class _TensorBoard:
    """Scalars by job, in ``RUN/tensorboard``."""

    def __init__(self, run: RunDir) -> None:
        from tensorboard.summary import Writer  # type: ignore[import-untyped]

        self.writer = Writer(str(run.path / "tensorboard"))
        self.flush()  # fails here if the folder cannot be written

    def show(self, job: str, epoch: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(f"{job}/{name}", value, epoch)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    """One run of Weights & Biases, which goes on when the run does; offline below ``RUN/wandb``."""

    def __init__(self, run: RunDir, project: str) -> None:
        import wandb

        self.run: Any = wandb.init(
            project=project, id=run.path.name, name=run.path.name, dir=str(run.path), resume="allow"
        )
        self.jobs = set[str]()

    def show(self, job: str, epoch: int, numbers: Mapping[str, float]) -> None:
        if job not in self.jobs:  # each job counts its own epochs
            self.jobs.add(job)
            self.run.define_metric(f"{job}/*", step_metric=f"{job}/epoch")
        self.run.log({f"{job}/{name}": value for name, value in numbers.items()} | {f"{job}/epoch": epoch})

    def flush(self) -> None:
        """Weights & Biases writes by itself."""

    def close(self) -> None:
        self.run.finish()


def main(folder: Path, name: str, project: str) -> None:
    """Show the epochs of a run from where the last process was, until standard input ends."""
    run, ended = RunDir(folder), threading.Event()
    path = folder / _POSITION.format(name)
    reader = Reader(run, offsets=(read_json(path, {"read_bytes": {str: int}}) or {}).get("read_bytes"))
    events = EventWriter(run.events_dir)
    try:
        tracker = _TensorBoard(run) if name == "tensorboard" else _Wandb(run, project)
    except Exception as error:
        told = f"{name} does not work: {type(error).__name__} ({name}.log); the run goes on without it"
        events.write("track_failed", to=name, why=type(error).__name__, text=told)
        raise
    events.write("tracking", to=name)

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    while True:
        is_last = ended.wait(_POLL_SECONDS)
        epochs = [event for event in reader.read() if event["kind"] == "epoch"]
        for event in epochs:
            tracker.show(str(event["job"]), event["epoch"], dict(numbers_of(event)))
        if epochs:
            tracker.flush()
            write_json(path, {"read_bytes": reader.offsets})
        if is_last:
            break
    tracker.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4])
