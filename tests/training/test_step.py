"""The safe step: what an out-of-memory leaves behind (nothing), what is split and what is refused."""

import json
import random
import re
import resource
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import forked
from memfit.errors import DoesNotFitError, HalfUpdatedError, JobFailedError, SampleTooLargeError, UsageError
from memfit.rundir import RunDir
from memfit.training import (
    WHOLE,
    ByGroup,
    MicrobatchSizes,
    SafeStep,
    SkipPolicy,
    StepOutcome,
    load_checkpoint,
    rng_state,
    save_checkpoint,
    seed_everything,
    set_rng_state,
)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, weight_decay=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, foreach=True),
}
ERRORS = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: MemoryError(),
    lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
    ),
]


class Ooms(TorchDispatchMode):
    """Fails one operation: the one so many operations after ``arm`` was called and a loss begun."""

    def __init__(self):
        super().__init__()
        self.left = self.error = None
        self.waiting = None
        self.num_ops = self.num_raised = 0

    def arm(self, left, error):
        self.waiting = (left, error)

    def begin(self):
        if self.waiting is not None:
            self.left, self.error = self.waiting
            self.waiting = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_ops += 1
        if self.left is not None and func is not torch.ops.aten.copy_.default:  # it allocates nothing
            self.left -= 1
            if self.left < 0:
                self.left = None
                self.num_raised += 1
                raise self.error
        return func(*args, **(kwargs or {}))


class Net(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 2)
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.seen += len(x)
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1  # replaced, not edited
        return self.layers(x)


def make(optimizer="adam", *, dropout=0.3, dtype=torch.float32, ooms=None, **settings):
    seed_everything(3)
    model = Net(dropout).to(dtype)

    def loss(model, batch):
        if ooms is not None:
            ooms.begin()
        x, y = batch
        noise = 1 + 0.1 * random.random() + 0.1 * np.random.rand() if dropout else 1.0
        return ((model(x) - y) * noise).square().sum(), 2 * len(x)

    optimizer = OPTIMIZERS[optimizer](model.parameters())
    return SafeStep(model, optimizer, loss, allow_inexact=True, **settings)  # its buffers change


def batches(num, dtype=torch.float32):
    rng = np.random.default_rng(5)
    for _ in range(num):
        count = int(rng.integers(1, 13))
        x = torch.from_numpy(rng.standard_normal((count, 4))).to(dtype)
        yield x, torch.stack([x.sum(1), x[:, 0]], 1)


def state_of(step, ema=()):
    """Everything that a step may change, for comparing bit by bit."""
    tensors = [*step.model.state_dict().values(), step.model.mean, *ema, torch.get_rng_state()]
    for state in step.optimizer.state.values():
        tensors += [torch.as_tensor(state[name]) for name in sorted(state) if state[name] is not None]
    return tensors, random.getstate(), np.random.get_state()[1].tolist()


