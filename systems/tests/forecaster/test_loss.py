"""The forecaster's loss: its parts, its masks and weights, and a rank correlation with a gradient."""

import numpy as np
import pytest
import torch
from forecaster_days import DayBatch, make_days
from scipy.stats import spearmanr

from memfit_workloads.forecaster.loss import ForecastLoss, soft_spearman

NAN = float("nan")


class Given(torch.nn.Module):
    """A model that gives these scores, whatever the batch."""

    def __init__(self, scores):
        super().__init__()
        self.scores = torch.nn.Parameter(scores.clone())

    def forward(self, batch):
        return self.scores


def loss_and_gradient(loss, scores, batch):
    model = Given(scores)
    total, weight = loss(model, batch)
    total.backward()
    return total.detach(), weight, model.scores.grad


def hard_spearman(scores, targets):
    known = ~targets.isnan()
    return spearmanr(scores[known].numpy(), targets[known].numpy()).statistic


@pytest.mark.parametrize("chunk_elements", [pytest.param(1, marks=pytest.mark.slow), 3000, 1 << 20])
def test_a_cold_soft_spearman_is_the_rank_correlation_with_ties_and_unknown_targets(chunk_elements):
    draw = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 2, 40, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, 9, (3, 2, 40), generator=draw).double()  # many ties
    targets[torch.rand(targets.shape, generator=draw) < 0.2] = NAN
    found = soft_spearman(scores, targets, 1e-6, chunk_elements=chunk_elements)
    wanted = [[hard_spearman(scores[i, j], targets[i, j]) for j in range(2)] for i in range(3)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.proves("S2-17")
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_the_gradient_of_soft_spearman_is_that_of_finite_differences(temperature):
    draw = torch.Generator().manual_seed(2)
    scores = torch.randn(2, 7, generator=draw, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(2, 7, generator=draw, dtype=torch.float64)
    targets[0, 3] = NAN
    # The pairs in one piece, and row by row.
    for chunk_elements in (1 << 20, 1):
        assert torch.autograd.gradcheck(
            lambda s, chunk=chunk_elements: soft_spearman(s, targets, temperature, chunk_elements=chunk), (scores,)
        )


@pytest.mark.proves("C-50")
def test_following_the_gradient_raises_the_hard_rank_correlation_and_an_argsort_has_no_gradient():
    draw = torch.Generator().manual_seed(3)
    scores, targets = torch.randn(30, generator=draw), torch.randn(30, generator=draw)
    before = hard_spearman(scores, targets)
    scores.requires_grad_()
    assert not scores.argsort().argsort().requires_grad  # ranks of integers: the term would train nothing
    for _ in range(50):
        (gradient,) = torch.autograd.grad(soft_spearman(scores, targets, 0.3), scores)
        assert gradient.abs().max() > 0
        scores = (scores + 0.5 * gradient).detach().requires_grad_()
    assert hard_spearman(scores.detach(), targets) > before + 0.3


def test_equal_scores_and_equal_targets_give_a_finite_gradient():
    targets = torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0], [NAN, NAN, NAN]])
    scores = torch.zeros(3, 3, requires_grad=True)
    found = soft_spearman(scores, targets, 0.1)
    found.sum().backward()
    assert found.tolist() == [0, 0, 0]
    assert scores.grad.isfinite().all() and 0 < scores.grad[0].abs().max() < 1e6


def test_soft_spearman_keeps_no_pairs_for_the_backward_pass():
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    scores, targets = torch.randn(500, requires_grad=True), torch.randn(500)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        soft_spearman(scores, targets, 0.1, chunk_elements=5000)
    assert max(kept) <= 500


