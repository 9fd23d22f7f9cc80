"""A later version goes on where the old one ends, and is the panel of all dates."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.data import Panel, _versions, prune, versions
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


def test_a_version_has_the_files_of_a_panel_built_at_once_and_shares_none(grown: tuple[Panel, Panel, Panel]) -> None:
    old, new, whole = grown
    for file in whole.path.glob("*.npy"):
        assert (new.path / file.name).read_bytes() == file.read_bytes()
        assert (new.path / file.name).stat().st_nlink == (old.path / file.name).stat().st_nlink == 1
    assert {file.name for file in new.path.iterdir()} == {file.name for file in whole.path.iterdir()}


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    borders=st.lists(st.integers(1, 39), min_size=1, max_size=4, unique=True).map(sorted),
    num_assets=st.integers(1, 9),
    num_features=st.integers(1, 3),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
)
def test_any_cuts_give_the_same_panel(
    make_table: Callable[..., pa.Table],
    tmp_path_factory: pytest.TempPathFactory,
    borders: list[int],
    num_assets: int,
    num_features: int,
    dtype: str,
) -> None:
    folder = tmp_path_factory.mktemp("cuts")
    # Every asset and date has a row, so that each part has both.
    table = make_table(40, num_assets, num_features, missing=0.0)
    table = table.set_column(2, "f0", pc.if_else(pa.array(np.arange(table.num_rows) % 5 == 0), None, table["f0"]))
    roles: dict[str, Any] = {
        "features": [f"f{j}" for j in range(num_features)], "targets": ["ret"][: len(borders) % 2], "dtype": dtype
    }  # fmt: skip
    parts = cut(table, *borders)
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
    assert Panel.newest(tmp_path).path == other.path


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


@pytest.mark.parametrize("name", ["values.npy", "targets.npy", "history.npy", "present.npy"])
def test_damage_in_the_old_bytes_is_named_and_not_passed_on(grown: tuple[Panel, Panel, Panel], name: str) -> None:
    _, new, whole = grown
    row = {"date": "2030-01-01", "code": "A001", "f0": 1.0, "f1": 1.0, "f2": 1.0, "ret": 1.0}
    later = pa.Table.from_pylist([row])
    content = bytearray((new.path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (new.path / name).write_bytes(content)
    with pytest.raises(DamagedError, match=name):
        new.append(later)
    assert not list(new.path.parent.glob(".*.building"))
    assert whole.append(later).shape[0] == 51


def test_a_missing_file_is_named(grown: tuple[Panel, Panel, Panel]) -> None:
    _, new, _ = grown
    (new.path / "values.npy").unlink()
    with pytest.raises(DamagedError, match=r"values\.npy is not there"):
        Panel.open(new.path)
    with pytest.raises(DamagedError, match="cannot be mapped"):
        _ = Panel(new.path, new.manifest, reused=True).values


@pytest.mark.slow
def test_a_killed_append_leaves_no_version_and_the_next_one_writes_it(
    make_table: Callable[..., pa.Table], tmp_path: Path, start_child: Start
) -> None:
    first, second = cut(make_table(60, 300), 30)
    pq.write_table(second, tmp_path / "new.parquet")
    panel = Panel.build(first, tmp_path / "panels", **ROLES)
    child = start_child("append", panel=panel.path, source=tmp_path / "new.parquet", stop_at=1.0)
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


def test_too_little_room_says_what_the_new_dates_need(
    make_table: Callable[..., pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cut(make_table(60, 300), 30)
    panel = Panel.build(first, tmp_path, **ROLES)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1024))
    with pytest.raises(DataError, match=r"with 30 more dates needs \d\.\d MiB \(\d+ bytes\) on disk; 1\.0 KiB"):
        panel.append(second)
    assert versions(tmp_path) == [panel.path]


@pytest.mark.parametrize("is_begun", [False, True], ids=["refused", "refused half-way"])
def test_where_the_kernel_cannot_copy_the_bytes_are_read_and_written(
    make_table: Callable[..., pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    first, second = cut(make_table(60, 300), 30)
    panel = Panel.build(first, tmp_path, **ROLES)
    copied: list[int] = []

    def refuse(source: int, target: int, count: int) -> int:
        if is_begun and len(copied) % 2 == 0:
            copied.append(os.write(target, os.read(source, 1000)))
            return copied[-1]
        copied.append(0)
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("os.copy_file_range", refuse, raising=False)
    new = panel.append(second)
    assert copied
    new.verify()
    assert_same(new, Panel.build(pa.concat_tables([first, second]), tmp_path / "whole", **ROLES))


def disk_bytes(folder: Path) -> int:
    files = [file.stat() for file in folder.rglob("*") if file.is_file()]
    return sum({file.st_ino: file.st_size for file in files}.values())


def test_old_versions_are_pruned_and_the_newest_still_reads(lineage: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "panels"
    planned = prune(folder, dry_run=True)
    assert [version.removed for version in planned] == [True, True, False]
    assert versions(folder) == lineage
    size = disk_bytes(folder)
    done = prune(folder)
    assert done == planned
    assert versions(folder) == [lineage[2]]
    assert sum(version.freed_bytes for version in done) == size - disk_bytes(folder) > 0
    newest_panel = Panel.open(lineage[2], verify="full")
    assert_same(newest_panel, Panel.newest(tmp_path / "whole"))
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
    lineage: list[Path], tmp_path: Path, start_child: Start
) -> None:
    folder = tmp_path / "panels"
    old, middle, new = lineage
    child = start_child("hold", panel=old, name="values")
    assert child.stdout is not None
    assert int(child.stdout.readline()) == 30 * 400 * 3 * 4
    with FileLock(middle.with_name(f".{middle.name}.lock")):
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

    monkeypatch.setattr(_versions, "_users", users)
    assert prune(tmp_path / "panels")[0].reason == "is mapped by process 123"
    assert seen[:2] == [lineage[0].name, f".{lineage[0].name}.removing"]
    assert versions(tmp_path / "panels") == lineage


def test_prune_keeps_at_least_one_and_wants_a_cache_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no panel"):
        prune(tmp_path)
    with pytest.raises(DataError, match="keep is 0"):
        prune(tmp_path, keep=0)


#: Private memory that appending takes, whatever the size of the panel: about 4 MiB of decoded rows, a buffer of 256 KiB
#: for each column (16 MiB for 64), and the stacks of the threads that hash.
BOUND = 128 << 20


@pytest.mark.slow
def test_appending_stays_below_a_limit_of_private_memory_that_the_panel_exceeds(
    large_panel: dict[str, Any], tmp_path: Path, start_child: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pyarrow's own pool reserves 1 GiB of addresses at once, which the limit counts.
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "system")
    assert large_panel["nbytes"] > 1.5 * BOUND
    dates = np.repeat(np.datetime64("2025-01-01") + np.arange(10), 2000)
    columns = {f"f{j}": np.arange(20_000, dtype=np.float32) for j in range(64)}
    codes = pa.array([f"A{code:05d}" for code in range(2000)] * 10)
    source = tmp_path / "later.parquet"
    pq.write_table(pa.table({"date": dates, "code": codes, **columns}), source)

    def within(bound: int) -> int:
        child = start_child("within", data_bytes_more=bound, panel=large_panel["path"], source=source)
        child.communicate(timeout=120)
        return child.returncode

    assert within(BOUND) == 0
    assert Panel.newest(Path(large_panel["path"]).parent).shape == (410, 2000, 64)
