"""Move a model and its batches to a device, and run its loss in mixed precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from memfit.errors import UsageError, nearest
from memfit.training._checks import bad_setting
from memfit.training._split import rebuild
from memfit.units import format_count

Precision = Literal["float32", "bf16-mixed", "fp16-mixed", "auto"]

_DTYPES = {"float32": None, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def find_device(name: str | torch.device) -> torch.device:
    """Return the device of this name; ``"auto"`` is the GPU that was granted to this process, or the CPU without one.

    Raises:
        UsageError: If there is no such device.

    Example:
        >>> find_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        rule = "it is 'auto', 'cpu', 'cuda' or a GPU by its number, such as 'cuda:1'"
        remedy = "pass device='auto', or leave device out to keep the model where it lies"
        raise bad_setting("device", name, rule, remedy) from error
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise UsageError(
            f"device is '{device}', and torch sees {format_count(num_gpus, 'GPU')}.",
            rule="GPUs are counted from cuda:0, among those that CUDA_VISIBLE_DEVICES leaves visible.",
            remedy="pass device='auto', which takes the CPU where there is no GPU",
        )
    return device


def autocast(model: torch.nn.Module, precision: Precision | None) -> AbstractContextManager[Any]:
    """Return a context in which the model computes as ``Trainer(precision=...)`` evaluates it, on its present device.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> with torch.no_grad(), autocast(model, "bf16-mixed"):
        ...     model(torch.ones(3, 2)).dtype
        torch.bfloat16
    """
    device = _device_of(model)
    dtype = _DTYPES[choose_precision(precision, device)]
    # torch's cache of cast weights does not notice weights that are swapped inside, such as an average's
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False)


def choose_precision(precision: Precision | None, device: torch.device) -> Precision:
    known = [*_DTYPES, "auto"]
    if precision is not None and precision not in known:
        rule = f"it is one of {', '.join(known)}"
        raise bad_setting("precision", precision, rule, nearest(str(precision), known))
    if precision != "auto" or device.type != "cuda":
        return "float32" if precision in (None, "auto") else precision
    with torch.cuda.device(device):
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16-mixed"


def to_device(batch: Any, device: str | torch.device) -> Any:
    """Return the batch with its tensors, and its objects with a method ``to``, on the device; other objects stay."""

    def moved(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=part.is_pinned())
        return copy.copy(part).to(device) if _moves(part) else part  # a copy: graphs and encodings move in place

    return rebuild(batch, moved, is_leaf=_moves)


@dataclass(frozen=True)
class PlacedLoss:
    loss: Callable[[Any, Any], Any]
    device: torch.device
    moves: bool
    dtype: torch.dtype | None

    def __call__(self, model: Any, batch: Any) -> Any:
        if self.moves:
            batch = to_device(batch, self.device)
        with nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype):
            return self.loss(model, batch)


def place(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, Any], Any],
    device: str | torch.device | None,
    precision: Precision | None,
) -> tuple[Callable[[Any, Any], Any], Precision]:
    """Move the model to the device; return the loss as it runs there, and the precision as it was chosen."""
    target = _device_of(model) if device is None else find_device(device)
    chosen = choose_precision(precision, target)
    half = [name for name, one in model.named_parameters() if one.requires_grad and one.dtype == torch.float16]
    if chosen == "fp16-mixed" and half:
        raise UsageError(
            f"precision is 'fp16-mixed', and the weight '{half[0]}' is float16.",
            rule="mixed precision keeps weights in float32 and computes in 16 bits; gradients in float16 are lost.",
            remedy="pass model.float()",
        )
    if device is not None:
        before = [parameter.device for parameter in model.parameters()]
        model.to(target)
        if optimizer.state and before != [parameter.device for parameter in model.parameters()]:
            raise UsageError(
                f"device='{target}' moves the model, and its {type(optimizer).__name__} has a state already.",
                rule="the optimizer's state lies where the weights lie.",
                remedy="call model.to(...) before the optimizer is made or loaded",
            )
    if device is None and chosen == "float32":
        return loss, chosen
    return PlacedLoss(loss, target, device is not None, _DTYPES[chosen]), chosen


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _moves(part: Any) -> bool:
    return not isinstance(part, torch.Tensor | Mapping) and callable(getattr(part, "to", None))
