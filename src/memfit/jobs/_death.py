"""Explains why a job ended: from its exit, memfit's own signals and the kernel's counters, never from a bare 137."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.errors import DamagedError, StoppedError
from memfit.files import open_own, read_json
from memfit.jobs._child import ERROR_SHAPE
from memfit.memory import JobGroup, memory_group, oom_kills_above
from memfit.rundir import EndedBy, State
from memfit.units import format_bytes

#: The last lines of a program that got no memory: the types of errors, and texts that alone prove nothing.
_ERROR_TYPES = re.compile(r"^(?:[\w.]+\.)?(?:_Array)?MemoryError\b|^(?P<device>torch\.(?:cuda\.)?OutOfMemoryError)\b")
_ERROR_TEXTS = re.compile(
    r"can(?:'t|not) allocate memory|\bbad_alloc\b|out of memory|unable to allocate", re.IGNORECASE
)
#: ENOMEM in words, as libc and Python write it.
_REFUSED = re.compile(r"cannot allocate memory|argument list too long", re.IGNORECASE)
_LAST_LINES = 8
#: An epoch of how many, and a place within one: a batch, or a pair such as 12/100.
_EPOCH_OF = re.compile(r"\bepoch\W{0,3}\d+ *(?:/|of) *\d+(?P<told>.*)", re.IGNORECASE)
_WITHIN = re.compile(r"\b(?:batch|step|it|iter|iteration)\b\W{0,3}\d+(?! *(?:/|of) *\d)", re.IGNORECASE)
_PAIR = re.compile(r"(\d+) *(?:/|of) *(\d+)")
_STOPPING = (-signal.SIGTERM, -signal.SIGINT)  # the signals with which a platform stops a job


@dataclass(frozen=True)
class Counters:
    """The kernel's counts of OOM kills: by group, and on the whole host (``oom_kill`` in /proc/vmstat). If ``is_own``,
    the one group is the job's own, and its count is proof both ways."""

    groups: Mapping[str, int] = field(default_factory=dict)
    is_own: bool = False
    host: int | None = None

    @classmethod
    def read(cls, group: JobGroup | None = None, root: Path = Path("/")) -> Counters:
        """Read the counts for a job in this group, or in the group of this process."""
        if group is not None and (own := oom_kills_above(group.path).get(group.path)) is not None:
            return cls({group.path.name: own}, is_own=True)
        directory = memory_group(root=root)
        kills = oom_kills_above(directory) if directory else {}
        job = f"job_{os.environ.get('SLURM_JOB_ID')}"
        if any(path.name == job for path in kills):  # Slurm's group of this job: no other job is in it
            own = sum(count for path, count in kills.items() if job in path.parts)
            return cls({f"Slurm's {job}": own}, is_own=True)
        above = {str(path): count for path, count in kills.items()}
        try:
            lines = (root / "proc/vmstat").read_text().splitlines()
        except OSError:
            lines = []
        host = next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
        return cls(above, host=host)

    def to_dict(self) -> dict[str, Any]:
        own = next(iter(self.groups.values())) if self.is_own else None
        return {"own": own, "above": {} if self.is_own else dict(self.groups), "host": self.host}

    def rise_since(self, before: Counters) -> str:
        for name, count in self.groups.items():
            if count > before.groups.get(name, count):
                return f"the oom_kill counter of {name} rose from {before.groups[name]} to {count}"
        return ""


@dataclass(frozen=True)
class Death:
    returncode: int  # as in ``subprocess``: negative for a signal
    stopped_by: str | None  # the signal that the job's watcher or the platform sent it, or None
    counters_before: Counters
    counters_after: Counters
    error: Mapping[str, Any] | None  # what the job's interpreter left in ``error.json``, or None
    is_done: bool  # a function left its result; a command was not asked to stop, or left what shows that it was done
    peak_bytes: int
    phase: str | None
    refused: str = ""  # the limit at which an allocation of it was refused or delayed; empty when none was
    met_above: str = ""  # the nearest group, its own or above, whose limit anyone met; empty when none was
    last_words: str = ""  # the end of what it wrote to standard error
    starved: str = ""  # why its shim ended it for want of memory; empty when it did not
    is_asked: bool = False  # memfit or its user asked for the end


def explain_death(death: Death) -> tuple[State, str, EndedBy]:
    state, cause = _explain(death)
    if state == "preempted" and not death.is_asked:
        return state, cause, "platform"
    is_stopped = state == "preempted" or (death.stopped_by is not None and state != "completed")
    return state, cause, "user" if is_stopped and death.is_asked else "job"


