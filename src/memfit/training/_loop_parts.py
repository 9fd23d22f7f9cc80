"""What a ``Loop`` saves, and the settings that must not change between a checkpoint and its resume."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from memfit.errors import UsageError
from memfit.training._checkpoint import load_checkpoint, save_checkpoint
from memfit.training._identity import optimizer_identity
from memfit.training._stream import _KEPT, _KEPT_BY_WORKERS, KeyedOrder

#: Why a resume from an exported position is not exact.
GOES_ON = "the stream goes on where its state_dict says; what a shuffle buffer held may not come again"
_PLAIN = (int, float, str, bool, type(None))
_GROUP = re.compile(r"optimizer group (\d+), (\w+)")
#: What a schedule's state says again of its optimizer.
_OF_OPTIMIZER = frozenset({"base_lrs"})


class LoopParts:
    """The parts of a training by name, each with ``state_dict`` and ``load_state_dict``.

    An adapter to a framework makes another one of these.
    """

    #: The batches that are fetched before the one in hand is trained.
    look_ahead = 0

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)
        for name, part in self.parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise UsageError(
                    f"{name} is a {type(part).__name__}, which has no state.",
                    rule="a checkpoint holds parts that have state_dict() and load_state_dict(state).",
                    remedy=f"leave {name} out, or give it both",
                )

    def check(self) -> None:
        """Refuse what cannot be stopped and resumed."""
        if not self.optimizers():
            raise UsageError(
                "No optimizer was named.",
                rule="a checkpoint holds the parts of a training, and is written after an optimizer step.",
                remedy="pass model=model, optimizer=optimizer, and what else has a state",
            )

    def models(self) -> dict[str, torch.nn.Module]:
        return {name: one for name, one in self.parts.items() if isinstance(one, torch.nn.Module)}

    def wrappers(self) -> list[Any]:
        """Return the models as the loop calls them."""
        return list(self.models().values())

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [one for one in self.parts.values() if isinstance(one, torch.optim.Optimizer)]

    def schedules(self) -> list[Any]:
        return [one for one in self.parts.values() if isinstance(one, torch.optim.lr_scheduler.LRScheduler)]

    def save(self, path: Path) -> None:
        """Write the states into a folder."""
        save_checkpoint(path / "parts.pt", {name: part.state_dict() for name, part in self.parts.items()})

    def load(self, path: Path) -> None:
        """Give the parts the states that ``save`` wrote there."""
        state = load_checkpoint(path / "parts.pt")
        if state.keys() != self.parts.keys():
            raise UsageError(
                f"{path} holds the parts {sorted(state)}, and this training has {sorted(self.parts)}.",
                rule="a resume gives each part its state.",
                remedy="name the same parts, or pass another folder to start over",
            )
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    # --- settings

    def identity(self) -> dict[str, Any]:
        """Return the settings of optimizers and schedules, read before anything is loaded or trained."""
        found: dict[str, Any] = {}
        for number, optimizer in enumerate(self.optimizers()):
            own = optimizer_identity(optimizer, scheduled=bool(self.schedules()))
            own["learning_rate"] = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
            for name, value in own.items():
                if not name.endswith((", lr", ", initial_lr")):
                    found[_numbered(name, number)] = value
        for number, schedule in enumerate(self.schedules()):
            found |= {_numbered(name, number): value for name, value in _schedule_identity(schedule).items()}
        return found

    def take(self, settings: Mapping[str, Any]) -> None:
        """Give loaded optimizers and schedules these settings: a state that was loaded brings its own."""
        schedules = self.schedules()
        for number, optimizer in enumerate(self.optimizers()):
            for index, group in enumerate(optimizer.param_groups):
                if (rates := settings.get(_numbered("learning_rate", number))) is not None:
                    _move_rate(group, rates[index])
                for name, value in settings.items():
                    if (match := _GROUP.fullmatch(name)) and number == 0 and int(match[1]) == index:
                        group[match[2]] = tuple(value) if isinstance(value, list) else value
        for number, schedule in enumerate(schedules):
            schedule.base_lrs = [group.get("initial_lr", group["lr"]) for group in schedule.optimizer.param_groups]
            for name, value in settings.items():
                key = name.removeprefix(_numbered("schedule", number) + ", ")
                if key != name and key in vars(schedule):
                    setattr(schedule, key, value)

    # --- data

    def skip(self, loader: Any, count: int) -> Any:
        """Return what is left of a loader's next epoch after ``count`` batches, without making them if it can."""
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return itertools.islice(iter(loader), count, None)
        options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        if loader.num_workers:
            options |= {name: getattr(loader, name) for name in (*_KEPT_BY_WORKERS, "multiprocessing_context")}
        if loader.batch_sampler is None:
            options |= {"batch_size": None, "sampler": _Rest(loader.sampler, count)}
        else:
            options["batch_sampler"] = _Rest(loader.batch_sampler, count)
        return DataLoader(loader.dataset, collate_fn=loader.collate_fn, **options)

    def skip_ordered(self, loader: Any, order: KeyedOrder, num_samples: int, count: int) -> Any:
        """Return what is left of an epoch in a known order."""
        order.skip(num_samples)
        return loader

    def placed(self, batch: Any) -> Any:
        """Return a batch where the training has it, if not its loop but its loader brings it there."""
        return batch

    def enter_epoch(self, loader: Any, epoch: int) -> None:
        """Tell a loader the epoch, counted from 0, if it keeps one."""

    def dealt(self, count: int, before: int, now: int) -> int:
        """Return how many samples of an epoch each rank has had, if the ranks of now had dealt them."""
        return count * before // now

    def is_over(self, loader: Any) -> bool:
        """Return whether a stream is known to have given its last batch."""
        return False

    def source(self, loader: Any) -> Any:
        """Return what exports the position of a stream; None if nothing does."""
        data = getattr(loader, "dataset", None)
        alone = data if not getattr(loader, "num_workers", 0) else None
        return next((one for one in (loader, alone) if exports_position(one)), None)


