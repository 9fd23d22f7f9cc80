"""Read how a loader is set: a plan keeps it, a training records it, and a run compares the two."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

_SETTINGS = {"workers": "num_workers", "prefetch": "prefetch_factor", "persistent workers": "persistent_workers"}


def batch_size_of(loader: Any) -> int | None:
    own, of_sampler = (getattr(one, "batch_size", None) for one in (loader, getattr(loader, "batch_sampler", None)))
    return int(own or of_sampler or 0) or None


def loader_settings(loader: Any, of: str = "") -> dict[str, int | None]:
    """Return the settings of a loader that its memory follows from, by name."""
    if loader is None:
        return {of: None}
    if not hasattr(loader, "num_workers"):
        return {}
    data = getattr(loader, "dataset", getattr(loader, "examples", None))
    found: dict[str, int | None] = {"samples": None, "batch": batch_size_of(loader)}
    with suppress(TypeError):  # a stream has no length
        found["samples"] = None if data is None else len(data)
    found |= {name: getattr(loader, attribute, None) for name, attribute in _SETTINGS.items()}
    return {of: True} | {f"{of} {name}": value for name, value in found.items()} if of else found
