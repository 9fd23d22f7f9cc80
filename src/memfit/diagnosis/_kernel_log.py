"""Read the blocks that the kernel's OOM killer writes, of old and new kernels.

The process that *invoked* the killer is not the victim. The limit is that of ``oom_memcg``, not of the victim's cgroup.
Source: Linux mm/oom_kill.c (dump_header, __oom_kill_process) and mm/memcontrol.c, 3.10 to 6.18.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Line, read_line
from memfit.units import KIB

#: A message in JSON, from ``dmesg -J``, ``journalctl -o json`` or a cloud's log.
_MESSAGE = re.compile(
    r'"(?:MESSAGE|msg|textPayload|message|log)"\s?:\s?("(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9A-Fa-f]{4})*")'
)


def read_kernel_lines(text: str, file: str = "-") -> list[Line]:
    """Return the kernel's lines of ``dmesg`` (also ``-T``, ``-J``, raw ``/dev/kmsg``), syslog, a journal or JSON."""
    found: list[Line] = []
    for number, line in enumerate(text.split("\n"), 1):
        said = [json.loads(one, strict=False) for one in _MESSAGE.findall(line)] if '"' in line else []
        found += [read_line(piece.rstrip("\r"), file, number) for one in said or [line] for piece in one.split("\n")]
    return found


_LONGEST_BLOCK = 4000
_INVOKED = re.compile(r"^.{1,40}? invoked oom-killer: ")
_KILLED = re.compile(
    r"(?:(?P<who>Memory cgroup out of memory|Out of memory[^:]{0,40}): )?"
    r"Killed process (?P<pid>\d+),? \(.{1,40}?\)(?P<rest>.*)",
    re.IGNORECASE,
)
_CITED = re.compile(
    r"invoked oom-killer: |oom-kill:\s*constraint=|Task in /\S* killed as a result of limit of|^memory: usage \d+kB"
    r"|due to memory\.oom\.group set|out of memory[^:]{0,40}: Kill process ",
    re.IGNORECASE,
)
_CONSTRAINT = re.compile(r"constraint=CONSTRAINT_(\w+)")
_LIMIT_GROUP = re.compile(r"oom_memcg=([^,\n]*)|as a result of limit of (/\S*)")
_VICTIM_GROUP = re.compile(r"task_memcg=([^,\n]*)|Task in (/\S*) killed")
_USAGE = re.compile(r"^memory: usage (\d+)kB, limit (\d+)kB", re.MULTILINE)
_OF_GROUP = re.compile(
    r"Task in /\S* killed|^memory: usage \d+kB|Memory cgroup stats for /|mem_cgroup_(?:out_of_memory|\w*oom)"
    r"|try_charge|cgroup out of memory: Kill process",
    re.MULTILINE,
)
_OF_MACHINE = re.compile(r",global_oom,|Out of memory[^:\n]{0,40}: Kill process")
_SLURM_JOB = re.compile(r"/(?:slurm|slurmstepd\.scope)[^/]*/(?:uid_\d+/)?job_(\d+)")
#: Groups of containers, whose processes have other numbers outside.
_CONTAINER = re.compile(r"docker|libpod|kubepods|pod[0-9a-f]{8}|/ecs/|lxc|machine\.slice|crio|garden|containerd")


def find_kills(lines: Iterable[Line]) -> list[Sign]:
    """Return the kills in a kernel log, each with the scope of its limit."""
    found, block, lines = list[Sign](), list[Line](), list(lines)
    if not any("illed process" in line.text for line in lines):  # nearly all logs
        return found
    for line in lines:
        if _INVOKED.search(line.text) or len(block) > _LONGEST_BLOCK:
            block = []
        block.append(line)
        if match := _KILLED.search(line.text):
            found.append(_kill(block, match))
            # What follows without a header belongs to the same kill only if the whole cgroup is killed.
            block = block if any("due to memory.oom.group set" in one.text for one in block) else []
    return found


def _kill(block: list[Line], match: re.Match[str]) -> Sign:
    text = "\n".join(line.text for line in block[:-1])
    last = ("".join((one.findall(text) or [""])[-1]) for one in (_CONSTRAINT, _LIMIT_GROUP, _VICTIM_GROUP))
    constraint, limit_group, victim_group = last
    said = (match["who"] or "").lower()
    if constraint in ("CPUSET", "MEMORY_POLICY"):
        name, scope = "global_kill", "cpuset"
    elif constraint == "NONE" or (_OF_MACHINE.search(text) and "cgroup" not in said):
        name, scope = "global_kill", "global"
    elif constraint == "MEMCG" or "cgroup" in said or _OF_GROUP.search(text):
        is_above = limit_group and victim_group and limit_group != victim_group
        name, scope = "cgroup_kill", "group above it" if is_above else "group"
    else:
        name, scope = ("global_kill", "global") if said else ("oom_kill", "unknown")
    values = {"who": "the kernel", "pid": int(match["pid"]), "scope": scope}
    sizes = dict(re.findall(r"([a-z]+-[a-z]+):\s*(\d+) ?kB", match["rest"]))
    parts = [int(sizes[one]) * KIB for one in ("anon-rss", "file-rss", "shmem-rss") if one in sizes]
    usage = None if scope in ("global", "unknown") else next(_USAGE.finditer(text), None)
    if usage:
        values |= {"used_bytes": int(usage[1]) * KIB, "limit_bytes": int(usage[2]) * KIB}
    elif parts:
        values["used_bytes"] = sum(parts)
    if job := _SLURM_JOB.search(victim_group):
        values["job"] = job[1]
    if _CONTAINER.search(f"{victim_group} {limit_group}"):
        values["in_container"] = True
    cited = [line for line in block[:-1] if _CITED.search(line.text)]
    return Sign(name, (block[-1], *cited[-6:]), values)
