"""One remedy: what to change, what it saves, what it costs in speed, and whether it helps at all."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

#: What a remedy costs in speed, the cheapest first.
Cost = Literal[
    "none",
    "hardly any",
    "a few per cent",
    "5 to 15 %",
    "25 to 33 %",
    "fewer devices at once",
    "not known",
    "another training",
]
COSTS: tuple[Cost, ...] = get_args(Cost)
Place = Literal["host", "device", "shm", "none"]


@dataclass(frozen=True)
class Remedy:
    """One thing to do.

    Attributes:
        title: What, in words.
        setting: As it is written: a directive, an option, a line of code; empty when there is none.
        cost: What it costs in speed.
        reason: Why it helps, or why not, with numbers.
        place: Which memory it concerns.
        saves_bytes: The room that it makes: bytes that are needed less, or may be used more; None when not known.
        enough: Whether it is enough by itself; None when not known.
        helps: False for what is often advised and would change nothing here.

    >>> Remedy("ask for more", "--mem=8G", "none", "it was killed at 4 GiB", "host", 4 << 30).to_dict()["cost"]
    'none'
    """

    title: str
    setting: str = ""
    cost: Cost = "none"
    reason: str = ""
    place: Place = "none"
    saves_bytes: int | None = None
    enough: bool | None = None
    helps: bool = True

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)


def by_cost(remedies: list[Remedy]) -> list[Remedy]:
    """What helps before what does not, the cheapest first; among equals, what is enough by itself.

    >>> one, two = Remedy("a", cost="25 to 33 %"), Remedy("b", cost="none")
    >>> [remedy.title for remedy in by_cost([one, two, Remedy("c", helps=False)])]
    ['b', 'a', 'c']
    """
    return sorted(remedies, key=lambda one: (not one.helps, COSTS.index(one.cost), one.enough is not True))
