"""A later version goes on where the old one ends, shares its bytes, and reads as one array."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.data import Panel, _build, windows
from memfit.data import _segments as segments_module
from memfit.data._build import PanelSpec, write_panel
from memfit.data._publish import panel_lock
from memfit.data._source import Source
from memfit.data._versions import newest, prune, versions
from memfit.errors import DamagedError, DataError

ROLES = {"features": ["f0", "f1", "f2"], "targets": ["ret"]}
NAMES = ["values", "targets", "present", "history"]
Start = Callable[..., "subprocess.Popen[str]"]


def cut(table: pa.Table, *days: int) -> list[pa.Table]:
    """A table in parts by date; ``days`` are the first dates of the parts after the first one."""
    number = pc.subtract(pc.cast(pc.cast(table["date"], pa.date32()), pa.int32()), 19723)  # 2024-01-01
    borders = [-1, *days, 1 << 20]
    return [
        table.filter(pc.and_(pc.greater_equal(number, low), pc.less(number, high)))
        for low, high in itertools.pairwise(borders)
    ]


def assert_same(found: Panel, wanted: Panel) -> None:
    assert (found.shape, found.assets, found.num_rows) == (wanted.shape, wanted.assets, wanted.num_rows)
    np.testing.assert_array_equal(found.dates, wanted.dates)
    for name in NAMES:
        left, right = getattr(found, name), getattr(wanted, name)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def spans(path: Path) -> list[tuple[int, int, str, str]]:
    """Start, end, rights and file of each map of a panel's files in this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5].startswith(f"{path}/"):
            first, last = (int(part, 16) for part in parts[0].split("-"))
            found.append((first, last, parts[1], Path(parts[5]).name))
    return sorted(found)


@pytest.fixture
def grown(make_table: Callable[..., pa.Table], tmp_path: Path) -> tuple[Panel, Panel, Panel]:
    """A panel of 30 dates, the version with 13 and 7 more, and one built of them all."""
    return grow(make_table, tmp_path)


@pytest.fixture
def lineage(make_table: Callable[..., pa.Table], tmp_path: Path) -> list[Path]:
    """The folders of the same three versions, none of which this process maps any more."""
    grow(make_table, tmp_path)
    return versions(tmp_path / "panels")


def grow(make_table: Callable[..., pa.Table], tmp_path: Path) -> tuple[Panel, Panel, Panel]:
    whole = make_table(50, 400)
    first, second, third = cut(whole, 30, 43)
    old = Panel.build(first, tmp_path / "panels", **ROLES)
    new = old.append(second).append(third)
    return old, new, Panel.build(whole, tmp_path / "whole", **ROLES)


def test_an_appended_version_is_the_panel_of_all_dates(grown: tuple[Panel, Panel, Panel]) -> None:
    old, new, whole = grown
    assert_same(new, whole)
    assert (old.shape[0], new.shape[0]) == (30, 50)
    assert new.parent not in (None, old.fingerprint)
    assert old.parent is None
    for panel in (old, new):
        Panel.open(panel.path, verify="full")
    assert_same(pickle.loads(pickle.dumps(new)), whole)


def test_all_but_64_kib_of_an_old_array_are_shared(grown: tuple[Panel, Panel, Panel]) -> None:
    old, new, _ = grown
    assert (old.path / "values.npy").samefile(new.path / "values.npy")
    assert new.shared_bytes >= (old.path / "values.npy").stat().st_size + (old.path / "assets.json").stat().st_size
    rows = 20 * 400 * 3 * 4
    own = sum(file.stat().st_size for file in new.path.glob("values.*.bin"))
    assert rows <= own < rows + 2 * segments_module.CUT_BYTES


