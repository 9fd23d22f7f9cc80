"""The ranker's batches: several dates each, the same again after a resume, with weights by days that take effect."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from memfit.data import Panel
from memfit_workloads.finance import rank_ic
from memfit_workloads.ranker.batches import ListBatches
from memfit_workloads.ranker.loss import RankerLoss
from memfit_workloads.ranker.params import RankerParams

NUM_DATES, NUM_ASSETS = 120, 20
BASE = {"source": "parquet", "path": "unused", "features": ["x"], "targets": {1: "y1", 2: "y2"}, "lookback": 1,
        "horizons": (1, 2), "main_horizon": 1}  # fmt: skip


def make_params(**train):
    return RankerParams(data=BASE, model={"patch_size": 1}, train=train)


@pytest.fixture(scope="module")
def panel(tmp_path_factory):
    """In the first 90 dates the feature tells the opposite of what it tells in the last 30."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_DATES, NUM_ASSETS))
    sign = np.where(np.arange(NUM_DATES) < 90, -1, 1)[:, None]
    y = sign * x + 0.5 * rng.normal(size=x.shape)
    days = np.busday_offset(np.datetime64("2024-01-02"), np.arange(NUM_DATES), roll="forward")
    rows = {
        "date": np.repeat(days, NUM_ASSETS),
        "code": [f"A{number:02d}" for number in range(NUM_ASSETS)] * NUM_DATES,
        "x": x.ravel(),
        "y1": y.ravel(),
        "y2": np.where(rng.random(x.shape) < 0.3, np.nan, y).ravel(),
    }
    return Panel.build(pa.table(rows), tmp_path_factory.mktemp("panel"), features=["x"], targets=["y2", "y1"])


def contents(batches):
    return [{name: value.copy() for name, value in vars(batch).items()} for batch in batches]


def assert_same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_a_batch_holds_its_dates_as_lists_with_the_targets_in_the_order_of_the_horizons(panel):
    params = make_params(dates_per_batch=3, pairs_per_asset=4)
    batches = ListBatches(panel, np.arange(10), params, seed=1)
    assert len(batches) == 4
    found = contents(batches)
    assert [len(set(one["lists"])) for one in found] == [3, 3, 3, 1]
    seen = np.concatenate([one["windows"][:, 0, 0] for one in found])
    assert sorted(seen.tolist()) == sorted(panel.values[:10, :, 0].ravel().tolist())
    by_value = {float(panel.values[d, a, 0]): (d, a) for d in range(10) for a in range(NUM_ASSETS)}
    for one in found:
        cells = [by_value[float(value)] for value in one["windows"][:, 0, 0]]
        for row, (date, asset) in enumerate(cells):
            expected = [panel.target("y1")[date, asset], panel.target("y2")[date, asset]]
            np.testing.assert_array_equal(one["targets"][row], np.array(expected, np.float32))
        assert (one["weights"] == 1).all()


def test_an_epoch_is_the_same_again_and_another_is_in_another_order_with_other_pairs(panel):
    def epoch(number):
        batches = ListBatches(panel, np.arange(12), make_params(dates_per_batch=4), seed=1)
        batches.set_epoch(number)
        return contents(batches)

    assert_same(epoch(1), epoch(1))
    first, second = epoch(1), epoch(2)
    assert not np.array_equal(first[0]["windows"], second[0]["windows"])
    assert not np.array_equal(
        np.sort(np.concatenate([one["partners"] for one in first]), axis=None),
        np.sort(np.concatenate([one["partners"] for one in second]), axis=None),
    )


def test_pairs_are_drawn_within_the_list(panel):
    few = ListBatches(panel, np.arange(8), make_params(dates_per_batch=4, pairs_per_asset=5), seed=1)
    own = np.tile(np.arange(NUM_ASSETS), 4)[:, None]
    for one in few:
        assert one.partners.shape == (80, 5)
        assert ((one.partners >= 0) & (one.partners < NUM_ASSETS) & (one.partners != own)).all()
    none = make_params(loss={"listnet": 1.0, "ranknet": 0.0})
    assert next(iter(ListBatches(panel, np.arange(8), none, seed=1))).partners.shape[1] == 0


def test_a_date_has_a_weight_by_its_age_in_calendar_days_and_not_in_steps_or_dates(panel):
    params = make_params(dates_per_batch=6, tau_days=10.0)
    batches = ListBatches(panel, np.array([0, 3, 4, 5, 9, 100]), params, seed=1)  # Tuesday, Friday, Monday, ...
    (batch,) = batches
    value_of = {float(panel.values[d, 0, 0]): d for d in (0, 3, 4, 5, 9, 100)}
    found = {}
    for row in np.flatnonzero(np.diff(batch.lists, prepend=-1)):
        found[value_of[float(batch.windows[row, 0, 0])]] = float(batch.weights[row])
    ages = (panel.dates[100] - panel.dates).astype(int)
    assert ages[3] - ages[4] == 3  # a weekend between two neighbouring dates
    assert found == {d: pytest.approx(np.exp(-ages[d] / 10.0), rel=1e-5) for d in found}
    assert len(found) == 6


def train(panel, params, max_grad_norm):
    """A model of one number for each horizon, by Adam with clipping; the numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 2, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loss = RankerLoss(1.0, 0.5, 0.1)
    batches = ListBatches(panel, np.arange(NUM_DATES), params, seed=5)
    for epoch in range(6):
        batches.set_epoch(epoch)
        for batch in batches:
            optimizer.zero_grad()
            total, weight = loss(model, batch)
            (total / weight).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
    return model[1].weight.detach().squeeze(1)


@pytest.mark.parametrize("max_grad_norm", [1.0, 1e-3])
def test_the_decay_by_days_takes_effect_under_adam_and_clipping(panel, max_grad_norm):
    plain = train(panel, make_params(dates_per_batch=12), max_grad_norm)
    recent = train(panel, make_params(dates_per_batch=12, tau_days=15.0), max_grad_norm)
    # Three of four dates say that less is better; those of the last six weeks say the opposite.
    assert (plain < 0).all()
    assert (recent > 0).all()
    late = [rank_ic(float(w) * panel.values[90:, :, 0], panel.target("y1")[90:]).mean() for w in (plain[0], recent[0])]
    assert late[0] < -0.5 and late[1] > 0.5
