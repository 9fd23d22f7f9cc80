"""Python objects in mapped files."""

import gc
import json
import math
import multiprocessing
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.data import PackedDataset, Panel, pack, write_sealed
from memfit.errors import DamagedError, DataError

torch = pytest.importorskip("torch")
Pair = namedtuple("Pair", "left right")

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.tuples(st.integers(), st.text(max_size=2))
objects = st.recursive(plain, lambda one: st.lists(one) | st.tuples(one, one) | st.dictionaries(keys, one))


def same(left, right):
    """Equal, and of the same types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(map(repr, left)) == list(map(repr, right)) and same([*left.values()], [*right.values()])
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right and (
        left != 0 or not isinstance(left, float) or math.copysign(1, left) == math.copysign(1, right)
    )


@pytest.mark.slow
@given(st.lists(objects, max_size=20))
@settings(max_examples=20, deadline=None)
def test_plain_objects_come_back_equal_and_of_their_types(values):
    assert same(list(pack(values)), values)


@pytest.mark.parametrize(
    "value",
    [
        *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 127, 128, -128, -129, 1 << 5000),
        *(-0.0, math.inf, "\ud800", "é" * 300, b"\0" * 256, "x" * 255, [[]] * 256, {"": {}}, {(1, "a"): [None]}),
        *(np.float32(0.1), np.int64(3), np.str_("a"), np.datetime64("2024-01-02")),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_values_at_the_borders_of_the_encoding_come_back(value):
    (found,) = pack([value])
    assert same(found, value)


def test_not_a_number_comes_back():
    assert math.isnan(pack([math.nan])[0])


ARRAYS = {
    "float32": np.arange(12, dtype=np.float32).reshape(3, 4),
    "big-endian": np.arange(5, dtype=">i8"),
    "0-d": np.array(7, np.uint16),
    "empty": np.empty((0, 3), np.float64),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "dates": np.array(["2024-01-02", "NaT"], "datetime64[D]"),
    "text": np.array(["a", "longer"]),
    "bytes": np.array([b"ab", b"c"]),
    "columns": np.zeros(3, [("a", "<i2"), ("b", "<f8", (2,))]),
    "transposed": np.arange(6).reshape(2, 3).T,
    "strided": np.arange(20)[::3],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_with_dtype_and_shape_as_an_aligned_read_only_view(name):
    array = ARRAYS[name]
    _, found = pack(["odd", ["x", array]])[1]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found, array)
    assert found.flags.aligned
    with pytest.raises(ValueError, match="read-only"):
        found[...] = 0


def test_an_array_is_no_copy_of_the_map():
    data = pack([np.arange(1000), np.arange(7)])
    one, again = data[1], data[1]
    assert one.__array_interface__["data"] == again.__array_interface__["data"]
    whole = np.frombuffer(data._files._data, np.uint8)
    assert np.shares_memory(one, whole)


def test_a_tensor_comes_back_as_an_array():
    found = pack([{"x": torch.arange(4.0, requires_grad=True)}])[0]["x"]
    assert type(found) is np.ndarray
    assert found.tolist() == [0, 1, 2, 3]


def test_a_packed_data_set_is_indexed_as_a_list_is():
    values = [f"line {number}" for number in range(10)]
    data = pack(values)
    assert [data[0], data[-1], data[np.int64(3)]] == [values[0], values[-1], values[3]]
    assert list(data) == values
    assert list(reversed(data)) == values[::-1]
    for part in (slice(2, 5), slice(None, None, -3), slice(-4, None), slice(20, 30)):
        view = data[part]
        assert isinstance(view, PackedDataset)
        assert list(view) == values[part]
        assert len(view) == len(values[part])
    assert data[2:8][1:3][-1] == values[4]
    assert "line 7" in data
    assert data.index("line 7") == 7
    for wrong in (10, -11):
        with pytest.raises(IndexError):
            data[wrong]
    with pytest.raises(TypeError):
        data["1"]


@pytest.mark.parametrize("values", [[], [None], [[]]], ids=str)
def test_little_or_nothing_can_be_packed(values, tmp_path):
    pack(values, tmp_path / "packed")
    data = PackedDataset.open(tmp_path / "packed", verify="full")
    assert list(data) == values
    assert len(data) == len(values)


class Unknown:
    pass


REFUSED = {
    "object": ({"a": [0, Unknown()]}, r"a value of the type .*test_packed.Unknown"),
    "class": ({Unknown: 1}, r"a value of the type builtins.type"),
    "function": ([len], r"a value of the type builtins.builtin_function_or_method"),
    "named tuple": (Pair(1, 2), r"a value of the type .*Pair"),
    "ordered": ([OrderedDict()], r"a value of the type collections.OrderedDict"),
    "objects": ([np.array([None])], r"an array of the dtype object"),
    "masked": (np.ma.array([1]), r"a value of the type numpy.ma"),
    "bfloat16": (torch.ones(1, dtype=torch.bfloat16), r"a tensor of torch.bfloat16"),
    "sparse": (torch.eye(2).to_sparse(), r"a tensor of torch.float32, torch.sparse_coo"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_kind_is_refused_with_its_place_and_leaves_nothing(name, tmp_path):
    value, message = REFUSED[name]
    with pytest.raises(DataError, match=f"object 2 cannot be packed: it is or holds {message}") as caught:
        pack(iter([1, 2, value]), tmp_path / "packed")
    assert caught.value.rule
    assert caught.value.remedy
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_list_that_holds_itself_comes_back_and_one_that_is_nested_too_deep_is_refused():
    endless = []
    endless.append(endless)
    (found,) = pack([endless])
    assert found[0] is found
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(DataError, match="object 0 cannot be packed: it is nested too deep"):
        pack([deep])


class Calls:
    def __reduce__(self):
        return Path.touch, (Path("called"),)


@pytest.mark.parametrize(
    "content", [pickle.dumps(Calls()), pickle.dumps(Path), pickle.dumps(np.arange(3))], ids=["call", "class", "array"]
)
def test_a_file_that_names_code_is_refused_when_it_is_read(content, tmp_path, monkeypatch):
    """Packed objects may come from others: whoever wrote them cannot have a reader call anything."""
    monkeypatch.chdir(tmp_path)
    folder = pack([b"-" * 300], tmp_path / "packed").path
    file = folder / "data.bin"
    data = bytearray(file.read_bytes())
    data[20 : 20 + len(content)] = content  # behind 16 bytes and the number of arrays, 0
    file.write_bytes(data)
    with pytest.raises(pickle.UnpicklingError, match="packed objects hold no code"):
        PackedDataset.open(folder, verify="sizes")[0]
    assert not (tmp_path / "called").exists()


def test_packed_objects_of_another_format_are_refused(tmp_path):
    pack([1], tmp_path / "packed")
    fields = json.loads((tmp_path / "packed" / "manifest.json").read_text())
    del fields["checksum"]
    write_sealed(tmp_path / "packed", {**fields, "format": 1})
    with pytest.raises(
        DataError, match=r"has the packed objects format 1\.[^~]*make it again from its source, after rm"
    ):
        PackedDataset.open(tmp_path / "packed")


def test_an_error_of_the_source_passes_through_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def source():
        yield 1
        raise RuntimeError("no more")

    for path in (tmp_path / "packed", None):
        with pytest.raises(RuntimeError, match="no more"):
            pack(source(), path)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_overwritten(tmp_path):
    pack(["first"], tmp_path / "packed")
    with pytest.raises(DataError, match="packed is there already"):
        pack(["second"], tmp_path / "packed")
    assert list(PackedDataset.open(tmp_path / "packed")) == ["first"]


@pytest.mark.slow
def test_a_folder_without_a_path_goes_with_its_last_view(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    view = pack(["a", "b", "c"])[1:]
    assert view.path.exists()
    child = multiprocessing.get_context("fork").Process(target=_collect, args=(view,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert list(view) == ["b", "c"]
    del view, child
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def _collect(view):
    view.__dict__.clear()
    gc.collect()


def test_it_pickles_as_its_path():
    data = pack([{"text": "x" * 100}] * 1000)
    pickled = pickle.dumps(data[10:])
    assert len(pickled) < 500
    assert len(pickle.loads(pickled)) == 990


def test_a_changed_byte_and_a_missing_one_are_found(tmp_path):
    pack([np.arange(50)] * 50, tmp_path / "packed")
    file = tmp_path / "packed" / "data.bin"
    content = bytearray(file.read_bytes())
    content[1234] ^= 1
    file.write_bytes(content)
    data = PackedDataset.open(tmp_path / "packed", verify="sizes")
    with pytest.raises(DamagedError, match=r"data.bin was changed between bytes 0 and"):
        data.verify()
    for verify in ("sample", "full"):
        with pytest.raises(DamagedError):
            PackedDataset.open(tmp_path / "packed", verify=verify)
    assert len(pickle.loads(pickle.dumps(data))) == 50
    file.write_bytes(content[:-1])
    with pytest.raises(DamagedError, match=r"data.bin has \d+ bytes instead of \d+"):
        PackedDataset.open(tmp_path / "packed")
    file.unlink()
    with pytest.raises(DamagedError, match=r"data\.bin is not there"):
        PackedDataset.open(tmp_path / "packed")


@pytest.mark.parametrize(
    "change", [lambda text: text.replace(b'"num_objects": 2', b'"num_objects": 1'), lambda text: b"[]x"]
)
def test_a_changed_manifest_is_found(change, tmp_path):
    pack([1, 2], tmp_path / "packed")
    file = tmp_path / "packed" / "manifest.json"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DamagedError, match="does not match its own checksum"):
        PackedDataset.open(tmp_path / "packed")


def test_a_folder_of_another_kind_is_refused(tmp_path, make_table):
    with pytest.raises(DataError, match=r"holds no packed objects: it has no manifest.json"):
        PackedDataset.open(tmp_path)
    panel = Panel.build(make_table(), tmp_path, features=["f0"])
    with pytest.raises(DataError, match="describes panel"):
        PackedDataset.open(panel.path)


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(DataError, match=r"could not be written \(File too large\)"):
            pack([bytes(1 << 19)] * 20, tmp_path / "packed")
    finally:
        signal.signal(signal.SIGXFSZ, ignored)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_a_killed_packer_leaves_no_data_set_and_the_next_one_sweeps(tmp_path):
    program = f"""
