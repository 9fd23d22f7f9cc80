"""What a column will take in memory is known before it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from memfit.data import column_sizes
from memfit.errors import DataError

NUM_ROWS = 60_000


def varied_table() -> pa.Table:
    rng = np.random.default_rng(0)
    code = pa.array([f"stock {number}" for number in rng.integers(0, 3000, NUM_ROWS)])
    return pa.table(
        {
            "f64": rng.random(NUM_ROWS),
            "f32": rng.random(NUM_ROWS).astype(np.float32),
            "half_null": pa.array(rng.random(NUM_ROWS), mask=rng.random(NUM_ROWS) < 0.5),
            "flag": rng.random(NUM_ROWS) < 0.5,
            "null_flag": pa.array(rng.random(NUM_ROWS) < 0.5, mask=rng.random(NUM_ROWS) < 0.5),
            "small": rng.integers(0, 100, NUM_ROWS).astype(np.int8),
            "null_small": pa.array(rng.integers(0, 100, NUM_ROWS).astype(np.int16), mask=rng.random(NUM_ROWS) < 0.5),
            "day": pa.array(np.datetime64("2024-01-01") + rng.integers(0, 99, NUM_ROWS)),
            "stamp": pa.array(np.arange(NUM_ROWS), pa.timestamp("us")),
            "code": code,
            "dictionary": code.dictionary_encode(),
            "price": pa.array(rng.integers(0, 99999, NUM_ROWS)).cast(pa.decimal128(21, 2)),
            "list": pa.array([[1.0, 2.0, 3.0]] * NUM_ROWS),
            "dotted.name": rng.random(NUM_ROWS),
        }
    )


WRITERS: dict[str, Callable[[pa.Table, Path], Any]] = {
    "parquet": lambda table, path: pq.write_table(table, path, row_group_size=20_000),
    "parquet without statistics": lambda table, path: pq.write_table(table, path, write_statistics=False),
    "feather": lambda table, path: feather.write_feather(table, path, compression="uncompressed"),
    "compressed feather": lambda table, path: feather.write_feather(table, path, compression="zstd"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_columns_size_in_memory_is_predicted_within_ten_percent(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "source"
    WRITERS[writer](varied_table(), path)
    read = pq.read_table(path) if writer.startswith("parquet") else None
    if read is None:
        with pa.memory_map(str(path)) as mapped:
            read = pa.ipc.open_file(mapped).read_all()
    sizes = column_sizes(path)
    assert [size.name for size in sizes] == read.column_names
    for size in sizes:
        assert size.memory_bytes == pytest.approx(read[size.name].nbytes, rel=0.1), size
    assert sum(size.memory_bytes for size in sizes) == pytest.approx(read.nbytes, rel=0.03)
    if writer == "compressed feather":
        assert all(size.disk_bytes is None and size.ratio is None and not size.is_absurd for size in sizes)
    else:
        assert sum(size.disk_bytes or 0 for size in sizes) == pytest.approx(path.stat().st_size, rel=0.1)


def test_a_tiny_file_that_grows_absurdly_is_flagged(tmp_path: Path) -> None:
    path = tmp_path / "flat.parquet"
    rows = 4_000_000
    with pq.ParquetWriter(path, pa.schema([("zero", pa.float64()), ("name", pa.string())])) as writer:
        writer.write_table(pa.table({"zero": np.zeros(rows), "name": pa.repeat("x" * 30, rows)}))
    assert path.stat().st_size < 50_000
    sizes = {size.name: size for size in column_sizes(path)}
    assert sizes["zero"].memory_bytes == rows * 8 + rows // 8
    assert sizes["name"].memory_bytes == pytest.approx(rows * 34, rel=0.01)
    assert all(size.is_absurd for size in sizes.values())


def test_an_ordinary_column_and_a_small_one_are_not_flagged(tmp_path: Path) -> None:
    pq.write_table(varied_table().select(["f64", "code"]), tmp_path / "a.parquet")
    pq.write_table(pa.table({"zero": np.zeros(10_000)}), tmp_path / "b.parquet")
    assert not any(size.is_absurd for size in column_sizes(tmp_path))


def test_sizes_add_up_over_files_and_a_table_has_none_on_disk(tmp_path: Path) -> None:
    table = varied_table().select(["f32"])
    for name in ("a.parquet", "b.parquet"):
        pq.write_table(table, tmp_path / name)
    [one], [two] = column_sizes(tmp_path / "a.parquet"), column_sizes(tmp_path)
    assert (two.disk_bytes, two.memory_bytes) == (2 * (one.disk_bytes or 0), 2 * one.memory_bytes)
    [size] = column_sizes(table)
    assert (size.name, size.type, size.disk_bytes, size.memory_bytes) == ("f32", "float", None, NUM_ROWS * 4)


def test_a_torn_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(DataError, match=r"torn\.parquet cannot be read"):
        column_sizes(tmp_path / "torn.parquet")
