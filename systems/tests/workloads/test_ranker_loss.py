"""The ranker's losses: what they are, masks, weights, pairs, and that a batch may be cut between dates."""

import numpy as np
import pytest
import torch

from memfit.training import ByGroup
from memfit_workloads.finance.lists import standardized
from memfit_workloads.ranker.batches import ListBatch
from memfit_workloads.ranker.loss import RankerLoss, listnet_loss, mse_loss, ranknet_loss

NAN = float("nan")


def every(values):
    return torch.ones_like(values, dtype=torch.bool)


def all_pairs(size):
    return (torch.arange(size)[:, None] + torch.arange(1, size)) % size


def softmax(values):
    odds = np.exp(values.numpy().astype(np.float64))
    return odds / odds.sum()


def test_listnet_is_the_cross_entropy_of_being_first():
    scores, targets = torch.tensor([0.3, -1.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, 4.0, 1.0])
    standard = (targets - 2) / 1.5**0.5
    wanted = -sum(p * np.log(q) for p, q in zip(softmax(standard), softmax(scores), strict=True))
    assert listnet_loss(scores, targets, every(targets)).item() == pytest.approx(wanted, rel=1e-5)


def test_ranknet_is_the_mean_logistic_loss_of_the_pairs_that_have_an_order():
    scores, targets = torch.tensor([0.3, -1.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, 4.0, 1.0])
    pairs = [(i, j) for i in range(4) for j in range(4) if targets[i] > targets[j]]
    assert len(pairs) == 5  # of 6: two targets are equal
    wanted = np.mean([np.log1p(np.exp(-(scores[i] - scores[j]).item())) for i, j in pairs])
    assert ranknet_loss(scores, targets, every(targets), all_pairs(4)).item() == pytest.approx(wanted, rel=1e-5)


def test_the_squared_error_is_to_the_standardised_target():
    scores, targets = torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0.03, 0.01, -0.01])
    wanted = np.mean((scores.numpy() - np.array([1, 0, -1]) * 1.5**0.5) ** 2)
    assert mse_loss(scores, targets, every(targets)).item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("loss", [listnet_loss, mse_loss, lambda s, t, k: ranknet_loss(s, t, k, all_pairs(9))])
def test_a_loss_sees_neither_the_level_nor_the_scale_of_a_days_returns(loss):
    scores, targets = torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    assert torch.allclose(loss(scores, targets, every(targets)), loss(scores, 0.01 * targets + 5, every(targets)))


