"""Where a model computes and in which precision: exact resumes, equal splits, refusals.

The tests with ``gpu`` need CUDA; without it they are skipped.
"""

import copy
import dataclasses
import os
import signal

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from memfit.errors import JobFailedError, StoppedError, UsageError
from memfit.training import Ema, Trainer, autocast, find_device, load_checkpoint, seed_everything, to_device

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
MIXED = ["bf16-mixed", "fp16-mixed"]
DTYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
BATCHES = list(X.split(4))


class Squared:
    """A loss that notes what it saw, and stops the process at a call given."""

    def __init__(self, stop_at=None):
        self.stop_at, self.devices, self.dtypes = stop_at, set(), []

    def __call__(self, model, x):
        self.devices.add(x.device.type)
        output = model(x)
        self.dtypes.append(output.dtype)
        if len(self.dtypes) == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return (output.float() - x.sum(dim=1, keepdim=True)).square().sum(), len(x)


def make(path=None, *, loss=None, dropout=0.2, fused=False, **settings):
    seed_everything(2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(dropout), torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    settings = {"max_grad_norm": 1.0, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3)} | settings
    return Trainer(model, loss=loss or Squared(), optimizer=optimizer, checkpoint_dir=path, seed=1, **settings)


def weights(trainer):
    return [parameter.detach().cpu() for parameter in trainer.model.parameters()]


def same(left, right):
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", MIXED)
def test_a_resume_in_mixed_precision_is_bit_exact_with_scaler_schedule_and_average(tmp_path, precision, fused, device):
    def build(path, stop_at=None):
        # a scale that overflows float16 in the first steps and grows again later
        scaler = torch.amp.GradScaler(device, init_scale=2.0**19, growth_interval=3) if precision == MIXED[1] else None
        settings = {"precision": precision, "device": device, "scaler": scaler, "ema": Ema(0.5), "fused": fused}
        return make(path, loss=Squared(stop_at), **settings)

    whole, stopped, resumed = build(tmp_path / "whole"), build(tmp_path / "cut", 8), build(tmp_path / "cut")
    expected = whole.fit(BATCHES, [X], num_epochs=3, preflight=False)
    with pytest.raises(StoppedError, match="in epoch 2, after its step"):
        stopped.fit(BATCHES, [X], num_epochs=3, preflight=False)
    assert resumed.fit(BATCHES, [X], num_epochs=3).history == expected.history
    assert same(weights(whole), weights(resumed))
    states = [load_checkpoint(tmp_path / name / "latest") for name in ("whole", "cut")]
    num_skipped = sum(entry.num_skipped for entry in expected.history)
    for state in states:
        assert state["schedule"]["last_epoch"] == state["ema"]["num_updates"] == 18 - num_skipped
    assert states[0]["sizes"]["scaler"] == states[1]["sizes"]["scaler"]
    assert (num_skipped > 0) == (precision == "fp16-mixed")
    assert set(whole.step.loss.loss.dtypes) == {DTYPES[precision]}


def test_float16_gets_a_scaler_and_the_others_get_none():
    assert make(precision="fp16-mixed").step.scaler.get_scale() == 2.0**16
    assert make(precision="bf16-mixed").step.scaler is make().step.scaler is None
    own = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert make(precision="fp16-mixed", scaler=own).step.scaler is own


