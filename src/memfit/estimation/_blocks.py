"""What is kept of a block for its backward pass: all, only its input, the results of its matrices, or nothing here."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_MATRIX_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default}
#: Results that selective checkpointing keeps beside those of matrix products: what is dear to make again. The list is
#: torchtitan's of 2025 (distributed/activation_checkpoint.py, ``op``).
_KEPT = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    _aten.max.default,
}
#: torchtune 0.6, training/_activation_offloading.py: smaller tensors stay; the last five wait for their copy to end.
_MIN_OFFLOADED_BYTES = 1024
_NUM_IN_FLIGHT = 5


class _Checkpointed:
    """The forward pass of a block that keeps little and is run again within the backward pass."""

    def __init__(self, forward: Callable[..., Any], *, selective: bool) -> None:
        self.inner = forward
        self.selective = selective

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        extra: dict[str, Any] = {"context_fn": _make_contexts} if self.selective else {}
        # The state of the random generator lives on the host: nothing to count.
        return checkpoint(self.inner, *args, use_reentrant=False, preserve_rng_state=False, **extra, **kwargs)


def checkpoint_blocks(blocks: Iterable[nn.Module], kind: Literal["none", "selective", "full"]) -> None:
    """Makes each block run again within the backward pass instead of keeping its activations.

    Args:
        blocks: Changed in place; ``forward.inner`` is what each ran before.
        kind: ``full`` keeps the inputs of a block; ``selective`` also what attention gives and every second matrix
            product.
    """
    if kind != "none":
        for block in blocks:
            block.forward = _Checkpointed(block.forward, selective=kind == "selective")


def _make_contexts() -> tuple[Any, Any]:
    counts = {False: 0, True: 0}

    def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _MATRIX_PRODUCTS:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        else:
            keep = operation in _KEPT or getattr(operation, "namespace", "") == "memfit"
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)  # type: ignore[no-untyped-call, no-any-return]


@contextlib.contextmanager
def offload_activations(model: nn.Module, *, head: nn.Module | None = None) -> Iterator[None]:
    """Within it, what is kept for the backward pass leaves the device and comes back, as new bytes, when it is used.

    Weights stay, as do tensors of less than 1 KiB and what the head keeps; the last five tensors that left are still
    there: their copies are under way.

    Args:
        model: Whose weights stay.
        head: A module whose activations stay: the backward pass begins with them.
    """
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    in_flight: deque[torch.Tensor] = deque(maxlen=_NUM_IN_FLIGHT)

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.numel() * tensor.element_size() < _MIN_OFFLOADED_BYTES:
            return tensor
        if tensor.untyped_storage()._cdata in weights:
            return tensor
        in_flight.append(tensor.detach())
        return tensor.shape, tensor.stride(), tensor.dtype

    def unpack(packed: Any) -> torch.Tensor:
        in_flight.clear()
        if isinstance(packed, torch.Tensor):
            return packed
        shape, stride, dtype = packed
        return torch.empty_strided(shape, stride, dtype=dtype)

    with contextlib.ExitStack() as stack:
        stack.enter_context(saved_tensors_hooks(pack, unpack))
        if head is not None:
            stack.enter_context(_exempt(head))
        yield


@contextlib.contextmanager
def _exempt(module: nn.Module) -> Iterator[None]:
    """What ``module`` keeps stays where it is."""
    hooks: list[saved_tensors_hooks] = []

    def enter(*_: Any) -> None:
        hooks.append(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        hooks[-1].__enter__()

    def leave(*_: Any) -> None:
        hooks.pop().__exit__(None, None, None)

    handles = (module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class ChunkedHead(nn.Module):
    """An output layer that makes logits and their loss piece by piece, and again within the backward pass.

    Called without labels it gives its input back, so that a model which ends in it ends in hidden states.

    Args:
        head: Makes logits from hidden states.
        num_chunks: The pieces.
        softcap: The bound of the logits' hyperbolic tangent; None for none.
    """

    def __init__(self, head: nn.Module, num_chunks: int, *, softcap: float | None = None) -> None:
        super().__init__()
        self.head = head
        self.num_chunks = num_chunks
        self.softcap = softcap

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """The hidden states themselves, or the mean loss over all tokens.

        Args:
            hidden: (..., width).
            labels: (...), aligned with ``hidden``; -100 where no loss is taken.
        """
        if labels is None:
            return hidden
        hidden = hidden.flatten(end_dim=-2)
        pieces = zip(hidden.chunk(self.num_chunks), labels.flatten().chunk(self.num_chunks), strict=True)
        losses = [checkpoint(self._sum, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        return torch.stack(losses).sum() / labels.numel()

    def _sum(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return functional.cross_entropy(logits.float(), labels, reduction="sum")