from memfit.data import pack
def source():
    while True:
        yield bytes(1 << 20)
        print("written", flush=True)
pack(source(), {str(tmp_path / "packed")!r})
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as packer:
        for _ in range(10):
            packer.stdout.readline()
        packer.kill()
    assert (tmp_path / ".packed.building").exists()
    with pytest.raises(DataError):
        PackedDataset.open(tmp_path / "packed")
    assert list(pack([1], tmp_path / "packed")) == [1]
    assert not (tmp_path / ".packed.building").exists()


@pytest.mark.proves("S4-06")
@pytest.mark.slow
def test_packing_takes_memory_by_its_buffer_and_not_by_its_data(tmp_path):
    """Two streams of 12 and of 48 MB; a list of the second's lines takes over 80 MB."""
    program = """
import re, sys
from memfit.data import pack
for count in (1, 150_000, 600_000):
    pack((f"line {number}: {number * 7919:>60}" for number in range(count)), f"{sys.argv[1]}/{count}")
    print(int(re.findall(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[0]) << 10)
"""
    found = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True).stdout
    imported, small, large = map(int, found.split())
    assert large < 200e6
    assert small - imported < 32 << 20
    assert large - small < 8 << 20
    assert PackedDataset.open(tmp_path / "600000")[-1] == f"line 599999: {599999 * 7919:>60}"


