"""What ``scontrol show`` and ``sinfo`` print of a job's shape and of the limits around it; parsed purely."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memfit.slurm._accounting import Request, full_state, parse_seconds, parse_size, parse_tres
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
    """

    bytes: int | None
    scope: Literal["node", "cpu"]
    name: str
    source: str
    seconds: int | None = None
    num_nodes: int | None = None


def parse_shapes(lines: Sequence[str]) -> list[Shape]:
    """The jobs in what ``scontrol show job`` printed, alone or in a log.

    >>> text = "JobId=2 JobName=a b\\n   NumNodes=2 NumTasks=4\\n   MinCPUsNode=2 MinMemoryNode=300M MinTmpDiskNode=0"
    >>> shape = parse_shapes(text.splitlines())[0]
    >>> shape.num_tasks, shape.request
    (4, Request(bytes=314572800, scope='node'))
    """
    return [_shape(found) for found in _blocks(lines, "JobId")]


def _shape(found: dict[str, str]) -> Shape:
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
    )


def _blocks(lines: Sequence[str], first: str) -> list[dict[str, str]]:
    """The settings of each block that begins with a key."""
    blocks: list[dict[str, str]] = []
    open_block = False
    for line in lines:
        text = line.strip()
        if text.startswith(f"{first}="):
            blocks.append({})
            open_block = True
        elif not text or "=" not in text:
            open_block = False
        if open_block:
            # A value may hold spaces: it reaches to the next key.
            for key, value in re.findall(r"([A-Za-z][\w/:&]*)=(.*?)(?=\s+[A-Za-z][\w/:&]*=|$)", text):
                blocks[-1].setdefault(key, value.strip())
    return blocks


def parse_node_limits(lines: Sequence[str]) -> list[Limit]:
    """The limits in what ``scontrol show node``, ``scontrol show partition`` or ``sinfo`` printed.

    A node's ``RealMemory`` less what is kept for the system is what jobs can be given there.

    >>> shown = ["NodeName=n1 RealMemory=525000 MemSpecLimit=1000"]
    >>> [limit.bytes // 2**20 for limit in parse_node_limits(shown)]
    [524000]
    """
    found = []
    for node in _blocks(lines, "NodeName"):
        if (memory := _first_number(node.get("RealMemory", ""))) is not None:
            kept = _first_number(node.get("MemSpecLimit", "")) or 0
            found.append(Limit((memory - kept) * MIB, "node", node["NodeName"], "RealMemory"))
    for one in _blocks(lines, "PartitionName"):
        seconds = parse_seconds(one.get("MaxTime", ""))
        nodes = _first_number(one.get("TotalNodes", ""))
        for key in ("MaxMemPerNode", "MaxMemPerCPU"):
            if key in one:
                size = _first_number(one[key])
                scope: Literal["node", "cpu"] = "node" if key == "MaxMemPerNode" else "cpu"
                limit = size * MIB if size else None
                found.append(Limit(limit, scope, one["PartitionName"], key, seconds, nodes))
    return [*found, *_sinfo(lines)]


def _sinfo(lines: Sequence[str]) -> list[Limit]:
    """Rows of ``sinfo`` with its column MEMORY: MiB of each node, ``+`` for at least."""
    found: list[Limit] = []
    names: list[str] = []
    for line in lines:
        words = line.split()
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
        limit = Limit(memory * MIB, "node", name.removesuffix("*"), "sinfo", seconds, count)
        if (limit.bytes, limit.name) not in [(one.bytes, one.name) for one in found]:
            found.append(limit)
    return found


def _size(text: str) -> int | None:
    """A size of ``scontrol``: with its unit, or MiB."""
    return int(text) * MIB if text.isdigit() else parse_size(text)


def _first_number(text: str) -> int | None:
    """The number of ``16``, or the first of ``16-32``."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None