def assert_same(left, right):
    assert len(left[0]) == len(right[0])
    for one, other in zip(left[0], right[0], strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert left[1:] == right[1:]


def train(step, data, largest, ooms=None, plan=None):
    """Steps with an average of the weights after each; returns losses, sizes used and the average."""
    ema = [parameter.detach().clone() for parameter in step.model.parameters()]
    losses, used = [], []
    if plan is not None:  # what fails inside the optimizer's step cannot be undone
        update = step.optimizer.step
        step.optimizer.step = lambda: (setattr(ooms, "left", None), update())
    for index, batch in enumerate(data):
        step.sizes = MicrobatchSizes(largest[index])
        if plan is not None:
            ooms.arm(*plan[index])
        outcome = step(batch)
        if plan is not None:
            ooms.left = None  # the step had fewer operations than that
        losses.append((outcome.loss_sum, outcome.weight, outcome.grad_norm))
        used.append(outcome.microbatch_size)
        for mean, parameter in zip(ema, step.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
    return losses, used, ema


@pytest.mark.core
@pytest.mark.proves("S1-10", "C-27")
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_after_many_ooms_everything_is_bit_for_bit_what_those_splits_give_from_the_start(optimizer):
    chance, num = random.Random(optimizer), 24
    data = list(batches(num))
    largest = [chance.choice([None, 1, 2, 3, 5]) for _ in range(num)]
    with Ooms() as ooms:
        measured = make(optimizer, max_grad_norm=0.5)
        train(measured, data[:4], [None] * 4)
        ops = -ooms.num_ops
        train(measured, data[:1], [None])
        ops = 4 * (ops + ooms.num_ops) // 5
        step = make(optimizer, max_grad_norm=0.5, ooms=ooms)
        plan = [(chance.randrange(ops), chance.choice(ERRORS)()) for _ in range(num)]
        losses, used, ema = train(step, data, largest, ooms, plan)
        assert ooms.num_raised > num / 2 and step.num_ooms > num / 2
    clean = make(optimizer, max_grad_norm=0.5)
    clean_losses, clean_used, clean_ema = train(clean, data, used)
    assert clean.num_ooms == 0
    assert (losses, used) == (clean_losses, clean_used)
    assert_same(state_of(step, ema), state_of(clean, clean_ema))


@pytest.mark.proves("S1-33")
@pytest.mark.slow
def test_steps_with_ooms_follow_the_unsplit_steps_at_1e_12_in_float64():
    data = list(batches(60, torch.float64))
    chance = random.Random(0)
    with Ooms() as ooms:
        step = make("momentum", dropout=0, dtype=torch.float64, ooms=ooms)
        plan = [(chance.randrange(60), chance.choice(ERRORS)()) for _ in data]
        train(step, data, [chance.choice([None, 1, 2, 3]) for _ in data], ooms, plan)
    assert step.num_ooms > 40
    whole = make("momentum", dropout=0, dtype=torch.float64, microbatch_size=None)
    train(whole, data, [None] * len(data))
    for one, other in zip(step.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_one_microbatch_gives_the_bits_of_a_plain_loop():
    data = list(batches(20))
    step = make("adam")
    for batch in data:
        step(batch)
    plain = make("adam")
    for batch in data:
        loss_sum, weight = plain.loss(plain.model, batch)
        plain.optimizer.zero_grad()
        (loss_sum / weight).backward()
        plain.optimizer.step()
    assert_same(state_of(step), state_of(plain))


class Fault:
    """Raises in a loss or another function for as many calls as it is told, on what it is told."""

    def __init__(self, times=1, when=lambda x: True):
        self.times, self.when, self.calls = times, when, 0

    def __call__(self, x=None):
        self.calls += 1
        if self.times and self.when(x):
            self.times -= 1
            raise MemoryError


def linear(loss=None, num_inputs=3, fault=None, lr=0.1, **settings):
    """A safe step of a linear model with a squared loss, which can be made to fail."""
    torch.manual_seed(0)
    model = torch.nn.Linear(num_inputs, 1).double()

    def squared(model, x):
        out = model(x)
        if fault is not None:
            fault(x)
        return (out - x.sum(1, keepdim=True)).square().sum(), len(x)

    return SafeStep(model, torch.optim.SGD(model.parameters(), lr=lr), loss or squared, **settings)


def inputs(count=8, num_inputs=3):
    return torch.randn(count, num_inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradient_of(step, *batches):
    step.gradients(*batches)
    return torch.cat([parameter.grad.flatten() for parameter in step.model.parameters()])


@pytest.mark.proves("S4-12")
def test_nothing_of_the_failed_attempt_is_alive_when_the_replay_begins():
    dead, alive, kept = [], [], []  # kept: the error, as a logger may keep it

    class Holder(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = x * 2
            alive.append(weakref.ref(out))
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def loss(model, x):
        if not model.training:  # asks whether the batch may be split
            return model(x).sum(), len(x)
        dead.append([ref() is None for ref in alive])
        hidden = Holder.apply(model(x))
        if len(dead) == 1:
            try:
                raise MemoryError
            except MemoryError as error:
                kept.append(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
                raise kept[0] from error
        return hidden.sum(), len(x)

    step = linear(loss, allow_inexact=True)
    step(inputs())
    assert dead[1] == [True]
    assert all(ref() is None for ref in alive)


@pytest.mark.proves("S4-51")
def test_ragged_weights_give_the_gradient_of_the_whole_and_not_the_mean_of_means():
    lengths = torch.tensor([1, 7, 2, 6, 3])
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    batch = {"x": x, "mask": (torch.arange(8) < lengths[:, None]).float()}

    def loss(model, batch):
        out = (model(batch["x"][..., None])[..., 0] - 1).square() * batch["mask"]
        return out.sum(), batch["mask"].sum()

    def make_step(**settings):
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        return SafeStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **settings)

    whole = gradient_of(make_step(microbatch_size=None), batch)
    split = gradient_of(make_step(microbatch_size=1), batch)
    torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-6)
    step = make_step(microbatch_size=None)
    means = [gradient_of(step, {name: value[i : i + 1] for name, value in batch.items()}) for i in range(5)]
    assert (torch.stack(means).mean(0) - whole).abs().max() > 1e-2


@pytest.mark.proves("S2-50")
def test_several_batches_are_one_step_over_all_their_samples():
    x = inputs(10)
    whole = linear(microbatch_size=None)
    parts = linear(microbatch_size=2)
    one, other = whole(x), parts(x[:3], x[3:])
    assert other == StepOutcome(
        pytest.approx(one.loss_sum), 10.0, pytest.approx(one.grad_norm), 6, 2, num_ooms=0, skipped=False
    )
    torch.testing.assert_close(parts.model.weight, whole.model.weight, rtol=1e-13, atol=1e-13)


def test_a_parts_weight_may_be_zero_and_the_whole_steps_may_not():
    def loss(model, x):
        keep = (x[:, 0] > 0).double()
        return (model(x)[:, 0] * keep).sum(), keep.sum()

    x = inputs(4)
    x[:2, 0] = -1
    x[2:, 0] = 1
    torch.testing.assert_close(
        gradient_of(linear(loss, microbatch_size=2), x), gradient_of(linear(loss, microbatch_size=None), x)
    )
    with pytest.raises(JobFailedError, match=r"the loss is 0\.0 over a weight of 0\.0"):
        linear(loss)(x[:2])


def test_batch_statistics_are_refused_by_the_layers_name_and_left_as_they_were():
    def build(**settings):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double()
        fault = Fault()

        def loss(model, x):
            out = model(x)
            fault()
            return out.square().sum(), len(x)

        return SafeStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **settings)

    step = build()
    before = state_of_model(step.model)
    with pytest.raises(UsageError, match=r"BatchNorm1d '1' takes statistics over the batch"):
        step(inputs())
    assert_equal_tensors(before, state_of_model(step.model))
    step = build(allow_inexact=True)
    assert step(inputs()).num_microbatches == 2
    assert step.model[1].num_batches_tracked == 2
    step = build()
    step.model[1].eval()
    assert step(inputs()).num_microbatches == 2


def state_of_model(model):
    return [value.clone() for value in model.state_dict().values()]


def assert_equal_tensors(left, right):
    assert len(left) == len(right) and all(map(torch.equal, left, right))


def ranking(model, batch):
    """Couples the samples of a date: a softmax over each."""
    x, date = batch
    out = model(x)[:, 0]
    total = sum(torch.logsumexp(out[date == day], 0) - out[date == day].mean() for day in date.unique())
    return total, len(date.unique())


def test_a_loss_that_couples_samples_is_refused_unless_cut_between_groups():
    batch = (inputs(9), torch.tensor([1, 1, 1, 2, 2, 2, 3, 3, 3]))
    with pytest.raises(UsageError, match="not the sum of the losses of its parts") as caught:
        linear(ranking, microbatch_size=5)(batch)
    assert "split=ByGroup" in caught.value.remedy
    by_date = linear(ranking, microbatch_size=1, split=ByGroup(lambda batch: batch[1]))
    whole = linear(ranking, microbatch_size=None, split=WHOLE)
    assert by_date(batch).num_microbatches == 3
    whole(batch)
    torch.testing.assert_close(by_date.model.weight, whole.model.weight, rtol=1e-12, atol=1e-12)
    assert linear(ranking, microbatch_size=5, allow_inexact=True)(batch).num_microbatches == 2


def test_the_check_of_a_loss_leaves_no_trace():
    modes = []

    def dropped(model, x):
        modes.append((model.training, torch.is_grad_enabled()))
        return model(torch.nn.functional.dropout(x, training=model.training)).square().sum(), len(x)

    step = linear(dropped, microbatch_size=4)
    step.model.train()
    seed_everything(1)
    step(inputs())
    assert modes == [(False, False)] * 4 + [(True, True)] * 2
    assert step.model.training
    other, modes[:] = linear(dropped, microbatch_size=4), []
    other.exactness.trust()
    seed_everything(1)
    other(inputs())
    assert modes == [(True, True)] * 2, "a loss that is trusted is not looked at"
    assert torch.equal(step.model.weight, other.model.weight)


def in_batch_negatives(model, x):
    z = torch.nn.functional.normalize(model(torch.nn.functional.dropout(x, 0.1, training=True)) + x, dim=1)
    return torch.nn.functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)), reduction="sum"), len(z)


