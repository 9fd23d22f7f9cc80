"""Refuse to split a batch where layers or the loss couple its samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from memfit.errors import UsageError
from memfit.rundir import record
from memfit.training._compute import PlacedLoss
from memfit.training._oom import Failed, attempt
from memfit.training._snapshot import Snapshot
from memfit.training._split import Split, rebuild

Loss = Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor | float]]

_NUM_CHECKED = 8
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of a sum in another order
_HALF_TOLERANCE = 2e-2

_Fault = tuple[str, str] | tuple[()]
_INDEPENDENT = "or pass allow_inexact=True if no sample's loss depends on the others"
_IN_EVALUATION = "in evaluation mode the loss"
_NOT_COMPARED = "so memfit cannot compare it with the losses of its parts"
_NO_SUM = (
    "the loss of a batch is not the sum of the losses of its parts",
    "return a sum and its weight; pass split=ByGroup(...) if samples of one group are coupled, split=WHOLE if all are; "
    "or pass allow_inexact=True",
)


class Exactness:
    """Refuses what a safe step cannot do exactly, or records it where that is allowed."""

    def __init__(self, model: torch.nn.Module, loss: Loss, split: Split, allows_inexact: bool) -> None:
        self._model, self._loss, self._split, self.allows_inexact = model, loss, split, allows_inexact
        #: What is wrong with a split, () if nothing is; None as long as no finite losses were compared.
        self.fault: _Fault | None = None
        self._has_stepped = self._compared_buffers = False
        self._walked: list[torch.nn.Module] = []
        self._coupling: list[tuple[str, torch.nn.Module]] = []
        self._said: set[str] = set()

    def trust(self) -> None:
        """Take the loss of a batch for the sum over its parts without a look: a look would be passes of all ranks."""
        self.fault = ()

    def allow_step(self) -> None:
        """Refuse weights that are updated in the backward pass."""
        if self._has_stepped or self.allows_inexact:
            return
        for name, parameter in self._model.named_parameters():
            if parameter._post_accumulate_grad_hooks:
                raise UsageError(
                    f"{name} has a hook that runs as soon as its gradient is there.",
                    rule="if it updates the weight (an optimizer in the backward pass), no failed step can be undone.",
                    remedy="step the optimizer after the backward pass, or pass allow_inexact=True",
                )
        self._has_stepped = True

    def allow_split(self, batch: Any, count: int, before: Snapshot, where: Mapping[str, Any]) -> None:
        """Refuse to split a batch of ``count`` units unless its gradient will be that of the whole."""
        if before.modules is not self._walked:
            self._walked, self._compared_buffers = before.modules, False
            self._coupling = [
                (name, module)
                for name, module in self._model.named_modules()
                if isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats)
            ]
        for name, module in self._coupling:
            if module.training:
                self._refuse(
                    f"{type(module).__name__} '{name}' takes statistics over the batch in training mode",
                    "call eval() on it, use GroupNorm or LayerNorm, take smaller batches from the loader, or pass "
                    "allow_inexact=True",
                    where,
                )
        if self.fault is None:
            self.fault = self._compare_parts(batch, count, before)
        if self.fault:
            self._refuse(*self.fault, where)

    def allow_buffers(self, before: Snapshot, where: Mapping[str, Any]) -> None:
        """Refuse a split when the first forward pass over a part changed buffers: the next part meets other ones."""
        if self._compared_buffers:
            return
        names, self._compared_buffers = before.changed()
        if not names:
            return
        if not self.allows_inexact:
            self._compared_buffers = False
            before.restore()
        self._refuse(
            f"each forward pass changes the buffer{'s' * (len(names) > 1)} {', '.join(names[:6])}",
            "call eval() on the layer, take smaller batches from the loader, or pass allow_inexact=True",
            where,
        )

    def _refuse(self, why: str, remedy: str, where: Mapping[str, Any]) -> None:
        if not self.allows_inexact:
            raise UsageError(
                f"The batch must be split in {place(where)} and cannot be split exactly: {why}.",
                rule="a split batch gives the gradient of the whole one, or it is refused.",
                remedy=remedy,
            )
        if why not in self._said:
            self._said.add(why)
            record("inexact", reason=why, **where, text=f"trains inexactly, as allowed: {why}")

    def _compare_parts(self, batch: Any, count: int, before: Snapshot) -> _Fault | None:
        """Compare the loss of a few units with the losses of two parts of them; None if a loss is not finite. In
        evaluation mode, where dropout draws nothing. No fault is reported where two units do not fit."""
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                count = min(_NUM_CHECKED, count)
                while count >= 2:
                    found = attempt(partial(self._compare, batch, count))
                    if not isinstance(found, Failed):
                        return found
                    count //= 2
        except Exception as error:
            why = f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]:.80}"
            return f"{_IN_EVALUATION} {why}, {_NOT_COMPARED}", f"return the loss in evaluation mode too, {_INDEPENDENT}"
        finally:
            for module, mode in modes:
                module.training = mode
            before.restore()
        return ()

    def _compare(self, batch: Any, count: int) -> _Fault | None:
        found = []
        for start, stop in ((0, count), (0, count), (0, count // 2), (count // 2, count)):
            part = rebuild(self._split.take(batch, start, stop), lambda leaf: leaf)
            found.append(self._loss(self._model, part))
        dtypes = {found[0][0].dtype, *(parameter.dtype for parameter in self._model.parameters())}
        if isinstance(self._loss, PlacedLoss) and self._loss.dtype is not None:
            dtypes.add(self._loss.dtype)
        (whole, weight), (again, _), (first, first_weight), (second, second_weight) = (
            (float(loss_sum), float(one)) for loss_sum, one in found
        )
        if not all(map(math.isfinite, (whole, again, first, second))):
            return None
        tolerance = max(_TOLERANCE.get(dtype, _HALF_TOLERANCE) for dtype in dtypes)
        tolerance *= abs(whole) + abs(first) + abs(second)
        if abs(whole - again) > tolerance:
            why = f"gives {whole:.6g}, then {again:.6g} for the same samples: it draws random numbers"
            remedy = f"draw random numbers only in training mode (model.training), {_INDEPENDENT}"
            return f"{_IN_EVALUATION} {why}, {_NOT_COMPARED}", remedy
        is_sum = abs(whole - first - second) <= tolerance
        return () if is_sum and math.isclose(weight, first_weight + second_weight, rel_tol=1e-6) else _NO_SUM


def place(where: Mapping[str, Any]) -> str:
    """Return where a training is, such as ``epoch 2, step 3 of 9``."""
    text = ", ".join(f"{name} {where[name]}" for name in ("epoch", "step") if name in where) or "this step"
    return f"{text} of {where['num_steps']}" if "step" in where and "num_steps" in where else text
