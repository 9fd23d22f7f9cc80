"""An optimizer's step that either happens whole or not at all, when memory runs out inside it.

Nothing in torch makes ``optimizer.step`` atomic: Adam multiplies the weights by the decay and moves its averages before
it allocates the first temporary, and its state is allocated in the first step, the moment with the least room. So what
a step will allocate is measured beforehand on a *shadow* of the optimizer without memory (``meta`` tensors), allocated
for trial before anything is changed, and given back. What still fails is undone from copies where these are small.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.errors import DoesNotFitError, HalfUpdatedError, UsageError
from memfit.training._oom import classify_oom, clear_caches, release
from memfit.training._process import preserved_rng
from memfit.units import format_bytes

Blocks = list[tuple[torch.device, int]]

MOST_COPIED_BYTES = 1 << 20

# Each of these treats every parameter by itself, so that a step may be made in several calls with the same bits.
_BY_PARAMETER = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
)
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class _Need:
    """What a step allocates: state that stays, and temporaries of the whole step and of its largest parameter."""

    state: Blocks
    whole: Blocks
    largest: Blocks


@dataclass(frozen=True)
class _States:
    """What was noted of certain objects, which are kept so that no other one can be taken for them."""

    objects: list[Any]
    tensors: dict[int, torch.Tensor]
    held: list[tuple[Any, Any]]

    def is_of(self, objects: list[Any]) -> bool:
        return len(objects) == len(self.objects) and all(map(operator.is_, objects, self.objects))


class _Copies:
    """What a step may change, as it was before: tensors by their values, lists and dicts by what they held."""

    def __init__(self) -> None:
        #: By identity: a tensor's own hash is computed in Python, and there are hundreds in each step.
        self.tensors: dict[int, torch.Tensor] = {}
        self._values: list[torch.Tensor] = []
        self._held: list[tuple[Any, Any]] = []
        self._states: _States | None = None

    def note(self, value: Any) -> bool:
        """Note everything that is in a value; False if something of it is of a kind that cannot be put back."""
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            return True
        if isinstance(value, list | dict):
            self.note_items(value)
            return all(map(self.note, value.values() if isinstance(value, dict) else value))
        return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(self.note, value)))

    def note_items(self, value: Any) -> None:
        """Note just which items a list or dict has."""
        self._held.append((value, dict(value) if isinstance(value, dict) else list(value)))

    def note_states(self, states: list[Any], weights: list[torch.Tensor], earlier: _Copies | None) -> bool:
        """``note`` for weights and their states: at the speed of C while they hold the same objects as earlier."""
        content = [one for state in states for one in (state.values() if isinstance(state, dict) else [state])]
        known = earlier._states if earlier is not None else None
        if known is not None and known.is_of([*states, *content, *weights]):
            self._states = known
            self.tensors |= known.tensors
            self._held += known.held
            return True
        tensors, held = self.tensors, self._held
        self.tensors, self._held = {}, []
        is_known = all(map(self.note, [*states, *weights]))
        if all(isinstance(value, (torch.Tensor, *_PLAIN)) for value in content):  # else one may change within
            self._states = _States([*states, *content, *weights], self.tensors, self._held)
        self.tensors, self._held = tensors | self.tensors, held + self._held
        return is_known

    def take(self, earlier: _Copies | None) -> None:
        """Copy the values of all tensors noted, over earlier copies if these are of the same tensors."""
        if earlier is not None and list(earlier.tensors) == list(self.tensors):
            self._values = earlier._values
            with torch.no_grad():
                torch._foreach_copy_(self._values, list(self.tensors.values()))
        else:
            self._values = [tensor.detach().clone() for tensor in self.tensors.values()]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, value in zip(self.tensors.values(), self._values, strict=True):
                tensor.copy_(value)
        for held, before in self._held:
            held.clear()
            (held.update if isinstance(held, dict) else held.extend)(before)


class OptimizerGuard:
    """Makes an optimizer's steps, each whole or not at all.

    Args:
        optimizer: The optimizer; nothing of it is replaced. The weights that have a gradient and their state are copied
            before each step when they take no more than 1 MiB together, a fifth of a millisecond.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> guard = OptimizerGuard(torch.optim.AdamW(model.parameters()))
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> guard.step()
        >>> sorted(guard.optimizer.state[model.weight])
        ['exp_avg', 'exp_avg_sq', 'step']
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS evaluates the loss several times inside one step.",
                rule="a step is taken once, after all gradients are there; none of it may depend on evaluating again.",
                remedy="use another optimizer, such as torch.optim.AdamW",
            )
        self.optimizer = optimizer
        self._layout: list[int] = []
        self._need = _Need([], [], [])
        self._reserve: list[torch.Tensor] = []
        self._earlier: _Copies | None = None
        self._is_small = self._in_parts = False

    def parameters(self) -> list[torch.Tensor]:
        """The optimizer's parameters, in its order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def prepare(self) -> None:
        """Take the memory of the state that the first step will make, and try that of a step's temporaries.

        The state's memory is kept until that step, so that every forward and backward pass before it has as little room
        as those after it. Call it with gradients in place to count just the parameters that have one.

        Raises:
            DoesNotFitError: If there is no room; nothing was changed.
        """
        params = self._with_gradient() or [[p for p in group["params"] if p.requires_grad] for group in self._groups()]
        self._measure(params)
        if not self._reserve and self._need.state:
            self._reserve = self._allocate(self._need.state, touch=True) or self._refuse(self._need.state)
        self._try_temporaries()

    @property
    def pending_bytes(self) -> int:
        """What the state will take that the first step makes, as far as it was measured."""
        return sum(size for _, size in self._need.state)

    def step(self, call: Callable[[], Any] | None = None) -> None:
        """One optimizer step.

        Args:
            call: What makes it; by default ``optimizer.step``. It may do more around that, as a gradient scaler does.

        Raises:
            DoesNotFitError: If the optimizer's state or temporaries have no room; nothing was changed.
            HalfUpdatedError: If memory ran out inside the step and what it had changed cannot be put back.
            Exception: The error of the allocation that failed inside the step, after everything was put back.
        """
        self._measure(self._with_gradient())
        if self._need.state and not self._reserve:
            self._reserve = self._allocate(self._need.state, touch=False) or self._refuse(self._need.state)
        whole = self._try_temporaries() and not self._in_parts
        copies = self._copy()
        self._reserve = []
        failure = None
        with self._watched_hooks() as hooks_began:
            try:
                if whole:
                    (call or self.optimizer.step)()
                else:
                    self._step_in_parts(call)
            except Exception as error:
                if classify_oom(error) is None:
                    raise
                failure = error
        self._in_parts = failure is not None
        if failure is None:
            self._need = replace(self._need, state=[])
            return
        self._layout = []
        if hooks_began or copies is None:
            text = str(failure) or type(failure).__name__
            release(failure)
            raise HalfUpdatedError(
                f"Memory ran out inside {type(self.optimizer).__name__}.step: {text.splitlines()[0]}",
                rule="some weights are updated and some are not"
                + (", and the hooks after the step have begun." if hooks_began else "; copies of them were not kept."),
                remedy="go back to the last checkpoint, as Trainer does by itself; fused=True allocates nothing",
            )
        copies.restore()
        raise failure

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _with_gradient(self) -> list[list[torch.Tensor]]:
        params = [[p for p in group["params"] if p.grad is not None] for group in self._groups()]
        return params if any(params) else []

    def _measure(self, params: list[list[torch.Tensor]]) -> None:
        """Find out what a step over these parameters allocates, unless it was for as many before."""
        layout = [*(len(group) for group in params), len(self.optimizer.state)]
        if layout == self._layout:
            return
        self._layout, self._reserve = layout, []
        needs = [
            _measure_on_device(self.optimizer, params, device)
            for device in dict.fromkeys(p.device for group in params for p in group)
        ]
        held = [parameter for group in params for parameter in group]
        held += _tensors([self.optimizer.state.get(p) for p in held])
        self._need = _Need(
            *(list(itertools.chain(*(getattr(need, name) for need in needs))) for name in ("state", "whole", "largest"))
        )
        num_bytes = sum(value.nbytes for value in held)
        self._is_small = num_bytes + sum(size for _, size in self._need.state) <= MOST_COPIED_BYTES

    def _try_temporaries(self) -> bool:
        """Whether a whole step's temporaries have room; refuses if those of the largest parameter have none."""
        if self._allocate(self._need.whole, touch=False) is not None:
            return True
        if type(self.optimizer) not in _BY_PARAMETER or _hooks(self.optimizer):
            self._refuse(self._need.whole)
        if self._allocate(self._need.largest, touch=False) is None:
            self._refuse(self._need.largest)
        return False

    def _allocate(self, blocks: Blocks, *, touch: bool) -> list[torch.Tensor] | None:
        try:
            taken = [torch.empty(size, dtype=torch.uint8, device=device) for device, size in blocks]
            return [block.fill_(0) for block in taken] if touch else taken
        except Exception as error:
            if classify_oom(error) is None:
                raise
            return None

    def _refuse(self, blocks: Blocks) -> list[torch.Tensor]:
        """Try once more with empty caches, then say that it does not fit."""
        clear_caches()
        taken = self._allocate(blocks, touch=False)
        if taken is not None:
            return taken
        size = format_bytes(sum(size for _, size in blocks))
        kind = "state" if blocks is self._need.state else "temporary tensors"
        devices = ", ".join(sorted({str(device) for device, _ in blocks}))
        raise DoesNotFitError(
            f"The step of {type(self.optimizer).__name__} needs {size} for its {kind} on {devices}, and has no room.",
            rule="the optimizer's memory does not depend on the batch: splitting it smaller gives none.",
            remedy="take an optimizer with a smaller state (SGD, Adafactor), fused=True (no temporaries), train fewer "
            "weights, or give more memory",
        )

    def _copy(self) -> _Copies | None:
        """Copies of what a step may change, or None where they would be large or cannot be made."""
        if not self._is_small:
            return None
        optimizer, copies = self.optimizer, _Copies()
        copies.note_items(vars(optimizer))
        copies.note_items(optimizer.state)
        changing = [value for name, value in vars(optimizer).items() if name not in _base_names()]
        for group in self._groups():
            copies.note_items(group)
            changing += [value for name, value in group.items() if name != "params"]
        states = [
            state
            for owner, state in optimizer.state.items()
            if not isinstance(owner, torch.Tensor) or owner.grad is not None
        ]
        weights = [parameter for parameter in self.parameters() if parameter.grad is not None]
        if not all(map(copies.note, changing)) or not copies.note_states(states, weights, self._earlier):
            return None
        if sum(tensor.nbytes for tensor in copies.tensors.values()) > MOST_COPIED_BYTES:
            return None
        try:
            copies.take(self._earlier)
        except Exception as error:
            if classify_oom(error) is None:
                raise
            return None
        self._earlier = copies
        return copies

    def _step_in_parts(self, call: Callable[[], Any] | None) -> None:
        """Step one parameter after the other, so that temporaries of one are alive at a time."""
        optimizer = self.optimizer
        if type(optimizer) not in _BY_PARAMETER or _hooks(optimizer):
            (call or optimizer.step)()
            return
        whole, own = optimizer.step, optimizer.__dict__.get("step")
        all_params = [group["params"] for group in self._groups()]

        def in_parts(*args: Any, **kwargs: Any) -> None:
            for index, params in enumerate(all_params):
                for parameter in params:
                    for other, group in enumerate(self._groups()):
                        group["params"] = [parameter] if other == index else []
                    whole(*args, **kwargs)

        optimizer.step = in_parts  # type: ignore[method-assign, assignment]
        try:
            (call or optimizer.step)()
        finally:
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own  # type: ignore[method-assign]
            for group, params in zip(self._groups(), all_params, strict=True):
                group["params"] = params

    @contextmanager
    def _watched_hooks(self) -> Iterator[list[bool]]:
        """Notes whether the hooks after the step began: what these change (an average of weights) cannot be undone."""
        began: list[bool] = []
        if not self.optimizer._optimizer_step_post_hooks:
            yield began
            return
        handle = self.optimizer.register_step_post_hook(lambda *_: began.append(True))
        cast(OrderedDict[int, Any], self.optimizer._optimizer_step_post_hooks).move_to_end(handle.id, last=False)
        try:
            yield began
        finally:
            handle.remove()


