"""The benchmark of diagnoses: what it counts, and that a false alarm or a wrong figure is missed and not met."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "diagnosis.py"
FIGURES = {"device_total_gib": None, "allocated_gib": None, "reserved_gib": None, "tried_gib": None}


@pytest.fixture(scope="module")
def benchmark():
    specification = importlib.util.spec_from_file_location("benchmark_diagnosis", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # its dataclass looks there
    specification.loader.exec_module(module)
    yield module
    del sys.modules[specification.name]


def excerpt(name, text, kind, *, phase="unknown", notes="", **figures):
    label = {"oom": kind != "none", "recovered": False, "kind": kind, "phase": phase, **FIGURES, **figures}
    return {"id": name, "text": text, "label": label, "notes": notes}


KILLED = excerpt("killed", "step 1 loss 0.5\nKilled", "host_cgroup", notes="AMBIGUOUS: who killed is not shown")
ARRAY = excerpt(
    "array",
    "MemoryError: Unable to allocate 2.00 GiB for an array with shape (9,) and data type int8",
    "host_alloc",
    tried_gib=2.0,
)
ROOM = excerpt("room", "KeyError: 'bathroom'", "none")


def write(path, *excerpts):
    path.write_text("".join(json.dumps(one) + "\n" for one in excerpts))
    return str(path)


def test_all_right_is_met_and_the_substrings_see_memory_in_a_room(benchmark, tmp_path, capsys):
    assert benchmark.main(["--corpus", write(tmp_path / "c.jsonl", ARRAY, ROOM, KILLED), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == [2, 2]
    assert found["ambiguous"] == [1, 1]
    assert found["figures"] == [3, 3]
    assert found["false_oom"] == [0, 1]
    assert found["substrings_false_oom"] == [1, 1]


def test_a_false_alarm_is_missed_and_named(benchmark, tmp_path, capsys):
    wrong = excerpt("wrong", ARRAY["text"], "none")
    assert benchmark.main(["--corpus", write(tmp_path / "c.jsonl", wrong)]) == 1
    out = capsys.readouterr().out
    assert "MISSED false 'out of memory': 1 of 1" in out
    assert "not all right: wrong" in out


def test_a_wrong_figure_is_missed(benchmark, tmp_path, capsys):
    wrong = excerpt("wrong", ARRAY["text"], "host_alloc", tried_gib=2.01)
    assert benchmark.main(["--corpus", write(tmp_path / "c.jsonl", wrong)]) == 1
    assert "MISSED figures" in capsys.readouterr().out


def test_a_figure_counts_only_where_the_label_names_it(benchmark, tmp_path, capsys):
    unnamed, partly = excerpt("unnamed", ARRAY["text"], "host_alloc"), excerpt("partly", ARRAY["text"], "host_alloc")
    for name in FIGURES:
        del unnamed["label"][name], partly["label"][name]
    partly["label"]["tried_gib"] = 2.0
    assert benchmark.main(["--corpus", write(tmp_path / "c.jsonl", unnamed, partly), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["figures"], found["wrong"]) == ([1, 1], [])


def test_a_line_that_says_what_is_wanted_counts_in_what_it_names(benchmark, tmp_path, capsys):
    lines = [
        {"name": "array", "text": ARRAY["text"], "want": {"kind": "host_alloc", "tried_gib": 2.0}},
        {
            "name": "cause alone",
            "text": "RuntimeError: [ENOSPC] No space left on device",
            "want": {"cause": "disk_full"},
        },
        {"name": "wrong cause", "text": ROOM["text"], "want": {"kind": "none", "cause": "disk_full"}},
    ]
    assert benchmark.main(["--corpus", write(tmp_path / "c.jsonl", *lines), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [found[name] for name in ("kind", "cause", "figures", "phase")] == [[2, 2], [1, 2], [1, 1], [0, 0]]
    assert (found["wrong"], found["is_own"]) == (["wrong cause"], False)


@pytest.mark.slow
def test_without_a_corpus_the_messages_of_the_rules_are_scored_and_named(benchmark, capsys):
    assert benchmark.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("The messages that the rules were written with: ")
    assert "tests/diagnosis/signatures.jsonl" in out and "MISSED" not in out


def test_a_large_log_is_diagnosed_in_its_middle(benchmark, tmp_path):
    found = benchmark.stream(0.01, tmp_path)
    assert found["kind"] == "gpu"
    assert list(tmp_path.iterdir()) == []
