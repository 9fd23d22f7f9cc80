"""A training in Lightning on several ranks stops, dies and goes on together, to the same bytes where that was asked for."""

import hashlib
import os
import signal
import socket

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer

import ranked
from memfit.errors import UsageError
from memfit.integrations.lightning import Exact, Stop
from training.loops import NUM_SAMPLES, Samples, digest, ids, masked

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*")]


class Module(LightningModule):
    def __init__(self, at):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
        self.at, self.seen, self.means, self.losses = at, [], [], []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[1]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.seen.append(ids(batch))
        self.losses.append(float(loss.detach()))
        self.batch_idx = batch_idx
        return loss

    def on_after_backward(self):
        self.at(("batch", self.current_epoch, self.batch_idx))

    def validation_step(self, batch, batch_idx):
        torch.rand(7)
        self.log("score", self.net(batch[1]).mean(), sync_dist=True)
        self.at(("evaluation", self.current_epoch, batch_idx))

    def on_train_epoch_end(self):
        self.means.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


def train(rank, folder, size, moment=None, number=signal.SIGTERM, *, victim=1, form=Exact, allow=(), **options):
    """Train as a rank that torchrun has started; return what it leaves, what it saw, and the means of its epochs."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in here.items()} | {"TORCHELASTIC_RUN_ID": "a"}

    def at(now):
        if now == moment and rank == victim:
            os.kill(os.getpid(), number)

    module = Module(at)
    settings = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    settings |= {"max_epochs": 2, "accumulate_grad_batches": 2, "logger": False, "accelerator": "cpu"}
    trainer = Trainer(**(settings | {"devices": size, "strategy": "ddp", "num_sanity_val_steps": 0} | options))
    one = form(folder, every=2, allow=allow, **({"seed": 1} if form is Exact else {}))
    batches = [DataLoader(Samples(), 2, shuffle=shuffles, collate_fn=masked) for shuffles in (True, False)]
    try:
        one.fit(trainer, module, *batches)
    except SystemExit as error:
        return error.code
    return digest(module, trainer.optimizers[0]), module.seen, module.means, module.losses


def start(size, folder, *arguments, **options):
    return ranked.run(size, folder.parent, _train, folder, size, arguments, options)


def _train(rank, folder, size, arguments, options):
    return train(rank, folder, size, *arguments, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What each of two ranks leaves when nothing stops them."""
    return ranked.values(start(2, tmp_path_factory.mktemp("whole") / "whole"))


def test_each_rank_takes_its_part_of_each_global_batch(whole):
    first, second = (seen[:5] for _, seen, _, _ in whole)
    assert sorted(sum(first + second, [])) == list(range(1, NUM_SAMPLES + 1))
    assert whole[0][0] == whole[1][0] and whole[0][2] == whole[1][2] and whole[0][3] != whole[1][3]
