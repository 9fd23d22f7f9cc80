"""What a worker's end points to."""

from __future__ import annotations

import signal
from pathlib import Path

from memfit.memory import memory_group, oom_kills_above


def cause_of_death(status: int | None, num_kills: int) -> tuple[str, str, str]:
    """How a process ended, which rule that points to, and what to do.

    >>> cause_of_death(-9, 1)[0]
    'was killed by SIGKILL'
    >>> cause_of_death(3, 0)[0]
    'ended with exit code 3'
    """
    again = "iterate again to go on at this batch with new workers"
    if status is None:
        return "ended", "nobody saw how.", again
    if status >= 0:
        rule = "a worker ends only when its loader is closed; code it ran called exit, or it could not start."
        return f"ended with exit code {status}", rule, f"see its last words on stderr; {again}"
    name = signal.Signals(-status).name
    if name != "SIGKILL":
        rule = f"{name} in a worker is a fault in native code, or was sent to it."
        return f"was killed by {name}", rule, f"see its last words on stderr; num_workers=0 shows where; {again}"
    told = f"that count has risen by {num_kills}: memory ran out." if num_kills > 0 else "that count has not risen."
    rule = f"SIGKILL is sent by the kernel when memory runs out, counted by the memory cgroup, or by somebody: {told}"
    return "was killed by SIGKILL", rule, f"lower num_workers, prefetch or the batch's size if memory ran out; {again}"


def oom_kills() -> dict[Path, int]:
    """The kernel's counts of processes killed for memory, in this process's group and those above it."""
    group = memory_group()
    return {} if group is None else oom_kills_above(group)
