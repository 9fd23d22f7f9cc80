"""Run a training step on fake tensors and record each birth and death of device memory.

The backward pass begins where autograd's engine starts, the update where an optimizer's hooks say so. The modules that
run and the optimizers that step name what the blocks are for.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from memfit.errors import MemfitError, UntraceableError
from memfit.estimation._cuda_ops import CudaOps
from memfit.estimation._events import Event, Trace
from memfit.estimation._program import Program, find_tensors
from memfit.estimation._recorder import Log, Recorder
from memfit.estimation._setup import NOT_COMPILED
from memfit.estimation._time_limit import check_time

_aten = torch.ops.aten
#: Operations such as ``arange`` run for real up to this many numbers.
_MOST_NUMBERS = 1 << 24
#: Where ``backward`` and ``grad`` start autograd's engine (torch/autograd/__init__.py, torch 2.13).
_ENGINE = "_engine_run_backward"


def trace(
    make: Callable[[], Program | Callable[[], object]],
    *,
    num_iterations: int = 2,
    architecture: str = "ampere",
    cuda: bool = True,
    real_data: bool = False,
) -> Trace:
    """Record what training iterations do with device memory, run on fake CPU tensors.

    ``make`` makes a program, or a function that runs a whole step on the same batch each time. Optimizer states appear
    in the first iteration and count in full in the second. ``cuda`` replaces operations by those of CUDA. With
    ``real_data`` the step's data are real: floating-point tensors become fake when an operation uses them; whole
    numbers and masks are computed, so that lengths, counts and places are this batch's."""
    check_time()  # before a model is built
    log, notes = Log(), dict[str, None]()
    ops = CudaOps(architecture)
    fake_mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    watch, program = _Watch(log, cuda=cuda), None
    try:
        with fake_mode, _converting_fakes(), contextlib.ExitStack() as stack:
            if cuda:
                stack.enter_context(ops)
            recorder = stack.enter_context(Recorder(log, ops if cuda else None, notes))
            reals = _RealTensors(fake_mode, log)
            if real_data:
                stack.enter_context(reals)
            step = make()
            reals.held.clear()
            if isinstance(step, Program):
                program, step = step, step.step
                recorder.longest = max((size for one in find_tensors(program.batch) for size in one.shape), default=1)
                watch.follow(program)
            stack.enter_context(watch.watching())
            for _ in range(num_iterations):
                log.enter("forward")
                step()
                watch.claim_all()
                recorder.longest = max(recorder.longest, reals.longest)
                reals.held.clear()
            notes |= dict.fromkeys(program.notes if program else ())
            if any(hasattr(one, "_orig_mod") or one._compiled_call_impl for _, one in watch.modules.values()):
                notes[NOT_COMPILED] = None
            found = Trace(
                _without_building(log.events),
                {number: block.part for number, block in enumerate(log.blocks)},
                tuple(notes),
                {number: block.stream for number, block in enumerate(log.blocks) if block.stream},
                max((int(getattr(one, "slack_bytes", 0)) for one in watch.optimizers.values()), default=0),
                ops.convolution_slack,
            )
    except (MemfitError, MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise UntraceableError.at(watch.find_module(error), f"{type(error).__name__}: {error}") from error
    return found


def _without_building(events: Sequence[Event]) -> list[Event]:
    """Leave out blocks that die while the program is built: that happens in host memory."""
    dead = {event.block for event in events if event.phase == "build" and not event.num_bytes}
    return [event for event in events if event.block not in dead]


@contextlib.contextmanager
def _converting_fakes() -> Iterator[None]:
    """Let a model on fake tensors change its dtype and be copied. ``Module.to`` refuses fake weights with another
    reference, and a copied fake tensor has a copy of its mode."""
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


class _RealTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns real tensors into fake ones and counts them, above the recorder."""

    def __init__(self, fake_mode: FakeTensorMode, log: Log) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: list[torch.Tensor] = []  # the batch, which stays on the device until the step ends
        self.longest = 1  # the longest dimension of any real tensor
        self._fake_mode = fake_mode
        self._log = log
        self._fakes: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        reals = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        are_whole = not any(one.is_floating_point() or one.is_complex() for one in reals)
        if are_whole and len(reals) == len(tensors) if tensors else _makes_few_numbers(func, args, kwargs):
            return self._compute(func, args, kwargs, reals)
        if not reals:
            return func(*args, **kwargs)
        if func is _aten.lift_fresh.default:  # ``torch.tensor`` and ``torch.from_numpy``
            return self._hold(func(*args, **kwargs))
        if func is _aten.index.Tensor:
            args = (args[0], self._places(args[1]))
        args, kwargs = tree_map(self._to_fake, (args, kwargs))
        return func(*args, **kwargs)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], reals: Sequence[Any]) -> Any:
        """Run an operation on whole numbers for real; its results count as on the device."""
        for tensor in reals:
            self._meet(tensor)
        with _disable_current_modes():
            result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._log.watch(leaf, on_host=not leaf.dim() and func is _aten.lift_fresh.default)
        return result

    def _places(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replace real masks by the places that they pick."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or isinstance(index, FakeTensor) or index.dtype is not torch.bool:
                found.append(index)
                continue
            with _disable_current_modes():
                places = index.nonzero()
                self._log.watch(places)
                found += places.unbind(1)
        return found

    def _to_fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        self._meet(leaf)
        fake = self._fakes.get(leaf)
        if fake is None:
            fake = self._fakes[leaf] = self._fake_mode.from_tensor(leaf, static_shapes=True)
        return fake

    def _meet(self, tensor: torch.Tensor) -> None:
        """Count a real tensor from outside: it is held until the step ends."""
        if self._log.alive.get(tensor.untyped_storage()._cdata) is None:
            self._log.watch(tensor)
            self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim():
            self.held.append(tensor)
            self.longest = max(self.longest, *tensor.shape)
            self._log.claim([tensor], "inputs")
        return tensor


def _makes_few_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation without tensors makes some whole numbers, such as ``arange(10)``."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        is_whole = func.overloadpacket in (_aten.arange, _aten.randint, _aten.randperm) and not any(
            isinstance(one, float) for one in args
        )
    else:
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
    sizes = [math.prod(one) if isinstance(one, list | tuple) else one for one in args]
    return is_whole and all(abs(size) <= _MOST_NUMBERS for size in sizes if isinstance(size, int))


@dataclass
class _Watch:
    """Follows a step through its phases, and names what the blocks are for."""

    log: Log
    cuda: bool  # updates run as on CUDA
    modules: dict[int, tuple[str, nn.Module]] = field(default_factory=dict)  # path and module, by ``id``
    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict)  # those that have stepped, by ``id``
    depth: int = 0  # modules that are running, one within another
    is_backward: bool = False  # autograd's engine is running

    def follow(self, program: Program) -> None:
        self._learn(program.model)
        self.log.claim(find_tensors(program.batch), "inputs")
        if program.optimizer is not None:
            self.optimizers[id(program.optimizer)] = program.optimizer
        self.claim_all()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        engine = getattr(torch.autograd, _ENGINE)

        def run_engine(*args: Any, **kwargs: Any) -> Any:
            if self.is_backward:  # within a backward pass, as reentrant checkpointing does
                return engine(*args, **kwargs)
            self.is_backward = True
            self.log.enter("backward")
            try:
                return engine(*args, **kwargs)
            finally:
                self.is_backward = False
                self.claim_all()
                self.log.enter("step")  # what clips or unscales gradients belongs to it

        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin_update(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._claim(optimizer)),
        ]
        setattr(torch.autograd, _ENGINE, run_engine)
        try:
            yield
        finally:
            setattr(torch.autograd, _ENGINE, engine)
            for handle in handles:
                handle.remove()

    def _learn(self, model: nn.Module) -> None:
        for name, child in model.named_modules():
            self.modules.setdefault(id(child), (name or type(model).__name__, child))
        self.log.claim(model.parameters(), "weights")
        self.log.claim(model.buffers(), "buffers")

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if id(module) not in self.modules:
            self._learn(module)
        if self.log.phase == "step" and not self.is_backward and not self.depth:
            self.log.enter("forward")  # of the next microbatch
        self.depth += 1

    def _leave_module(self, *_: Any) -> None:
        self.depth -= 1

    def _begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin the update, which on CUDA runs over all weights at once unless its options say otherwise."""
        if not self.is_backward and self.log.phase != "step":
            self.log.enter("step")
        self.optimizers[id(optimizer)] = optimizer
        for group in optimizer.param_groups if self.cuda else ():
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = not isinstance(optimizer, torch.optim.Adafactor)
        self._claim(optimizer)

    def _claim(self, optimizer: torch.optim.Optimizer) -> None:
        owned = [one for group in optimizer.param_groups for one in group["params"]]
        self.log.claim((one for one in owned if isinstance(one, nn.Parameter)), "weights")
        self.log.claim((one.grad for one in owned), "gradients")
        self.log.claim(owned, "optimizer")
        for state in optimizer.state.values():
            self.log.claim(tree_leaves(state), "optimizer")

    def claim_all(self) -> None:
        owned = (one for _, module in self.modules.values() for one in module.parameters(recurse=False))
        self.log.claim((one.grad for one in owned), "gradients")
        for optimizer in self.optimizers.values():
            self._claim(optimizer)

    def find_module(self, error: BaseException) -> str:
        """Return the path of the innermost module in an error's traceback."""
        found, frame = "", error.__traceback__
        while frame is not None:
            found = self.modules.get(id(frame.tb_frame.f_locals.get("self")), (found, None))[0]
            frame = frame.tb_next
        return found
