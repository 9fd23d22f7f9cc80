"""The guard of the optimizer: room is tried beforehand, and what fails all the same is named."""

import inspect
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.errors import DoesNotFitError, HalfUpdatedError, UsageError
from memfit.training import OptimizerGuard

OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "momentum": {"cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "momentum foreach": {"cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "dampening": 0.5, "foreach": True},
    "Adam": {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True},
    "Adam foreach": {"cls": torch.optim.Adam, "lr": 0.1, "foreach": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.1},
    "NAdam": {"foreach": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


def make(name, sizes=((40, 30), (7,), (20, 50)), dtype=torch.float32):
    settings = dict(OPTIMIZERS[name])
    cls = settings.pop("cls", None) or getattr(torch.optim, name)
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size, dtype=dtype)) for size in sizes]
    half = [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]
    return params, cls(half, **settings)


def give_gradients(params, seed):
    torch.manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn_like(parameter)


def tensors_of(params, optimizer):
    found = list(params)
    for parameter in params:
        state = optimizer.state.get(parameter, {})
        found += [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in found]


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


class Scarce(TorchDispatchMode):
    """An allocator that has so many bytes for what is made under it and still alive, numbers apart."""

    def __init__(self, limit_bytes):
        super().__init__()
        self.limit_bytes, self.live, self.most = limit_bytes, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if is_shadow(args, kwargs):
            return result
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and tensor.numel() > 1:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.most = max(self.most, sum(self.live.values()))
        if self.most > self.limit_bytes:
            raise MemoryError
        return result


def tensors_in(value):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_shadow(args, kwargs):
    """Whether an operation takes no memory: it is one of those that measure."""
    device = (kwargs or {}).get("device")
    return (device is not None and torch.device(device).type == "meta") or any(t.is_meta for t in tensors_in(args))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_measured_without_memory_is_what_a_real_step_allocates(name):
    params, optimizer = make(name)
    give_gradients(params, 1)
    guard = OptimizerGuard(optimizer)
    with Scarce(1 << 40) as held:
        guard.prepare()
    optimizer.step()
    made = sum(
        value.nbytes for p in params for value in optimizer.state[p].values() if value is not None and value.ndim
    )
    assert sum(held.live.values()) == made == guard.pending_bytes
    with Scarce(1 << 40) as real:
        optimizer.step()
    with Scarce(1 << 40) as tried:
        OptimizerGuard(optimizer).prepare()
    assert real.most <= tried.most < real.most + 256


@pytest.mark.parametrize("name", ["Adam foreach", "Adam"])
def test_a_step_whose_temporaries_have_no_room_is_refused_before_anything_changes(name):
    params, optimizer = make(name)
    guard = OptimizerGuard(optimizer)
    for seed in (1, 2):
        give_gradients(params, seed)
        guard.step()
    before = tensors_of(params, optimizer)
    with Scarce(1 << 40) as tried:
        guard.prepare()
    needed = tried.most
    with pytest.raises(DoesNotFitError, match="temporary tensors") as caught, Scarce(needed - 64):
        guard.step()
    assert "foreach=False" in caught.value.remedy
    assert same(tensors_of(params, optimizer), before)
    with Scarce(needed):
        guard.step()
    assert not same(tensors_of(params, optimizer), before)


def test_a_state_that_has_no_room_is_refused_with_its_size_and_nothing_is_changed():
    params, optimizer = make("AdamW")
    guard = OptimizerGuard(optimizer)
    before = [parameter.detach().clone() for parameter in params]
    with pytest.raises(DoesNotFitError, match=r"17\.2 KiB for its state on cpu"), Scarce(1000):
        guard.prepare()
    give_gradients(params, 1)
    with pytest.raises(DoesNotFitError, match=r"17\.2 KiB for its state on cpu"), Scarce(1000):
        guard.step()
    assert same(params, before) and not optimizer.state


def test_the_room_for_the_state_is_kept_from_the_preparation_to_the_first_step():
    params, optimizer = make("AdamW")
    guard = OptimizerGuard(optimizer)
    with Scarce(1 << 40) as held:
        guard.prepare()
        assert sum(held.live.values()) == guard.pending_bytes == 2 * sum(p.nbytes for p in params)
    give_gradients(params, 1)
    guard.step()
    assert sum(held.live.values()) == guard.pending_bytes == 0
    with Scarce(1 << 40) as again:
        guard.prepare()
    assert sum(again.live.values()) == 0


def test_measuring_changes_neither_the_optimizer_nor_the_random_state():
    _params, optimizer = make("AdamW")
    torch.optim.lr_scheduler.StepLR(optimizer, 5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = torch.get_rng_state()
    OptimizerGuard(optimizer).prepare()
    assert not optimizer.state and not calls
    assert torch.equal(torch.get_rng_state(), before)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]


class Wrapping(torch.optim.Optimizer):
    """As many are written: it steps another optimizer."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_that_holds_another_is_never_run_for_measuring():
    params, inner = make("SGD")
    give_gradients(params, 1)
    before = [parameter.detach().clone() for parameter in params]
    guard = OptimizerGuard(Wrapping(inner))
    guard.prepare()
    assert same(params, before)
    guard.step()
    assert not same(params, before)


def test_memory_that_runs_out_inside_a_step_all_the_same_is_named():
    params, optimizer = make("AdamW")
    optimizer.step = lambda: torch.empty(1 << 60)
    give_gradients(params, 1)
    with pytest.raises(HalfUpdatedError, match=r"Memory ran out inside AdamW.step: .*you tried to allocate") as caught:
        OptimizerGuard(optimizer).step()
    assert "last checkpoint" in caught.value.remedy


def test_another_error_inside_a_step_is_passed_on():
    params, optimizer = make("SGD")
    give_gradients(params, 1)

    def broken():
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        OptimizerGuard(optimizer).step(broken)


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(UsageError, match="LBFGS"):
        OptimizerGuard(torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(2))]))


def test_torch_still_has_the_names_that_this_builds_on():
    _, optimizer = make("AdamW")
    assert hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "_optimizer_step_pre_hooks")
    assert "self" in inspect.signature(inspect.unwrap(type(optimizer).step)).parameters
