"""A fit under way: what survives an out-of-memory, what is refused before the first step, what makes one step."""

import dataclasses
import functools
import os
import signal
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from memfit.errors import HalfUpdatedError, JobFailedError, StoppedError, UsageError
from memfit.training import (
    WHOLE,
    Ema,
    KeyedDataset,
    KeyedSampler,
    SkipPolicy,
    Trainer,
    _validation,
    checkpoint_path,
    load_checkpoint,
    seed_everything,
)

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
VALID = [X[:8], X[8:11]]


def squared(model, x):
    return (model(x) - x.sum(dim=1, keepdim=True)).square().sum(), len(x)


def make(path=None, *, loss=squared, dropout=0.2, **settings):
    seed_everything(2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(dropout), torch.nn.Linear(6, 1))
    settings.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=0.01))
    return Trainer(model, loss=loss, checkpoint_dir=path, seed=1, **settings)


def loader(batch_size=4, **settings):
    data = TensorDataset(X)
    return DataLoader(
        data, batch_size, shuffle=True, collate_fn=lambda rows: torch.stack([row[0] for row in rows]), **settings
    )


def same_tensors(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def same_fits(left, right):
    return same_tensors(left.model.state_dict(), right.model.state_dict())


class Failing:
    """A loss that runs out of memory in validation at the calls given, counted from 1."""

    def __init__(self, *calls, most=None):
        self.calls, self.most, self.seen, self.sizes = calls, most, 0, []

    def __call__(self, model, x):
        if not model.training:
            self.seen += 1
            torch.rand(3), np.random.rand()
            if self.seen in self.calls or (self.most and len(x) > self.most):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            self.sizes.append(len(x))
        return squared(model, x)


# --- out of memory in validation and saving


def test_memory_that_runs_out_once_in_validation_leaves_no_trace():
    plain, failed = make(), make(loss=Failing(1, 4, 6))
    expected = plain.fit(loader(), VALID, num_epochs=3)
    assert failed.fit(loader(), VALID, num_epochs=3).history == expected.history
    assert same_fits(plain, failed)


def test_a_validation_batch_that_does_not_fit_is_split_and_stays_so(events):
    loss = Failing(most=3)
    result = make(loss=loss).fit(loader(), VALID, num_epochs=2, preflight=False)
    expected = make().fit(loader(), VALID, num_epochs=2)
    assert loss.sizes[4:] == [2, 2, 2, 2, 2, 1] * 2  # the first ones ask whether it may be split
    assert [entry.metrics["valid_loss"] for entry in result.history] == pytest.approx(
        [entry.metrics["valid_loss"] for entry in expected.history]
    )
    assert [event["size"] for event in events("microbatch")] == [4, 2]
    assert {event["phase"] for event in events("oom")} == {"validate"}


def test_the_size_that_fits_validation_survives_a_resume(tmp_path):
    make(tmp_path, loss=Failing(most=3)).fit(loader(), VALID, num_epochs=2, preflight=False)
    again = Failing(most=3)
    make(tmp_path, loss=again).fit(loader(), VALID, num_epochs=3, preflight=False)
    assert (again.seen, again.sizes) == (12, [2, 2, 2, 2, 2, 1] * 2)  # the second epoch's validation is done again


def test_one_sample_that_does_not_fit_in_validation_fails_with_what_to_do():
    with pytest.raises(JobFailedError, match="One sample of a validation batch of 8 does not fit: CUDA out of"):
        make(loss=Failing(most=0.5)).fit(loader(), VALID, num_epochs=1, preflight=False)
    with pytest.raises(JobFailedError, match="One sample of a validation batch of 1 does not"):
        make(loss=Failing(most=0.5), split=WHOLE).fit(loader(), VALID, num_epochs=1, preflight=False)


def test_a_validation_loss_that_couples_samples_is_not_split():
    def coupled(model, x):
        if not model.training and len(x) > 4:
            raise MemoryError("of 3 GiB")
        score = model(x)
        return (score.max() - score.min()).square(), len(x)

    with pytest.raises(UsageError, match="the loss of a batch is not the sum of the losses of its parts"):
        make(loss=coupled).fit(loader(), VALID, num_epochs=1, preflight=False)


def test_an_evaluation_of_ones_own_is_run_once_more_and_then_fails(tmp_path):
    failures = iter([True, False, True, True])

    def evaluate(model, valid):
        value = float(torch.rand(()))
        if next(failures):
            raise MemoryError("of 3 GiB")
        return {"ic": value}

    with pytest.raises(JobFailedError, match="The phase 'validate' ran out of memory twice: of 3 GiB"):
        make(tmp_path).fit(loader(), VALID, num_epochs=2, evaluate=evaluate, best_metric="ic", preflight=False)
    assert load_checkpoint(tmp_path / "latest")["epoch"] == 2  # saved before
    seed_everything(1)
    failed = make().fit(loader(), VALID, num_epochs=1, best_metric="ic", preflight=False, evaluate=lambda *_: {"ic": float(torch.rand(()))})  # fmt: skip
    assert load_checkpoint(tmp_path / "latest")["history"][0]["metrics"] == failed.history[0].metrics


def test_memory_that_runs_out_once_in_a_save_leaves_no_trace(tmp_path, monkeypatch):
    calls, plain_save = [], torch.save

    def save(state, file):
        calls.append(1)
        if len(calls) in (1, 5, 8):  # a checkpoint has two files
            file.write(b"half")
            torch.rand(3)
            raise MemoryError
        plain_save(state, file)

    plain, failed = make(tmp_path / "plain"), make(tmp_path / "failed")
    plain.fit(loader(), VALID, num_epochs=3)
    monkeypatch.setattr(torch, "save", save)
    failed.fit(loader(), VALID, num_epochs=3)
    states = [load_checkpoint(tmp_path / name / "latest") for name in ("plain", "failed")]
    assert same_tensors(states[0]["model"], states[1]["model"])
    draws = [checkpoint_path(tmp_path / name / "latest") / "draws.pt" for name in ("plain", "failed")]
    assert draws[0].read_bytes() == draws[1].read_bytes()
    assert sorted(p.name for p in (tmp_path / "plain").iterdir()) == sorted(
        p.name for p in (tmp_path / "failed").iterdir()
    )


class Stopping:
    """A loss that asks the fit to stop at its n-th training call."""

    def __init__(self, call, loss=squared):
        self.call, self.loss, self.seen = call, loss, 0

    def __call__(self, model, x):
        self.seen += model.training
        if self.seen == self.call and model.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.loss(model, x)


def test_sizes_that_were_found_hold_after_a_resume_in_mid_epoch(tmp_path):
    def scarce(model, x):
        if len(x) > 2:
            raise MemoryError
        return squared(model, x)

    whole, stopped, resumed = make(loss=scarce), make(tmp_path, loss=Stopping(8, scarce)), make(tmp_path)
    expected = whole.fit(loader(), num_epochs=2, preflight=False)
    with pytest.raises(StoppedError, match="in epoch 1, after its step 4"):
        stopped.fit(loader(), num_epochs=2, preflight=False)
    assert resumed.fit(loader(), num_epochs=2).history == expected.history
    assert same_fits(whole, resumed)


# --- a step that was left half-way


class Half(torch.optim.AdamW):
    """Its step is left half-way at the calls given."""

    calls = ()

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01)
        self.seen = 0

    def step(self, closure=None):
        self.seen += 1
        if self.seen in self.calls:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise HalfUpdatedError("half", rule="a rule", remedy="a remedy")
        return super().step(closure)


