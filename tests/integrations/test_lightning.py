"""A training in Lightning is watched, stops and resumes by the real package, to the same bytes where that was asked for."""

import functools
import os
import signal
from datetime import timedelta

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("lightning")

import torchmetrics
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision

from memfit.errors import UsageError
from memfit.integrations.lightning import Exact, MemfitCallback, Stop
from training.conftest import events  # noqa: F401
from training.loops import EVERY_TWO, Samples, Stream, bare, digest, ids, in_child, loader, masked, plain, said

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore:.*litmodels"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
NUM_EPOCHS = 3


class Module(LightningModule):
    def __init__(self, at, rate=1e-2, width=8):
        super().__init__()
        self.net, _ = bare(width=width)
        self.at, self.rate, self.seen, self.losses = at, rate, [], []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[1]).square().mean()
        self.log("loss", loss)
        self.seen.append(ids(batch))
        self.losses.append(repr(float(loss.detach())))
        self.batch_idx = batch_idx
        return loss

    def on_train_start(self):
        self.at(("begin", self.current_epoch))

    def on_after_backward(self):
        self.at(("batch", self.current_epoch, self.batch_idx + 1))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0], batch[1] + 0.01 * torch.rand(())  # what is drawn between two steps counts, too

    def validation_step(self, batch, batch_idx):
        torch.rand(7)  # the draws of others change nothing
        self.log("score", self.net(batch[1]).mean())
        if not self.trainer.sanity_checking:
            self.at(("evaluation", self.current_epoch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


def ignore(moment):
    pass


def make_trainer(**options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    settings = {"max_epochs": NUM_EPOCHS, "accumulate_grad_batches": 2, "logger": False, "accelerator": "cpu", **quiet}
    return Trainer(**(settings | options))


def train(  # noqa: PLR0913
    folder, at, *, mode="exact", workers=0, rate=1e-2, width=8, allow=(), persistent=False, collate=masked, data=None,
    times=EVERY_TWO, **options,
):  # fmt: skip
    """Train; return the hash of what it leaves, the samples of each batch and their losses."""
    module, batches = Module(at, rate, width), loader(collate, workers, data)
    if persistent:
        batches = DataLoader(
            batches.dataset, 4, shuffle=True, collate_fn=masked, num_workers=2, persistent_workers=True
        )
    loaders = {"train_dataloaders": batches, "val_dataloaders": loader(collate, workers)}
    if mode in ("plain", "watch"):
        trainer = make_trainer(callbacks=[MemfitCallback()] if mode == "watch" else [], **options)
        trainer.fit(module, **loaders)
    else:
        form = Stop if mode == "stop" else functools.partial(Exact, seed=1)
        trainer = make_trainer(**options)
        form(folder, allow=allow, **times).fit(trainer, module, **loaders)
    return digest(module, trainer.optimizers[0]), module.seen, module.losses


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an unbroken training leaves."""
    return in_child(train, tmp_path_factory.mktemp("whole") / "whole")[1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"persistent": True}, {"precision": "bf16-mixed"}])
def test_workers_and_bf16(tmp_path, whole, options):
    if "precision" in options:
        _, whole = in_child(train, tmp_path / "whole", **options)
    code, _ = in_child(train, tmp_path / "part", ("batch", 1, 3), **options)
    assert code == 75, said(tmp_path / "part")
    code, part = in_child(train, tmp_path / "part", **options)
    assert (code, part[0]) == (0, whole[0]), said(tmp_path / "part")


def scaled(folder, at):
    """Train with the scaler of fp16, which skips the second step."""

    class Overflowing(Module):
        def backward(self, loss):
            (loss * torch.inf if self.current_epoch == 0 and self.batch_idx == 3 else loss).backward()

    torch.manual_seed(0)
    module, scaler = Overflowing(at), torch.amp.GradScaler("cpu", 4.0, growth_interval=3)
    trainer = make_trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    Exact(folder, seed=1, every=2).fit(trainer, module, loader(), loader())
    return digest(module, trainer.optimizers[0]), scaler.get_scale()


@pytest.mark.slow
@pytest.mark.parametrize("moment", [("batch", 0, 4), ("batch", 0, 5)], ids=["skipped", "next"])
def test_a_stop_at_a_step_that_the_scaler_skips_is_exact(tmp_path, moment):
    _, unbroken = in_child(scaled, tmp_path / "whole")
    assert unbroken[1] == 8.0, "halved once, and doubled since"
    assert in_child(scaled, tmp_path / "part", moment)[0] == 75, said(tmp_path / "part")
    assert in_child(scaled, tmp_path / "part") == (0, unbroken), said(tmp_path / "part")


def test_a_stop_in_the_last_step_is_no_stop(tmp_path):
    assert in_child(train, tmp_path / "part", ("evaluation", 2))[0] == 0


class Whole(Module):
    """It has loaders, and a schedule and a callback that follow what metrics have gathered in an epoch."""

    def __init__(self, at):
        super().__init__(at)
        errors = {name: torchmetrics.MeanAbsoluteError() for name in "ab"}
        self.mean, self.pair = torchmetrics.MeanMetric(), torchmetrics.MetricCollection(errors)
        self.figures = []

    def on_train_epoch_end(self):
        self.figures.append([float(self.trainer.callback_metrics[name]) for name in ("mean", "a", "b")])

    def train_dataloader(self):
        batches = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(Samples()), 4, drop_last=False)
        return DataLoader(Samples(), batch_sampler=_Own(batches), collate_fn=masked)

    def val_dataloader(self):
        return loader(masked)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.pair.update(loss.detach()[None], torch.zeros(1))
        self.log_dict(self.pair, on_step=False, on_epoch=True)
        self.log("again", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        (optimizer,), _ = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "mean"}}


class _Own(torch.utils.data.Sampler):
    """A batch sampler of a class of its own."""

    def __init__(self, batches):
        self.batches, self.__len__ = batches, batches.__len__

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class Data(LightningDataModule):
    train_dataloader, val_dataloader = Whole.train_dataloader, Whole.val_dataloader


def train_whole(folder, at, *, data=None):
    module, callbacks = Whole(at), [EarlyStopping("b", patience=2)]
    trainer = make_trainer(max_epochs=6, max_steps=18, check_val_every_n_epoch=2, callbacks=callbacks)
    Exact(folder, seed=1, every=2).fit(trainer, module, data)
    return digest(module, trainer.optimizers[0]), module.seen, module.figures, trainer.current_epoch


@pytest.fixture(scope="module")
def whole_alone(tmp_path_factory):
    return in_child(train_whole, tmp_path_factory.mktemp("whole") / "alone")[1]


@pytest.mark.slow
@pytest.mark.parametrize("moment", [("batch", 0, 3), ("batch", 2, 4), ("evaluation", 1)], ids=str)
def test_loaders_of_a_module_and_metrics_of_an_epoch(tmp_path, whole_alone, moment):
    whole, folder = whole_alone, tmp_path / "part"
    assert whole[1][:5] != whole[1][5:10]
    assert all(mean == pytest.approx(a) and a == b for mean, a, b in whole[2]), "the trial is in none"
    data = Data() if moment[1] == 2 else None
    assert in_child(train_whole, folder, moment)[0] == 75, said(folder)
    code, part = in_child(train_whole, folder, data=data)
    assert (code, part[0], part[3]) == (0, whole[0], whole[3]), said(folder)
    assert (part[1], part[2]) == (whole[1][-len(part[1]) :], whole[2][-len(part[2]) :])
    assert ("means of self.log begin anew" in said(folder)) == (moment[0] == "batch")
    again = in_child(train_whole, folder)[1]
    assert (again[0], again[1]) == (whole[0], [])  # also where it ended early, it has ended


class ByHand(Module):
    """It makes its steps: one optimizer's after each batch, the other's after each second one of the whole training."""

    def __init__(self, at):
        super().__init__(at)
        self.automatic_optimization, self.head = False, torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        self.seen.append(ids(batch))
        self.batch_idx = batch_idx
        each, second = self.optimizers()
        self.manual_backward((self.net(batch[1]) - self.head(batch[1])).square().mean())
        each.step()
        each.zero_grad()
        if (self.current_epoch * 5 + batch_idx) % 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.net, self.head)]


def train_by_hand(folder, at):
    module, trainer = ByHand(at), make_trainer(accumulate_grad_batches=1)
    Exact(folder, seed=1, every=3).fit(trainer, module, loader(masked), loader(masked))
    states = [one.state_dict() for one in trainer.optimizers]
    return digest(module, trainer.optimizers[0]), repr(states), module.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [(("batch", 0, 3), signal.SIGTERM), (("batch", 1, 2), signal.SIGKILL), (("batch", 1, 5), signal.SIGTERM)],
)
def test_a_module_that_makes_its_steps_is_exact(tmp_path, moment, number):
    whole = in_child(train_by_hand, tmp_path / "whole")[1]
    code, _ = in_child(train_by_hand, tmp_path / "part", moment, number)
    assert code == (75 if number == signal.SIGTERM else -9), said(tmp_path / "part")
    code, part = in_child(train_by_hand, tmp_path / "part")
    assert (code, part[:2]) == (0, whole[:2]), said(tmp_path / "part")
    assert part[2] == whole[2][-len(part[2]) :]
    assert "the module makes its steps itself" in said(tmp_path / "whole")


def test_an_optimizer_that_never_steps_is_refused_after_an_epoch(tmp_path):
    class Idle(ByHand):
        def optimizers(self):
            each, _ = super().optimizers()
            return each, torch.optim.SGD(self.head.parameters())

    with pytest.raises(UsageError, match="an optimizer that made no step"):
        Stop(tmp_path, every=1).fit(make_trainer(accumulate_grad_batches=1), Idle(ignore), loader(masked))


class Unscheduled(Module):
    """Its schedule is moved by hand."""

    def configure_optimizers(self):
        (optimizer,), (one,) = super().configure_optimizers()
        self.schedule = one["scheduler"]
        return optimizer


class Beside(Module):
    """Trains weights that are not its own."""

    def configure_optimizers(self):
        return torch.optim.AdamW([*self.parameters(), torch.nn.Parameter(torch.ones(3))])


class Idle(Module):
    def configure_optimizers(self):
        return None


@pytest.mark.parametrize(
    ("module", "data", "options", "named"),
    [
        (lambda: Module(ignore), Stream(), {}, "stream"),
        (lambda: Module(ignore), None, {"reload_dataloaders_every_n_epochs": 1}, "reload"),
        (lambda: Module(ignore), None, {"overfit_batches": 1}, "overfit"),
        (
            lambda: Module(ignore),
            None,
            {"callbacks": [StochasticWeightAveraging(0.1)]},
            r"same bytes with callbacks\.Stoch",
        ),
        (lambda: Module(ignore), None, {"callbacks": [LearningRateFinder()]}, r"callbacks\.LearningRateFinder"),
        (lambda: Module(ignore), None, {"callbacks": [BackboneFinetuning()]}, r"callbacks\.BackboneFinetuning"),
        (lambda: Module(ignore), None, {"val_check_interval": timedelta(hours=1)}, "val_check_interval in time"),
        (lambda: Unscheduled(ignore), None, {}, "unsaved_schedule"),
        (lambda: Beside(ignore), None, {}, "unsaved_weights"),
        (lambda: Idle(ignore), None, {}, "No optimizer"),
        (lambda: Whole(ignore), None, {"callbacks": [EarlyStopping("again_epoch")]}, "follows 'again_epoch'"),
    ],
)
def test_what_cannot_be_exact_is_refused_before_the_first_step(tmp_path, module, data, options, named):
    one, batches = module(), loader(plain, data=data)
    before = {name: value.clone() for name, value in one.state_dict().items()}
    with pytest.raises(UsageError, match=named):
        Exact(tmp_path, seed=1, every=2).fit(make_trainer(**options), one, batches)
    assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())
    assert not list(tmp_path.glob("step-*"))


class ByEpoch(Module):
    """Does in each epoch what its number says, and its steps work within an epoch alone."""

    def on_train_epoch_start(self):
        self.factor, self.noted = 0.5**self.current_epoch, []

    def training_step(self, batch, batch_idx):
        self.noted.append(batch_idx)
        return super().training_step(batch, batch_idx) * self.factor


class Halving(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.halves = 0.5**trainer.current_epoch


def train_by_epoch(folder, at, kind=ByEpoch, **options):
    """Train a module of some kind; return the hash of what it leaves, and where it was validated."""
    module, places = kind(at), []

    class Places(Callback):
        def on_validation_start(self, trainer, pl_module):
            if not trainer.sanity_checking:
                places.append(trainer.fit_loop.total_batch_idx)

    trainer = make_trainer(callbacks=[Places(), Halving()], **options)
    Exact(folder, seed=1, every=1).fit(trainer, module, loader(), loader())
    return digest(module, trainer.optimizers[0]), places


@pytest.mark.slow
@pytest.mark.parametrize("moment", [("batch", 1, 3), ("batch", 0, 5)], ids=["midway", "at its first batch"])
def test_the_users_start_of_an_epoch_is_called_again_where_lightning_leaves_it_out(tmp_path, moment):
    whole = in_child(train_by_epoch, tmp_path / "whole")[1]
    assert "no verdict whether the largest batch fits: AttributeError" in said(tmp_path / "whole")
    assert in_child(train_by_epoch, tmp_path / "part", moment)[0] == 75, said(tmp_path / "part")
    code, part = in_child(train_by_epoch, tmp_path / "part")
    assert (code, part[0]) == (0, whole[0]), said(tmp_path / "part")
    assert "is called again for the rest of the epoch, of Halving, ByEpoch" in said(tmp_path / "part")


def test_a_training_that_something_has_moved_back_is_refused_at_its_resume(tmp_path):
    class Back(Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.reset()

    in_child(train, tmp_path / "part", ("batch", 1, 3))
    with pytest.raises(UsageError, match="a callback that moved it from step 5 to 0"):
        train(tmp_path / "part", ignore, callbacks=[Back()])


def test_a_fast_run_of_a_step_leaves_nothing(tmp_path):
    train(tmp_path, ignore, fast_dev_run=True)
    assert not list(tmp_path.glob("step-*"))


def test_a_fit_leaves_no_hook_behind_for_the_next_one_of_its_process(tmp_path):
    module = Module(ignore)
    optimizer = torch.optim.AdamW(module.parameters())
    module.configure_optimizers = lambda: optimizer  # the same in both fits
    seen = []
    module.at = lambda _: seen.append(len(optimizer._optimizer_step_post_hooks))
    for number in (1, 2):
        trainer = make_trainer(max_epochs=1)
        Exact(tmp_path / str(number), seed=1, every=2).fit(trainer, module, loader())
        assert not optimizer._optimizer_step_post_hooks
    assert set(seen) == {1}


def test_it_must_be_asked_to_fit(tmp_path):
    with pytest.raises(UsageError, match="not asked to fit"):
        make_trainer(callbacks=[Stop(tmp_path, every=2)]).fit(Module(ignore), loader(plain))


def test_a_stop_closes_a_logger_as_finished(tmp_path):
    states = []

    class Kept(CSVLogger):
        def finalize(self, status):
            states.append(status)
            super().finalize(status)

    class Ask(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(logger=Kept(tmp_path), callbacks=[Ask()])
    with pytest.raises(SystemExit) as stopped:
        Exact(tmp_path / "out", seed=1, every=2).fit(trainer, Module(ignore), loader(plain), loader(plain))
    assert (stopped.value.code, states) == (75, ["finished"])
