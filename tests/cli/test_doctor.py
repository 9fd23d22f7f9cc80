"""``memfit doctor`` as a command."""

import json
import sys

import pytest

from cli.conftest import check_refused

LOADER = "import polars, torch\nfrom torch.utils.data import DataLoader\nDataLoader(d, num_workers={})\n"


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "libs/polars").mkdir(parents=True)
    (tmp_path / "libs/polars/__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", "libs")

    def write(text):
        (tmp_path / "train.py").write_text(text)
        return ["--", sys.executable, "train.py"]

    return write


def test_a_problem_gives_2_stands_first_and_comes_with_reason_and_remedy(memfit, script):
    done = memfit("doctor", *script(LOADER.format(2)))
    lines = done.out.splitlines()
    assert done.exit_code == 2
    assert lines[0].startswith("problem fork")
    assert "train.py:3" in lines[0]
    assert lines[1].split()[0] == "why"
    assert any(line.split()[0] == "do" and "spawn" in line for line in lines[2:6])
    assert lines[-1].startswith("problems: 1, ")


def test_json_is_a_list_of_checks_and_nothing_else(memfit, script):
    done = memfit("doctor", "--json", *script(LOADER.format(2)))
    found = json.loads(done.out)
    assert done.exit_code == 2
    assert all(set(one) == {"check", "verdict", "finding", "reason", "remedy", "source"} for one in found)
    assert {one["verdict"] for one in found} <= {"ok", "warning", "problem"}
    assert found[0]["check"] == "fork"


def test_a_warning_counts_with_strict_alone(memfit, script):
    words = ["--workers", "999", *script("print(1)\n")]
    assert memfit("doctor", *words).exit_code == 0
    assert memfit("doctor", "--strict", *words).exit_code == 2


def test_what_is_fine_is_counted_and_listed_with_verbose(memfit, script):
    words = script("print(1)\n")
    short, long = memfit("doctor", *words).out, memfit("doctor", "--verbose", *words).out
    assert not any(line.startswith("ok ") for line in short.splitlines())
    fine = [line for line in long.splitlines() if line.startswith("ok ")]
    assert f"ok: {len(fine)} (--verbose lists all)" in long.splitlines()[-1]


def test_the_settings_of_memfit_run_and_the_flags_are_those_that_are_examined(memfit, script, monkeypatch):
    words = script("import numpy\n")

    def threads(*flags):
        found = json.loads(memfit("doctor", "--json", *flags, *words).out)
        return next(one["source"] for one in found if one["check"] == "threads")

    monkeypatch.setenv("MEMFIT_THREADS_PER_JOB", "3")
    assert threads().startswith("OMP_NUM_THREADS=3;")
    assert threads("--workers", "1").endswith("workers: --workers")


def test_a_batch_that_the_workers_cannot_hand_over_is_a_problem(memfit, script):
    done = memfit("doctor", "--workers", "2", "--batch", "100TiB", *script("import numpy\n"))
    assert done.exit_code == 2
    assert "2 workers x 2 batches x 100.00 TiB = 400.00 TiB" in done.out


def test_without_a_command_the_place_alone_is_examined(memfit):
    done = memfit("doctor")
    assert done.exit_code in (0, 2)
    assert "script" not in {
        line.split()[1] for line in done.out.splitlines() if line.startswith(("ok", "warn", "prob"))
    }


@pytest.mark.parametrize("words", [("--batch", "lots"), ("--workers", "-1"), ("train.py",)])
def test_bad_usage_is_refused_in_three_parts(memfit, words):
    check_refused(memfit("doctor", *words), "")
