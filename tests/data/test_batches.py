"""One date is one batch: whole, finite, repeatable, the same for whoever asks."""

from __future__ import annotations

import json
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.data import DateBatches, Loader, Panel
from memfit.errors import DataError


@pytest.fixture
def panel(make_table: Callable[..., pa.Table], tmp_path: Path) -> Panel:
    return Panel.build(make_table(20, 30, missing=0.15), tmp_path, features=["f0", "f1"], targets=["ret"])


def windows(panel: Panel, date: int, lookback: int) -> Any:
    return panel.values[date + 1 - lookback : date + 1].transpose(1, 0, 2)


def eligible(panel: Panel, date: int, lookback: int, target: str | None) -> list[int]:
    """The same by the definition, one asset at a time."""
    found = []
    for asset in range(len(panel.assets)):
        window = panel.values[max(0, date + 1 - lookback) : date + 1, asset]
        is_whole = len(window) == lookback and bool(np.isfinite(window).all())
        if is_whole and (target is None or np.isfinite(panel.target(target)[date, asset])):
            found.append(asset)
    return found


@pytest.mark.proves("S2-36")
@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lookback=st.integers(1, 6),
    target=st.sampled_from(["ret", None]),
    seed=st.none() | st.integers(0, 9),
    min_assets=st.integers(1, 5),
    room=st.none() | st.integers(0, 20),
    dates=st.lists(st.integers(0, 19), min_size=1, unique=True),
    epoch=st.integers(0, 3),
)
def test_batches_hold_every_eligible_asset_of_every_kept_date_once(  # noqa: PLR0913 - drawn arguments
    panel: Panel,
    lookback: int,
    target: str | None,
    seed: int | None,
    min_assets: int,
    room: int | None,
    dates: list[int],
    epoch: int,
) -> None:
    expected = {date: eligible(panel, date, lookback, target) for date in dates}
    kept = {date: assets for date, assets in expected.items() if len(assets) >= min_assets}
    max_assets = None if room is None else 2 * min_assets - 1 + room

    def make() -> DateBatches:
        return DateBatches(
            panel,
            dates,
            lookback=lookback,
            target=target,
            shuffle_seed=seed,
            min_assets=min_assets,
            max_assets=max_assets,
        )

    if not kept:
        with pytest.raises(DataError, match=f"none of {len(dates)} dates has {min_assets} eligible assets"):
            make()
        return
    batches = make()
    batches.set_epoch(epoch)
    drawn = list(batches)
    assert len(drawn) == len(batches)
    assert batches.num_skipped == len(dates) - len(kept)
    found: dict[int, list[int]] = {}
    for batch in drawn:
        found.setdefault(batch.date_index, []).extend(batch.asset_indices.tolist())
        assert min_assets <= len(batch.asset_indices) <= (max_assets or 30)
        assert (np.diff(batch.asset_indices) > 0).all()
        assert batch.windows.dtype == batch.targets.dtype == np.float32
        assert batch.windows.flags.c_contiguous
        assert batch.windows.nbytes <= batches.largest_batch_bytes
        view = windows(panel, batch.date_index, lookback)
        np.testing.assert_array_equal(batch.windows, view[batch.asset_indices])
        if target is None:
            assert np.isnan(batch.targets).all()
        else:
            np.testing.assert_array_equal(batch.targets, panel.target(target)[batch.date_index, batch.asset_indices])
    assert {date: sorted(assets) for date, assets in found.items()} == kept
    assert max(batch.windows.nbytes for batch in drawn) == batches.largest_batch_bytes
    assert batches.longest().windows.nbytes == batches.largest_batch_bytes
    if seed is None:
        assert [batch.date_index for batch in drawn if batch.asset_indices[0] == kept[batch.date_index][0]] == list(
            kept
        )


def order(batches: DateBatches, epoch: int) -> list[tuple[int, list[int]]]:
    batches.set_epoch(epoch)
    return [(batch.date_index, batch.asset_indices.tolist()) for batch in batches]


