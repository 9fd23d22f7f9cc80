"""Replace what fake CPU tensors run by what CUDA runs, and count the scratch memory of CUDA's kernels.

What CUDA runs as one operation is replaced at the dispatch key ``AutogradCPU``, so that autograd saves what CUDA's
formula saves; only what kernels allocate inside is counted here. ``torch.autocast("cpu")`` leaves norms, softmax,
powers and sums in 16 bits, which CUDA computes and keeps in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.library import Library

from memfit.estimation import _attention
from memfit.estimation._events import Phase
from memfit.estimation._gpus import BLAS_LARGE, BLAS_SMALL
from memfit.estimation._recurrent import RECURRENT, run_recurrent

_aten = torch.ops.aten

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_grouped_mm")  # the last one from torch 2.8 on
_MATRIX_PRODUCTS = frozenset(getattr(_aten, name).default for name in _PRODUCTS if hasattr(_aten, name))

# Operations whose inputs autocast casts to fp32 on CUDA: AT_FORALL_FP32 in aten/src/ATen/autocast_mode.h, PyTorch 2.13.
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
# Operations whose result it asks for in fp32: AT_FORALL_FP32_SET_OPT_DTYPE.
_INTO_FP32 = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""


def _operation(name: str) -> Any:
    """Return the operation of aten with this name, such as ``softmax.int``."""
    base, _, overload = name.partition(".")
    return getattr(getattr(_aten, base), overload or "default")


class CudaOps:
    """While entered, operations on fake CPU tensors take the memory that they take on CUDA. The architecture is
    ``volta``, ``turing``, ``ampere``, ``ada``, ``hopper`` or ``blackwell``."""

    def __init__(self, architecture: str = "ampere") -> None:
        self.architecture = architecture
        #: How much more algorithms that unfold the input of a convolution take than was counted, by phase.
        self.convolution_slack: dict[Phase, int] = {}
        self._threads_with_workspace: set[bool] = set()
        self._library: Library | None = None
        self._registered: list[tuple[Any, DispatchKey]] = []
        self._scratch: dict[Any, Callable[[Sequence[Any], Any], Sequence[int]]] = {
            _aten._scaled_dot_product_flash_attention_backward.default: _attention.scratch_of_flash_backward,
            _aten._scaled_dot_product_cudnn_attention_backward.default: _attention.scratch_of_cudnn_backward,
            _aten._scaled_dot_product_efficient_attention_backward.default: partial(
                _attention.scratch_of_efficient_backward, architecture=architecture
            ),
            _aten.convolution.default: _scratch_of_convolution,
            _aten.convolution_backward.default: _scratch_of_convolution_backward,
            _aten.embedding_dense_backward.default: _scratch_of_embedding_backward,
            _aten._foreach_norm.Scalar: _scratch_of_foreach_norm,
        }

    def __enter__(self) -> CudaOps:
        library = self._library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        kernels: dict[str, Callable[..., Any]] = {
            "scaled_dot_product_attention": partial(_attention.attend, self.architecture),
            "dropout": _drop,
            "rms_norm": _normalize,
            "softmax.int": partial(_soften, _aten._softmax),
            "log_softmax.int": partial(_soften, _aten._log_softmax),
            **{f"{kind}.input": partial(run_recurrent, kind) for kind in RECURRENT},
        }
        for name, kernel in kernels.items():
            self._register(library, name, kernel, "AutogradCPU")
        for names, wrap in ((_IN_FP32, _cast_inputs), (_INTO_FP32, _ask_for_fp32)):
            for name in names.split():
                if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                    self._register(library, name, wrap(_operation(name)), "AutocastCPU")
        return self

    def __exit__(self, *_: object) -> None:
        if self._library is not None:
            self._library._destroy()  # type: ignore[no-untyped-call]
            self._library = None
            for operation, key in self._registered:  # compiling would still take the kernels that are gone
                operation._uncache_dispatch(key)
            self._registered.clear()

    def _register(self, library: Library, name: str, kernel: Callable[..., Any], key: str) -> None:
        library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        self._registered.append((_operation(name), DispatchKey.__members__[key]))
        self._registered[-1][0]._uncache_dispatch(self._registered[-1][1])

    def concerns(self, func: Any) -> bool:
        return func in self._scratch or func in _MATRIX_PRODUCTS

    def scratch(self, func: Any, args: Sequence[Any], result: Any, phase: Phase) -> Sequence[int]:
        """Return the bytes that an operation takes beside its results and gives back at its end."""
        count = self._scratch.get(func)
        taken = count(args, result) if count is not None else ()
        if func in (_aten.convolution.default, _aten.convolution_backward.default):
            images = (args, result) if func is _aten.convolution.default else (args[1:], args[0])
            slack_bytes = _unfolded(*images) - sum(taken)
            self.convolution_slack[phase] = max(self.convolution_slack.get(phase, 0), slack_bytes)
        return taken

    def workspaces(self, func: Any, *, in_backward: bool) -> Sequence[int]:
        """Return the bytes of lasting workspaces that an operation is the first to need: cuBLAS's, one a thread."""
        if func not in _MATRIX_PRODUCTS or in_backward in self._threads_with_workspace:
            return ()
        self._threads_with_workspace.add(in_backward)
        return (BLAS_LARGE if self.architecture in ("hopper", "blackwell") else BLAS_SMALL,)


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


