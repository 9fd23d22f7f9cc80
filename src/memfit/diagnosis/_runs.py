"""Read in a run directory of memfit how its jobs ended.

Each job's watcher read the kernel's kill counters of the job's cgroup before and after. So a kill for memory, one by
memfit and one by somebody else are three different things.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from memfit.diagnosis._group import lost_ranks
from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Line, Stream, read_streams
from memfit.errors import DamagedError, PeerFailedError, UsageError
from memfit.files import check_owner, open_own, open_regular, pass_over, read_json
from memfit.rundir import EventTail, RunDir

T = TypeVar("T")
_SIGKILL = -9
#: Reading a larger log takes so long that a person wants to see it go on.
_LONG_LOG_BYTES = 64 << 20
_NONE = type(None)
_COUNTS = ({"own": (int, _NONE), "above": ({str: int}, _NONE)}, _NONE)
_KILLS = {"before": _COUNTS, "after": _COUNTS}
#: The fields of `outcome.json` that are read; a file with other types is skipped.
_END = {
    "state": str,
    "attempt": (int, _NONE),
    "exit_code": (int, _NONE),
    "peak_bytes": (int, _NONE),
    "evidence": ({"rank": (int, _NONE), "wall_bytes": (int, _NONE), "oom_kills": (_KILLS, _NONE)}, _NONE),
}
_STATES = {
    "completed": "success",
    "timeout": "walltime",
    "preempted": "preempted",
    "cancelled": "cancelled",
    "node_fail": "node_fail",
}
_NAME = re.compile(r"\b(\w*(?:Error|Exception|Interrupt|Exit)\b)(?::|$)")
#: Events that a training records.
_EVENTS = {
    "oom": "skipped_batches",
    "skip": "skipped_batches",
    "shm_full": "shm",
    "loader_worker_died": "killed",
    "aside": "pressure",
    "short": "pressure",
}


def find_run(path: Path) -> RunDir | None:
    """Return the run directory that a path is or lies in, or None; refuse that of another user."""
    for folder in (path, *path.parents[:5], *path.absolute().parents[:5]):
        if os.path.lexists(folder / "run.json") and (folder / "jobs").is_dir():
            check_owner(folder.resolve())
            return RunDir(folder)
    return None


def open_file(path: Path) -> BinaryIO:
    """Open a file that a user names or that lies below a folder. Only in a run directory must it be an own one.

    Elsewhere it may be a link. A pipe is read only where the shell made it, as ``<(...)`` does; others are an OSError.
    """
    if str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/")):
        return open(path, "rb")
    try:
        if find_run(path) is not None:
            return open_own(path)
    except UsageError as error:
        raise OSError(errno.EPERM, error.what, str(path)) from None
    return open(open_regular(os.path.realpath(path)), "rb")


def read_log(path: Path) -> list[Stream]:
    """Return the streams of a log, opened by ``open_file``; none if it is no text. A long one shows how far it is."""
    with open_file(path) as file:
        about = os.fstat(file.fileno())
    return _read(path, about.st_size, about.st_ino, about.st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _read(path: Path, size: int, *_: int) -> list[Stream]:
    """Read a log once, although it is asked for its signs and for its settings."""
    with open_file(path) as file:
        if size < _LONG_LOG_BYTES:
            return read_streams(path, file)
        from rich.console import Console  # slow to load
        from rich.progress import wrap_file

        screen = Console(stderr=True)
        with wrap_file(file, size, description=f"reading {path.name}", console=screen, transient=True) as source:
            return read_streams(path, source)


def read_or_say(read: Callable[[Path], T], path: Path) -> T | None:
    """Return what a reader makes of a file; say so, and return None, if it refuses the file."""
    try:
        return read(path)
    except DamagedError as error:
        pass_over(error.what)
    except OSError as error:
        pass_over(f"{path}: {error.strerror}")
    return None


def logs_of(run: RunDir, job: str) -> list[Path]:
    """Return a job's logs, its errors first."""
    names = (run.job_dir(job) / name for name in ("err.log", "out.log"))
    return [path for path in names if os.path.lexists(path) and (not path.is_file() or path.stat().st_size)]


def run_signs(path: Path) -> list[Sign]:
    """Return how each attempt of a run's jobs, or of the job that it names, ended; then what was survived."""
    run = find_run(path)
    if run is None:
        return []
    signs = [sign for folder in folders_of(run, path) for sign in _ends_of(folder)]
    failed = {sign.values["job"] for sign in signs if sign.name != "success" and not sign.values["recovered"]}
    only = _job_of(run, path)
    for one in sorted(run.events_dir.glob("*.jsonl")):
        events = [(line, event) for line, event in _read_events(one) if only in (None, event.get("job"))]
        signs += _survived(events)
        for sign in lost_ranks(events):
            again = {"recovered": sign.values["job"] not in failed, "folder": run.job_dir(sign.values["job"])}
            signs.append(replace(sign, values={**sign.values, **again}))
    return signs


