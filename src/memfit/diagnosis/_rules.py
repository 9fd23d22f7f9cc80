"""From facts to findings: small rules, one for each cause, none of which believes a bare word or a bare 137."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memfit.diagnosis._facts import Fact, FactKind

Kind = Literal[
    "gpu",
    "gpu_fragmentation",
    "host_cgroup",
    "host_kernel",
    "shm",
    "host_alloc",
    "pinned",
    "other_accelerator",
    "none",
]
#: Reserved and unallocated memory, or that of others, that is less than this share of the card is not worth a remedy.
NOTICEABLE_SHARE = 0.05


@dataclass(frozen=True)
class Finding:
    """One explanation of what the facts say.

    Attributes:
        kind: Of which memory; ``none`` for another cause.
        cause: In a word: ``out_of_memory``, ``killed`` (by whom is not shown), ``walltime``, ``preempted`` ...
        confidence: From 0 to 1.
        facts: What it rests on, the deciding one first.
        values: Figures.
    """

    kind: Kind
    cause: str
    confidence: float
    facts: tuple[Fact, ...]
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def fact(self) -> Fact:
        """The deciding fact."""
        return self.facts[0]


Rule = Callable[[Sequence[Fact]], list[Finding]]


def _of(facts: Sequence[Fact], *kinds: FactKind) -> list[Fact]:
    return [fact for fact in facts if fact.kind in kinds]


#: How sure a death can make that no number in the job's own log names.
_UNLINKED = 0.6


def _found(kind: Kind, confidence: float, fact: Fact, cause: str = "out_of_memory") -> Finding:
    if _is_unlinked(fact):
        confidence = min(confidence, _UNLINKED)
    return Finding(kind, cause, confidence, (fact,), dict(fact.values))


def device(facts: Sequence[Fact]) -> list[Finding]:
    """A device's allocator, driver or library refused."""
    found = [_torch(fact) for fact in _of(facts, "device_oom")]
    for fact in _of(facts, "device_error_oom"):
        found.append(_found("gpu" if fact.values.get("api") == "CUDA" else "other_accelerator", 0.9, fact))
    found += [_found("pinned", float(fact.values.get("confidence", 0.85)), fact) for fact in _of(facts, "pinned")]
    found += [_found("other_accelerator", 0.95, fact) for fact in _of(facts, "mps_oom")]
    found += [_found("other_accelerator", 0.8, fact) for fact in _of(facts, "xpu_oom")]
    found += [_found("gpu", 0.7, fact) for fact in _of(facts, "library_alloc")]
    found += [_found("gpu", 0.85, fact) for fact in _of(facts, "nccl_oom")]
    for fact in _of(facts, "xla_oom"):
        found.append(_found("gpu" if fact.values["gpu"] else "other_accelerator", 0.93, fact))
    for fact in _of(facts, "tf_oom"):
        found.append(_found("host_alloc" if fact.values["cpu"] and not fact.values["gpu"] else "gpu", 0.93, fact))
    return found


def _torch(fact: Fact) -> Finding:
    """Torch's message: fragmented when what is reserved and free in its cache would have been enough."""
    values = dict(fact.values)
    kind: Kind = "gpu" if values.get("api") == "CUDA" else "other_accelerator"
    tried, allocated, reserved = (values.get(f"{name}_bytes") for name in ("tried", "allocated", "reserved"))
    total, free = values.get("total_bytes"), values.get("free_bytes")
    if tried is not None and allocated is not None and reserved is not None:
        slack = reserved - allocated
        values["noticeable"] = total is not None and slack >= NOTICEABLE_SHARE * total
        if kind == "gpu" and slack >= tried:
            kind = "gpu_fragmentation"
    if total and free is not None and reserved is not None and free <= total:
        others = total - free - reserved
        if others > 0 and others >= NOTICEABLE_SHARE * total:
            values["held_by_others_bytes"] = others
    return Finding(kind, "out_of_memory", 0.98 if tried else 0.9, (fact,), values)


def host_refused(facts: Sequence[Fact]) -> list[Finding]:
    """An allocation in host memory was refused, and the program was told."""
    sure: dict[FactKind, float] = {
        "cpu_alloc": 0.97,
        "array_alloc": 0.97,
        "memory_error": 0.9,
        "bad_alloc": 0.8,
        "errno_12": 0.9,
        "page_file": 0.95,
    }
    found = [_found("host_alloc", confidence, fact) for name, confidence in sure.items() for fact in _of(facts, name)]
    return found + [_found("shm", 0.93, fact) for fact in _of(facts, "shm_bus", "shm_write", "shm_map")]


def killed_for_memory(facts: Sequence[Fact]) -> list[Finding]:
    """Somebody killed, and said that it was for memory."""
    touched = bool(_of(facts, "limit_touched")) and bool(_of(facts, "success"))
    found = [] if touched else [_found("host_cgroup", 0.97, fact) for fact in _of(facts, "cgroup_kill", "limit_kill")]
    found += [_found("host_cgroup", 0.6, fact, "limit_touched") for fact in _of(facts, "limit_touched")]
    found += [_found("host_kernel", 0.95, fact) for fact in _of(facts, "global_kill")]
    scoped = _of(facts, "cgroup_kill", "global_kill")
    return found + [
        _found("host_kernel", 0.85, fact) for fact in _of(facts, "oom_kill") if not _is_scoped(fact, scoped)
    ]


