"""Judge signs: what the job survived, and which sign explains the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from memfit.diagnosis._progress import Reading, went_on
from memfit.diagnosis._signatures import ENDED, FOLLOWED, MARK, MEMORY, OTHER, OWN
from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Stream

_EXCEPTION = re.compile(
    r"^\s*(?P<name>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Warning|Timeout|Expired|NotFound"
    r"|Iteration)|Exception|BadZipFile))(?=:|\s*$)"
)
#: Exceptions that only pass on that a child, a worker or another rank ended.
_ECHOES = re.compile(
    r"(?:ChildFailed|CalledProcess|DistBackend|TerminatedWorker|RayTask|RendezvousClosed|BrokenPipe|ConnectionReset"
    r"|ActorDied|EOF)Error|Process(?:Exited|Raised)Exception|SignalException|SystemExit|BrokenProcessPool|KeyboardInterrupt"
)
_OF_OTHERS = re.compile(
    r"DataLoader worker|One of the subprocesses has abruptly died|worker died unexpectedly|NCCL|ProcessGroup|process group"
    r"|Connection (?:closed|reset)|Broken pipe|Engine core|EngineCore|worker died"
)
#: How many of a stream's last lines may hold a fatal line that no traceback precedes, and how far one reaches.
_LAST, _TRACEBACK = 12, 150


def exceptions(stream: Stream, index: int = 0) -> list[Sign]:
    found, last, header = [], len(stream.lines) - _LAST, -1_000
    for place, line in enumerate(stream.lines):
        if "Traceback (most recent call last)" in line.text:
            header = place
            continue
        match = _EXCEPTION.match(line.text) if place - header < _TRACEBACK or place >= last else None
        if match:
            name = match["name"].rpartition(".")[2]
            text = line.text[match.end() :].lstrip(": ")[:200]
            if not (_ECHOES.fullmatch(name) or name.endswith("Warning") or _OF_OTHERS.search(text)):
                found.append(Sign("own_exception", (line,), {"name": name, "text": text}, index, place))
    return found if len(found) <= 2 * _LAST else [*found[:_LAST], *found[-_LAST:]]


def survived(signs: Sequence[Sign], readings: Sequence[Sequence[Reading]]) -> frozenset[int]:
    """Return the ids of the signs after which a job went on."""
    may_go_on = [one for one in signs if one.meaning.told or one.name == "cgroup_kill"]
    found = {id(one) for one in may_go_on if _went_on(readings[one.stream], one, signs)}
    # The other ranks of a dead one run a few steps more before they wait for it in vain: that is no survival.
    for sign in signs:
        later = [one for one in signs if one.file == sign.file and one.number > sign.number and id(one) not in found]
        if any(one.meaning.trails for one in later) and not any(
            one.meaning.tier <= OWN and not one.meaning.trails for one in later
        ):
            found.discard(id(sign))
    # memfit's record says what a later attempt or generation of ranks made good; the job's log has them all.
    made_good = {one.values.get("folder", Path(one.file).parent) for one in signs if one.values.get("recovered")}
    recorded = (one for one in signs if Path(one.file).parent in made_good and one.values.get("recovered", True))
    return frozenset(found | {id(one) for one in recorded})


def _went_on(readings: Sequence[Reading], sign: Sign, signs: Sequence[Sign]) -> bool:
    near = [one for one in signs if one.stream == sign.stream]
    later = [one for one in near if one.place > sign.place]
    finished = any(one.name == "success" for one in later)
    if sign.name == "cgroup_kill":  # the scheduler's count: of some child that its parent did without
        return "count" in sign.values and finished and went_on(readings, sign.place)
    caught = [one.place for one in near if one.name in ("caught", "skipped_batches")]
    told = (sign, *(one for one in later if one.meaning.told))
    is_caught = all(any(0 <= place - one.place <= 8 for place in caught) for one in told)
    return finished or is_caught or went_on(readings, sign.place)


_PINS = re.compile(r"pin_memory|memory_pool_host|PinMemory|cudaHostAlloc|pinned")
#: How far behind words of last resort what follows from them may stand, and how far behind a doubtful sign its cause.
_REACH, _LATE = 40, 3
_BLOCK_LINES = 800


def rank(streams: Sequence[Stream], signs: Sequence[Sign], lived: frozenset[int]) -> list[Sign]:
    """Return the causes, the best explanation first: by tier, then by time; what was survived comes last."""
    causes = [one for one in signs if one.meaning.tier != MARK and not _is_explained(one, signs)]
    causes = [one for one in causes if not one.meaning.last_resort or _counts(one, causes, signs, lived)]
    was_killed = any(one.name == "killed" for one in signs)
    if any(one.name == "success" for one in signs) and not was_killed:
        causes = [one for one in causes if not is_unlinked(one)]
        if any(one.name == "limit_touched" for one in causes):
            causes = [one for one in causes if one.name != "cgroup_kill"]
    poisons = [one for one in causes if one.meaning.poisons and id(one) not in lived]

    def key(sign: Sign) -> tuple[bool, bool, int, int, int, int]:
        meaning = sign.meaning
        poisoned = any(one.file != sign.file or one.number <= sign.number + _LATE for one in poisons)
        tier = OWN if poisoned and meaning.doubtful else meaning.tier
        weight = sign.rank if tier in (OTHER, FOLLOWED) else int("bare" in sign.values) if tier == MEMORY else 0
        tier = ENDED if tier == OWN else tier  # by the time of what they say
        return id(sign) in lived, is_unlinked(sign) and not was_killed, tier, weight, sign.number, sign.rank

    return sorted(causes, key=key)


def _counts(words: Sign, causes: Sequence[Sign], signs: Sequence[Sign], lived: frozenset[int]) -> bool:
    """Whether general words tell the cause: nothing else does, but what follows from them or was over before."""
    if id(words) in lived or any(one.meaning.tier == MARK and one.number + _LATE > words.number for one in signs):
        return False
    others = [one for one in causes if not one.meaning.last_resort and id(one) not in lived]
    return all(
        one.meaning.of_alloc
        and one.file == words.file
        and (
            one.number <= words.number + _REACH
            if one.name in ("own_exception", "aborted")
            else 0 <= one.number - words.number <= _REACH
        )
        for one in others
    )


def is_unlinked(sign: Sign) -> bool:
    """Return whether no number in the job's log names the process or job of a witness."""
    return sign.values.get("linked", True) is None


