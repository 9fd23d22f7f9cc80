"""The memory of ``torch.compile``: what it keeps for the backward pass, and what it never makes at all.

A block runs through AOTAutograd with inductor's decompositions, its passes over the joint graph and its partitioner, on
fake tensors; so what is kept is what inductor keeps. The two graphs are then not compiled but planned: a buffer is
allocated only where inductor would leave one between its kernels (``_fusion``).

Source: PyTorch 2.13, torch/_functorch/aot_autograd.py (``aot_function``), torch/_inductor/compile_fx.py
(``partition_fn``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from memfit.estimation._attention import Call, attend
from memfit.estimation._fusion import plan
from memfit.estimation._program import Program, find_blocks

#: Attributes in which blocks that are equal otherwise differ: their place in the model.
_PLACES = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_id", "idx", "index", "name"}


def compile_blocks(
    program: Program, blocks: Sequence[nn.Module] | None = None, *, architecture: str = "ampere"
) -> Program:
    """The program with each block run as ``torch.compile`` would run it on CUDA.

    Equal blocks are compiled once. A block that cannot be compiled runs as it is, with a note. Call it before blocks
    are wrapped in gradient checkpointing: a checkpoint around a compiled block works, one inside of it is lost.

    Args:
        program: Changed in place: the ``forward`` of the blocks is replaced.
        blocks: What is compiled, one by one; None for :func:`~memfit.estimation._program.find_blocks`,
            ``[program.model]`` for the whole model.
        architecture: The device's, for the kernel of attention, as in ``trace``.
    """
    compiler = _Compiler(program, architecture)
    for block in find_blocks(program.model) if blocks is None else blocks:
        block.forward = compiler.wrap(block.forward, block, type(block).__name__)
    return program


class _Compiler:
    """Compiles functions, each once for all that are equal."""

    def __init__(self, program: Program, architecture: str) -> None:
        self.program = program
        self.architecture = architecture
        self.done: dict[Any, Callable[..., Any] | None] = {}

    def wrap(self, function: Callable[..., Any], owner: nn.Module, name: str) -> Callable[..., Any]:
        body = _Body(owner, function)
        own = () if isinstance(getattr(function, "__self__", None), nn.Module) else (id(function),)

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            state = {**dict(body.named_parameters()), **dict(body.named_buffers())}
            tensors = [*state.values(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
            mode = detect_fake_mode(tensors)
            if mode is None:
                return function(*args, **kwargs)
            rest = tuple(None if isinstance(leaf, torch.Tensor) else _describe(leaf) for leaf in leaves)
            key = (own, _describe_module(owner), _describe_tensors(tensors), rest, str(spec), _describe_context())
            if key not in self.done:
                self.done[key] = self._compile(body, (state, leaves, spec), mode, name)
            compiled = self.done[key]
            if compiled is None:
                return function(*args, **kwargs)
            return compiled(tensors)

        return run

    def _compile(self, body: _Body, call: tuple[Any, ...], mode: Any, name: str) -> Callable[..., Any] | None:
        """What runs in the function's place, or None.

        It is made in a thread of its own: modes, hooks on saved tensors and autocast are settings of a thread, so there
        neither a recorder nor a checkpoint sees the tracing.
        """
        context = (*_describe_context(), self.architecture)
        with ThreadPoolExecutor(1) as thread, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of torch's own code about itself, should they be errors here
            try:
                return thread.submit(_trace_and_plan, body, call, mode, context).result()
            except Exception as error:
                reason = str(error).strip().partition("\n")[0]
                note = f"{name} runs without torch.compile: {type(error).__name__}: {reason}"
        if note not in self.program.notes:
            self.program.notes = (*self.program.notes, note)
        return None


class _Body(nn.Module):
    """A function as a module, so that its parameters can be exchanged."""

    def __init__(self, owner: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.owner = owner
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _describe(value: Any) -> Any:
    """Something to tell apart arguments that are no tensors."""
    plain = bool | int | float | str | torch.dtype | torch.device
    return (type(value), value) if isinstance(value, plain) or value is None else id(value)


def _describe_module(module: nn.Module) -> Any:
    """What equal blocks share: their classes, and all their plain attributes but those that name their place."""
    return tuple(
        (
            name,
            type(part),
            tuple((key, _describe(value)) for key, value in sorted(vars(part).items()) if _counts(key, value)),
        )
        for name, part in module.named_modules()
    )


def _counts(key: str, value: Any) -> bool:
    return isinstance(value, bool | int | float | str | torch.dtype) and key not in _PLACES


def _describe_tensors(tensors: Sequence[torch.Tensor]) -> Any:
    first: dict[int, int] = {}
    return tuple(
        (tuple(one.shape), one.stride(), one.dtype, one.requires_grad, first.setdefault(id(one), number))
        for number, one in enumerate(tensors)
    )


def _describe_context() -> tuple[bool, bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


class _CudaAttention(TorchFunctionMode):
    """Makes attention the operation that CUDA runs and inductor leaves alone."""

    def __init__(self, architecture: str) -> None:
        super().__init__()
        self.architecture = architecture

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **named)
        for new, old in (("mask", "attn_mask"), ("dropout", "dropout_p")):
            if old in named:
                named[new] = named.pop(old)
        call = Call(*args, **named)
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (one.to(dtype) for one in (call.query, call.key, call.value))
            call = replace(call, query=query, key=key, value=value)
        return attend(call, self.architecture)


def _trace_and_plan(body: _Body, call: tuple[Any, ...], mode: Any, context: Any) -> Callable[..., Any]:
    """Compiles a call of a body; the result takes the list of its parameters, buffers and tensor arguments."""
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    state, leaves, spec = call
    grad, autocast, autocast_dtype, architecture = context
    twins: dict[int, torch.Tensor] = {}
    with mode:
        inputs = [_twin(one, twins) for one in (*state.values(), *leaves) if isinstance(one, torch.Tensor)]
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    names = tuple(state)

    def flat(tensors: list[torch.Tensor]) -> Any:
        filled: list[Any] = list(rest)
        for place, tensor in zip(places, tensors[len(names) :], strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        with _CudaAttention(architecture), torch.autocast("cpu", autocast_dtype, enabled=autocast, cache_enabled=False):
            exchanged = dict(zip(names, tensors[: len(names)], strict=True))
            return torch.func.functional_call(body, exchanged, args, kwargs, tie_weights=False)

    compiled: Callable[..., Any] = aot_function(
        flat,
        fw_compiler=plan,
        bw_compiler=plan,
        partition_fn=partition_fn,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    with mode, V.set_fake_mode(mode), torch.set_grad_enabled(grad):
        compiled(inputs)
    return compiled


def _twin(tensor: torch.Tensor, twins: dict[int, torch.Tensor]) -> torch.Tensor:
    """A tensor like another that keeps none of its memory alive; the same for the same."""
    if id(tensor) not in twins:
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        twins[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
    return twins[id(tensor)]
