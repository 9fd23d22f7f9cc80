"""Which rank of a group was lost first, and which errors of the others only follow from that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Line, Stream
from memfit.units import list_some

#: The heading of errors in collectives: a rank that prints one waited for another.
_WAITED = "collective_timeout"
#: torchrun's table of ranks that failed. Source: torch/distributed/elastic/multiprocessing/errors/__init__.py.
_IN_TABLE = re.compile(r"^\s*rank\s*: (\d{1,6}) \(local_rank")

#: The phase of a rank's places, where it is not the training.
_PHASES = {"begin": "build", "load": "build", "save": "checkpoint", "sealed": "checkpoint", "validate": "validate"}


def lost_ranks(events: Iterable[tuple[Line, Mapping[str, Any]]]) -> Iterator[Sign]:
    """Yield a sign for each rank that was lost and after which its group began again, as the group's agent recorded."""
    lost: dict[str, tuple[Line, Mapping[str, Any]]] = {}
    for line, event in events:
        job = str(event.get("job"))
        if event.get("kind") == "rank_lost":
            lost[job] = line, event
        elif event.get("kind") == "ranks_again":
            first, told = lost.pop(job, (line, event))
            place, rank = told.get("place"), told.get("rank")
            values = {"job": job, "text": str(told.get("text")).removeprefix(f"{job} ")}
            values |= {"phase": _PHASES.get(str(place), "train")} if place else {}
            yield Sign("rank_lost", (first,), values | ({"rank": rank} if isinstance(rank, int) else {}))


def explain_lost(signs: Sequence[Sign]) -> list[str]:
    """Return for each job which ranks were lost, how often its group began again, and whether it completed."""
    lost: dict[str, list[str]] = {}
    for one in signs:
        if one.name == "rank_lost":
            lost.setdefault(one.values["job"], []).append(one.values["text"])
    done = {one.values.get("job") for one in signs if one.name == "success"}
    return [
        f"{job}: {list_some(texts)}; errors of other ranks follow from that. The group began again "
        f"{'once' if len(texts) == 1 else f'{len(texts)} times'}{', and the job completed' if job in done else ''}."
        for job, texts in lost.items()
    ]


def explain_group(
    best: Sign, first: int | None, signs: Sequence[Sign], streams: Sequence[Stream]
) -> tuple[int | None, str]:
    """Return the rank that was lost first, and a note on the others; ``first`` is the rank that the cause names."""
    said = [line.rank for one in signs if one.name == _WAITED for line in one.lines[:1]]
    waited = {rank for rank in said if rank is not None}
    if not said or (best.name != _WAITED and not waited - {first}):
        return first, ""
    if best.name != _WAITED:
        name = "one rank" if first is None else f"rank {first}"
        others = waited - {first}
        says = "say" if len(others) > 1 else "says"
        return first, f"{name} was lost first; what {_names(others)} {says} of a collective follows from that."
    lines = [line for stream in streams for line in stream.lines]
    known = {line.rank for line in lines if line.rank is not None}
    known |= {int(found[1]) for line in lines if (found := _IN_TABLE.match(line.text))}
    silent = known - waited
    if not waited or not silent:
        return first, ""
    note = f"{_names(waited)} only waited for a peer; {_names(silent)} did not say so: look there first."
    return min(silent) if len(silent) == 1 else None, note


def _names(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {list_some([str(one) for one in sorted(ranks)])}"