def noisy(model, x):
    return (model(x) + torch.randn(len(x), 1)).square().sum(), len(x)


def training_only(model, x):
    if not model.training:
        raise ValueError("targets")
    return model(x).sum(), len(x)


@pytest.mark.parametrize(
    ("loss", "text", "remedy"),
    [
        (in_batch_negatives, "draws random", "draw random numbers only in training mode"),
        (noisy, "draws random", "draw random numbers only in training mode"),
        (training_only, "raises ValueError: targets", "return the loss in evaluation mode too"),
    ],
)
def test_a_loss_that_cannot_be_compared_with_its_parts_is_refused(loss, text, remedy):
    step = linear(loss, microbatch_size=4)
    before = state_of_model(step.model)
    with pytest.raises(UsageError, match=text) as caught:
        step(inputs())
    assert caught.value.remedy.startswith(remedy)
    assert "allow_inexact=True" in caught.value.remedy
    assert_equal_tensors(before, state_of_model(step.model))
    assert linear(loss, microbatch_size=4, allow_inexact=True)(inputs()).num_microbatches == 2
    assert linear(loss, microbatch_size=None)(inputs()).num_microbatches == 1


@pytest.mark.parametrize("which", [2, 3])
def test_a_loss_that_is_no_number_once_is_not_taken_for_a_draw(which):
    calls = []

    def loss(model, x):
        calls.append(model.training)
        total, weight = model(x).square().sum(), len(x)
        return (total * float("nan") if calls.count(False) == which and not model.training else total), weight

    assert linear(loss, microbatch_size=4)(inputs()).num_microbatches == 2


