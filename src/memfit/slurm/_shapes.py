"""Parse what ``scontrol show`` and ``sinfo`` print: jobs, and the memory of nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memfit.amounts import Amount
from memfit.slurm._accounting import Row, full_state, parse_seconds, parse_size, parse_tres
from memfit.units import MIB


def format_time(seconds: int) -> str:
    """Return seconds as ``sbatch --time`` takes them.

    >>> format_time(135_000)
    '1-13:30:00'
    """
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


@dataclass(frozen=True)
class Limit:
    """The most memory that a job can request of a node, by the name of the node or its partition."""

    bytes: int
    name: str


def parse_shapes(lines: Sequence[str]) -> list[Row]:
    """Return the jobs in what ``scontrol show job`` printed, alone or in a log.

    Example:
        >>> text = "JobId=2 JobName=a b\\n   NumNodes=2 NumTasks=4\\n   MinMemoryNode=300M MinTmpDiskNode=0"
        >>> job = parse_shapes(text.splitlines())[0]
        >>> job.num_tasks, job.request
        (4, Amount(bytes=314572800, per='node', place='host'))
    """
    return [_job(found) for found in _blocks(lines, "JobId")]


def _job(found: dict[str, str]) -> Row:
    request = None
    for name in ("MinMemoryNode", "MinMemoryCPU"):
        size = found.get(name, "")
        count = int(size) * MIB if size.isdigit() else parse_size(size)
        if count is not None:
            request = Amount(count, "node" if name == "MinMemoryNode" else "cpu")
    tres = parse_tres(found.get("AllocTRES") or found.get("TRES") or found.get("ReqTRES") or "")
    return Row(
        found["JobId"],
        raw_job=found["JobId"],
        state=full_state(found.get("JobState", "")),
        request=request,
        allocated_bytes=tres.get("mem"),
        num_nodes=_number(found.get("NumNodes")),
        num_tasks=_number(found.get("NumTasks")),
        num_cpus=_number(found.get("NumCPUs")),
        tasks_per_node=_number(found.get("NtasksPerN:B:S:C")) or None,
        limit_seconds=parse_seconds(found.get("TimeLimit", "")),
        seconds=parse_seconds(found.get("RunTime", "")),
        partition=found.get("Partition", ""),
        nodes=found.get("NodeList", ""),
    )


def _blocks(lines: Sequence[str], first: str) -> list[dict[str, str]]:
    """The settings of each block that begins with a key."""
    blocks: list[dict[str, str]] = []
    is_inside = False
    for text in map(str.strip, lines):
        if text.startswith(f"{first}="):
            blocks.append({})
            is_inside = True
        elif "=" not in text:
            is_inside = False
        if is_inside:  # a value may hold spaces: it reaches to the next key
            for key, value in re.findall(r"([A-Za-z][\w/:&]*)=(.*?)(?=\s+[A-Za-z][\w/:&]*=|$)", text):
                blocks[-1].setdefault(key, value.strip())
    return blocks


def parse_node_limits(lines: Sequence[str]) -> list[Limit]:
    """Return the memory of nodes in what ``scontrol show node``, ``scontrol show partition`` or ``sinfo`` printed.

    Of a node's ``RealMemory``, jobs cannot use what is kept for the system.

    Example:
        >>> shown = ["NodeName=n1 RealMemory=525000 MemSpecLimit=1000"]
        >>> [limit.bytes // 2**20 for limit in parse_node_limits(shown)]
        [524000]
    """
    found = []
    for node in _blocks(lines, "NodeName"):
        if (memory := _number(node.get("RealMemory"))) is not None:
            found.append(Limit((memory - (_number(node.get("MemSpecLimit")) or 0)) * MIB, node["NodeName"]))
    for one in _blocks(lines, "PartitionName"):
        if memory := _number(one.get("MaxMemPerNode")):
            found.append(Limit(memory * MIB, one["PartitionName"]))
    names: list[str] = []
    for words in map(str.split, lines):  # of sinfo: MiB of each node, with + for at least
        if "MEMORY" in words and {"PARTITION", "NODELIST", "HOSTNAMES"} & set(words):
            names = words
        elif not names or len(words) != len(names):
            names = names if words else []
        elif (memory := _number((row := dict(zip(names, words, strict=True)))["MEMORY"])) is not None:
            name = row.get("PARTITION") or row.get("NODELIST") or row.get("HOSTNAMES") or ""
            found.append(Limit(memory * MIB, name.removesuffix("*")))
    return list(dict.fromkeys(found))


def _number(text: str | None) -> int | None:
    """The number of ``16``, or the first of ``16-32``."""
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else None
