"""Built by exactly one process, whole or not at all, and found again only when nothing changed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from memfit.data import Panel, _build, _publish
from memfit.errors import DataError

FEATURES, TARGETS = ["f0", "f1", "f2"], ["ret"]
Start = Callable[..., "subprocess.Popen[str]"]


def reference(parquet: Path, tmp_path: Path) -> str:
    """The digest of the values that an undisturbed build gives."""
    panel = Panel.build(parquet, tmp_path / "reference", features=FEATURES, targets=TARGETS)
    return hashlib.sha256(panel.values.tobytes()).hexdigest()


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob(".*.building"))


def wait_for(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdout is not None
    assert any(found.strip() == line for found in child.stdout), f"the child ended before it said {line!r}"


def kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL


def arguments(parquet: Path, directory: Path, **more: Any) -> dict[str, Any]:
    return {"source": parquet, "directory": directory, "features": FEATURES, "targets": TARGETS, **more}


@pytest.mark.core
@pytest.mark.proves("S0-06")
def test_four_processes_that_ask_at_once_build_once_and_read_the_same(
    parquet: Path, tmp_path: Path, start_child: Start
) -> None:
    go, log = tmp_path / "go", tmp_path / "log"
    children = [start_child("build", **arguments(parquet, tmp_path / "panels", go=go, log=log)) for _ in range(4)]
    for child in children:
        wait_for(child, "ready")
    go.touch()
    reports = [json.loads(child.communicate(timeout=60)[0].splitlines()[-1]) for child in children]
    assert len(log.read_text().splitlines()) == 1
    assert sorted(report["reused"] for report in reports) == [False, True, True, True]
    assert {report["digest"] for report in reports} == {reference(parquet, tmp_path)}


@pytest.mark.slow
def test_who_waits_for_a_builder_that_is_killed_builds_in_its_place(
    parquet: Path, tmp_path: Path, start_child: Start
) -> None:
    first = start_child("build", **arguments(parquet, tmp_path / "panels", stop_at=0.5))
    wait_for(first, "stopped")
    second = start_child("build", **arguments(parquet, tmp_path / "panels"))
    wait_for(second, "ready")
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(1.0)
    kill(first)
    report = json.loads(second.communicate(timeout=60)[0].splitlines()[-1])
    assert not report["reused"]
    assert report["digest"] == reference(parquet, tmp_path)


@pytest.mark.slow
def test_another_panels_builder_is_swept_when_dead_and_left_alone_when_alive(
    parquet: Path, tmp_path: Path, start_child: Start
) -> None:
    panels = tmp_path / "panels"
    dead = start_child("build", **arguments(parquet, panels, stop_at=0.5, parameters={"who": "dead"}))
    alive = start_child("build", **arguments(parquet, panels, stop_at=0.5, parameters={"who": "alive"}))
    for child in (dead, alive):
        wait_for(child, "stopped")
    kill(dead)
    assert len(leftovers(panels)) == 2
    Panel.build(parquet, panels, features=FEATURES)
    assert len(leftovers(panels)) == 1
    report = json.loads(alive.communicate("\n", timeout=60)[0].splitlines()[-1])
    assert not report["reused"]
    Panel.open(report["path"], verify="full")
    assert leftovers(panels) == []


@pytest.mark.proves("S2-07")
def test_building_takes_little_private_memory_whatever_the_panels_size(large_panel: dict[str, Any]) -> None:
    assert large_panel["nbytes"] > 190 << 20
    assert 0 < large_panel["grown_bytes"] < 112 << 20


@pytest.mark.proves("S0-42")
def test_a_lock_whose_file_goes_after_each_error_has_one_holder_at_a_time(tmp_path: Path) -> None:
    def hold(number: int) -> None:
        with suppress(RuntimeError), _publish.locked(tmp_path / "panel"):
            (tmp_path / "held").mkdir()
            time.sleep(0.001)
            (tmp_path / "held").rmdir()
            raise RuntimeError(number)

    with ThreadPoolExecutor(max_workers=4) as pool:
        assert list(pool.map(hold, range(40))) == [None] * 40
    assert not list(tmp_path.iterdir())


def test_a_source_that_only_moved_is_reused_without_writing_into_the_cache(parquet: Path, tmp_path: Path) -> None:
    panels = tmp_path / "panels"
    panel = Panel.build(parquet, panels, features=FEATURES)
    for lock in panels.glob(".*.lock"):
        lock.unlink()
    before = panels.stat().st_mtime_ns
    again = Panel.build(parquet.rename(tmp_path / "moved.parquet"), panels, features=FEATURES)
    assert (panel.reused, again.reused) == (False, True)
    assert again.path == panel.path
    assert panels.stat().st_mtime_ns == before


@pytest.mark.proves("S0-43", "C-20")
def test_a_changed_value_column_type_parameter_or_code_version_is_a_miss_that_says_why(
    make_table: Callable[..., pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table()

    def build(source: pa.Table = table, **changes: Any) -> Panel:
        given = {"features": ["f0", "f1"], "targets": ["ret"], "parameters": {"horizon": 5}, **changes}
        return Panel.build(source, tmp_path, **given)

    first = build()
    assert first.changed == ()
    value = pc.if_else(pa.array(np.arange(table.num_rows) == 3), 0.125, table["f1"])
    expected = {
        ("content",): lambda: build(table.set_column(table.schema.get_field_index("f1"), "f1", value)),
        ("content", "columns", "features"): lambda: build(features=["f0", "f2"]),
        ("features",): lambda: build(features=["f1", "f0"]),
        ("parameters",): lambda: build(parameters={"horizon": 6}),
    }
    seen = {first.fingerprint}
    for changed, make in expected.items():
        panel = make()
        assert not panel.reused
        assert set(changed) <= set(panel.changed)
        seen.add(panel.fingerprint)
        assert build().reused
    monkeypatch.setattr(_build, "BUILD_VERSION", _build.BUILD_VERSION + 1)
    newer = build()
    assert not newer.reused
    assert "build_version" in newer.changed
    assert len({*seen, newer.fingerprint}) == len(expected) + 2


def test_equal_tables_are_a_hit_whatever_their_chunks_and_the_garbage_under_their_nulls(tmp_path: Path) -> None:
    def table(hidden: float, chunks: int) -> pa.Table:
        values = pa.Array.from_buffers(
            pa.float64(), 4, [pa.py_buffer(bytes([0b1011])), pa.py_buffer(np.array([1.0, 2.0, hidden, 4.0]).tobytes())]
        )
        whole = pa.table({"date": ["2024-01-01"] * 4, "code": list("abcd"), "f0": values})
        return pa.concat_tables(whole.slice(i, 4 // chunks) for i in range(0, 4, 4 // chunks))

    assert not Panel.build(table(3.0, 1), tmp_path, features=["f0"]).reused
    assert Panel.build(table(-7.0, 4), tmp_path, features=["f0"]).reused


def test_a_source_that_changes_during_the_build_is_refused_and_leaves_nothing(parquet: Path, tmp_path: Path) -> None:
    def touch(done: int, total: int) -> None:
        os.utime(parquet, ns=(done, done))

    with pytest.raises(DataError, match="changed while"):
        Panel.build(parquet, tmp_path / "panels", features=FEATURES, progress=touch)
    assert not list((tmp_path / "panels").glob("[!.]*"))
    assert leftovers(tmp_path / "panels") == []


def test_progress_goes_from_none_to_all_rows(parquet: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    panel = Panel.build(parquet, tmp_path, features=FEATURES, progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, panel.num_rows)
    assert seen[-1] == (panel.num_rows, panel.num_rows)
    assert seen == sorted(seen)


@pytest.mark.parametrize("rows", [[0, 1, 0], [0, 1, 2, 2]])
def test_a_date_and_asset_that_come_twice_are_named(
    make_table: Callable[..., pa.Table], tmp_path: Path, rows: list[int]
) -> None:
    table = make_table().take(rows)
    date, code = table["date"][rows[-1]].as_py(), table["code"][rows[-1]].as_py()
    with pytest.raises(DataError, match=f"more than one row.*{str(date)[:10]}, {code}"):
        Panel.build(table, tmp_path, features=FEATURES)
    assert not list(tmp_path.iterdir())


def test_a_date_and_asset_that_come_again_much_later_are_named(
    make_table: Callable[..., pa.Table], tmp_path: Path
) -> None:
    table = make_table(200, 400, 1, missing=0.0)
    with pytest.raises(DataError, match="more than one row"):
        Panel.build(pa.concat_tables([table, table.slice(5, 1)]), tmp_path, features=["f0"])


def test_a_finite_value_that_float32_cannot_hold_is_refused(tmp_path: Path) -> None:
    table = pa.table({"date": ["2024-01-01"], "code": ["a"], "f0": [1.0], "ret": [1e39]})
    with pytest.raises(DataError, match=r"column 'ret' holds .*float32 cannot hold"):
        Panel.build(table, tmp_path, features=["f0"], targets=["ret"])
    infinite = table.set_column(3, "ret", pa.array([float("inf")]))
    panel = Panel.build(infinite, tmp_path, features=["f0"], targets=["ret"])
    assert np.isinf(panel.targets).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": []}, "at least one feature"),
        ({"index": ("date", "date")}, r"index is \('date', 'date'\)"),
        ({"features": ["f0", "f0"]}, "named once"),
        ({"targets": ["ret", "ret"]}, "named once"),
        ({"parameters": {"when": object()}}, "written as JSON"),
        ({"parameters": {"limit": float("nan")}}, "written as JSON"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_read(
    make_table: Callable[..., pa.Table], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Panel.build(make_table(), tmp_path, **{"features": ["f0"], **changes})


def test_an_empty_source_is_refused(make_table: Callable[..., pa.Table], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        Panel.build(make_table().slice(0, 0), tmp_path, features=["f0"])


def test_too_little_room_is_refused_with_the_bytes_needed_and_free(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(DataError, match=r"needs .*\(1457088 bytes\) on disk; 1.0 MiB \(1048576 bytes\) are free"):
        Panel.build(parquet, tmp_path / "panels", features=FEATURES)
    assert leftovers(tmp_path / "panels") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.root
def test_a_disk_that_fills_up_is_a_data_error_that_leaves_nothing(parquet: Path, small_disk: Path) -> None:
    def build() -> Panel:
        return Panel.build(parquet, small_disk, features=FEATURES, targets=TARGETS)

    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(13 << 17))
    with pytest.raises(DataError, match=r"could not be written \(No space left.* it needs 1\.5 MiB \(1553088 bytes\)"):
        build()
    assert leftovers(small_disk) == []
    assert not list(small_disk.glob("[!.]*[!t]"))
    ballast.unlink()
    assert not build().reused


def test_the_order_of_files_and_rows_does_not_change_the_values(
    make_table: Callable[..., pa.Table], tmp_path: Path
) -> None:
    table = make_table()
    halves = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    pq.write_table(table.slice(0, 30), halves[0])
    pq.write_table(table.slice(30), halves[1])
    whole = Panel.build(table, tmp_path / "panels", features=FEATURES)
    parts = Panel.build(halves, tmp_path / "panels", features=FEATURES)
    backwards = Panel.build(halves[::-1], tmp_path / "panels", features=FEATURES)
    np.testing.assert_array_equal(whole.values, parts.values)
    assert backwards.reused
    assert backwards.path == parts.path
