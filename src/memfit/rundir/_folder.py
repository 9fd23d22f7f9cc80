"""The folder of a run, and the words and shapes of the files in it."""

from __future__ import annotations

import getpass
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
from memfit.files import check_owner, check_shape, is_own, read_json, read_masked, refresh, write_masked
from memfit.masking import mask
from memfit.rundir._events import Scope, read_events

SCHEMA_VERSION = 2

#: The two variables by which a job's process finds its run directory and its own name.
RUN_DIR_VARIABLE = "MEMFIT_RUN_DIR"
JOB_ID_VARIABLE = "MEMFIT_JOB_ID"

_RUN_NAME = re.compile(r"run_(\d{8}_\d{6})_[0-9a-f]{8}")
_STAMP = "%Y%m%d_%H%M%S"
#: What ``run.json`` must hold; a field that only some runs have may be absent.
_HEADER = {
    "schema_version": int,
    "fingerprint": (str, type(None)),
    "kind": (str, type(None)),
    "cwd": (str, type(None)),
    "path": (str, type(None)),
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
        """Make a new run directory below ``root/experiment``, named by the time and 8 digits of the hex fingerprint."""
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
            "path": str(path.resolve()),
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
        """Return the folder of an experiment's runs, made if need be."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", experiment):
            raise UsageError(
                f"'{experiment}' cannot name an experiment.",
                rule="the name becomes a folder: letters, digits, '.', '_' and '-', beginning with a letter or digit.",
                remedy="give such a name: --name stock-ranker, or experiment: stock-ranker in the config",
            )
        parent = root / experiment
        parent.mkdir(parents=True, exist_ok=True)
        return parent

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Return an existing run directory of this user and of this or an earlier version."""
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
    def is_copy(self) -> bool:
        """Whether the run from which it was copied is there still."""
        was = self.header.get("path") or self.path
        return os.access(was, os.F_OK) and not Path(was).samefile(self.path)

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
    """Return the time for a new run's name: now in UTC, or the second after the newest run's where that is later. So
    the newest run sorts last, whatever the clock was set to."""
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


def scope_of(header: Mapping[str, Any]) -> Scope:
    """Return what a run of this ``run.json`` is to those who look at its events."""
    if header.get("kind") == "tune":
        return "study"
    return "command" if header.get("kind") == "commands" and len(header.get("combinations") or ()) == 1 else ""