@pytest.mark.parametrize("precision", MIXED)
def test_a_split_batch_has_the_gradient_of_the_whole_up_to_the_rounding_of_16_bits(precision):
    def gradient(size):
        trainer = make(precision=precision, microbatch_size=size, max_grad_norm=None, dropout=0.0)
        outcome = trainer.step.gradients(X)
        assert outcome.num_microbatches == (1 if size is None else -(-24 // size))
        return [parameter.grad for parameter in trainer.model.parameters()]

    whole = gradient(None)
    assert same(whole, gradient(24))
    for size in (5, 12):
        for one, other in zip(whole, gradient(size), strict=True):
            assert (one - other).norm() <= 2.0**-7 * one.norm()


@pytest.mark.slow
@pytest.mark.parametrize("precision", MIXED)
def test_memory_that_runs_out_in_mixed_precision_gives_the_bytes_of_a_fit_with_those_splits(precision):
    def scarce(model, x):
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return Squared()(model, x)

    trainers = [make(loss=scarce, precision=precision), make(precision=precision, microbatch_size=2)]
    histories = [trainer.fit(BATCHES, [X[:2]], num_epochs=2, preflight=False).history for trainer in trainers]
    assert trainers[0].step.num_ooms > 0 and histories[0] == histories[1]
    assert same(*map(weights, trainers))
    if precision == "fp16-mixed":
        assert trainers[0].step.scaler.state_dict() == trainers[1].step.scaler.state_dict()


def test_rounding_to_16_bits_is_not_taken_for_a_loss_that_couples_samples():
    def rounded(model, x):  # as kernels do that depend on the batch size
        total, weight = Squared()(model, x)
        return total * (1.005 if len(x) > 4 else 1.0), weight

    assert make(loss=rounded, precision="bf16-mixed", microbatch_size=5).step(X).num_microbatches == 5
    with pytest.raises(UsageError, match="the loss of a batch is not the sum"):
        make(loss=rounded, microbatch_size=5).step(X)


def test_a_gradient_that_overflows_is_skipped_and_recorded_and_moves_neither_schedule_nor_average(events):
    ema = Ema(0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    trainer = make(precision="fp16-mixed", scaler=scaler, ema=ema)
    before = copy.deepcopy(weights(trainer))
    history = trainer.fit(BATCHES, num_epochs=1, preflight=False).history
    assert history[0].num_skipped == history[0].num_steps == 6
    assert same(before, weights(trainer)) and ema.num_updates == 0
    assert not trainer.optimizer.state and trainer.schedule.last_epoch == 0
    found = [(event["step"], event["scale"], event["next_scale"]) for event in events("scaler_skip")]
    assert found[0] == (1, 2.0**40, 2.0**39) and len(found) == 6


def test_a_gradient_that_is_never_finite_ends_the_fit():
    def broken(model, x):
        return model(x).sum() * float("nan"), len(x)

    with pytest.raises(JobFailedError, match="is not finite, however small its scale"):
        make(loss=broken, precision="fp16-mixed").fit(BATCHES, num_epochs=9, preflight=False)


def test_an_evaluation_runs_under_the_same_autocast_and_sees_weights_that_are_swapped_inside():
    ema = Ema(0.0)
    seen = []

    def evaluate(model, batches):
        own = [model(x) for x in batches]
        average = dict(ema._average)
        ema._average = {name: torch.zeros_like(value) for name, value in average.items()}
        with ema.applied(model):
            zeros = model(X)
        ema._average = average
        seen.append((own[0].dtype, bool(zeros.any())))
        return {"valid_loss": 0.0}

    make(precision="bf16-mixed", ema=ema).fit(BATCHES, [X[:3]], num_epochs=2, evaluate=evaluate, preflight=False)
    assert seen == [(torch.bfloat16, False)] * 2
    trainer = make(precision="bf16-mixed")
    trainer.fit(BATCHES, [X[:3]], num_epochs=1)
    assert set(trainer.step.loss.loss.dtypes) == {torch.bfloat16}


def test_float32_is_the_code_path_and_the_bits_of_before():
    plain, named, moved = make(), make(precision="float32"), make(device="cpu", precision="auto")
    assert type(plain.step.loss) is type(named.step.loss) is Squared
    for trainer in (plain, named, moved):
        trainer.fit(BATCHES, [X], num_epochs=2)
    assert same(weights(plain), weights(named)) and same(weights(plain), weights(moved))
    assert set(moved.step.loss.loss.dtypes) == {torch.float32}


def test_a_resume_in_another_precision_is_refused(tmp_path):
    make(tmp_path).fit(BATCHES, num_epochs=1)
    with pytest.raises(UsageError, match="precision: None then, bf16-mixed now"):
        make(tmp_path, precision="bf16-mixed").fit(BATCHES, num_epochs=2)
    make(tmp_path, precision="float32", device="cpu").fit(BATCHES, num_epochs=2)


@pytest.mark.parametrize(
    ("settings", "what", "remedy"),
    [
        ({"precision": "bf16"}, "precision is 'bf16'", "bf16-mixed"),
        ({"precision": 16}, "precision is 16", ""),
        ({"device": "gpu"}, "device is 'gpu'", "device='auto'"),
        ({"device": 2.5}, "device is 2.5", "device='auto'"),
        ({"device": "cuda:99"}, r"device is 'cuda:99', and torch sees \d+ GPUs", "device='auto'"),
    ],
)
def test_an_unknown_precision_or_device_is_refused(settings, what, remedy):
    with pytest.raises(UsageError, match=what) as caught:
        make(**settings)
    assert remedy in caught.value.remedy and caught.value.rule


def test_float16_weights_and_an_optimizer_with_a_state_are_refused():
    model = torch.nn.Linear(4, 1).half()
    with pytest.raises(UsageError, match="the weight 'weight' is float16"):
        Trainer(model, loss=Squared(), precision="fp16-mixed")
    trainer = make()
    trainer.fit(BATCHES, num_epochs=1)
    with pytest.raises(UsageError, match="device='meta' moves the model, and its AdamW has a state already"):
        Trainer(trainer.model, loss=Squared(), optimizer=trainer.optimizer, device="meta")


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    name: str


class MovesInPlace:
    """As graphs and encodings do: ``to`` changes the object itself."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)
        return self


def test_a_batch_is_moved_with_its_structure_and_the_users_own_stays_where_it_is():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"pair": Pair(X, "a"), "rest": (X, MovesInPlace(X), packed, 3), "rows": X.numpy()}
    moved = to_device(batch, "meta")
    x, graph, sequences, number = moved["rest"]
    assert {moved["pair"].x.device.type, x.device.type, graph.x.device.type, sequences.data.device.type} == {"meta"}
    assert (moved["pair"].name, number) == ("a", 3) and moved["rows"] is batch["rows"]
    assert sequences.batch_sizes.device.type == "cpu"
    assert {batch["pair"].x.device, batch["rest"][1].x.device} == {X.device}


def test_auto_is_the_gpu_where_there_is_one_and_the_context_follows_the_model():
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 1)
    for precision, dtype in (("auto", torch.float32), (None, torch.float32), *DTYPES.items()):
        with autocast(model, precision):
            assert model(X).dtype == dtype


@gpu
@pytest.mark.parametrize("precision", ["float32", *MIXED, "auto"])
def test_on_a_gpu_the_model_and_each_microbatch_are_moved_and_the_optimizer_keeps_its_weights(precision):
    trainer = make(device="auto", precision=precision, microbatch_size=2, fused=True)
    pinned = [batch.pin_memory() for batch in BATCHES]
    trainer.fit(pinned, [X], num_epochs=2)
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert all(one is other and one.is_cuda for one, other in zip(held, trainer.model.parameters(), strict=True))
    assert trainer.step.loss.loss.devices == {"cuda"} and not pinned[0].is_cuda