def half(path, *calls, **settings):
    seed_everything(2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1))
    optimizer = Half(model.parameters())
    optimizer.calls = calls
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    settings = {"schedule": schedule, "ema": Ema(0.9), "milestones": (2,), **settings}
    return Trainer(model, loss=squared, optimizer=optimizer, checkpoint_dir=path, seed=1, **settings)


@pytest.mark.core
@pytest.mark.proves("C-26")
@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "num_workers"), [(0.0, 0), (600.0, 2)])
def test_a_half_made_step_goes_back_to_the_last_checkpoint_and_ends_with_the_same_bytes(
    tmp_path, seconds, num_workers, events
):
    whole = half(tmp_path / "whole")
    trainer = half(tmp_path / "half", 1, 3, 10, 11, checkpoint_seconds=seconds)
    expected = whole.fit(loader(num_workers=num_workers), VALID, num_epochs=3)
    result = trainer.fit(loader(num_workers=num_workers), VALID, num_epochs=3)
    assert result.history == expected.history
    assert same_fits(whole, trainer)
    assert len(events("rollback")) == 4
    for name in ("latest", "ema_epoch_2.pt"):
        states = [load_checkpoint(tmp_path / folder / name) for folder in ("whole", "half")]
        assert same_tensors(states[0]["model"], states[1]["model"])


