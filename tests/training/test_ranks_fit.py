"""A Trainer of several ranks: one order of data, one checkpoint, one word for the user."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

import ranked
from memfit.errors import MemfitError, UsageError
from memfit.training import (
    BySample,
    DealtOrder,
    Ema,
    KeyedDataset,
    KeyedSampler,
    Trainer,
    checkpoint_path,
    feed_of,
    load_checkpoint,
)

X = torch.randn(44, 6, generator=torch.Generator().manual_seed(5)).double()
VALID = [X[:8], X[8:20], X[20:24]]


class Noisy:
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + 0.01 * torch.rand(()).double()


def keyed(drop_last=False):
    data = KeyedDataset(Noisy(), seed=1)
    return DataLoader(data, 8, sampler=KeyedSampler(data, seed=1), drop_last=drop_last)


DATA = {"keyed": keyed, "list": lambda: list(X.split(8)), "plain": lambda: DataLoader(Noisy(), 8, shuffle=True)}


@pytest.mark.parametrize(("num", "size", "batch"), [(1, 2, 4), (2, 2, 8), (2, 3, 6), (1, 16, 1)])
def test_a_rank_says_of_keyed_data_how_much_of_a_batch_it_loads(num, size, batch):
    together = DataLoader(Subset(Noisy(), range(44)), 8)  # its items draw by the key of their batch
    collated = DataLoader(Noisy(), 8, collate_fn=torch.stack)
    feeds = [feed_of(one, 1) for one in (keyed(), DATA["plain"](), DATA["list"](), together, collated)]
    assert {one.own_batch for one in feeds} == {None}
    for one in feeds:
        one.deal(num, BySample(), SimpleNamespace(rank=0, size=size))
    assert [one.own_batch for one in feeds] == [batch, batch, None, None, None]


class Fitted:
    """A fit on one rank; what is handed over is told on rank 0 alone."""

    def __init__(self, size, folder, *, dropout=0.0, at=lambda model, batch: None, **settings):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(6, 20), torch.nn.Dropout(dropout), torch.nn.ReLU(), torch.nn.Linear(20, 1)]
        self.model = torch.nn.Sequential(*layers).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.told, self.ema = [], Ema(0.9)

        def loss(model, batch):
            at(model, batch)
            return (model(batch) - batch.sum(1, keepdim=True)).square().sum(), len(batch)

        model = DistributedDataParallel(self.model) if size > 1 else self.model
        settings = {"seed": 3, "global_batch_size": 16, "max_grad_norm": 1.0, **settings}
        tells = {"on_step": lambda outcome: self.told.append("step"), "on_epoch": self.told.append}
        self.trainer = Trainer(
            model, loss=loss, optimizer=self.optimizer, checkpoint_dir=folder, ema=self.ema, **tells, **settings
        )

    def fit(self, data="keyed", num_epochs=2, **plan):
        """Return the history and a digest of all that was trained, or the error in words."""
        try:
            result = self.trainer.fit(DATA[data](), VALID, num_epochs=num_epochs, **plan)
        except MemfitError as error:
            return type(error).__name__, str(error)
        states = [part.state_dict() for part in (self.model, self.optimizer, self.ema)]
        return result.history, ranked.digest(*states)

    @property
    def weights(self):
        return torch.cat([one.detach().flatten() for one in self.model.parameters()]).tolist()


class Kill:
    """Ends a rank, or asks it to stop, in its n-th pass of training."""

    def __init__(self, number, left):
        self.number, self.left = number, left

    def __call__(self, model, batch):
        self.left -= model.training
        if self.left == 0 and model.training:
            self.left = -1
            os.kill(os.getpid(), self.number)


def whole(rank, size, folder, data, dropout, victim=None, number=0, left=0):  # noqa: PLR0913
    settings = {"at": Kill(number, left)} if rank == victim else {}
    made = Fitted(size, folder / "run", dropout=dropout, **settings)
    return made.fit(data), made.weights, len(made.told)


def fits(size, folder, *arguments):
    folder.mkdir(exist_ok=True)
    return ranked.values(ranked.run(size, folder, whole, size, folder, *arguments))


@pytest.mark.slow
@pytest.mark.parametrize(("data", "dropout"), [("keyed", 0.2), ("list", 0.2), ("plain", 0.0)])
def test_a_fit_of_ranks_stopped_by_a_signal_to_one_resumes_to_the_same_bytes(tmp_path, data, dropout, capfd):
    expected = fits(2, tmp_path / "plain", data, dropout)
    assert expected[0][0] == expected[1][0]
    assert [told > 0 for _, _, told in expected] == [True, False]  # rank 0 alone calls the user's functions
    stopped = fits(2, tmp_path / "stopped", data, dropout, 1, signal.SIGTERM, 7)
    assert [found[0][0] for found in stopped] == ["StoppedError"] * 2
    assert capfd.readouterr().err.count("epoch 1/2") == 2  # once for each of the two fits
    again = fits(2, tmp_path / "stopped", data, dropout)
    assert [found[:2] for found in again] == [found[:2] for found in expected]


@pytest.mark.core
def test_a_killed_rank_ends_all_with_79_and_the_next_group_ends_with_the_same_bytes(tmp_path):
    expected = fits(3, tmp_path / "plain", "keyed", 0.2)
    (tmp_path / "killed").mkdir()
    arguments = (3, tmp_path / "killed", "keyed", 0.2, 2, signal.SIGKILL, 6)
    ends = ranked.run(3, tmp_path, whole, *arguments)
    assert [end.code for end in ends] == [79, 79, -9]
    assert fits(3, tmp_path / "killed", "keyed", 0.2)[0][:2] == expected[0][:2]


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_same_global_batches_and_says_how_exact_it_is(tmp_path, capfd):
    expected = fits(2, tmp_path / "plain", "keyed", 0.0)
    fits(2, tmp_path / "other", "keyed", 0.0, 0, signal.SIGTERM, 5)
    fits(3, tmp_path / "other", "keyed", 0.0, 1, signal.SIGTERM, 5)
    alone = Fitted(1, tmp_path / "other" / "run")
    history, _ = alone.fit()
    assert alone.weights == pytest.approx(expected[0][1], abs=1e-12)
    assert [one.num_steps for one in history] == [3, 3]
    assert history[-1].metrics["valid_loss"] == pytest.approx(expected[0][0][0][-1].metrics["valid_loss"], abs=1e-12)
    told = capfd.readouterr().err
    assert "goes on with 3 ranks in place of 2, the same global batches; gradient-exact" in told
    assert "goes on with 1 rank in place of 3, the same global batches; gradient-exact" in told
    fits(2, tmp_path / "drawn", "keyed", 0.2, 0, signal.SIGTERM, 5)
    Fitted(1, tmp_path / "drawn" / "run", dropout=0.2).fit()
    assert "equal in distribution: the model draws random numbers" in capfd.readouterr().err


def evaluated(rank, folder):
    def evaluate(model, valid):
        return {"score": float(len(valid) + rank)}  # of rank 0 alone

    made = Fitted(2, folder / "run")
    (history, _) = made.fit(num_epochs=1, evaluate=evaluate, best_metric="score")
    return history[0].metrics, sorted(path.name for path in (folder / "run").iterdir()), len(made.told)


@pytest.mark.slow
def test_an_evaluation_of_ones_own_is_made_by_rank_0_and_told_to_all(tmp_path):
    first, second = ranked.values(ranked.run(2, tmp_path, evaluated, tmp_path))
    assert first[0] == second[0] == {"score": 3.0}
    newest = checkpoint_path(tmp_path / "run" / "latest")
    draws = [load_checkpoint(newest / name)["now"]["torch"] for name in ("draws.pt", "draws-1.pt")]
    assert not torch.equal(*draws)


def broken(rank, folder, where):
    def at(model, batch):
        if where == "validation" and rank == 1 and not model.training:
            raise ValueError("a bug")

    made = Fitted(2, folder / "run", at=at)
    if where == "save" and rank == 0:
        (folder / "file").touch()
        made.trainer._setup.keeper.folder_of = lambda step: folder / "file" / "x"
    try:
        return made.fit(num_epochs=1, preflight=False)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "rank", "kind", "text"),
    [("validation", 1, "ValueError", "a bug"), ("save", 0, "JobFailedError", "Not a directory")],
)
def test_an_error_of_one_rank_outside_of_a_step_ends_all_with_its_name(tmp_path, where, rank, kind, text):
    found = ranked.values(ranked.run(2, tmp_path, broken, tmp_path, where))
    assert found[rank][0] == kind and text in found[rank][1]
    assert found[1 - rank][0] == "PeerFailedError" and f"Rank {rank} failed: " in found[1 - rank][1]


def half_made(rank, folder):
    def fit(path, *calls):
        made = Fitted(2, path, dropout=0.2)
        real, num = made.optimizer.step, 0

        def step(*args):
            nonlocal num
            num += 1
            if num in calls:
                made.model[0].weight.data.mul_(0.5)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return real(*args)

        made.optimizer.step = step
        return made.fit()

    # once on all ranks, then on one after the other
    same = fit(folder / "plain") == fit(folder / "half", 4, 5 + rank)
    return same, fit(None, 2 + 98 * rank)[0]


@pytest.mark.slow
def test_an_update_left_half_way_on_one_rank_or_all_goes_back_on_all_average_included(tmp_path):
    assert ranked.values(ranked.run(2, tmp_path, half_made, tmp_path)) == [(True, "HalfUpdatedError")] * 2


# --- how data are dealt


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_the_parts_of_all_ranks_are_the_global_batches_in_order(size, drop_last):
    loader = keyed(drop_last)
    whole = list(loader.sampler)
    orders = [DealtOrder(loader, 2, rank, size) for rank in range(size)]
    dealt = [iter(list(order)) for order in orders]
    found = []
    for number in range(0, len(loader), 2):
        for order, batches in zip(orders, dealt, strict=True):
            for start, stop in order.pieces_at(number):
                found += (batch := next(batches))
                assert len(batch) == stop - start <= 8
    assert found == (whole[:40] if drop_last else whole)
    assert all(next(batches, None) is None for batches in dealt)


def test_a_sampler_that_deals_to_ranks_itself_is_refused():
    loader = DataLoader(X, 8, sampler=DistributedSampler(X, 2, 0))
    with pytest.raises(UsageError, match="The training loader has a DistributedSampler"):
        feed_of(loader, 1).deal(1, BySample(), SimpleNamespace(rank=0, size=2))