#: A kernel's block names its scope so many lines before or after the line on its victim, task table between.
_BLOCK_LINES = 800


def _is_scoped(fact: Fact, scoped: Sequence[Fact]) -> bool:
    """Whether lines of the same block say whose limit it was."""
    return any(
        one.stream == fact.stream
        and (-12 <= one.place - fact.place <= (12 if "pid" in fact.values else _BLOCK_LINES))
        and one.values.get("who") in ("the kernel", "systemd-oomd")
        for one in scoped
    )


def killed(facts: Sequence[Fact]) -> list[Finding]:
    """A SIGKILL whose sender is not shown: memory is probable, and no more than that."""
    found = [_found("host_kernel", 0.5, fact, "killed") for fact in _of(facts, "worker_killed")]
    for fact in _of(facts, "sigkill"):
        if fact.values.get("memory") is False:  # the job's own counter of kills stood still
            found.append(_found("none", 0.9, fact, "killed"))
        elif "code" in fact.values or "pool" in fact.values:
            found.append(_found("none", 0.3, fact, "killed"))
        else:
            found.append(
                _found("host_cgroup" if fact.values.get("who") == "Slurm" else "host_kernel", 0.4, fact, "killed")
            )
    return found + [_found("none", 0.4, fact, "bus_error") for fact in _of(facts, "bus_error")]


#: Other causes with how sure their words make, those first that explain the ones after them.
OTHER_CAUSES: dict[FactKind, float] = {
    "walltime": 0.97,
    "preempted": 0.97,
    "node_fail": 0.97,
    "assertion": 0.9,
    "illegal_access": 0.95,
    "chip_memory": 0.95,
    "open_files": 0.93,
    "process_limit": 0.9,
    "disk_full": 0.95,
    "segfault": 0.9,
    "import_error": 0.9,
    "device_lost": 0.85,
    "config_error": 0.85,
    "missing_file": 0.85,
    "own_exception": 0.8,
    "collective_timeout": 0.85,
    "aborted": 0.7,
    "hangup": 0.9,
    "worker_exited": 0.6,
    "cancelled": 0.7,
    "terminated": 0.6,
    "hang": 0.6,
}
#: What the death of one rank makes the others say.
CONSEQUENCES = frozenset({"collective_timeout", "terminated", "cancelled", "hang", "aborted", "worker_exited"})
#: Words that also follow from these other causes, and these then are the cause.
_DOUBTFUL: frozenset[FactKind] = frozenset({"library_alloc", "bad_alloc", "nccl_oom", "errno_12", "xpu_oom"})
_POISON = frozenset({"assertion", "illegal_access", "process_limit", "open_files", "device_lost"})


def other(facts: Sequence[Fact]) -> list[Finding]:
    """Everything that is no shortage of memory."""
    return [
        _found("none", confidence, fact, kind) for kind, confidence in OTHER_CAUSES.items() for fact in _of(facts, kind)
    ]


RULES: tuple[Rule, ...] = (device, host_refused, killed_for_memory, killed, other)


def rank_findings(facts: Sequence[Fact], survived: frozenset[int] = frozenset()) -> list[Finding]:
    """All findings, the best explanation first.

    What says by itself that memory ran out comes before what only says that something was killed or went away; among
    equals the first one in time is the cause, and what follows are its consequences. What the job survived comes last.

    Args:
        facts: Of all logs.
        survived: The ids of the facts after which the job went on.
    """
    found = [finding for rule in RULES for finding in rule(facts)]
    # A death that nothing links to the job is taken for its own where the job's log shows a kill, and nothing else.
    was_killed = any(one.kind in ("sigkill", "worker_killed") for one in facts)
    ended_well = any(one.kind == "success" for one in facts) and not was_killed
    if ended_well:
        found = [one for one in found if not _is_unlinked(one.fact)]
    poisoned = any(one.cause in _POISON and id(one.fact) not in survived for one in found)
    return sorted(
        found,
        key=lambda one: (
            id(one.fact) in survived,
            _is_unlinked(one.fact) and not was_killed,
            *_order(one, poisoned),
        ),
    )


def _is_unlinked(fact: Fact) -> bool:
    """Whether it is somebody's death, which no number in the job's own log names."""
    return fact.values.get("linked", True) is None


def _order(finding: Finding, poisoned: bool) -> tuple[int, int, int, int]:
    fact = finding.fact
    weight = list(OTHER_CAUSES).index(fact.kind) if finding.cause in OTHER_CAUSES else 0
    if finding.cause == "out_of_memory":
        tier = 2 if poisoned and fact.kind in _DOUBTFUL else 0
    elif finding.cause in CONSEQUENCES:
        tier = 4
    elif finding.cause == "killed" and finding.kind == "none":
        tier = 5
    elif finding.cause in ("killed", "limit_touched", "own_exception", "bus_error"):
        tier = 3
    else:
        tier = 1
    return tier, weight if tier in (1, 4) else 0, fact.number if tier == 3 else 0, fact.number
