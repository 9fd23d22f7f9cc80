"""CSV files make the same panels as Parquet files of the same table, and say what is wrong with them."""

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from memfit.data import Panel, Source, match_columns
from memfit.errors import DataError

ROW = {"date": "2024-01-02", "code": "007", "f1": "1", "f2": "0.5", "note": "a"}


def table(num_rows=4000):
    rng = np.random.default_rng(0)
    date, asset = (axis.ravel() for axis in np.indices((num_rows // 20, 20)))
    whole = pa.array(rng.integers(-9, 9, num_rows), mask=rng.random(num_rows) < 0.1)
    numbers = pa.array(rng.standard_normal(num_rows), mask=rng.random(num_rows) < 0.1)
    codes = [f"{one:03d}" for one in asset]
    columns = {"date": np.datetime64("2024-01-01") + date, "code": codes, "whole": whole, "ratio": numbers}
    return pa.table(columns | {"flag": rng.random(num_rows) < 0.5, "sector": ["NA"] * num_rows})


def build(source, out, **how):
    keys = ["date", "code"]
    found = match_columns(source, how.get("features", ["whole", "ratio", "flag"]), taken=keys)
    return Panel.build(source, out, index=keys, features=found)


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_the_panel_of_a_csv_file_has_the_bytes_of_the_panel_of_the_same_table(tmp_path, name):
    rows = table(30_000)  # of several blocks
    pq.write_table(rows, tmp_path / "rows.parquet")
    csv.write_csv(rows, tmp_path / "rows.csv")
    if name.endswith("gz"):
        (tmp_path / name).write_bytes(gzip.compress((tmp_path / "rows.csv").read_bytes()))
    panels = [build(tmp_path / one, tmp_path / f"{one}.panels") for one in ("rows.parquet", name)]
    first, second = ({file.name: file.read_bytes() for file in one.path.glob("*.npy")} for one in panels)
    assert first == second and len(first) >= 5
    assert tuple(panels[1].assets[:2]) == ("000", "001")


def test_a_folder_of_csv_files_is_one_source(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for place, part in enumerate((table().slice(0, 2000), table().slice(2000))):
        csv.write_csv(part, folder / f"{place}.csv")
    assert build(folder, tmp_path / "a").num_rows == 4000


HEADER = ",".join(ROW)


def write(tmp_path: Path, *rows, header=HEADER):
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([header, *(",".join((ROW | row).values()) for row in rows)]) + "\n")
    return path


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-20", "0"], "int64"),
        (["1", "", "3"], "int64"),
        (["1", "2.5", "1e-3", ".5", "-3."], "double"),
        (["1", "nan", "-inf"], "double"),
        (["12345678901234567890"], "double"),
        (["true", "false"], "bool"),
        (["1", "007"], "string"),
        (["1", "a"], "string"),
        (["1", "NA"], "string"),  # the code of a bank; only an empty field is missing
    ],
)
def test_a_type_holds_for_all_rows(tmp_path, values, kind):
    path = write(tmp_path, *({"f1": one} for one in values))
    ((_, schema),) = Source.of(path).schemas()
    assert str(schema.field("f1").type) == kind
    assert sum(batch.num_rows for batch in Source.of(path).batches(["f1"])) == len(values)


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        ([{"f1": "a"}], None, "column 'f1' of .* has type string"),
        ([{"date": ""}, {}], None, "column 'date' has no value in 1 of 2 rows"),
        ([{"date": "02.01.2024"}], None, "holds text that is no date"),
        ([{}, {"note": "a,b"}], None, "cannot be read: CSV parse error: Row #3: Expected 5 columns, got 6"),
        ([{}], "date,code,f1,f1,note", "has 2 columns named 'f1'"),
        ([{}], "date;code;f1;f2;note", "cannot be read"),
        ([{}], "day,code,f1,f2,note", "has 0 columns named 'date'"),
    ],
)
def test_what_is_wrong_is_said_as_of_a_parquet_file(tmp_path, rows, header, message):
    path = write(tmp_path, *rows, header=header or HEADER)
    with pytest.raises(DataError, match=message):
        Panel.build(path, tmp_path / "panels", index=["date", "code"], features=["f1"])
    assert not [*(tmp_path / "panels").glob("*/values.npy")]


def test_an_empty_file_and_one_that_is_no_csv_are_refused(tmp_path):
    for name, content in (("empty.csv", b""), ("rows.txt", b"date,code\n"), ("bad.csv", b"a,b\n\xff\xfe,1\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=r"cannot be read|neither a Parquet nor an Arrow file"):
            build(tmp_path / name, tmp_path / "panels", features=["b"])


def test_a_file_that_changes_has_its_types_read_anew(tmp_path):
    assert match_columns(write(tmp_path, {}), ["f*"]) == ("f1", "f2")
    assert match_columns(write(tmp_path, {}, {"f2": "text"}), ["f*"]) == ("f1",)
