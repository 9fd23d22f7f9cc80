"""Faults of ranks: each place of a training x what happens there, on four ranks: the launches, and how they ended.

A small model is trained by memfit's Trainer in DistributedDataParallel, by the same in ``fully_shard`` (FSDP2), and by
the Trainer of transformers in DistributedDataParallel with ``exact``. Faults strike at ten places: out of memory
(torch.OutOfMemoryError), an error, SIGKILL and a hang (SIGSTOP, or a sleep for ever). All of them are tried in the
first; of the others, whose faults all cost a restart, some. A launch has many of them: those that cost a restart strike
in one generation each. A hang may stall for as long as memfit's rule allows; else no stall is longer than 10 s, and the
next step comes within 60 s. After an out-of-memory FSDP2 goes on smaller: that launch ends with the same weights but
for rounding (1e-9).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jobs.rank_loops import DDP, ERROR, FSDP2, HANG, KILL, OUT_OF_MEMORY, RANKS, SMALLER, TRANSFORMERS, Fault

PLACES = (
    "forward", "loss", "backward", "trial", "update", "reduction", "validation", "save", "rendezvous", "load",
)  # fmt: skip
#: Where no generation has made a checkpoint yet.
_STARTS = frozenset({"rendezvous", "load"})
#: Those at the end of an epoch.
_ENDS = frozenset({"validation", "save"})
STEPS_PER_EPOCH = 4
_HANG_SECONDS, _MOST_STALL, _MOST_START = 2.0, 10.0, 60.0


# --- the plans


@dataclass(frozen=True)
class Launch:
    """One launch, and the faults in it."""

    name: str
    faults: tuple[Fault, ...]
    num_epochs: int
    hang_seconds: float | None = None
    loop: str = DDP

    def plain(self) -> Launch:
        """Return the same training without faults."""
        return replace(self, faults=(), hang_seconds=None)


def in_the_process(kinds: Sequence[tuple[str, tuple[int, ...]]]) -> Launch:
    """Return a launch whose faults cost no restart: at every second step of an epoch, and at its end."""
    steps, ends = ([kind for kind in kinds if (kind[0] in _ENDS) == is_end] for is_end in (False, True))
    faults: list[Fault] = []
    at = 0
    while steps or ends:
        at += 1
        due = steps if at % 2 else ends if at % STEPS_PER_EPOCH == 0 else []
        if due:
            place, ranks = due.pop(0)
            faults.append(Fault(len(faults), place, OUT_OF_MEMORY, ranks, at))
    return Launch("out of memory, in the process", tuple(faults), at // STEPS_PER_EPOCH + 2)


def with_restarts(name: str, kinds: Sequence[tuple[str, str, int]], loop: str = DDP) -> Launch:
    """Return a launch whose faults end one generation each; each but those at a start leaves time for a checkpoint."""
    hang_seconds = _HANG_SECONDS if any(what == HANG for _, what, _ in kinds) else None
    faults: list[Fault] = []
    epoch = 0
    for number, (place, what, rank) in enumerate(kinds):
        if place in _STARTS:
            faults.append(Fault(number, place, what, (rank,), generation=number))
            continue
        epoch += 1
        at = (epoch + 1) * STEPS_PER_EPOCH if place in _ENDS else epoch * STEPS_PER_EPOCH + 2
        faults.append(Fault(number, place, what, (rank,), at))
    return Launch(name, tuple(faults), epoch + 2, hang_seconds, loop)


#: The places in an order in which two starts never follow each other.
_ORDER = ("forward", "rendezvous", "loss", "load", "backward", "trial", "update", "reduction", "validation", "save")


#: What is tried of the loops that are not tried whole.
_PAIRWISE: dict[str, dict[str, list[tuple[str, str, int]]]] = {
    FSDP2: {
        "smaller": [
            ("forward", OUT_OF_MEMORY, 2),
            ("backward", OUT_OF_MEMORY, 1),
            ("reduction", OUT_OF_MEMORY, 3),
            ("update", OUT_OF_MEMORY, 0),
            ("validation", OUT_OF_MEMORY, 2),
        ],
        "errors and kills": [
            ("loss", ERROR, 1),
            ("rendezvous", KILL, 0),
            ("trial", KILL, 3),
            ("load", ERROR, 2),
            ("update", KILL, 1),
            ("save", ERROR, 0),
        ],
        "hangs": [("backward", HANG, 2), ("reduction", HANG, 0), ("validation", HANG, 3)],
    },
    TRANSFORMERS: {
        "errors, kills and out of memory": [
            ("forward", OUT_OF_MEMORY, 2),
            ("rendezvous", KILL, 1),
            ("loss", ERROR, 3),
            ("load", ERROR, 0),
            ("backward", OUT_OF_MEMORY, 0),
            ("update", KILL, 2),
            ("validation", ERROR, 1),
            ("save", KILL, 0),
        ],
        "hangs": [("backward", HANG, 2), ("update", HANG, 1)],
    },
}


def launches() -> Iterator[Launch]:
    """Return all launches of the whole table."""
    every = tuple(range(RANKS))
    groups = [*((rank,) for rank in every), (1, 3), every]
    steps = [(place, ranks) for place in (*PLACES[:5], "validation") for ranks in groups]
    yield in_the_process([*steps, ("save", (0,)), ("save", (2,))])
    kinds = ("reduction", 0), ("load", 0), ("reduction", 2), ("load", 2), ("reduction", 1), ("rendezvous", 0)
    each = [(place, OUT_OF_MEMORY, rank) for place, rank in (*kinds, ("reduction", 3), ("rendezvous", 2))]
    yield with_restarts("out of memory, restarts", each)
    for what in (ERROR, KILL, HANG):
        for rank in (0, 2):
            yield with_restarts(f"{what}, rank {rank}", [(place, what, rank) for place in _ORDER])
    for loop, parts in _PAIRWISE.items():
        for name, faults in parts.items():
            yield with_restarts(f"{loop}, {name}", faults, SMALLER if name == "smaller" else loop)


# --- running them


@dataclass(frozen=True)
class Row:
    """How one fault ended."""

    fault: Fault
    launch: str
    loop: str
    how: str
    stall: float
    over_rule: float
    next_step: float
    lost: int
    is_ok: bool


def judge(launch: Launch, folder: Path, events: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each fault of a launch, from what its ranks and its agent noted."""
    lines = [json.loads(line) for path in folder.glob("log_*") for line in path.read_text().splitlines()]
    lines.sort(key=lambda line: line["time"])
    steps = [line for line in lines if "fault" not in line]
    lost_in = {one["generation"]: one for one in events if one["kind"] == "rank_lost"}
    rows = []
    for fault in launch.faults:
        struck = [line for line in lines if line.get("fault") == fault.number]
        if {line["rank"] for line in struck} != set(fault.ranks):
            rows.append(Row(fault, launch.name, launch.loop, "did not strike", 0.0, 0.0, 0.0, 0, False))
            continue
        first = struck[0]
        after = [one for one in steps if one["rank"] == first["rank"] and one["time"] > first["time"]]
        before = max((one["steps"] for one in steps if one["time"] <= first["time"]), default=0)
        if not after:
            rows.append(Row(fault, launch.name, launch.loop, "no step followed", 0.0, 0.0, 0.0, 0, False))
            continue
        stall = next_step = after[0]["time"] - first["time"]
        how, is_named = "in the process", True
        if (now := after[0]["generation"]) > first["generation"]:
            end = lost_in[first["generation"]]
            how, stall = end["text"], end["time"] - first["time"]
            next_step = stall + after[0]["time"] - lost_in[now - 1]["time"]  # without those of a fault in between
            is_named = end["rank"] in fault.ranks and (fault.what == HANG or " hung" not in how)
            # where a pass holds collectives all ranks wait in it
            is_named |= fault.what == HANG and (first["waits"] or launch.loop != DDP)
        over = max(0.0, stall - first["rule"] - fault.seconds)
        is_ok = over <= _MOST_STALL and next_step - stall <= _MOST_START and is_named
        lost = max(0, before - after[0]["steps"] + 1)
        rows.append(Row(fault, launch.name, launch.loop, how, stall, over, next_step, lost, is_ok))
    return rows


def write_plan(launch: Launch, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps([asdict(one) for one in launch.faults]))


def digests(folder: Path) -> list[tuple[str, list[float]]]:
    """Return of each rank the SHA-256 of all that it trained, and its numbers."""
    return [
        (digest, numbers)
        for path in sorted(folder.glob("digest_*"))
        for digest, numbers in [json.loads(path.read_text())]
    ]


def are_same(loop: str, found: Sequence[tuple[str, list[float]]], plain: Sequence[tuple[str, list[float]]]) -> bool:
    """Return whether a launch ended as its training without faults does."""
    if loop != SMALLER or len(found) != len(plain):
        return len(plain) == RANKS and found == plain
    pairs = [(a, b) for own, other in zip(found, plain, strict=True) for a, b in zip(own[1], other[1], strict=True)]
    return bool(pairs) and all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in pairs)
