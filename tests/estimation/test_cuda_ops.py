"""Fake CPU tensors take the memory that CUDA's kernels would take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from memfit.estimation import Call, CudaOps, Program, Trace, find_peaks, pick_kernel, trace

MIB = 2**20
BATCH, HEADS, LENGTH, SIZE = 2, 4, 256, 64
NUM_ELEMENTS = BATCH * HEADS * LENGTH * SIZE


def trace_operation(operation: Callable[[Tensor], Tensor], tensor: Callable[[], Tensor], **options: Any) -> Trace:
    """The trace of one operation on a weight, then its sum, then backward."""

    def make() -> Program:
        model = nn.ParameterList([nn.Parameter(tensor())])
        optimizer = torch.optim.SGD(model.parameters())
        return Program(model, None, lambda model, _: operation(next(model.parameters())).sum(), optimizer, **options)

    return trace(make, num_iterations=1)


def count_kept(traced: Trace) -> int:
    """Bytes of activations that are more than a scalar."""
    kept = 0
    for event in traced.events:
        if traced.parts[event.block] == "activations" and event.num_bytes > 512:
            kept += event.num_bytes
    return kept


def make_heads(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(BATCH, LENGTH, HEADS, SIZE, dtype=dtype).transpose(1, 2)


def test_flash_attention_keeps_its_result_and_one_number_a_query() -> None:
    traced = trace_operation(lambda x: scaled_dot_product_attention(x, x, x, is_causal=True), make_heads)

    assert count_kept(traced) == 2 * NUM_ELEMENTS + 4 * BATCH * HEADS * LENGTH


def test_attention_backward_sums_in_fp32_beside_its_gradients() -> None:
    traced = trace_operation(lambda x: scaled_dot_product_attention(x, x, x), make_heads)
    sizes = [event.num_bytes for event in traced.events if event.phase == "backward"]

    assert 4 * NUM_ELEMENTS in sizes


@pytest.mark.parametrize(
    ("architecture", "dtype", "masked", "kernel"),
    [
        ("ampere", torch.bfloat16, False, "flash"),
        ("ampere", torch.bfloat16, True, "efficient"),
        ("ampere", torch.float32, False, "efficient"),
        ("hopper", torch.bfloat16, True, "cudnn"),
        ("hopper", torch.float32, False, "efficient"),
        ("turing", torch.float16, False, "efficient"),
        ("turing", torch.bfloat16, False, "math"),
    ],
)
def test_kernel_is_the_one_that_the_device_would_pick(
    architecture: str, dtype: torch.dtype, masked: bool, kernel: str
) -> None:
    heads = torch.empty(BATCH, HEADS, LENGTH, SIZE, dtype=dtype, device="meta")
    mask = torch.empty(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool, device="meta") if masked else None

    assert pick_kernel(Call(heads, heads, heads, mask), architecture) == kernel


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "efficient"), (torch.bfloat16, "cudnn")])
def test_a_bias_whose_last_dimension_is_strided_has_no_kernel_and_keeps_its_scores(
    dtype: torch.dtype, kernel: str
) -> None:
    """T5's bias of positions: the heads lie last in memory. Seen on an H100, 28 % above an estimate without this."""
    heads = make_heads(dtype)
    bias = torch.empty(1, LENGTH, LENGTH, HEADS, dtype=dtype).permute(0, 3, 1, 2)
    assert pick_kernel(Call(heads, heads, heads, bias), "hopper") == "math"
    assert pick_kernel(Call(heads, heads, heads, bias.contiguous()), "hopper") == kernel
    assert pick_kernel(Call(heads.transpose(2, 3), heads.transpose(2, 3), heads, None), "hopper") == "math"


def test_grouped_heads_with_a_mask_have_no_kernel_and_keep_their_scores() -> None:
    query = torch.empty(BATCH, HEADS, LENGTH, SIZE, dtype=torch.bfloat16, device="meta")
    key = query[:, :2]
    mask = torch.empty(LENGTH, LENGTH, dtype=torch.bool, device="meta")

    assert pick_kernel(Call(query, key, key, None, enable_gqa=True), "ampere") == "flash"
    assert pick_kernel(Call(query, key, key, mask, enable_gqa=True), "ampere") == "math"


