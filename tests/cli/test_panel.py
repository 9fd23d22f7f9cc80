"""``memfit panel``: from a Parquet file to a panel and back, for people and for machines."""

import json
import os
import pickle
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.conftest import check_refused
from memfit.data import PackedDataset, Panel


def rows(first, num_dates):
    date, asset = (axis.ravel() for axis in np.indices((num_dates, 5)))
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
    return tmp_path


BUILD = ["panel", "build", "prices.parquet", "--index", "day,id", "--features", "f*", "--targets", "f_ret", "-o", "out"]


def test_a_panel_is_built_by_patterns_and_found_again(memfit, prices):
    done = memfit(*BUILD)
    assert (done.exit_code, done.err) == (0, "")
    panel = Panel.newest(prices / "out")
    assert (panel.feature_names, panel.target_names, panel.shape) == (("f1", "f2"), ("f_ret",), (10, 5, 2))
    assert f"{panel.path}: built, 10 dates x 5 assets x 2 features, " in done.out
    assert "features: f1, f2\n" in done.out
    assert "was there already" in memfit(*BUILD).out


def test_build_prints_json(memfit, prices):
    done = memfit(*BUILD, "--json")
    facts = json.loads(done.out)
    panel = Panel.open(facts["path"])
    assert (facts["num_dates"], facts["num_assets"], facts["num_rows"]) == (10, 5, 50)
    assert (facts["features"], facts["targets"], facts["reused"]) == (["f1", "f2"], ["f_ret"], False)
    assert facts["bytes"] == panel.nbytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--index", "day", "--features", "f1"], "index is ['day']"),
        (["--index", "day,id", "--features", "g*"], "the pattern 'g*' finds no column of numbers"),
        (["--index", "day,id", "--features", "f_nam"], "0 columns named 'f_nam'"),
        (["--index", "day,id", "--features", "f_name"], "column 'f_name' of prices.parquet has type string"),
    ],
)
def test_what_cannot_be_built_is_refused_in_three_parts(memfit, prices, words, message):
    check_refused(memfit("panel", "build", "prices.parquet", *words, "-o", "out"), message)
    assert not list((prices / "out").glob("[!.]*"))


@pytest.mark.parametrize("place", ["file", "file/sub"])
def test_a_place_that_cannot_be_written_is_refused_without_settings_that_panel_has_not(memfit, prices, place):
    (prices / "file").touch()
    check_refused(memfit(*BUILD[:-1], place), "", "make that path usable, or name another one")


def test_info_says_what_a_panel_holds(memfit, prices):
    memfit(*BUILD)
    path = Panel.newest(prices / "out").path
    for where in ("out", path):
        done = memfit("panel", "info", where)
        assert done.exit_code == 0
        assert "  num_rows: 50\n  first_date: 2024-01-01\n  last_date: 2024-01-10\n" in done.out
        assert "  targets: f_ret\n" in done.out
    facts = json.loads(memfit("panel", "info", "out", "--json").out)
    assert (facts["path"], facts["num_listed_later"]) == (str(path), 0)
    for where in ("absent", prices):
        check_refused(memfit("panel", "info", where), "", "memfit panel build SOURCE")


def test_verify_names_the_file_that_was_changed(memfit, prices):
    memfit(*BUILD)
    assert "every byte as it was written" in memfit("panel", "verify", "out").out
    assert json.loads(memfit("panel", "verify", "out", "--json").out)["whole"]
    file = Panel.newest(prices / "out").path / "values.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    check_refused(memfit("panel", "verify", "out"), f"{file} was changed between bytes 0 and ", "rm -r ")


@pytest.mark.parametrize("verb", ["build", "info", "verify", "pack"])
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


@pytest.fixture
def scenes(tmp_path):
    (tmp_path / "scenes").mkdir()
    for number in (2, 10):
        items = [{"id": number, "text": f"{one:>200}"} for one in range(200)]
        (tmp_path / "scenes" / f"{number}.pkl").write_bytes(pickle.dumps(items))
    return tmp_path


@pytest.mark.slow
def test_pickles_are_packed_and_found_again(memfit, scenes):
    done = memfit("panel", "pack", "scenes/*.pkl", "-o", "scenes.packed")
    assert done.exit_code == 0
    assert f"{scenes / 'scenes.packed'}: packed, 400 items of 2 files (" in done.out
    assert "a pickle runs code when it is loaded" in done.err
    assert [one["id"] for one in PackedDataset.open("scenes.packed")] == [2] * 200 + [10] * 200
    facts = json.loads(memfit("panel", "pack", "scenes/*.pkl", "-o", "scenes.packed", "--json").out)
    assert (facts["reused"], facts["num_items"]) == (True, 400)


def test_pack_refuses_in_three_parts_and_leaves_nothing(memfit, scenes):
    (scenes / "scenes" / "3.pkl").write_bytes(pickle.dumps([{"id": Path()}]))
    for word, message in (("none/*", "'none/*' names no file"), ("scenes/*", "scenes/3.pkl, item 0 cannot be packed")):
        check_refused(memfit("panel", "pack", word, "-o", "out"), message)
    assert not list(scenes.glob("*out*"))


def test_a_function_is_called_without_secrets_and_its_death_leaves_nothing(memfit, scenes, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "not-for-pickles")
    monkeypatch.setenv("STORE", "https://me:not-for-pickles@host/")
    monkeypatch.setenv("PLAIN", "1")
    (scenes / "given.py").write_text(
        "import os, signal\n"
        "def names():\n    return [name for name in ('HUB_TOKEN', 'STORE', 'PLAIN') if name in os.environ]\n"
        "def killed():\n    yield 1\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = memfit("panel", "pack", "given:names", "-o", "out")
    assert done.exit_code == 0
    assert "process without" in done.err and "HUB_TOKEN" in done.err
    assert list(PackedDataset.open("out")) == ["PLAIN"]
    done = memfit("panel", "pack", "given:killed", "-o", "never")
    assert done.exit_code != 0
    assert "ended by signal 9" in done.err
    assert not list(scenes.glob("*never*"))


@pytest.mark.slow
def test_ctrl_c_ends_the_child_and_leaves_nothing(scenes):
    (scenes / "given.py").write_text(
        "import os, pathlib, time\n"
        "def waiting():\n    yield 'x'\n    pathlib.Path('.pid').write_text(str(os.getpid()))\n"
        "    os.rename('.pid', 'pid')\n    time.sleep(60)\n"
    )
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # tests may run in the background
        "from memfit.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "panel", "pack", "given:waiting", "-o", "out"]
    with subprocess.Popen(command, cwd=scenes, stderr=subprocess.PIPE, text=True) as packing:
        try:
            while not (scenes / "pid").exists():
                assert packing.poll() is None
                time.sleep(0.05)
            assert (scenes / ".out.building").exists()
            packing.send_signal(signal.SIGINT)
            packing.communicate(timeout=60)
        finally:
            packing.kill()
    assert packing.returncode == 130
    pid, until = (scenes / "pid").read_text(), time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert not list(scenes.glob("*out*"))
