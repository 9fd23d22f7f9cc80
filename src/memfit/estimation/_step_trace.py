"""Runs any training step, of which nothing is known, on fake tensors: what it is made of shows while it runs.

The backward pass begins where autograd's engine is started, the update where an optimizer's hooks say so, and what the
blocks are for follows from the modules that run and the optimizers that step. Real tensors are welcome: the step's data
come as such. Floating-point ones become fake when an operation meets them; whole numbers and masks are computed for
real, so that lengths, counts and places that depend on the data are those of this batch.
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
from memfit.estimation._events import Trace
from memfit.estimation._recorder import Log, Recorder
from memfit.estimation._trace import _foreach_by_default, _part_of, _without_building, converting_fakes

__all__ = ["trace_step"]

_aten = torch.ops.aten
#: Whole numbers that are made out of nothing are made for real up to so many.
_MOST_NUMBERS = 1 << 24
#: An engine's start, by which ``backward`` and ``grad`` both go (torch/autograd/__init__.py, torch 2.13).
_ENGINE = "_engine_run_backward"


def trace_step(
    make: Callable[[], Callable[[], object]],
    *,
    num_iterations: int = 2,
    architecture: str = "ampere",
    cuda: bool = True,
) -> Trace:
    """What a training step does with device memory: forward and backward passes and an update, as it runs them itself.

    Args:
        make: Makes the step, with its model and optimizer; called within a fake tensor mode. What it gives runs the
            step once, on the same batch each time.
        num_iterations: Optimizer states appear in the first and count in full in the second.
        architecture: The device's, for kernels and workspaces: ``volta``, ``turing``, ``ampere``, ``ada``, ``hopper``,
            ``blackwell``.
        cuda: Whether operations are replaced by what CUDA would run.

    Raises:
        UntraceableError: The step does what fake tensors cannot follow.

    Example:
        >>> def make():
        ...     model = nn.Linear(256, 256, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ...     batch = torch.zeros(8, 256)
        ...     def step():
        ...         optimizer.zero_grad()
        ...         model(batch).sum().backward()
        ...         optimizer.step()
        ...     return step
        >>> from memfit.estimation._events import find_peaks
        >>> find_peaks(trace_step(make))["step"].parts["weights"]
        262144
    """
    log, notes = Log(), dict[str, None]()
    ops = CudaOps(architecture) if cuda else None
    fake_mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    watch = _Watch(log)
    try:
        with fake_mode, converting_fakes(), contextlib.ExitStack() as stack:
            if ops is not None:
                stack.enter_context(ops)
            recorder = stack.enter_context(Recorder(log, ops, notes))
            reals = stack.enter_context(_RealTensors(fake_mode, log))
            step = make()
            reals.held.clear()
            stack.enter_context(watch.watching(cuda=cuda))
            for iteration in range(num_iterations):
                log.iteration = iteration + 1
                log.enter("forward")
                step()
                watch.claim_all()
                recorder.longest = max(recorder.longest, reals.longest)
                reals.held.clear()
            notes |= ops.notes if ops is not None else {}
            events = _without_building(log.events)
            parts = {number: _part_of(block) for number, block in enumerate(log.blocks)}
            modules = {number: block.module for number, block in enumerate(log.blocks) if block.module}
            streams = {number: block.stream for number, block in enumerate(log.blocks) if block.stream}
            slack_bytes = max((int(getattr(one, "slack_bytes", 0)) for one in watch.optimizers.values()), default=0)
            convolution_slack = ops.convolution_slack if ops is not None else {}
    except (MemfitError, MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        where = log.module_path[-1] if log.module_path else ""
        raise UntraceableError.at(where, f"{type(error).__name__}: {error}") from error
    return Trace(events, parts, tuple(notes), modules, streams, slack_bytes, convolution_slack)


class _RealTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """On top of the recorder: what becomes of real tensors, and what they count for.

    Attributes:
        held: What the running step was given: a batch stays on the device until its step ends.
        longest: The longest dimension of any of them.
    """

    def __init__(self, fake_mode: FakeTensorMode, log: Log) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: list[torch.Tensor] = []
        self.longest = 1
        self._fake_mode = fake_mode
        self._log = log
        self._fakes: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        reals = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        if (tensors and len(reals) == len(tensors) and all(map(_is_whole, reals))) or (
            not tensors and _makes_few_numbers(func, args, kwargs)
        ):
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
        """An operation on whole numbers alone, for real; its results count as the device's."""
        for tensor in reals:
            self._meet(tensor)
        with _disable_current_modes():
            result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._log.watch(leaf, on_host=not leaf.dim() and func is _aten.lift_fresh.default)
        return result

    def _places(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Indices in which a real mask is the places that it picks."""
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
        """Counts a real tensor that comes from outside: it is held until the step ends."""
        if self._log.alive.get(tensor.untyped_storage()._cdata) is None:
            self._log.watch(tensor)
            self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim():
            self.held.append(tensor)
            self.longest = max(self.longest, *tensor.shape)
            self._log.claim([tensor], "inputs")
        return tensor


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


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
    """Follows a step through its phases, and says what the blocks are for.

    Attributes:
        log: What is written down.
        modules: The path of every module that has run, by its identity, and the module, which stays alive with it.
        optimizers: Those that have stepped.
        is_backward: Autograd's engine is running.
    """

    log: Log
    modules: dict[int, tuple[str, nn.Module]] = field(default_factory=dict)
    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict)
    is_backward: bool = False

    @contextlib.contextmanager
    def watching(self, *, cuda: bool) -> Iterator[None]:
        """Puts hooks into torch until the end of the block."""
        engine = getattr(torch.autograd, _ENGINE)

        def run_engine(*args: Any, **kwargs: Any) -> Any:
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
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin_update(optimizer, cuda=cuda)),
            register_optimizer_step_post_hook(lambda *_: self.claim_all()),
        ]
        setattr(torch.autograd, _ENGINE, run_engine)
        try:
            with _foreach_by_default(None, self.log) if cuda else contextlib.nullcontext():
                yield
        finally:
            setattr(torch.autograd, _ENGINE, engine)
            for handle in handles:
                handle.remove()

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if id(module) not in self.modules:
            root = type(module).__name__ if not self.log.module_path else self.log.module_path[-1]
            for name, child in module.named_modules():
                self.modules.setdefault(id(child), (name or root, child))
            self.log.claim(module.parameters(), "weights")
            self.log.claim(module.buffers(), "buffers")
        if self.log.phase == "step" and not self.is_backward and not self.log.module_path:
            self.log.enter("forward")  # of the next microbatch
        self.log.module_path.append(self.modules[id(module)][0])

    def _leave_module(self, *_: Any) -> None:
        self.log.module_path.pop()

    def _begin_update(self, optimizer: torch.optim.Optimizer, *, cuda: bool) -> None:
        """The update begins; as on CUDA it runs over all weights at once unless its options say otherwise."""
        if not self.is_backward and self.log.phase != "step":
            self.log.enter("step")
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = optimizer
            for group in optimizer.param_groups if cuda else ():
                if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                    group["foreach"] = not isinstance(optimizer, torch.optim.Adafactor)
        self.claim_all()

    def claim_all(self) -> None:
        """Names the blocks of what lives between phases."""
        owned = [one for optimizer in self.optimizers.values() for group in optimizer.param_groups
                 for one in group["params"]]  # fmt: skip
        of_modules = [one for _, module in self.modules.values() for one in module.parameters(recurse=False)]
        self.log.claim((one for one in owned if isinstance(one, nn.Parameter)), "weights")
        self.log.claim((one.grad for one in [*owned, *of_modules]), "gradients")
        self.log.claim(owned, "optimizer")
        for optimizer in self.optimizers.values():
            for state in optimizer.state.values():
                self.log.claim(tree_leaves(state), "optimizer")