def _hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _measure_on_device(
    optimizer: torch.optim.Optimizer, params: list[list[torch.Tensor]], device: torch.device
) -> _Need:
    """What a step over the parameters of one device allocates.

    An optimizer that cannot be run without memory (its step reads values, or it holds more than numbers, such as
    another optimizer) is taken to need no more than a copy of its largest parameter: a guess that is too small leads to
    an undo, one that is too large to a refusal of what would fit.
    """
    params = [[p for p in group if p.device == device] for group in params]
    flat = [p for group in params for p in group]
    largest = max(flat, key=lambda p: p.nbytes)
    foreach = any(
        not group.get("fused")
        and (group.get("foreach") or (group.get("foreach", False) is None and device.type != "cpu"))
        for group in optimizer.param_groups
    )
    guess = [(device, largest.nbytes)]
    if not _can_be_shadowed(optimizer):
        return _Need([], guess, guess)
    try:
        shadow = _shadow(optimizer, params, foreach=foreach)
        state = [(device, size) for size in _peak_of(shadow, new_state=True)]
        whole = [(device, size) for size in _peak_of(shadow)]
        alone = _shadow(optimizer, [[p for p in group if p is largest] for group in params], foreach=foreach)
        _peak_of(alone, new_state=True)
        return _Need(state, whole, [(device, size) for size in _peak_of(alone)])
    except Exception:
        return _Need([], guess, guess)