def test_several_files_are_one_read_only_array_without_a_copy(grown: tuple[Panel, Panel, Panel]) -> None:
    _, new, whole = grown
    files = sorted(file.name for file in new.path.glob("values.*"))
    assert len(files) == 3
    values = new.values
    assert values.flags.c_contiguous and not values.flags.owndata
    first, last = values.ctypes.data, values.ctypes.data + values.nbytes
    found = [span for span in spans(new.path) if span[0] < last and span[1] > first]
    assert sorted(span[3] for span in found) == files
    assert {span[2] for span in found} == {"r--s"}
    assert found[0][0] <= first and last <= found[-1][1]
    assert all(left[1] == right[0] for left, right in itertools.pairwise(found))
    with pytest.raises(ValueError, match="read-only"):
        values[0, 0, 0] = 1.0
    with pytest.raises(ValueError, match="WRITEABLE"):
        values.flags.writeable = True
    for date in (29, 30, 42, 43, 49):
        window = windows(new, date, 20)
        assert np.shares_memory(window, values)
        np.testing.assert_array_equal(window, windows(whole, date, 20))
    view = new.target("ret")
    assert np.shares_memory(view, new.targets)


def test_the_maps_are_gone_with_the_last_view(grown: tuple[Panel, Panel, Panel]) -> None:
    new = Panel.open(grown[1].path)
    view = new.values[31:33]
    total = float(np.nansum(view))
    del new
    assert spans(grown[1].path)
    assert float(np.nansum(view)) == total
    del view
    assert not [span for span in spans(grown[1].path) if span[3].startswith("values")]


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    borders=st.lists(st.integers(1, 39), min_size=1, max_size=4, unique=True).map(sorted),
    num_assets=st.integers(1, 9),
    num_features=st.integers(1, 3),
    dtype=st.sampled_from(["float16", "float32", "float64", "bfloat16"]),
    cut_bytes=st.sampled_from([4096, 8192]),
)
def test_any_cuts_give_the_same_panel(
    make_table: Callable[..., pa.Table],
    tmp_path_factory: pytest.TempPathFactory,
    borders: list[int],
    num_assets: int,
    num_features: int,
    dtype: str,
    cut_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("cuts")
    # Every asset and date has a row, so that each part has both.
    table = make_table(40, num_assets, num_features, missing=0.0)
    table = table.set_column(2, "f0", pc.if_else(pa.array(np.arange(table.num_rows) % 5 == 0), None, table["f0"]))
    roles: dict[str, Any] = {
        "features": [f"f{j}" for j in range(num_features)], "targets": ["ret"][: len(borders) % 2], "dtype": dtype
    }  # fmt: skip
    parts = cut(table, *borders)
    with pytest.MonkeyPatch.context() as patch:
        for module in (segments_module, _build):
            patch.setattr(module, "CUT_BYTES", cut_bytes)
        panel = Panel.build(parts[0], folder, **roles)
        for part in parts[1:]:
            panel = panel.append(part)
            panel.verify()
    assert_same(panel, Panel.build(table, folder / "whole", **roles))
    shutil.rmtree(folder)


def test_the_same_append_is_found_again_and_another_one_is_another_version(
    make_table: Callable[..., pa.Table], tmp_path: Path
) -> None:
    first, second, third = cut(make_table(30, 20), 10, 20)
    old = Panel.build(first, tmp_path, **ROLES)
    new = old.append(second)
    assert not new.reused
    again = old.append(second)
    assert again.reused
    assert again.path == new.path
    other = old.append(third)
    assert other.path not in (old.path, new.path)
    assert len(versions(tmp_path)) == 3
    assert newest(tmp_path) == other.path


@pytest.mark.parametrize("border", [9, 5, 0])
def test_old_and_restated_dates_are_refused(make_table: Callable[..., pa.Table], tmp_path: Path, border: int) -> None:
    table = make_table(20, 20)
    panel = Panel.build(cut(table, 10)[0], tmp_path, **ROLES)
    with pytest.raises(DataError, match=rf"{10 - border} of the source's {20 - border} dates are not after the panel"):
        panel.append(cut(table, border)[1])
    assert versions(tmp_path) == [panel.path]
    assert {path.name for path in tmp_path.iterdir()} == {panel.path.name, f".{panel.path.name}.lock"}


def test_new_assets_and_other_columns_are_refused(make_table: Callable[..., pa.Table], tmp_path: Path) -> None:
    first, second = cut(make_table(20, 20), 10)
    panel = Panel.build(first, tmp_path, **ROLES)
    listed = second.set_column(1, "code", pc.replace_substring(second["code"], "A003", "B003"))
    with pytest.raises(DataError, match=r"1 assets that the panel has not: B003\."):
        panel.append(listed)
    with pytest.raises(DataError, match="columns named 'f2'"):
        panel.append(second.drop_columns(["f2"]))
    with pytest.raises(DataError, match="more than one row"):
        panel.append(pa.concat_tables([second, second.slice(3, 1)]))
    assert versions(tmp_path) == [panel.path]
    assert not list(tmp_path.glob(".*.building"))


def test_damage_in_the_bytes_that_are_written_again_is_not_passed_on(grown: tuple[Panel, Panel, Panel]) -> None:
    _, new, whole = grown
    row = {"date": "2030-01-01", "code": "A001", "f0": 1.0, "f1": 1.0, "f2": 1.0, "ret": 1.0}
    later = pa.Table.from_pylist([row])
    file = sorted(new.path.glob("values.*.bin"), key=lambda one: int(one.name.split(".")[1]))[-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedError, match=file.name):
        new.append(later)
    assert whole.append(later).shape[0] == 51


def test_a_damaged_or_missing_file_of_any_version_is_named(grown: tuple[Panel, Panel, Panel]) -> None:
    _, new, _ = grown
    for file in new.path.glob("values.*"):
        content = file.read_bytes()
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(DamagedError, match=file.name):
            new.verify()
        file.write_bytes(content)
        file.rename(new.path / "away")
        with pytest.raises(DamagedError, match=f"{file.name} is not there"):
            Panel.open(new.path)
        with pytest.raises(DamagedError, match="cannot be mapped"):
            _ = Panel(new.path, new.manifest, reused=True).values
        (new.path / "away").rename(file)
    new.verify()


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [0.0, 1.0])
def test_a_killed_append_leaves_no_version_and_the_next_one_writes_it(
    make_table: Callable[..., pa.Table], tmp_path: Path, start_panel_child: Start, stop_at: float
) -> None:
    first, second = cut(make_table(60, 300), 30)
    pq.write_table(second, tmp_path / "new.parquet")
    panel = Panel.build(first, tmp_path / "panels", **ROLES)
    child = start_panel_child("append", panel=panel.path, source=tmp_path / "new.parquet", stop_at=stop_at)
    assert child.stdout is not None
    assert child.stdout.readline() == "stopped\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL
    assert versions(tmp_path / "panels") == [panel.path]
    assert len(list((tmp_path / "panels").glob(".*.building"))) == 1
    new = panel.append(tmp_path / "new.parquet")
    assert not new.reused
    new.verify()
    panel.verify()
    assert not list((tmp_path / "panels").glob(".*.building"))
    assert_same(new, Panel.build(pa.concat_tables([first, second]), tmp_path / "whole", **ROLES))


