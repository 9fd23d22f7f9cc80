"""Optimizers by name against hand computations, their resume, and schedules that fit the number of steps."""

import math

import pytest
import torch

from memfit.errors import UsageError
from memfit.training import Trainer
from memfit_workloads.finance.schedules import make_schedule
from memfit_workloads.folds import TrainSettings, make_optimizer

RATES = [1e-5, 5.6e-5, 1e-3]


def made(name):
    """A weight, and its optimizer with a rate of 0.01 and a decay of 0.1."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    settings = TrainSettings(optimizer=name, learning_rate=0.01, weight_decay=0.1)
    return weight, make_optimizer(settings, torch.nn.ParameterList([weight]))


def by_hand(*, decay, num_steps=12, rate=0.01):
    """AdaBelief in plain numbers: its paper's algorithm, with decoupled decay and RAdam's rectification."""
    weights, means, beliefs, path = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0], []
    for step in range(1, num_steps + 1):
        longest = 2 / (1 - 0.999) - 1
        length = longest - 2 * step * 0.999**step / (1 - 0.999**step)
        for i, weight in enumerate(weights):
            gradient = 2 * weight * (1 + (step - 1) % 3)
            weight *= 1 - rate * decay
            means[i] = 0.9 * means[i] + 0.1 * gradient
            beliefs[i] = 0.999 * beliefs[i] + 0.001 * (gradient - means[i]) ** 2 + 1e-16
            mean = means[i] / (1 - 0.9**step)
            if length < 5:
                weight -= rate * mean
            else:
                share = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
                belief = math.sqrt(beliefs[i] / (1 - 0.999**step))
                weight -= rate * math.sqrt(share) * mean / belief
            weights[i] = weight
        path.append(list(weights))
    return torch.tensor(path, dtype=torch.float64)


@pytest.mark.proves("S2-11")
@pytest.mark.slow
def test_adabelief_is_its_algorithm_before_and_after_its_rectification_begins():
    (weight, optimizer), path = made("adabelief"), []
    for step in range(12):
        optimizer.zero_grad()
        (weight**2 * (1 + step % 3)).sum().backward()
        optimizer.step()
        path.append(weight.detach().clone())
    torch.testing.assert_close(torch.stack(path), by_hand(decay=0.1), rtol=1e-9, atol=0)


def test_adamw_is_torchs_own_and_decays_decoupled():
    weight, optimizer = made("adamw")
    assert type(optimizer) is torch.optim.AdamW
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.999, -1.998])


def trace(name, num_steps, *, rate=1.0, **settings):
    """The rates of each step of a run, and the one after it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    schedule = make_schedule(name, optimizer, num_steps, **settings)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates, optimizer.param_groups[0]["lr"]


@pytest.mark.proves("S2-15")
@pytest.mark.parametrize("rate", RATES)
def test_the_floor_of_warm_restarts_is_a_share_of_the_base_rate_and_the_run_ends_with_a_cycle(rate):
    rates, after = trace("warm_restarts", 30, rate=rate, floor_share=0.1, cycles=2)
    restarts = [step for step in range(1, 30) if rates[step] > rates[step - 1]]
    assert restarts == [10]
    assert rates[0] == rates[10] == rate
    assert min(rates) >= 0.1 * rate and max(rates) == rate
    assert rates[-1] < 0.11 * rate and after == pytest.approx(0.1 * rate)
    middle = rate * (0.1 + 0.9 * 0.5)
    assert rates[5] == pytest.approx(middle) and rates[20] == pytest.approx(middle)


@pytest.mark.parametrize("num_steps", [14, 23, 24, 100])
def test_the_last_cycle_ends_with_the_run_whatever_its_length(num_steps):
    rates, after = trace("warm_restarts", num_steps, cycles=3)
    assert sum(rates[step] > rates[step - 1] for step in range(1, num_steps)) == 2
    assert after == pytest.approx(0.0, abs=1e-12)
    last = max(step for step in range(1, num_steps) if rates[step] > rates[step - 1])
    assert abs((num_steps - last) - num_steps * 4 / 7) <= 1
    if num_steps >= 20:
        assert rates[-1] < 0.06


@pytest.mark.parametrize("rate", RATES)
def test_a_cosine_falls_from_the_base_rate_to_its_floor(rate):
    rates, after = trace("cosine", 20, rate=rate, floor_share=0.25)
    assert rates[0] == rate and rates == sorted(rates, reverse=True)
    assert after == pytest.approx(0.25 * rate)


def test_a_warm_up_is_a_line_before_each_shape():
    for name in ("constant", "cosine", "warm_restarts"):
        rates, _ = trace(name, 20, warmup_share=0.2)
        assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert trace("constant", 20, warmup_share=0.2)[0][4:] == [1.0] * 16


@pytest.mark.proves("C-51")
def test_the_remedy_for_too_many_cycles_fits():
    with pytest.raises(UsageError, match="4 cycles take 30 steps") as caught:
        trace("warm_restarts", 10, cycles=4)
    assert "cycles=2" in caught.value.remedy
    trace("warm_restarts", 10, cycles=2)


def test_a_trainer_says_which_schedule_it_has():
    model = torch.nn.Linear(1, 1)
    optimizer = make_optimizer(TrainSettings(), model)
    schedule = make_schedule("warm_restarts", optimizer, 12, floor_share=0.1)
    trainer = Trainer(model, loss=lambda model, batch: (model(batch).sum(), 1), optimizer=optimizer, schedule=schedule)
    for setting in ("shape=warm_restarts", "num_steps=12", "floor_share=0.1", "bounds=[0, 4, 12]"):
        assert setting in trainer.identity["schedule"]