def _explain(death: Death) -> tuple[State, str]:
    where = f" in phase {death.phase}" if death.phase else ""
    if death.returncode == 0 and (death.is_done or not death.stopped_by):
        return ("completed", "") if death.is_done else ("failed", "ended with 0 but left no result")
    if death.returncode == StoppedError.exit_code:
        return "preempted", f"stopped after a checkpoint{where}; it goes on from there"
    # If memfit sent SIGTERM alone, a SIGKILL is somebody else's.
    if death.stopped_by == "SIGKILL" or (death.stopped_by and death.returncode != -signal.SIGKILL):
        return _explain_stop(death, where)
    if death.returncode == -signal.SIGKILL:
        return _explain_kill(death, where)
    if death.returncode in _STOPPING:
        return "preempted", f"ended by {_signal_name(-death.returncode)} from outside memfit{where}"
    how = f"exit code {death.returncode}{where}"
    if death.returncode < 0:
        how = f"ended by signal {_signal_name(-death.returncode)}{where}"
    error = death.error
    if error is not None:
        name = "" if error["memfit"] or error["text"].startswith(error["type"]) else f"{error['type']}: "
        how = f"{how}: {name}{error['text']}"
    if error is not None and error.get("memory"):
        return "out_of_memory", how
    if shortage := _shortage(death):
        return "out_of_memory", f"{how}; {shortage}"
    said = _last_lines(death)[-1:] if error is None else []
    return "failed", ": ".join([how, *(line[:200] for line in said)])


def memory_place(death: Death) -> str:
    """Return where the memory ran out of a job that ran out of memory: ``host`` or ``device``."""
    if death.error and death.error.get("memory") and death.error["type"] == "OutOfMemoryError":
        return "device"
    types = (_ERROR_TYPES.match(line) for line in _last_lines(death))
    return "device" if any(found and found["device"] for found in types) else "host"


def _shortage(death: Death) -> str:
    """Return what shows that a job which ended by itself got no memory; empty when nothing does."""
    rise = death.counters_after.rise_since(death.counters_before)
    if rise and death.counters_after.is_own:
        return f"{rise}; the kernel killed a process of it"
    said = [line for line in _last_lines(death) if _ERROR_TYPES.match(line)]
    if not said and death.refused:
        said = [line for line in _last_lines(death) if _ERROR_TEXTS.search(line)]
    at_wall = f"it was refused memory at {death.refused}" if death.refused else ""
    if said and death.error is None:
        return "; ".join(filter(None, (f"it said: {said[-1][:300]}", at_wall)))
    if death.refused and (
        death.returncode == -signal.SIGBUS or (death.error and _ERROR_TEXTS.search(death.error["text"]))
    ):
        return at_wall
    texts = [*_last_lines(death), str((death.error or {}).get("text", ""))]
    if death.met_above and (death.returncode == -signal.SIGBUS or any(_REFUSED.search(text) for text in texts)):
        # Files in /dev/shm and forks fail at the limit of any group, where all else waits.
        return f"the kernel probably refused it memory, as for files in /dev/shm: {death.met_above} has met its limit"
    return ""


def _explain_stop(death: Death, where: str) -> tuple[State, str]:
    if death.starved:
        return "out_of_memory", death.starved
    if death.returncode == 0:
        return "preempted", f"asked to stop{where}, it ended with exit code 0, and nothing shows that it was done"
    if death.is_asked:
        return "cancelled", f"ended by memfit with {death.stopped_by}{where}, as asked"
    return "preempted", f"ended by a signal from outside memfit{where}"


def _explain_kill(death: Death, where: str) -> tuple[State, str]:
    """Say who sent a SIGKILL that was not memfit's."""
    before, after = death.counters_before, death.counters_after
    peak = f"at a peak of {format_bytes(death.peak_bytes)}"
    killed = f"killed by the kernel for memory{where} {peak}"
    if rise := after.rise_since(before):
        return "out_of_memory", f"{killed}: {rise} while it ran"
    if before.host is not None and after.host is not None and after.host > before.host:
        return "out_of_memory", (
            f"probably {killed}: the host's oom_kill counter rose from {before.host} to {after.host} while it ran, "
            "that of its own group did not"
        )
    counted = (
        "no oom_kill counter rose" if after.host is not None else "the kernel's oom_kill counters are not readable"
    )
    if before.is_own and after.is_own:
        counted = f"the oom_kill counter of its own group stayed at {max(after.groups.values())}"
    return "failed", f"killed with SIGKILL by somebody else{where} {peak}: {counted}"


def _last_lines(death: Death) -> list[str]:
    return [line.strip() for line in death.last_words.splitlines() if line.strip()][-_LAST_LINES:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def read_error(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path, ERROR_SHAPE)
    except DamagedError as error:
        print(error, file=sys.stderr)
        return None


def read_end(path: Path, start: int = 0) -> str:
    """Return the end of a log, from ``start`` on: before it are the words of earlier attempts."""
    with suppress(OSError), open_own(path) as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - 4096))
        return file.read().decode(errors="replace")
    return ""


def shows_last_epoch(log: str) -> bool:
    """Return whether the last line of a log that counts epochs tells what the last of n gave.

    >>> shows_last_epoch("epoch 2/3 loss 0.3\\nepoch 3/3 loss 0.2\\nsaved"), shows_last_epoch("epoch 2/3 loss 0.3")
    (True, False)
    >>> [shows_last_epoch(f"Epoch 3/3{text}") for text in ("", " 12/100 loss 0.2", " batch 12 loss 0.2", ": 100/100")]
    [False, False, False, True]
    """
    found = [(line, match["told"]) for line in re.split(r"[\r\n]+", log) if (match := _EPOCH_OF.search(line))]
    if not found or not re.search(r"\d", found[-1][1]) or _WITHIN.search(found[-1][0]):
        return False  # a bare "Epoch 30/30" stands where the epoch begins
    return all(int(at) == int(of) for at, of in _PAIR.findall(found[-1][0]))
