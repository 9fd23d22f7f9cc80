"""What a panel holds, and that nobody copies it."""

from __future__ import annotations

import datetime
import hashlib
import json
import pickle
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.data import Panel
from memfit.errors import DataError

NAMES = ["values", "targets", "present", "history", "dates"]


@pytest.fixture
def panel(make_table: Callable[..., pa.Table], tmp_path: Path) -> Panel:
    return Panel.build(
        make_table(), tmp_path, features=["f0", "f1", "f2"], targets=["ret"], parameters={"horizon": 5, "name": "x"}
    )


def assert_holds(panel: Panel, table: pa.Table, features: list[str], targets: list[str]) -> None:
    """The panel holds each row of the table in its cell, and NaN everywhere else."""
    dates = sorted({np.datetime64(value, "D") for value in table["date"].to_pylist()})
    assets = sorted(set(table["code"].to_pylist()))
    assert panel.dates.tolist() == [date.item() for date in dates]
    assert panel.assets == tuple(assets)
    for names, found in ((features, panel.values), (targets, panel.targets)):
        expected = np.full((len(dates), len(assets), len(names)), np.nan, found.dtype)
        for row in table.to_pylist():
            cell = expected[dates.index(np.datetime64(row["date"], "D")), assets.index(row["code"])]
            cell[:] = [np.nan if row[name] is None else row[name] for name in names]
        np.testing.assert_array_equal(found, expected)
    present = np.zeros((len(dates), len(assets)), bool)
    for row in table.to_pylist():
        present[dates.index(np.datetime64(row["date"], "D")), assets.index(row["code"])] = True
    np.testing.assert_array_equal(panel.present, present)
    run = np.zeros(len(assets), int)
    for date in range(len(dates)):
        run = np.where(np.isfinite(panel.values[date]).all(axis=1), run + 1, 0)
        np.testing.assert_array_equal(panel.history[date], run)


def test_a_panel_holds_the_sources_rows_and_nan_elsewhere(make_table: Callable[..., pa.Table], tmp_path: Path) -> None:
    table = make_table()
    panel = Panel.build(table, tmp_path, features=["f2", "f0"], targets=["ret", "f1"])
    assert panel.values.dtype == np.float32
    assert (panel.feature_names, panel.target_names) == (("f2", "f0"), ("ret", "f1"))
    assert panel.num_rows == table.num_rows
    assert_holds(panel, table, ["f2", "f0"], ["ret", "f1"])


def test_the_first_and_last_row_of_an_asset_are_its_listing_and_delisting(tmp_path: Path) -> None:
    rows = {"A": ["02", "03", "04"], "B": ["03"], "C": ["02", "04"]}
    table = pa.Table.from_pylist(
        [{"date": f"2024-01-{day}", "code": code, "f": 1.0} for code, days in rows.items() for day in days]
    )
    panel = Panel.build(table, tmp_path, features=["f"])
    assert panel.first_dates.astype(str).tolist() == ["2024-01-02", "2024-01-03", "2024-01-02"]
    assert panel.last_dates.astype(str).tolist() == ["2024-01-04", "2024-01-03", "2024-01-04"]


def test_history_says_where_windows_are_whole(make_table: Callable[..., pa.Table], tmp_path: Path) -> None:
    panel = Panel.build(make_table(25, 9), tmp_path, features=["f0", "f1", "f2"], targets=["ret"])
    for lookback in (1, 3, 26):
        expected = np.zeros(panel.shape[:2], bool)
        for date in range(lookback - 1, 25):
            expected[date] = np.isfinite(panel.values[date - lookback + 1 : date + 1]).all(axis=(0, 2))
        np.testing.assert_array_equal(panel.history >= lookback, expected)
    with pytest.raises(DataError, match="no target"):
        panel.target("rett")


def test_the_fingerprint_and_the_bytes_of_a_panel_are_those_of_earlier_versions(tmp_path: Path) -> None:
    rows = pa.table({"date": ["2024-01-02", "2024-01-02", "2024-01-03"], "code": ["A", "B", "B"], "f": [1.0, 2.0, 3.0]})
    panel = Panel.build(rows, tmp_path, features=["f"])
    assert panel.fingerprint[:16] == "87468d3818176a7c"
    assert hashlib.sha256((panel.path / "manifest.json").read_bytes()).hexdigest()[:16] == "b91ec5cf71128d86"


