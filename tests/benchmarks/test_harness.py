"""What benchmarks share: the page is what the rows make, and an old row is marked."""

import json
import subprocess
import sys

import pytest

import harness

ROW = {"name": "stress", "figure": "kills", "value": 0, "unit": "", "commit": "a6e4d2a4", "date": "2026-11-26"}
ROW |= {"host": "2 cores, 24 GiB", "load": 1.5, "peer": "0"}


def test_the_page_is_what_the_rows_make_but_for_the_marks_of_age():
    made = harness.make_page(harness.read_rows(), {})
    assert harness.PAGE.read_text().replace(",&nbsp;older", "") == made
    assert len(made.replace("|", "").split()) <= 2000


def test_each_row_says_what_was_measured_and_of_which_code_when_and_where():
    fields = {"name", "figure", "value", "unit", "commit", "date", "host", "load"}
    for row in harness.read_rows():
        assert fields <= row.keys() <= fields | {"peer", "missed", "busy"}, row
        assert row["name"] in harness.ROOMS and row["date"] >= "2026-11-21", row


def test_a_row_older_than_the_last_change_of_its_room_is_marked():
    page = harness.make_page([ROW, ROW | {"date": "2026-11-27", "busy": True}], {"stress": "2026-11-27"})
    assert "| kills | 0 | 0 | 2026-11-26,&nbsp;older |" in page
    assert "| kills | 0 | 0 | 2026-11-27,&nbsp;busy |" in page
    assert "older |" not in harness.make_page([ROW], {"stress": ""})


def test_each_benchmark_is_a_file_with_a_line_and_each_file_is_listed():
    told = subprocess.run([sys.executable, harness.__file__, "list"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in told.stdout.splitlines()] == [*harness.ROOMS]
    assert all(len(line.split()) > 4 for line in told.stdout.splitlines())
    files = {path.stem for path in harness.RESULTS.parent.glob("[a-z]*.py")} - {"harness"}
    files |= {path.parent.name for path in (harness.ROOT / "systems").glob("memfit_workloads/*/bench.py")}
    assert files == {*harness.ROOMS}


def test_ways_are_called_in_turns_whose_order_turns_and_the_first_ones_are_left_out():
    calls = []
    ways = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    found = harness.in_turns(ways, 2, warm=1)
    assert (calls, found) == ([*"abbaab"], {"a": [4, 5], "b": [3, 6]})
    assert harness.ratio([2.0, 3.0, 8.0], [1.0, 1.0, 2.0]) == (3.0, 2.0, 4.0)


def test_figures_are_written_with_commit_date_host_and_load(tmp_path):
    harness.write_json(tmp_path / "figures.json", [1])
    told = json.loads((tmp_path / "figures.json").read_text())
    assert told.pop("figures") == [1] and told.keys() == {"commit", "date", "host", "load"}


@pytest.mark.skipif(harness.find_parent() is None, reason="needs a memory control group")
def test_a_limit_is_real_and_what_still_runs_at_its_end_is_killed():
    with harness.Limited(harness.find_parent(), 64 << 20) as group:
        large = group.start([sys.executable, "-c", "bytearray(100 << 20)"])
        assert large.wait() == -9 and group.num_oom_kills == 1 and group.peak_bytes >= 60 << 20
        left = group.start(["sleep", "60"])
        while str(left.pid) not in (group.path / "cgroup.procs").read_text().split():
            assert left.poll() is None
    assert left.wait() == -9 and not group.path.exists()
