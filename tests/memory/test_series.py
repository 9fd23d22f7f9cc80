"""A job's memory over time, in JSON lines."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise

import pytest

from memfit.errors import DamagedError
from memfit.memory import Course, Sample, SeriesWriter, read_series


def sample(index: int, phase: str = "train") -> Sample:
    device = {"GPU-a": 9 * index, "GPU-b": 1}
    return Sample(1e9 + index, index, 2 + index, 3 + index, 2**60 + index, 5 + index, phase, device, 6 + index)


def write(path, samples, **options):
    series = SeriesWriter(path, **options)
    for taken in samples:
        series.append(taken)
    series.close()


@pytest.mark.parametrize("count", [0, 1, 37])
def test_every_value_comes_back_and_each_line_is_json(tmp_path, count):
    path = tmp_path / "memory.jsonl"
    samples = [sample(index, "v" + "ä" * index) for index in range(count)]
    write(path, samples)
    assert read_series(path) == samples
    assert [json.loads(line) for line in path.read_text().splitlines()] == [asdict(taken) for taken in samples]


def test_a_sample_is_in_the_file_before_the_writer_is_closed(tmp_path):
    series = SeriesWriter(tmp_path / "memory.jsonl")
    series.append(sample(1))
    assert read_series(tmp_path / "memory.jsonl") == [sample(1)]
    series.close()


def test_between_two_lines_lies_half_a_second_or_a_change_of_the_phase_and_the_next_line_holds_the_peak(tmp_path):
    path = tmp_path / "memory.jsonl"
    told = [
        (0.0, "load", 1),
        (0.1, "load", 9),
        (0.2, "load", 2),
        (0.3, "train", 3),
        (0.4, "train", 4),
        (0.8, "train", 5),
    ]
    write(path, [Sample(time, 1, 0, 0, 0, 0, phase, peak_bytes=peak) for time, phase, peak in told])
    assert [(one.time, one.peak_bytes) for one in read_series(path)] == [(0.0, 1), (0.3, 9), (0.8, 5)]


@pytest.mark.parametrize("max_lines", [8192, 16])
def test_each_line_holds_the_lowest_sizes_of_its_phase_since_the_line_before_also_once_thinned(tmp_path, max_lines):
    series = SeriesWriter(tmp_path / "memory.jsonl", max_lines=max_lines)
    for number in range(1, 201):
        phase, size = "train" if number % 100 < 90 else "validate", 3 if number == 42 else 100 + number
        more = {"step": float(number), "ranks": {"1": size + 1}, "allocated_bytes": {"GPU-a": size + 2}}
        one = Sample(1e9 + number / 10, 1, size, 0, 0, 0, phase, peak_bytes=9, low_bytes=size, **more)
        series.append(one)
    series.close()
    lines = read_series(tmp_path / "memory.jsonl")
    low = next(one for one in lines if one.low_bytes == 3)
    assert (low.step, low.ranks, low.allocated_bytes, low.phase) == (42.0, {"1": 4}, {"GPU-a": 5}, "train")
    assert all(one.low_bytes >= 190 for one in lines if one.phase == "validate")
    course = Course()
    for one in lines:
        course.add(one)
    assert [one.low for one in course.parts["", ""]] == [one.low_bytes for one in lines if one.phase == "train"]
    assert min(course.parts["rank 1", ""], key=lambda one: one.low)[1:3] == (42.0, 4)
    assert min(one.low for one in course.parts["", "GPU-a"]) == 5


def test_lines_of_earlier_versions_are_read(tmp_path):
    write(tmp_path / "memory.jsonl", [sample(1)])
    later = ("low_bytes", "resident_bytes", "reserved_bytes", "step", "epoch", "ranks", "allocated_bytes")
    line = json.loads((tmp_path / "memory.jsonl").read_text())
    (tmp_path / "memory.jsonl").write_text(json.dumps({name: line[name] for name in line if name not in later}) + "\n")
    assert read_series(tmp_path / "memory.jsonl") == [sample(1)]


def test_a_file_cut_at_any_byte_is_read_up_to_its_last_whole_line_and_continued(tmp_path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    write(whole, map(sample, range(3)))
    content = whole.read_bytes()
    ends = [position for position in range(len(content)) if content[position : position + 1] == b"\n"]
    for length in range(len(content) + 1):
        cut.write_bytes(content[:length])
        rows = [sample(number) for number, end in enumerate(ends) if end <= length]
        assert read_series(cut) == rows, length
        if length % 37 == 0:
            write(cut, [sample(50)])
            assert read_series(cut) == [*rows, sample(50)]


def test_a_long_series_is_thinned_and_keeps_its_highest_peak(tmp_path):
    path = tmp_path / "memory.jsonl"
    samples = [Sample(float(n), 1, 10, 0, 10, 10, "train", peak_bytes=5000 if n == 403 else n) for n in range(1001)]
    write(path, samples, max_lines=16)
    found = read_series(path)
    assert 4 <= len(found) <= 16
    assert max(taken.peak_bytes for taken in found) == 5000
    assert next(taken.time for taken in found if taken.peak_bytes == 5000) >= 403
    assert found[-1].time == 1000
    times = [taken.time for taken in found]
    assert times == sorted(times)
    assert max(later - earlier for earlier, later in pairwise(times)) <= 256
    assert [entry.name for entry in tmp_path.iterdir()] == ["memory.jsonl"]


def test_something_else_is_refused_by_name(tmp_path):
    path = tmp_path / "memory.arrows"
    path.write_bytes(b"\xff\xff\xff\xff\x10\x00\n\x00stream of Arrow's")
    for use in (read_series, SeriesWriter):
        with pytest.raises(DamagedError, match=r"memory\.arrows is no series of memory samples"):
            use(path)


@pytest.mark.parametrize("value", ["9" * 400, "1e400", "NaN", '"x"', "null", "[]"])
def test_a_line_whose_figures_are_no_numbers_is_left_out(tmp_path, value):
    path = tmp_path / "memory.jsonl"
    write(path, [sample(1), sample(2)])
    first, second = path.read_text().splitlines()
    for name in ("time", "peak_bytes", "private_bytes"):
        bad = json.dumps(json.loads(first) | {name: "HERE"}).replace('"HERE"', value)
        path.write_text(f"{bad}\n{second}\n")
        assert read_series(path) == [sample(2)]
        SeriesWriter(path).close()