def test_a_batch_that_the_loss_edited_is_refused_and_one_whose_fields_it_took_out_is_not():
    fault = Fault()

    def edits(model, batch):
        batch["x"].mul_(2)
        fault()
        return model(batch["x"]).sum(), 8

    with pytest.raises(UsageError, match=r"edited batch\['x'\] in place"):
        linear(edits)({"x": inputs()})

    def takes(model, batch):
        x = batch.pop("x")
        fault()
        return model(x).sum(), len(x)

    fault.times = 1
    batch = {"x": inputs()}
    assert linear(takes)(batch).num_microbatches == 2
    assert list(batch) == ["x"]


def test_an_optimizer_in_the_backward_pass_is_refused_by_the_weights_name():
    step = linear()
    step.model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UsageError, match="weight has a hook"):
        step(inputs())
    step = linear(allow_inexact=True)
    step.model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    step(inputs())


def make_scaled(ooms=None, init_scale=2.0**10):
    seed_everything(0)
    model = Net(0.2)

    def loss(model, batch):
        if ooms is not None:
            ooms.begin()
        x, y = batch
        return (model(x) - y).square().sum(), len(x)

    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return SafeStep(model, optimizer, loss, scaler=scaler, max_grad_norm=0.5, allow_inexact=True)


@pytest.mark.slow
def test_a_gradient_scaler_ends_as_if_nothing_had_happened_wherever_memory_ran_out():
    data = list(batches(40))
    with Ooms() as ooms:
        step = make_scaled(ooms)
        plan = [(3 * index, ERRORS[index % 3]()) for index in range(40)]
        _, used, _ = train(step, data, [None] * 40, ooms, plan)
    assert step.num_ooms > 20
    clean = make_scaled()
    train(clean, data, used)
    assert_same(state_of(step), state_of(clean))
    assert step.scaler.state_dict() == clean.scaler.state_dict()
    assert step.scaler.get_scale() > 2.0**10


def test_a_scaled_gradient_that_overflows_is_skipped_by_the_scaler():
    step = make_scaled(init_scale=2.0**127)
    before = state_of_model(step.model)[2:]
    outcome = step(next(batches(1)))
    assert outcome.skipped and step.scaler.get_scale() == 2.0**126
    assert_equal_tensors(before, state_of_model(step.model)[2:])


def test_gradients_leaves_weights_and_scaler_as_they_are_and_a_step_may_follow():
    step, other = make_scaled(), make_scaled()
    batch = next(batches(1))
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    scale = step.scaler.state_dict()
    step.prepare()
    outcome = step.gradients(batch)
    assert outcome.grad_norm > 0 and all(parameter.grad is not None for parameter in step.model.parameters())
    assert_equal_tensors(before, list(step.model.parameters()))
    assert step.scaler.state_dict() == scale and not step.optimizer.state
    for one in (step, other):
        seed_everything(4)
        one(batch)
    assert_equal_tensors(list(step.model.parameters()), list(other.model.parameters()))


@pytest.mark.proves("S4-21")
def test_a_sample_that_does_not_fit_is_named_with_its_shape_what_was_tried_and_what_to_do():
    seen = []
    fault = Fault(times=99, when=lambda x: seen.append(len(x)) or True)
    step = linear(fault=fault)
    step.exactness.trust()
    step.where = {"epoch": 2, "step": 3, "num_steps": 9}
    before = state_of_model(step.model)
    with pytest.raises(SampleTooLargeError) as caught:
        step(inputs(6))
    assert seen == [6, 3, 2, 1, 1]
    assert "in epoch 2, step 3 of 9" in caught.value.what and "(6, 3) float64" in caught.value.what
    assert "are taken without it" in caught.value.rule
    assert "activation checkpointing (torch.utils.checkpoint" in caught.value.remedy
    assert isinstance(caught.value, DoesNotFitError) and caught.value.exit_code == 3
    assert_equal_tensors(before, state_of_model(step.model))
    with pytest.raises(SampleTooLargeError, match="A single unit of the batch does not fit") as caught:
        linear(fault=Fault(times=9))(inputs(1))
    assert caught.value.remedy.startswith("activation checkpointing")
    for settings, hint in (({"microbatch_size": None}, "microbatch_size='auto'"), ({"split": WHOLE}, "split=")):
        with pytest.raises(SampleTooLargeError) as caught:
            linear(fault=Fault(times=9), **settings)(inputs(6))
        assert hint in caught.value.remedy and "which is not split" in caught.value.what


