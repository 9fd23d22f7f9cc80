"""A training in Lightning on several ranks stops, dies and goes on together, to the same bytes where that was asked for."""

import itertools
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("lightning")

import torchmetrics
from lightning.pytorch import LightningModule, Trainer

import ranked
from jobs.contract import submit, wait_for_end
from memfit.errors import UsageError
from memfit.files import read_json
from memfit.integrations.lightning import Exact
from memfit.jobs import Job, LocalBackend, Parent, start_env
from memfit.rundir import RunDir, read_events
from training.loops import NUM_SAMPLES, Samples, digest, ids, masked

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*")]


class Module(LightningModule):
    def __init__(self, at):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
        self.at, self.seen, self.means, self.losses = at, [], [], []
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[1]).square().mean()
        self.mean(loss.detach())
        self.log("loss", self.mean, on_step=False, on_epoch=True)
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


def train(rank, folder, size, moment=None, number=signal.SIGTERM, *, form=Exact, allow=(), **options):
    """Train as a rank that torchrun has started; return what it leaves, what it saw, and the means of its epochs."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "a"}
    os.environ |= {name: str(value) for name, value in here.items() if name not in os.environ}

    def at(now):
        if now == moment and rank == 1:
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
    assert sorted(itertools.chain(*first, *second)) == list(range(1, NUM_SAMPLES + 1))
    assert whole[0][0] == whole[1][0] and whole[0][2] == whole[1][2] and whole[0][3] != whole[1][3]


def test_a_signal_to_one_rank_in_an_evaluation_stops_all_and_they_go_on_to_the_same_bytes(tmp_path, whole):
    assert ranked.values(start(2, tmp_path / "part", ("evaluation", 0, 1))) == [75, 75]
    assert len(list((tmp_path / "part").glob("step-*/SEAL.json"))) > 0
    assert_whole(ranked.values(start(2, tmp_path / "part")), whole)


def assert_whole(ends, whole):
    """They left the same bytes, and trained the same samples to the same losses and means on each rank."""
    for (digest_now, *part), (digest_then, *other) in zip(ends, whole, strict=True):
        assert digest_now == digest_then
        assert part == [then[len(then) - len(now) :] for now, then in zip(part, other, strict=True)]


def test_a_killed_rank_of_four_ends_all_and_they_go_on_to_the_same_bytes(tmp_path):
    whole = ranked.values(start(4, tmp_path / "whole"))
    codes = [end.code for end in start(4, tmp_path / "part", ("batch", 1, 1), signal.SIGKILL)]
    assert (codes[1], {*codes[:1], *codes[2:]}) == (-9, {79})
    assert_whole(ranked.values(start(4, tmp_path / "part")), whole)


def job(folder):
    """Train as a rank of memfit's agent; rank 1 of the first group is killed."""
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    found = train(int(os.environ["RANK"]), folder, 2, ("batch", 1, 1) if is_first else None, signal.SIGKILL)
    return {"weights": found[0], "num_batches": len(found[1])}


def test_memfit_begins_again_from_the_last_seal(tmp_path, whole):
    run, own = RunDir.create(tmp_path, "ranks", "0" * 64), {"PYTHONPATH": str(Path(__file__).parents[1])}
    parent = Parent.start(f"{__name__}:job", {**os.environ, **start_env(tight_malloc=True, cuda_allocator=None), **own})
    try:
        backend = LocalBackend(run, grace_seconds=20, parent=parent)
        arguments = {"folder": str(tmp_path / "part")}
        submit(backend, Job("j", target=f"{__name__}:job", arguments=arguments, ranks=2, env=own))
        assert wait_for_end(backend, "j").state == "completed"
    finally:
        parent.close()
    result = read_json(run.job_dir("j") / "result.json")["result"]
    assert result == {"weights": whole[0][0], "num_batches": 6}
    lost = [one for one in read_events(run.events_dir) if one["kind"] == "rank_lost"]
    assert [(one["rank"], one["code"], one["place"]) for one in lost] == [(1, -9, "microbatch")]


def test_another_number_of_ranks_is_refused_or_allowed_by_name(tmp_path):
    assert ranked.values(start(2, tmp_path / "part", ("batch", 1, 2))) == [75, 75]
    ends = start(1, tmp_path / "part", strategy="auto")
    assert "world_size: 2 then, 1 now" in ends[0].error
    (alone,) = ranked.values(start(1, tmp_path / "part", strategy="auto", allow=("world_size",)))
    assert len(alone[1]) == 2


def test_what_cannot_be_stopped_on_ranks_is_refused_by_name(tmp_path, monkeypatch):
    def refused(**options):
        module = Module(lambda moment: None)
        module.automatic_optimization = options.pop("automatic", True)
        trainer = Trainer(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, **options)
        with pytest.raises(UsageError) as caught:
            Exact(tmp_path, seed=1, every=2).fit(trainer, module, DataLoader(Samples()))
        return str(caught.value)

    assert "memfit run --nproc 2 -- python train.py" in refused(strategy="ddp")
    assert "memfit run --nproc 2" in refused(strategy="ddp_fork")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "with sync_batchnorm" in refused(strategy="ddp", sync_batchnorm=True)
    assert "automatic_optimization=False on several ranks" in refused(strategy="ddp", automatic=False)
