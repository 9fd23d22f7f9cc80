"""The kernel's count of processes that it killed for memory in a control group: the one sure proof of such a kill."""

from __future__ import annotations

from pathlib import Path

from memfit.memory._cgroup import locate
from memfit.memory._host import REAL_ROOT, parse_pairs, read_text


def count_oom_kills(*, root: Path = REAL_ROOT) -> tuple[str, int] | None:
    """The memory group of this process and how many of its processes were killed; None where nothing counts them.

    v1 counts in the group of the killed process alone, v2 also in the groups above it.

    Source: Linux mm/memcontrol.c, memcg_memory_event().
    """
    placement = locate(root, "memory")
    if placement is None:
        return None
    group = placement.groups[0]
    counters = parse_pairs(read_text(group.directory / ("memory.events", "memory.oom_control")[placement.version == 1]))
    return (f"cgroup v{placement.version} {group.path}", counters["oom_kill"]) if "oom_kill" in counters else None
