"""Programs of one rank: figures by hand, and FSDP2's against the real ``fully_shard``."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from memfit.estimation import Peak, Program, Setup, Trace, find_peaks, shard, trace

pytestmark = pytest.mark.slow

WIDTH, HIDDEN, VOCABULARY, BATCH, LENGTH = 64, 256, 251, 4, 32  # 251 and the heads of 3 ranks do not divide


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.o_proj((scores @ v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up_proj = nn.Linear(WIDTH, HIDDEN)
        self.down_proj = nn.Linear(HIDDEN, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down_proj(F.gelu(self.up_proj(x)))


class Model(nn.Module):
    def __init__(self, *, checkpointed: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(checkpointed=checkpointed) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def take_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch).float()
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


def freeze_most(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up_proj" in name)


def make_program(model: nn.Module, setup: Setup) -> Program:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=setup.foreach)
    batch = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return Program(model, batch, take_loss, optimizer, num_microbatches=setup.num_microbatches)


def trace_rank(setup: Setup, change: Callable[[nn.Module], None] = lambda model: None, **options: bool) -> Trace:
    def make() -> Program:
        torch.set_default_dtype(torch.bfloat16 if setup.dtype == "bf16" else torch.float32)
        model = Model(**options)
        torch.set_default_dtype(torch.float32)
        change(model)
        return shard(make_program(model, setup), setup)

    return trace(make, cuda=False)


@functools.cache
def find_rank_peaks(*args: Any, **kwargs: Any) -> dict[str, Peak]:
    return dict(find_peaks(trace_rank(*args, **kwargs)))


def count_bytes(change: Callable[[nn.Module], None] = lambda model: None) -> int:
    """The bytes of the trained parameters in fp32."""
    model = Model()
    change(model)
    return sum(4 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


class Meter(TorchDispatchMode):
    """Bytes of all storages alive, those that FSDP frees and fills again by resizing included."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.alive = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata not in self.sizes:
                self.set(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return result

    def set(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata
        if key not in self.sizes:
            weakref.finalize(storage, self.drop, key)
        self.alive += num_bytes - self.sizes.get(key, 0)
        self.sizes[key] = num_bytes
        self.peak = max(self.peak, self.alive)

    def drop(self, key: int) -> None:
        self.alive -= self.sizes.pop(key)


@contextlib.contextmanager
def watch_resizing(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(_fsdp_param, "alloc_storage", lambda t: meter.set(t.untyped_storage(), t.numel() * t.itemsize))
        patch.setattr(_fsdp_param, "free_storage", lambda t: meter.set(t.untyped_storage(), 0))
        yield


@pytest.fixture
def ranks() -> Iterator[Callable[[int], Any]]:
    def start(world_size: int) -> Any:
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        return init_device_mesh("cpu", (world_size,))

    yield start
    dist.destroy_process_group()


def measure_real_fsdp2(setup: Setup, mesh: Any, monkeypatch: pytest.MonkeyPatch, change: Any, **options: bool) -> int:
    """The peak of forward and backward passes of the second iteration, under the real ``fully_shard``."""
    policy = MixedPrecisionPolicy()
    if setup.dtype == "bf16-amp":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    meter = Meter()
    with FakeTensorMode(), meter, watch_resizing(meter, monkeypatch):
        model = Model(**options)
        change(model)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        program = make_program(model, setup)
        assert program.optimizer is not None
        for _ in range(2):
            meter.peak = 0
            for _ in range(setup.num_microbatches):
                take_loss(model, program.batch).backward()
            peak = meter.peak
            program.optimizer.step()
            program.optimizer.zero_grad()
    return peak


@pytest.mark.parametrize(
    ("setup", "change", "options"),
    [
        (Setup(dtype="bf16-amp", world_size=3), None, {}),
        (Setup(dtype="fp32", world_size=4), None, {"checkpointed": True}),
        (Setup(dtype="bf16-amp", world_size=4, num_microbatches=2), None, {"tied": True}),
        (Setup(dtype="fp32", world_size=2), freeze_most, {}),
    ],
    ids=["mixed precision", "checkpointed", "tied and in microbatches", "frozen"],
)
def test_fsdp2_peaks_as_the_real_fully_shard_does(
    setup: Setup, change: Any, options: dict[str, bool], ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = change or (lambda model: None)
    real = measure_real_fsdp2(setup, ranks(setup.world_size), monkeypatch, change, **options)
    peaks = find_rank_peaks(Setup(**{**vars(setup), "strategy": "fsdp"}), change=change, **options)
    emulated = max(peaks[phase].num_bytes for phase in ("forward", "backward"))
    assert emulated == pytest.approx(real, rel=2e-3)  # ghosts of a byte each, and a few scalars


@pytest.mark.proves("S3-40")
@pytest.mark.core
def test_fsdp_keeps_a_share_of_weights_gradients_and_states() -> None:
    peaks = find_rank_peaks(Setup(dtype="fp32", world_size=4, strategy="fsdp"))
    step = peaks["step"].parts
    share = count_bytes() / 4
    assert step["weights"] == pytest.approx(share, rel=0.01)
    assert step["gradients"] == pytest.approx(share, rel=0.01)
    assert step["optimizer"] == pytest.approx(2 * share, rel=0.01)
    assert "communication" not in step
    # what lies outside of blocks, a block, and the buffer of the next one: of two blocks as much as the model
    assert peaks["backward"].parts["communication"] == pytest.approx(count_bytes(), rel=0.01)


def test_ddp_holds_gradients_twice() -> None:
    alone = find_rank_peaks(Setup(dtype="fp32"))
    ddp = find_rank_peaks(Setup(dtype="fp32", world_size=4, strategy="ddp"))
    for phase in ("forward", "backward", "step"):
        assert ddp[phase].num_bytes - alone[phase].num_bytes == count_bytes()


@pytest.mark.core
def test_ddp_buckets_only_what_is_trained() -> None:
    ddp = find_rank_peaks(Setup(dtype="fp32", world_size=4, strategy="ddp"), change=freeze_most)
    assert ddp["step"].parts["communication"] == count_bytes(freeze_most)


@pytest.mark.parametrize("habit", ["master_weights", "optimizer_in_backward"])
def test_optimizers_that_hold_copies_or_run_in_the_backward_pass_are_made_anew(habit: Any) -> None:
    setup = Setup(dtype="bf16", world_size=4, strategy="fsdp", **{habit: True})
    share_bytes = count_bytes() / 4
    expected = 3 * share_bytes if habit == "master_weights" else 2 * share_bytes / 2  # in fp32, or in bf16
    assert find_rank_peaks(setup)["step"].parts["optimizer"] == pytest.approx(expected, rel=0.01)
