"""The run directory: everything before a run writes into it, everything after reads from it.

Two kinds of file live there. *Append-only* event files have one writer each; a process that dies in the middle of a
line leaves a torn last record, which every reader passes over. All other files are *written aside and renamed*, so
that a reader sees the old content or the new one and never a part. ARCHITECTURE.md lists the files.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit.files import (
    REFUSED,
    check_owner,
    check_shape,
    is_own,
    open_own,
    parse_json,
    pass_over,
    read_json,
    read_masked,
    refresh,
    write_masked,
)
from memfit.masking import mask, mask_line

SCHEMA_VERSION = 2

#: The two variables by which a job's process finds its run directory and its own name.
RUN_DIR_VARIABLE = "MEMFIT_RUN_DIR"
JOB_ID_VARIABLE = "MEMFIT_JOB_ID"

_RUN_NAME = re.compile(r"run_(\d{8}_\d{6})_[0-9a-f]{8}")
_STAMP = "%Y%m%d_%H%M%S"
#: Unix seconds of the year 9000: no clock is there.
_LAST_TIME = 221_845_392_000
#: What ``run.json`` must hold; a field that only some runs have may be absent.
_HEADER = {
    "schema_version": int,
    "fingerprint": (str, type(None)),
    "kind": (str, type(None)),
    "cwd": (str, type(None)),
    "host": (str, type(None)),
    "user": (str, type(None)),
    "folders": ([str], type(None)),
    "template": ([str], type(None)),
    "combinations": ([{str: str}], type(None)),
}
_PEAKS = {"private_bytes": int, "shared_bytes": (int, type(None)), "device_bytes": ({str: int}, type(None))}
#: A footprint as ``memfit.memory.Footprint.to_dict`` gives it.
FOOTPRINT = _PEAKS | {"parts": ({str: int}, type(None)), "phases": ({str: _PEAKS}, type(None))}
#: What ``plan.json`` must hold.
_PLAN = {"footprint": FOOTPRINT, "measured_on": str, "why": str, "num_jobs": (int, type(None))}


class EventWriter:
    """Appends one process's events to a file of its own, a line each.

    Every line reaches the kernel in one write before ``write`` returns, so it survives SIGKILL of the writer.
    """

    def __init__(self, events_dir: Path, job_id: str | None = None) -> None:
        self.job_id = job_id
        self.pid = os.getpid()
        start = time.time_ns() // 1_000_000
        events_dir.mkdir(parents=True, exist_ok=True)
        self.path = events_dir / f"{socket.gethostname()}-{self.pid}-{start}.jsonl"
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event: ``time`` in Unix seconds, ``job``, ``kind`` and the fields given.

        A writer of no job of its own, the supervisor's, names the job that an event is about in the field ``job``.
        """
        own = {"time": time.time(), "job": self.job_id or fields.get("job"), "kind": kind}
        record = own | fields | own  # first in the line, and not to be overwritten
        line = mask_line(json.dumps(record, separators=(",", ":")))
        os.write(self._descriptor, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._descriptor)


class EventTail:
    """Reads one event file on from where the last call stopped; a torn last line waits for its rest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The whole records that came since the last call."""
        try:
            with open_own(self.path) as file:
                file.seek(self._offset)
                chunk = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            pass_over(f"{self.path}: {error.strerror}")
            return []
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = []
        for line in whole.splitlines():
            with suppress(ValueError, RecursionError, AttributeError):  # no object
                records.append(parse_json(mask_line(line.decode())))
        return [record for record in records if isinstance(record, dict)]


class FolderTail:
    """Reads all event files of a folder on from where the last call stopped; a file that did not grow stays closed."""

    def __init__(self, events_dir: Path) -> None:
        self._dir = events_dir
        self._tails: dict[str, tuple[EventTail, int]] = {}

    def read(self, *, anew: bool = False) -> list[dict[str, Any]]:
        """The whole records since the last call, in order of time; ``anew`` trusts no size that NFS remembers."""
        records = []
        for path in sorted(self._dir.glob("*.jsonl")):
            tail, size = self._tails.get(path.name) or (EventTail(path), -1)
            if (size_now := path.lstat().st_size) != size or anew:
                records += tail.read()
                self._tails[path.name] = (tail, size_now)
        return sorted(records, key=event_time)


def event_time(event: Mapping[str, Any]) -> float:
    """Return an event's Unix seconds, or 0 when it tells none.

    >>> event_time({"time": 2.5}), event_time({"time": "noon"}), event_time({"time": 1e300})
    (2.5, 0.0, 0.0)
    """
    told = event.get("time")
    return float(told) if isinstance(told, int | float) and 0 < told < _LAST_TIME else 0.0


