"""Ranks whose passes hold collectives: sharded models, and DDP with its own reduction."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict  # for seconds: once here, and not on each rank
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ranked
from memfit.errors import MemfitError
from memfit.training import Ema, SafeStep, Trainer, checkpoint_path

pytestmark = pytest.mark.slow

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(5)).double()


def build(dropout=0.0):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 21), torch.nn.Dropout(dropout), torch.nn.ReLU(), torch.nn.Linear(21, 1)]
    return torch.nn.Sequential(*layers).double()


def shard(model):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    return model


WRAPPERS = {"sharded": shard, "ddp": DistributedDataParallel}


class Most:
    """A loss that does not fit more than so many samples, and kills or stops its rank in a pass."""

    def __init__(self, most=None, number=0, left=0):
        self.most, self.number, self.left, self.sizes = most, number, left, []

    def __call__(self, model, x):
        if model.training:
            self.left -= 1
            self.sizes.append(len(x))
            if self.left == 0:
                os.kill(os.getpid(), self.number)
            if self.most is not None and len(x) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return (model(x) - x.sum(1, keepdim=True)).square().sum(), x[:, 0].abs().sum() + len(x)


def weights(model):
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()]
    return torch.cat([one.detach().flatten() for one in whole]).tolist()


def best_is_first(rank, folder, num_epochs):
    """Fit a sharded model whose first epoch is the best; return the name of its best checkpoint."""
    model, losses = shard(build()), iter([0.0] if num_epochs == 4 else [])
    trainer = Trainer(model, loss=Most(), optimizer=torch.optim.AdamW(model.parameters()), checkpoint_dir=folder)
    evaluate = {"evaluate": lambda *_: {"valid_loss": next(losses, 1.0)}}
    trainer.fit(list(X.split(15)), [X[:8]], num_epochs=num_epochs, **evaluate)
    return checkpoint_path(folder / "best").name


def test_the_best_checkpoint_outlives_a_resume_between_two_epochs(tmp_path):
    for num_epochs in (4, 5):
        found = ranked.values(ranked.run(2, tmp_path, best_is_first, tmp_path / "run", num_epochs))
        assert found == ["step-4", "step-4"]


def fitted(rank, kind, folder, dropout=0.0, losses=(), **settings):
    """Fit two epochs; return the weights, or the error in words, and the sizes of microbatches."""
    loss = dict(losses).get(rank) or Most()
    model = WRAPPERS[kind](build(dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recovery = {"recovery": "restart"} if kind == "ddp" else {}
    trainer = Trainer(
        model, loss=loss, optimizer=optimizer, checkpoint_dir=folder, max_grad_norm=1.0, **recovery, **settings
    )
    try:
        result = trainer.fit(list(X.split(15)), [X[:8], X[8:12], X[12:15]], num_epochs=2)
    except MemfitError as error:
        return type(error).__name__, str(error)
    metrics = [one.metrics["valid_loss"] for one in result.history]
    return weights(trainer.model), metrics, loss.sizes


def fits(size, folder, kind, *arguments, **settings):
    folder.mkdir(exist_ok=True)

    def call(rank):
        return fitted(rank, kind, folder / "run", *arguments, **settings)

    return ranked.run(size, folder, call)


def alone(folder):
    """The same fit in one process."""
    model = build()
    trainer = Trainer(model, loss=Most(), optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), max_grad_norm=1.0)
    trainer.fit(list(X.split(15)), num_epochs=2)
    return weights(model)


@pytest.mark.core
@pytest.mark.parametrize("kind", ["sharded", "ddp"])
def test_ranks_that_pass_together_train_as_one_process_and_resume_to_the_same_bytes(tmp_path, kind):
    expected = ranked.values(fits(2, tmp_path / "plain", kind, 0.2))
    assert expected[0][:2] == expected[1][:2]
    stopped = ranked.values(fits(2, tmp_path / "stopped", kind, 0.2, {1: Most(None, signal.SIGTERM, 6)}))
    assert [found[0] for found in stopped] == ["StoppedError"] * 2
    again = ranked.values(fits(2, tmp_path / "stopped", kind, 0.2))
    assert [found[:2] for found in again] == [found[:2] for found in expected]
    calm = ranked.values(fits(2, tmp_path / "calm", kind))
    assert calm[0][0] == pytest.approx(alone(tmp_path), abs=1e-12)


@pytest.mark.parametrize(("size", "now"), [(1, "1 rank"), (3, "3 ranks")])
def test_another_number_of_ranks_loads_the_shards_and_goes_on_gradient_exact(tmp_path, size, now, capfd):
    expected = ranked.values(fits(2, tmp_path / "plain", "sharded"))[0]
    fits(2, tmp_path / "other", "sharded", 0.0, {0: Most(None, signal.SIGTERM, 6)})
    found = ranked.values(fits(size, tmp_path / "other", "sharded"))
    assert found[0][0] == pytest.approx(expected[0], abs=1e-12)
    assert f"goes on with {now} in place of 2, the same global batches; gradient-exact" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["sharded", "ddp"])
def test_after_an_out_of_memory_all_leave_with_79_and_the_next_group_is_smaller(tmp_path, kind):
    expected = ranked.values(fits(2, tmp_path / "plain", kind))
    codes = []
    for _ in range(3):
        ends = fits(2, tmp_path / "short", kind, 0.0, {1: Most(3)})
        codes.append([end.code for end in ends])
    assert codes == [[79, 79], [79, 79], [0, 0]]  # 8, 4, then 2 at once
    found = [end.value for end in ends]
    assert max(found[0][2]) == max(found[1][2]) == 2
    assert found[0][0] == found[1][0] == pytest.approx(expected[0][0], abs=1e-12)
    assert not (tmp_path / "short" / "run" / "smaller_size.json").exists()


def test_a_single_sample_that_never_fits_ends_with_its_name_after_one_more_start(tmp_path):
    ends = fits(2, tmp_path / "short", "ddp", 0.0, {1: Most(0)}, microbatch_size=1)
    assert [end.code for end in ends] == [79, 79]
    ends = fits(2, tmp_path / "short", "ddp", 0.0, {1: Most(0)}, microbatch_size=1)
    assert [end.code for end in ends] == [79, 0]
    assert ends[1].value[0] == "SampleTooLargeError"


def test_a_killed_rank_ends_all_with_79_and_damaged_shards_are_passed_over_by_name(tmp_path, capfd):
    expected = ranked.values(fits(2, tmp_path / "plain", "sharded", 0.2))[0]
    ends = fits(2, tmp_path / "killed", "sharded", 0.2, {1: Most(None, signal.SIGKILL, 6)}, checkpoint_seconds=0)
    assert [end.code for end in ends] == [79, -9]
    newest = max((tmp_path / "killed" / "run").glob("step-*"), key=lambda path: int(path.name[5:]))
    file = next(newest.glob("__1_*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert ranked.values(fits(2, tmp_path / "killed", "sharded", 0.2))[0][:2] == expected[:2]
    # warnings are silent on these ranks; the checkpoint before it was taken
    assert f"run/step-{int(newest.name[5:]) - 1})" in capfd.readouterr().err


def refusals(rank):
    told = []

    def tell(action, *args, **settings):
        try:
            action(*args, **settings)
        except MemfitError as error:
            told.append(error.what.partition(" (")[0])

    model = shard(build())
    optimizer = torch.optim.AdamW(model.parameters())
    tell(Trainer, model, loss=Most(), optimizer=optimizer, ema=Ema(0.9))
    tell(SafeStep, model, optimizer, Most(), scaler=torch.amp.GradScaler("cpu"))
    step = SafeStep(model, optimizer, Most(), microbatch_size=1)
    tell(step, X[: 3 - 2 * rank])
    return [one.partition(" <")[0] for one in told], step(X[:2]).num_microbatches


def test_what_sharded_models_cannot_do_is_refused_and_the_group_goes_on(tmp_path):
    for told, num in ranked.values(ranked.run(2, tmp_path, refusals)):
        assert told == ["ema is", "scaler is", "A rank has 1 sample in this step, and the passes of another are 3."]
        assert num == 2
