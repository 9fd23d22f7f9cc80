"""Arrow arrays and NumPy's, without the pandas that pyarrow's own ways import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from memfit.data import Panel

DAYS = np.repeat(np.arange("2024-01-01", "2024-01-11", dtype="datetime64[D]"), 3)
WHOLE = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
GAPS = [1, None, 3, 4, 5, 6, 7, 8, None, 10, None]

CHILD = """
import sys

asked = []


class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pandas":
            asked.append(name)
            raise ImportError(name)


sys.meta_path.insert(0, Refuses())
from memfit.data import Panel, match_columns

*files, folder = sys.argv[1:]
features = match_columns(files, ["f*"])
panel = Panel.build(files, folder, features=features, targets=["f1"])
assert not asked, asked
print(panel.shape)
"""


def rows(days: pa.Array, codes: pa.Array) -> pa.Table:
    numbers = np.arange(len(days))
    gaps = pa.array([None if number % 5 == 1 else number for number in numbers.tolist()])
    some = {"f1": gaps.cast(pa.float32()), "f2": gaps, "f3": numbers % 2 == 0, "f4": gaps.cast(pa.decimal128(30, 2))}
    return pa.table({"date": days, "code": codes, **some})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["date32", "date64", "timestamp", "zone", "text"])
def test_building_imports_no_pandas(kind: str, tmp_path: Path) -> None:
    codes = pa.array(["a", "b", "c"] * 10)
    if kind == "text":
        codes = codes.dictionary_encode()
    types = {"date32": pa.date32(), "date64": pa.date64(), "timestamp": pa.timestamp("us")}

    def dates(first: int) -> pa.Array:
        moved = DAYS + np.timedelta64(first, "D")
        days = pa.array(moved)
        if kind == "text":
            return pa.array(moved.astype(str).tolist())
        if kind == "zone":
            return days.cast(pa.timestamp("ns")).cast(pa.timestamp("ns", "UTC"))
        return days.cast(types[kind])

    names = [tmp_path / name for name in ("old.parquet", "new.feather")]
    pq.write_table(rows(dates(0), codes), names[0])
    feather.write_feather(rows(dates(10), codes), names[1])
    command = [sys.executable, "-c", CHILD, *map(str, names), str(tmp_path / "panels")]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("(20, 3, 4)\n", "")


@pytest.mark.parametrize("values", [WHOLE, GAPS, [None] * 11], ids=["whole", "gaps", "none"])
@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64"])
def test_numbers_are_those_of_pyarrow_also_of_a_slice(kind: str, values: list[int | None], tmp_path: Path) -> None:
    floats = [None if value is None else np.float16(value) for value in values]
    column = pa.array(floats if kind == "float16" else values, kind)
    dates = pa.array(np.arange("2024-01-01", "2024-01-12", dtype="datetime64[D]"))
    table = pa.table({"date": dates, "code": ["ä€😀"] * 11, "f0": column})
    for part in (table, table.slice(2), table.slice(1, 9)):
        panel = Panel.build(part, tmp_path, features=["f0"])
        expected = np.array([np.nan if one is None else one for one in part["f0"].to_pylist()], np.float64)
        np.testing.assert_array_equal(panel.values[:, 0, 0], expected)
        assert panel.assets == ("ä€😀",)