def read_events(events_dir: Path) -> list[dict[str, Any]]:
    """All whole records of all writers in a folder, in order of time; torn records are passed over."""
    return FolderTail(events_dir).read()


@dataclass(frozen=True)
class RunDir:
    """One run's directory; holds no open files.

    Example:
        >>> import tempfile
        >>> run = RunDir.create(Path(tempfile.mkdtemp()), "demo", "0123abcd" * 8)
        >>> run.job_dir("fold_1").relative_to(run.path).as_posix()
        'jobs/fold_1'
        >>> RunDir.all(run.path.parent.parent, "demo") == [run]
        True
    """

    path: Path

    @classmethod
    def create(cls, root: Path, experiment: str, fingerprint: str, facts: Mapping[str, Any] | None = None) -> RunDir:
        """Make a new run directory below ``root/experiment``.

        Args:
            root: The folder of all runs, for example ``runs``.
            experiment: The experiment's name; one path component.
            fingerprint: The hex fingerprint of config, code and data; its first 8 digits end the folder's name.
            facts: More for ``run.json``, beside schema version, fingerprint, user, host, command and time.
        """
        parent = cls.folder_of(root, experiment)
        while True:
            path = parent / f"run_{_stamp(parent)}_{fingerprint[:8]}"
            try:
                path.mkdir()
                break
            except FileExistsError:
                time.sleep(0.05)
        for name in ("events", "jobs", "checkpoints"):
            (path / name).mkdir()
        header = {
            "schema_version": SCHEMA_VERSION,
            "experiment": experiment,
            "fingerprint": fingerprint,
            "created": time.time(),
            "host": socket.gethostname(),
            "user": _user(),
            "pid": os.getpid(),
            "command": mask(sys.argv),
            "python": sys.version.split()[0],
        }
        write_masked(path / "run.json", {**header, **(facts or {})})
        return cls(path.resolve())

    @classmethod
    def folder_of(cls, root: Path, experiment: str) -> Path:
        """Return the folder of an experiment's runs, made if need be.

        Raises:
            UsageError: If the experiment's name cannot name a folder.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", experiment):
            raise UsageError(
                f"'{experiment}' cannot name an experiment.",
                rule="the name becomes a folder: letters, digits, '.', '_' and '-', beginning with a letter or digit.",
                remedy="set experiment: to such a name, for example stock-ranker",
            )
        parent = root / experiment
        parent.mkdir(parents=True, exist_ok=True)
        return parent

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run directory.

        Raises:
            UsageError: If it is none, if another user owns it, or if a newer memfit wrote it.
        """
        path = path.resolve()  # a link that is changed meanwhile leads nowhere else
        check_owner(path)
        header = read_json(path / "run.json", {"schema_version": int})
        if header is None:
            raise UsageError(
                f"{path} is no run directory.",
                rule="a run directory holds a run.json.",
                remedy="name a folder such as runs/<experiment>/run_<time>_<id>",
            )
        if header.get("schema_version") != SCHEMA_VERSION:
            raise UsageError(
                f"{path} has schema version {header.get('schema_version')}.",
                rule=f"this memfit reads schema version {SCHEMA_VERSION}.",
                remedy="use the version of memfit that wrote it, or start over with --new",
            )
        check_shape(path / "run.json", header, _HEADER)
        return cls(path)

    @classmethod
    def all(cls, root: Path, experiment: str) -> list[RunDir]:
        """Return this user's runs of the experiment, newest first; a folder without ``run.json`` is none.

        A damaged ``run.json``, or one of another version, is found when the run is opened.
        """
        parent = (root / experiment).resolve()
        paths = [path for path in parent.glob("run_*") if _RUN_NAME.fullmatch(path.name) and is_own(path)]
        return [cls(path) for path in sorted(paths, reverse=True) if refresh(path) and (path / "run.json").exists()]

    @classmethod
    def newest(cls, root: Path, experiment: str, fingerprint: str) -> RunDir | None:
        """Return the newest run of this very fingerprint; one that cannot be read is named and passed over."""
        for run in cls.all(root, experiment):
            if not run.path.name.endswith(f"_{fingerprint[:8]}"):
                continue
            try:
                if cls.open(run.path).header.get("fingerprint") == fingerprint:
                    return run
            except UsageError as error:
                print(f"memfit: this run is passed over: {error.what}", file=sys.stderr)
        return None

    @property
    def header(self) -> dict[str, Any]:
        """``run.json``."""
        return read_masked(self.path / "run.json", _HEADER) or {}

    @property
    def state(self) -> str:
        """The state in ``outcome.json``, or ``running`` when there is none yet."""
        outcome = read_json(self.path / "outcome.json", {"state": str})
        return str(outcome["state"]) if outcome else "running"

    @property
    def plan(self) -> dict[str, Any] | None:
        """``plan.json``: how many jobs run at once and why; None before a job's footprint is known."""
        return read_json(self.path / "plan.json", _PLAN)

    @property
    def events_dir(self) -> Path:
        return self.path / "events"

    def job_dir(self, job_id: str) -> Path:
        return self.path.joinpath("jobs", job_id)

    def checkpoint_dir(self, job_id: str) -> Path:
        return self.path / "checkpoints" / job_id

    def manifest_path(self, stage: str, job_id: str) -> Path:
        """Where a job's manifest lies: ``stage_<name>.json`` for a stage that runs once."""
        name = f"stage_{stage}" if job_id == stage else job_id
        return self.path / "checkpoints" / f"{name}.json"

    def events(self) -> list[dict[str, Any]]:
        return read_events(self.events_dir)