def test_a_batch_that_is_an_object_says_what_can_cut_it():
    def loss(model, graphs):
        if graphs.num_nodes > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(torch.cat(graphs.nodes)).sum(), graphs.num_nodes

    graphs = GraphBatch(inputs(6).split(1))
    with pytest.raises(SampleTooLargeError, match=r"which is not split, does not fit.*\(GraphBatch\)") as caught:
        linear(loss)(graphs)
    assert "count(batch) and take(batch, start, stop) (memfit cannot cut a GraphBatch)" in caught.value.remedy
    cost = {"cost": lambda batch: batch.num_nodes}
    assert linear(loss, split=EachGraph(), **cost)(graphs).num_microbatches == 3


def test_one_oom_of_a_batch_that_cannot_be_split_is_tried_once_more_with_all_caches_empty():
    assert linear(fault=Fault(), split=WHOLE)(inputs()).num_ooms == 1


@pytest.mark.proves("S1-13")
def test_a_skipped_batch_is_counted_capped_and_not_in_the_average():
    fault = Fault(times=99, when=lambda x: bool((x == 7).any()))
    step = linear(fault=fault, skip=SkipPolicy(max_skipped=2, max_share=0.7))
    step.exactness.trust()
    bad = torch.full((1, 3), 7.0, dtype=torch.float64)
    before = state_of_model(step.model)
    outcome = step(bad)
    assert outcome.skipped and (outcome.loss_sum, outcome.weight, outcome.num_ooms) == (0.0, 0.0, 2)
    assert_equal_tensors(before, state_of_model(step.model))
    x = inputs(5)
    mixed, clean = step(x, bad), linear()(x)
    assert not mixed.skipped and (mixed.loss, mixed.weight, step.num_skipped) == (clean.loss, 5.0, 2)
    with pytest.raises(SampleTooLargeError, match="skipped as number 3 of 4"):
        step(bad)
    assert linear(fault=Fault(times=99), skip=SkipPolicy(5, 0.1))(bad).skipped  # one is always within the share


def test_what_is_not_finite_fails_without_a_trace():
    bad = inputs()
    bad[3, 1] = torch.nan
    step = linear()
    before = state_of_model(step.model)
    with pytest.raises(JobFailedError, match=r"In this step the loss is nan over a weight of 8\.0"):
        step(bad)
    assert_equal_tensors(before, state_of_model(step.model))

    def steep(model, x):
        return (model(x) * 0).sqrt().sum(), len(x)

    with pytest.raises(JobFailedError, match=r"the gradient's norm is (nan|inf)"):
        linear(steep)(inputs())


def test_another_error_is_passed_on_as_it_is():
    def broken(model, x):
        raise RuntimeError("no room for zoom, out of memory")

    with pytest.raises(RuntimeError, match="zoom"):
        linear(broken)(inputs())


@pytest.mark.proves("S1-11")
def test_an_update_that_never_finds_memory_is_refused_after_three_tries(monkeypatch):
    step = linear()
    tries = []

    def fails(*args):
        tries.append(1)
        raise MemoryError

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", fails)
    with pytest.raises(DoesNotFitError, match="the update went out of memory 3 times"):
        step(inputs())
    assert len(tries) == 3


def test_a_scaled_step_follows_one_that_failed_in_its_update():
    step = make_scaled()
    update = step.optimizer.step

    def half():
        raise MemoryError

    step.optimizer.step = half
    with pytest.raises(HalfUpdatedError):
        step(next(batches(1)))
    step.optimizer.step = update
    assert not step(next(batches(1))).skipped


@pytest.mark.proves("S4-42")
def test_allocator_retries_split_smaller_before_anything_fails(monkeypatch):
    count = iter([0, 1, 1, 2, 2, 2, 2, 2])  # before and after each step
    monkeypatch.setattr(SafeStep, "num_alloc_retries", lambda step: next(count))  # stands in for a GPU
    step = linear()
    assert [step(inputs()).microbatch_size for _ in range(4)] == [8, 8, 4, 4]
    assert step.num_ooms == 0


class GraphBatch:
    """A batch that is no container, as torch-geometric's: nodes of all graphs after each other."""

    def __init__(self, nodes):
        self.nodes = nodes  # a tensor for each graph

    @property
    def num_nodes(self):
        return sum(map(len, self.nodes))


class EachGraph:
    def count(self, batch):
        return len(batch.nodes)

    def take(self, batch, start, stop):
        return GraphBatch(batch.nodes[start:stop])


