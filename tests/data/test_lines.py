"""JSON Lines by an index: the rows of Python's own reader, a torn end, changed files, and no copy in memory."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.data import JsonLines, Padding, SequenceLoader, Tokenized
from memfit.data import _lines as lines
from memfit.errors import DataError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.tuples(VALUES, st.sampled_from(["\n", "\r\n", "\n\n", "\n\r\n"])), min_size=1), st.booleans())
def test_rows_are_those_that_a_plain_reader_finds(tmp_path_factory, rows, is_ended):
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    text = "".join(json.dumps({"v": value}, ensure_ascii=False) + end for value, end in rows)
    path.write_bytes((text if is_ended else text.rstrip("\r\n")).encode())
    expected = [{"v": value} for value, _ in rows]
    path.write_bytes(b"1\n" + path.read_bytes())
    expected.insert(0, 1)
    for found in (JsonLines(path), JsonLines(path)):  # the second one finds an index
        assert [found[number] for number in range(len(found))] == list(found) == expected
        assert (found[-1], found[1:], found.torn_bytes) == (expected[-1], expected[1:], 0)
    Path(f"{path}.index").unlink()


@pytest.mark.parametrize(("end", "torn"), [('{"a": 3', 7), ("{", 1), ('"whole"', 0), ("\n\n\n", 0), ("", 0)])
def test_a_last_line_that_was_cut_off_is_no_row_and_is_told(tmp_path, end, torn):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n' + end)
    rows = JsonLines(path)
    assert list(rows) == [{"a": 1}, {"a": 2}] + (["whole"] if end == '"whole"' else [])
    assert rows.torn_bytes == torn


def test_a_file_that_has_changed_is_refused_by_name_and_indexed_anew_when_told(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    assert len(JsonLines(path)) == 1
    for text in ('{"a": 1}\n{"a": 2}\n', '{"a": 3}\n'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"rows\.jsonl has changed since rows\.jsonl\.index was made"):
            JsonLines(path)
        Path(f"{path}.index").unlink()
        assert len(JsonLines(path)) == text.count("\n")


@pytest.mark.parametrize("text", ["", "\n\r\n", "{"])
def test_a_file_without_a_row_is_refused_and_so_is_none_at_all(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match="has no row"):
        JsonLines(path)
    with pytest.raises(DataError, match=r"none\.jsonl or its index cannot be used"):
        JsonLines(tmp_path / "none.jsonl")
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


@pytest.mark.parametrize("has_orjson", [True, False])
def test_with_and_without_orjson_the_same_rows_come_and_the_same_are_refused(tmp_path, monkeypatch, has_orjson):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "\xc3\xa9"}\n{"a": NaN}\n{"a": "\xff"}\nno\n  \n')
    rows = JsonLines(path)
    monkeypatch.setattr(lines.importlib.util, "find_spec", lambda name: has_orjson or None)
    lines._parser.cache_clear()
    try:
        if has_orjson:
            pytest.importorskip("orjson")
            assert rows[0] == {"a": "é"}
        else:
            with pytest.warns(UserWarning, match="pip install orjson"):
                assert rows[0] == {"a": "é"}
        for number in range(1, 5):
            with pytest.raises(DataError, match=f"row {number} of .*rows.jsonl is no JSON"):
                rows[number]
    finally:
        lines._parser.cache_clear()


def test_it_is_pickled_by_its_name_and_feeds_a_loader(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"from": "a" * n, "to": "b" * (9 - n)}) + "\n" for n in range(1, 9)))
    rows = pickle.loads(pickle.dumps(JsonLines(path, tmp_path / "own.index")))
    assert rows.index_path == tmp_path / "own.index" and not (tmp_path / "pairs.jsonl.index").exists()
    ids = Tokenized(rows, lambda text: [ord(one) for one in text], {"from": "input_ids", "to": "labels"})
    batches = list(SequenceLoader(ids, Padding(pad_id=0), max_tokens=16, shuffle=1, num_workers=2))
    assert sorted(int(one) for batch in batches for one in batch["attention_mask"].sum(axis=1)) == list(range(1, 9))
    assert max(array.size for batch in batches for array in batch.values()) <= 16
    assert (batches[0]["labels"] == -100).any() or len(batches[0]["labels"]) == 1


def test_an_index_of_many_rows_takes_no_memory_for_each(tmp_path):
    path = tmp_path / "rows.jsonl"
    with open(path, "w") as file:
        for start in range(0, 1_000_000, 10_000):
            file.write("".join(f'{{"n": {number}}}\n' for number in range(start, start + 10_000)))
    program = """
import resource, sys
from memfit.data import JsonLines
JsonLines.__len__  # imported
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = JsonLines(sys.argv[1])
assert rows[777_777] == {"n": 777_777} and len(rows) == 1_000_000
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 + 8  # the mapped index is 8 MB