def test_the_loss_is_the_weighted_squared_error_from_standardised_targets():
    batch = DayBatch(
        windows=torch.zeros(5, 1, 1),
        targets=torch.tensor([[1.0, 5.0], [3.0, NAN], [2.0, 7.0], [8.0, 0.0], [0.0, 4.0]], dtype=torch.float64),
        days=torch.tensor([0, 0, 0, 1, 1]),
        neighbours=torch.zeros(5, 0, dtype=torch.int64),
        sectors=torch.zeros(5, dtype=torch.int64),
        weights=torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0], dtype=torch.float64),
    )
    standard = np.array([[-(1.5**0.5), -1], [1.5**0.5, 0], [0, 1], [1, -1], [-1, 1]])
    scores = np.arange(10).reshape(5, 2) / 10
    weights = np.array([[1, 0.5], [1, 0], [1, 0.5], [3, 1.5], [3, 1.5]])
    loss = ForecastLoss((1.0, 0.5), rank_weight=0.0, rank_temperature=0.1)
    total, weight, _ = loss_and_gradient(loss, torch.tensor(scores), batch)
    assert total.item() == pytest.approx((weights * (scores - standard) ** 2).sum())
    assert weight.item() == pytest.approx(weights.sum())


@pytest.mark.proves("S2-16")
def test_the_rank_term_is_one_minus_spearman_by_the_weight_of_day_and_horizon():
    batch = make_days([12, 2, 9], num_horizons=2)
    scores = torch.randn(23, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    plain, weight, _ = loss_and_gradient(ForecastLoss((1.0, 0.5), 0.0, 1e-6), scores, batch)
    ranked, same, _ = loss_and_gradient(ForecastLoss((1.0, 0.5), 0.2, 1e-6), scores, batch)
    assert same == weight
    wanted = 0.0
    for day in (0, 2):  # the day of two assets has no order worth a term
        rows = batch.days == day
        for horizon, counts in enumerate((1.0, 0.5)):
            targets = batch.targets[rows, horizon]
            row_weight = batch.weights[rows][~targets.isnan()].sum().item()
            wanted += counts * row_weight * (1 - hard_spearman(scores[rows, horizon], targets))
    assert (ranked - plain).item() == pytest.approx(0.2 * wanted, abs=1e-7)


@pytest.mark.proves("S2-19")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rank_weight_of_zero_is_bit_for_bit_the_loss_without_the_term(dtype, monkeypatch):
    batch = make_days([12, 9], dtype=dtype)
    scores = torch.randn(21, 3, dtype=dtype, generator=torch.Generator().manual_seed(4))
    with_zero = loss_and_gradient(ForecastLoss((1.0, 0.5, 2.0), 0.0, 0.1), scores, batch)
    monkeypatch.setattr("memfit_workloads.forecaster.loss.soft_spearman", lambda *_: pytest.fail("ranks are made"))
    without = loss_and_gradient(ForecastLoss((1.0, 0.5, 2.0), 0.0, 1e9), scores, batch)
    assert all(torch.equal(one, other) for one, other in zip(with_zero, without, strict=True))


@pytest.mark.proves("S2-18")
def test_what_is_not_known_has_no_gradient_and_no_weight():
    batch = make_days([12, 9])
    scores = torch.randn(21, 3, dtype=torch.float64)
    _, weight, gradient = loss_and_gradient(ForecastLoss((1.0, 0.0, 1.0), 0.1, 0.1), scores, batch)
    unknown = batch.targets.isnan()
    assert unknown.any() and (gradient[unknown] == 0).all() and (gradient[~unknown][:, None] != 0).any()
    assert (gradient[:, 1] == 0).all()
    assert weight == (batch.weights[:, None] * ~unknown)[:, [0, 2]].sum()


def test_a_batch_without_any_known_target_costs_nothing_and_has_a_weight():
    batch = make_days([3])
    batch.targets.fill_(NAN)
    total, weight, gradient = loss_and_gradient(ForecastLoss((1.0,) * 3, 0.1, 0.1), torch.zeros(3, 3).double(), batch)
    assert total == 0 and weight > 0 and gradient.abs().max() == 0
