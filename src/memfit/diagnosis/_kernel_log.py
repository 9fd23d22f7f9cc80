"""What the kernel's out-of-memory killer writes: whole blocks of old and new kernels, from dmesg or the journal.

The process that *invoked* the killer is the trigger, not the victim. Whose memory ran out is the group whose limit
was met (``oom_memcg``), not the one that the victim lived in.

Source: Linux mm/oom_kill.c (dump_header, dump_oom_summary, __oom_kill_process) and mm/memcontrol.c
(mem_cgroup_print_oom_context, _meminfo), 3.10 to 6.18.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.diagnosis._signatures import Sign
from memfit.diagnosis._text import Line
from memfit.units import KIB

KillScope = Literal["own_group", "ancestor", "group", "cpuset", "global", "unknown"]
#: A block's lines stand close together; what comes later is another's.
_LONGEST_BLOCK = 4000


@dataclass(frozen=True)
class KernelKill:
    """One kill.

    Attributes:
        pid, name: The victim.
        scope: Whose memory ran out: ``own_group`` (the group that the victim lived in), ``ancestor`` (one above it),
            ``group`` (a limit, whose is not told), ``cpuset`` (some nodes of a machine), ``global`` (the machine).
        limit_group: The group whose limit was met; ``/`` or empty for the machine.
        victim_group: The group that the victim lived in.
        usage_bytes, limit_bytes: Of the group whose limit was met; None when not told.
        victim_bytes: The victim's resident memory: anonymous, file and shared.
        whole_group: The kernel ended all of a group with it (memory.oom.group).
        lines: What it rests on, the line on the victim first.
    """

    pid: int
    name: str
    scope: KillScope = "unknown"
    limit_group: str = ""
    victim_group: str = ""
    usage_bytes: int | None = None
    limit_bytes: int | None = None
    victim_bytes: int | None = None
    whole_group: bool = False
    lines: tuple[Line, ...] = ()

    @property
    def owner(self) -> dict[str, str]:
        """Whose job the victim was, by the name of its group; see `owner_of`."""
        return owner_of(self.victim_group)


def read_kernel_lines(text: str, file: str = "-") -> list[Line]:
    """The kernel's lines of a log, without what a logger set before them; its time is kept.

    It reads ``dmesg`` (also ``-T``, ``-J`` and raw ``/dev/kmsg``), syslog, ``journalctl`` (short, short-iso,
    ``-o json``) and lists of JSON objects with a ``textPayload`` or ``message``.

    >>> read_kernel_lines("[Wed Feb 19 06:41:03 2025] oom_reaper: reaped")[0].time
    'Wed Feb 19 06:41:03 2025'
    >>> read_kernel_lines("May  8 14:05:27 host kernel: [ 7.1] Killed process 2 (a)")[0].text
    'Killed process 2 (a)'
    >>> read_kernel_lines('{"MESSAGE":"Killed process 2 (a)","__REALTIME_TIMESTAMP":"1700000000000000"}')[0].text
    'Killed process 2 (a)'
    """
    opening = text.lstrip("\ufeff \t\r\n")
    if opening[:1] in ("{", "["):
        found = list(_from_json(opening, file))
        if found:
            return found
    return [_strip(Line(file, number, line.rstrip("\r"))) for number, line in enumerate(text.split("\n"), 1)]


_BEFORE = re.compile(
    r"(?:<\d+>)?(?:\d+,\d+,(?P<micro>\d+),[^;]*;)?\s*"
    r"(?:(?P<syslog>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|"
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
    r" (?:(?P<host>\S+) )?(?:kernel|\S+\[\d+\])(?:\[\d+\])?: ?|kernel: ?)?\s*"
    r"(?:\[ *(?P<since>\d+\.\d+)\](?:\[ *[TC]\d+\])? ?|"
    r"\[(?P<date>[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ [\d:]{8} \d{4})\] ?)?"
)


#: The keys under which loggers write what was said.
_SAYS = ("MESSAGE", "msg", "textPayload", "message", "log")
_SAID = re.compile(rf'"(?:{"|".join(_SAYS)})" ?:')


def _strip(line: Line) -> Line:
    found = _BEFORE.match(line.text)
    if not found or not found.end():
        return line
    time = found["syslog"] or found["date"] or found["since"] or found["micro"] or line.time
    return Line(line.file, line.number, line.text[found.end() :], line.rank, time, found["host"] or line.host)


def _from_json(text: str, file: str) -> Iterator[Line]:
    """Lines of JSON: one object a line, or one document with a list."""
    documents: list[tuple[int, Any]] = []
    try:
        documents = [(1, json.loads(text))]
    except ValueError:
        for number, line in enumerate(text.split("\n"), 1):
            try:
                documents.append((number, json.loads(line)))
            except ValueError:
                continue
    spread = [number for number, line in enumerate(text.split("\n"), 1) if _SAID.search(line)]
    for number, document in documents:
        entries = document.get("dmesg", [document]) if isinstance(document, dict) else document
        entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        for place, entry in enumerate(entries):
            at = spread[place] if len(documents) == 1 and place < len(spread) else number
            said = next((entry[key] for key in _SAYS if key in entry), None)
            if isinstance(said, list):  # the journal writes what is no UTF-8 as a list of bytes
                said = bytes(said).decode(errors="replace")
            when = next((entry[key] for key in ("__REALTIME_TIMESTAMP", "time", "timestamp") if key in entry), "")
            for piece in str(said or "").replace("\\r\\n", "\n").split("\n"):
                yield _strip(Line(file, at, piece.rstrip("\r"), None, str(when)))


_INVOKED = re.compile(r"^.{1,40}? invoked oom-killer: ")
_SUMMARY = re.compile(r"oom-kill:\s*constraint=(?P<constraint>\w+),(?P<rest>.*)")
_OLD_GROUPS = re.compile(r"Task in (?P<victim>/\S*) killed as a result of limit of (?P<limit>/\S*)")
_USAGE = re.compile(r"^memory: usage (?P<usage>\d+)kB, limit (?P<limit>\d+)kB")
_STATS_GROUP = re.compile(r"Memory cgroup stats for (?P<group>/[^:\s]*)")
_WHO = r"(?P<who>Memory cgroup out of memory|Out of memory[^:]{0,40}): "
_VICTIM = r"process (?P<pid>\d+),? \((?P<name>.{1,40}?)\)"
_WILL = re.compile(rf"{_WHO}Kill {_VICTIM} ", re.IGNORECASE)
_KILLED = re.compile(rf"(?:{_WHO})?Killed {_VICTIM}(?P<rest>.*)", re.IGNORECASE)
_WHOLE_GROUP = re.compile(r"Tasks in (?P<group>/\S*) are going to be killed due to memory\.oom\.group set")
_FRAME = re.compile(r"mem_cgroup_(?:out_of_memory|oom_synchronize)|try_charge")


@dataclass
class _Block:
    """What was read of a block so far."""

    constraint: str = ""
    is_global: bool = False
    limit_group: str = ""
    victim_group: str = ""
    usage: int | None = None
    limit: int | None = None
    in_group: bool = False
    whole_group: bool = False
    lines: list[Line] = field(default_factory=list)
    size: int = 0


def find_kills(lines: Iterable[Line]) -> list[KernelKill]:
    """The kills that a kernel log tells, in order.

    Args:
        lines: The log's lines; prefixes of loggers are taken off here, if they still stand there.

    >>> text = "a invoked oom-killer: gfp_mask=0xcc0\\nMemory cgroup out of memory: Killed process 7 (b) total-vm:8kB"
    >>> kill = find_kills(read_kernel_lines(text))[0]
    >>> kill.name, kill.scope
    ('b', 'group')
    """
    found: list[KernelKill] = []
    lines = list(lines)
    if not any("illed process" in line.text for line in lines):  # nearly all logs
        return found
    block = _Block()
    for line in map(_strip, lines):
        text = line.text
        if _INVOKED.search(text):
            block = _Block(lines=[line])
            continue
        if block.size > _LONGEST_BLOCK:
            block = _Block()
        block.size += 1
        if match := _KILLED.search(text):
            found.append(_kill(block, match, line))
            # What follows without a header of its own belongs to the same kill only when the whole group goes.
            block = block if block.whole_group else _Block(size=1)
            continue
        _read(block, line)
    return found


def _read(block: _Block, line: Line) -> None:
    """Take from a line what it says of the block."""
    text = line.text
    if match := _SUMMARY.search(text):
        block.constraint = match["constraint"]
        block.is_global = ",global_oom," in text
        groups = dict(re.findall(r"(oom_memcg|task_memcg)=([^,]*)", match["rest"]))
        block.limit_group = groups.get("oom_memcg", block.limit_group)
        block.victim_group = groups.get("task_memcg", block.victim_group)
    elif match := _OLD_GROUPS.search(text):
        block.victim_group, block.limit_group, block.in_group = match["victim"], match["limit"], True
    elif match := _USAGE.search(text):
        block.usage, block.limit, block.in_group = int(match["usage"]) * KIB, int(match["limit"]) * KIB, True
    elif match := _STATS_GROUP.search(text):
        block.in_group = True
        block.limit_group = block.limit_group or match["group"]
        return
    elif match := _WHOLE_GROUP.search(text):
        block.whole_group = True
    elif match := _WILL.search(text):
        block.in_group |= "cgroup" in match["who"]
        block.is_global |= "cgroup" not in match["who"]
    elif _FRAME.search(text):
        block.in_group = True
        return
    else:
        return
    block.lines.append(line)


def _kill(block: _Block, match: re.Match[str], line: Line) -> KernelKill:
    pid = int(match["pid"])
    sizes = {name: int(size) * KIB for name, size in re.findall(r"([a-z]+-[a-z]+):\s*(\d+) ?kB", match["rest"])}
    parts = [sizes[name] for name in ("anon-rss", "file-rss", "shmem-rss") if name in sizes]
    return KernelKill(
        pid,
        match["name"],
        scope=_scope(block, match["who"] or ""),
        limit_group=block.limit_group,
        victim_group=block.victim_group,
        usage_bytes=block.usage,
        limit_bytes=block.limit,
        victim_bytes=sum(parts) if parts else None,
        whole_group=block.whole_group,
        lines=(line, *block.lines[-6:]),
    )


def _scope(block: _Block, said: str) -> KillScope:
    """Whose memory ran out; the words decide where the line of the summary is missing."""
    if block.constraint in ("CONSTRAINT_CPUSET", "CONSTRAINT_MEMORY_POLICY"):
        return "cpuset"
    said = said.lower()
    if block.constraint == "CONSTRAINT_NONE" or (block.is_global and "cgroup" not in said):
        return "global"
    if block.constraint == "CONSTRAINT_MEMCG" or block.in_group or "cgroup" in said:
        limit, victim = block.limit_group, block.victim_group
        if not limit or not victim:
            return "group"
        return "own_group" if limit == victim else "ancestor"
    return "global" if said else "unknown"


_ID = "[0-9a-f]{64}"
_OWNERS = (
    (
        "slurm",
        re.compile(
            r"/(?:slurm|slurmstepd\.scope)[^/]*/(?:uid_\d+/)?job_(?P<job>\d+)"
            r"(?:/step_(?P<step>\w+))?(?:/.*?task_(?P<task>\w+))?"
        ),
    ),
    (
        "kubernetes",
        re.compile(r"pod(?P<pod>[0-9a-f]{8}[-_][0-9a-f-_]{27})(?:\.slice)?" rf"(?:/(?:[a-z]+-)*(?P<container>{_ID}))?"),
    ),
    ("podman", re.compile(rf"libpod-(?P<container>{_ID})")),
    ("docker", re.compile(rf"(?:/docker/|/docker-|/ecs/\w+/)(?P<container>{_ID})")),
    ("memfit", re.compile(r"/job-(?P<job>[^/]+)(?:/|$)")),
    ("systemd", re.compile(r"/(?P<unit>[^/]+\.(?:service|scope))(?:/|$)")),
)


def owner_of(group: str) -> dict[str, str]:
    """Who a group belongs to, by its path: ``who`` and the names in it; empty when it does not tell.

    >>> owner_of("/slurm/uid_0/job_2/step_0/task_1")
    {'who': 'slurm', 'job': '2', 'step': '0', 'task': '1'}
    >>> owner_of("/user.slice")
    {}
    """
    for who, pattern in _OWNERS:
        if match := pattern.search(group):
            return {"who": who} | {name: value for name, value in match.groupdict().items() if value}
    return {}


def kernel_signs(kills: Sequence[KernelKill]) -> list[Sign]:
    """Each kill as a sign."""
    found = []
    for kill in kills:
        values: dict[str, Any] = {"who": "the kernel", "pid": kill.pid, "task": kill.name, "scope": kill.scope}
        sizes = {
            "used_bytes": kill.victim_bytes,
            "limit_bytes": kill.limit_bytes if kill.scope not in ("global", "unknown") else None,
        }
        values |= {name: size for name, size in sizes.items() if size is not None}
        values |= {"owner": kill.owner} if kill.owner else {}
        in_group = kill.scope in ("own_group", "ancestor", "group")
        name = "cgroup_kill" if in_group else "oom_kill" if kill.scope == "unknown" else "global_kill"
        found.append(Sign(name, kill.lines, values))
    return found