def test_the_newest_panel_of_a_cache_folder_is_found(panel: Panel, make_table: Callable[..., pa.Table]) -> None:
    assert Panel.newest(panel.path).path == panel.path
    later = Panel.build(make_table(seed=1), panel.path.parent, features=["f0"])
    assert Panel.newest(panel.path.parent).path == later.path
    empty = panel.path.parent / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match="holds no panel"):
        Panel.newest(empty)


cells = st.dictionaries(
    st.tuples(st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1)), st.text(max_size=3)),
    st.tuples(*[st.none() | st.floats(width=32) for _ in range(3)]),
    min_size=1,
    max_size=12,
)


@pytest.mark.proves("S2-07")
@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=cells, order=st.randoms(use_true_random=False))
def test_any_table_in_any_order_comes_back_as_it_was(cells: dict[Any, Any], order: Any, tmp_path: Path) -> None:
    rows = list(cells.items())
    order.shuffle(rows)
    columns = {
        "date": pa.array([date for (date, _), _ in rows], pa.date32()),
        "code": pa.array([code for (_, code), _ in rows], pa.string()),
    }
    for j, name in enumerate(("f0", "f1", "ret")):
        columns[name] = pa.array([values[j] for _, values in rows], pa.float32())
    table = pa.table(columns)
    panel = Panel.build(table, tmp_path, features=["f0", "f1"], targets=["ret"])
    assert_holds(panel, table, ["f0", "f1"], ["ret"])


@pytest.mark.proves("S2-09")
def test_every_array_lies_in_a_read_only_map_of_its_file_and_writing_raises(panel: Panel) -> None:
    for name in NAMES:
        array = getattr(panel, name)
        assert array.base is not None
        lines = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if f"{panel.path}/{name}.npy" in line
        ]
        spans = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in lines]
        assert any(start <= array.ctypes.data and array.ctypes.data + array.nbytes <= end for start, end in spans)
        assert {line.split()[1] for line in lines} == {"r--s"}
        with pytest.raises(ValueError, match="read-only"):
            array[0] = array[0]
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    view = panel.target("ret")
    assert np.shares_memory(view, panel.targets)


@pytest.mark.proves("S0-41")
def test_the_files_are_plain_npy(panel: Panel) -> None:
    for name in NAMES:
        np.testing.assert_array_equal(np.load(panel.path / f"{name}.npy", allow_pickle=False), getattr(panel, name))


def test_a_pickled_panel_is_its_path(panel: Panel) -> None:
    content = pickle.dumps(panel)
    assert len(content) < 1024
    again = pickle.loads(content)
    assert (again.path, again.fingerprint, again.reused) == (panel.path, panel.fingerprint, True)
    np.testing.assert_array_equal(again.values, panel.values)


def test_a_panel_says_what_it_is(panel: Panel) -> None:
    assert panel.path.is_absolute()
    assert panel.path.name == panel.fingerprint[:16]
    assert panel.parameters == {"horizon": 5, "name": "x"}
    assert panel.shape == panel.values.shape
    assert panel.nbytes == sum(f.stat().st_size for f in panel.path.iterdir() if f.name != "manifest.json")
    assert "12 dates x 7 assets x 3 features" in repr(panel)


def test_a_target_that_is_not_there_is_refused_with_the_nearest_name(panel: Panel) -> None:
    with pytest.raises(DataError, match="did you mean 'ret'"):
        panel.target("rett")


@pytest.mark.proves("S0-44", "C-19")
@pytest.mark.slow
def test_four_processes_that_read_all_of_it_hold_one_copy(
    large_panel: dict[str, Any], start_child: Callable[..., subprocess.Popen[str]]
) -> None:
    children = [start_child("read", path=large_panel["path"]) for _ in range(4)]
    reports = [json.loads(child.stdout.readline()) for child in children if child.stdout is not None]
    file = Path(large_panel["path"]) / "values.npy"
    shares = []
    for child in children:
        smaps = Path(f"/proc/{child.pid}/smaps").read_text()
        parts = re.findall(rf"{re.escape(str(file))}\n(?:\w+:.*\n)*?Pss: +(\d+) kB", smaps)
        shares.append(sum(int(part) << 10 for part in parts))
    size = file.stat().st_size
    assert 0.99 * size < sum(shares) < 1.01 * size
    assert max(shares) < 0.26 * size
    assert len({report["total"] for report in reports}) == 1
    assert max(report["grown_bytes"] for report in reports) < 0.05 * size