def test_a_bool_mask_is_kept_in_the_dtype_of_the_heads() -> None:
    def attend(x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x, torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool))

    kept = count_kept(trace_operation(attend, make_heads))

    assert kept == 2 * NUM_ELEMENTS + 4 * BATCH * HEADS * LENGTH + 2 * BATCH * LENGTH * LENGTH


def test_a_learned_bias_gets_a_gradient_of_every_head() -> None:
    def attend(bias: Tensor) -> Tensor:
        heads = make_heads(torch.float32)
        return scaled_dot_product_attention(heads, heads, heads, bias)

    traced = trace_operation(attend, lambda: torch.empty(1, HEADS, LENGTH, LENGTH))
    sizes = [event.num_bytes for event in traced.events if event.phase == "backward"]

    assert 4 * BATCH * HEADS * LENGTH * LENGTH in sizes


def test_dropout_keeps_one_byte_an_element() -> None:
    traced = trace_operation(lambda x: nn.functional.dropout(x, 0.1) * 2, lambda: torch.empty(1024, 1024))

    assert count_kept(traced) == MIB


def test_softmax_of_fp16_into_fp32_makes_no_copy() -> None:
    def soften(x: Tensor) -> Tensor:
        return torch.softmax(x, -1, dtype=torch.float32)

    half = trace_operation(soften, lambda: torch.empty(1024, 1024, dtype=torch.float16))
    brain = trace_operation(soften, lambda: torch.empty(1024, 1024, dtype=torch.bfloat16))

    assert find_peaks(half)["forward"].parts.get("temporaries", 0) == 0
    assert find_peaks(brain)["forward"].parts["temporaries"] == 4 * MIB


def test_autocast_runs_norms_and_softmax_in_fp32_and_products_in_16_bits() -> None:
    dtypes: dict[str, torch.dtype] = {}

    def run(x: Tensor) -> Tensor:
        product = x @ x
        normal = nn.functional.layer_norm(product, (64,))
        dtypes.update(product=product.dtype, norm=normal.dtype, sum=product.sum().dtype, power=(product**2).dtype)
        dtypes["softmax"] = torch.softmax(product, -1).dtype
        dtypes["sum of integers"] = torch.ones(3, dtype=torch.int64).sum().dtype
        return normal

    trace_operation(run, lambda: torch.empty(64, 64), autocast_dtype=torch.bfloat16)

    assert dtypes == {
        "product": torch.bfloat16,
        "norm": torch.float32,
        "sum": torch.float32,
        "power": torch.float32,
        "softmax": torch.float32,
        "sum of integers": torch.int64,
    }


@pytest.mark.parametrize(("architecture", "num_bytes"), [("ampere", 8 * MIB + 128 * 1024), ("hopper", 32 * MIB)])
def test_cublas_takes_a_workspace_in_each_of_two_threads(architecture: str, num_bytes: int) -> None:
    ops = CudaOps(architecture)
    product = torch.ops.aten.mm.default

    assert ops.workspaces(torch.ops.aten.add.Tensor, in_backward=False) == ()
    assert ops.workspaces(product, in_backward=False) == (num_bytes,)
    assert ops.workspaces(product, in_backward=True) == (num_bytes,)
    assert ops.workspaces(product, in_backward=True) == ()


def test_convolutions_scratch_unless_channels_come_last() -> None:
    def run(image: Tensor) -> Tensor:
        return nn.functional.conv2d(image, torch.empty(8, 8, 3, 3), padding=1)

    planar = trace_operation(run, lambda: torch.empty(4, 8, 64, 64))
    last = trace_operation(run, lambda: torch.empty(4, 8, 64, 64, memory_format=torch.channels_last))
    image_bytes = 4 * 4 * 8 * 64 * 64

    assert find_peaks(planar)["forward"].num_bytes - find_peaks(last)["forward"].num_bytes >= 2 * image_bytes


