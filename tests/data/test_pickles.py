"""Pickles, and what a function gives, become one packed store."""

import os
import pickle
import re
import weakref
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from memfit.data import PackedDataset, _pickles, pack_source
from memfit.errors import DamagedError, DataError


def scene(number):
    return {"id": number, "name": f"scene {number}", "boxes": [0.5] * 4, "image": np.full(3, number, np.uint8)}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Here are scenes/s1.pkl, s2.pkl and s10.pkl with 3 items each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenes").mkdir()
    for at, number in enumerate((1, 2, 10)):
        dump(f"scenes/s{number}.pkl", [scene(3 * at + one) for one in range(3)])
    return tmp_path


def dump(name, *objects):
    Path(name).write_bytes(b"".join(map(pickle.dumps, objects)))


def packed(*words):
    return pack_source(words or ["scenes/*.pkl"], "out")


def refused(*words):
    with pytest.raises(DataError) as caught:
        packed(*words)
    assert caught.value.rule
    assert caught.value.remedy
    assert not list(Path().glob("*out*"))  # no folder, nothing aside, no lock
    return caught.value.what


def test_files_in_natural_order_become_one_store_with_equal_items(place):
    found = packed()
    data = PackedDataset.open("out", verify="full")
    assert [one["id"] for one in data] == list(range(9))
    assert repr(list(data)) == repr([scene(number) for number in range(9)])
    facts = {name: found[name] for name in ("reused", "num_files", "num_items")}
    assert facts == {"reused": False, "num_files": 3, "num_items": 9}
    assert found["bytes"] == data.nbytes
    assert found["source_bytes"] == sum(file.stat().st_size for file in Path("scenes").iterdir())


def test_a_file_holds_a_list_or_one_item_and_may_hold_several_pickles(place):
    dump("mixed.pkl", {"a": 1}, [{"a": 2}, {"a": 3}], [], {"a": 4})
    packed("mixed.pkl")
    assert [one["a"] for one in PackedDataset.open("out")] == [1, 2, 3, 4]


def test_the_same_files_find_their_store_and_check_it_and_others_are_refused(place):
    packed()
    assert packed("scenes/s10.pkl", "scenes/s[12].pkl", "scenes/s1.pkl")["reused"]
    before = Path("out/manifest.json").read_bytes()
    for change in (lambda: dump("scenes/s2.pkl", [scene(99)] * 3), Path("scenes/s2.pkl").unlink):
        change()
        with pytest.raises(DataError, match=r"out is there already"):
            packed()
    assert Path("out/manifest.json").read_bytes() == before


def test_a_damaged_store_is_not_found_again(place):
    packed()
    data = Path("out/data.bin")
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    with pytest.raises(DamagedError):
        packed()


def test_a_function_gives_the_items_and_is_called_without_arguments(place, monkeypatch):
    Path("given_here.py").write_text("ITEMS = [1, 2]\ndef items():\n    yield from ([n] for n in range(500))\n")
    monkeypatch.syspath_prepend(place)
    found = packed("given_here:items")
    assert (found["num_files"], found["num_items"]) == (0, 500)
    assert list(PackedDataset.open("out")) == [[n] for n in range(500)]
    with pytest.raises(DataError, match="out is there already"):  # nobody knows what it would give now
        packed("given_here:items")
    assert "'given_here:other' names no code" in refused_elsewhere("given_here:other")
    assert "'math:pi' gives a float" in refused_elsewhere("math:pi")


def refused_elsewhere(word):
    with pytest.raises(DataError) as caught:
        pack_source([word], "elsewhere")
    assert not list(Path().glob("*elsewhere*"))
    return caught.value.what


def test_what_cannot_be_packed_is_refused_by_file_and_item_and_leaves_nothing(place):
    dump("bad.pkl", [scene(1), scene(2) | {"name": OrderedDict()}])
    assert re.search("bad.pkl, item 1 cannot be packed: .*OrderedDict", refused("scenes/s1.pkl", "bad.pkl"))


def test_files_that_are_no_pickles_or_not_there_are_refused(place):
    Path("bad.pkl").write_bytes(Path("scenes/s1.pkl").read_bytes()[:-9])
    assert "bad.pkl cannot be unpickled (" in refused("scenes/s1.pkl", "bad.pkl")
    Path("bad.pkl").write_bytes(b"c__nowhere__\nthing\n.")
    assert "bad.pkl cannot be unpickled (ModuleNotFoundError" in refused("bad.pkl")
    assert "'none/*.pkl' names no file." in refused("scenes/*.pkl", "none/*.pkl")
    assert "'scenes' names no file: it is a folder." in refused("scenes")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_file_of_another_user_is_not_loaded(place):
    class Runs:
        def __reduce__(self):
            return Path.touch, (Path("ran"),)

    dump("scenes/s3.pkl", Runs())
    os.chown("scenes/s3.pkl", 12345, 12345)
    Path("link.pkl").symlink_to("scenes/s3.pkl")
    for name in ("scenes/*.pkl", "link.pkl"):
        assert "is not unpickled: it belongs to uid 12345, this is uid 0" in refused(name)
    assert not Path("ran").exists()


def test_one_file_at_a_time_is_in_memory(place, monkeypatch):
    for number in range(4):
        dump(f"{number}.npy.pkl", [np.full(9, one) for one in range(20)])
    real, loaded, alive = _pickles._load, [], []

    def load(file, opened):
        alive.append(sum(one() is not None for one in loaded))
        found = real(file, opened)
        loaded.extend(map(weakref.ref, found))
        return found

    monkeypatch.setattr(_pickles, "_load", load)
    packed("*.npy.pkl")
    assert len(alive) == 4
    assert max(alive) <= 1  # the last item, where it was packed
