"""What a run directory of memfit's own says of its jobs' ends: the record that each job's watcher left.

It is the surest of all witnesses: the watcher read the kernel's count of kills in the job's own group before and after,
so that a kill for memory, one by memfit at its wall and one by a stranger's hand are three different things.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memfit.diagnosis._signatures import Sign
from memfit.diagnosis._text import Line
from memfit.errors import DamagedError
from memfit.rundir import RunDir, read_json

Killer = Literal["kernel", "memfit", "stranger", "itself", "unknown", "nobody"]
Where = Literal["host_cgroup", "host_kernel", "host_alloc", "gpu", "none"]
_SIGKILL = -9
_NONE = type(None)
_COUNTS = ({"own": (int, _NONE), "above": ({str: int}, _NONE)}, _NONE)
_KILLS = {"before": _COUNTS, "after": _COUNTS}
#: What is read here of the record of an end; another one is passed over.
_END = {
    "state": str,
    "attempt": (int, _NONE),
    "exit_code": (int, _NONE),
    "peak_bytes": (int, _NONE),
    "evidence": ({"wall_bytes": (int, _NONE), "oom_kills": (_KILLS, _NONE)}, _NONE),
}


@dataclass(frozen=True)
class JobEnd:
    """The end of one attempt of a job.

    Attributes:
        job: Its id, as ``fold_3``.
        attempt: From 1.
        state: As recorded: completed, failed, out_of_memory, timeout, preempted, cancelled, node_fail; ``running``
            without a record of an end.
        cause: As recorded, in words.
        phase: Where it was; empty when not known.
        exit_code: As in ``subprocess``; None when not known.
        kind: Which memory ran out; ``none`` for another cause.
        killer: Who ended it: the kernel, memfit, a stranger, itself; ``unknown`` when counters were not readable.
        peak_bytes: Its non-reclaimable peak.
        wall_bytes: What the kernel held it back at; None without a group.
        kills_before, kills_after: Kills in its own group; None when not readable.
        checkpointed: Whether it had reported a checkpoint.
        is_last: No later attempt was begun.
        recovered: A later attempt completed.
        line: Where the record stands, with the cause as its text.
    """

    job: str
    attempt: int
    state: str
    cause: str
    phase: str
    exit_code: int | None
    kind: Where
    killer: Killer
    peak_bytes: int
    wall_bytes: int | None
    kills_before: int | None
    kills_after: int | None
    checkpointed: bool
    is_last: bool
    recovered: bool
    line: Line


def find_run(path: Path) -> RunDir | None:
    """The run directory that a path is, or lies in; None when there is none."""
    for folder in (path, *path.parents[:3]):
        if (folder / "run.json").is_file() and (folder / "jobs").is_dir():
            return RunDir(folder)
    return None


def read_ends(run: RunDir, only: str | None = None) -> list[JobEnd]:
    """How each attempt of each job ended, by job and attempt.

    Args:
        run: The run directory.
        only: One job's id.
    """
    found: list[JobEnd] = []
    for folder in sorted((run.path / "jobs").iterdir()):
        if not folder.is_dir() or only not in (None, folder.name):
            continue
        found += _ends_of(folder)
    return found


def logs_of(run: RunDir, job: str) -> list[Path]:
    """What a job wrote, in the order in which a reader should look."""
    names = (run.job_dir(job) / name for name in ("err.log", "out.log"))
    return [path for path in names if path.is_file() and path.stat().st_size]


def _ends_of(folder: Path) -> list[JobEnd]:
    earlier = sorted(folder.glob("outcome_*.json"), key=lambda path: int(re.sub(r"\D", "", path.name) or 0))
    paths = [path for path in (*earlier, folder / "outcome.json") if path.is_file()]
    records = [(path, record) for path in paths if (record := _read(path)) is not None]
    running = _read(folder / "status.json")
    if running is not None and not (folder / "outcome.json").is_file():
        records.append((folder / "status.json", running | {"cause": "there is no record of its end"}))
    last_state = str(records[-1][1].get("state", "")) if records else ""
    return [
        _end(folder.name, path, record, is_last=place == len(records) - 1, completed=last_state == "completed")
        for place, (path, record) in enumerate(records)
    ]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path, _END)
    except (DamagedError, OSError):
        return None


def _end(job: str, path: Path, record: Mapping[str, Any], *, is_last: bool, completed: bool) -> JobEnd:
    evidence = record.get("evidence") or {}
    kills = evidence.get("oom_kills") or {}
    before, after = kills.get("before") or {}, kills.get("after") or {}
    kind, killer = _judge(record, evidence, before, after)
    cause = str(record.get("cause") or "")
    return JobEnd(
        job,
        int(record.get("attempt") or 1),
        str(record.get("state") or ""),
        cause,
        str(record.get("phase") or ""),
        record.get("exit_code"),
        kind,
        killer,
        int(record.get("peak_bytes") or 0),
        evidence.get("wall_bytes"),
        before.get("own"),
        after.get("own"),
        record.get("checkpointed") is not None,
        is_last,
        completed and not is_last,
        Line(str(path), 1, f"{job}: {record.get('state')}: {cause}" if cause else f"{job}: {record.get('state')}"),
    )


def _judge(
    record: Mapping[str, Any], evidence: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[Where, Killer]:
    """Which memory ran out, and who ended the job."""
    state, exit_code = record.get("state"), record.get("exit_code")
    own = (before.get("own"), after.get("own"))
    if state == "out_of_memory":
        if evidence.get("place") == "device":
            return "gpu", "itself"
        if _rose(*own) or any(_rose(count, (after.get("above") or {}).get(name)) for name, count in _above(before)):
            return "host_cgroup", "kernel" if exit_code == _SIGKILL else "itself"
        if exit_code == _SIGKILL:
            # Nobody else's count rose: memfit ended it at its wall, or the kernel did for the whole host.
            is_counted = own[1] is not None
            return ("host_cgroup", "memfit") if is_counted or record.get("asked") else ("host_kernel", "kernel")
        return "host_alloc", "itself"
    if exit_code == _SIGKILL and state == "failed":
        return "none", "stranger" if None not in own else "unknown"
    if state in ("cancelled", "timeout"):
        return "none", "memfit"
    return "none", "itself" if state == "failed" else "nobody"


def _above(counters: Mapping[str, Any]) -> list[tuple[str, int]]:
    return list((counters.get("above") or {}).items())


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


_KINDS: dict[str, str] = {
    "host_cgroup": "cgroup_kill",
    "host_kernel": "global_kill",
    "host_alloc": "host_refused",
    "gpu": "device_refused",
}
_STATES: dict[str, str] = {
    "completed": "success",
    "timeout": "walltime",
    "preempted": "preempted",
    "cancelled": "cancelled",
    "node_fail": "node_fail",
}
_NAME = re.compile(r"\b(\w*(?:Error|Exception|Interrupt|Exit)\b)(?::|$)")


def end_sign(end: JobEnd, index: int = 0) -> Sign | None:
    """A job's end as a sign; None for one that runs still, or of which nothing is known."""
    values: dict[str, Any] = {
        "who": {"kernel": "the kernel", "memfit": "memfit"}.get(end.killer, ""),
        "job": end.job,
        "attempt": end.attempt,
        "phase": end.phase,
        "recovered": end.recovered,
        "text": end.cause,
        "own_kills": (end.kills_before, end.kills_after),
    }
    if end.peak_bytes:
        values["used_bytes"] = end.peak_bytes
    if end.wall_bytes:
        values["limit_bytes"] = end.wall_bytes
    kind = _KINDS.get(end.kind) or _STATES.get(end.state)
    if kind is None and end.exit_code == _SIGKILL:
        # The count of its own group stood still: somebody else's kill, and no shortage of that group's memory.
        kind = "killed"
        values["stranger"] = end.killer == "stranger"
    elif kind is None and end.state == "failed":
        kind = "own_exception"
        name = _NAME.search(end.cause)
        values["name"] = name[1] if name else ""
    return Sign(kind, (end.line,), values, index) if kind else None