def _is_explained(sign: Sign, signs: Sequence[Sign]) -> bool:
    """Whether another sign says better what this one does, or it is of another process."""
    near = [one for one in signs if one is not sign and one.stream == sign.stream]

    def is_near(names: tuple[str, ...], before: int = 3, behind: int = 3) -> bool:
        return any(one.name in names and -before <= one.place - sign.place <= behind for one in near)

    waited = (one.number < sign.number for one in signs if one.name == "collective_timeout" and one.file == sign.file)
    if any(waited) and any("over_bytes" in one.values and one.place == sign.place for one in (sign, *near)):
        return True  # the sizes that another rank should have sent never came
    if sign.name == "own_exception":
        return any(one.place == sign.place and one.meaning.tier != MARK and one.name != "killed" for one in near)
    if sign.name == "oom_kill":
        kernels = ("the kernel", "systemd-oomd", "the batch system")
        near = [one for one in near if one.values.get("who") in kernels]
        return is_near(("cgroup_kill", "global_kill"), 12, 12 if "pid" in sign.values else _BLOCK_LINES)
    if sign.name == "killed" and sign.values.get("who") == "Slurm" and "linked" in sign.values:
        return any(one.meaning.by_scheduler for one in signs)
    if sign.name == "killed" and re.search(r"tasks? \d", sign.text):
        return any(one.meaning.by_scheduler and one.place <= sign.place for one in near)
    if sign.name in ("disk_full", "open_files"):
        return is_near(("shm",))
    if sign.name == "illegal_access":
        return any(one.name == "device_lost" and re.search("fallen off|is lost|Xid", one.text) for one in near)
    return _is_of_another(sign, signs)


def _is_of_another(sign: Sign, signs: Sequence[Sign]) -> bool:
    """Whether a kernel's kill, which nothing links to the job, is of another process than the one that was killed."""
    if not is_unlinked(sign) or sign.values.get("who") != "the kernel":
        return False
    victims = {
        int(number)
        for one in signs
        if one.name == "killed"
        for number in re.findall(r"\d+", f"{one.values.get('pid', '')} {one.values.get('pids', '')}")
    }
    return bool(victims) and "in_container" not in sign.values and sign.values.get("pid") not in victims


def settle(stream: Stream, sign: Sign) -> Sign:
    """Return a sign with what its figures and the frames around it say of the memory."""
    is_cuda = sign.name == "own_exception" and "CUDA error" in sign.text
    if sign.name == "device_refused" or is_cuda:  # an error without a name of its own counts at the pinning call only
        reach = 25 if "invalid argument" in sign.text or not is_cuda else 2
        above = "\n".join(line.text for line in stream.lines[max(0, sign.place - reach) : sign.place + 1])
        if _PINS.search(above):
            return replace(sign, name="pinned", values={}, of="")
    if sign.name != "device_oom":
        return sign
    values = dict(sign.values)
    allocated = values.get("allocated_bytes")
    rest = values.pop("cached_bytes", values.get("slack_bytes"))
    if allocated is not None and rest is not None:
        values.setdefault("reserved_bytes", allocated + rest)
    of = sign.of
    tried, reserved = values.get("tried_bytes"), values.get("reserved_bytes")
    if tried is not None and allocated is not None and reserved is not None:
        of = "gpu_fragmentation" if sign.kind == "gpu" and reserved - allocated >= tried else of
    return replace(sign, values=values, of=of)
