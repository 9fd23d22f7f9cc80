"""The Arrow stream that is written without Arrow."""

from __future__ import annotations

import errno
import io
import os
import struct

import pyarrow as pa
import pyarrow.ipc
import pytest

from memfit.errors import DamagedError
from memfit.memory import _series
from memfit.memory._meter import Sample
from memfit.memory._series import BATCH_ROWS, COLUMNS, PHASE_WIDTH, SeriesWriter, read_series

SCHEMA = pa.schema(
    [pa.field("time", pa.float64(), nullable=False)]
    + [pa.field(name, pa.int64(), nullable=False) for name in COLUMNS[1:-1]]
    + [pa.field("phase", pa.binary(PHASE_WIDTH), nullable=False)]
)


def sample(index: int, phase: str = "train") -> Sample:
    device = {"GPU-a": 9 * index, "GPU-b": 1}
    return Sample(1e9 + index / 10, index, 2 + index, 3 + index, 2**60 + index, 5 + index, phase, device, 6 + index)


def row(taken: Sample) -> dict[str, object]:
    values = {name: getattr(taken, name) for name in COLUMNS}
    return values | {"device_bytes": sum(taken.device_bytes.values())}


def messages(rows: int) -> list[bytes]:
    """The headers (schema, record batch) that pyarrow writes for a batch of so many rows."""
    columns = [
        pa.array([0.0] * rows),
        *[pa.array([0] * rows)] * 7,
        pa.array([bytes(PHASE_WIDTH)] * rows, SCHEMA[-1].type),
    ]
    buffer = io.BytesIO()
    with pa.ipc.new_stream(buffer, SCHEMA) as writer:
        writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
    content, heads, position = buffer.getvalue(), [], 0
    for body in (0, rows * _series._ROW_BYTES):
        end = position + 8 + struct.unpack_from("<i", content, position + 4)[0]
        heads.append(content[position:end])
        position = end + body
    return heads


@pytest.mark.parametrize("rows", [1, BATCH_ROWS])
def test_the_constants_read_like_what_pyarrow_writes_itself(rows):
    schema, batch = messages(rows)
    body = bytes(range(256)) * 4
    for head in (schema, _series._SCHEMA):
        for header in (batch, _series._HEADERS[rows]):
            table = pa.ipc.open_stream(head + header + body[: rows * _series._ROW_BYTES]).read_all()
            table.validate(full=True)
            assert table.schema == SCHEMA
            assert table["phase"][-1].as_py() == body[: rows * _series._ROW_BYTES][-PHASE_WIDTH:]
            assert table["num_processes"][0].as_py() == struct.unpack_from("<q", body, rows * 8)[0]


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 37])
def test_every_value_comes_back(tmp_path, count):
    path = tmp_path / "memory.arrows"
    samples = [sample(index) for index in range(count)]
    with SeriesWriter(path) as series:
        for taken in samples:
            series.append(taken)
    table = read_series(path)
    assert table.to_pylist() == [row(taken) for taken in samples]
    assert table.schema.field("phase").type == pa.string()
    assert [str(kind) for kind in table.schema.types] == ["double", *["int64"] * 7, "string"]


def test_any_arrow_reader_reads_the_file(tmp_path):
    with SeriesWriter(tmp_path / "memory.arrows") as series:
        for index in range(12):
            series.append(sample(index))
    with pa.OSFile(str(tmp_path / "memory.arrows")) as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table["private_bytes"].to_pylist() == [2 + index for index in range(12)]


def test_a_long_name_is_cut_between_characters(tmp_path):
    with SeriesWriter(tmp_path / "memory.arrows") as series:
        series.append(sample(0, "v" + "ä" * 20))
        series.append(sample(1, ""))
    assert read_series(tmp_path / "memory.arrows")["phase"].to_pylist() == ["v" + "ä" * 15, ""]


def test_a_full_batch_is_on_disk_before_the_writer_is_closed(tmp_path):
    series = SeriesWriter(tmp_path / "memory.arrows")
    for index in range(19):
        series.append(sample(index))
    assert read_series(tmp_path / "memory.arrows").num_rows == 10
    series.close()
    assert read_series(tmp_path / "memory.arrows").num_rows == 19


def test_a_file_torn_at_any_byte_is_read_up_to_its_last_whole_batch_and_continued(tmp_path):
    whole, torn = tmp_path / "whole.arrows", tmp_path / "torn.arrows"
    with SeriesWriter(whole) as series:
        for index in range(11):
            series.append(sample(index))
        series.append(sample(11))
    content = whole.read_bytes()
    schema = len(_series._SCHEMA)
    ten = schema + len(_series._HEADERS[10]) + 10 * _series._ROW_BYTES
    one = len(_series._HEADERS[1]) + _series._ROW_BYTES
    assert len(content) == ten + 2 * one
    for end in range(len(content) + 1):
        torn.write_bytes(content[:end])
        rows = 0 if end < ten else 10 + (end - ten) // one
        assert read_series(torn).num_rows == rows, end
        if end % 97 == 0:
            with SeriesWriter(torn) as series:
                series.append(sample(50))
            assert read_series(torn)["num_processes"].to_pylist() == [*range(rows), 50]


def test_something_else_is_refused_by_name(tmp_path):
    path = tmp_path / "memory.arrows"
    path.write_bytes(b"no stream of Arrow's")
    for use in (read_series, SeriesWriter):
        with pytest.raises(DamagedError, match=r"memory\.arrows is no series of memory samples from byte 0 on"):
            use(path)
    path.unlink()
    with SeriesWriter(path) as series:
        for index in range(20):
            series.append(sample(index))
    content = bytearray(path.read_bytes())
    content[len(_series._SCHEMA) + 20] ^= 255
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=f"from byte {len(_series._SCHEMA)} on"):
        read_series(path)


def test_a_full_disk_leaves_whole_batches(tmp_path, monkeypatch):
    path = tmp_path / "memory.arrows"
    series = SeriesWriter(path)
    for index in range(19):
        series.append(sample(index))
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:700]))
    with pytest.raises(OSError, match=r"memory\.arrows") as caught:
        series.append(sample(19))
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    series.append(sample(20))
    series.close()
    assert read_series(path)["num_processes"].to_pylist() == [*range(10), 20]
