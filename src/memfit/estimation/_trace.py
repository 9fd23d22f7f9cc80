"""Runs a training step on fake tensors and writes down each birth and death of device memory."""

from __future__ import annotations

import contextlib
import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves, tree_map

from memfit.errors import MemfitError, UntraceableError
from memfit.estimation._cuda_ops import CudaOps
from memfit.estimation._events import Event, Part, Phase, Trace
from memfit.estimation._program import Program
from memfit.estimation._recorder import Block, Log, Recorder, part

__all__ = ["converting_fakes", "find_tensors", "map_tensors", "part", "trace"]

#: The second finds the gradients of the first; further ones find the same.
_MOST_MICROBATCHES = 2


def trace(
    make: Callable[[], Program], *, num_iterations: int = 2, architecture: str = "ampere", cuda: bool = True
) -> Trace:
    """What a program's training iterations do with device memory, run on fake CPU tensors.

    Args:
        make: Makes the program; called within the fake tensor mode.
        num_iterations: Optimizer states appear in the first and count in full in the second.
        architecture: The device's, for kernels and workspaces: ``volta``, ``turing``, ``ampere``, ``ada``, ``hopper``,
            ``blackwell``.
        cuda: Whether operations are replaced by what CUDA would run.

    Raises:
        UntraceableError: The program does what fake tensors cannot follow.
    """
    log = Log()
    notes: dict[str, None] = {}
    models: list[nn.Module] = []
    ops = CudaOps(architecture) if cuda else None
    try:
        fake_mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        with fake_mode, converting_fakes(), contextlib.ExitStack() as stack:
            if ops is not None:
                stack.enter_context(ops)
            recorder = stack.enter_context(Recorder(log, ops, notes))
            program = make()
            recorder.longest = max((size for one in find_tensors(program.batch) for size in one.shape), default=1)
            models.append(program.model)
            stack.enter_context(_follow_modules(program.model, log))
            if cuda:
                stack.enter_context(_foreach_by_default(program.optimizer, log))
            _claim_all(program, log)
            _watch_gradients(program, log)
            for iteration in range(num_iterations):
                log.iteration = iteration + 1
                _iterate(program, log)
            notes |= dict.fromkeys(program.notes) | (ops.notes if ops is not None else {})
            events = _without_building(log.events)
            parts = {number: _part_of(block) for number, block in enumerate(log.blocks)}
            streams = {number: block.stream for number, block in enumerate(log.blocks) if block.stream}
            convolution_slack = ops.convolution_slack if ops is not None else {}
            slack_bytes = int(getattr(program.optimizer, "slack_bytes", 0))
            modules = {number: block.module for number, block in enumerate(log.blocks) if block.module}
    except MemfitError:
        raise
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise UntraceableError.at(_find_module(error, models), f"{type(error).__name__}: {error}") from error
    more = (program.load, program.cast_slack)
    return Trace(events, parts, tuple(notes), modules, streams, slack_bytes, convolution_slack, *more)


def _without_building(events: Sequence[Event]) -> list[Event]:
    """Events without the blocks that are born and die while the program is built: that happens in host memory."""
    dead = {event.block for event in events if event.phase == "build" and not event.num_bytes}
    return [event for event in events if event.block not in dead]


