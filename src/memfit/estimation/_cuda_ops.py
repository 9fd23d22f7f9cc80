"""What CUDA would run in place of the kernels that fake CPU tensors pick, and the scratch memory that it would take.

Operations that PyTorch composes of others on a CPU, and runs as one on CUDA, are replaced below autograd's front door
(dispatch key ``AutogradCPU``), so that autograd saves what CUDA's formula saves. Results, saved tensors and gradients
then come from PyTorch's own shape functions; only what kernels allocate inside is counted here by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from memfit.estimation import _attention, _autocast
from memfit.estimation._events import Phase

_aten = torch.ops.aten

_MIB = 2**20
_MATRIX_PRODUCTS = frozenset(
    getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_grouped_mm")
)

#: ATen/native/cudnn/Conv_v8.cpp: workspaces of all plans are tried, as large as fits, and the cache is emptied then.
_BENCHMARK = (
    "torch.backends.cudnn.benchmark is on: the first steps try algorithms of convolutions whose workspaces may take "
    "all that the device has left, which no figure here counts"
)


class CudaOps:
    """While entered, operations on fake CPU tensors take the memory that they would take on CUDA.

    Args:
        architecture: ``volta``, ``turing``, ``ampere``, ``ada``, ``hopper`` or ``blackwell``.
    """

    def __init__(self, architecture: str = "ampere") -> None:
        self.architecture = architecture
        self.notes: dict[str, None] = {}
        #: How much more algorithms that unfold the input of a convolution take than was counted, by phase.
        self.convolution_slack: dict[Phase, int] = {}
        self._threads_with_workspace: set[bool] = set()
        self._library: Library | None = None
        self._scratch: dict[Any, Callable[[Sequence[Any], Any], Sequence[int]]] = {
            _aten._scaled_dot_product_flash_attention_backward.default: lambda args, _: (
                _attention.scratch_of_flash_backward(args)
            ),
            _aten._scaled_dot_product_cudnn_attention_backward.default: lambda args, _: (
                _attention.scratch_of_cudnn_backward(args)
            ),
            _aten._scaled_dot_product_efficient_attention_backward.default: lambda args, _: (
                _attention.scratch_of_efficient_backward(args, architecture=architecture)
            ),
            _aten.convolution.default: _scratch_of_convolution,
            _aten.convolution_backward.default: _scratch_of_convolution_backward,
            _aten.embedding_dense_backward.default: _scratch_of_embedding_backward,
            _aten._foreach_norm.Scalar: _scratch_of_foreach_norm,
        }

    def __enter__(self) -> CudaOps:
        library = self._library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        kernels: dict[str, Callable[..., Any]] = {
            "scaled_dot_product_attention": self._attend,
            "dropout": _drop,
            "rms_norm": _normalize,
            "softmax.int": partial(_soften, _aten._softmax),
            "log_softmax.int": partial(_soften, _aten._log_softmax),
            "lstm.input": partial(self._loop, _aten.lstm.input),
            "gru.input": partial(self._loop, _aten.gru.input),
        }
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradCPU")  # type: ignore[no-untyped-call]
        _autocast.register(library)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._library is not None:
            self._library._destroy()  # type: ignore[no-untyped-call]
            self._library = None

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        call = _attention.Call(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return _attention.attend(call, self.architecture)

    def _loop(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        self.notes["recurrent layers were counted as a loop over time, which keeps more than cuDNN does"] = None
        return operation.decompose(*args, **kwargs)

    def concerns(self, func: Any) -> bool:
        """Whether an operation may take scratch memory or workspaces."""
        return func in self._scratch or func in _MATRIX_PRODUCTS

    def scratch(self, func: Any, args: Sequence[Any], result: Any, phase: Phase) -> Sequence[int]:
        """Bytes that an operation takes beside its results and gives back at its end."""
        count = self._scratch.get(func)
        taken = count(args, result) if count is not None else ()
        if func is _aten.convolution.default:
            self._note_convolution(_unfolded(args, result) - sum(taken), phase)
        elif func is _aten.convolution_backward.default:
            self._note_convolution(_unfolded(args[1:], args[0]) - sum(taken), phase)
        return taken

    def _note_convolution(self, slack_bytes: int, phase: Phase) -> None:
        self.convolution_slack[phase] = max(self.convolution_slack.get(phase, 0), slack_bytes)
        if torch.backends.cudnn.benchmark:
            self.notes[_BENCHMARK] = None

    def workspaces(self, func: Any, *, in_backward: bool) -> Sequence[int]:
        """Bytes of lasting workspaces that an operation is the first to need.

        cuBLAS has a handle for each thread, and the backward pass runs in one of its own. Source:
        aten/src/ATen/cuda/CublasHandlePool.cpp, ``parseChosenWorkspaceSize``, PyTorch 2.13.
        """
        if func not in _MATRIX_PRODUCTS or in_backward in self._threads_with_workspace:
            return ()
        self._threads_with_workspace.add(in_backward)
        return (32 * _MIB if self.architecture in ("hopper", "blackwell") else 8 * _MIB + 128 * 1024,)


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


def _num_bytes(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0


def _is_channels_last(tensor: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _unfolded(args: Sequence[Any], result: Tensor) -> int:
    """Bytes of a convolution's input, unfolded: a row of all that goes into it for each place of its result."""
    weight: Tensor = args[1]
    places = result.numel() // max(1, result.shape[1])
    return places * (weight.numel() // max(1, weight.shape[0])) * result.element_size()


def _scratch_of_convolution(args: Sequence[Any], result: Any) -> Sequence[int]:
    """cuDNN's tensor core kernels work on NHWC: NCHW tensors are turned into its workspace and back.

    Source: NVIDIA cuDNN developer guide, "Tensor transformations" (NCHW conversion happens within the library).
    Depthwise convolutions run kernels of PyTorch, without.
    """
    image, weight, groups = args[0], args[1], args[8]
    if _is_channels_last(image) or groups == image.shape[1] > 1:
        return ()
    return (_num_bytes(image) + _num_bytes(weight) + _num_bytes(result),)


def _scratch_of_convolution_backward(args: Sequence[Any], result: Any) -> Sequence[int]:
    grad, image, weight, groups = args[0], args[1], args[2], args[9]
    if _is_channels_last(image) or groups == image.shape[1] > 1:
        return ()
    return (max(_num_bytes(image) + _num_bytes(weight) + _num_bytes(grad), _transformed(args)),)


def _transformed(args: Sequence[Any]) -> int:
    """Bytes of what cuDNN makes of both images for the gradient of an fp32 weight; 0 where nothing is known of it.

    Dense 3 x 3 kernels that move by one: tiles of 6 x 6 for each 4 x 4 places, of the input, the result's gradient and
    the weight (``WINOGRAD_NONFUSED``; Lavin and Gray, 2016). Others: the input, unfolded. Chosen by device peaks of
    ResNet-50 and VGG-16 on an A100 (itu-rad/GPUMemNet, Results_plotter_for_paper/data.csv), as nobody documents what is
    picked; those of VGG-19 and of other ResNets there agree with it, and depthwise convolutions need none.
    """
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
    """Above 3072 indices they are sorted: two sorted columns, their ranges and the sort's own copies, of int64.

    Source: ATen/native/cuda/Embedding.cu, ``embedding_dense_backward_cuda``.
    """
    count = args[1].numel()
    return (6 * 8 * count,) if count > 3072 else ()


def _scratch_of_foreach_norm(args: Sequence[Any], result: Any) -> Sequence[int]:
    """A partial norm for each chunk of 65 536 elements of the largest tensor, for every tensor.

    Source: ATen/native/cuda/ForeachReduceOp.cu, ``foreach_tensor_norm_cuda``.
    """
    tensors = args[0]
    chunks = max(-(-tensor.numel() // 65536) for tensor in tensors)
    return (4 * len(tensors) * chunks,)
