"""The same batches in the same order, whoever makes them, wherever an epoch is entered."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data import transforms
from data.conftest import generate_table
from memfit.data import DateBatches, Loader, Panel, WindowBatch, _position
from memfit.errors import DataError, UsageError


@pytest.fixture(autouse=True)
def always_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads make even what is made in no time."""
    monkeypatch.setattr(_position, "_LEAST_SECONDS", 0.0)


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Panel:
    table = generate_table(24, 40, missing=0.1)
    return Panel.build(table, tmp_path_factory.mktemp("panel"), features=["f0", "f1"], targets=["ret"])


def make(panel: Panel, num_workers: Any = 0, **changes: Any) -> Loader:
    arguments = {"date_indices": range(24), "lookback": 3, "target": "ret", "shuffle": 5, **changes}
    return Loader(panel, num_workers=num_workers, **arguments)


def content(batch: Any) -> tuple[bytes, ...]:
    dates = batch.date_indices if isinstance(batch, WindowBatch) else np.int64(batch.date_index)
    return tuple(part.tobytes() for part in (dates, batch.asset_indices, batch.windows, batch.targets))


KINDS = [
    {},
    {"max_assets": 21},
    {"batch": 32},
    {"batch": 32, "transform": transforms.add_noise},
    {"batch": 28, "drop_last": True},
]


@pytest.mark.proves("S4-54")
@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_is_entered_at_any_batch_with_any_number_of_workers(panel: Panel, kind: dict[str, Any]) -> None:
    kind = {**kind, "date_indices": range(10, 22)}
    whole = make(panel, **kind)
    whole.set_epoch(2)
    states, expected = [whole.state_dict()], []
    for batch in whole:
        expected.append(content(batch))
        states.append(whole.state_dict())
    assert len(set(expected)) == len(expected) == len(whole) >= 9
    for num_workers, at in itertools.product((0, 1, 2, 4), range(len(states))):
        loader = make(panel, num_workers, **kind)
        loader.load_state_dict(pickle.loads(pickle.dumps(states[at])))
        assert [content(batch) for batch in loader] == expected[at:]


@pytest.mark.proves("C-39")
@pytest.mark.parametrize(("before", "after"), [(4, 1), (0, 2), (2, 0)])
def test_a_state_taken_from_workers_ahead_counts_what_was_delivered(panel: Panel, before: int, after: int) -> None:
    expected = [content(batch) for batch in make(panel)]
    first = make(panel, before)
    head = [content(batch) for batch in itertools.islice(first, 5)]
    second = make(panel, after)
    second.load_state_dict(first.state_dict())
    assert head + [content(batch) for batch in second] == expected
    assert len(list(second)) == len(expected)  # the next iteration is a whole one


def test_windows_are_drawn_over_all_eligible_cells_each_once(panel: Panel) -> None:
    by_date = DateBatches(panel, range(24), lookback=3, target="ret", min_assets=1)
    expected = {(batch.date_index, asset) for batch in by_date for asset in batch.asset_indices.tolist()}
    loader = make(panel, batch=50)
    orders = []
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        batches = list(loader)
        assert {len(batch.targets) for batch in batches[:-1]} == {50}
        cells = [cell for b in batches for cell in zip(b.date_indices.tolist(), b.asset_indices.tolist(), strict=True)]
        assert len(cells) == len(expected) and set(cells) == expected
        orders.append(cells)
        for batch in batches:
            for date, asset, window, value in zip(
                batch.date_indices, batch.asset_indices, batch.windows, batch.targets, strict=True
            ):
                np.testing.assert_array_equal(window, panel.values[date - 2 : date + 1, asset])
                assert value == panel.target("ret")[date, asset]
    assert orders[0] != orders[1]
    unshuffled = [d for b in make(panel, batch=50, shuffle=None) for d in b.date_indices.tolist()]
    assert unshuffled == sorted(unshuffled)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_last_batch_of_fewer_windows_is_left_out_if_asked(panel: Panel, num_workers: int) -> None:
    whole, cut = make(panel, batch=50), make(panel, num_workers, batch=50, drop_last=True)
    left_out = []
    for epoch in (0, 1):
        whole.set_epoch(epoch)
        cut.set_epoch(epoch)
        expected = [content(batch) for batch in whole]
        *_, last = whole
        assert 0 < len(last.targets) < 50
        assert [content(batch) for batch in cut] == expected[:-1]
        assert len(cut) == len(whole) - 1 == cut.state_dict()["position"]
        left_out.append(set(_cells(last)))
    assert left_out[0] != left_out[1]
    num_windows = (len(whole) - 1) * 50 + len(left_out[0])
    assert [len(make(panel, batch=size, drop_last=True)) for size in (1, num_windows)] == [num_windows, 1]
    with pytest.raises(DataError, match=f"{num_windows} windows are eligible"):
        make(panel, batch=num_windows + 1, drop_last=True)


