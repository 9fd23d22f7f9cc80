"""Keep less of a block for its backward pass: checkpointing, and a loss in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_MATRIX_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default}
#: Expensive operations whose results selective checkpointing keeps, beside matrix products: torchtitan's list of 2025
#: (distributed/activation_checkpoint.py, ``op``).
_KEPT = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    _aten.max.default,
}


def checkpoint_blocks(blocks: Iterable[nn.Module], kind: Literal["none", "selective", "full"]) -> None:
    """Keep of each block its inputs (``full``), or also attention and every second matrix product (``selective``)."""
    extra: dict[str, Any] = {"context_fn": _make_contexts} if kind == "selective" else {}

    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            # The state of the random generator lives on the host: nothing to count.
            return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=False, **extra, **kwargs)

        return forward

    if kind != "none":
        for block in blocks:
            block.forward = wrap(block.forward)


def _make_contexts() -> tuple[Any, Any]:
    counts = {False: 0, True: 0}

    def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _MATRIX_PRODUCTS:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        else:
            keep = operation in _KEPT
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)  # type: ignore[no-untyped-call, no-any-return]


class ChunkedHead(nn.Module):
    """An output layer that computes logits and loss chunk by chunk, and again within the backward pass."""

    def __init__(self, head: nn.Module, num_chunks: int) -> None:
        super().__init__()
        self.head, self.num_chunks = head, num_chunks

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hidden states (..., width), or the mean loss over all tokens of labels (...)."""
        if labels is None:
            return hidden
        hidden = hidden.flatten(end_dim=-2)
        pieces = zip(hidden.chunk(self.num_chunks), labels.flatten().chunk(self.num_chunks), strict=True)
        losses = [checkpoint(self._sum, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        return torch.stack(losses).sum() / labels.numel()

    def _sum(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(hidden).float(), labels, reduction="sum")
