"""Columns by name and by pattern."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memfit.data import match_columns
from memfit.errors import DataError

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
        assert match_columns(source, ["f?", "f1"]).names == ("f2", "f1")
        assert match_columns(source, ["f1", "f*"]).names == ("f1", "f2", "f[1]")
        found = match_columns(source, ["*"], taken=["date", "code", "ret"])
        assert found.names == ("f2", "f1", "f[1]")
        assert set(found.left_out) == {
            "'date' (has another role)",
            "'code' (has another role)",
            "'ret' (has another role)",
            "'sector' (string)",
        }


def test_a_name_is_taken_as_it_is_even_if_it_reads_like_a_pattern_or_is_not_there() -> None:
    assert match_columns(ROWS, ["f[1]", "absent", "ret"], taken=["ret"]).names == ("f[1]", "absent", "ret")


@pytest.mark.parametrize("pattern", ["g*", "sec*", "F?"])
def test_a_pattern_that_finds_no_number_is_refused(pattern: str) -> None:
    with pytest.raises(DataError, match=r"finds no column of numbers; there are date, code, f2"):
        match_columns(ROWS, [pattern])
