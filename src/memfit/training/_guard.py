"""Try the memory of an optimizer's step before the step changes anything.

Adam multiplies the weights before it allocates, and allocates its state in the first step, the moment with the least
room. So a *shadow* of the optimizer on ``meta`` tensors is stepped first, and what it allocates is allocated for trial.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.errors import DoesNotFitError, HalfUpdatedError, UsageError
from memfit.training._oom import Failed, attempt
from memfit.training._process import preserved_rng
from memfit.units import format_bytes

Blocks = list[tuple[torch.device, int]]

_PLAIN = (type(None), bool, int, float, str)


class OptimizerGuard:
    """Steps an optimizer after it tried whether the step's memory is there, unless ``tries`` is False."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS evaluates the loss several times inside one step.",
                rule="a step is taken once, after all gradients are there; none of it may depend on evaluating again.",
                remedy="use another optimizer, such as torch.optim.AdamW",
            )
        self.optimizer = optimizer
        self.tries = True
        self._layout: list[int] = []
        self._state: Blocks = []
        self._temporaries: Blocks = []
        self._reserve: list[torch.Tensor] = []

    def prepare(self) -> None:
        """Take the memory of the state that the first step will make, and try that of a step's temporaries. The state's
        memory is kept until that step: every pass before it has as little room as those after it."""
        groups = self.optimizer.param_groups
        self._try(self._with_gradient() or [[p for p in group["params"] if p.requires_grad] for group in groups])
        for block in self._reserve:
            block.fill_(0)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the state that the first step will make, as far as it was measured."""
        return sum(size for _, size in self._state)

    def try_memory(self) -> None:
        self._try(self._with_gradient())

    def step(self, call: Callable[[], Any] | None = None) -> None:
        """Step the optimizer, or make ``call``, which steps it. DoesNotFitError: nothing was changed; HalfUpdatedError:
        memory ran out inside the step all the same."""
        self.try_memory()
        self._reserve = []
        failed = attempt(call or self.optimizer.step)
        if not isinstance(failed, Failed):
            self._state = []
            return
        self._layout = []
        raise HalfUpdatedError(
            f"Memory ran out inside {type(self.optimizer).__name__}.step: {failed.first_line}",
            rule="some weights are updated and some are not.",
            remedy="go back to the last checkpoint, as Trainer does by itself; fused=True allocates nothing",
        )

    def _with_gradient(self) -> list[list[torch.Tensor]]:
        params = [[p for p in group["params"] if p.grad is not None] for group in self.optimizer.param_groups]
        return params if any(params) else []

    def _try(self, params: list[list[torch.Tensor]]) -> None:
        """Measure what a step over these parameters allocates, unless it was for as many, and allocate that."""
        if not self.tries:
            return
        layout = [*(len(group) for group in params), len(self.optimizer.state)]
        if layout != self._layout:
            self._layout, self._reserve, self._state, self._temporaries = layout, [], [], []
            for device in dict.fromkeys(p.device for group in params for p in group):
                state, temporaries = _sizes_on(self.optimizer, params, device)
                self._state += [(device, size) for size in state]
                self._temporaries += [(device, size) for size in temporaries]
        if self._state and not self._reserve:
            self._reserve = self._allocate(self._state, "state")
        self._allocate(self._temporaries, "temporary tensors")

    def _allocate(self, blocks: Blocks, kind: str) -> list[torch.Tensor]:
        """Allocate blocks, the second time with empty caches; then refuse."""
        for _ in range(2):
            made = attempt(
                lambda: [torch.empty(size, dtype=torch.uint8, device=device) for device, size in blocks],
            )
            if not isinstance(made, Failed):
                return made
        size, devices = format_bytes(sum(size for _, size in blocks)), sorted({str(device) for device, _ in blocks})
        raise DoesNotFitError(
            f"The step of {type(self.optimizer).__name__} needs {size} for its {kind} on {', '.join(devices)}, and has "
            "no room.",
            rule="the optimizer's memory does not depend on the batch: splitting it smaller gives none.",
            remedy="take an optimizer with a smaller state (SGD, Adafactor), fused=True (no temporaries) or "
            "foreach=False (those of one weight at a time), train fewer weights, or give more memory",
        )


def _sizes_on(
    optimizer: torch.optim.Optimizer, params: list[list[torch.Tensor]], device: torch.device
) -> tuple[list[int], list[int]]:
    """Return the sizes of the state and of the temporaries that a step allocates on one device, in bytes. An optimizer
    that cannot be run without memory (its step reads values, or it holds another optimizer) is taken to need a copy of
    its largest parameter."""
    params = [[p for p in group if p.device == device] for group in params]
    guess = max(p.nbytes for group in params for p in group)
    foreach = any(
        not group.get("fused")
        and (group.get("foreach") or (group.get("foreach", False) is None and device.type != "cpu"))
        for group in optimizer.param_groups
    )
    if not all(isinstance(value, _PLAIN) for name, value in vars(optimizer).items() if name not in _base_names()):
        return [], [guess]  # its step can reach more than its groups and its state
    try:
        return _measure(_shadow(optimizer, params, foreach=foreach))
    except Exception:
        return [], [guess]


@functools.cache
def _base_names() -> frozenset[str]:
    return frozenset(vars(torch.optim.Optimizer([torch.empty(1, device="meta")], {})).keys() | {"step"})


def _shadow(optimizer: torch.optim.Optimizer, params: list[list[torch.Tensor]], *, foreach: bool) -> Any:
    """Return the optimizer over parameters, gradients and state of the same shapes that take no memory."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    shadow.state = defaultdict(dict)
    shadow.state.update({k: _meta(value) for k, value in optimizer.state.items() if not isinstance(k, torch.Tensor)})
    shadow.param_groups = []
    for group, own in zip(optimizer.param_groups, params, strict=True):
        plain = {"fused": False, "capturable": False, "foreach": foreach}
        copies = []
        for parameter in own:
            copies.append(torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad))
            copies[-1].grad = torch.empty_like(copies[-1])
            if parameter in optimizer.state:
                shadow.state[copies[-1]] = _meta(optimizer.state[parameter])
        settings = {name: _meta(value) for name, value in group.items() if name != "params"}
        shadow.param_groups.append({**settings, **{name: plain[name] for name in plain if name in group}})
        shadow.param_groups[-1]["params"] = copies
    return shadow