#: What each kind of batch costs in units of the stand-in device; what it holds at once is 12.
COSTS = {
    "plain tensors": (inputs(32), lambda x: len(x), {}),
    "video clips": (torch.ones(8, 4, 2, 3, dtype=torch.float64), lambda x: x.numel() // 6, {}),
    "token batches": (
        {"ids": torch.ones(8, 3, dtype=torch.float64)},
        lambda batch: batch["ids"].numel(),
        {"cost": lambda batch: batch["ids"].numel()},
    ),
    "graphs": (
        GraphBatch([torch.ones(n, 3, dtype=torch.float64) for n in (12, 1, 1, 2, 9, 4, 3, 1)]),
        lambda batch: batch.num_nodes,
        {"cost": lambda batch: batch.num_nodes, "split": EachGraph()},
    ),
}


@pytest.mark.proves("C-28")
@pytest.mark.parametrize("kind", COSTS)
def test_what_fits_is_learned_as_a_cost_whatever_a_batch_is(kind):
    batch, units, settings = COSTS[kind]
    seen = []

    def loss(model, batch):
        seen.append(units(batch))
        if seen[-1] > 12:
            raise MemoryError
        rows = (
            torch.cat(batch.nodes)
            if isinstance(batch, GraphBatch)
            else batch["ids"]
            if isinstance(batch, dict)
            else batch
        )
        return model(rows).square().sum(), len(rows)

    step, whole = linear(loss, **settings), linear(loss, microbatch_size=None)
    first, begun = step(batch), len(seen)
    second = step(batch)
    assert first.num_ooms >= 1 and second.num_ooms == 0
    assert max(seen[begun:]) <= 12 and sum(seen[begun:]) == units(batch)
    other = json.loads(json.dumps(step.state_dict()))  # carried to another training, as from trial to trial
    again = linear(loss, **settings)
    again.load_state_dict(other)
    assert again(batch).num_ooms == 0
    assert whole.sizes.limit is None


def test_the_backward_pass_may_be_another_ones():
    seen = []

    def backward(loss):
        seen.append(float(loss.detach()))
        loss.backward()

    step, plain = linear(backward=backward, microbatch_size=4), linear(microbatch_size=4)
    assert step(inputs()) == plain(inputs())
    assert len(seen) == 2 and torch.equal(step.model.weight, plain.model.weight)


def test_sizes_counts_and_scaler_survive_a_resume_as_plain_values():
    step = linear(fault=Fault(), skip=SkipPolicy(3, 1.0))
    step(inputs())
    state = json.loads(json.dumps(step.state_dict()))
    other = linear()
    other.load_state_dict(state)
    assert (other.num_ooms, other.num_skipped) == (1, 0)
    assert other(inputs()).microbatch_size == 4
    scaled, fresh = make_scaled(), make_scaled()
    for batch in batches(4):
        scaled(batch)
    fresh.load_state_dict(scaled.state_dict())
    assert fresh.scaler.state_dict() == scaled.scaler.state_dict()


@pytest.mark.proves("S1-43")
def test_what_happened_is_told_and_written_into_the_run_directory(tmp_path, monkeypatch):
    run = RunDir.create(tmp_path, "demo", "0123abcd" * 8)
    run.job_dir("fold_1").mkdir()
    monkeypatch.setenv("MEMFIT_RUN_DIR", str(run.path))
    monkeypatch.setenv("MEMFIT_JOB_ID", "fold_1")
    fault = Fault(times=1)
    step = linear(fault=fault, skip=SkipPolicy(3, 1.0))
    step.where = {"epoch": 1, "step": 4}
    step(inputs())
    fault.times = 2
    step(inputs(1))
    linear(ranking, microbatch_size=5, allow_inexact=True)((inputs(9), torch.arange(9) // 3))
    events = [event for event in run.events() if event["kind"] != "phase"]
    assert [event["kind"] for event in events] == [
        *("oom", "flight_record", "cleanup", "microbatch", "retry"),  # detect, log, clean up, retry with less
        *("oom", "flight_record", "cleanup", "retry"),  # a single unit: once more, in the same size
        *("oom", "flight_record", "cleanup", "skip"),  # fall back
        "inexact",
    ]
    oom, _, _, size, *_, skip, inexact = events
    assert (events[4]["size"], events[8]["size"]) == (4, 1)
    assert json.loads((run.job_dir("fold_1") / events[1]["file"]).read_text())["where"]["epoch"] == 1
    assert oom["text"].startswith("fold_1 is out of host memory in phase forward, epoch 1, step 4, microbatch size 8: ")
    assert size["text"] == "fold_1 changes its microbatch size: 8 -> 4 (batch of 8)"
    assert skip["text"].startswith("fold_1 skips a batch, number 1 of ")
    assert inexact["text"].startswith("fold_1 trains inexactly, as allowed: ")
    assert (oom["memory"], oom["phase"], oom["microbatch_size"], oom["step"]) == ("host", "forward", 8, 4)
    assert (size["size"], size["previous_size"], size["count"]) == (4, 8, 8)
    assert skip["num_skipped"] == 1 and "does not fit" in skip["reason"]
    assert "not the sum" in inexact["reason"]


@pytest.mark.parametrize(
    ("setting", "values"),
    [("microbatch_size", [0, -1, 2.5, "large", True]), ("max_grad_norm", [0, -1.0, float("nan")])],
)
def test_a_setting_out_of_range_is_refused(setting, values):
    for value in values:
        with pytest.raises(UsageError, match=setting):
            linear(**{setting: value})


def test_a_step_needs_a_batch():
    with pytest.raises(UsageError, match="no batch"):
        linear()()


def test_buffers_may_appear_change_place_and_share_memory():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1).double()
            self.register_buffer("ids", torch.arange(3).expand(2, 3))
            self.register_buffer("none", None)
            self.twin = self.layer

        def forward(self, x):
            if "late" not in self._buffers:
                self.register_buffer("late", torch.zeros(1))
            self.late = self.late + 1
            return self.layer(x)

    torch.manual_seed(0)
    model, fault = Odd(), Fault()

    def loss(model, x):
        out = model(x)
        fault()
        return out.square().sum(), len(x)

    step = SafeStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, microbatch_size=4, allow_inexact=True)
    fault.times = 0
    step(inputs())
    assert model.late == 2
    fault.times = 1
    step(inputs())  # fails at 4 and goes through in parts of 2
    assert model.late == 2 + 4


class Running(torch.nn.Linear):
    """Takes a mean over all batches so far from its inputs."""

    def __init__(self):
        super().__init__(3, 1, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("holes", torch.tensor([torch.nan, 1.0]))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.5)
        return super().forward(x - self.mean)


def safe(model, loss=None, optimizer=None, **settings):
    def total(model, x):
        return model(x).square().sum(), len(x)

    return SafeStep(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), loss or total, **settings)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: torch.nn.Sequential(Running()), "0.mean"),
        (lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 2).double()), "weight.0._u"),
    ],
)
def test_a_buffer_that_every_forward_pass_changes_is_refused_by_name_and_put_back(build, name):
    torch.manual_seed(0)  # of some weights the power iteration is at its end before the first step
    model = build()
    before = state_of_model(model)
    step = safe(model, microbatch_size=4)
    for _ in range(2):
        with pytest.raises(UsageError, match=rf"changes the buffers? [\w., ]*{name}"):
            step(inputs())
        assert_equal_tensors([one.nan_to_num() for one in before], [v.nan_to_num() for v in state_of_model(model)])
    assert safe(build(), microbatch_size=8)(inputs()).num_microbatches == 1
    assert safe(build().eval(), microbatch_size=4)(inputs()).num_microbatches == 2
    assert safe(build(), microbatch_size=4, allow_inexact=True)(inputs()).num_microbatches == 2


