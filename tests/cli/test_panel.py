"""``memfit panel``: from a Parquet file to a panel and back, for people and for machines."""

import json
import os
import pty
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memfit.data import Panel


def rows(first, num_dates, num_assets=5):
    date, asset = (axis.ravel() for axis in np.indices((num_dates, num_assets)))
    number = np.arange(len(date), dtype=np.float64)
    return pa.table(
        {
            "day": np.datetime64(first) + date,
            "id": pa.array([f"A{code}" for code in asset]),
            "f1": number,
            "f2": number / 2,
            "f_name": pa.array(["x"] * len(date)),
            "f_ret": number / 3,
        }
    )


@pytest.fixture
def prices(tmp_path):
    pq.write_table(rows("2024-01-01", 10), tmp_path / "prices.parquet")
    pq.write_table(rows("2024-02-01", 3), tmp_path / "later.parquet")
    return tmp_path


BUILD = ["panel", "build", "prices.parquet", "--index", "day,id", "--features", "f*", "--targets", "f_ret", "-o", "out"]


def test_a_panel_is_built_by_patterns_and_found_again(memfit, prices):
    done = memfit(*BUILD)
    assert (done.exit_code, done.err) == (0, "")
    panel = Panel.newest(prices / "out")
    assert (panel.feature_names, panel.target_names, panel.shape) == (("f1", "f2"), ("f_ret",), (10, 5, 2))
    assert f"{panel.path}: built, 10 dates x 5 assets x 2 features, float32, " in done.out
    assert "features: f1, f2\n" in done.out
    assert "left out: 'f_name' (string), 'f_ret' (has another role)" in done.out
    assert "was there already" in memfit(*BUILD).out


def test_build_takes_a_type_and_prints_json(memfit, prices):
    done = memfit(*BUILD, "--dtype", "float16", "--json")
    facts = json.loads(done.out)
    panel = Panel.open(facts["path"])
    assert panel.dtype == facts["dtype"] == "float16"
    assert (facts["num_dates"], facts["num_assets"], facts["num_rows"]) == (10, 5, 50)
    assert (facts["features"], facts["targets"], facts["reused"]) == (["f1", "f2"], ["f_ret"], False)
    assert facts["bytes"] == panel.nbytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--index", "day", "--features", "f1"], "index is ['day']"),
        (["--index", "day,day", "--features", "f1"], "index is ['day', 'day']"),
        (["--index", "day,id", "--features", "g*"], "the pattern 'g*' finds no column of numbers"),
        (["--index", "day,id", "--features", "f_nam"], "0 columns named 'f_nam'"),
        (["--index", "day,id", "--features", "f_name"], "column 'f_name' of prices.parquet has type string"),
        (["--index", "day,id", "--features", "f1", "--dtype", "int8"], "dtype is int8"),
    ],
)
def test_what_cannot_be_built_is_refused_in_three_parts(memfit, prices, words, message):
    done = memfit("panel", "build", "prices.parquet", *words, "-o", "out")
    assert done.exit_code == 2
    assert message in done.err
    assert "\n  rule: " in done.err
    assert "\n  do:   " in done.err
    assert not list((prices / "out").glob("[!.]*"))


@pytest.mark.parametrize(
    "words",
    [[*BUILD[:-1], "file"], [*BUILD[:-1], "file/sub"]],
    ids=["a file", "in a file"],
)
def test_a_place_that_cannot_be_written_is_refused_without_settings_that_panel_has_not(memfit, prices, words):
    assert memfit(*BUILD).exit_code == 0
    (prices / "file").touch()
    done = memfit(*words)
    assert done.exit_code == 2
    assert "do:   make that path usable, or name another one" in done.err


def test_info_says_what_a_panel_holds(memfit, prices):
    memfit(*BUILD)
    path = Panel.newest(prices / "out").path
    for where in ("out", path):
        done = memfit("panel", "info", where)
        assert done.exit_code == 0
        assert "dates: 2024-01-01 to 2024-01-10" in done.out
        assert "assets: A0, A1, A2, A3, A4\n" in done.out
        assert "rows: 50, 100.0 % of all cells" in done.out
        assert "targets: f_ret" in done.out
    facts = json.loads(memfit("panel", "info", "out", "--json").out)
    assert (facts["path"], facts["parent"], facts["num_listed_later"]) == (str(path), None, 0)
    for where in ("absent", prices):
        done = memfit("panel", "info", where)
        assert done.exit_code == 2
        assert "memfit panel build SOURCE" in done.err


def test_verify_names_the_file_that_was_changed(memfit, prices):
    memfit(*BUILD)
    assert "every byte as it was written" in memfit("panel", "verify", "out").out
    assert json.loads(memfit("panel", "verify", "out", "--json").out)["whole"]
    file = Panel.newest(prices / "out").path / "values.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    done = memfit("panel", "verify", "out")
    assert done.exit_code == 2
    assert f"{file} was changed between bytes 0 and " in done.err
    assert "rm -r " in done.err


def test_append_writes_a_version_and_prune_removes_the_old_one(memfit, prices):
    memfit(*BUILD)
    old = Panel.newest(prices / "out").path
    done = memfit("panel", "append", "out", "later.parquet")
    assert done.exit_code == 0
    new = Panel.newest(prices / "out").path
    assert new != old
    assert f"{new}: appended, 13 dates x 5 assets" in done.out
    assert f"3 dates after 2024-01-10 of {old.name}" in done.out
    assert f"goes on from: {old.name}" in memfit("panel", "info", "out").out
    facts = json.loads(memfit("panel", "append", old, "later.parquet", "--json").out)
    assert (facts["reused"], facts["num_new_dates"], facts["path"]) == (True, 3, str(new))

    done = memfit("panel", "append", "out", "later.parquet")
    assert done.exit_code == 2
    assert "3 of the source's 3 dates are not after the panel's last, 2024-02-03" in done.err

    planned = json.loads(memfit("panel", "prune", "out", "--dry-run", "--json").out)
    assert [(row["path"], row["removed"]) for row in planned["versions"]] == [(str(old), True), (str(new), False)]
    assert old.exists()
    done = memfit("panel", "prune", "out")
    assert f"{old}: removed, " in done.out
    assert f"{new}: stays: is the newest" in done.out
    assert "1 of 2 panels removed" in done.out
    assert not old.exists()
    assert memfit("panel", "verify", "out").exit_code == 0
    assert memfit("panel", "prune", "out", "--keep", "0").exit_code == 2


def test_append_refuses_new_assets(memfit, prices):
    memfit(*BUILD)
    pq.write_table(rows("2024-02-01", 3, num_assets=7), "listed.parquet")
    done = memfit("panel", "append", "out", "listed.parquet")
    assert done.exit_code == 2
    assert "2 assets that the panel has not: A5, A6." in done.err
    assert "do:   build a panel anew from the whole source" in done.err


@pytest.mark.parametrize("verb", ["build", "info", "verify", "append", "prune"])
def test_each_verb_has_help_that_ends_with_its_exit_codes(memfit, verb):
    done = memfit("panel", verb, "--help")
    assert done.exit_code == 0
    assert "Exit codes: 0 " in done.out


def test_a_bar_on_a_terminal_and_none_elsewhere(memfit, prices):
    memfit(*BUILD)
    command = [sys.executable, "-c", "from memfit.cli import main; main()", "panel", "verify", "out"]
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, env=env, timeout=60, check=True)
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert "verifying" in shown
    assert "100%" in shown or "0%" in shown
    assert b"verifying" not in done.stdout
    assert memfit("panel", "verify", "out").err == ""