def _can_be_shadowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step can reach nothing but its groups and its state."""
    return all(isinstance(value, _PLAIN) for name, value in vars(optimizer).items() if name not in _base_names())


@functools.cache
def _base_names() -> frozenset[str]:
    """The attributes that every optimizer has."""
    return frozenset(vars(torch.optim.Optimizer([torch.empty(1, device="meta")], {})).keys() | {"step"})


def _shadow(optimizer: torch.optim.Optimizer, params: list[list[torch.Tensor]], *, foreach: bool) -> Any:
    """The optimizer with parameters, gradients and state of the same shapes that take no memory."""
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
    """A copy of part of a state without the memory of its tensors."""

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, _PLAIN):
                raise TypeError(f"a {type(value).__name__} would be shared with the shadow")
            return value
        return value.detach().cpu().clone() if value.numel() == 1 else torch.empty_like(value, device="meta")

    return torch.utils._pytree.tree_map(copy, state)


def _peak_of(shadow: Any, *, new_state: bool = False) -> list[int]:
    """The sizes of what one step of a shadow had allocated at its peak, or of the state that it made, in bytes."""
    before = _tensors(list(shadow.state.values()))
    step = inspect.unwrap(type(shadow).step)
    with torch.no_grad(), preserved_rng(), _LiveBytes() as live:
        step(shadow)
    if not new_state:
        return live.peak  # type: ignore[no-any-return]
    known = set(map(id, before))
    made = [tensor for tensor in _tensors(list(shadow.state.values())) if id(tensor) not in known]
    return [int(tensor.nbytes) for tensor in made if tensor.is_meta]


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the sizes of the storages without memory that were made inside it and alive at the same time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: list[int] = []
        self._live: dict[int, int] = {}
        self._total = self._most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(tensor)._cdata for tensor in _tensors((args, kwargs)) if tensor.is_meta}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(lambda tensor: tensor.is_meta, _tensors(result)):
            storage = _storage(tensor)
            if storage._cdata in given or storage._cdata in self._live:
                continue
            self._live[storage._cdata] = storage.nbytes()
            self._total += storage.nbytes()
            weakref.finalize(storage, self._gone, storage._cdata)
        if self._total > self._most:
            self._most, self.peak = self._total, list(self._live.values())
        return result

    def _gone(self, key: int) -> None:
        self._total -= self._live.pop(key, 0)


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
