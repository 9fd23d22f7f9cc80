"""Settings of the wrong type or range, as errors that say what to pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from memfit.errors import UsageError, nearest

P = ParamSpec("P")
T = TypeVar("T")

#: Compared by name: importing torch.distributed.fsdp only to compare takes seconds.
_RANK_CLASSES = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "ReplicateModule"})


def whole_number(name: str, value: Any, *, least: int, why: str, most: int | None = None) -> None:
    """Refuse what is no whole number from ``least`` to ``most``.

    >>> whole_number("seed", "3", least=0, why="it seeds the generators")
    Traceback (most recent call last):
    memfit.errors.UsageError: seed is '3'.
      rule: it seeds the generators: a whole number of at least 0.
      do:   pass for example seed=0
    """
    is_whole = isinstance(value, int | np.integer) and value is not True and value is not False
    if is_whole and least <= value <= (value if most is None else most):
        return
    bound = f"at least {least}" if most is None else f"{least} to {most}"
    raise UsageError(
        f"{name} is {value!r}.",
        rule=f"{why}: a whole number {f'from {bound}' if most else f'of {bound}'}.",
        remedy=f"pass for example {name}={least}",
    )


def number(name: str, value: Any, *, why: str, example: str, zero: bool = False) -> None:
    """Refuse what is no number above 0, or from 0 up if ``zero`` is allowed."""
    is_number = isinstance(value, int | float | np.number) and value is not True and value is not False
    if is_number and (value > 0 or (zero and value == 0)):
        return
    bound = "a number from 0 up" if zero else "a number above 0"
    raise UsageError(f"{name} is {value!r}.", rule=f"{why}: {bound}.", remedy=f"pass for example {example}")


def of_type(name: str, value: Any, kind: type | tuple[type, ...], *, rule: str, example: str) -> None:
    """Refuse another kind of object."""
    if not isinstance(value, kind):
        text = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r:.80} ({type(value).__name__})"
        raise UsageError(f"{name} is {text}.", rule=rule, remedy=f"pass for example {example}")


def known_arguments(call: Callable[P, T]) -> Callable[P, T]:
    """Refuse an argument that a call does not have, and name the nearest one.

    >>> known_arguments(lambda num_epochs: None)(epochs=3)
    Traceback (most recent call last):
    memfit.errors.UsageError: There is no argument 'epochs'.
      rule: the arguments are num_epochs.
      do:   did you mean 'num_epochs'?
    """
    known = [name for name in inspect.signature(call).parameters if name != "self"]

    @functools.wraps(call)
    def checked(*args: P.args, **settings: P.kwargs) -> T:
        for name in settings:
            if name not in known:
                raise UsageError(
                    f"There is no argument '{name}'.",
                    rule=f"the arguments are {', '.join(known)}.",
                    remedy=nearest(name, known),
                )
        return call(*args, **settings)

    return checked


def check_parts(model: Any, optimizer: Any, loss: Any, split: Any) -> None:
    """Refuse a model, optimizer, loss or split that is something else, arguments in another order above all."""
    of_type("the model", model, torch.nn.Module, rule="it is a torch.nn.Module.", example="torch.nn.Linear(8, 1)")
    of_type(
        "the optimizer",
        optimizer,
        torch.optim.Optimizer,
        rule="it is one that was made over the model's parameters.",
        example="torch.optim.AdamW(model.parameters())",
    )
    _refuse_ranks(model)
    of_torch = getattr(loss, "__module__", "") in ("torch.nn.modules.loss", "torch.nn.functional")
    if not callable(loss) or isinstance(loss, type) or of_torch:
        example = "loss=squared, with: def squared(model, batch): x, y = batch; "
        example += "return torch.nn.functional.mse_loss(model(x), y, reduction='sum'), len(x)"
        of_type("the loss", loss, (), rule="loss(model, batch) returns a sum and its weight.", example=example)
    if split is not None and not (hasattr(split, "count") and hasattr(split, "take") and not isinstance(split, type)):
        of_type(
            "split", split, (), rule="it has count(batch) and take(batch, start, stop).", example="split=BySample()"
        )
    if isinstance(split, str):  # a text has a count of its own
        of_type("split", split, (), rule="it is an object and no name.", example="split=memfit.training.WHOLE")


def _refuse_ranks(model: torch.nn.Module) -> None:
    """Refuse a model that other processes train too; ``DataParallel`` is one process."""
    found = [
        (name, kind.__name__)
        for name, module in model.named_modules()
        for kind in type(module).__mro__
        if kind.__name__ in _RANK_CLASSES
    ]
    found += [(name, "DTensor") for name, one in model.named_parameters() if type(one).__name__ == "DTensor"]
    if found:
        name, kind_name = found[0]
        raise UsageError(
            f"{f'{name!r} in the model' if name else 'The model'} is a {kind_name}: several ranks train it.",
            rule="memfit splits and repeats a step in one process; the other ranks would drift apart or wait for ever.",
            remedy="pass the plain model and train in one process; or keep a loop of your own for several ranks, "
            "without SafeStep and Trainer",
        )
