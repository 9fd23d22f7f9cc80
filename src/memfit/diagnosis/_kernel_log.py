"""Read what the kernel's OOM killer writes: the blocks of old and new kernels, from dmesg or the journal.

The process that *invoked* the killer is the trigger, not the victim. The memory that ran out is that of the cgroup
whose limit was met (``oom_memcg``), not of the one that the victim lived in.

Source: Linux mm/oom_kill.c (dump_header, dump_oom_summary, __oom_kill_process) and mm/memcontrol.c
(mem_cgroup_print_oom_context, _meminfo), 3.10 to 6.18.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from memfit.diagnosis._signatures import Sign
from memfit.diagnosis._text import Line
from memfit.units import KIB

#: The lines of a block stand close together; what comes later belongs to another one.
_LONGEST_BLOCK = 4000
_BEFORE = re.compile(
    r"(?:<\d+>)?(?:\d+,\d+,(?P<micro>\d+),[^;]*;)?\s*"
    r"(?:(?P<syslog>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|"
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
    r" (?:(?P<host>\S+) )?(?:kernel|\S+\[\d+\])(?:\[\d+\])?: ?|kernel: ?)?\s*"
    r"(?:\[ *(?P<since>\d+\.\d+)\](?:\[ *[TC]\d+\])? ?|"
    r"\[(?P<date>[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ [\d:]{8} \d{4})\] ?)?"
)
#: A message in JSON, from ``dmesg -J``, ``journalctl -o json`` or a cloud's log.
_MESSAGE = re.compile(
    r'"(?:MESSAGE|msg|textPayload|message|log)"\s?:\s?("(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9A-Fa-f]{4})*")'
)


def read_kernel_lines(text: str, file: str = "-") -> list[Line]:
    """Return the kernel's lines of a log, without what a logger set before them.

    It reads ``dmesg`` (also ``-T``, ``-J`` and raw ``/dev/kmsg``), syslog, ``journalctl`` (short, short-iso,
    ``-o json``) and JSON objects with a ``textPayload`` or ``message``.
    """
    found: list[Line] = []
    for number, line in enumerate(text.split("\n"), 1):
        said = [json.loads(one, strict=False) for one in _MESSAGE.findall(line)] if '"' in line else []
        found += [_strip(Line(file, number, piece.rstrip("\r"))) for one in said or [line] for piece in one.split("\n")]
    return found


def _strip(line: Line) -> Line:
    found = _BEFORE.match(line.text)
    if not found or not found.end():
        return line
    time = found["syslog"] or found["date"] or found["since"] or found["micro"] or line.time
    return Line(line.file, line.number, line.text[found.end() :], line.rank, time, found["host"] or line.host)


_WHO = r"(?P<who>Memory cgroup out of memory|Out of memory[^:]{0,40}): "
_VICTIM = r"process (?P<pid>\d+),? \((?P<name>.{1,40}?)\)"
_KILLED = re.compile(rf"(?:{_WHO})?Killed {_VICTIM}(?P<rest>.*)", re.IGNORECASE)
_INVOKED = re.compile(r"^.{1,40}? invoked oom-killer: ")
#: What else a block says, each with the fields of `_Block`; rows with ``cited`` become evidence.
_SAYING = re.compile(
    r"(?P<cited>oom-kill:\s*constraint=(?P<constraint>\w+),(?:.*oom_memcg=(?P<oom>[^,]*))?(?:.*task_memcg=(?P<task>[^,]*))?"
    r"|Task in (?P<victim>/\S*) killed as a result of limit of (?P<limited>/\S*)"
    r"|^memory: usage (?P<usage>\d+)kB, limit (?P<limit>\d+)kB"
    rf"|Tasks in /\S* are going to be killed due to memory\.oom\.group (?P<whole>set)|{_WHO}Kill process )"
    r"|Memory cgroup stats for (?P<stats>/[^:\s]*)|(?P<frame>mem_cgroup_(?:out_of_memory|oom_synchronize)|try_charge)",
    re.IGNORECASE,
)


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

    def read(self, line: Line) -> None:
        """Take from a line what it says of the block."""
        found = _SAYING.search(line.text)
        if found is None:
            return
        self.constraint = found["constraint"] or self.constraint
        self.limit_group = found["oom"] or found["limited"] or self.limit_group or found["stats"] or ""
        self.victim_group = found["task"] or found["victim"] or self.victim_group
        who = (found["who"] or "").lower()
        self.is_global |= ",global_oom," in line.text or (bool(who) and "cgroup" not in who)
        self.in_group |= bool(found["victim"] or found["usage"] or found["stats"] or found["frame"]) or "cgroup" in who
        self.whole_group |= bool(found["whole"])
        if found["usage"]:
            self.usage, self.limit = int(found["usage"]) * KIB, int(found["limit"]) * KIB
        if found["cited"]:
            self.lines.append(line)

    def scope(self, said: str) -> str:
        """Whose memory ran out; the words decide where the line of the summary is missing."""
        if self.constraint in ("CONSTRAINT_CPUSET", "CONSTRAINT_MEMORY_POLICY"):
            return "cpuset"
        if self.constraint == "CONSTRAINT_NONE" or (self.is_global and "cgroup" not in said):
            return "global"
        if self.constraint == "CONSTRAINT_MEMCG" or self.in_group or "cgroup" in said:
            if not self.limit_group or not self.victim_group:
                return "group"
            return "own_group" if self.limit_group == self.victim_group else "ancestor"
        return "global" if said else "unknown"


_NAMES = {"own_group": "cgroup_kill", "ancestor": "cgroup_kill", "group": "cgroup_kill", "unknown": "oom_kill"}


def find_kills(lines: Iterable[Line]) -> list[Sign]:
    """Return the kills that a kernel log tells, in order.

    The values of a sign are ``pid`` and ``task`` of the victim, ``owner``, ``used_bytes`` and ``limit_bytes`` of the
    cgroup, and ``scope``: ``own_group`` (the cgroup that the victim lived in), ``ancestor`` (one above it), ``group``
    (a limit of an unknown cgroup), ``cpuset``, ``global`` (the machine) or ``unknown``.
    """
    found: list[Sign] = []
    lines = list(lines)
    if not any("illed process" in line.text for line in lines):  # nearly all logs
        return found
    block = _Block()
    for line in map(_strip, lines):
        if _INVOKED.search(line.text):
            block = _Block(lines=[line])
            continue
        if block.size > _LONGEST_BLOCK:
            block = _Block()
        block.size += 1
        if match := _KILLED.search(line.text):
            found.append(_kill(block, match, line))
            # What follows without a header belongs to the same kill only if the whole cgroup is killed.
            block = block if block.whole_group else _Block(size=1)
        else:
            block.read(line)
    return found


def _kill(block: _Block, match: re.Match[str], line: Line) -> Sign:
    scope = block.scope((match["who"] or "").lower())
    sizes = {name: int(size) * KIB for name, size in re.findall(r"([a-z]+-[a-z]+):\s*(\d+) ?kB", match["rest"])}
    parts = [sizes[name] for name in ("anon-rss", "file-rss", "shmem-rss") if name in sizes]
    is_group = scope not in ("global", "unknown") and block.limit is not None
    used = block.usage if is_group else sum(parts) if parts else None
    values = {
        "who": "the kernel",
        "pid": int(match["pid"]),
        "task": match["name"],
        "scope": scope,
        "used_bytes": used,
        "limit_bytes": block.limit if is_group else None,
        "owner": owner_of(block.victim_group) or None,
    }
    known = {name: value for name, value in values.items() if value is not None}
    return Sign(_NAMES.get(scope, "global_kill"), (line, *block.lines[-6:]), known)


_ID = "[0-9a-f]{64}"
_SLURM = (
    r"/(?:slurm|slurmstepd\.scope)[^/]*/(?:uid_\d+/)?job_(?P<job>\d+)"
    r"(?:/step_(?P<step>\w+))?(?:/.*?task_(?P<task>\w+))?"
)
_POD = rf"pod(?P<pod>[0-9a-f]{{8}}[-_][0-9a-f-_]{{27}})(?:\.slice)?(?:/(?:[a-z]+-)*(?P<container>{_ID}))?"
_OWNERS = {
    "slurm": _SLURM,
    "kubernetes": _POD,
    "podman": rf"libpod-(?P<container>{_ID})",
    "docker": rf"(?:/docker/|/docker-|/ecs/\w+/)(?P<container>{_ID})",
    "memfit": r"/job-(?P<job>[^/]+)(?:/|$)",
    "systemd": r"/(?P<unit>[^/]+\.(?:service|scope))(?:/|$)",
}


def owner_of(group: str) -> dict[str, str]:
    """Return whose job a cgroup is, by its path: ``who`` and the names in it; empty if it does not tell."""
    for who, pattern in _OWNERS.items():
        if match := re.search(pattern, group):
            return {"who": who} | {name: value for name, value in match.groupdict().items() if value}
    return {}