def _stamp(parent: Path) -> str:
    """Return the time for a new run's name: now in UTC, or the second after the newest run's where that is later.

    So the newest run sorts last, whatever the clock was set to, and whatever time zone older names are in.
    """
    now = time.strftime(_STAMP, time.gmtime())
    known = [found[1] for path in parent.iterdir() if (found := _RUN_NAME.fullmatch(path.name))]
    for newest in sorted((stamp for stamp in known if stamp > now), reverse=True):
        from datetime import datetime, timedelta  # rare, and slow to load

        with suppress(ValueError, OverflowError):  # no date, or the last one
            return (datetime.strptime(newest, _STAMP) + timedelta(seconds=1)).strftime(_STAMP)
    return now


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


class _Current:
    """This process's event file, opened at its run's first event; a forked child opens its own."""

    writer: EventWriter | None = None
    said = False


def current_run() -> tuple[RunDir, str] | None:
    """The run directory and job id that this process belongs to, or None outside a run."""
    path, job_id = os.environ.get(RUN_DIR_VARIABLE), os.environ.get(JOB_ID_VARIABLE)
    return (RunDir(Path(path)), job_id) if path and job_id else None


def record(kind: str, **fields: Any) -> None:
    """Append an event of this job to the run directory; do nothing outside a run.

    The live view shows the field ``text`` behind the job's name. A full disk loses events, says so once, and never
    fails the job.
    """
    current = current_run()
    if current is None:
        return
    try:
        events_dir, job_id, writer = current[0].events_dir, current[1], _Current.writer
        if writer is None or (writer.pid, writer.path.parent, writer.job_id) != (os.getpid(), events_dir, job_id):
            if writer is not None:
                writer.close()
            _Current.writer = None
            writer = _Current.writer = EventWriter(events_dir, job_id)
        if "text" in fields:
            fields["text"] = f"{job_id} {fields['text']}"
        writer.write(kind, **fields)
    except OSError as error:
        if not _Current.said:
            _Current.said = True
            print(f"memfit: events of this job are not recorded from here on: {error}", file=sys.stderr, flush=True)


_phase_now: str | None = None


def phase(name: str) -> contextlib.ExitStack:
    """Mark the phase that this job enters, so that its peak memory is known by phase.

    Outside of a run nothing is recorded.

    Args:
        name: ``load``, ``build``, ``train``, ``validate``, ``checkpoint``, or a name of yours.

    Returns:
        What ends the phase in a ``with`` block: the phase before it goes on.

    Example:
        >>> phase("train")  # doctest: +ELLIPSIS
        <contextlib.ExitStack object at ...>
        >>> with phase("validate"):
        ...     print("train goes on after this block")
        train goes on after this block
    """
    global _phase_now
    before, _phase_now = _phase_now, name
    if current_run() is not None:
        record("phase", phase=name, **read_devices())
    ends = contextlib.ExitStack()
    if before is not None:
        ends.callback(phase, before)
    return ends


def read_devices() -> dict[str, list[dict[str, int]]]:
    """Return what torch holds on each of this process's devices, in bytes; nothing before torch has used one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    held, peak = torch.cuda.memory_reserved, torch.cuda.max_memory_reserved
    return {"devices": [{"bytes": held(n), "peak_bytes": peak(n)} for n in range(torch.cuda.device_count())]}
