"""Which rank of a group was lost first, and which errors of the others only follow from that."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Stream
from memfit.units import list_some

#: The heading of errors in collectives: a rank that prints one waited for another.
_WAITED = "collective_timeout"
#: torchrun's table of ranks that failed. Source: torch/distributed/elastic/multiprocessing/errors/__init__.py.
_IN_TABLE = re.compile(r"^\s*rank\s*: (\d{1,6}) \(local_rank")


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
