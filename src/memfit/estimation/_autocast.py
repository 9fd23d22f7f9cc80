"""``torch.autocast("cuda")`` for fake CPU tensors: CUDA's lists of operations, on the dispatch key of CPU.

``torch.autocast("cpu")`` casts the inputs of matrix products and convolutions as CUDA does, and keeps cast weights to
its end as CUDA does; but it leaves norms, softmax, powers and sums in 16 bits, where CUDA runs them, and keeps their
results, in fp32. Source of the lists: aten/src/ATen/autocast_mode.h, PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

# AT_FORALL_FP32: inputs are cast to fp32.
_IN_FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
"""

# AT_FORALL_FP32_SET_OPT_DTYPE: the result is asked for in fp32.
_INTO_FP32 = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""


def register(library: Library) -> None:
    """Adds CUDA's fp32 operations to those that ``torch.autocast("cpu")`` knows."""
    for names, wrap in ((_IN_FP32, _cast_inputs), (_INTO_FP32, _ask_for_fp32)):
        for name in names.split():
            base, _, overload = name.partition(".")
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                continue
            operation = getattr(getattr(torch.ops.aten, base), overload or "default")
            library.impl(name, wrap(operation), "AutocastCPU")  # type: ignore[no-untyped-call]


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _is_eligible(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _widen(value: Any) -> Any:
    return value.to(torch.float32) if _is_eligible(value) and value.dtype is not torch.float32 else value


def _cast_inputs(operation: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return operation(*map(_widen, args), **{name: _widen(value) for name, value in kwargs.items()})

    return kernel


def _ask_for_fp32(operation: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operation._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if _is_eligible(given[names[0]]) and given.get("dtype") is None:
            position = names.index("dtype")
            if position < len(args):
                args = (*args[:position], torch.float32, *args[position + 1 :])
            else:
                kwargs = {**kwargs, "dtype": torch.float32}
        with _without_autocast():
            return operation(*args, **kwargs)

    return kernel