def _meta(state: Any) -> Any:

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, _PLAIN):
                raise TypeError(f"a {type(value).__name__} would be shared with the shadow")
            return value
        return value.detach().cpu().clone() if value.numel() == 1 else torch.empty_like(value, device="meta")

    return torch.utils._pytree.tree_map(copy, state)


def _measure(shadow: Any) -> tuple[list[int], list[int]]:
    """Return the sizes of the state that a shadow's first step makes, and of what the next allocates at its peak."""
    before = _tensors(list(shadow.state.values()))
    step = inspect.unwrap(type(shadow).step)
    with torch.no_grad(), preserved_rng():
        step(shadow)
        known = set(map(id, before))
        made = [tensor for tensor in _tensors(list(shadow.state.values())) if id(tensor) not in known]
        with _LiveBytes() as live:
            step(shadow)
    return [int(tensor.nbytes) for tensor in made if tensor.is_meta], live.peak


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the sizes of the ``meta`` storages that were made inside it and alive at the same time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: list[int] = []
        self._live = weakref.WeakValueDictionary[int, Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs)) if tensor.is_meta}
        result = func(*args, **(kwargs or {}))
        made = [tensor.untyped_storage() for tensor in _tensors(result) if tensor.is_meta]
        self._live.update({one._cdata: one for one in made if one._cdata not in given})
        sizes = [one.nbytes() for one in self._live.values()]
        if sum(sizes) > sum(self.peak):
            self.peak = sizes
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
