"""Look into a loader: what it is made of, the generators that it draws from, and one like it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

#: What a loader made anew keeps of the old one.
_KEPT = ("num_workers", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn", "generator", "in_order")
_KEPT_BY_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context")


def remade(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a loader like this one with these options changed, which have to say how it makes its batches."""
    options: dict[str, Any] = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    options |= {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)} | changes
    if options["num_workers"]:
        options = {name: getattr(loader, name) for name in _KEPT_BY_WORKERS} | options
    return DataLoader(**options)


def parts_of(batches: Any) -> list[Any]:
    """Return the batches and what a ``DataLoader`` is made of, each once."""
    found = [batches, getattr(batches, "dataset", None), *samplers_of(batches)]
    return list({id(one): one for one in found}.values())


def samplers_of(batches: Any) -> list[Any]:
    """Return the samplers that order the samples of a loader, also those that another one holds."""
    held = [getattr(batches, name, None) for name in ("sampler", "batch_sampler")]
    return [part for one in held if one is not None for part in (one, *samplers_of(one))]


def generators_of(batches: Any) -> list[torch.Generator]:
    """Return the ``generator=`` of a loader and its samplers, each once."""
    held = [getattr(part, "generator", None) for part in parts_of(batches)]
    held.append(getattr(batches, "synchronized_generator", None))  # of Accelerate, on several ranks
    return list({id(one): one for one in held if isinstance(one, torch.Generator)}.values())


@contextmanager
def preserved_generators(batches: Any) -> Iterator[None]:
    """Put the generators of loader and samplers back afterwards."""
    states = [(generator, generator.get_state()) for generator in generators_of(batches)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
