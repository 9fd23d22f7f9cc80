"""Settings of the wrong type or range, as errors that say what to pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from memfit.errors import UsageError, nearest

P = ParamSpec("P")
T = TypeVar("T")

#: How records of settings are checked: no value is converted.
STRICT = ConfigDict(arbitrary_types_allowed=True, strict=True)

#: Compared by name: importing torch.distributed.fsdp only to compare takes seconds.
_RANK_CLASSES = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "ReplicateModule"})


def checked(call: Callable[P, T], *args: P.args, **settings: P.kwargs) -> T:
    """Make a pydantic record; a setting that it refuses is named with what it is.

    Raises:
        UsageError: For the first such setting.
    """
    try:
        return call(*args, **settings)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
    raise bad_setting(str(details["loc"][0]), details["input"], details["msg"].replace("Input should be", "it is"))


def check_setting(name: str, value: Any, kind: Any) -> None:
    """Refuse a value that is none of an annotated type.

    >>> check_setting("seed", "3", int)
    Traceback (most recent call last):
    memfit.errors.UsageError: seed is '3' (str).
      rule: it is a valid integer.
      do:   set seed to another value
    """
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        text = " or ".join(dict.fromkeys(one["msg"] for one in error.errors(include_url=False)))
        raise bad_setting(name, value, text.replace("Input should be", "it is")) from None


def bad_setting(name: str, value: Any, rule: str, remedy: str = "") -> UsageError:
    """Return the error for a setting, with its value and type."""
    text = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r:.80} ({type(value).__name__})"
    return UsageError(f"{name} is {text}.", rule=f"{rule}.", remedy=remedy or f"set {name} to another value")


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
    def wrapped(*args: P.args, **settings: P.kwargs) -> T:
        for name in settings:
            if name not in known:
                raise UsageError(
                    f"There is no argument '{name}'.",
                    rule=f"the arguments are {', '.join(known)}.",
                    remedy=nearest(name, known),
                )
        return call(*args, **settings)

    return wrapped


def check_parts(model: Any, optimizer: Any, loss: Any, split: Any) -> None:
    """Refuse a model, optimizer, loss or split that is something else, arguments in another order above all."""
    if not isinstance(model, torch.nn.Module):
        raise bad_setting("the model", model, "it is a torch.nn.Module", "pass for example torch.nn.Linear(8, 1)")
    if not isinstance(optimizer, torch.optim.Optimizer):
        remedy = "pass for example torch.optim.AdamW(model.parameters())"
        raise bad_setting("the optimizer", optimizer, "it is made over the model's parameters", remedy)
    _refuse_ranks(model)
    of_torch = getattr(loss, "__module__", "") in ("torch.nn.modules.loss", "torch.nn.functional")
    if not callable(loss) or isinstance(loss, type) or of_torch:
        remedy = "pass loss=squared, with: def squared(model, batch): x, y = batch; "
        remedy += "return torch.nn.functional.mse_loss(model(x), y, reduction='sum'), len(x)"
        raise bad_setting("the loss", loss, "loss(model, batch) returns a sum and its weight", remedy)
    is_split = hasattr(split, "count") and hasattr(split, "take") and not isinstance(split, type)
    if split is not None and not is_split:
        raise bad_setting("split", split, "it has count(batch) and take(batch, start, stop)", "pass split=BySample()")


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