def test_too_little_room_says_what_the_new_dates_need(make_table: Callable[..., pa.Table], tmp_path: Path) -> None:
    first, second = cut(make_table(60, 300), 30)
    panel = Panel.build(first, tmp_path, **ROLES)
    with pytest.raises(DataError, match=r"with 30 more dates needs 1\.\d MiB \(\d+ bytes\) on disk; 1\.0 KiB"):
        write_panel(PanelSpec.of_panel(panel), Source.of(second), tmp_path, base=panel, free=lambda path: 1024)
    assert versions(tmp_path) == [panel.path]


@pytest.mark.slow
def test_a_file_size_limit_met_while_appending_is_a_data_error_that_leaves_nothing(
    make_table: Callable[..., pa.Table], tmp_path: Path, start_panel_child: Start
) -> None:
    first, second = cut(make_table(60, 300), 30)
    panel = Panel.build(first, tmp_path / "panels", **ROLES)
    pq.write_table(second, tmp_path / "new.parquet")
    child = start_panel_child("append", panel=panel.path, source=tmp_path / "new.parquet", max_file_bytes=50_000)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "could not be written (File too large): it needs 1." in errors
    assert versions(tmp_path / "panels") == [panel.path]
    assert not list((tmp_path / "panels").glob(".*.building"))