@pytest.mark.proves("S4-39")
@pytest.mark.slow
def test_each_record_comes_exactly_once_in_each_of_many_epochs_with_resets(panel: Panel) -> None:
    loader = Loader(panel, range(8, 11), lookback=3, target="ret", batch=16, shuffle=1, num_workers=2)
    fixed = Counter(cell for batch in loader for cell in _cells(batch))
    assert set(fixed.values()) == {1}
    rng = np.random.default_rng(0)
    for epoch in range(1, 1001):
        loader.set_epoch(epoch)
        if rng.random() < 0.5:  # reset in mid-epoch: what is under way must not show up later
            for _ in itertools.islice(loader, int(rng.integers(1, len(loader)))):
                pass
            loader.set_epoch(epoch)
        found: Counter[tuple[int, int]] = Counter()
        stop = int(rng.integers(1, len(loader)))
        for _ in range(2):  # an iteration that is left goes on with the rest of the epoch
            for batch in itertools.islice(loader, stop):
                found.update(_cells(batch))
            stop = len(loader) - stop
        assert found == fixed


def _cells(batch: Any) -> list[tuple[int, int]]:
    return list(zip(batch.date_indices.tolist(), batch.asset_indices.tolist(), strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_that_is_kept_never_changes(panel: Panel, num_workers: int) -> None:
    expected = [content(batch) for batch in make(panel)]
    loader = make(panel, num_workers)
    kept = [batch.windows[1:] for batch in loader]  # a view is enough
    for _ in loader:
        pass
    assert [view.tobytes() for view in kept] == [
        windows[len(windows) // len(np.frombuffer(targets, np.float32)) :] for _, _, windows, targets in expected
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_memory_is_used_again_once_the_batch_is_gone(panel: Panel, num_workers: int) -> None:
    with make(panel, num_workers=num_workers) as loader:
        places = []
        for epoch in range(4):
            loader.set_epoch(epoch)
            for batch in loader:
                places.append(batch.windows.ctypes.data)
                assert batch.windows.ctypes.data % 64 == 0
        # two threads make one batch each ahead, one is in use, and one is about to be replaced by it
        assert len(places) > 80 and len(set(places)) <= (4 if num_workers else 2)
        torch = pytest.importorskip("torch")
        tensor = torch.from_numpy(next(iter(loader)).windows)
        values = tensor.clone()
        gc.collect()
        for _ in loader:
            pass
        assert torch.equal(tensor, values)


def test_no_epoch_starts_by_itself_and_an_ended_iteration_says_so(panel: Panel) -> None:
    loader = make(panel)
    first = [content(batch) for batch in loader]
    assert [content(batch) for batch in loader] == first
    loader.set_epoch(1)
    assert [content(batch) for batch in loader] != first
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(UsageError, match="an iteration goes on that was ended"):
        next(old)
    state = {**loader.state_dict(), "position": len(loader)}
    loader.load_state_dict(state)
    assert (list(loader), len(list(loader))) == ([], len(loader))


def test_a_loader_pickles_with_its_position_as_the_panels_path(panel: Panel) -> None:
    with make(panel, num_workers=1, batch=32) as loader:
        head = [content(batch) for batch in itertools.islice(loader, 4)]
        copied = pickle.dumps(loader)
        assert len(copied) < 10_000 and b"panel" in copied
        with pickle.loads(copied) as other:
            assert other.num_workers == 1
            assert head + [content(batch) for batch in other] == [content(batch) for batch in make(panel, batch=32)]


def test_the_longest_batch_is_had_without_moving(panel: Panel) -> None:
    for kind in (KINDS[0], KINDS[1], KINDS[2], KINDS[4]):
        loader = make(panel, 2, **kind)
        sizes = [batch.windows.nbytes for batch in loader]
        assert loader.longest().windows.nbytes == max(sizes) == loader.largest_batch_bytes
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        loader.longest()
        assert loader.state_dict() == state and len(list(iterator)) == len(sizes) - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"batch": "day"}, "batch='day'"),
        ({"batch": 5, "max_assets": 5}, "max_assets=5"),
        ({"drop_last": True}, "drop_last=True"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": 1.5}, "num_workers is 1.5"),
        ({"num_workers": "auto"}, "num_workers is 'auto'"),
        ({"shuffle": -1}, "shuffle is -1"),
        ({"shuffle": False}, "shuffle is False"),
        ({"shuffle": True, "batch": 32}, "shuffle is True"),
        ({"shuffle": "a"}, "shuffle is 'a'"),
        ({"shuffle": 1.5}, "shuffle is 1.5"),
        ({"lookback": 25}, "none of 24 dates"),
    ],
)
def test_bad_arguments_are_refused(panel: Panel, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, DataError), match=message):
        make(panel, **changes)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_transform_that_returns_something_is_refused(panel: Panel, num_workers: int) -> None:
    with pytest.raises(UsageError, match="transform returned tuple for batch 0 of epoch 0") as raised:
        next(iter(make(panel, num_workers, transform=transforms.give_back)))
    assert "in place and returns None" in raised.value.rule


