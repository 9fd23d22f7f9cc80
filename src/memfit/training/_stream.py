"""Draw by key, whatever loop trains: each random number is a function of the seed and of where the training is.

No random state is saved or put back. Order is a function of (seed, epoch), an item of (seed, epoch, index), a batch's
collation of (seed, epoch, indices), and what the model draws of (seed, step). Workers, evaluations and the draws of
others then change nothing, and a training may go on with another number of workers.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, default_convert

from memfit.errors import MemfitError, UsageError
from memfit.rundir import record
from memfit.training._loaders import remade
from memfit.training._process import preserved_rng, say
from memfit.training._ranks import first_line
from memfit.training._replay import digest_of
from memfit.training._workers import deaf_workers

#: The version of what is drawn under which key. Another one would be another training.
STREAM = 1
#: What stands in a key where an item has its index.
_ORDER, _COLLATION, _BATCH = -1, -2, -3
#: The most samples of a batch that are made to try a loader.
_NUM_TRIED = 8

#: NumPy generators that no ``keyed_rng`` uses now: one within another has its own.
_SPARE_BITS = [np.random.MT19937(0)]


@contextmanager
def keyed_rng(*key: int) -> Iterator[None]:
    """Inside, Python, NumPy and torch on the CPU draw from a stream of this key; afterwards they go on as before.
    NumPy's bit generator is exchanged, which takes a hundredth of the time of reading its state. NumPy then forgets the
    second of a pair of normal numbers."""
    python, torch_state, bits = random.getstate(), torch.get_rng_state(), get_bit_generator()
    own = _SPARE_BITS.pop() if _SPARE_BITS else np.random.MT19937(0)
    set_bit_generator(own)
    try:
        seed_key(*key)
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torch_state)
        set_bit_generator(bits)
        _SPARE_BITS.append(own)


def seed_key(*key: int) -> int:
    """Go on inside a ``keyed_rng`` with another key, three times faster than another one; return torch's seed."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=20).digest()
    seed = int.from_bytes(digest[8:16])
    random.seed(digest[:8])
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would queue one for every GPU
    np.random.seed(int.from_bytes(digest[16:]))
    return seed


class KeyedDataset(Dataset[Any]):
    """Makes a data set's random draws depend on (seed, epoch, index) alone, in whatever process they happen.

    With a ``KeyedSampler`` in a ``DataLoader``, a fit resumes in mid-epoch at once, and ``num_workers`` may change.

    Args:
        dataset: Its ``__getitem__`` may draw from the global generators of Python, NumPy and torch (on the CPU). Its
            ``set_epoch``, if any, is called in the process that makes an item.
        seed: Other seeds, other draws.

    Example:
        >>> class Noisy:
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         return index + torch.rand(())
        >>> data = KeyedDataset(Noisy(), seed=1)
        >>> loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=KeyedSampler(data, seed=1))
        >>> [batch.shape for batch in loader]
        [torch.Size([2]), torch.Size([2])]
        >>> data[(1, 3)] == data[(1, 3)], data[(1, 3)] == data[(2, 3)]
        (tensor(True), tensor(False))
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset = dataset
        self.seed = seed
        self._epoch: int | None = None
        #: What makes the items of a batch at once, which then draw by the key of their batch.
        self.together: Any = None

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set the epoch."""
        self._epoch = epoch
        if (set_epoch := getattr(self.dataset, "set_epoch", None)) is not None:
            set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> Any:
        """Return the item of an (epoch, index) from a ``KeyedSampler``; a bare index is of epoch 0."""
        epoch, index = self._enter(key)
        with keyed_rng(self.seed, epoch, *((_BATCH, *index) if isinstance(index, list) else (index,))):
            return self.dataset[index]

    def __getitems__(self, keys: Sequence[Any]) -> _Batch:
        entered = [self._enter(key) for key in keys]
        epoch, indices = entered[0][0], [index for _, index in entered]
        with keyed_rng(self.seed, epoch, _BATCH, *indices):
            if callable(self.together):
                batch = _Batch(self.together(indices))
            else:
                batch = _Batch()
                for index in indices:
                    seed_key(self.seed, epoch, index)
                    batch.append(self.dataset[index])
        batch.key = (epoch, _COLLATION, *indices)
        return batch

    def _enter(self, key: Any) -> tuple[int, Any]:
        if not isinstance(key, tuple):
            return 0, key
        if key[0] != self._epoch:  # in a worker that lives on from epoch to epoch
            self.set_epoch(key[0])
        return key

    @property
    def lengths(self) -> Any:
        """The data set's own, where it has any."""
        return self.dataset.lengths


