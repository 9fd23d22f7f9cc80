"""What goes with a finding: where it was, when, how its figures add up, and what to check by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memfit.diagnosis._progress import Reading
from memfit.diagnosis._signatures import FOLLOWED, Sign
from memfit.diagnosis._text import Stream
from memfit.diagnosis._verdict import is_clone
from memfit.units import GIB

_NODE = re.compile(
    r"error: (\w[\w.-]*): tasks? [\d,-]+:|(?:JOB|STEP) [\w.+]+ ON (\S+) CANCELLED"
    r"|slurmstepd-([\w-]+):|Node failure on (\S+)|IP: ([\d.]+)"
)
_PID = re.compile(
    r"\(pid:? (\d{1,9})\)|received by PID (\d{1,9})|Killed? process (\d{1,9})|worker \(pid\(?s?\)? (\d{1,9})",
    re.IGNORECASE,
)
_LOCAL_RANK = re.compile(r"local_rank: (\d{1,6})|\[Rank (\d{1,6})\]|tasks? (\d{1,6}): ")


@dataclass(frozen=True)
class Moment:
    """Something at a time that a log gives.

    Attributes:
        what: ``start``, ``last progress``, ``failure`` or ``consequence``.
        time: As it is written; empty where no line near it has one.
        file: The log.
        line: The line's number.
        text: The line.
    """

    what: str
    time: str
    file: str
    line: int
    text: str


def where(finding: Sign) -> dict[str, Any]:
    """Host, rank, node, device and process that a finding's lines name; None for what they do not."""
    text = finding.text
    found: dict[str, Any] = {"host": None, "rank": None, "node": None, "device": None, "pid": None}
    line = finding.lines[0] if finding.lines else None
    if line is not None:
        found["host"], found["rank"] = line.host or None, line.rank
    node, pid, rank = _NODE.search(text), _PID.search(text), _LOCAL_RANK.search(text)
    found["node"] = finding.values.get("node") or (_first(node) if node else None) or found["host"]
    found["device"] = finding.values.get("device")
    told = re.search(r"\d+", str(finding.values.get("pid", "")))
    found["pid"] = int(told[0]) if told else int(_first(pid)) if pid else None
    if found["rank"] is None and rank:
        found["rank"] = int(_first(rank))
    return found


