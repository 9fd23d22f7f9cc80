"""One table with every row that is present, whole or not at all, in little memory."""

from __future__ import annotations

import fcntl
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from memfit.data import Panel, _export
from memfit.errors import DataError

ROLES: dict[str, Any] = {"features": ["f0", "f1", "f2"], "targets": ["ret"]}
Start = Callable[..., "subprocess.Popen[str]"]


def read(file: Path) -> pa.Table:
    if file.suffix == ".parquet":
        return pq.read_table(file)
    return feather.read_table(file)


def as_exported(table: pa.Table, by: list[str], kind: pa.DataType) -> pa.Table:
    """A source's rows as an export has them."""
    columns = {"date": table["date"].cast(pa.date32()), "code": table["code"].cast(pa.string())}
    columns |= {name: table[name].cast(kind) for name in (*ROLES["features"], *ROLES["targets"])}
    return pa.table(columns).sort_by([(name, "ascending") for name in by]).combine_chunks()


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow", ".ipc"])
def test_what_is_read_back_is_the_source(
    make_table: Callable[..., pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(_export, "_BLOCK_BYTES", 4096)  # many blocks, some of them without a row
    table = make_table(40, 30, missing=0.4)
    gap = pc.equal(pc.cast(table["date"], pa.date32()), pa.scalar(19730, pa.int32()).cast(pa.date32()))
    table = table.filter(pc.invert(gap))
    panel = Panel.build(table, tmp_path / "panels", dtype="float64", **ROLES)
    seen: list[tuple[int, int]] = []
    file = tmp_path / f"out{suffix}"
    file.write_bytes(b"old")
    assert panel.export(file, progress=lambda done, total: seen.append((done, total))) == table.num_rows
    assert read(file).combine_chunks().equals(as_exported(table, ["date", "code"], pa.float64()))
    cells = 39 * 30
    assert (seen[0], seen[-1]) == ((0, cells), (cells, cells))
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, "panels"]


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_what_is_built_from_an_export_is_the_same_panel(
    make_table: Callable[..., pa.Table], tmp_path: Path, dtype: str
) -> None:
    panel = Panel.build(make_table(40, 30), tmp_path / "panels", dtype=dtype, **ROLES)
    panel.export(tmp_path / "out.feather")
    kinds = {field.type for field in feather.read_table(tmp_path / "out.feather").schema}
    assert kinds == {pa.date32(), pa.string(), pa.float32()}
    again = Panel.build(tmp_path / "out.feather", tmp_path / "again", dtype=dtype, **ROLES)
    assert (again.assets, again.num_rows) == (panel.assets, panel.num_rows)
    for name in ("values", "targets", "present", "history", "dates"):
        np.testing.assert_array_equal(getattr(again, name), getattr(panel, name))


def test_a_column_of_two_roles_is_exported_once(tmp_path: Path) -> None:
    table = pa.table({"day": ["2024-01-02", "2024-01-03"], "id": [7, 7], "n": [1, -2], "r": [0.5, None]})
    panel = Panel.build(table, tmp_path / "panels", index=("day", "id"), features=["n"], targets=["n", "r"])
    panel.export(tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.schema.names == ["day", "id", "n", "r"]
    assert found.to_pydict()["n"] == [1, -2]
    assert found.to_pydict()["r"] == [0.5, None]
    assert found.to_pydict()["id"] == ["7", "7"]


def test_an_arrow_file_can_be_mapped_again(make_table: Callable[..., pa.Table], tmp_path: Path) -> None:
    Panel.build(make_table(40, 30), tmp_path / "panels", **ROLES).export(tmp_path / "out.feather")
    with pa.memory_map(str(tmp_path / "out.feather")) as mapped:
        before = pa.total_allocated_bytes()
        table = pa.ipc.open_file(mapped).read_all()
        assert table.num_rows == 960
        assert pa.total_allocated_bytes() - before < 4096
        del table


def test_another_suffix_and_a_folder_that_is_not_there_are_refused(
    make_table: Callable[..., pa.Table], tmp_path: Path
) -> None:
    panel = Panel.build(make_table(), tmp_path / "panels", **ROLES)
    for suffix in (".csv", ".arrows"):
        with pytest.raises(DataError, match=rf"has the suffix '\{suffix}'"):
            panel.export(tmp_path / f"out{suffix}")
    with pytest.raises(DataError, match="is no folder"):
        panel.export(tmp_path / "absent" / "out.parquet")


def test_a_killed_export_leaves_the_old_file_and_the_next_one_replaces_it(
    make_table: Callable[..., pa.Table], tmp_path: Path, start_panel_child: Start
) -> None:
    panel = Panel.build(make_table(40, 30), tmp_path / "panels", **ROLES)
    file = tmp_path / "out.parquet"
    panel.export(file)
    whole = file.read_bytes()
    child = start_panel_child("export", panel=panel.path, file=file, stop_at=1.0)
    assert child.stdout is not None
    assert child.stdout.readline() == "stopped\n"
    with pytest.raises(DataError, match="another process exports"):
        panel.export(file)
    child.send_signal(signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL
    assert file.read_bytes() == whole
    assert len(list(tmp_path.glob(".*.exporting"))) == 1
    panel.export(file)
    assert pq.read_table(file).num_rows == panel.num_rows
    assert list(tmp_path.glob(".*.exporting")) == []


def test_who_locks_a_file_that_was_just_renamed_into_place_does_not_empty_it(
    make_table: Callable[..., pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = Panel.build(make_table(), tmp_path / "panels", **ROLES)
    file, aside = tmp_path / "out.parquet", tmp_path / ".out.parquet.exporting"
    flock = fcntl.flock

    def renamed_meanwhile(*arguments: Any) -> None:
        aside.rename(file)
        file.write_bytes(b"whole")
        flock(*arguments)

    monkeypatch.setattr(_export.fcntl, "flock", renamed_meanwhile)
    with pytest.raises(DataError, match="another process exports"):
        panel.export(file)
    assert file.read_bytes() == b"whole"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
def test_a_disk_that_is_full_is_a_data_error_that_leaves_the_old_file(
    make_table: Callable[..., pa.Table], tmp_path: Path, start_panel_child: Start, suffix: str
) -> None:
    panel = Panel.build(make_table(200, 300), tmp_path / "panels", **ROLES)
    file = tmp_path / f"out{suffix}"
    file.write_bytes(b"old")
    child = start_panel_child("export", panel=panel.path, file=file, max_file_bytes=100_000)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    found = re.search(r"could not be written \(File too large\): it needs .* \((\d+) bytes\)", errors)
    assert found is not None, errors[-2000:]
    assert int(found[1]) > 48_000 * (4 + 4 * 4)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.glob(".*.exporting")) == []


#: Private memory that appending to a panel and exporting it take, whatever its size: a few blocks of 8 MiB, about 4 MiB
#: of decoded rows, a buffer of 256 KiB for each column (16 MiB for 64), and the stacks of the threads that hash.
BOUND = 128 << 20


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts maps on Linux only")
def test_appending_and_exporting_stay_below_a_limit_of_private_memory_that_the_panel_exceeds(
    large_panel: dict[str, Any], tmp_path: Path, start_panel_child: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pyarrow's own pool reserves 1 GiB of addresses at once, which the limit counts.
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "system")
    assert large_panel["nbytes"] > 1.5 * BOUND
    dates = np.repeat(np.datetime64("2025-01-01") + np.arange(10), 2000)
    columns = {f"f{j}": np.arange(20_000, dtype=np.float32) for j in range(64)}
    codes = pa.array([f"A{code:05d}" for code in range(2000)] * 10)
    pq.write_table(pa.table({"date": dates, "code": codes, **columns}), tmp_path / "later.parquet")

    def within(task: str, bound: int, **arguments: Any) -> int:
        child = start_panel_child("within", task=task, data_bytes_more=bound, panel=large_panel["path"], **arguments)
        child.communicate(timeout=120)
        return child.returncode

    assert within("export", BOUND, file=tmp_path / "out.feather") == 0
    assert within("export", BOUND // 8, file=tmp_path / "none.feather") != 0  # the limit is real
    assert within("append", BOUND, source=tmp_path / "later.parquet") == 0
    newest = Panel.newest(Path(large_panel["path"]).parent)
    assert newest.shape == (410, 2000, 64)
    assert newest.shared_bytes > 190 << 20
    with pa.memory_map(str(tmp_path / "out.feather")) as mapped:
        assert pa.ipc.open_file(mapped).read_all().num_rows == 800_000
