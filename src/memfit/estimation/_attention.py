"""Scaled dot product attention as CUDA runs it: which kernel it picks, and what that kernel keeps and scratches.

Sources: aten/src/ATen/native/transformers/attention.cpp, cuda/sdp_utils.cpp, cuda/attention_backward.cu,
cuda/flash_attn/flash_api.cpp and cuda/mem_eff_attention/kernel_backward.h of PyTorch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

Kernel = Literal["cudnn", "flash", "efficient", "math"]

_aten = torch.ops.aten
#: fp16 first: the only one of the two before Ampere.
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Call:
    """The arguments of ``scaled_dot_product_attention``."""

    query: Tensor  # (batch, heads, queries, head size)
    key: Tensor  # (batch, heads, keys, head size)
    value: Tensor
    attn_mask: Tensor | None = None  # broadcast to (batch, heads, queries, keys)
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def attend(architecture: str, *args: Any, **options: Any) -> Tensor:
    """Run an attention through the operation that CUDA picks."""
    call = Call(*args, **options)
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    kernel = pick_kernel(call, architecture)
    rest = (call.dropout_p, call.is_causal)
    results: tuple[Tensor, ...]
    if kernel == "math":
        more: dict[str, Any] = {"scale": call.scale, "enable_gqa": call.enable_gqa}
        results = _aten._scaled_dot_product_attention_math(query, key, value, mask, *rest, **more)
        return results[0]
    size = query.shape[-1]
    scale = call.scale if call.scale is not None else 1 / math.sqrt(size)
    if kernel == "flash":
        # Its head sizes are multiples of 8; the padding is seen by autograd (attention.cpp, pad_last_dim).
        query, key, value = (functional.pad(one, (0, -size % 8)) if size % 8 else one for one in (query, key, value))
        results = _aten._scaled_dot_product_flash_attention(query, key, value, *rest, False, scale=scale)
        return results[0][..., :size] if size % 8 else results[0]
    mask = None if mask is None else _as_bias(mask, query, key)
    learns = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (query, key, value, mask))
    given = (query, key, value, mask, learns, *rest)
    if kernel == "cudnn":
        results = _aten._scaled_dot_product_cudnn_attention(*given, False, scale=scale)
    else:
        results = _aten._scaled_dot_product_efficient_attention(*given, scale=scale)
    return results[0]


def pick_kernel(call: Call, architecture: str) -> Kernel:
    """Return the first kernel, in CUDA's order, that takes these arguments: cuDNN is tried first since Hopper."""
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    size = query.shape[-1]
    if query.dim() != 4 or query.shape[0] != key.shape[0] or (mask is not None and mask.dim() not in (2, 4)):
        return "math"
    if any(one is not None and one.stride(-1) != 1 for one in (query, key, value, mask)):
        return "math"  # such as T5's bias of positions, whose last dimension is that of the heads in memory
    is_modern = architecture not in ("volta", "turing")
    is_half = query.dtype in (_HALF if is_modern else _HALF[:1])
    has_one_size = size == key.shape[-1] == value.shape[-1]
    if is_half and is_modern and has_one_size:
        suits_cudnn = size <= 128 and not size % 8 and key.shape[2] > 1 and (call.dropout_p * 16).is_integer()
        if architecture in ("hopper", "blackwell") and suits_cudnn and not (mask is not None and mask.requires_grad):
            return "cudnn"
        if size <= 256 and mask is None and (not call.is_causal or query.shape[2] == key.shape[2]):
            return "flash"
    alignment = 8 if is_half else 4
    is_aligned = size == key.shape[-1] and not size % alignment and not value.shape[-1] % alignment
    if is_aligned and query.shape[1] == key.shape[1] == value.shape[1] and (is_half or query.dtype is torch.float32):
        return "efficient"
    return "math"


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Make a mask as the kernels take it: additive, rows aligned to 8 elements, expanded to all heads."""
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype))
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        size = mask.shape[-1]
        mask = functional.pad(mask, (0, 8 - size % 8))[..., :size]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _copies(*tensors: Tensor) -> list[int]:
    """Bytes of a kernel's copies of tensors that are not (batch, length, heads, size) in memory."""
    return [tensor.nbytes for tensor in tensors if not tensor.transpose(1, 2).is_contiguous()]


def scratch_of_flash_backward(args: Sequence[Any], result: Any) -> list[int]:
    """``mha_bwd``: fp32 sums of dQ and of dO·O, dK and dV by query head when heads are grouped."""
    grad, query, key, _, out = args[:5]
    batch, heads, length, head_size = query.shape
    rounded = _round_up(length, 128)
    columns = _round_up(head_size, 32) if head_size <= 192 else 256
    needs = [*_copies(grad, out), 4 * batch * heads * rounded, 4 * batch * heads * rounded * columns]
    if key.shape[1] != heads:
        needs += [batch * heads * key.shape[2] * head_size * key.element_size()] * 2
    return needs


def scratch_of_cudnn_backward(args: Sequence[Any], result: Any) -> list[int]:
    """cuDNN publishes no size: as much as flash attention, whose algorithm it shares, without the copies."""
    return scratch_of_flash_backward(args, result)[len(_copies(args[0], args[4])) :]


def scratch_of_efficient_backward(args: Sequence[Any], result: Any, *, architecture: str) -> list[int]:
    """``_efficient_attention_backward``: delta, and fp32 sums of the gradients that do not fit into registers."""
    grad, query, key = args[:3]
    value = args[3]
    batch, heads, length, head_size = query.shape
    needs = [*_copies(grad), 4 * batch * heads * length]
    if query.dtype not in _HALF:
        # (grad_out * out).sum(-1): fp32 gradients are summed in place
        return [*needs, 4 * batch * heads * length * value.shape[-1]]
    sums = _round_up(length, 64) * _round_up(head_size, 64)
    # Registers hold dK and dV of a head as wide as a block: 128 with the shared memory of data centre devices, else 64.
    block = 128 if architecture in ("ampere", "hopper", "blackwell") else 64
    if max(head_size, value.shape[-1]) > block:
        keys = _round_up(key.shape[2], block)
        sums += keys * (_round_up(head_size, block) + _round_up(value.shape[-1], block))
    return [*needs, 4 * batch * heads * sums]
