"""Make the loaders that a stage names, in a child process, and forecast their memory and that of changed ones."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, NoReturn

from memfit.errors import UsageError
from memfit.jobs import call_in_child, load_target
from memfit.memory import Footprint
from memfit.pipeline._contract import load_workload
from memfit.pipeline._order import Order
from memfit.planning import Line, Variant, list_loader_lines
from memfit.rundir import batch_size_of, loader_settings
from memfit.units import format_count

_SECONDS = 120  # loaders are made and looked at so long at most; changed ones only in the first half of that time
#: Who runs the training, by what has been imported where the loaders are made.
_LOOPS: dict[str, Literal["huggingface", "lightning"]] = {
    "lightning.pytorch": "lightning",
    "transformers.trainer": "huggingface",
}


def ask_of_loaders(
    order: Order, function: str, num_tasks: int, num_ranks: int, accumulated: int
) -> tuple[dict[str, Any], list[Line], list[Variant]]:
    """Return the facts of loaders that a function makes, the lines of one rank, and those of changed loaders.

    ``num_tasks`` counts the ranks of a node, which share the items of the data, and ``accumulated`` the batches of an
    update as it is. The function finds ``num_ranks`` in the variable ``WORLD_SIZE``.
    """
    own = {"function": function, "target": order.settings.target, "params": dict(order.params), "num_tasks": num_tasks}
    env = {**os.environ, **order.env, "WORLD_SIZE": str(num_ranks)}
    found = call_in_child(f"{__name__}:loaders_in_child", own, env=env)
    lines, *others = [_lines(one, found) for one in found["loaders"]]
    variants = []
    for one, changed in zip(found["loaders"][1:], others, strict=True):
        if one["workers"] < found["workers"]:
            name = format_count(one["workers"], "worker")
            cost = f"slower where loading limits the step: it had {found['workers']}"
        else:
            name = f"batch {one['batch']} x {accumulated * found['batch'] // one['batch']} accumulated"
            cost = "the same global batch, in more and smaller passes"
        variants.append(Variant(name, cost, tuple(changed)))
    return found, lines, variants


def _lines(one: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Line]:
    train, both = (Footprint.from_dict(one[name]) for name in ("train", "both"))
    return list(list_loader_lines(train, both, one["workers"], facts["num_tasks"]))


def loaders_in_child(function: str, target: str, params: Mapping[str, Any], num_tasks: int) -> dict[str, Any]:
    """Make loaders; return their numbers, and what the processes of a node take with them and with smaller ones."""
    from memfit.data import LoaderUse, host_footprint

    make = load_target(function)
    values = load_workload(target).params.model_validate(params) if target else dict(params)
    known = [loop for module, loop in _LOOPS.items() if module in sys.modules]
    use = LoaderUse(num_ranks=num_tasks, loop=known[0] if known else "plain")
    started = time.monotonic()
    with _limited(function):
        made = make(values)
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise UsageError(
                f"{function} returned a {type(made).__name__}, not two loaders.",
                rule="it returns the loader of the training and that of the validation, or None for the second.",
                remedy="end it with: return train, valid",
            )
        loaders: list[dict[str, Any]] = []
        for workers, batch, (train, valid) in _changed(*made):
            if loaders and time.monotonic() > started + _SECONDS / 2:
                break
            pairs = {"train": (train, None), "both": (train, valid)}
            sizes = {name: host_footprint(*pair, use).to_dict() for name, pair in pairs.items()}
            loaders.append({"workers": workers, "batch": batch, **sizes})
    samples = [None if one is None else _num_samples(one) for one in made]
    return {
        "workers": loaders[0]["workers"],
        "batch": loaders[0]["batch"],
        "samples": samples[0],
        "valid": samples[1],
        "drops": bool(getattr(made[0], "drop_last", False)),
        "num_tasks": num_tasks,
        "settings": loader_settings(made[0]) | loader_settings(made[1], "validation"),
        "loaders": loaders,
    }


def _num_samples(loader: Any) -> int:
    data = getattr(loader, "dataset", getattr(loader, "examples", None))
    return len(loader) * (batch_size_of(loader) or 0) if data is None else len(data)


def _changed(train: Any, valid: Any) -> Iterator[tuple[int, int, tuple[Any, Any]]]:
    """Yield workers, batch and loaders: as they are, then those of a ``DataLoader`` with fewer, or smaller batches."""
    workers, batch = int(getattr(train, "num_workers", 0)), batch_size_of(train) or 0
    yield workers, batch, (train, valid)
    if not hasattr(train, "prefetch_factor"):
        return
    for fewer in dict.fromkeys(number for number in (workers // 2, 1, 0) if number < workers):
        yield fewer, batch, (copy_loader(train, fewer), valid and copy_loader(valid, fewer))
    for parts in (2, 4):
        if train.batch_size and batch % parts == 0:
            yield workers, batch // parts, (copy_loader(train, workers, batch // parts), valid)


def copy_loader(loader: Any, most_workers: int, batch: int | None = None) -> Any:
    """Return a copy of a ``DataLoader`` with at most so many workers; it refuses to have these set later."""
    made, workers = copy.copy(loader), min(most_workers, loader.num_workers)
    vars(made).update(num_workers=workers, batch_size=batch or loader.batch_size)
    if workers == 0:
        vars(made).update(prefetch_factor=None, persistent_workers=False)
    return made


@contextmanager
def _limited(function: str) -> Iterator[None]:
    """Raise UsageError in this process's main thread after a time."""

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        raise UsageError(
            f"the loaders of {function} were not made and looked at within {_SECONDS} s.",
            rule="a plan makes the loaders of one rank, and a batch of each.",
            remedy="let it return loaders of a sample; or declare the memory of a rank: --set resources.memory=8GiB",
        )

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
