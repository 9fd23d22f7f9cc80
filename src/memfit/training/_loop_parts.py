"""What a ``Loop`` saves, and the settings that must not change between a checkpoint and its resume."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from memfit.errors import UsageError
from memfit.training._checkpoint import load_checkpoint, save_checkpoint
from memfit.training._identity import optimizer_identity
from memfit.training._loaders import generators_of, remade, samplers_of
from memfit.training._process import rng_state, set_rng_state
from memfit.training._stream import KeyedOrder, order_of

#: Why a resume from an exported position is not exact.
GOES_ON = "the stream goes on where its state_dict says; with a shuffle buffer, some samples come twice, some never"
_PLAIN = (int, float, str, bool, type(None))
_GROUP = re.compile(r"optimizer group (\d+), (?!params$)(\w+)")
#: What a schedule's state says again of its optimizer.
_OF_OPTIMIZER = frozenset({"base_lrs"})
#: Whose samplers make an order again; without the random state, those that draw from a seed and the epoch's number.
_KNOWN = frozenset({"accelerate", "lightning", "torch", "torchdata"})
_BY_EPOCH = re.compile("Sequential|Batch|Distributed|Seedable")


class LoopParts:
    """The parts of a training by name, each with ``state_dict`` and ``load_state_dict``. An adapter overrides ``save``
    and ``load`` where its framework writes, by its own files on each rank; ``placed``, ``skip``, ``enter_epoch``,
    ``source`` where its loaders differ; ``look_ahead`` where it fetches ahead. It calls ``check`` itself."""

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

    def check(self, allow: Collection[str] = (), others: Iterable[Any] = ()) -> None:
        """Refuse an optimizer that is missing, or that trains or is moved by what no checkpoint holds."""
        parts, optimizers = [*self.parts.values(), *self.schedules(), *others], self.optimizers()
        held = {id(one) for model in self.models().values() for one in model.parameters()}
        states = [one.state_dict() for one in parts if not isinstance(one, torch.nn.Module | torch.optim.Optimizer)]
        held |= {one.data_ptr() for one in tree_leaves(states) if isinstance(one, torch.Tensor)}
        weights = [one for made in optimizers for group in made.param_groups for one in group["params"]]
        weights = [one for one in weights if one.requires_grad and id(one) not in held]
        lost = [tuple(one.shape) for one in weights if one.data_ptr() not in held]
        moved = [id(one.optimizer.param_groups) for one in parts if hasattr(one, "step") and hasattr(one, "optimizer")]
        faults = {
            "no_optimizer": "" if optimizers else "No optimizer was named.",
            "unsaved_weights": lost and f"An optimizer trains weights of no saved model, of the shapes {lost[:3]}.",
            "unsaved_schedule": "A schedule that is not saved moves an optimizer's learning rate."
            * any("initial_lr" in one.param_groups[0] and id(one.param_groups) not in moved for one in optimizers),
        }
        for what in [what for name, what in faults.items() if what and name not in allow]:
            raise UsageError(
                str(what),
                rule="a checkpoint holds the parts of a training that are named; all else begins anew at a resume.",
                remedy="name model, optimizer, schedule, and what else has a state, or give them to the framework; or, "
                'if that may begin anew, pass allow=("unsaved_weights",) or ("unsaved_schedule",)',
            )

    def models(self) -> dict[str, torch.nn.Module]:
        return {name: one for name, one in self.parts.items() if isinstance(one, torch.nn.Module)}

    def wrappers(self) -> list[Any]:
        return list(self.models().values())

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [one for one in self.parts.values() if isinstance(one, torch.optim.Optimizer)]

    def schedules(self) -> list[Any]:
        return [one for one in self.parts.values() if isinstance(one, torch.optim.lr_scheduler.LRScheduler)]

    def save(self, path: Path) -> None:
        save_checkpoint(path / "parts.pt", {name: part.state_dict() for name, part in self.parts.items()})

    def load(self, path: Path) -> None:
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
            own["learning_rate"] = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
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

    @staticmethod
    def draws(loader: Any) -> dict[str, Any]:
        """Return what begins an epoch of a loader again: the random state, and that of the loader's own generators."""
        return {"start": rng_state(), "generators": [one.get_state() for one in generators_of(loader)]}

    @staticmethod
    def draw_again(loader: Any, draws: Mapping[str, Any]) -> None:
        set_rng_state(draws["start"])
        for generator, state in zip(generators_of(loader), draws["generators"], strict=False):
            generator.set_state(state)

    @staticmethod
    def order_again(loader: Any, *, draws_again: bool = True) -> str:
        """Return what is true of an epoch's order in a new process, where the random state may not be put back."""
        parts = samplers_of(loader) if isinstance(loader, DataLoader) else [loader] * (type(loader) is not list)
        for kind in map(type, parts):
            is_known = kind.__module__.partition(".")[0] in _KNOWN and (draws_again or _BY_EPOCH.search(kind.__name__))
            if not is_known:
                goes_on = f"the epoch goes on in the order that {kind.__name__} gives now"
                return f"{goes_on}: if that is another than before, some samples come twice in it, and some not at all"
        return "the order goes on, and what the data draw at random is not the same"

    def skip(self, loader: Any, count: int) -> Any:
        """Return what is left of a loader's next epoch after ``count`` batches, without making them if it can."""
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return itertools.islice(iter(loader), count, None)
        if loader.batch_sampler is None:
            return remade(loader, batch_size=None, sampler=itertools.islice(loader.sampler, count, None))
        return remade(loader, batch_sampler=itertools.islice(loader.batch_sampler, count, None))

    def skip_ordered(self, loader: Any, order: KeyedOrder, num_samples: int, count: int) -> Any:
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


def length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except Exception:  # some say it by another type than TypeError
        return None


def is_stream(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def data_identity(loader: Any) -> dict[str, Any]:
    """Return what must not change of a loader between a checkpoint and its resume; workers may."""
    batches, data, order = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", loader), order_of(loader)
    batches = getattr(batches, "batch_sampler", None) if hasattr(batches, "skip_batches") else batches  # the same data
    sampler = order.sampler if order is not None else getattr(batches, "sampler", batches)
    size = getattr(batches, "batch_size", None) or getattr(loader, "batch_size", None)
    return {
        "num_samples": length_of(data),
        "batch_size": None if order is not None and batches is order else size,
        "drop_last": getattr(batches, "drop_last", None),
        "sampler": type(sampler).__name__,
    }


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
    >>> schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1), 10)
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