def test_a_step_that_is_left_half_way_again_and_again_ends_the_fit(tmp_path):
    trainer = half(tmp_path, *range(2, 99))
    with pytest.raises(HalfUpdatedError):
        trainer.fit(loader(), num_epochs=2)
    assert trainer.optimizer.seen == 6  # once the second step, and four times the first


def test_without_a_folder_a_half_made_step_ends_the_fit():
    with pytest.raises(HalfUpdatedError, match="half"):
        half(None, 2).fit(loader(), num_epochs=1)


# --- what one step is made of


def test_several_batches_make_one_step_with_the_gradient_of_all(events):
    def fit(batch_size, **settings):
        trainer = make(dropout=0.0, **settings)
        trainer.model.double()
        batches = [x.double() for x in X.split(batch_size)]
        return trainer, trainer.fit(batches, num_epochs=2)

    (whole, one), (parts, many) = fit(8), fit(4, global_batch_size=8)
    assert [entry.num_steps for entry in one.history + many.history] == [3] * 4
    for left, right in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=1e-10, atol=1e-12)


def test_the_last_step_of_an_epoch_may_have_fewer_batches(tmp_path):
    trainer = make(tmp_path, global_batch_size=8)
    assert trainer.fit(loader(4), num_epochs=1).history[0].num_steps == 3
    assert make(global_batch_size=16).fit(loader(4), num_epochs=1).history[0].num_steps == 2


def test_a_global_batch_that_is_no_multiple_is_refused():
    with pytest.raises(UsageError, match="global_batch_size is 6, and a batch of the training data has 4"):
        make(global_batch_size=6).fit(loader(4), num_epochs=1)
    with pytest.raises(UsageError, match="a size that is not known"):
        make(global_batch_size=8).fit(DataLoader(TensorDataset(X), batch_sampler=[[1, 2], [3]]), num_epochs=1)


def test_a_schedule_is_stepped_with_each_step_and_resumes(tmp_path):
    def scheduled(path):
        seed_everything(2)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)
        return Trainer(model, loss=squared, optimizer=optimizer, schedule=schedule, checkpoint_dir=path), schedule

    (whole, schedule), (first, _) = scheduled(None), scheduled(tmp_path)
    whole.fit(loader(), num_epochs=4)
    assert schedule.last_epoch == 24
    first.fit(loader(), num_epochs=2)
    second, schedule = scheduled(tmp_path)
    second.fit(loader(), num_epochs=4)
    assert schedule.last_epoch == 24
    assert same_fits(whole, second)
    with pytest.raises(UsageError, match=r"schedule: OneCycleLR\(.*\) then, None now"):
        make(tmp_path).fit(loader(), num_epochs=5)
    with pytest.raises(UsageError, match="ReduceLROnPlateau cannot be the schedule"):
        make(schedule=torch.optim.lr_scheduler.ReduceLROnPlateau(first.optimizer))


def test_steps_that_the_scaler_skipped_are_left_out_of_the_mean():
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38, growth_interval=1000)
    trainer = make(scaler=scaler, dropout=0.0)
    with torch.no_grad():
        second = float(squared(trainer.model, X[4:8])[0]) / 4  # with the first weights: the first step is skipped
    entry = trainer.fit([X[:4], X[4:8]], num_epochs=1, preflight=False).history[0]
    assert entry.num_skipped == 1
    assert entry.train_loss == pytest.approx(second)


