"""The trainer: exact resumes, stops, refusals, and the order of an epoch."""

import functools
import itertools
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module

import forked
from memfit.errors import DataError, JobFailedError, StoppedError, UsageError
from memfit.training import CheckpointWarning, Ema, SafeStep, Trainer, load_checkpoint, seed_everything


class Shuffled:
    """Three batches whose order is keyed by the epoch."""

    epochs: list

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return 3

    def __iter__(self):
        for index in np.random.default_rng(self.epochs[-1]).permutation(3):
            yield torch.randn(5, 4, generator=torch.Generator().manual_seed(int(index)))


def squared(model, x):
    return (model(x) - x.sum(dim=1, keepdim=True)).square().sum(), len(x)


def make(path=None, *, loss=squared, dropout=0.2, learning_rate=0.01, seed=1, **settings):
    seed_everything(2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(dropout), torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    return Trainer(model, loss=loss, optimizer=optimizer, checkpoint_dir=path, seed=seed, **settings)


def same_tensors(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def crash(folder, every):
    """What ``crash_driver.py`` finds when it kills at each ``every``-th moment and each such one inside of a save."""
    driver = Path(__file__).with_name("crash_driver.py")
    done = subprocess.run(
        [sys.executable, driver, folder, str(every)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=560, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def crashes(tmp_path_factory):
    return crash(tmp_path_factory.mktemp("crashes"), 8)


#: The least moments of a fit.
LEAST = {"indexed": 40, "workers": 6, "keyed": 6}


@pytest.mark.long
@pytest.mark.proves("S1-34")
@pytest.mark.parametrize("kind", LEAST)
def test_a_fit_killed_at_any_moment_resumes_to_identical_bytes(crashes, kind):
    """Within saves, at steps, with loader workers; keyed data are resumed with another number of workers."""
    found = crashes[kind]
    assert found["num_moments"] >= LEAST[kind] and found["num_tried"] >= max(1, LEAST[kind] // 8)
    assert found["num_in_save"] >= 5 or kind != "indexed"
    assert (found["died"], found["different"]) == (found["num_tried"], [])


@pytest.mark.long
def test_how_workers_are_started_changes_nothing_not_even_at_a_resume(crashes):
    assert crashes["served"] == crashes["workers"]["expected"]


@pytest.mark.long
def test_a_fit_killed_again_and_again_ends_with_identical_bytes(crashes):
    assert crashes["chain"]["kills"] >= 2
    assert crashes["chain"]["digest"] == crashes["indexed"]["expected"]


def test_epochs_are_counted_from_one_and_the_history_is_whole_after_a_resume(tmp_path):
    make(tmp_path).fit(Shuffled(), num_epochs=2)
    data = Shuffled()
    result = make(tmp_path).fit(data, num_epochs=4, preflight=False)
    assert data.epochs == [3, 4]
    assert [entry.epoch for entry in result.history] == [1, 2, 3, 4]
    assert (result.epochs_run, result.resumed_from, result.best_epoch) == (2, 2, None)
    assert result.history == make().fit(Shuffled(), num_epochs=4).history


def test_a_finished_fit_run_again_trains_nothing_and_restores_the_model(tmp_path):
    first = make(tmp_path)
    expected = first.fit(Shuffled(), [torch.ones(2, 4)], num_epochs=2)
    second = make(tmp_path)
    again = second.fit(Shuffled(), [torch.ones(2, 4)], num_epochs=2)
    assert (again.epochs_run, again.history) == (0, expected.history)
    assert same_tensors(first.model.state_dict(), second.model.state_dict())


def test_the_train_loss_is_the_sum_of_losses_over_the_sum_of_weights():
    batches = [torch.full((1, 1), 3.0), torch.full((9, 1), 1.0)]
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    trainer = Trainer(
        model, loss=lambda m, x: (m(x).sum(), len(x)), optimizer=torch.optim.SGD(model.parameters(), lr=0.0)
    )
    result = trainer.fit(batches, batches, num_epochs=1)
    assert result.history[0].train_loss == pytest.approx((3 + 9) / 10)
    assert result.history[0].metrics == {"valid_loss": pytest.approx((3 + 9) / 10)}


def test_validation_may_draw_random_numbers_without_changing_the_training():
    def draw(model, valid):
        assert not model.training
        assert not torch.is_grad_enabled()
        return {"noise": float(torch.rand(())) + np.random.rand()}

    plain, measured = make(), make()
    plain.fit(Shuffled(), num_epochs=3)
    measured.fit(Shuffled(), [None], num_epochs=3, evaluate=draw, best_metric="noise")
    assert same_tensors(plain.model.state_dict(), measured.model.state_dict())


@pytest.mark.proves("S1-35")
def test_the_best_epoch_follows_the_named_metric_and_its_direction_and_is_never_nan(tmp_path):
    values = {"ic": [math.nan, 0.3, 0.1, 0.3]}
    result = make(tmp_path).fit(
        Shuffled(), [None], num_epochs=4, best_metric="ic", direction="maximize", preflight=False,
        evaluate=lambda *_: {"ic": values["ic"].pop(0)},
    )  # fmt: skip
    assert result.best_epoch == 2
    assert load_checkpoint(tmp_path / "best")["epoch"] == 2


def test_gradients_are_cut_to_the_largest_norm():
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = Trainer(model, loss=lambda m, x: (-100 * m(x).sum(), 1), optimizer=optimizer, max_grad_norm=0.5)
    trainer.fit([torch.ones(1, 1)], num_epochs=1)
    assert model.weight.item() == pytest.approx(0.5, rel=1e-4)


def stop_at(epoch, step, number, data):
    """A loss that sends this process a signal at one step."""
    seen = []

    def loss(model, x):
        seen.append(1)
        if (data.epochs[-1], len(seen)) == (epoch, 3 * (epoch - 1) + step):
            os.kill(os.getpid(), number)
        return squared(model, x)

    return loss


def test_a_signal_without_a_folder_says_what_that_means():
    data = Shuffled()
    with pytest.raises(StoppedError, match="nothing is saved: it will start over"):
        make(loss=stop_at(1, 1, signal.SIGTERM, data)).fit(data, num_epochs=3, preflight=False)


def test_a_signal_in_validation_leaves_it_between_two_batches(tmp_path):
    seen = []

    def loss(model, x):
        if not model.training:
            seen.append(1)
            os.kill(os.getpid(), signal.SIGUSR1)
        return squared(model, x)

    for number, folder in enumerate((None, tmp_path), start=1):
        with pytest.raises(StoppedError, match="after epoch 1"):
            make(folder, loss=loss).fit(Shuffled(), [torch.ones(2, 4)] * 5, num_epochs=2, preflight=False)
        assert len(seen) == number
    result = make(tmp_path).fit(Shuffled(), [torch.ones(2, 4)] * 5, num_epochs=1)
    assert (result.resumed_from, "valid_loss" in result.history[0].metrics) == (1, True)


def test_a_stop_can_be_caught_and_sent_between_processes():
    error = StoppedError("Stopped.", rule="a rule", remedy="again")
    assert isinstance(error, Exception)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_in_another_thread_a_fit_leaves_signals_alone():
    results = []
    thread = threading.Thread(target=lambda: results.append(make().fit(Shuffled(), num_epochs=1)))
    thread.start()
    thread.join()
    assert results[0].epochs_run == 1


def test_a_loss_that_is_not_finite_ends_the_fit_and_names_epoch_and_step(tmp_path):
    data = Shuffled()

    def loss(model, x):
        total, weight = squared(model, x)
        return (total * math.nan if data.epochs[-1] == 2 else total), weight

    trainer = make(tmp_path, loss=loss)
    with pytest.raises(JobFailedError, match="In epoch 2, step 1 of 3 the loss is nan over a weight of 5"):
        trainer.fit(data, num_epochs=3, preflight=False)
    saved = load_checkpoint(tmp_path / "latest")
    assert saved["epoch"] == 1
    assert same_tensors(saved["model"], trainer.model.state_dict())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 9}, "seed: 1 then, 9 now"),
        ({"max_grad_norm": 1.0}, "max_grad_norm: None then, 1.0 now"),
    ],
)
def test_a_resume_with_a_changed_setting_is_refused_by_name(tmp_path, change, text):
    make(tmp_path).fit(Shuffled(), num_epochs=1)
    with pytest.raises(UsageError, match=text):
        make(tmp_path, **change).fit(Shuffled(), num_epochs=2)


def test_a_resume_with_another_optimizer_or_other_data_is_refused(tmp_path):
    make(tmp_path).fit(Shuffled(), num_epochs=1)
    with pytest.raises(UsageError, match="steps per epoch: 3 then, 1 now"):
        make(tmp_path).fit([torch.ones(2, 4)], num_epochs=2)
    model = make().model
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match=r"made with other settings: optimizer: AdamW then, SGD now\.\n"):
        Trainer(model, loss=squared, optimizer=sgd, checkpoint_dir=tmp_path, seed=1).fit(Shuffled(), num_epochs=2)