@pytest.mark.parametrize("loss", [listnet_loss, mse_loss, lambda s, t, k: ranknet_loss(s, t, k, all_pairs(6))])
def test_the_gradient_is_right_and_that_of_an_unknown_target_is_zero(loss):
    scores = torch.randn(6, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(6, dtype=torch.float64)
    targets[2] = NAN
    known = targets.isfinite()
    assert torch.autograd.gradcheck(lambda s: loss(s, targets, known), (scores,))
    loss(scores, targets, known).backward()
    assert (scores.grad != 0).tolist() == known.tolist()


@pytest.mark.parametrize("loss", [listnet_loss, mse_loss])
def test_unknown_targets_count_as_if_their_assets_were_not_in_the_list(loss):
    scores, targets = torch.randn(7), torch.randn(7)
    targets[[1, 4]] = NAN
    known = targets.isfinite()
    alone = loss(scores[known], targets[known], every(targets[known]))
    assert torch.allclose(loss(scores, targets, known), alone)
    pairs = ranknet_loss(scores, targets, known, all_pairs(7))
    assert torch.allclose(pairs, ranknet_loss(scores[known], targets[known], known[known], all_pairs(5)))


def test_equal_targets_pull_all_scores_together_and_give_a_finite_gradient():
    scores = torch.tensor([1.0, 0.0, -1.0], requires_grad=True)
    targets = torch.full((3,), 0.02)
    listnet_loss(scores, targets, every(targets)).backward()
    assert scores.grad[0] > 0 > scores.grad[2]
    assert torch.isfinite(scores.grad).all()
    assert ranknet_loss(scores, targets, every(targets), all_pairs(3)).item() == 0


@pytest.mark.parametrize("num_known", [0, 1])
def test_a_list_without_an_order_costs_nothing(num_known):
    scores, targets = torch.randn(4, requires_grad=True), torch.full((4,), NAN)
    targets[:num_known] = 1.0
    known = targets.isfinite()
    losses = [listnet_loss(scores, targets, known), mse_loss(scores, targets, known)]
    losses.append(ranknet_loss(scores, targets, known, all_pairs(4)))
    sum(losses).backward()
    assert [loss.item() for loss in losses] == [0, 0, 0]
    assert scores.grad.tolist() == [0, 0, 0, 0]
    assert standardized(targets, known).tolist() == [0, 0, 0, 0]


def make_batch(sizes=(4, 3, 5), horizons=2, weights=(1.0, 0.5, 0.25), seed=0):
    rng = np.random.default_rng(seed)
    num = sum(sizes)
    return ListBatch(
        windows=rng.normal(size=(num, 2, 3)).astype(np.float32),
        targets=rng.normal(size=(num, horizons)).astype(np.float32),
        lists=np.repeat(np.arange(len(sizes)), sizes),
        sectors=np.full(num, -1),
        weights=np.repeat(np.array(weights, np.float32), sizes),
        partners=np.concatenate([rng.integers(0, size, (size, 3)) for size in sizes]),
        dates=np.zeros(num, np.int64),
        assets=np.zeros(num, np.int64),
    )


class Flat(torch.nn.Module):
    def __init__(self, horizons=2):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(6, horizons)

    def forward(self, x):
        return self.linear(x.flatten(1))


@pytest.mark.proves("C-47")
def test_a_batch_is_the_weighted_sum_of_its_lists_horizons_and_losses():
    batch, model = make_batch(), Flat()
    total, weight = RankerLoss(1.0, 0.5, 0.1)(model, batch)
    scores, targets = model(torch.from_numpy(batch.windows)), torch.from_numpy(batch.targets)
    wanted = 0.0
    for number, (rows, date_weight) in enumerate(
        zip((range(4), range(4, 7), range(7, 12)), (1, 0.5, 0.25), strict=True)
    ):
        assert set(batch.lists[list(rows)]) == {number}
        for horizon in range(2):
            s, t = scores[list(rows), horizon], targets[list(rows), horizon]
            partners = torch.from_numpy(batch.partners[list(rows)])
            losses = listnet_loss(s, t, every(t)) + 0.5 * ranknet_loss(s, t, every(t), partners)
            wanted += date_weight * (losses + 0.1 * mse_loss(s, t, every(t)))
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert weight.item() == pytest.approx((1 + 0.5 + 0.25) * 2)


def test_a_batch_that_is_cut_between_lists_has_the_same_gradient():
    batch, model = make_batch(), Flat().double()
    batch = ListBatch(**vars(batch) | {"windows": batch.windows.astype(np.float64)})
    loss = RankerLoss(1.0, 0.5, 0.1)
    split = ByGroup(lambda batch: batch.lists)
    assert split.count(batch) == 3

    def gradient(parts):
        model.zero_grad()
        sums = [loss(model, part) for part in parts]
        (sum(total for total, _ in sums) / sum(weight for _, weight in sums)).backward()
        return model.linear.weight.grad.clone()

    whole = gradient([batch])
    cut = gradient([split.take(batch, 0, 1), split.take(batch, 1, 3)])
    assert whole.abs().max() > 1e-3
    assert torch.allclose(whole, cut, rtol=1e-12, atol=1e-15)


def test_a_loss_of_16_bit_scores_is_computed_in_float32():
    batch, model = make_batch(), Flat()
    loss = RankerLoss(1.0, 0.5, 0.1)
    plain = loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = loss(model, batch)
    assert mixed[0].dtype == torch.float32 and mixed[0] != plain[0]
    assert mixed[0].item() == pytest.approx(plain[0].item(), rel=0.02) and torch.equal(mixed[1], plain[1])


def test_a_horizon_without_targets_trains_nothing():
    batch, model = make_batch(horizons=3), Flat(horizons=3)
    batch.targets[:, 2] = NAN
    total, weight = RankerLoss(1.0, 0.5, 0.1)(model, batch)
    (total / weight).backward()
    moved = model.linear.weight.grad.abs().sum(dim=1)
    assert (moved > 0).tolist() == [True, True, False]
    assert weight.item() == pytest.approx(3.5)