def test_skipped_batches_are_counted_and_left_out_of_the_mean():
    def loss(model, x):
        if x[0, 0] == X[0, 0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return squared(model, x)

    batches = list(X.split(6))
    policy = SkipPolicy(max_skipped=5, max_share=0.5)
    trainer = make(loss=loss, skip=policy, microbatch_size=None, dropout=0.0)
    history = trainer.fit(batches, num_epochs=1, preflight=False).history
    assert (history[0].num_steps, history[0].num_skipped) == (4, 1)
    assert history[0] == make(dropout=0.0).fit(batches[1:], num_epochs=1).history[0].__class__(
        1, history[0].train_loss, 4, None, 1
    )
    assert history[0].train_loss == make(dropout=0.0).fit(batches[1:], num_epochs=1).history[0].train_loss


# --- loaders


class Stream(IterableDataset):
    def __len__(self):
        return len(X)

    def __iter__(self):
        return iter(X)


def test_workers_of_a_stream_that_live_on_are_refused_with_a_folder_unless_inexact_is_allowed(tmp_path):
    def stream():
        return DataLoader(Stream(), 4, num_workers=1, persistent_workers=True)

    with pytest.raises(UsageError, match="persistent_workers=True"):
        make(tmp_path).fit(stream(), num_epochs=1)
    make(tmp_path, allow_inexact=True).fit(stream(), num_epochs=2)


@pytest.fixture
def own_workers():
    """Counts the workers that a test started itself: persistent ones of an earlier test may live still."""
    others = set(torch.multiprocessing.active_children())
    return lambda: len(set(torch.multiprocessing.active_children()) - others)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("headroom", [0, 1 << 50])
def test_training_workers_do_not_live_in_validation_without_room_for_both(
    monkeypatch, own_workers, persistent, headroom
):
    class Room:
        headroom_bytes = headroom

        @classmethod
        def read(cls):
            return cls()

    monkeypatch.setattr(_validation, "Budget", Room)
    data = KeyedDataset(X, seed=4)
    train = DataLoader(data, 4, sampler=KeyedSampler(data), num_workers=2, persistent_workers=persistent)
    living = []

    def evaluate(model, valid):
        living.append(own_workers())
        return {"valid_loss": 1.0}

    make().fit(train, DataLoader(X, 4, num_workers=2), num_epochs=2, evaluate=evaluate, preflight=False)
    assert living == [2 if persistent and headroom else 0] * 2
    assert own_workers() == 0


class MadeByThreads(list):
    """Batches of a loader whose workers are threads, as those of ``memfit.data.Loader``."""

    num_workers = 64


def test_validation_batches_that_threads_make_end_no_training_workers(monkeypatch, own_workers):
    monkeypatch.setattr(_validation.Budget, "read", lambda: pytest.fail("threads need no room of their own"))
    train = DataLoader(
        (data := KeyedDataset(X, seed=4)), 4, sampler=KeyedSampler(data), num_workers=2, persistent_workers=True
    )
    living = []

    def evaluate(model, valid):
        living.append(own_workers())
        return {"valid_loss": 1.0}

    make().fit(train, MadeByThreads([X[:4]]), num_epochs=2, evaluate=evaluate, preflight=False)
    assert living == [2, 2]


# --- before the first step


@pytest.mark.proves("S2-49")
def test_the_record_of_a_fit_says_which_optimizer_and_schedule_ran_with_which_settings(events):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.25, weight_decay=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7)
    Trainer(model, loss=squared, optimizer=optimizer, schedule=schedule).fit(loader(), num_epochs=1)
    (event,) = events("trainer")
    assert event["optimizer"].startswith("RAdam(betas=(0.9, 0.999), ") and "weight_decay=0.5" in event["optimizer"]
    assert "lr=0.25" in event["optimizer"] and "step_size=7" in event["schedule"]
    assert (event["precision"], event["device"], event["num_parameters"]) == ("float32", "cpu", 5)
    assert (event["loss"], event["num_threads"], event["num_workers"]) == ("squared", torch.get_num_threads(), 0)