def test_a_training_that_was_cut_goes_on_in_mid_epoch_with_other_workers(panel: Panel, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from memfit.training import WHOLE, Trainer, seed_everything

    def train(folder: str, num_workers: int, most_batches: int = 10**6) -> tuple[Any, int]:
        num_seen = 0

        def loss(model: Any, batch: Any) -> Any:
            nonlocal num_seen
            num_seen += 1
            if num_seen > most_batches:
                raise InterruptedError
            scores = model(torch.from_numpy(batch.windows).flatten(1)).squeeze(1)
            return ((scores - torch.from_numpy(batch.targets)) ** 2).sum(), len(scores)

        seed_everything(0)
        model = torch.nn.Linear(6, 1)
        trainer = Trainer(
            model,
            loss=loss,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
            checkpoint_dir=tmp_path / folder,
            checkpoint_seconds=0,
            split=WHOLE,
        )
        with contextlib.suppress(InterruptedError):
            trainer.fit(make(panel, num_workers, batch=32, date_indices=range(10, 18)), num_epochs=2)
        return model.weight.detach(), num_seen

    whole, num_batches = train("whole", 0)
    train("cut", 2, most_batches=num_batches // 2 + 3)
    resumed, num_again = train("cut", 1)
    assert torch.equal(resumed, whole)
    assert num_again < num_batches // 2


# What a saved state is, and which ones are taken.


def test_what_is_no_state_is_refused(panel: Panel) -> None:
    loader = make(panel)
    good = loader.state_dict()
    loader.load_state_dict(good)
    changes: list[dict[str, Any]] = [
        {"epoch": -1},
        {"epoch": True},
        {"position": 1.5},
        {"position": -1},
        {"position": 99},
        {"fingerprint": None},
        {"fingerprint": 5},
    ]
    for state in ({}, None, "x", [1], {"epoch": 0, "position": 1}, *({**good, **change} for change in changes)):
        with pytest.raises(UsageError, match="is no state of this loader"):
            loader.load_state_dict(state)  # type: ignore[arg-type]
    assert loader.state_dict() == good


def test_a_state_of_a_loader_with_another_order_is_refused(panel: Panel, tmp_path: Path) -> None:
    other_panel = Panel.build(
        pa.table(
            {
                "date": np.repeat(np.arange("2024-01-01", "2024-01-25", dtype="datetime64[D]"), 40),
                "code": [f"A{asset:02d}" for asset in range(40)] * 24,
                "f0": np.ones(960),
                "ret": np.ones(960),
            }
        ),
        tmp_path,
        features=["f0"],
        targets=["ret"],
    )
    loader = make(panel)
    state = loader.state_dict()
    others = [
        make(other_panel),
        make(panel, date_indices=range(1, 24)),
        make(panel, lookback=4),
        make(panel, target=None),
        make(panel, batch=32),
        make(panel, shuffle=6),
        make(panel, shuffle=None),
        make(panel, min_assets=3),
        make(panel, max_assets=30),
        make(panel, batch=32, drop_last=True),
    ]
    assert len({other.state_dict()["fingerprint"] for other in others} - {state["fingerprint"]}) == len(others)
    for other in others:
        with pytest.raises(UsageError, match=f"of another loader: its fingerprint is {state['fingerprint']}"):
            other.load_state_dict(state)
    numpy_arguments = {"date_indices": np.arange(24), "lookback": np.int64(3), "shuffle": np.int64(5), "min_assets": 2}
    same = make(panel, **numpy_arguments, transform=transforms.add_noise)
    same.load_state_dict(state)
    assert len(state["fingerprint"]) == 16 and int(state["fingerprint"], 16) >= 0


def test_a_state_is_saved_as_plain_values(panel: Panel, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    loader = make(panel)
    loader.set_epoch(np.int64(2))  # type: ignore[arg-type]
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state == loader.state_dict() and json.loads(json.dumps(state)) == state
    make(panel).load_state_dict(state)


def test_a_fingerprint_does_not_change_with_a_later_version(tmp_path: Path) -> None:
    # States are kept for months: what is added to a loader later must leave the fingerprints of the others as they are.
    days = [f"2024-01-{day:02d}" for day in range(1, 25) for _ in range(4)]
    table = pa.table({"date": days, "code": list("abcd") * 24, "f0": [float(n) for n in range(96)]})
    panel = Panel.build(table.append_column("ret", table["f0"]), tmp_path, features=["f0"], targets=["ret"])
    found = [make(panel, batch=32, drop_last=value).state_dict()["fingerprint"] for value in (False, True)]
    assert found == ["8953440edb80126e", "ebb7b5759962fd11"]
