"""Choose combinations such that each pair of values of two dimensions is in one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

#: What is combined with each moment, and with each other.
DIMENSIONS: Mapping[str, Sequence[Any]] = {
    "loading": ({"workers": 0}, {"workers": 2}, {"workers": 2, "persistent": True}),
    "masks": (False, True),
    "dropout": (0.0, 0.1),
    "warmup": (0, 4),
    "accumulation": (1, 2, 5),
    "signal": ("KILL", "TERM"),
}


def pairwise(dimensions: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return combinations that hold each pair, most pairs first.

    Example:
        >>> rows = pairwise({"a": (0, 1), "b": (0, 1), "c": (0, 1)})
        >>> len(rows)  # of 8
        4
    """
    names = list(dimensions)
    indices = [range(len(dimensions[name])) for name in names]
    left = {
        ((one, i), (other, j))
        for one, other in combinations(range(len(names)), 2)
        for i, j in product(indices[one], indices[other])
    }
    found = []
    while left:
        first = min(left)
        chosen = dict(first)
        for place in range(len(names)):
            if place not in chosen:
                chosen[place] = max(indices[place], key=lambda value: _new(left, chosen | {place: value}))
        left -= _pairs(chosen)
        found.append({names[place]: dimensions[names[place]][value] for place, value in chosen.items()})
    return found


def _pairs(chosen: Mapping[int, int]) -> set[Any]:
    return set(combinations(sorted(chosen.items()), 2))


def _new(left: set[Any], chosen: Mapping[int, int]) -> int:
    return len(_pairs(chosen) & left)