def _iterate(program: Program, log: Log) -> None:
    """One update, as a plain training loop does it."""
    optimizer = program.optimizer
    if optimizer is None:
        log.enter("forward")
        with torch.no_grad(), _autocast(program, log):
            program.loss(program.model, program.batch)
        return
    loss: torch.Tensor | None = None
    for _ in range(min(program.num_microbatches, _MOST_MICROBATCHES)):
        log.enter("forward")
        with _autocast(program, log):
            loss = program.loss(program.model, program.batch)
        log.enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        _claim_all(program, log)
    log.enter("step")
    if program.before_step is not None:
        program.before_step()
    if program.clip_grad_norm:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        clipped = list(dict.fromkeys([*program.model.parameters(), *held]))
        torch.nn.utils.clip_grad_norm_(clipped, 1.0, foreach=log.has_foreach or None)
    optimizer.step()
    if program.after_step is not None:
        program.after_step()
    _claim_all(program, log)
    optimizer.zero_grad(set_to_none=True)
    program.model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def converting_fakes() -> Iterator[None]:
    """Lets a model on fake tensors change its dtype and be copied, until the end of the block.

    ``Module.to`` exchanges fake weights with ``swap_tensors``, which refuses those that anything else refers to, and a
    copy of a fake tensor has a copy of its mode. Source: torch/nn/modules/module.py, ``_apply``; torch/_tensor.py,
    ``__deepcopy__``, torch 2.13.
    """
    convert, copy_any = nn.Module._apply, torch.Tensor.__deepcopy__

    def convert_fakes(module: nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        held = list(module._parameters.values())
        if not held or not all(one is None or isinstance(one, FakeTensor) for one in held):
            return convert(module, function, recurse)  # type: ignore[no-untyped-call,no-any-return]
        for child in module.children() if recurse else ():
            child._apply(function)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for one in held:
                if one is not None:
                    one.data = function(one)
                    if one.grad is not None:
                        one.grad.data = function(one.grad)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else function(buffer)
        return module

    def copy_fake(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not (isinstance(tensor, FakeTensor) and tensor.is_leaf):
            return copy_any(tensor, memo)  # type: ignore[no-untyped-call]
        if id(tensor) not in memo:
            with torch.no_grad():
                made = tensor.clone()
            made.__dict__.update({name: one for name, one in tensor.__dict__.items() if name not in made.__dict__})
            memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
            if tensor.grad is not None:
                made.grad = copy_fake(tensor.grad, memo)
        return memo[id(tensor)]

    nn.Module._apply, torch.Tensor.__deepcopy__ = convert_fakes, copy_fake  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply, torch.Tensor.__deepcopy__ = convert, copy_any  # type: ignore[method-assign]


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """A tree with the tensors in it replaced: in lists, tuples, mappings of any kind and dataclasses.

    Dataclasses, and mappings that derive from ``dict`` or ``UserDict``, keep their class; others become a ``dict``.
    """

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if isinstance(leaf, Mapping):
            content = {key: map_tensors(function, one) for key, one in leaf.items()}
            if not isinstance(leaf, dict | UserDict):
                return content
            made: Any = copy.copy(leaf)
            made.update(content)
            return made
        if is_dataclass(leaf) and not isinstance(leaf, type):
            made = copy.copy(leaf)
            for field in fields(leaf):
                object.__setattr__(made, field.name, map_tensors(function, getattr(leaf, field.name)))
            return made
        return leaf

    return tree_map(visit, tree)


def find_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in order.

    >>> len(find_tensors({"x": torch.zeros(2), "more": [UserDict(y=torch.zeros(3)), None]}))
    2
    """
    found: list[torch.Tensor] = []
    map_tensors(found.append, tree)
    return found


@contextlib.contextmanager
def _autocast(program: Program, log: Log) -> Iterator[None]:
    if program.autocast_dtype is None:
        yield
        return
    log.in_autocast = True
    with torch.autocast("cpu", dtype=program.autocast_dtype):
        yield
    log.in_autocast = False


@contextlib.contextmanager
def _foreach_by_default(optimizer: torch.optim.Optimizer | None, log: Log) -> Iterator[None]:
    """Lets updates and clipping run over all tensors at once, as they do by default on CUDA, but not on a CPU.

    Source: torch/optim/optimizer.py, ``_default_to_fused_or_foreach``; torch/utils/_foreach_utils.py.
    """
    for group in [] if optimizer is None else optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = not isinstance(optimizer, torch.optim.Adafactor)
    name = "_get_foreach_kernels_supported_devices"
    original = getattr(_foreach_utils, name)
    setattr(_foreach_utils, name, lambda: [*original(), "cpu"])
    log.has_foreach = True
    try:
        yield
    finally:
        setattr(_foreach_utils, name, original)
        log.has_foreach = False


def _watch_gradients(program: Program, log: Log) -> None:
    """Names a gradient when it is complete, before a hook that updates its weight within the backward pass drops it."""
    for parameter in program.model.parameters():
        if not (parameter.requires_grad and parameter.is_leaf):
            continue
        handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda one: log.claim([one.grad], "gradients")
        )
        hooks: Any = parameter._post_accumulate_grad_hooks
        others = {number: hook for number, hook in hooks.items() if number != handle.id}
        ours = hooks[handle.id]
        hooks.clear()  # autograd calls them in the order of insertion
        hooks.update({handle.id: ours, **others})


def _claim_all(program: Program, log: Log) -> None:
    """Names the blocks of what lives between phases."""
    log.claim(program.model.parameters(), "weights")
    log.claim((parameter.grad for parameter in program.model.parameters()), "gradients")
    log.claim(program.model.buffers(), "buffers")
    log.claim(find_tensors(program.batch), "inputs")
    if program.optimizer is not None:
        owned = [parameter for group in program.optimizer.param_groups for parameter in group["params"]]
        log.claim((parameter.grad for parameter in owned), "gradients")
        log.claim(owned, "optimizer")
        for state in program.optimizer.state.values():
            log.claim(tree_leaves(state), "optimizer")


def _part_of(block: Block) -> Part:
    if block.forced or block.claimed:
        return block.forced or block.claimed  # type: ignore[return-value]
    if block.cast:
        return "cast_weights"
    if not block.outlived_birth_phase:
        return "temporaries"
    outliving: dict[Phase, Part] = {"build": "buffers", "forward": "activations", "step": "optimizer"}
    return outliving.get(block.phase, "temporaries")


@contextlib.contextmanager
def _follow_modules(model: nn.Module, log: Log) -> Iterator[None]:
    """Keeps the path of the module that is running."""
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: Any) -> None:
        log.module_path.append(names.get(id(module), ""))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        log.module_path.pop()

    before = nn.modules.module.register_module_forward_pre_hook(enter)
    after = nn.modules.module.register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _find_module(error: BaseException, models: list[nn.Module]) -> str:
    """The path of the innermost module in an error's traceback."""
    names = {id(module): name for model in models for name, module in model.named_modules()}
    found = ""
    names |= {id(model): type(model).__name__ for model in models}
    frame = error.__traceback__
    while frame is not None:
        found = names.get(id(frame.tb_frame.f_locals.get("self")), "") or found
        frame = frame.tb_next
    return found
