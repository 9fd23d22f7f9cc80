"""The benchmark of diagnoses: what it counts, and that a false alarm or a wrong figure is missed and not met."""

import json

import pytest

FIGURES = {"device_total_gib": None, "allocated_gib": None, "reserved_gib": None, "tried_gib": None}


@pytest.fixture
def main(benchmark):
    return benchmark("diagnosis").main


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


def test_all_right_is_met_and_the_substrings_see_memory_in_a_room(main, tmp_path):
    assert main(["--corpus", write(tmp_path / "c.jsonl", ARRAY, ROOM, KILLED), "--json", str(tmp_path / "f")]) == 0
    found = json.loads((tmp_path / "f").read_text())["figures"]
    names = ("kind", "ambiguous", "figures", "false_oom", "substrings_false_oom")
    assert [found[name] for name in names] == [[2, 2], [1, 1], [3, 3], [0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (excerpt("wrong", ARRAY["text"], "none"), "MISSED false 'out of memory': 1 of 1"),
        (excerpt("wrong", ARRAY["text"], "host_alloc", tried_gib=2.01), "MISSED figures"),
    ],
)
def test_a_false_alarm_and_a_wrong_figure_are_missed_and_named(main, tmp_path, capsys, wrong, said):
    assert main(["--corpus", write(tmp_path / "c.jsonl", wrong)]) == 1
    out = capsys.readouterr().out
    assert said in out and "not all right: wrong" in out


def test_a_line_that_says_what_is_wanted_counts_in_what_it_names(main, tmp_path):
    full = {"name": "disk", "text": "RuntimeError: [ENOSPC] No space left on device", "want": {"cause": "disk_full"}}
    lines = [
        {"name": "array", "text": ARRAY["text"], "want": {"kind": "host_alloc", "tried_gib": 2.0}},
        full,
        {"name": "wrong cause", "text": ROOM["text"], "want": {"kind": "none", "cause": "disk_full"}},
    ]
    assert main(["--corpus", write(tmp_path / "c.jsonl", *lines), "--json", str(tmp_path / "f")]) == 1
    found = json.loads((tmp_path / "f").read_text())["figures"]
    assert [found[name] for name in ("kind", "cause", "figures", "phase")] == [[2, 2], [1, 2], [1, 1], [0, 0]]
    assert (found["wrong"], found["is_own"]) == (["wrong cause"], False)


@pytest.mark.slow
def test_a_large_log_is_diagnosed_in_its_middle(benchmark, tmp_path):
    assert benchmark("diagnosis").stream(0.01, tmp_path)["kind"] == "gpu"
    assert list(tmp_path.iterdir()) == []
