"""The kernel's count of processes that it killed for memory in a control group: the one sure proof of such a kill."""

from __future__ import annotations

from pathlib import Path

from memfit.memory._cgroup import locate
from memfit.memory._host import REAL_ROOT, parse_pairs, read_text


def memory_group(*, root: Path = REAL_ROOT) -> Path | None:
    """The directory of the memory group of this process; None where there is none to be seen."""
    placement = locate(root, "memory")
    return placement.groups[0].directory if placement is not None else None


def oom_kills_above(directory: Path) -> dict[Path, int]:
    """The kills of a group and of each visible group above it, by directory, its own first.

    >>> oom_kills_above(Path("/nowhere"))
    {}
    """
    kills = {}
    for group in (directory, *directory.parents):
        found = _kills(group)
        if found is not None:
            kills[group] = found
        elif kills:
            break  # The root of v2 counts nothing, and above the mount nothing is a group.
    return kills


def _kills(directory: Path) -> int | None:
    """What v1 and v2 call ``oom_kill``."""
    for name in ("memory.oom_control", "memory.events"):
        counters = parse_pairs(read_text(directory / name))
        if "oom_kill" in counters:
            return counters["oom_kill"]
    return None
