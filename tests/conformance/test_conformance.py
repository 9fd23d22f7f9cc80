"""The suite of moments sees the faults of the frameworks alone; with memfit each moment is the same, or refused."""

import importlib
import json
import sys
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).resolve().parents[2] / "conformance"
FRAMEWORKS = ["huggingface", "lightning", "accelerate"]
#: The others end a run between the same two saves as one of these, so that its resume reads the same files.
MOMENTS = "1-6,11,13,15,17-21,24-30,33,35,37-64"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(580),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("default"),  # the frameworks' own are no failures in a child, either
]
for _name in ("transformers.trainer", "lightning.pytorch", "accelerate"):
    pytest.importorskip(_name)


def _main(module, *words):
    """Do what ``python -m`` does, in a child, whose output goes where a process's goes."""
    sys.stdout, sys.stderr, sys.argv = sys.__stdout__, sys.__stderr__, [module, *words]
    return importlib.import_module(f"memfit_conformance.{module}").main()


@pytest.fixture
def main(monkeypatch):
    """Run a program of the suite in a child, which has what this process imported; return its exit status."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda module, *words: forked.call(_main, module, *words)


@pytest.fixture
def suite(main, tmp_path):
    """Run the suite; return its exit status and its rows by moment."""

    def run(framework, *words):
        file = tmp_path / "found.json"
        status = main("__main__", framework, "--json", str(file), *words)
        rows = json.loads(file.read_text())["rows"]
        return status, {row["moment"]: row for row in sorted(rows, key=lambda row: not row["is_good"])}

    return run


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_with_memfit_a_training_that_is_stopped_at_any_moment_is_the_same_or_refused(suite, framework):
    status, rows = suite(framework, "--with-memfit", "--moments", MOMENTS)
    faults = {number: (row["text"], row["log"][-1500:]) for number, row in rows.items() if not row["is_good"]}
    assert (status, faults) == (0, {})
    assert rows["61"]["text"] == rows["56"]["text"] == "refused before step 1"
    assert sum(row["text"] == "same" for row in rows.values()) >= 42


@pytest.mark.parametrize(
    ("framework", "differs"),
    [
        ("huggingface", {"7": "masks, losses, hash", "51": "crash before step 1", "61": "not refused"}),
        ("lightning", {"7": "samples, losses, hash", "46": "exit 0", "61": "not refused"}),
        ("accelerate", {"7": "samples, losses, hash", "51": "crash before step 1", "61": "not refused"}),
    ],
)
def test_alone_the_suite_sees_what_differs(suite, framework, differs):
    status, rows = suite(framework, "--moments", ",".join(differs))
    assert status == 0, "it is no fault of memfit"
    assert {number: text in rows[number]["text"] for number, text in differs.items()} == dict.fromkeys(differs, True)
    assert not any(rows[number]["is_good"] for number in differs)


@pytest.mark.long
@pytest.mark.parametrize(("framework", "size"), [("huggingface", 4), ("lightning", 2), ("accelerate", 2)])
def test_with_memfit_ranks_end_in_the_same_bytes(main, capfd, framework, size):
    status = main("ranks", framework, "--with-memfit", "--sizes", str(size))
    table = capfd.readouterr().out
    assert (status, table.count("| same |")) == (0, 5), table


def test_each_fault_of_a_framework_is_in_the_installed_version(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from memfit_conformance._faults import FAULTS

    assert [fault.file for fault in FAULTS if fault.line() is None] == []


def test_all_64_moments_are_listed_and_each_pair_is_combined(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from memfit_conformance._combinations import DIMENSIONS, pairwise
    from memfit_conformance._moments import MOMENTS

    assert list(dict.fromkeys(int(one.number.rstrip("bcd")) for one in MOMENTS)) == list(range(1, 65))
    found = pairwise({"moment": [one.number for one in MOMENTS], **DIMENSIONS})
    assert len(found) < 1.2 * len(MOMENTS) * 3
    pairs = [(one["moment"], one["accumulation"]) for one in found]
    assert set(pairs) == {(one.number, number) for one in MOMENTS for number in (1, 2, 5)}
