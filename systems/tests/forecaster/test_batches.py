"""Batches of whole days: complete, deterministic, resumable, with the graph and weights of their days."""

import dataclasses
import pickle

import numpy as np
import pytest

from memfit_workloads.finance.panels import scale_of
from memfit_workloads.forecaster.batches import DayBatches
from memfit_workloads.forecaster.params import ForecasterParams
from memfit_workloads.forecaster.stages import FORECASTER
from stages_here import StagesHere

DATA = {"source": "generated", "num_dates": 150, "num_assets": 14, "num_features": 3, "lookback": 8,
        "information_coefficient": 0.4, "horizons": (1, 4), "main_horizon": 4, "turnover": 0.8}  # fmt: skip
GRAPH = {"neighbours": 3, "window": 20}


def make_params(graph=GRAPH, **train):
    return ForecasterParams(
        data=DATA, splits={"n_splits": 2, "embargo_size": 2}, graph=graph, train={"batch_size": 40} | train
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return StagesHere(tmp_path_factory.mktemp("batches"), FORECASTER, make_params()).run("prepare")


def make(prepared, params=None, *, dates=None, seed=5, num_workers=0):
    dates = np.arange(8, 140) if dates is None else dates
    scale = scale_of(prepared.panel(), np.arange(8, 140))
    return DayBatches(prepared, dates, params or make_params(), scale, seed=seed, num_workers=num_workers)


def fields(batches):
    """All values of some batches, to be compared."""
    return [{field.name: getattr(one, field.name).tolist() for field in dataclasses.fields(one)} for one in batches]


def test_an_epoch_has_each_day_whole_and_once_in_batches_that_another_day_would_overfill(prepared):
    batches = make(prepared)
    panel, seen, found = prepared.panel(), [], list(batches)
    assert len(found) == len(batches)
    whole = panel.history >= 8
    for number, batch in enumerate(found):
        days = [batch.dates[batch.days == day] for day in range(batch.days[-1] + 1)]
        for dates in days:
            (date,) = set(dates.tolist())
            seen.append(date)
            assert batch.assets[batch.dates == date].tolist() == np.flatnonzero(whole[date]).tolist()
        assert len(batch.days) <= 40
        if number + 1 < len(found):
            following = (found[number + 1].days == 0).sum()
            assert len(batch.days) + following > 40
    assert sorted(seen) == [date for date in range(8, 140) if whole[date].sum() >= 2]


def test_the_order_is_drawn_anew_for_each_epoch_and_is_the_same_every_time(prepared):
    one, other = make(prepared), make(prepared)
    first = fields(one)
    assert fields(one) == first == fields(other)
    one.set_epoch(1)
    second = fields(one)
    assert second != first
    other.set_epoch(1)
    assert fields(other) == second
    in_order = make(prepared, seed=None)
    dates = np.concatenate([batch.dates for batch in in_order])
    assert (np.diff(dates) >= 0).all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_go_on_after_any_batch_of_any_epoch_in_another_process(prepared, num_workers):
    straight = make(prepared)
    straight.set_epoch(3)
    expected = fields(straight)
    for stop in (0, 1, len(expected) - 1, len(expected)):
        broken = make(prepared, num_workers=num_workers)
        broken.set_epoch(3)
        given = [batch for _, batch in zip(range(stop), broken, strict=False)]
        state = broken.state_dict()
        broken.close()
        resumed = make(prepared, num_workers=2 - num_workers)
        resumed.load_state_dict(state)
        rest = fields(resumed) if stop < len(expected) else []
        assert fields(given) + rest == expected
        resumed.close()


def test_a_copy_for_another_process_holds_no_arrays_and_gives_the_same(prepared):
    batches = make(prepared)
    batches.set_epoch(2)
    first = next(iter(batches))
    copied = pickle.dumps(batches)
    assert len(copied) < 20_000
    assert fields([first, *pickle.loads(copied)]) == fields([first, *batches])


def test_neighbours_are_places_within_the_day_of_those_that_are_there(prepared):
    saved = np.load(prepared.path("neighbours"))
    some_are_missing = False
    for batch in make(prepared):
        starts = np.searchsorted(batch.days, batch.days)
        for row in range(len(batch.days)):
            wanted = saved[batch.dates[row], batch.assets[row]]
            day = batch.assets[batch.days == batch.days[row]]
            places = batch.neighbours[row]
            present = np.isin(wanted, day)
            some_are_missing |= bool((~present & (wanted >= 0)).any())
            assert (places[~present] == -1).all()
            assert batch.assets[starts[row] + places[present]].tolist() == wanted[present].tolist()
    assert some_are_missing


def test_windows_are_standardised_and_targets_are_the_panels(prepared):
    panel, (mean, sd) = prepared.panel(), scale_of(prepared.panel(), np.arange(8, 140))
    batch = next(iter(make(prepared)))
    for row in (0, len(batch.days) - 1):
        date, asset = batch.dates[row], batch.assets[row]
        expected = (panel.values[date - 7 : date + 1, asset] - mean) / sd
        assert batch.windows[row] == pytest.approx(expected, abs=1e-6)
        assert batch.targets[row].tolist() == [panel.target(name)[date, asset] for name in ("target_h1", "target_h4")]


def test_a_row_whose_return_is_not_known_yet_is_there_without_a_target(prepared):
    (batch,) = make(prepared, dates=np.array([148]))
    assert np.isfinite(batch.targets[:, 0]).any() and np.isnan(batch.targets[:, 1]).all()


def test_sectors_and_regime_can_be_switched_off(prepared):
    off = next(iter(make(prepared, make_params(GRAPH | {"sectors": False}))))
    assert (off.sectors == -1).all() and (off.weights == 1).all()
    batches = list(make(prepared, make_params(regime_strength=0.5)))
    ranks = prepared.arrays("days")["volatility"]
    for batch in batches:
        assert batch.weights == pytest.approx(np.exp(-0.5 * (2 * ranks[batch.dates] - 1)))
    assert len({weight for batch in batches for weight in batch.weights.tolist()}) > 20


def test_no_batch_has_more_rows_or_a_larger_day_than_the_longest(prepared):
    batches = make(prepared)
    longest = batches.longest()
    largest = np.bincount(longest.days).max()
    for batch in batches:
        assert np.bincount(batch.days).max() <= largest
        assert len(batch.days) <= max(40, largest)
    assert len(longest.days) + largest > 40 >= len(longest.days)
