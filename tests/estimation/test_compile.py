from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from memfit.estimation import CudaOps, Program, compile_blocks

ROWS, WIDTH = 64, 32
BYTES = ROWS * WIDTH * 4


class Storages(TorchDispatchMode):
    """Bytes of the storages that were made within: alive now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in inputs | self.known:
                storage = one.untyped_storage()
                self.known.add(storage._cdata)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self.die, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return result

    def die(self, key: int, num_bytes: int) -> None:
        self.known.discard(key)
        self.alive -= num_bytes


@pytest.fixture(autouse=True)
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode, CudaOps():
        yield mode


def watch(function: Callable[..., Any], *args: Any) -> tuple[Any, Storages]:
    with Storages() as storages:
        result = function(*args)
    return result, storages


def compiled(model: nn.Module, blocks: list[nn.Module] | None = None) -> Program:
    return compile_blocks(Program(model, None, lambda model, _: model()), blocks)


def rows(*shape: int, **more: Any) -> torch.Tensor:
    return torch.empty(shape or (ROWS, WIDTH), requires_grad=True, **more)


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos().exp().tanh()


class Gated(nn.Module):
    def __init__(self, layer_idx: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.norm = nn.RMSNorm(width)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Attention(nn.Module):
    def __init__(self, num_groups: int = 1, masked: bool = False) -> None:
        super().__init__()
        self.num_groups, self.masked = num_groups, masked

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool) if self.masked else None
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=self.num_groups > 1)


class Counts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * len(x.nonzero())


@pytest.mark.slow
def test_a_chain_of_pointwise_operations_keeps_and_makes_nothing_but_its_result() -> None:
    model = Chain()
    program = compiled(model, [model])
    x = rows()
    y, storages = watch(model, x)
    assert not program.notes
    assert storages.alive == storages.peak == BYTES
    _, eager = watch(Chain(), x)
    assert eager.peak == 3 * BYTES
    _, backward = watch(torch.autograd.grad, y.sum(), x)
    assert backward.peak <= 2 * BYTES + 8  # the gradient that comes in, made contiguous, and the one that goes out


def test_matrix_products_are_made_and_what_is_between_them_is_not() -> None:
    model = Gated()
    x = rows()
    with torch.no_grad():
        _, eager = watch(model, x)
        compiled(model, [model])
        _, fused = watch(model, x)
    # the norm, the gate and the values above it are alive at once; the norm's fp32 copies and silu are not made
    assert fused.peak <= 3 * BYTES + 1024 < eager.peak


def test_what_a_compiled_block_keeps_it_frees_as_its_backward_pass_goes_on() -> None:
    model = Gated()
    compiled(model, [model])
    x = rows()
    with Storages() as storages:
        y = model(x)
        kept = storages.alive - BYTES
        y.sum().backward()
        del y
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert 3 * BYTES <= kept <= 5 * BYTES
    assert storages.alive == BYTES + weights
    assert storages.peak < kept + 4 * BYTES + weights
    assert all(
        parameter.grad is not None and parameter.grad.shape == parameter.shape for parameter in model.parameters()
    )


def test_blocks_that_differ_in_their_place_only_are_compiled_once() -> None:
    calls: list[int] = []

    class Counted(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(x)

    alone = Counted()
    compiled(alone, [alone])
    alone(rows())
    once = len(calls)
    calls.clear()
    model = nn.Sequential(nn.Sequential(*(Counted(place) for place in range(5))))
    program = compiled(model)
    model(rows()).sum().backward()
    assert len(calls) == once and not program.notes
    for parameter in model[0][2].parameters():  # type: ignore[index, union-attr]
        parameter.requires_grad_(False)
    model(rows())
    assert len(calls) == 2 * once


def test_a_checkpoint_around_a_compiled_block_keeps_the_input_only() -> None:
    model = Gated()
    compiled(model, [model])
    x = rows()
    y, storages = watch(lambda: checkpoint(model, x, use_reentrant=False))
    assert storages.alive == BYTES
    y.sum().backward()
    assert x.grad is not None and model.up.weight.grad is not None


def test_frozen_weights_beside_low_rank_ones_get_no_gradient_and_keep_less() -> None:
    def keep(frozen: bool) -> tuple[Gated, int]:
        model = Gated()
        for layer in (model.gate, model.up, model.down):
            layer.weight.requires_grad_(not frozen)
        program = compiled(model, [model])
        y, storages = watch(model, rows())
        num_bytes = storages.alive
        y.sum().backward()
        assert not program.notes
        return model, num_bytes

    model, num_bytes = keep(frozen=True)
    assert model.up.weight.grad is None and model.norm.weight.grad is not None
    assert num_bytes < keep(frozen=False)[1]


@pytest.mark.parametrize("num_groups", [1, 4])
def test_attention_is_one_kernel_that_keeps_no_scores(num_groups: int) -> None:
    model = Attention(num_groups)
    program = compiled(model, [model])
    q = rows(2, 4, 256, 16, dtype=torch.bfloat16)
    k = rows(2, 4 // num_groups, 256, 16, dtype=torch.bfloat16)
    y, storages = watch(model, q, k)
    scores = 2 * 4 * 256 * 256 * 2
    assert y.shape == q.shape and storages.peak < scores / 4
    grads, backward = watch(torch.autograd.grad, y.float().sum(), [q, k])
    assert [one.shape for one in grads] == [q.shape, k.shape] and backward.peak < scores / 2
    assert not program.notes


def test_attention_with_a_mask_makes_the_mask_and_no_scores() -> None:
    model = Attention(masked=True)
    program = compiled(model, [model])
    q = rows(2, 4, 256, 16, dtype=torch.bfloat16)
    _, storages = watch(model, q, q)
    assert 256 * 256 * 2 <= storages.peak < 2 * 4 * 256 * 256 * 2
    assert not program.notes


def test_a_block_that_depends_on_the_data_runs_as_it_is_with_a_note() -> None:
    model = nn.Sequential(Gated(), Counts())
    program = compiled(model, list(model))
    with pytest.raises(Exception, match="nonzero"):
        model(rows())
    assert len(program.notes) == 1 and program.notes[0].startswith("Counts runs without torch.compile")


def test_buffers_that_a_forward_pass_changes_take_no_memory_anew() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1))
    program = compiled(model, [model])
    image = torch.empty(2, 4, 32, 32)
    y, storages = watch(model, image)
    assert not program.notes
    # the convolution's result, the masks of dropout and relu, and the block's result
    assert storages.alive <= 2 * image.nbytes + 2 * image.nbytes // 4 + 4096
    y.sum().backward()
    assert model[0].weight.grad is not None


def test_autocast_within_a_block_makes_its_products_in_the_lower_precision() -> None:
    model = Gated()
    program = compiled(model, [model])
    x = rows()
    with torch.autocast("cpu", torch.bfloat16):
        y, lower = watch(model, x)
    y.sum().backward()
    _, full = watch(model, x)
    assert not program.notes and lower.alive < full.alive
    assert model.up.weight.grad is not None and model.up.weight.grad.dtype == torch.float32