def test_without_hard_links_the_old_files_are_copied(
    make_table: Callable[..., pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cut(make_table(60, 300), 30)
    panel = Panel.build(first, tmp_path, **ROLES)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    new = panel.append(second)
    assert new.shared_bytes == 0
    new.verify()
    assert_same(new, Panel.build(pa.concat_tables([first, second]), tmp_path / "whole", **ROLES))
    assert not list(tmp_path.glob(".*.building"))


def disk_bytes(folder: Path) -> int:
    files = [file.stat() for file in folder.rglob("*") if file.is_file()]
    return sum({file.st_ino: file.st_size for file in files}.values())


def test_old_versions_are_pruned_and_the_newest_still_reads(lineage: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "panels"
    planned = prune(folder, dry_run=True)
    assert [version.removed for version in planned] == [True, True, False]
    assert versions(folder) == lineage
    before, size = Panel.open(lineage[2]).shared_bytes, disk_bytes(folder)
    done = prune(folder)
    assert done == planned
    assert versions(folder) == [lineage[2]]
    assert sum(version.freed_bytes for version in done) == size - disk_bytes(folder) > 0
    newest_panel = Panel.open(lineage[2], verify="full")
    assert 0 == newest_panel.shared_bytes < before
    assert_same(newest_panel, Panel.open(newest(tmp_path / "whole")))
    assert [version.reason for version in prune(folder)] == ["is the newest"]


def test_the_newest_is_the_version_that_goes_on_from_the_others_whatever_their_times(
    lineage: list[Path], make_table: Callable[..., pa.Table], tmp_path: Path
) -> None:
    folder = tmp_path / "panels"
    for seconds, path in enumerate([lineage[2], lineage[0], lineage[1]]):
        os.utime(path / "manifest.json", (seconds, seconds))
    assert versions(folder) == lineage
    assert Panel.newest(folder).path == lineage[2]
    assert [version.removed for version in prune(folder, dry_run=True)] == [True, True, False]
    other = Panel.build(make_table(seed=1), folder, features=["f0"]).path
    os.utime(lineage[0] / "manifest.json")
    assert versions(folder) == [*lineage, other]


def test_a_version_that_a_process_maps_or_whose_lock_is_held_stays(
    lineage: list[Path], tmp_path: Path, start_panel_child: Start
) -> None:
    folder = tmp_path / "panels"
    old, middle, new = lineage
    child = start_panel_child("hold", panel=old, name="values")
    assert child.stdout is not None
    assert int(child.stdout.readline()) == 30 * 400 * 3 * 4
    with panel_lock(middle):
        reasons = [version.reason for version in prune(folder)]
    assert f"process {child.pid}" in reasons[0]
    assert "lock is held" in reasons[1]
    assert versions(folder) == lineage
    child.communicate("\n", timeout=30)
    assert prune(folder, keep=2)[1].reason == "is among the newest 2"
    assert versions(folder) == [middle, new]


def test_a_version_that_is_mapped_between_the_look_and_the_renaming_comes_back(
    lineage: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def users(folder: str, *_: object) -> list[int]:
        seen.append(folder)
        return [123] if folder.endswith(".removing") else []

    monkeypatch.setattr("memfit.data._versions._users", users)
    assert prune(tmp_path / "panels")[0].reason == "is mapped by process 123"
    assert seen[:2] == [lineage[0].name, f".{lineage[0].name}.removing"]
    assert versions(tmp_path / "panels") == lineage


def test_prune_keeps_at_least_one_and_wants_a_cache_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no panel"):
        prune(tmp_path)
    with pytest.raises(DataError, match="keep is 0"):
        prune(tmp_path, keep=0)
