"""Why a job ended: from its exit, memfit's own signals and the kernel's counters, never from a bare 137."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import StoppedError
from memfit.jobs._job import State
from memfit.memory import count_oom_kills
from memfit.units import format_bytes


@dataclass(frozen=True)
class Counters:
    """The kernel's counts of processes that it has killed for memory.

    Attributes:
        group: Kills in the memory cgroup that the job runs in, or None when that is not readable.
        group_name: That cgroup.
        host: Kills on the whole host (``oom_kill`` in /proc/vmstat), or None.
    """

    group: int | None
    group_name: str
    host: int | None

    @classmethod
    def read(cls, root: Path = Path("/")) -> Counters:
        """The counts for the cgroup of this process."""
        group = count_oom_kills(root=root)
        try:
            lines = (root / "proc/vmstat").read_text().splitlines()
        except OSError:
            lines = []
        host = next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
        return cls(group[1] if group else None, group[0] if group else "", host)


@dataclass(frozen=True)
class Death:
    """The evidence of a job's end.

    Attributes:
        returncode: As in ``subprocess``: negative for a signal.
        stopped_by: The signal that memfit sent because it was asked to stop the job, or None.
        counters_before, counters_after: The kernel's counts when the job started and after it ended.
        error: What the job's interpreter left in ``error.json``, or None.
        has_result: Whether a function job left its result.
        peak_bytes: Its non-reclaimable peak.
        phase: The phase that it was in.
    """

    returncode: int
    stopped_by: str | None
    counters_before: Counters
    counters_after: Counters
    error: Mapping[str, Any] | None
    has_result: bool
    peak_bytes: int
    phase: str | None


def explain(death: Death) -> tuple[State, str]:
    """The job's final state and its cause in words."""
    where = f" in phase {death.phase}" if death.phase else ""
    if death.returncode == 0:
        return ("completed", "") if death.has_result else ("failed", "ended with 0 but left no result")
    if death.returncode == StoppedError.exit_code:
        return "preempted", f"stopped after a checkpoint{where}; it goes on from there"
    # A SIGKILL while memfit waited for the end that it had asked for with SIGTERM is somebody else's.
    if death.stopped_by == "SIGKILL" or (death.stopped_by and death.returncode != -signal.SIGKILL):
        return "cancelled", f"ended by memfit with {death.stopped_by}{where}, as asked"
    if death.returncode < 0:
        return _explain_signal(death, where)
    error = death.error
    if error is None:
        return "failed", f"exit code {death.returncode}{where}"
    state: State = "out_of_memory" if error.get("memory") else "failed"
    name = "" if error["memfit"] or error["text"].startswith(error["type"]) else f"{error['type']}: "
    return state, f"exit code {death.returncode}{where}: {name}{error['text']}"


def _explain_signal(death: Death, where: str) -> tuple[State, str]:
    name = _signal_name(-death.returncode)
    peak = format_bytes(death.peak_bytes)
    if -death.returncode != signal.SIGKILL:
        return "failed", f"ended by signal {name}{where}"
    before, after = death.counters_before, death.counters_after
    if _rose(before.group, after.group):
        return "out_of_memory", (
            f"killed by the kernel for memory{where} at a peak of {peak}: the oom_kill counter of "
            f"{after.group_name} rose from {before.group} to {after.group} while it ran"
        )
    if _rose(before.host, after.host):
        return "out_of_memory", (
            f"probably killed by the kernel for memory{where} at a peak of {peak}: the host's oom_kill counter rose "
            f"from {before.host} to {after.host} while it ran, that of its own group did not"
        )
    counted = (
        "no oom_kill counter rose" if after.host is not None else "the kernel's oom_kill counters are not readable"
    )
    return "failed", f"killed with SIGKILL by somebody else{where} at a peak of {peak}: {counted}"


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