def test_the_order_depends_on_seed_and_epoch_alone(panel: Panel) -> None:
    def make(seed: int | None) -> DateBatches:
        return DateBatches(panel, range(20), lookback=2, target="ret", shuffle_seed=seed, max_assets=8)

    batches = make(5)
    first, second = order(batches, 1), order(batches, 2)
    assert order(batches, 1) == first
    assert order(make(5), 2) == second
    assert order(pickle.loads(pickle.dumps(batches)), 1) == first
    orders = [first, second, order(make(6), 1)]
    dates = [[date for date, _ in drawn] for drawn in orders]
    assert dates[0] != dates[1] != dates[2] != dates[0]
    chunks = [{(date, tuple(assets)) for date, assets in drawn} for drawn in orders]
    assert chunks[0] != chunks[1] != chunks[2] != chunks[0]
    assert order(make(None), 1) == order(make(None), 2)


def test_a_batch_is_the_same_by_number_as_in_turn(panel: Panel) -> None:
    batches = DateBatches(panel, range(20), lookback=2, target="ret", shuffle_seed=1)
    for number, batch in reversed(list(enumerate(batches))):
        np.testing.assert_array_equal(batches[number].windows, batch.windows)
    np.testing.assert_array_equal(batches[-1].windows, batches[len(batches) - 1].windows)
    with pytest.raises(IndexError):
        batches[len(batches)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lookback": 0}, "lookback is 0"),
        ({"min_assets": 0}, "min_assets is 0"),
        ({"min_assets": 5, "max_assets": 8}, "at least 2 \\* min_assets - 1 = 9"),
        ({"shuffle_seed": -1}, "shuffle_seed is -1"),
        ({"shuffle_seed": False}, "shuffle_seed is False"),
        ({"shuffle_seed": True}, "shuffle_seed is True"),
        ({"shuffle_seed": "a"}, "shuffle_seed is 'a'"),
        ({"date_indices": [3, 20]}, "go from 3 to 20"),
        ({"date_indices": [-1]}, "go from -1 to -1"),
        ({"date_indices": [3, 4, 3]}, "a date twice"),
        ({"date_indices": [1.5]}, "no list of whole numbers"),
        ({"date_indices": [[1], [2]]}, "no list of whole numbers"),
        ({"date_indices": []}, "none of 0 dates"),
        ({"lookback": 21}, "none of 20 dates has 2 eligible assets; the most is 0"),
        ({"target": "rte"}, "did you mean 'ret'"),
    ],
)
def test_bad_arguments_are_refused_with_their_numbers(panel: Panel, changes: dict[str, Any], message: str) -> None:
    given = {"date_indices": range(20), "lookback": 2, "target": "ret", **changes}
    with pytest.raises(DataError, match=message):
        DateBatches(panel, **given)


@pytest.mark.proves("S2-43")
@pytest.mark.slow
def test_workers_draw_the_same_batches_however_they_are_started(
    make_table: Callable[..., pa.Table], tmp_path: Path, start_child: Callable[..., subprocess.Popen[str]]
) -> None:
    panel = Panel.build(make_table(12, 300, missing=0.05), tmp_path, features=["f0", "f1"], targets=["ret"])
    digests = {}
    for method in ("none", "fork", "spawn"):
        child = start_child("batches", path=panel.path, method=method)
        digests[method] = json.loads(child.communicate(timeout=60)[0])
        assert child.returncode == 0
    assert len(digests["none"]) > 20
    assert len(set(digests["none"])) == len(digests["none"])
    assert digests["fork"] == digests["spawn"] == digests["none"]


@pytest.mark.parametrize("absent", [None, "B"])
@pytest.mark.parametrize("batch", ["date", 7])
def test_windows_of_neighbouring_assets_and_of_others_are_the_panels(
    absent: str | None, batch: Any, tmp_path: Path
) -> None:
    rows = [(f"2024-01-{day:02d}", code) for day in range(1, 11) for code in "ABCDE" if code != absent or day != 5]
    table = pa.table(
        {"date": [day for day, _ in rows], "code": [code for _, code in rows], "f0": np.arange(len(rows)) * 1.0}
    )
    panel = Panel.build(table, tmp_path, features=["f0"])
    seen = 0
    found: Any
    for found in Loader(panel, range(10), lookback=3, target=None, batch=batch):
        dates = getattr(found, "date_indices", None)
        for place, asset in enumerate(found.asset_indices):
            date = found.date_index if dates is None else dates[place]
            np.testing.assert_array_equal(found.windows[place], windows(panel, date, 3)[asset])
            seen += 1
    assert seen == 8 * 5 - (0 if absent is None else 3)