def _job_of(run: RunDir, path: Path) -> str | None:
    inside = path.resolve().relative_to(run.path.resolve()).parts
    return inside[1] if len(inside) > 1 and inside[0] == "jobs" else None


def folders_of(run: RunDir, path: Path) -> list[Path]:
    """Return the folders of a run's jobs, or that of the job that a path names."""
    only = _job_of(run, path)
    return [one for one in sorted((run.path / "jobs").iterdir()) if one.is_dir() and only in (None, one.name)]


def _ends_of(folder: Path) -> Iterator[Sign]:
    earlier = sorted(folder.glob("outcome_*.json"), key=lambda path: int(re.sub(r"\D", "", path.name) or 0))
    paths = [*earlier, folder / "outcome.json"]
    if not paths[-1].is_file():
        paths.append(folder / "status.json")  # it still runs, or its watcher died
    records: list[tuple[Path, dict[str, Any]]] = []
    for path in paths:
        if (found := read_or_say(lambda one: read_json(one, _END), path)) is not None:
            records.append((path, found))
    is_completed = bool(records) and records[-1][1].get("state") == "completed"
    for place, (path, record) in enumerate(records):
        sign = _end(folder.name, path, record, recovered=is_completed and place < len(records) - 1)
        if sign is not None:
            yield sign


def _end(job: str, path: Path, record: Mapping[str, Any], *, recovered: bool) -> Sign | None:
    """The end of one attempt; None if it still runs, or nothing is known of it."""
    evidence, state, cause = record.get("evidence") or {}, record["state"], str(record.get("cause") or "")
    before, after = ((evidence.get("oom_kills") or {}).get(name) or {} for name in ("before", "after"))
    own = before.get("own"), after.get("own")
    name, who = _judge(record, evidence, before, after)
    values: dict[str, Any] = {
        "who": who,
        "job": job,
        "attempt": int(record.get("attempt") or 1),
        "phase": str(record.get("phase") or ""),
        "recovered": recovered,
        "text": cause,
        "own_kills": own,
    }
    values |= {"used_bytes": record["peak_bytes"]} if record.get("peak_bytes") else {}
    values |= {"rank": evidence["rank"]} if evidence.get("rank") is not None else {}
    values |= {"limit_bytes": evidence["wall_bytes"]} if evidence.get("wall_bytes") else {}
    if name == "killed":  # the count of its own cgroup stood still: somebody else killed it, and not for memory
        values["stranger"] = None not in own
    elif name == "own_exception":
        found = _NAME.search(cause)
        values["name"] = found[1] if found else ""
    line = Line(str(path), 1, f"{job}: {state}: {cause}" if cause else f"{job}: {state}")
    return Sign(name, (line,), values) if name else None


def _judge(
    record: Mapping[str, Any], evidence: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[str, str]:
    """The heading for the end of a job, and who ended it."""
    state, is_killed = record.get("state"), record.get("exit_code") == _SIGKILL
    if state != "out_of_memory":
        ended = "own_exception" if _NAME.search(str(record.get("cause"))) else "exit_status"
        ended = "hang" if record.get("exit_code") == PeerFailedError.exit_code else ended
        name = "killed" if is_killed else ended if state == "failed" else ""
        return _STATES.get(str(state), name), "memfit" if state in ("cancelled", "timeout") else ""
    if evidence.get("place") == "device":
        return "device_refused", ""
    counts = [(before.get("own"), after.get("own"))]
    counts += [(count, (after.get("above") or {}).get(name)) for name, count in (before.get("above") or {}).items()]
    if any(first is not None and last is not None and last > first for first, last in counts):
        return "cgroup_kill", "the kernel" if is_killed else ""
    if not is_killed:
        return "host_refused", ""
    # No count of its cgroups rose: memfit ended it at its wall, or the kernel did for the whole host.
    is_memfit = after.get("own") is not None or bool(record.get("asked"))
    return ("cgroup_kill", "memfit") if is_memfit else ("global_kill", "the kernel")


def _read_events(path: Path) -> Iterator[tuple[Line, dict[str, Any]]]:
    for number, event in read_or_say(lambda one: EventTail(one).read_lines(), path) or ():
        text = json.dumps(event, separators=(",", ":"))[:4000]
        yield Line(str(path), number, text, None, str(event.get("time", ""))), event


def _survived(events: Iterable[tuple[Line, Mapping[str, Any]]]) -> Iterator[Sign]:
    """Yield what a training met and recorded."""
    for line, event in events:
        name = _EVENTS.get(str(event.get("kind")))
        if name is None or (event["kind"] == "loader_worker_died" and event.get("exit_code") != _SIGKILL):
            continue
        if event["kind"] == "oom" and "device" not in str(event.get("memory")):
            name = "pressure"
        yield Sign(name, (line,), {key: value for key, value in event.items() if key not in ("kind", "time")})