#: Events that a training records of itself, and what they are.
_EVENTS: dict[str, str] = {
    "oom": "skipped_batches",
    "skip": "skipped_batches",
    "shm_full": "shm",
    "loader_worker_died": "killed",
    "aside": "pressure",
    "short": "pressure",
}


def run_signs(run: RunDir, only: str | None = None, index: int = 0) -> list[Sign]:
    """What a run directory says: each job's ends, then what its training met and survived."""
    signs = [sign for end in read_ends(run, only) if (sign := end_sign(end, index))]
    for path in sorted(run.events_dir.glob("*.jsonl")):
        signs += _event_signs(path, only, index)
    return signs


def _event_signs(path: Path, only: str | None, index: int) -> list[Sign]:
    found: list[Sign] = []
    if not path.is_file():
        return found
    for number, text in enumerate(path.read_text(errors="replace").split("\n"), 1):
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):  # a torn last record
            continue
        kind = _EVENTS.get(str(event.get("kind"))) if isinstance(event, dict) else None
        if kind is None or only not in (None, event.get("job")):
            continue
        if event["kind"] == "loader_worker_died" and event.get("exit_code") != _SIGKILL:
            continue
        if event["kind"] == "oom" and "device" not in str(event.get("memory")):
            kind = "pressure"
        values = {name: value for name, value in event.items() if name not in ("kind", "time")}
        line = Line(str(path), number, text[:4000], None, str(event.get("time", "")))
        found.append(Sign(kind, (line,), values, index))
    return found
