"""Dates, codes and numbers in every type that a file can have them, and clear words for the rest."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from memfit.data import Panel, Source, match_columns
from memfit.data import _source as source_module
from memfit.errors import DataError

DAYS = [datetime.date(2024, 1, 31), datetime.date(1969, 12, 31)]
MIDNIGHTS = [datetime.datetime(day.year, day.month, day.day) for day in DAYS]


def build(tmp_path: Path, **columns: Any) -> Panel:
    given = {"date": DAYS, "code": ["a", "b"], "f0": [1.0, 2.0], **columns}
    return Panel.build(pa.table(given), tmp_path, features=["f0"])


@pytest.mark.parametrize(
    "dates",
    [
        pa.array(DAYS, pa.date32()),
        pa.array(DAYS, pa.date64()),
        *[pa.array(MIDNIGHTS, pa.timestamp(unit)) for unit in ("s", "ms", "us", "ns")],
        pa.array(["2024-01-31", "1969-12-31"]),
        pa.array(["2024-01-31T00:00:00", "1969-12-31 00:00"], pa.large_string()),
        pa.array(["2024-01-31", "1969-12-31"], pa.string_view()),
        pa.array(["2024-01-31", "1969-12-31"]).dictionary_encode(),
        pa.array([datetime.datetime(2024, 1, 31, 5), datetime.datetime(1969, 12, 31, 5)], pa.timestamp("us")).cast(
            pa.timestamp("us", "America/New_York")
        ),
    ],
    ids=lambda dates: str(dates.type),
)
def test_dates_of_every_type_become_days(tmp_path: Path, dates: pa.Array) -> None:
    assert build(tmp_path, date=dates).dates.tolist() == sorted(DAYS)


@pytest.mark.parametrize(
    ("dates", "message"),
    [
        (pa.array([MIDNIGHTS[0], MIDNIGHTS[0].replace(hour=9)]), r"time of day in 1 of 2 .* 2024-01-31T09:00:00"),
        (pa.array(["2024-01-31", "2024-01-31 16:00"]), "time of day"),
        (pa.array(MIDNIGHTS, pa.timestamp("s", "Asia/Tokyo")), "time of day in 2 of 2"),
        (pa.array(["2024-01-31", "31.01.2024"]), "text that is no date: .*31.01.2024"),
        (pa.array([DAYS[0], None]), "no value in 1 of 2 rows"),
        (pa.array([20240131, 19691231]), "column 'date' of the table has type int64"),
    ],
)
def test_what_is_no_date_is_refused(tmp_path: Path, dates: pa.Array, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(tmp_path, date=dates)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        (pa.array([9, 10]), ("10", "9")),
        (pa.array(["é", "z"], pa.large_string()), ("z", "é")),
        (pa.array(["b", "a"]).dictionary_encode(), ("a", "b")),
        (pa.array(["x", "x"], pa.string_view()), ("x",)),
        (pa.array(["with \0 zero", "\n"]), ("\n", "with \0 zero")),
    ],
)
def test_asset_codes_become_text_sorted_as_text(tmp_path: Path, codes: pa.Array, expected: tuple[str, ...]) -> None:
    assert build(tmp_path, code=codes).assets == expected


@pytest.mark.parametrize("codes", [pa.array([1.5, 2.5]), pa.array([True, False])])
def test_codes_that_are_neither_text_nor_integers_are_refused(tmp_path: Path, codes: pa.Array) -> None:
    with pytest.raises(DataError, match="asset codes are text or integers"):
        build(tmp_path, code=codes)


def test_a_row_without_a_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'code' has no value in 1 of 2"):
        build(tmp_path, code=pa.array(["a", None]))


@pytest.mark.parametrize(
    "numbers",
    [
        pa.array([3, None], pa.int8()),
        pa.array([3, None], pa.uint64()),
        pa.array([3.0, None], pa.float64()),
        pa.array([np.float16(3), None], pa.float16()),
        pa.array([decimal.Decimal("3.00"), None]),
        pa.array([3.0, None]).dictionary_encode(),
        pa.RunEndEncodedArray.from_arrays([1, 2], pa.array([3.0, None])),
    ],
    ids=lambda numbers: str(numbers.type),
)
def test_numbers_of_every_type_become_floats_and_nulls_nan(tmp_path: Path, numbers: pa.Array) -> None:
    values = build(tmp_path, f0=numbers).values[:, :, 0]
    np.testing.assert_array_equal(values, np.array([[np.nan, np.nan], [3.0, np.nan]], np.float32))


def test_booleans_become_one_zero_and_nan(tmp_path: Path) -> None:
    values = build(tmp_path, date=[DAYS[0]] * 3, code=["a", "b", "c"], f0=[True, False, None]).values
    np.testing.assert_array_equal(values.ravel(), [1.0, 0.0, np.nan])


@pytest.mark.parametrize(
    "column", [pa.array(["1", "2"]), pa.array(DAYS), pa.array([[1.0], [2.0]]), pa.nulls(2)], ids=lambda c: str(c.type)
)
def test_a_feature_that_is_no_number_is_refused(tmp_path: Path, column: pa.Array) -> None:
    with pytest.raises(DataError, match=r"column 'f0' of the table has type .*\n.*are numbers"):
        build(tmp_path, f0=column)


def test_a_missing_column_is_refused_with_the_nearest_name(tmp_path: Path, make_table: Callable[..., pa.Table]) -> None:
    with pytest.raises(DataError, match=r"(?s)0 columns named 'rett'.*did you mean 'ret'") as caught:
        Panel.build(make_table(), tmp_path, features=["f0"], targets=["rett"])
    assert caught.value.exit_code == 2


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays(
        [pa.array(DAYS), pa.array(["a", "b"]), *[pa.array([1.0, 2.0])] * 2], ["date", "code", "f0", "f0"]
    )
    with pytest.raises(DataError, match="2 columns named 'f0'"):
        Panel.build(table, tmp_path, features=["f0"])


FORMATS: dict[str, Callable[[pa.Table, Path], Any]] = {
    "row_groups.parquet": lambda table, path: pq.write_table(table, path, row_group_size=13),
    "plain.feather": lambda table, path: feather.write_feather(table, path, compression="uncompressed"),
    "compressed.feather": lambda table, path: feather.write_feather(table, path, compression="lz4", chunksize=20),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_file_format_gives_the_tables_values(
    make_table: Callable[..., pa.Table], tmp_path: Path, name: str
) -> None:
    table = make_table()
    FORMATS[name](table, tmp_path / name)
    (tmp_path / name).rename(tmp_path / "source")
    expected = Panel.build(table, tmp_path / "panels", features=["f2", "f0"], targets=["ret"])
    found = Panel.build(tmp_path / "source", tmp_path / "panels", features=["f2", "f0"], targets=["ret"])
    assert found.path != expected.path
    for array in ("values", "targets", "present", "history", "dates"):
        np.testing.assert_array_equal(getattr(found, array), getattr(expected, array))
    assert found.assets == expected.assets


def test_a_folder_stands_for_its_files_of_any_format(make_table: Callable[..., pa.Table], tmp_path: Path) -> None:
    table, folder = make_table(), tmp_path / "source"
    (folder / "deeper").mkdir(parents=True)
    pq.write_table(table.slice(0, 20), folder / "deeper" / "a.parquet")
    feather.write_feather(table.slice(20), folder / "b.arrow")
    (folder / "notes.txt").write_text("no data")
    found = Panel.build(folder, tmp_path / "panels", features=["f0"])
    np.testing.assert_array_equal(found.values, Panel.build(table, tmp_path / "panels", features=["f0"]).values)


def test_a_column_may_have_another_type_in_another_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"date": ["2024-01-01"], "code": [1], "f0": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"date": [DAYS[0]], "code": ["1"], "f0": [2.5]}), tmp_path / "b.parquet")
    panel = Panel.build(tmp_path, tmp_path / "panels", features=["f0"])
    assert panel.assets == ("1",)
    assert panel.values.ravel().tolist() == [1.0, 2.5]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, "is not there"),
        ("none*.parquet", None, r"none\*.parquet is not there[^~]* a pattern is expanded by the shell"),
        ("/dev/null", None, "/dev/null is neither a file nor a folder"),
        ("empty_folder", "folder", "holds no Parquet or Arrow file"),
        ("data.txt", b"date,code\n", "neither a Parquet nor an Arrow file: it begins with b'date,c'"),
        ("empty", b"", "neither a Parquet nor an Arrow file"),
        ("data.arrows", b"\xff\xff\xff\xff\0", r"is an Arrow IPC stream[^~]*to_parquet"),
        ("torn.parquet", b"PAR1\0\0\0\0PAR", "torn.parquet cannot be read"),
        ("torn.arrow", b"ARROW1\0\0\0\0", "torn.arrow cannot be read"),
    ],
)
def test_a_source_that_is_none_is_refused_by_name(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        Panel.build(path, tmp_path / "panels", features=["f0"])


def test_no_source_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="names no file"):
        Panel.build([], tmp_path, features=["f0"])


def test_a_page_that_is_damaged_in_the_source_is_refused_by_name(
    make_table: Callable[..., pa.Table], tmp_path: Path
) -> None:
    path = tmp_path / "source.parquet"
    pq.write_table(make_table(), path, write_page_checksum=True, compression="zstd")
    content = bytearray(path.read_bytes())
    content[60:400] = bytes(340)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"source\.parquet cannot be read"):
        Panel.build(path, tmp_path / "panels", features=["f0"])
    assert not list((tmp_path / "panels").glob("[!.]*"))


def test_memory_running_out_in_a_reader_stays_what_it_is(tmp_path: Path) -> None:
    pq.write_table(pa.table({"f0": [1.0]}), tmp_path / "source.parquet")
    with pytest.raises(MemoryError), source_module.opened(tmp_path / "source.parquet"):
        raise pa.ArrowMemoryError("malloc of size 1 failed")


def test_rows_come_in_the_sources_order_in_small_batches(make_table: Callable[..., pa.Table]) -> None:
    table = make_table(200, 400, 1, missing=0.0)
    batches = list(Source.of(table).batches(["date", "f0"]))
    assert max(batch.num_rows for batch in batches) <= 65536
    assert len(batches) > 1
    assert pa.Table.from_batches(batches).equals(table.select(["date", "f0"]).cast(batches[0].schema))


# Columns by name and by pattern.

ROWS = pa.table(
    {
        "date": ["2024-01-02"],
        "code": [7],
        "f2": [1.0],
        "f1": pa.array([1]).dictionary_encode(),
        "f[1]": [True],
        "sector": ["x"],
        "ret": [0.5],
    }
)


def test_patterns_find_numbers_as_the_source_has_them_each_once(tmp_path: Path) -> None:
    pq.write_table(ROWS, tmp_path / "rows.parquet")
    for source in (ROWS, tmp_path / "rows.parquet"):
        assert match_columns(source, ["f?", "f1"]) == ("f2", "f1")
        assert match_columns(source, ["f1", "f*"]) == ("f1", "f2", "f[1]")
        assert match_columns(source, ["*"], taken=["date", "code", "ret"]) == ("f2", "f1", "f[1]")


def test_a_name_is_taken_as_it_is_even_if_it_reads_like_a_pattern_or_is_not_there() -> None:
    assert match_columns(ROWS, ["f[1]", "absent", "ret"], taken=["ret"]) == ("f[1]", "absent", "ret")


@pytest.mark.parametrize("pattern", ["g*", "sec*", "F?"])
def test_a_pattern_that_finds_no_number_is_refused(pattern: str) -> None:
    with pytest.raises(DataError, match=r"finds no column of numbers; there are date, code, f2"):
        match_columns(ROWS, [pattern])
