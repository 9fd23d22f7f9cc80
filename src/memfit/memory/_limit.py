"""One limit on memory: how much, how much of it is taken, and who says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["group", "host", "process", "job"]


@dataclass(frozen=True)
class Limit:
    """One limit on host memory.

    Attributes:
        name: The file, variable or option that holds the limit, such as ``memory.max``.
        source: Who says so, such as ``cgroup v2 /user.slice`` or ``Slurm job 42``.
        limit_bytes: The limit.
        used_bytes: What is taken of it, in the metric that ``metric`` names.
        headroom_bytes: ``limit_bytes - used_bytes``; below 0 when the limit is passed already.
        scope: What the limit bounds: a control ``group``, the ``host``, each ``process`` by itself, or this ``job``.
        note: What a reader must know to judge it.
        metric: What ``used_bytes`` counts.
        binds: False for a limit that is shown and can never be the smallest, with the reason in ``note``.
    """

    name: str
    source: str
    limit_bytes: int
    used_bytes: int
    headroom_bytes: int
    scope: Scope
    note: str = ""
    metric: str = "non-reclaimable"
    binds: bool = True


def limit(
    name: str,
    source: str,
    limit_bytes: int,
    used_bytes: int,
    scope: Scope,
    note: str = "",
    metric: str = "non-reclaimable",
) -> Limit:
    """A limit with its headroom worked out.

    >>> limit("memory.max", "cgroup v2 /", 1000, 400, "group").headroom_bytes
    600
    """
    return Limit(name, source, limit_bytes, used_bytes, limit_bytes - used_bytes, scope, note, metric)