def _drop(tensor: Tensor, p: float, train: bool) -> Tensor:
    """CUDA keeps a mask of a byte an element (ATen/native/Dropout.cpp, ``is_fused_kernel_acceptable``)."""
    if not train or p == 0 or not tensor.numel():
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype)
    result: Tensor = _aten.native_dropout(tensor, p, train)[0]
    return result


def _normalize(tensor: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """CUDA has one kernel that keeps its input (ATen/native/layer_norm.cpp, ``rms_norm_symint``)."""
    result: Tensor = _aten._fused_rms_norm(tensor, shape, weight, eps)[0]
    return result


def _soften(operation: Any, tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """CUDA turns fp16 into fp32 within the kernel (ATen/native/SoftMax.cpp)."""
    if tensor.dtype is torch.float16 and dtype is torch.float32:
        result: Tensor = operation(tensor, dim, True)
    else:
        result = operation(tensor if dtype is None else tensor.to(dtype), dim, False)
    return result


def _is_channels_last(tensor: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _unfolded(args: Sequence[Any], result: Tensor) -> int:
    """Bytes of a convolution's unfolded input: for each place of the result, all numbers that go into it."""
    weight: Tensor = args[1]
    places = result.numel() // max(1, result.shape[1])
    return places * (weight.numel() // max(1, weight.shape[0])) * result.element_size()


def _scratch_of_convolution(args: Sequence[Any], result: Any) -> Sequence[int]:
    """cuDNN converts NCHW to NHWC in its workspace (developer guide); depthwise convolutions run kernels of PyTorch."""
    image, weight, groups = args[0], args[1], args[8]
    if _is_channels_last(image) or groups == image.shape[1] > 1:
        return ()
    return (image.nbytes + weight.nbytes + result.nbytes,)


def _scratch_of_convolution_backward(args: Sequence[Any], result: Any) -> Sequence[int]:
    grad, image, weight, groups = args[0], args[1], args[2], args[9]
    if _is_channels_last(image) or groups == image.shape[1] > 1:
        return ()
    return (max(image.nbytes + weight.nbytes + grad.nbytes, _transformed(args)),)


def _transformed(args: Sequence[Any]) -> int:
    """Bytes of what cuDNN makes of both images for the gradient of an fp32 weight; 0 if that is unknown.

    Dense 3 x 3 kernels that move by one: tiles of 6 x 6 for each 4 x 4 places, of the input, the result's gradient and
    the weight (``WINOGRAD_NONFUSED``; Lavin and Gray, 2016). Others: the input, unfolded. Nobody documents what cuDNN
    picks: this fits device peaks of ResNet-50 and VGG-16 on an A100 (itu-rad/GPUMemNet,
    Results_plotter_for_paper/data.csv), and those of VGG-19 and of other ResNets there agree."""
    grad, image, weight, stride, dilation, is_transposed, groups = *args[:3], args[4], args[6], args[7], args[9]
    kernel = tuple(weight.shape[2:])
    if image.dim() != 4 or image.dtype is not torch.float32 or groups != 1 or is_transposed or kernel == (1, 1):
        return 0
    if kernel == (3, 3) and set(stride) | set(dilation) == {1}:
        height, width = grad.shape[2:]
        tiles = len(image) * math.ceil(height / 4) * math.ceil(width / 4)
        inputs, outputs = weight.shape[1], weight.shape[0]
        num_values: int = tiles * (inputs + outputs) + inputs * outputs
        return 36 * 4 * num_values
    return _unfolded(args[1:], grad)


def _scratch_of_embedding_backward(args: Sequence[Any], result: Any) -> Sequence[int]:
    """More than 3072 indices are sorted: six columns of int64 (ATen/native/cuda/Embedding.cu)."""
    count = args[1].numel()
    return (6 * 8 * count,) if count > 3072 else ()


def _scratch_of_foreach_norm(args: Sequence[Any], result: Any) -> Sequence[int]:
    """Each tensor has a norm for each 65,536 elements of the largest (ATen/native/cuda/ForeachReduceOp.cu)."""
    tensors = args[0]
    chunks = max(-(-tensor.numel() // 65536) for tensor in tensors)
    return (4 * len(tensors) * chunks,)