def exports_position(stream: Any) -> bool:
    """Return whether a stream has ``state_dict()`` and ``load_state_dict(state)``; that of litData wants arguments."""
    if not (hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")):
        return False
    parameters = inspect.signature(stream.state_dict).parameters.values()
    return all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)


def order_of(loader: Any) -> KeyedOrder | None:
    """Return the order of a loader that a ``KeyedStream`` has made, also after a framework has wrapped it."""
    batches = getattr(loader, "batch_sampler", None)
    shared = getattr(batches, "batch_sampler", None)  # what Accelerate deals to several ranks
    found = (batches, shared, *(getattr(one, "sampler", None) for one in (batches, shared, loader)))
    return next((one for one in found if isinstance(one, KeyedOrder)), None)


def length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def is_stream(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def data_identity(loader: Any) -> dict[str, Any]:
    """Return what must not change of a loader between a checkpoint and its resume; workers may."""
    batches, data, order = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", loader), order_of(loader)
    sampler = order.sampler if order is not None else getattr(batches, "sampler", batches)
    size = getattr(batches, "batch_size", None) or getattr(loader, "batch_size", None)
    return {
        "num_samples": length_of(data),
        "batch_size": None if order is not None and batches is order else size,
        "drop_last": getattr(batches, "drop_last", None),
        "sampler": type(sampler).__name__,
    }


class _Rest(Sampler[Any]):
    """What is left of a sampler, once."""

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self.sampler, self.count = sampler, count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.sampler), self.count, None)


def _numbered(name: str, number: int) -> str:
    return f"{name} of {number + 1}" if number else name


def _move_rate(group: dict[str, Any], rate: float) -> None:
    """Give a group another learning rate, under a schedule in the proportion that this has reached."""
    if "initial_lr" not in group:
        group["lr"] = rate
        return
    before, group["initial_lr"] = group["initial_lr"], rate
    group["lr"] = group["lr"] * (rate / before) if before else rate


def _schedule_identity(schedule: Any) -> dict[str, Any]:
    """Return the plain values of a schedule that has not begun.

    >>> model = torch.nn.Linear(1, 1)
    >>> schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 10)
    >>> _schedule_identity(schedule)
    {'schedule': 'StepLR', 'schedule, step_size': 10, 'schedule, gamma': 0.1, 'schedule, last_epoch': 0}
    """
    found: dict[str, Any] = {"schedule": type(schedule).__name__}
    for name, value in schedule.state_dict().items():
        plain = isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(one, _PLAIN) for one in value))
        if plain and not name.startswith("_") and name not in _OF_OPTIMIZER | {"lr_lambdas"}:
            found[f"schedule, {name}"] = value
    for function in getattr(schedule, "lr_lambdas", ()):
        if isinstance(function, functools.partial):
            found |= {f"schedule, {key}": one for key, one in function.keywords.items() if isinstance(one, _PLAIN)}
    return found