def test_a_disabled_scaler_leaves_the_check_for_finite_losses_on():
    step = linear(scaler=torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(JobFailedError, match="the loss is nan"):
        step(inputs() * torch.nan)
    assert step(inputs()).grad_norm > 0


def test_an_update_that_was_made_is_never_made_again(monkeypatch):
    step, other = make_scaled(), make_scaled()
    real = step.scaler.get_scale
    fails = iter([MemoryError])

    def scale_that_fails_after_the_update():
        if step.optimizer.state and next(fails, None):
            raise MemoryError
        return real()

    monkeypatch.setattr(step.scaler, "get_scale", scale_that_fails_after_the_update)
    for one in (step, other):
        seed_everything(1)
        one(next(batches(1)))
    assert_same(state_of(step), state_of(other))


def test_a_step_that_the_scaler_skips_keeps_the_room_for_the_optimizers_state():
    step = make_scaled(init_scale=2.0**127)
    step.prepare()
    pending = step.pending_bytes
    assert step(next(batches(1))).skipped
    assert pending > 0 and step.pending_bytes == pending


def test_sparse_gradients_are_measured_and_cut_as_the_dense_ones():
    norms, weights = [], []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = torch.nn.EmbeddingBag(10, 2, sparse=sparse, mode="sum")
        step = safe(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=0.5, microbatch_size=2)
        norms.append(step(torch.tensor([[1, 1], [1, 2], [3, 2], [4, 4], [5, 1]])).grad_norm)
        weights.append(model.weight.detach())
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 0.5
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_parts_are_scaled_by_about_the_true_weight_before_it_is_known(as_tensor):
    """In float16 a gradient of 512 tokens that is divided by one sample overflows."""
    seen = []

    def loss(model, x):
        out = model(x)
        if out.requires_grad:
            out.register_hook(lambda grad: seen.append(grad.abs().max().item()))
        weight = 512 * len(x)
        return 512 * out.sum(), torch.tensor(weight) if as_tensor else weight

    step, whole = linear(loss, microbatch_size=3), linear(loss)
    step(inputs())
    whole(inputs())
    assert seen == [1 / 8] * 4
    torch.testing.assert_close(step.model.weight, whole.model.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda out: out.sum(), "a tensor of shape ()"),
        (lambda out: (out, 8), "a tuple of 2: a tensor of shape (8, 1), an int"),
        (lambda out: (out.sum(), None), "a NoneType"),
        (lambda out: (1.0, 8), "a tuple of 2: a float, an int"),
        (lambda out: {"loss": out.sum()}, "a dict"),
    ],
)
def test_a_loss_that_returns_something_else_is_told_what(given, words):
    with pytest.raises(UsageError) as caught:
        linear(lambda model, x: given(model(x)))(inputs())
    assert words in caught.value.what and "return loss.sum(), len(x)" in caught.value.remedy


