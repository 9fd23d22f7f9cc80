"""The forecaster's network: its shapes, its graph, what depends on what, its memory, and pre-training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from forecaster_days import make_days, take

from memfit.training import ByGroup, SafeStep
from memfit_workloads.finance.lists import Lists
from memfit_workloads.forecaster.loss import ForecastLoss
from memfit_workloads.forecaster.model import (
    Forecaster,
    GraphAttention,
    Masked,
    graph_edges,
    pretraining_loss,
)

SIZES = {"num_features": 6, "lookback": 5, "num_horizons": 3}


def forecaster(*, seed=0, dtype=torch.float64, **settings):
    torch.manual_seed(seed)
    given = {**SIZES, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "dropout": 0.0, **settings}
    return Forecaster(**given).to(dtype)


@pytest.mark.proves("S2-02")
@pytest.mark.parametrize("num_layers", range(1, 7))
def test_one_to_six_layers_of_one_width_run_forward_and_backward(num_layers):
    model = forecaster(num_layers=num_layers, hidden_size=24)
    scores = model(make_days([4, 7]))
    scores.sum().backward()
    assert scores.shape == (11, 3)
    assert len(model.layers) == num_layers
    assert {layer.widen.in_features for layer in model.layers} == {24}
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())
    assert all(layer.narrow.weight.grad.abs().max() > 0 for layer in model.layers)


@pytest.mark.slow
def test_graph_attention_is_transformer_conv_of_torch_geometric_for_each_kind_of_edges():
    nn = pytest.importorskip("torch_geometric.nn")
    batch, width, heads = make_days([5, 9, 1]), 24, 6
    lists = Lists(batch.days, batch.days.device)
    edges = graph_edges(batch.neighbours, batch.sectors, lists)
    masks = torch.zeros(edges.shape, dtype=torch.float64).masked_fill(~edges, float("-inf")).unsqueeze(2)
    torch.manual_seed(1)
    ours = GraphAttention(width, heads).double()
    rows = torch.randn(15, width, dtype=torch.float64)
    found = ours(rows, lists, masks)
    for kind in range(2):
        theirs = nn.TransformerConv(width, width // heads, heads=heads // 2, root_weight=False).double()
        half = slice(kind * width // 2, (kind + 1) * width // 2)
        weights, biases = ours.query_key_value.weight.chunk(3), ours.query_key_value.bias.chunk(3)
        for layer, weight, bias in zip(
            (theirs.lin_query, theirs.lin_key, theirs.lin_value), weights, biases, strict=True
        ):
            layer.weight.data, layer.bias.data = weight[half].clone(), bias[half].clone()
        day, to, source = edges[kind].nonzero().T
        inside = (to < torch.tensor([5, 9, 1])[day]) & (source < torch.tensor([5, 9, 1])[day])
        first = lists.first[day]
        index = torch.stack([first + source, first + to])[:, inside]
        torch.testing.assert_close(found[:, half], theirs(rows, index), rtol=0, atol=1e-5)


@pytest.mark.proves("S2-41")
def test_the_graph_has_the_neighbours_both_ways_the_sectors_and_each_asset_itself():
    batch = make_days([6, 3], num_neighbours=2)
    near, same = graph_edges(batch.neighbours, batch.sectors, Lists(batch.days, batch.days.device))
    for day, first, size in ((0, 0, 6), (1, 6, 3)):
        for a in range(size):
            for b in range(size):
                mine, others = batch.neighbours[first + a].tolist(), batch.neighbours[first + b].tolist()
                sectors = batch.sectors[first + a], batch.sectors[first + b]
                assert near[day, a, b] == (a == b or b in mine or a in others)
                assert same[day, a, b] == (a == b or (sectors[0] == sectors[1] >= 0))


def test_an_asset_is_moved_by_its_neighbours_alone():
    batch = make_days([4])
    batch = replace(batch, neighbours=torch.tensor([[1], [-1], [-1], [-1]]), sectors=torch.full((4,), -1))
    model = forecaster(num_layers=1)
    before = model(batch)
    moved = batch.windows.clone()
    moved[1] += 1.0
    change = (model(replace(batch, windows=moved)) - before).abs().amax(1)
    assert change[0] > 1e-6 and change[1] > 1e-6
    assert change[2] == change[3] == 0


def test_in_mixed_precision_scores_and_gradients_are_near_those_of_float32():
    batch = make_days([9, 5], dtype=torch.float32)
    model = forecaster(dtype=torch.float32)
    exact = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(batch)
        total, weight = ForecastLoss((1.0,) * 3, rank_weight=0.1)(model, batch)
    (total / weight).backward()
    assert rough.dtype == torch.bfloat16 and total.dtype == torch.float32
    torch.testing.assert_close(rough.float(), exact, rtol=0, atol=0.01)
    assert all(one.grad.isfinite().all() for one in model.parameters())


def test_the_order_of_the_assets_of_a_day_permutes_the_scores():
    batch, model = make_days([7]), forecaster()
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    place = torch.argsort(order)
    shuffled = take(batch, order)
    near = torch.where(shuffled.neighbours < 0, -1, place[shuffled.neighbours.clamp_min(0)])
    torch.testing.assert_close(model(replace(shuffled, neighbours=near)), model(batch)[order], rtol=0, atol=1e-12)


def test_a_batch_that_is_split_between_days_has_the_gradient_of_the_whole():
    batch, loss = make_days([3, 8, 5, 4]), ForecastLoss((1.0, 0.5, 2.0), rank_weight=0.2, rank_temperature=0.3)
    gradients = []
    for size in (4, 1):
        model = forecaster()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = SafeStep(model, optimizer, loss, split=ByGroup(lambda one: one.days), microbatch_size=size)
        outcome = step.gradients(batch)
        assert outcome.num_microbatches == 4 // size
        gradients.append([one.grad.clone() for one in model.parameters()])
    for whole, split in zip(*gradients, strict=True):
        torch.testing.assert_close(split, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("days", "size", "num_layers", "hidden_size"), [(12, 20, 1, 32), (2, 150, 6, 64), (1, 700, 2, 16)]
)
def test_the_arithmetic_of_memory_is_near_what_a_step_keeps(days, size, num_layers, hidden_size):
    settings = {"hidden_size": hidden_size, "num_layers": num_layers, "dropout": 0.1}
    model = forecaster(dtype=torch.float32, **settings)
    batch = make_days([size] * days, dtype=torch.float32)
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ForecastLoss((1.0, 1.0, 1.0), rank_weight=0.1)(model, batch)
    measured = sum(storage.nbytes() for storage in kept.values())
    assert 1 / 1.5 < model.kept_bytes(size * days, size) / measured < 1.5


@pytest.mark.slow
def test_pretraining_learns_features_that_others_show():
    draw = np.random.default_rng(0)
    model = Masked(forecaster(dtype=torch.float32)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(150):
        batch = make_days([8] * 8, dtype=torch.float32, seed=int(draw.integers(1 << 30)))
        batch = replace(batch, windows=batch.windows[:, :, :1].expand(-1, -1, 6).contiguous())
        total, weight = pretraining_loss(model, batch)
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append((total / weight).item())
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:20])


def test_pretraining_scores_hidden_values_alone_and_shows_none_of_them():
    batch, model, seen = make_days([6, 9]), Masked(forecaster()).double().eval(), []
    model.forecaster.selection.register_forward_hook(lambda _, given, __: seen.append(given))
    total, weight = pretraining_loss(model, batch, share=0.5)
    ((windows, known),) = seen
    hidden = ~known[:, -1]
    assert known[:, :-1].all() and torch.equal(windows, batch.windows * known)
    assert 0.3 * hidden.numel() < weight == hidden.sum()
    answer = model.reconstruct(model.forecaster.encode(batch, hidden))
    torch.testing.assert_close(total, (answer - batch.windows[:, -1])[hidden].square().sum())
    assert pretraining_loss(model, batch, share=0.5)[0] == total  # in evaluation the same each time


@pytest.mark.slow
def test_the_graph_finds_a_signal_that_only_neighbours_carry():
    loss, recent = ForecastLoss((1.0,), rank_weight=0.0), []
    model = forecaster(num_horizons=1, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    partner = torch.arange(10) ^ 1
    for step in range(250):
        batch = make_days([10] * 8, num_horizons=1, dtype=torch.float32, seed=step)
        targets = batch.windows.unflatten(0, (8, 10))[:, partner, -1, 0].reshape(-1, 1)
        total, weight = loss(model, replace(batch, neighbours=partner.repeat(8)[:, None], targets=targets))
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        recent.append((total / weight).item())
    assert np.mean(recent[-25:]) < 0.5  # in variances of the targets
