"""The record counts each comparison once, survives a torn line, and refuses one that cannot be read."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather

from memfit.errors import DataError
from memfit_workloads.finance import decide, decide_on_record, read_days, record_of


def days(seed: int, effect: float = 0.0) -> pa.Table:
    dates = np.datetime64("2024-01-01", "D") + np.arange(60)
    return pa.table({"date": dates, "h1_rank_ic": np.random.default_rng(seed).normal(effect, 0.1, 60)})


def compare(path: Path, a: pa.Table, b, **settings):
    return decide_on_record(a, b, "h1_rank_ic", 1, record=path, **settings)


@pytest.mark.proves("C-41")
def test_every_new_comparison_counts_and_repeating_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "made" / "comparisons.jsonl"
    a, b, c = days(0, 0.1), days(1), days(2)
    assert compare(path, a, b).num_comparisons == 1
    assert compare(path, a, c).num_comparisons == 2
    assert compare(path, a, b, level=0.9).num_comparisons == 2
    assert compare(path, b, a).num_comparisons == 2  # the same question the other way round
    assert compare(path, a, "random").num_comparisons == 3
    assert len(path.read_text().splitlines()) == 5


def test_the_p_value_is_corrected_by_those_on_record(tmp_path: Path) -> None:
    path = tmp_path / "comparisons.jsonl"
    pairs = [(days(seed, 0.04), days(seed + 50)) for seed in range(6)]
    found = [compare(path, a, b) for a, b in pairs]
    raw = [one.test.p_value for one in found]
    again = compare(path, *pairs[0])
    assert again.num_comparisons == 6
    assert again == decide(*pairs[0], "h1_rank_ic", 1, other_p_values=raw[1:])
    assert again.adjusted_p_value > again.test.p_value


def test_a_line_says_what_was_compared_and_one_that_a_kill_cut_short_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "comparisons.jsonl"
    found = compare(path, days(0), days(1), names=("new", "old"))
    line = json.loads(path.read_text())
    assert (line["a"], line["b"], line["metric"], line["verdict"]) == ("new", "old", "h1_rank_ic", found.verdict)
    assert line["time"].endswith("+00:00")
    with open(path, "a") as file:
        file.write('{"key": "abc", "p_v')
    assert compare(path, days(0), days(2)).num_comparisons == 2
    assert compare(path, days(0), days(3)).num_comparisons == 3


@pytest.mark.parametrize("line", ["no json", "[]", '{"key": "abc"}', '{"key": "abc", "p_value": null}'])
def test_another_line_that_cannot_be_read_is_refused_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "comparisons.jsonl"
    path.write_text(f'{{"key": "abc", "p_value": 0.5}}\n{line}\n')
    with pytest.raises(DataError, match=r"comparisons.jsonl, line 2: not a comparison"):
        compare(path, days(0), days(1))
    assert path.read_text().endswith(f"{line}\n")


def test_comparisons_at_the_same_time_are_all_counted(tmp_path: Path) -> None:
    path = tmp_path / "comparisons.jsonl"
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda seed: compare(path, days(seed), days(99)).num_comparisons, range(6)))
    assert sorted(counts) == [1, 2, 3, 4, 5, 6]
    assert len(path.read_text().splitlines()) == 6


def test_nothing_is_recorded_of_a_comparison_that_was_refused(tmp_path: Path) -> None:
    path = tmp_path / "comparisons.jsonl"
    with pytest.raises(DataError, match="dates are there"):
        compare(path, days(0).slice(0, 20), days(1))
    assert path.read_text() == ""
    assert math.isfinite(compare(path, days(0), days(1)).test.p_value)


def test_a_table_compared_with_itself_is_refused_and_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "comparisons.jsonl"
    with pytest.raises(DataError, match="A and B have the same h1_rank_ic"):
        compare(path, days(0), days(0))
    assert not path.exists()


def of_data(table: pa.Table, data: str) -> pa.Table:
    return table.replace_schema_metadata({"memfit_data": data})


def test_the_record_of_a_data_set_is_the_same_in_every_folder_and_the_user_s_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    a, b, other = of_data(days(0), "prices"), of_data(days(1).slice(9), "prices"), of_data(days(2), "others")
    feather.write_feather(a, str(tmp_path / "days.feather"))
    found = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        found.append(record_of(read_days(tmp_path / "days.feather"), b, "h1_rank_ic"))
    assert {*found, record_of(a, "random", "h1_rank_ic"), record_of(b, a, "h1_rank_ic")} == {found[0]}
    assert found[0].parent == tmp_path / "state" / "memfit" / "comparisons"
    assert record_of(other, "random", "h1_rank_ic") != found[0]
    assert [compare(found[0], a, one).num_comparisons for one in (b, "random")] == [1, 2]
    assert (found[0].stat().st_mode & 0o777, found[0].parent.stat().st_mode & 0o777) == (0o600, 0o700)
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert record_of(a, b, "h1_rank_ic").parent == tmp_path / ".local" / "state" / "memfit" / "comparisons"


def test_tables_without_a_name_of_their_data_share_a_record_by_the_baselines_dates_and_a_name_is_no_path() -> None:
    old = days(0)
    assert record_of(days(1).slice(5), old, "h1_rank_ic") == record_of(days(2), old, "h1_rank_ic")
    assert record_of(days(1), old.slice(1), "h1_rank_ic") != record_of(days(1), old, "h1_rank_ic")
    folder = record_of(old, "random", "h1_rank_ic").parent
    assert record_of(of_data(old, "../../outside"), "random", "h1_rank_ic").parent == folder