def test_the_record_of_a_fit_has_the_constants_of_a_loss_that_is_a_dataclass(events):
    @dataclasses.dataclass(frozen=True)
    class Scaled:
        scale: float

        def __call__(self, model, x):
            total, weight = squared(model, x)
            return self.scale * total, weight

    model = torch.nn.Linear(4, 1)
    for loss in (Scaled(0.5), functools.partial(squared)):
        Trainer(model, loss=loss, precision="bf16-mixed").fit(loader(), num_epochs=1)
    first, second = events("trainer")
    assert first["loss"].endswith("Scaled(scale=0.5)") and second["loss"] == "squared"


def test_an_evaluation_of_ones_own_sees_whole_validations_only(events):
    seen = []

    def evaluate(model, valid):
        seen.append([len(batch["x"]) for batch in valid])
        return {"valid_loss": 0.5}

    make().fit(loader(), [{"x": X[8:11]}, {"x": X[:8]}], num_epochs=2, evaluate=evaluate)
    assert seen == [[3, 8], [3, 8]]
    (event,) = events("preflight_validation")  # the loss takes other batches than these
    assert event["reason"].startswith("TypeError")


def test_a_tuple_of_batches_is_validated_in_the_preflight(events):
    make().fit(loader(), tuple(VALID), num_epochs=1)
    assert list(events("preflight")[0]["phases"]) == ["train", "validate"]


@pytest.mark.parametrize("valid", [{"x": X}, (X, X), X], ids=type)
def test_validation_by_other_things_than_batches_is_left_out_of_the_preflight(valid, events):
    calls = []

    def evaluate(model, given):
        assert given is valid
        calls.append(model.training)
        return {"valid_loss": 0.5}

    make().fit(loader(), valid, num_epochs=1, evaluate=evaluate)
    assert calls == [False]
    assert next(iter(events("preflight")[0]["phases"])) == "train"


def test_a_wrong_best_metric_is_put_right_without_training_the_epoch_again(tmp_path):
    def evaluate(model, valid):
        return {"ic": float(sum(model(batch).sum() for batch in valid))}

    with pytest.raises(UsageError, match="no evaluate"):
        make().fit(loader(), VALID, num_epochs=1, best_metric="ic")
    with pytest.raises(UsageError, match=r"Validation gave \['ic'\]"):
        make(tmp_path).fit(loader(), VALID, num_epochs=1, evaluate=evaluate)
    result = make(tmp_path).fit(loader(), VALID, num_epochs=1, evaluate=evaluate, best_metric="ic")
    assert (result.resumed_from, result.epochs_run, result.best_epoch) == (1, 0, 1)


class _Scratch(torch.nn.Module):
    """Counts its calls in a buffer that its state dict leaves out, and lets them into its result."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("last", None, persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
            scale = 1 if self.last is None else self.last.mean()
            self.last = x.detach()
            return self.linear(x) * self.calls * scale
        return self.linear(x)


def test_buffers_that_a_state_dict_leaves_out_are_resumed(tmp_path):
    def fit(folder, num_epochs):
        seed_everything(2)
        model = _Scratch()
        Trainer(model, loss=squared, checkpoint_dir=folder).fit(loader(), num_epochs=num_epochs)
        return model

    straight = fit(tmp_path / "straight", 2)
    fit(tmp_path / "resumed", 1)
    resumed = fit(tmp_path / "resumed", 2)
    assert straight.calls == resumed.calls == 12
    assert same_tensors(straight.state_dict(), resumed.state_dict())
    assert torch.equal(straight.last, resumed.last)


def test_a_bug_beside_a_busy_worker_ends_the_fit(monkeypatch, own_workers):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.05)

    class Stuck(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            if index >= 2:
                time.sleep(600)
            return X[index]

    def loss(model, x):
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        make(loss=loss).fit(DataLoader(Stuck(), 2, num_workers=1), num_epochs=1, preflight=False)
    assert own_workers() == 0
