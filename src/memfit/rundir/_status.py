"""The words and the files that say how a job stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from memfit.errors import DamagedError
from memfit.files import read_json
from memfit.rundir._folder import FOOTPRINT

STATUS, OUTCOME = "status.json", "outcome.json"
#: Slurm's states in lower case.
State = Literal[
    "pending", "running", "completed", "failed", "out_of_memory", "timeout", "preempted", "cancelled", "node_fail"
]
STATES: tuple[State, ...] = get_args(State)
ENDED: frozenset[State] = frozenset(STATES) - {"pending", "running"}
EndedBy = Literal["", "job", "user", "platform"]

#: What a status says of each rank of a job of several.
RANK = {"rank": int, "place": str, "pss_bytes": int, "device_bytes": int, "peak_bytes": int}
_NUMBER, _NONE = (int, float), type(None)
_SHAPE: Mapping[str, Any] = {
    "state": frozenset(STATES),
    "phase": (str, _NONE),
    "cause": (str, _NONE),
    "node": (str, _NONE),
    "footprint": (FOOTPRINT, _NONE),
    "device_used_bytes": ({str: int}, _NONE),
    "evidence": (dict, _NONE),
    "furthest": ({str: [_NUMBER]}, _NONE),
    "ranks": ([RANK], _NONE),
    "ended_by": (frozenset(get_args(EndedBy)), _NONE),
    **dict.fromkeys(("started", "ended", "checkpointed", "cpu_seconds"), (*_NUMBER, _NONE)),
    **dict.fromkeys(("used_bytes", "peak_bytes", "pss_bytes", "checkpoint_bytes"), (int, _NONE)),
    **dict.fromkeys(("exit_code", "attempt", "pid", "watcher_pid"), (int, _NONE)),
    **dict.fromkeys(("settled", "stalled", "wants_more", "asked"), (bool, _NONE)),
}


def read_status_file(path: Path) -> dict[str, Any] | None:
    """Return what a job's file says; None without one, or for an empty file, which a power cut leaves."""
    try:
        return read_json(path, _SHAPE)
    except DamagedError:
        with suppress(OSError):  # moved away meanwhile
            if path.stat().st_size:
                raise
    return None


def read_job(folder: Path) -> dict[str, Any]:
    """Return how a job stands or ended, from the files in its folder; nothing before it has any."""
    return read_status_file(folder / OUTCOME) or read_status_file(folder / STATUS) or {}


def show_state(state: str) -> str:
    """Return the word that people read: a stop is one word, whoever asked for it and whether the job had saved."""
    return "stopped" if state in ("cancelled", "preempted") else state


def name_jobs(jobs: Sequence[str]) -> str:
    """Return the names of jobs in words.

    >>> name_jobs(["prepare"]), name_jobs(["fold_1", "fold_2"]), name_jobs([f"fold_{n}" for n in range(1, 6)])
    ('prepare', 'fold_1 and fold_2', 'fold_1 to fold_5 (5 jobs)')
    """
    return " and ".join(jobs) if len(jobs) < 3 else f"{jobs[0]} to {jobs[-1]} ({len(jobs)} jobs)"
