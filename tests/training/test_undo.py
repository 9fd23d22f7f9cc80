"""The guard of the optimizer: room tried beforehand, steps in parts, undo, and what cannot be undone."""

import inspect
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.errors import DoesNotFitError, HalfUpdatedError, UsageError
from memfit.training import _undo
from memfit.training._undo import OptimizerGuard

OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "momentum": {"cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "momentum foreach": {"cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "dampening": 0.5, "foreach": True},
    "Adam": {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True},
    "Adam foreach": {"cls": torch.optim.Adam, "lr": 0.1, "foreach": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.1},
    "AdamW fused": {"cls": torch.optim.AdamW, "lr": 0.1, "fused": True},
    "NAdam": {"foreach": True},
    "RAdam": {"foreach": True},
    "Adamax": {},
    "Adagrad": {},
    "Adadelta": {"foreach": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
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


def put_back(params, optimizer, values, keys):
    for parameter in params:
        if parameter not in keys:
            optimizer.state.pop(parameter, None)
    tensors = [*params]
    for parameter in params:
        state = optimizer.state.get(parameter, {})
        tensors += [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


class Fails(TorchDispatchMode):
    """Raises at one operation; counts them. ``only`` names the kind that counts."""

    def __init__(self, at=None, only=""):
        super().__init__()
        self.at, self.only, self.count = at, only, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.only in str(func) and not is_shadow(args, kwargs):
            self.count += 1
            if self.count - 1 == self.at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return func(*args, **(kwargs or {}))


class Scarce(TorchDispatchMode):
    """An allocator that has so many bytes for what is made under it and still alive, numbers apart."""

    def __init__(self, limit_bytes):
        super().__init__()
        self.limit_bytes, self.live = limit_bytes, {}

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
        if sum(self.live.values()) > self.limit_bytes:
            raise MemoryError
        return result


def tensors_in(value):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_shadow(args, kwargs):
    """Whether an operation takes no memory: it is one of those that measure."""
    device = (kwargs or {}).get("device")
    return (device is not None and torch.device(device).type == "meta") or any(t.is_meta for t in tensors_in(args))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", [True, False])
def test_an_oom_at_any_operation_of_a_step_leaves_everything_as_it_was(name, first):
    params, optimizer = make(name)
    guard = OptimizerGuard(optimizer)
    if not first:
        give_gradients(params, 1)
        guard.step()
    give_gradients(params, 2)
    grads = [parameter.grad.clone() for parameter in params]
    before, keys = tensors_of(params, optimizer), {p: set(optimizer.state[p]) for p in optimizer.state}
    other_params, other = make(name)
    for seed in (2,) if first else (1, 2):
        give_gradients(other_params, seed)
        other.step()
    num_ooms, fails = 0, Fails(0)
    while fails.count >= fails.at:  # until a step has fewer operations than that
        fails = Fails(fails.at + 1)
        try:
            with fails:
                guard.step()
        except torch.OutOfMemoryError:
            num_ooms += 1
            guard._in_parts = False
        else:  # it was a trial allocation that failed, and the step went in parts or without copies
            assert same(tensors_of(params, optimizer), tensors_of(other_params, other))
            put_back(params, optimizer, before, keys)
        assert same(tensors_of(params, optimizer), before)
        assert {p: set(optimizer.state[p]) for p in optimizer.state} == keys
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad.copy_(grad)
    assert num_ooms > 1


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("Adafactor",)])
def test_steps_in_parts_have_the_bits_of_whole_steps(name):
    params, optimizer = make(name)
    other_params, other = make(name)
    guard = OptimizerGuard(optimizer)
    for seed in range(4):
        give_gradients(params, seed)
        give_gradients(other_params, seed)
        guard._in_parts = True
        guard.step()
        other.step()
        assert same(tensors_of(params, optimizer), tensors_of(other_params, other))
    assert "step" not in optimizer.__dict__
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]


@pytest.mark.parametrize("name", ["momentum", "momentum foreach", "Adam", "Adam foreach", "AdamW", "RMSprop", "NAdam"])
def test_what_is_measured_without_memory_is_what_a_real_step_allocates(name):
    params, optimizer = make(name)
    give_gradients(params, 1)
    guard = OptimizerGuard(optimizer)
    guard.prepare()
    state = sum(size for _, size in guard._need.state)
    temporaries = sum(size for _, size in guard._need.whole)
    assert sum(block.nbytes for block in guard._reserve) == state
    optimizer.step()
    made = sum(
        value.nbytes for p in params for value in optimizer.state[p].values() if value is not None and value.ndim
    )
    assert state == made
    with Scarce(temporaries):
        optimizer.step()
    with pytest.raises(MemoryError), Scarce(max(0, temporaries - 256)):
        optimizer.step()
        raise MemoryError if temporaries == 0 else AssertionError("less was enough")