@pytest.mark.slow
def test_workers_that_read_all_objects_do_not_copy_them(tmp_path):
    program = Path(__file__).with_name("packed_workers.py")
    command = [sys.executable, str(program), str(tmp_path / "packed"), "fork", "forkserver"]
    lines = subprocess.run(command, capture_output=True, check=True).stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        empty, packed, listed = map(int, line.split())
        assert listed - empty > 12 << 20
        # A few MiB are an interpreter's own, now here and now there; a copy would be all of it.
        assert packed - empty < 0.1 * (listed - empty) + (4 << 20)


@pytest.mark.parametrize("value", [np.bytes_(b"x\0"), np.str_("x\0"), np.str_("\0")], ids=repr)
def test_numpy_text_that_its_arrays_cut_is_refused(value, tmp_path):
    with pytest.raises(DataError, match=r"object 1 cannot be packed: it is or holds a numpy.* that ends with a zero"):
        pack([1, {"key": value}])
    kept = [np.bytes_(b"\0x"), np.str_("x"), np.str_(""), value.item()]
    data = pack(kept)
    assert [(type(one), one) for one in data] == [(type(one), one) for one in kept]


@pytest.mark.parametrize("one", ["abc", b"abc", bytearray(b"abc"), {"a": 1}, OrderedDict(a=1)], ids=repr)
def test_one_object_in_place_of_a_list_is_refused(one, tmp_path):
    with pytest.raises(DataError, match=f"the objects are one {type(one).__name__}") as caught:
        pack(one, tmp_path / "packed")
    assert "pack([one])" in str(caught.value.remedy)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["file/x", "file/sub/x", "/proc/packed"])
def test_a_folder_that_cannot_be_made_is_refused(place, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"nothing can be written in .*(file|/proc)") as caught:
        pack([1], tmp_path / place)
    assert (caught.value.rule, caught.value.remedy) > ("", "")