def test_a_fit_cannot_go_back_to_fewer_epochs(tmp_path):
    make(tmp_path).fit(Shuffled(), num_epochs=3)
    with pytest.raises(UsageError, match="has 3 whole epochs, and num_epochs is 2"):
        make(tmp_path).fit(Shuffled(), num_epochs=2)


def test_a_resume_with_other_threads_warns_that_it_is_not_bit_exact(tmp_path):
    make(tmp_path).fit(Shuffled(), num_epochs=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.warns(CheckpointWarning, match="not be bit-exact"):
            make(tmp_path).fit(Shuffled(), num_epochs=2)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.proves("S2-24", "S3-07")
def test_an_epoch_is_train_then_checkpoint_then_validate_and_is_recorded(tmp_path, monkeypatch, events):
    monkeypatch.setattr(time, "monotonic", itertools.count(0.0, 0.05).__next__)
    make(tmp_path / "checkpoints").fit(Shuffled(), [torch.ones(2, 4)], num_epochs=2, preflight=False)
    phases = [event["phase"] for event in events("phase")]
    assert phases == ["checkpoint", *["train", "checkpoint", "validate"] * 2]
    assert [(event["epoch"], event["step"], event["num_steps"]) for event in events("step")] == [(1, 1, 3), (2, 1, 3)]
    assert [(event["epoch"], event["num_epochs"]) for event in events("epoch")] == [(1, 2), (2, 2)]
    assert all({"train_loss", "valid_loss"} <= event.keys() for event in events("epoch"))
    saved = events("checkpoint")
    assert [Path(event["path"]).name for event in saved] == ["step-0", "step-3", "step-6"]
    assert all(event["bytes"] > 1000 for event in saved)


def test_a_checkpoint_is_also_written_within_an_epoch_when_the_last_one_is_old(tmp_path, events):
    make(tmp_path / "often", checkpoint_seconds=0.0).fit(Shuffled(), num_epochs=1)
    make(tmp_path / "seldom").fit(Shuffled(), num_epochs=1)
    assert [(event["epoch"], event["step"]) for event in events("checkpoint")] == [
        (0, 0), (0, 1), (0, 2), (1, 3), (0, 0), (1, 3),
    ]  # fmt: skip


VALID = [torch.ones(2, 4)]


@pytest.mark.parametrize(
    ("batches", "settings", "text"),
    [
        ([Shuffled()], {"evaluate": lambda *_: {}}, "evaluate was given without validation"),
        ([Shuffled()], {"patience": 2}, "patience was given without validation"),
        ([Shuffled(), VALID], {"patience": 0}, "patience is 0"),
        ([Shuffled(), VALID], {"patience": True}, "patience is True"),
        ([Shuffled(), VALID], {"direction": "up"}, "direction is 'up'"),
        ([Shuffled(), []], {}, "There are no validation batches"),
        ([Shuffled()], {"num_epochs": 0}, "num_epochs is 0"),
        ([Shuffled()], {"num_epochs": "3"}, "num_epochs is '3'"),
        ([[]], {}, "an epoch has 0"),
        ([iter(VALID)], {}, "The training data have no length"),
    ],
)
def test_what_cannot_be_fitted_is_refused_before_anything_is_trained(batches, settings, text):
    with pytest.raises(UsageError, match=text):
        make().fit(*batches, **{"num_epochs": 1, **settings})


def test_an_unknown_argument_is_an_error_of_python():
    for call in (lambda: make(callbacks=[]), lambda: make().fit(VALID, num_epochs=1, epochs=3)):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            call()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ema": 0.99}, r"ema is 0.99 \(float\)"),
        ({"seed": "3"}, "seed is '3'"),
        ({"seed": -1}, "seed is -1"),
        ({"keep_epochs": 0}, "keep_epochs is 0"),
        ({"model": "net"}, "the model is 'net'"),
        ({"keep_epochs": True}, "keep_epochs is True"),
        ({"checkpoint_seconds": None}, "checkpoint_seconds is None"),
        ({"global_batch_size": 2.5}, "global_batch_size is 2.5"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1'"),
        ({"optimizer": torch.optim.AdamW}, "the optimizer is the class AdamW"),
        ({"loss": 3}, r"the loss is 3 \(int\)"),
        ({"loss": torch.nn.MSELoss()}, r"the loss is MSELoss\(\)"),
        ({"loss": torch.nn.MSELoss}, "the loss is the class MSELoss"),
        ({"loss": torch.nn.functional.mse_loss}, "the loss is <function mse_loss"),
        ({"split": "whole"}, r"split is 'whole' \(str\)"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named(settings, text):
    with pytest.raises(UsageError, match=text):
        Trainer(**{"model": torch.nn.Linear(2, 1), "loss": squared, **settings})


def test_for_a_loss_of_torchs_a_function_is_given_that_works():
    with pytest.raises(UsageError, match="returns the sum of a batch's losses and its weight") as caught:
        Trainer(torch.nn.Linear(2, 1), loss=torch.nn.MSELoss())
    written = eval(caught.value.remedy.removeprefix("pass loss="), {"torch": torch})
    batch = torch.ones(3, 2), torch.zeros(3, 1)
    result = Trainer(torch.nn.Linear(2, 1), loss=written).fit([batch], [batch], num_epochs=1)
    assert result.history[0].train_loss > 0


class SumOfSquares(torch.nn.MSELoss):
    def forward(self, model, batch):
        return squared(model, batch)


def test_a_class_made_of_one_of_torchs_losses_is_a_loss():
    assert len(make(loss=SumOfSquares()).fit(Shuffled(), num_epochs=1).history) == 1


def test_a_metric_that_validation_does_not_give_is_named():
    with pytest.raises(UsageError, match=r"Validation gave \['ic'\], and the best epoch is chosen by 'rank_ic'"):
        make().fit(Shuffled(), [None], num_epochs=1, evaluate=lambda *_: {"ic": 1.0}, best_metric="rank_ic")


def test_data_that_can_be_read_once_only_are_found_out():
    class Once:
        left = iter([torch.ones(1, 4)])

        def __len__(self):
            return 1

        def __iter__(self):
            return self.left

    with pytest.raises(DataError, match="Epoch 2 gave no batch"):
        make().fit(Once(), num_epochs=2, preflight=False)


def test_without_torch_the_extra_is_named():
    code = "import sys; sys.modules['torch'] = None\ntry:\n import memfit.training\nexcept Exception as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "pip install 'memfit[torch]'" in done.stdout


def refused_of_ranks(store):
    """What is told of models that several ranks train, and of one that they do not."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    sharded = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    fully_shard(sharded[1])
    told = []
    for model in (
        torch.nn.Sequential(ddp),
        FullyShardedDataParallel(torch.nn.Linear(2, 1), device_id=torch.device("cpu")),
        sharded,
        distribute_module(torch.nn.Linear(2, 1), dist.init_device_mesh("cpu", (1,))),
    ):
        for make in (Trainer, functools.partial(SafeStep, optimizer=torch.optim.SGD(model.parameters()))):
            with pytest.raises(UsageError) as caught:
                make(model, loss=squared)
            told.append(caught.value.what)
    Trainer(torch.nn.DataParallel(torch.nn.Linear(2, 1)), loss=squared)
    assert Trainer(ddp, loss=squared).model is ddp.module  # a group of one rank trains alone
    return told


def test_a_model_of_several_ranks_is_refused_by_name(tmp_path):
    told = [
        line.removesuffix(": several ranks train it.")
        for line in forked.call(refused_of_ranks, str(tmp_path / "store"))
    ]
    assert told[::2] == told[1::2] == [
        "'0' in the model is a DistributedDataParallel",
        "The model is a FullyShardedDataParallel",
        "'1' in the model is a FSDPModule",
        "'weight' in the model is a DTensor",
    ]  # fmt: skip


def test_a_schedule_with_other_constants_is_refused_on_resume(tmp_path: Path) -> None:
    def fit(num_steps: int, num_epochs: int) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
        trainer = Trainer(model, loss=_squares, optimizer=optimizer, schedule=schedule, checkpoint_dir=tmp_path)
        trainer.fit([torch.ones(4, 1)], num_epochs=num_epochs)

    fit(8, 1)
    with pytest.raises(UsageError, match=r"T_max=8.* then, .*T_max=20"):
        fit(20, 2)
    fit(8, 2)


def _squares(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (model(x) ** 2).sum(), len(x)


def test_epochs_and_the_resume_are_told_where_no_run_shows_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMFIT_RUN_DIR", raising=False)
    for num_epochs in (1, 2):
        trainer = Trainer(torch.nn.Linear(1, 1), loss=_squares, checkpoint_dir=tmp_path)
        trainer.fit([torch.ones(4, 1)], num_epochs=num_epochs)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "memfit: epoch 1/1",
        f"memfit: goes on after epoch 1, of 2 epochs ({tmp_path / 'step-1'})",
        "memfit: epoch 1/2",  # its end is finished again: whether that had happened is not known
        "memfit: not proved: no step after step-1 was kept to compare with",
        "memfit: epoch 2/2",
    ]


def test_the_first_ctrl_c_saves_and_stops_and_the_second_interrupts(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def interrupting(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        signal.raise_signal(signal.SIGINT)
        return _squares(model, x)

    data = [torch.ones(4, 1)] * 3
    before = signal.default_int_handler
    outside = signal.signal(signal.SIGINT, before)  # ignored where the tests run in the background
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, outside))
    trainer = Trainer(torch.nn.Linear(1, 1), loss=interrupting, checkpoint_dir=tmp_path / "saved")
    with pytest.raises(StoppedError, match="SIGINT"):
        trainer.fit(data, num_epochs=1, preflight=False)
    assert load_checkpoint(tmp_path / "saved" / "latest")["step"] == 1
    with pytest.raises(KeyboardInterrupt):  # nothing is saved, so nothing is gained by waiting
        Trainer(torch.nn.Linear(1, 1), loss=interrupting).fit(data, num_epochs=1)

    def twice(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        signal.raise_signal(signal.SIGINT)
        return interrupting(model, x)

    with pytest.raises(KeyboardInterrupt):
        Trainer(torch.nn.Linear(1, 1), loss=twice, checkpoint_dir=tmp_path / "twice").fit(data, num_epochs=1)
    assert signal.getsignal(signal.SIGINT) is before


class Counted(Shuffled):
    """Validation batches that know which epoch's validation they serve."""

    def __init__(self, calls=0):
        super().__init__()
        self.calls = calls
        self.epochs = [1]


def fit_with_patience(path, values, *, patience, num_epochs=8, done=0, **settings):
    valid = Counted(done)

    def evaluate(model, batches):
        valid.calls += 1
        return {"ic": values[valid.calls - 1]}

    trainer = make(path, **settings)
    chosen = {"best_metric": "ic", "direction": "maximize", "patience": patience, "preflight": False}
    return trainer, trainer.fit(Shuffled(), valid, num_epochs=num_epochs, evaluate=evaluate, **chosen)


@pytest.mark.parametrize(
    ("values", "patience", "num_run", "best"),
    [
        ([0.1, 0.3, 0.2, 0.2, 0.9], 2, 4, 2),
        ([0.1, 0.3, 0.2, 0.4, 0.3, 0.3, 0.3], 3, 7, 4),
        ([math.nan, math.nan, 0.5], 2, 2, None),
        ([0.4, 0.4, 0.4, 0.9], 2, 3, 1),  # as good is not better
    ],
)
def test_patience_stops_after_so_many_epochs_without_a_better_metric(tmp_path, values, patience, num_run, best):
    _, result = fit_with_patience(tmp_path, values, patience=patience)
    assert (len(result.history), result.epochs_run, result.best_epoch) == (num_run, num_run, best)
    assert result.stopped_early


def test_a_fit_that_stopped_early_stays_stopped_and_a_resume_counts_the_epochs_before_it(tmp_path):
    values = [0.5, 0.4, 0.3, 0.9]
    _, first = fit_with_patience(tmp_path, values, patience=None, num_epochs=2)
    _, second = fit_with_patience(tmp_path, values, patience=2, done=1)  # the newest epoch is validated again
    _, third = fit_with_patience(tmp_path, values, patience=2, done=2)
    assert (len(first.history), len(second.history), len(third.history)) == (2, 3, 3)
    assert (second.epochs_run, third.epochs_run) == (1, 0)
    assert second.stopped_early and third.stopped_early


@pytest.mark.proves("S0-26")
def test_an_early_stop_names_the_snapshots_that_there_will_not_be(tmp_path, events):
    with pytest.warns(CheckpointWarning, match=r"no average .* epochs \[6\]: the training ended after epoch 3"):
        fit_with_patience(tmp_path, [0.5, 0.4, 0.3], patience=2, ema=Ema(0.5), milestones=(1, 2, 6))
    assert [(event["epochs"], event["num_epochs"]) for event in events("ema_missing")] == [([6], 3)]
    assert sorted(path.name for path in tmp_path.glob("ema_*.pt")) == ["ema_epoch_1.pt", "ema_epoch_2.pt"]
    assert [(event["epoch"], event["best_epoch"]) for event in events("early_stop")] == [(3, 1)]


def test_every_checkpoint_and_snapshot_says_where_it_comes_from(tmp_path):
    told = {"run": "ab", "fold": 3, "trained": [["2020-01-01", "2020-02-01"]]}
    trainer = make(tmp_path, provenance=told, ema=Ema(0.5), milestones=(1, 2))
    trainer.fit(Shuffled(), num_epochs=2)
    names = ["latest", "ema_epoch_1.pt", "ema_epoch_2.pt"]
    assert [load_checkpoint(tmp_path / name)["provenance"] for name in names] == [told] * 3
    # It is no part of what a resume compares: a run's folder may be moved.
    make(tmp_path, provenance={"run": "cd"}, ema=Ema(0.5), milestones=(1, 2)).fit(Shuffled(), num_epochs=3)


@pytest.mark.proves("S1-04")
def test_functions_of_the_users_are_called_after_each_step_and_epoch_and_can_end_the_fit(tmp_path):
    seen = []

    def fit():
        trainer = make(
            tmp_path,
            on_step=lambda outcome: seen.append(round(outcome.weight)),
            on_epoch=lambda record: seen.append(record) or record.epoch == 2,
        )
        return trainer.fit(Shuffled(), [torch.ones(2, 4)], num_epochs=5)

    result = fit()
    assert seen == [5, 5, 5, result.history[0], 5, 5, 5, result.history[1]]
    assert all(entry.metrics["valid_loss"] > 0 for entry in result.history)
    assert (result.stopped_early, len(result.history)) == (True, 2)
    seen.clear()
    again = fit()  # the last whole epoch is shown again, for a fit that was killed before
    assert (seen, again.epochs_run, again.history) == ([result.history[1]], 0, result.history)
    assert not make(tmp_path).fit(Shuffled(), [torch.ones(2, 4)], num_epochs=3).stopped_early
