"""What ``scontrol show``, ``sinfo`` and ``seff`` print of a job's shape and of the limits around it; parsed purely."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memfit.diagnosis._sacct import Request, full_state, parse_seconds, parse_size, parse_tres
from memfit.diagnosis._text import Line
from memfit.units import MIB


@dataclass(frozen=True)
class Shape:
    """A job as ``scontrol show job`` has it.

    Attributes:
        job: Its number.
        state, reason: As it says.
        request: The memory asked for of each node or CPU.
        allocated_bytes: The memory that it got, over all of its nodes.
        num_nodes, num_tasks, num_cpus, tasks_per_node: Its shape; None when not told.
        limit_seconds, seconds: It may run, and did.
        partition, nodes: As written.
        restarts: How often it was requeued.
        files: What it names: ``Command``, ``StdErr``, ``StdOut``, ``WorkDir``.
        line: Where it begins.
    """

    job: str
    state: str = ""
    reason: str = ""
    request: Request | None = None
    allocated_bytes: int | None = None
    num_nodes: int | None = None
    num_tasks: int | None = None
    num_cpus: int | None = None
    tasks_per_node: int | None = None
    limit_seconds: int | None = None
    seconds: int | None = None
    partition: str = ""
    nodes: str = ""
    restarts: int = 0
    files: tuple[tuple[str, str], ...] = ()
    line: Line | None = None


@dataclass(frozen=True)
class Limit:
    """What a job may ask for at most.

    Attributes:
        bytes: The memory; None without a limit.
        scope: Of each node, or of each CPU.
        name: Of what: a node or a partition.
        source: The setting: ``RealMemory``, ``MaxMemPerNode``, ``MaxMemPerCPU``, ``sinfo``.
        seconds: The longest run; None without a limit.
        num_nodes: How many nodes there are.
        line: Where it stands.
    """

    bytes: int | None
    scope: Literal["node", "cpu"]
    name: str
    source: str
    seconds: int | None = None
    num_nodes: int | None = None
    line: Line | None = None


@dataclass(frozen=True)
class Efficiency:
    """What ``seff`` printed.

    Attributes:
        job: Its number.
        state: In full.
        exit_code: What it calls so; 0 beside OUT_OF_MEMORY says nothing.
        used_bytes: The memory used; where it is an estimate, the largest task's times the number of tasks.
        is_estimate: Whether it says so.
        requested_bytes: Of the whole job.
        request: Of each node or CPU.
        num_nodes: How many.
        lines: What it rests on.
    """

    job: str
    state: str = ""
    exit_code: int | None = None
    used_bytes: int | None = None
    is_estimate: bool = False
    requested_bytes: int | None = None
    request: Request | None = None
    num_nodes: int | None = None
    lines: tuple[Line, ...] = ()


def parse_shapes(lines: Sequence[Line]) -> list[Shape]:
    """The jobs in what ``scontrol show job`` printed, alone or in a log.

    >>> text = "JobId=2 JobName=a b\\n   NumNodes=2 NumTasks=4\\n   MinCPUsNode=2 MinMemoryNode=300M MinTmpDiskNode=0"
    >>> shape = parse_shapes([Line("-", number, line) for number, line in enumerate(text.splitlines(), 1)])[0]
    >>> shape.num_tasks, shape.request
    (4, Request(bytes=314572800, scope='node'))
    """
    return [_shape(found, line) for found, line in _blocks(lines, "JobId")]


def _shape(found: dict[str, str], line: Line) -> Shape:
    request = None
    for name in ("MinMemoryNode", "MinMemoryCPU"):
        size = _size(found.get(name, ""))
        if size is not None:
            request = Request(size, "node" if name == "MinMemoryNode" else "cpu")
    per_node = found.get("NtasksPerN:B:S:C", "").partition(":")[0]
    tres = parse_tres(found.get("AllocTRES") or found.get("TRES") or found.get("ReqTRES") or "")
    return Shape(
        found["JobId"],
        state=full_state(found.get("JobState", "")),
        reason=found.get("Reason", ""),
        request=request,
        allocated_bytes=tres.get("mem"),
        num_nodes=_first_number(found.get("NumNodes", "")),
        num_tasks=_first_number(found.get("NumTasks", "")),
        num_cpus=_first_number(found.get("NumCPUs", "")),
        tasks_per_node=int(per_node) if per_node.isdigit() and int(per_node) else None,
        limit_seconds=parse_seconds(found.get("TimeLimit", "")),
        seconds=parse_seconds(found.get("RunTime", "")),
        partition=found.get("Partition", ""),
        nodes=found.get("NodeList", ""),
        restarts=_first_number(found.get("Restarts", "")) or 0,
        files=tuple((name, found[name]) for name in ("Command", "StdErr", "StdOut", "WorkDir") if name in found),
        line=line,
    )


def _blocks(lines: Sequence[Line], first: str) -> list[tuple[dict[str, str], Line]]:
    """The settings of each block that begins with a key, with its first line."""
    blocks: list[tuple[dict[str, str], Line]] = []
    open_block = False
    for line in lines:
        text = line.text.strip()
        if text.startswith(f"{first}="):
            blocks.append(({}, line))
            open_block = True
        elif not text or "=" not in text:
            open_block = False
        if open_block:
            # A value may hold spaces: it reaches to the next key.
            for key, value in re.findall(r"([A-Za-z][\w/:&]*)=(.*?)(?=\s+[A-Za-z][\w/:&]*=|$)", text):
                blocks[-1][0].setdefault(key, value.strip())
    return blocks


def parse_node_limits(lines: Sequence[Line]) -> list[Limit]:
    """The limits in what ``scontrol show node``, ``scontrol show partition`` or ``sinfo`` printed.

    A node's ``RealMemory`` less what is kept for the system is what jobs can be given there.

    >>> shown = [Line("-", 1, "NodeName=n1 RealMemory=525000 MemSpecLimit=1000")]
    >>> [limit.bytes // 2**20 for limit in parse_node_limits(shown)]
    [524000]
    """
    found = []
    for node, line in _blocks(lines, "NodeName"):
        if (memory := _first_number(node.get("RealMemory", ""))) is not None:
            kept = _first_number(node.get("MemSpecLimit", "")) or 0
            found.append(Limit((memory - kept) * MIB, "node", node["NodeName"], "RealMemory", line=line))
    for one, line in _blocks(lines, "PartitionName"):
        seconds = parse_seconds(one.get("MaxTime", ""))
        nodes = _first_number(one.get("TotalNodes", ""))
        for key in ("MaxMemPerNode", "MaxMemPerCPU"):
            if key in one:
                size = _first_number(one[key])
                scope: Literal["node", "cpu"] = "node" if key == "MaxMemPerNode" else "cpu"
                limit = size * MIB if size else None
                found.append(Limit(limit, scope, one["PartitionName"], key, seconds, nodes, line))
    return [*found, *_sinfo(lines)]


def _sinfo(lines: Sequence[Line]) -> list[Limit]:
    """Rows of ``sinfo`` with its column MEMORY: MiB of each node, ``+`` for at least."""
    found: list[Limit] = []
    names: list[str] = []
    for line in lines:
        words = line.text.split()
        if {"MEMORY"} <= set(words) and {"PARTITION", "NODELIST", "HOSTNAMES"} & set(words):
            names = words
            continue
        if not names or len(words) != len(names):
            names = names if words else []
            continue
        row = dict(zip(names, words, strict=True))
        memory = _first_number(row["MEMORY"].removesuffix("+"))
        if memory is None:
            continue
        name = row.get("PARTITION") or row.get("NODELIST") or row.get("HOSTNAMES") or ""
        seconds = parse_seconds(row.get("TIMELIMIT", ""))
        count = _first_number(row.get("NODES", ""))
        limit = Limit(memory * MIB, "node", name.removesuffix("*"), "sinfo", seconds, count, line)
        if (limit.bytes, limit.name) not in [(one.bytes, one.name) for one in found]:
            found.append(limit)
    return found


_SEFF = {
    "state": re.compile(r"State: (?P<state>[A-Z_]+(?: by \d+)?) ?\(exit code (?P<code>\d+)\)"),
    "nodes": re.compile(r"Nodes: (?P<nodes>\d+)\s*$"),
    "used": re.compile(r"Memory Utilized: (?P<size>[\d.]+) (?P<unit>[KMGTP]?B)(?P<estimate> \(estimated maximum\))?"),
    "asked": re.compile(
        r"Memory Efficiency: [\d.]+% of (?P<size>[\d.]+) (?P<unit>[KMGTP]?B)"
        r"(?: \((?P<one>[\d.]+) (?P<of>[KMGTP]?B)/(?P<scope>node|core|cpu)\))?"
    ),
}


def parse_seff(lines: Sequence[Line]) -> list[Efficiency]:
    """The jobs in what ``seff`` printed; its units are powers of 1024.

    >>> text = "Job ID: 7\\nState: OUT_OF_MEMORY (exit code 0)\\nMemory Utilized: 285.6 GB (estimated maximum)"
    >>> found = parse_seff([Line("-", number, line) for number, line in enumerate(text.splitlines(), 1)])[0]
    >>> found.state, found.is_estimate, round(found.used_bytes / 2**30, 1)
    ('OUT_OF_MEMORY', True, 285.6)
    """
    found: list[Efficiency] = []
    current: list[Line] = []
    for line in lines:
        if re.match(r"\s*Job ID: ?\d", line.text):
            found, current = [*found, *_seff(current)], [line]
        elif current or any(pattern.search(line.text) for pattern in _SEFF.values()):
            current.append(line)
    return [*found, *_seff(current)]


def _seff(lines: Sequence[Line]) -> list[Efficiency]:
    if not lines:
        return []
    head = re.match(r"\s*Job ID: ?(\S+)", lines[0].text)
    job, told = (head[1] if head else ""), {}
    for line in lines:
        if array := re.match(r"\s*Array Job ID: ?(\d+_\d+)", line.text):
            job = array[1]
        for name, pattern in _SEFF.items():
            if match := pattern.search(line.text):
                told[name] = (match, line)
    if "state" not in told and "used" not in told:
        return []
    state, used, asked, nodes = (
        told[name][0] if name in told else None for name in ("state", "used", "asked", "nodes")
    )
    request = None
    if asked and asked["one"]:
        size = parse_size(asked["one"] + asked["of"].rstrip("B")) or 0
        request = Request(size, "node" if asked["scope"] == "node" else "cpu")
    return [
        Efficiency(
            job,
            full_state(state["state"]) if state else "",
            int(state["code"]) if state else None,
            parse_size(used["size"] + used["unit"].rstrip("B")) if used else None,
            bool(used and used["estimate"]),
            parse_size(asked["size"] + asked["unit"].rstrip("B")) if asked else None,
            request,
            int(nodes["nodes"]) if nodes else None,
            tuple(line for _, line in told.values()),
        )
    ]


def _size(text: str) -> int | None:
    """A size of ``scontrol``: with its unit, or MiB."""
    return int(text) * MIB if text.isdigit() else parse_size(text)


def _first_number(text: str) -> int | None:
    """The number of ``16``, or the first of ``16-32``."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None
