"""What a column takes on disk and in memory, against what pandas and the files really take."""

import datetime
import decimal
import sys

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from memfit.data import column_sizes
from memfit.errors import DataError

ROWS = 20_000
pd = pytest.importorskip("pandas")


def columns():
    rng = np.random.default_rng(0)
    number = np.arange(ROWS)
    missing = number % 7 == 0
    return {
        "double": rng.standard_normal(ROWS),
        "single": rng.standard_normal(ROWS).astype(np.float32),
        "constant": np.zeros(ROWS),
        "small": (number % 100).astype(np.int8),
        "small with gaps": pa.array((number % 100).astype(np.int8), mask=missing),
        "truth": number % 2 == 0,
        "truth with gaps": pa.array(number % 2 == 0, mask=missing),
        "time": number.astype("datetime64[s]"),
        "day": pa.array([datetime.date(2024, 1, 1) + datetime.timedelta(int(n) % 500) for n in number]),
        "clock": pa.array(number.astype(np.int32), pa.time32("s")),
        "price": pa.array([decimal.Decimal(int(n)) / 100 for n in number]),
        "few words": pa.array([f"code {n % 30}" for n in number]),
        "many words": pa.array([f"{n} is number {n}" * (1 + n % 5) for n in number]),
        "words with gaps": pa.array([f"é{n}" for n in number], mask=missing),
        "bytes": pa.array([b"x" * (n % 50) + str(n).encode() for n in number]),
        "category": pa.array([f"code {n % 3000}" for n in number]).dictionary_encode(),
        "record": pa.array([{"a": 1.5 * n, "b": str(n)} for n in number]),
    }


def held(values):
    """Bytes of an object array: its pointers, and each object once."""
    return 8 * len(values) + sum(map(sys.getsizeof, {id(one): one for one in values if one is not None}.values()))


def as_pandas3(column):
    read = pa.table({"one": column}).to_pandas()["one"]
    return held(read.array) if read.dtype == object else read.memory_usage(index=False, deep=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("sizes") / "all.parquet"
    pq.write_table(pa.table(columns()), path, row_group_size=7000)
    return path


@pytest.fixture(scope="module")
def found(written):
    num_rows, sizes = column_sizes(written)
    assert num_rows == ROWS
    return {one.name: one for one in sizes}


@pytest.mark.parametrize("name", list(columns())[:-1])
def test_memory_is_within_a_tenth_of_what_pandas_holds(name, found):
    column = pa.table({name: columns()[name]})[name].combine_chunks()
    assert found[name].pandas_bytes == pytest.approx(as_pandas3(column), rel=0.1)


def test_bytes_on_disk_are_those_of_the_file(written, found):
    sizes = sum(one.disk_bytes for one in found.values())
    assert sizes == pytest.approx(written.stat().st_size, rel=0.1)
    assert found["constant"].ratio > 100 > found["double"].ratio
    assert found["record"].disk_bytes > found["small"].disk_bytes
    assert found["record"].pandas_bytes > 8 * ROWS


@pytest.mark.parametrize("compression", ["uncompressed", "lz4"])
def test_an_arrow_file_is_read_too(tmp_path, compression):
    table = pa.table({name: columns()[name] for name in ("double", "single", "few words")})
    feather.write_feather(table, tmp_path / "all.arrow", compression=compression)
    _, sizes = column_sizes(tmp_path / "all.arrow")
    double, single, _ = sizes
    assert sum(one.disk_bytes for one in sizes) == pytest.approx((tmp_path / "all.arrow").stat().st_size, rel=0.01)
    assert double.disk_bytes == pytest.approx(2 * single.disk_bytes, rel=0.01)
    assert (double.pandas_bytes, single.pandas_bytes) == (8 * ROWS, 4 * ROWS)


def test_a_part_of_a_folder_may_have_other_columns(tmp_path):
    pq.write_table(pa.table({"a": [1.0, 2.0]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [3.0], "b": ["x"]}), tmp_path / "2.parquet")
    num_rows, (a, b) = column_sizes(tmp_path)
    assert (num_rows, a.pandas_bytes, b.name) == (3, 24, "b")


def test_a_name_that_stands_twice_is_refused(tmp_path):
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="2 columns named 'a'"):
        column_sizes(tmp_path / "twice.parquet")