def test_a_step_whose_temporaries_have_no_room_goes_in_parts_and_one_that_cannot_is_refused_before_anything_changes(
    monkeypatch,
):
    sizes = ((7,), (40, 30), (20, 50))
    params, optimizer = make("Adam foreach", sizes)
    guard = OptimizerGuard(optimizer)
    give_gradients(params, 1)
    guard.step()
    give_gradients(params, 2)
    other_params, other = make("Adam foreach", sizes)
    for seed in (1, 2):
        give_gradients(other_params, seed)
        other.step()
    _, whole, largest = (sum(size for _, size in blocks) for blocks in vars(guard._need).values())
    assert largest < whole
    before = tensors_of(params, optimizer)
    monkeypatch.setattr(_undo, "MOST_COPIED_BYTES", 0)
    with pytest.raises(DoesNotFitError, match="temporary tensors"), Scarce(largest // 2):
        guard.step()
    assert same(tensors_of(params, optimizer), before)
    with Scarce(whole - 64):
        guard.step()
    assert same(tensors_of(params, optimizer), tensors_of(other_params, other))


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
    guard.prepare()
    assert sum(block.nbytes for block in guard._reserve) == 2 * sum(p.nbytes for p in params)
    give_gradients(params, 1)
    guard.step()
    assert guard._reserve == [] and guard.pending_bytes == 0
    guard.prepare()
    assert guard._reserve == []


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


def test_large_weights_that_were_changed_before_an_oom_are_said_to_be_half_updated(monkeypatch):
    monkeypatch.setattr(_undo, "MOST_COPIED_BYTES", 0)
    params, optimizer = make("AdamW")
    guard = OptimizerGuard(optimizer)
    give_gradients(params, 1)
    with pytest.raises(HalfUpdatedError, match="Tried to allocate") as caught, Fails(2, only="addcdiv_"):
        guard.step()
    assert "last checkpoint" in caught.value.remedy


def test_only_weights_that_have_a_gradient_are_copied():
    params, optimizer = make("AdamW", ((700, 1000), (30,)))
    guard = OptimizerGuard(optimizer)
    params[0].requires_grad_(False)
    give_gradients(params[1:], 1)
    guard.step()
    before = params[1].detach().clone()
    with pytest.raises(torch.OutOfMemoryError), Fails(0, only="addcdiv_"):
        guard.step()
    assert torch.equal(params[1], before)
    assert id(params[0]) not in guard._copy().tensors


class Counting(torch.optim.Optimizer):
    """Holds a counter as an attribute, a list of tensors in its state, and a number under a name of its own."""

    def __init__(self, params, held=0):
        super().__init__(params, {})
        self.count = self.held = held

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        self.state["n"] = self.state.get("n", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("history", []).append(torch.zeros_like(parameter))
                state["history"][0].mul_(0.5).add_(parameter.grad)
                parameter.addcdiv_(state["history"][0], torch.ones_like(parameter), value=-0.1 / self.count)


def test_the_undo_reaches_everything_that_an_optimizer_holds_in_plain_form():
    runs = []
    for fails in (None, 0, 1):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
        optimizer = Counting(params)
        guard = OptimizerGuard(optimizer)
        for seed in range(4):
            give_gradients(params, seed)
            if fails is not None and seed == 2:
                with pytest.raises(torch.OutOfMemoryError), Fails(fails, only="addcdiv_"):
                    guard.step()
            guard.step()
        histories = [value for parameter in params for value in optimizer.state[parameter]["history"]]
        runs.append(([*params, *histories], optimizer.count, optimizer.state["n"]))
    assert runs[0][1:] == (4, 4) and len(runs[0][0]) == 10
    for run in runs[1:]:
        assert same(run[0], runs[0][0]) and run[1:] == runs[0][1:]


def test_an_optimizer_that_holds_what_cannot_be_copied_is_half_updated_and_not_silently_wrong():
    params = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = Counting(params)
    optimizer.held = object()
    give_gradients(params, 1)
    with pytest.raises(HalfUpdatedError), Fails(1, only="addcdiv_"):
        OptimizerGuard(optimizer).step()


def test_an_oom_in_a_hook_after_the_step_cannot_be_undone_and_one_before_it_can():
    params, optimizer = make("AdamW")
    averages = []

    def average(*_):
        averages.append(torch.zeros(3).add(1))

    optimizer.register_step_post_hook(average)
    guard = OptimizerGuard(optimizer)
    give_gradients(params, 1)
    before = [parameter.detach().clone() for parameter in params]
    with pytest.raises(torch.OutOfMemoryError), Fails(0, only="addcdiv_"):
        guard.step()
    assert same(params, before) and not averages
    with pytest.raises(HalfUpdatedError, match="hooks after the step have begun"), Fails(0, only="add.Tensor"):
        guard.step()
    guard.step()
    assert len(averages) == 1 and len(optimizer._optimizer_step_post_hooks) == 1


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