def _first(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def timeline(
    streams: Sequence[Stream],
    finding: Sign | None,
    facts: Sequence[Sign],
    readings: Sequence[list[Reading]],
) -> list[Moment]:
    """Start, last progress before the failure, the failure, and what followed from it."""
    moments = []
    first = next((line for stream in streams for line in stream.lines if line.time), None)
    if first:
        moments.append(Moment("start", first.time, first.file, first.number, first.text[:200]))
    fact = finding
    progress = None
    for index, stream in enumerate(streams):
        for one in readings[index]:
            line = stream.lines[one.place]
            before = fact is None or not fact.lines or line.file != fact.file or line.number <= fact.number
            if before and (progress is None or line.file != progress[1].file or line.number >= progress[1].number):
                progress = (index, line, one.place)
    if progress:
        index, line, place = progress
        moments.append(
            Moment("last progress", _time_at(streams[index], place), line.file, line.number, line.text[:200])
        )
    if fact and fact.lines:
        moments.append(_moment("failure", streams, fact))
        later = [one for one in facts if one.meaning.tier == FOLLOWED and one.lines and one.file == fact.file]
        later = sorted((one for one in later if one.number > fact.number), key=lambda one: one.number)
        moments += [_moment("consequence", streams, one) for one in later[:3]]
    return moments


def _moment(what: str, streams: Sequence[Stream], fact: Sign) -> Moment:
    line = fact.lines[0]
    return Moment(what, _time_at(streams[fact.stream], fact.place), line.file, line.number, line.text[:200])


def _time_at(stream: Stream, place: int) -> str:
    """The time of a line, or of the nearest one before it."""
    return next((line.time for line in reversed(stream.lines[max(0, place - 80) : place + 1]) if line.time), "")


def arithmetic(finding: Sign) -> list[str]:
    """How a finding's figures add up, each with its scope."""
    values, found = finding.values, []
    size = {
        name: values[f"{name}_bytes"]
        for name in ("total", "free", "reserved", "allocated", "tried")
        if f"{name}_bytes" in values
    }
    card = f"GPU {values['device']}" if "device" in values else "the card"
    if {"allocated", "reserved"} <= size.keys():
        slack = size["reserved"] - size["allocated"]
        share = f", {slack / size['total']:.0%} of {card}" if size.get("total") else ""
        found.append(
            f"This process's allocator holds {_gib(size['reserved'])}: {_gib(size['allocated'])} in tensors"
            f" and {_gib(slack)} in its cache{share}."
        )
        if "tried" in size and finding.kind == "gpu_fragmentation":
            seen = (
                "a noticeable share"
                if values.get("noticeable")
                else "too little of the card to matter: it is simply full"
            )
            found.append(f"{_gib(size['tried'])} failed although {_gib(slack)} of cache is free in pieces; {seen}.")
    if "held_by_others_bytes" in values:
        found.append(
            f"Memory of others on {card}: {_gib(size['total'])} total - {_gib(size['free'])} free"
            f" - {_gib(size['reserved'])} of this process's allocator = {_gib(values['held_by_others_bytes'])}"
            " (other processes, and this one's context and libraries)."
        )
    if "used_bytes" in values and "limit_bytes" in values:
        over = values["used_bytes"] - values["limit_bytes"]
        scope = {"own_group": "group", "ancestor": "group above it"}.get(
            values.get("scope", ""), values.get("scope")
        ) or ("node" if finding.kind == "host_kernel" else "limit")
        found.append(
            f"{values.get('who') or 'The limit'}: {_gib(values['used_bytes'])} used of {_gib(values['limit_bytes'])}"
            f" (per {scope}){f', {_gib(over)} over' if over > 0 else ''}."
        )
    elif "used_bytes" in values:
        found.append(f"The killed process alone held {_gib(values['used_bytes'])} (one process, anonymous memory).")
    return found


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


_CHECKS: dict[str, tuple[str, ...]] = {
    "gpu": ("nvidia-smi on that node: does another process hold the card?",),
    "gpu_fragmentation": (
        "Do sizes vary from batch to batch? Compare torch.cuda.memory_reserved with memory_allocated over time.",
    ),
    "host_cgroup": (
        "sacct -j JOB -o JobID,State,ExitCode,ReqMem,MaxRSS,NTasks: MaxRSS is one task's, the limit is the node's.",
        "Does memory rise from epoch to epoch (a leak), or stand at the limit from the beginning?",
    ),
    "host_kernel": (
        "journalctl -k or dmesg on that node at that time: which process was killed, and in which group?",
        "free -m, and who else ran on the node.",
    ),
    "shm": ("df -h /dev/shm in the same container; docker run --shm-size, or an emptyDir of medium Memory.",),
    "host_alloc": ("free -m and ulimit -v on that node; the shape that was asked for.",),
    "pinned": ("ulimit -l, free -m on that node, and how many workers pin at once.",),
    "other_accelerator": ("The accelerator's own monitor on that node.",),
}
_KILLED = (
    "A SIGKILL names nobody: look in journalctl -k or dmesg for oom-kill at that time, in sacct for"
    " OUT_OF_MEMORY, in kubectl"
    " describe or docker inspect for OOMKilled.",
)


def checks(streams: Sequence[Stream], finding: Sign | None) -> list[str]:
    """Return what a person should look at next."""
    if finding is None:
        return [
            "Nothing in these lines names a cause: give the scheduler's log, the kernel's log, or the error file too."
        ]
    if finding.cause in ("killed", "bus_error"):
        return [*_KILLED, *_CHECKS.get(finding.kind, ())]
    found = list(_CHECKS.get(finding.kind, ())) if finding.kind != "none" else []
    if "own_kills" in finding.values:  # memfit's own record, which no scheduler keeps
        found = [one for one in found if not one.startswith("sacct ")]
    if is_clone(streams[finding.stream], finding):
        found.insert(
            0,
            "The checkpoint written then is broken: load it, compare its tensors with an earlier one, and save again.",
        )
    if finding.name == "library_alloc":
        found.append(
            "The same words follow an index out of range: run once with CUDA_LAUNCH_BLOCKING=1 before blaming memory."
        )
    if finding.name == "bad_alloc":
        found.append("A size that is wrong (negative, or from a broken file) fails the same way.")
    return found