def test_an_optimizer_over_another_model_is_refused():
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)
    with pytest.raises(UsageError, match="none of the optimizer's 2 parameters has a gradient"):
        safe(torch.nn.Linear(3, 1).double(), optimizer=optimizer)(inputs())


@pytest.mark.parametrize("times", [1, 2])
def test_copies_of_buffers_that_have_no_room_are_tried_once_more(monkeypatch, times):
    step = linear()
    take, fault = torch.get_rng_state, Fault(times)
    monkeypatch.setattr(torch, "get_rng_state", lambda: (fault(), take())[1])
    if times == 1:
        assert step(inputs()).num_ooms == 1
        return
    with pytest.raises(DoesNotFitError, match="copies of the model's buffers"):
        step(inputs())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_buffers_of_a_scripted_model_are_put_back():
    model = torch.jit.script(Scripted().double())
    fault = Fault()

    def loss(model, x):
        out = model(x)
        fault()
        return out.sum(), len(x)

    step = safe(model, loss, allow_inexact=True)
    assert step(inputs()).num_ooms == 1
    assert (model.edited.item(), model.replaced.item()) == (2, 2)  # two parts, and nothing of the failed whole


class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.register_buffer("edited", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x):
        self.edited.add_(1)
        self.replaced = self.replaced + 1
        return self.layer(x)


def wide_steps(room, given=()):
    """How often memory ran out, the sizes of three steps and what they left, with so many bytes more than there are."""
    seed_everything(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 40_000), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(40_000, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(256, 8)
    step = SafeStep(model, optimizer, lambda model, x: ((model(x) - x[:, :1]).square().sum(), len(x)))
    step.gradients(x[:2])
    step.prepare()
    seed_everything(1)
    if room:
        taken = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (taken + room, resource.RLIM_INFINITY))
    sizes = []
    for index in range(3):
        if given:
            step.sizes = MicrobatchSizes(given[index])
        sizes.append(step(x).microbatch_size)
    return step.num_ooms, sizes, [value.numpy() for value in (*model.state_dict().values(), torch.get_rng_state())]


@pytest.mark.slow
def test_steps_that_do_not_fit_under_a_real_limit_go_through_with_the_bits_of_their_splits():
    """256 samples take 4 times 39 MiB at once; 100 MiB are there."""
    num_ooms, sizes, limited = forked.call(wide_steps, 100 << 20)
    assert max(sizes) < 256 and num_ooms >= 1
    again = forked.call(wide_steps, 0, sizes)
    assert again[:2] == (0, sizes)
    assert all(map(np.array_equal, limited, again[2]))


def test_a_loop_of_ones_own_goes_on_bit_exact_from_what_it_saved(tmp_path):
    def make():
        seed_everything(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def loss(model, x):
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return model(x).square().sum(), len(x)

        return {"model": model, "optimizer": optimizer, "step": SafeStep(model, optimizer, loss)}

    data = [torch.randn(8, 4) for _ in range(6)]
    straight = make()
    for number, x in enumerate(data):
        straight["step"](x)
        if number == 2:
            state = {name: part.state_dict() for name, part in straight.items()}
            save_checkpoint(tmp_path / "own.pt", state | {"rng": rng_state()})
    resumed, state = make(), load_checkpoint(tmp_path / "own.pt")
    for name, part in resumed.items():
        part.load_state_dict(state[name])
    set_rng_state(state["rng"])
    assert [resumed["step"](x).num_ooms for x in data[3:]] == [0, 0, 0]
    for one, other in zip(straight["model"].parameters(), resumed["model"].parameters(), strict=True):
        assert torch.equal(one, other)


class Recomputed(torch.nn.Module):
    """Two blocks with dropout, whose activations may be computed again in the backward pass."""

    def __init__(self, is_checkpointed):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Tanh()) for _ in range(2)
        )
        self.is_checkpointed, self.num_passes = is_checkpointed, 0
        self.blocks[0].register_forward_pre_hook(lambda *_: setattr(self, "num_passes", self.num_passes + 1))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


@pytest.mark.proves("S4-35")
def test_activation_checkpointing_of_torch_gives_the_same_gradients_also_after_a_split():
    def gradients(is_checkpointed):
        seed_everything(3)
        model, fault = Recomputed(is_checkpointed), Fault()

        def loss(model, x):
            total = model(x).square().sum()
            fault()
            return total, len(x)

        step = SafeStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, allow_inexact=True)
        outcome = step.gradients(torch.ones(6, 4))
        assert (outcome.num_ooms, outcome.num_microbatches) == (1, 2)
        return [parameter.grad for parameter in model.parameters()], model.num_passes

    (plain, passes), (recomputed, more) = gradients(False), gradients(True)
    assert_equal_tensors(plain, recomputed)
    assert more == passes + 2  # each part once more, in its backward pass
