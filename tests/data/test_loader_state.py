"""What a loader's saved state is, and which states it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data import transforms
from data.conftest import generate_table
from memfit.data import Loader, Panel
from memfit.errors import UsageError


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Panel:
    table = generate_table(24, 40, missing=0.1)
    return Panel.build(table, tmp_path_factory.mktemp("panel"), features=["f0", "f1"], targets=["ret"])


def make(panel: Panel, **changes: Any) -> Loader:
    return Loader(panel, **{"date_indices": range(24), "lookback": 3, "target": "ret", "shuffle": 5, **changes})


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