@pytest.mark.parametrize(
    ("kernel", "stride", "num_bytes"),
    [
        (3, 1, 36 * 4 * (2 * 14 * 14 * (16 + 16) + 16 * 16)),  # Winograd's tiles of 6 x 6 for 4 x 4 places
        (5, 1, 4 * 2 * 52 * 52 * 16 * 25),  # unfolded
        (1, 1, 4 * (2 * 16 * 56 * 56 * 2 + 16 * 16)),  # both images and the weight with the channels last
    ],
)
def test_the_gradient_of_a_weight_takes_what_its_algorithm_makes_of_the_images(
    kernel: int, stride: int, num_bytes: int
) -> None:
    def run(image: Tensor) -> Tensor:
        return nn.functional.conv2d(image, torch.empty(16, 16, kernel, kernel, requires_grad=True), None, stride)

    def padded() -> Tensor:
        side = 56 if kernel == 1 else 56 + (kernel - 1) * (kernel == 3)
        return torch.empty(2, 16, side, side, requires_grad=True)

    events = trace_operation(run, padded).events
    backward = [event.num_bytes for event in events if event.phase == "backward"]
    assert num_bytes in backward


@pytest.mark.parametrize(("kind", "kept_each"), [("LSTM", 6), ("GRU", 7), ("RNN", 2)])
@pytest.mark.parametrize("is_bidirectional", [False, True])
def test_recurrent_layers_keep_what_was_measured_on_a_gpu(kind: str, kept_each: int, is_bidirectional: bool) -> None:
    """Of each value of a layer's output, as an H100 showed for cuDNN 9.19."""

    def run(x: Tensor) -> Tensor:
        layers = getattr(nn, kind)(16, 64, 3, batch_first=True, bidirectional=is_bidirectional)
        result: Tensor = layers(x)[0]
        return result

    traced = trace_operation(run, lambda: torch.empty(32, 128, 16))
    unit = 4 * 32 * 128 * 64 * (2 if is_bidirectional else 1)
    sizes = [event.num_bytes for event in traced.events if traced.parts[event.block] == "activations"]
    assert sorted(size for size in sizes if size >= unit) == [unit, (3 * kept_each - 1) * unit]
    peaks = {phase: sum(peak.parts.values()) for phase, peak in find_peaks(traced).items()}
    assert peaks["forward"] > (3 * kept_each + 3) * unit


def test_recurrent_layers_give_their_states_and_gradients_as_torch_does() -> None:
    layers = nn.LSTM(8, 16, 2, bidirectional=True, dropout=0.1)
    expected, (hidden, cell) = layers(torch.ones(5, 3, 8))
    with FakeTensorMode() as mode, CudaOps():
        copy = nn.LSTM(8, 16, 2, bidirectional=True, dropout=0.1)
        x = mode.from_tensor(torch.ones(5, 3, 8)).requires_grad_()
        found, (found_hidden, found_cell) = copy(x)
        found.sum().backward()
        gradients = {name: one.grad for name, one in copy.named_parameters()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = copy(x)[0]
    assert (found.shape, found_hidden.shape, found_cell.shape) == (expected.shape, hidden.shape, cell.shape)
    assert {name: one.shape for name, one in layers.named_parameters()} == {
        name: one.shape for name, one in gradients.items() if one is not None
    }
    assert x.grad is not None and x.grad.shape == x.shape
    assert half.dtype is torch.bfloat16


def test_real_tensors_meet_the_usual_kernels_afterwards() -> None:
    with FakeTensorMode(), CudaOps():
        scaled_dot_product_attention(make_heads(), make_heads(), make_heads())
    query = torch.ones(1, 1, 2, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        normal = nn.functional.layer_norm(torch.ones(2, 4, dtype=torch.bfloat16), (4,))

    assert scaled_dot_product_attention(query, query, query).detach().equal(torch.ones(1, 1, 2, 4))
    assert normal.dtype is torch.bfloat16


def test_what_compiles_later_takes_no_kernel_of_an_estimate() -> None:
    """Compiling remembers which kernel an operation runs; those of an estimate are gone at its end."""
    query = torch.ones(1, 1, 2, 4, requires_grad=True)
    attend = scaled_dot_product_attention
    with CudaOps(), FakeTensorMode(allow_non_fake_inputs=True), enable_python_dispatcher():
        attend(query, query, query)
    with enable_python_dispatcher():
        (gradient,) = torch.autograd.grad(attend(query, query, query).sum(), query)
    assert torch.equal(gradient, torch.ones_like(query))
