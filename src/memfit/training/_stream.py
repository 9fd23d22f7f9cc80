"""Make every random number of a training a function of its seed and position, whatever loop trains.

Beside what data draw by key (``_keyed``), the model's draws are a function of (seed, step). A training may then go on
with another number of workers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_convert

from memfit.errors import UsageError
from memfit.training._keyed import ORDER, KeyedCollate, KeyedDataset, KeyedOrder, seed_key
from memfit.training._loaders import remade
from memfit.training._workers import deaf_workers

#: The version of what is drawn under which key. Another one would be another training.
STREAM = 1


class KeyedStream:
    """The random numbers of one training, for a loop that is not memfit's. Each rank draws its own numbers in the
    model; order, items and collation know no rank."""

    def __init__(self, seed: int, rank: int = 0) -> None:
        self.seed, self.rank = seed, rank

    def step(self, number: int) -> None:
        """Seed the global generators of Python, NumPy and torch, on every device, for the optimizer step ``number``."""
        # torch.manual_seed formats a traceback for each unused device
        seed = seed_key(self.seed, ORDER, number, *[self.rank] * (self.rank > 0))
        for device in (torch.cuda, torch.xpu):
            if device.is_initialized():
                device.manual_seed_all(seed)

    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader that gives the same samples under keys, by workers that no stop signal reaches. A loader
        that ``why_not_keyed`` has a word on is refused. One over ``KeyedDataset`` and ``KeyedSampler`` keeps both."""
        if order_of(loader) is not None:
            return loader
        if (why := why_not_keyed(loader)) is not None:
            raise UsageError(
                why[0],
                rule="exact: each sample is a function of seed, epoch and index, drawn in an order that is known.",
                remedy=why[1],
            )
        items, order = loader.dataset, loader.sampler
        if not isinstance(items, KeyedDataset) or not isinstance(order, KeyedOrder):
            items, order = KeyedDataset(items, self.seed), KeyedOrder(order, self.seed)
            items.together = getattr(loader.dataset, "__getitems__", None)
        options: dict[str, Any] = {"dataset": items, "collate_fn": KeyedCollate(loader.collate_fn, self.seed)}
        if loader.batch_sampler is None or (type(loader.batch_sampler) is BatchSampler and loader.batch_size):
            options |= {"sampler": order, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
        else:
            options["batch_sampler"] = KeyedOrder(loader.batch_sampler, self.seed, of_batches=True)
        made = remade(loader, **options)
        deaf_workers(made)
        return made


def stream_identity(stream: KeyedStream | None) -> dict[str, Any]:
    """Return what of a training's random numbers must not change between a checkpoint and its resume; None: no keys.
    With another number of threads the kernels of a CPU add in another order.
    >>> sorted(stream_identity(KeyedStream(1))), set(stream_identity(None).values())
    (['num_threads', 'seed', 'stream'], {None})
    """
    if stream is None:
        return {"seed": None, "stream": None, "num_threads": None}
    return {"seed": stream.seed, "stream": STREAM, "num_threads": torch.get_num_threads()}


def order_of(loader: Any) -> KeyedOrder | None:
    """Return the order of a loader that a ``KeyedStream`` has made, also after a framework has wrapped it."""
    if not isinstance(getattr(loader, "collate_fn", None), KeyedCollate):
        return None
    batches = getattr(loader, "batch_sampler", None)
    shared = getattr(batches, "batch_sampler", None)  # what Accelerate deals to several ranks
    found = (batches, shared, *(getattr(one, "sampler", None) for one in (batches, shared, loader)))
    return next((one for one in found if isinstance(one, KeyedOrder)), None)


def why_not_keyed(loader: Any) -> tuple[str, str] | None:
    """Return why a loader's samples can have no keys, and a remedy; None if they can."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        kind = type(getattr(loader, "dataset", loader)).__name__
        why = f"The training data are a stream ({kind}): their samples have no index."
        return why, "only stop and resume such a training (the step before exact), or give its data an index"
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "The training loader has in_order=False.", "leave it at its default"
    if hasattr(loader, "state_dict") or type(loader).__iter__ is not DataLoader.__iter__:
        why = f"The training loader ({type(loader).__name__}) iterates, or keeps a position, in a way of its own."
        return why, "pass a plain torch.utils.data.DataLoader: its position is kept for it"
    if loader.batch_size is None and loader.batch_sampler is None and loader.collate_fn is not default_convert:
        why = "The training loader has batch_size=None and a collate_fn."
        return why, "let the data set make what its collate_fn makes, or pass a batch_sampler"
    try:
        len(loader)
    except Exception:
        why = "The training loader's sampler has no length, so it may have no end."
        return why, "give it a __len__: the samples of an epoch"
    return None