class _Batch(list[Any]):
    key: tuple[Any, ...] = ()


class KeyedOrder(Sampler[Any]):
    """Gives what a sampler, or a batch sampler, gives under the key (seed, epoch), each index with its epoch. Indices
    are numbers, texts, or tuples and lists of them; arrays and tensors become lists."""

    def __init__(self, sampler: Any, seed: int, *, of_batches: bool = False) -> None:
        self.sampler, self.seed, self.of_batches = sampler, seed, of_batches
        self.epoch = self._skip = 0
        self._rank, self._size = 0, 1

    def deal(self, rank: int, size: int) -> None:
        """Give every ``size``-th sample (or batch) from ``rank`` on; the first ones again, so that all have as many.
        >>> order = KeyedOrder(torch.utils.data.SequentialSampler(range(5)), seed=3)
        >>> order.deal(1, 2)
        >>> list(order), len(order)
        ([(0, 1), (0, 3), (0, 0)], 3)
        """
        self._rank, self._size = rank, size

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of this epoch; another than before begins at its start."""
        if epoch != self.epoch:  # a framework may tell it again
            self.epoch, self._skip = epoch, 0

    def skip(self, count: int) -> None:
        """Leave the first ``count`` samples (of a batch sampler: batches) out of the next iteration."""
        self._skip = count

    def __len__(self) -> int:
        return -(-len(self.sampler) // self._size)

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.epoch, self._skip
        self._skip = 0
        order = self._order(epoch)
        if self._size > 1:
            count = -(-len(order) // self._size) * self._size
            order = list(itertools.islice(itertools.cycle(order), self._rank, count, self._size))
        for one in order[start:]:
            yield [(epoch, _index(index)) for index in one] if self.of_batches else (epoch, _index(one))

    def _order(self, epoch: int) -> list[Any]:
        # a batch sampler that is handed on by a framework may hold the one that draws
        inner = [self.sampler, getattr(self.sampler, "sampler", None), getattr(self.sampler, "batch_sampler", None)]
        with keyed_rng(self.seed, epoch, _ORDER):
            for one in inner:
                if hasattr(one, "set_epoch"):
                    one.set_epoch(epoch)
                if isinstance(generator := getattr(one, "generator", None), torch.Generator):
                    generator.manual_seed(int(torch.randint(2**62, ())))
            return list(self.sampler)


class KeyedSampler(KeyedOrder):
    """Orders each epoch by (seed, epoch) alone, so that an epoch can be entered anywhere.

    Args:
        data: What is sampled; only its length counts.
        seed: Other seeds, other orders.
        shuffle: False keeps the order of ``data``.

    Example:
        >>> sampler = KeyedSampler(range(5), seed=3)
        >>> whole = list(sampler)
        >>> sampler.skip(2)
        >>> list(sampler) == whole[2:], list(sampler) == whole
        (True, True)
    """

    def __init__(self, data: Sized, seed: int = 0, *, shuffle: bool = True) -> None:
        super().__init__(data, seed)
        self.shuffle = shuffle

    def _order(self, epoch: int) -> list[Any]:
        number = len(self.sampler)
        order = np.random.default_rng((self.seed, epoch)).permutation(number) if self.shuffle else np.arange(number)
        return order.tolist()  # type: ignore[no-any-return]


def _index(one: Any) -> Any:
    """Return an index as plain values, whose ``repr`` is the same in each process.
    >>> _index((np.int64(3), "left", torch.tensor([1, 2])))
    (3, 'left', [1, 2])
    """
    if isinstance(one, np.ndarray | np.generic | torch.Tensor):
        return one.tolist()
    if isinstance(one, tuple | list):
        return getattr(one, "_make", type(one))(map(_index, one))
    if isinstance(one, int | float | str | bytes | None):
        return one
    raise UsageError(
        f"The sampler gives a {type(one).__name__} as an index.",
        rule="exact: what an item draws is a function of seed, epoch and index, so an index is plain values.",
        remedy="give numbers, texts, or tuples of them",
    )


class KeyedCollate:
    """Lets a collation draw by the key of its batch."""

    def __init__(self, collate: Callable[[Any], Any], seed: int) -> None:
        self.collate = collate
        self.seed = seed

    def __call__(self, items: Any) -> Any:
        if not isinstance(items, _Batch):
            return self.collate(items)
        with keyed_rng(self.seed, *items.key):
            return self.collate(list(items))


class KeyedStream:
    """The random numbers of one training, for a loop that is not memfit's. Each rank draws its own numbers in the
    model; order, items and collation know no rank."""

    def __init__(self, seed: int, rank: int = 0) -> None:
        self.seed, self.rank = seed, rank

    def step(self, number: int) -> None:
        """Seed the global generators of Python, NumPy and torch, on every device, for the optimizer step ``number``."""
        # torch.manual_seed formats a traceback for each unused device
        seed = seed_key(self.seed, _ORDER, number, *[self.rank] * (self.rank > 0))
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


# --- a trial of a loader


def check_loader(loader: DataLoader[Any], allow: Collection[str] | None = ()) -> None:
    """Draw the order of two batches and make the first one, each twice under the same key; refuse what differs, unless
    ``allow`` names it. A loader that cannot be tried is reported, and its training goes on. ``allow`` is None in a
    Trainer, which allows all or nothing."""
    keyed, allowed = KeyedStream(0).loader(loader), allow or ()
    try:
        with preserved_rng():
            keys: Any = keyed.sampler if keyed.batch_sampler is None else keyed.batch_sampler
            order, again = (list(itertools.islice(keys, 2)) for _ in range(2))
            if "sampler" not in allowed and digest_of(order) != digest_of(again):
                cure = "let it draw from the global generators of torch, NumPy or Python, or from its own `generator`"
                raise _refused("The sampler gives another order under the same key.", cure, "sampler", allow)
            first, second = ([] if "data" in allowed else [_few(keyed, one) for one in order[:1]] for _ in range(2))
            if digest_of(first) != digest_of(second):
                cure = "draw from the global generators of torch, NumPy or Python, and read no clock"
                raise _refused("The first batch differs when it is made a second time.", cure, "data", allow)
    except MemfitError:
        raise
    except Exception as error:
        text = f"the training data could not be tried before the first step: {first_line(error)}"
        record("untried", text=text)
        say(text if allow is None else f"{text}; allow=('data',) leaves this out")


def _few(loader: DataLoader[Any], keys: Any) -> Any:
    """Make a batch of its first samples; of all where it cannot be made of fewer."""
    data: Any = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(data[keys])
    with suppress(Exception):
        return loader.collate_fn(data.__getitems__(list(keys)[:_NUM_TRIED]))
    return loader.collate_fn(data.__getitems__(list(keys)))


def _refused(what: str, cure: str, name: str, allow: Collection[str] | None) -> UsageError:
    way = "allow_inexact=True" if allow is None else f"allow={(*sorted(allow), name)!r}"
    return UsageError(
        what,
        rule="exact: order and batches are functions of the seed and the position, so a second draw gives the same.",
        remedy=f"{cure}; or pass {way}",
    )
