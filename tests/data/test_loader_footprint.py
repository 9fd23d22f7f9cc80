"""What a loader will take is told before it runs, and its processes then take no more and not much less."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from memfit.data import (
    Loader,
    LoaderUse,
    Padding,
    Panel,
    SequenceLoader,
    _loader_footprint,
    host_footprint,
    look_through,
    pack,
)
from memfit.errors import JobFailedError, UsageError
from memfit.memory import ProcReader

CHILD, VALIDATION = (Path(__file__).with_name(name) for name in ("footprint_child.py", "validation_child.py"))
MIB = 1 << 20


def loader_footprint(train, valid=None, use=None):
    return host_footprint(train, valid, use, training_bytes=None)


def data_size(data):
    return look_through(data)[0]


def rows(number):
    return [{"id": n, "text": f"record number {n}", "labels": [n, n + 1]} for n in range(number)]


# --- what a data set holds


@pytest.mark.slow
def test_a_list_of_dicts_is_told_from_a_thousand_of_them():
    every = data_size(rows(1900))
    many = data_size(rows(190_000))
    assert many["object"] == pytest.approx(100 * every["object"], rel=0.05)
    assert many["array"] == 0


def test_numbers_are_told_apart_by_where_they_lie(tmp_path):
    torch = pytest.importorskip("torch")
    array = np.zeros((1000, 100), np.float32)
    np.save(tmp_path / "a.npy", array)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    found = data_size({"array": array, "view": [mapped[5:]], "tensor": torch.zeros(1000)})
    assert (found["array"], found["mapped"], found["tensor"]) == (400_000, 398_000, 4000)
    assert found["object"] < 4000 and found["array"] == 400_000
    assert sum(data_size([pack(rows(5000), tmp_path / "packed")]).values()) < 4000


def test_what_all_elements_hold_counts_once_and_what_one_holds_twice_is_its_own():
    large = "x" * 100_000
    assert data_size([{"common": large, "id": n} for n in range(5000)])["object"] < 3_000_000
    once, twice = ([(f"text {n}" * 20,) * times for n in range(5000)] for times in (1, 2))
    assert data_size(twice)["object"] == pytest.approx(data_size(once)["object"] + 5000 * 16, rel=0.05)
    texts = np.array([f"text {n}" * 5 for n in range(9000)], object)
    assert data_size(texts)["object"] == pytest.approx(sum(map(sys.getsizeof, texts)), rel=0.15)


# --- the arithmetic


@pytest.fixture
def torch_loader(monkeypatch):
    torch = pytest.importorskip("torch")
    small = _loader_footprint.EmptyTraining(200 * MIB, 90 * MIB, 10 * MIB, 3 * MIB, 8 * MIB)
    monkeypatch.setattr(_loader_footprint, "_measure", lambda *words: small)

    def make(data, size, **settings):
        return torch.utils.data.DataLoader(data, size, **settings)

    return make


def test_workers_copies_and_batches_are_counted_for_each_rank(torch_loader):
    data = list(np.zeros((400, 1024), np.float32))
    one = loader_footprint(torch_loader(data, 8, num_workers=2, prefetch_factor=4))
    assert one.parts["workers"] == 23 * MIB and one.parts["pinned"] == 0
    assert one.parts["batches"] == (2 * 4 + 1) * 8 * 4096, "the items are in the worker that was measured"
    assert 400 * 4096 < one.parts["data"] < 400 * 4096 * 1.2
    assert one.private_bytes == sum(one.parts.values()) and one.method == "computed"
    four = loader_footprint(torch_loader(data, 8, num_workers=2, prefetch_factor=4), use=LoaderUse(num_ranks=4))
    times = {name: 1 if name == "dataset copies" else 4 for name in one.parts}
    assert dict(four.parts) == {name: times[name] * size for name, size in one.parts.items()}, "ranks share the items"
    alone = loader_footprint(torch_loader(data, 8)).parts
    assert alone["workers"] == 0 and alone["batches"] == 3 * 8 * 4096, "in use, next, and the items of the next"


def test_a_forked_worker_copies_what_it_reads_and_a_spawned_one_what_it_is_sent(torch_loader):
    listed, array = rows(20_000), np.zeros((20_000, 20), np.float32)
    size = data_size(listed)

    def copies(data, **settings):
        return loader_footprint(torch_loader(data, 8, num_workers=2, collate_fn=len, **settings)).parts[
            "dataset copies"
        ]

    fork, spawn = {"multiprocessing_context": "fork"}, {"multiprocessing_context": "spawn"}
    lives_on = {"shuffle": True, "persistent_workers": True, **fork}
    assert copies(listed, **fork) == pytest.approx(size["object"], abs=2), "in order each reads its half"
    assert copies(listed, **lives_on) == 2 * size["object"] == copies(listed, **spawn), "in many epochs all of it"
    assert size["object"] < copies(listed, shuffle=True, **fork) < 2 * size["object"], "in one epoch most pages"
    assert copies(array, shuffle=True, **fork) < 10_000 < 2 * array.nbytes <= copies(array, **spawn)


class Mapped:
    """Rows of a mapped file, whose pickle is a path."""

    def __init__(self, path):
        self.path, self.rows = path, np.load(path, mmap_mode="r")

    def __getstate__(self):
        return {"path": self.path}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return np.array(self.rows[index])


def test_what_a_data_set_leaves_out_of_its_pickle_is_not_copied_and_two_maps_of_a_file_are_one(torch_loader, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((30_000, 200), np.float32))
    data = [Mapped(tmp_path / "a.npy") for _ in range(2)]
    loaders = [torch_loader(one, 8, num_workers=2, multiprocessing_context="spawn") for one in data]
    found = loader_footprint(*loaders)
    assert found.parts["dataset copies"] < 20_000 and found.parts["pickled"] == 0
    assert found.shared_bytes == 30_000 * 200 * 4


def test_pinned_batches_are_counted_as_the_allocator_rounds_them(torch_loader, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = loader_footprint(torch_loader(np.zeros((64, 300), np.float32), 4, num_workers=2, pin_memory=True))
    assert found.parts["pinned"] == (2 * 2 + 1) * 8192
    assert found.parts["batches"] == 2 * 4800


def test_validation_comes_on_top_of_workers_that_live_on_unless_they_are_released_or_ranks_take_turns(torch_loader):
    data = np.zeros((64, 256), np.float32)

    def peak(persistent, **settings):
        train = torch_loader(data, 4, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork")
        valid = torch_loader(data, 4, num_workers=1, multiprocessing_context="fork")
        found = loader_footprint(train, valid, LoaderUse(**settings))
        assert found.private_bytes == max(phase.private_bytes for phase in found.phases.values())
        return round((found.phases["validate"].private_bytes - found.parts["data"]) / MIB)

    assert (peak(True), peak(True, release=True), peak(False)) == (36, 13, 13)
    assert peak(True, num_ranks=4) == 144
    assert peak(True, num_ranks=4, num_validating=1) == 105
    assert peak(True, num_ranks=4, num_validating=1, release=True) == 13


def test_what_threads_make_ahead_is_counted(make_table, tmp_path):
    data = pack({"input_ids": np.arange(n % 9 + 1)} for n in range(100))
    here, ahead = (SequenceLoader(data, Padding(0), batch=4, num_workers=number) for number in (0, 3))
    size = sum(array.nbytes for array in here.longest().values())
    found = loader_footprint(here, ahead)
    assert [peak.private_bytes - found.parts["data"] for peak in found.phases.values()] == [2 * size, 5 * size]
    assert found.parts["workers"] == 0 and found.shared_bytes == data.nbytes
    panel = Panel.build(make_table(20, 30, 4, missing=0), tmp_path, features=["f0", "f1"], targets=["ret"])
    loader = Loader(panel, range(20), lookback=4, target=None, num_workers=2)
    found = loader_footprint(loader, use=LoaderUse(num_ranks=2))
    assert 2 * 4 * loader.largest_batch_bytes < found.private_bytes < 2 * 4 * (loader.largest_batch_bytes + 1000)
    assert found.shared_bytes == panel.nbytes


@pytest.mark.slow
def test_what_cannot_be_forecast_is_refused(torch_loader, monkeypatch):
    import torch

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    for loader, said in (([1], "what a list over"), (torch_loader(Endless(), 1), "DataLoader over a Endless takes")):
        with pytest.raises(UsageError, match=said):
            loader_footprint(loader)
    with pytest.raises(UsageError, match="for 2 ranks of which 3 validate"):
        LoaderUse(num_ranks=2, num_validating=3)
    with pytest.raises(UsageError, match="a loop named keras is not known"):
        LoaderUse(loop="keras")
    monkeypatch.undo()
    with pytest.raises(JobFailedError, match="cannot find context for"):
        _loader_footprint._measure("plain", False, "fork-server", 1, 1, ())


def test_few_epochs_and_many_ranks_copy_fewer_pages(torch_loader):
    listed, settings = rows(20_000), {"num_workers": 2, "shuffle": True, "collate_fn": len}
    settings |= {"persistent_workers": True, "multiprocessing_context": "fork"}

    def share(**use):
        found = loader_footprint(torch_loader(listed, 8, **settings), use=LoaderUse(**use))
        return found.parts["dataset copies"] / found.parts["data"]

    many, few, shared = share(), share(num_epochs=1), share(num_epochs=1, num_ranks=40)
    assert 2 >= many > few > shared > 0.01
    assert share(num_epochs=100) == pytest.approx(many, rel=0.01)


def test_a_process_that_starts_a_worker_holds_the_pickled_data_if_the_worker_is_not_forked(torch_loader):
    array, listed = np.zeros((30_000, 200), np.float32), rows(20_000)
    for data, least in ((array, array.nbytes - MIB), (listed, 40 * len(listed))):
        pickled = [
            loader_footprint(torch_loader(data, 8, num_workers=1, multiprocessing_context=method)).parts["pickled"]
            for method in ("spawn", "fork")
        ]
        assert pickled[0] > least and pickled[1] == 0


@pytest.mark.proves("S3-32")
def test_validation_of_lightning_within_an_epoch_finds_the_workers_of_the_training(torch_loader):
    data = np.zeros((64, 256), np.float32)
    train, valid = (torch_loader(data, 4, num_workers=2, multiprocessing_context="fork") for _ in range(2))
    apart, within = (
        loader_footprint(train, valid, use).phases["validate"].private_bytes
        for use in (LoaderUse(), LoaderUse(loop="lightning"))
    )
    assert within - apart == pytest.approx(23 * MIB + (2 * 2 + 1) * 4 * 1024, abs=2000)


def test_lightning_has_the_old_workers_of_an_epoch_beside_new_ones_that_start_slowly(torch_loader):
    data = np.zeros((64, 256), np.float32)

    def sets(method, persistent, **use):
        """Count the sets of two workers in each phase."""
        settings = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": persistent}
        train, valid = (torch_loader(data, 4, **settings) for _ in range(2))
        found = loader_footprint(train, valid, LoaderUse(**use))
        return tuple(round(found.phases[phase].private_bytes / (20 * MIB)) for phase in ("train", "validate"))

    assert sets("spawn", False, loop="lightning") == sets("forkserver", False, loop="lightning") == (3, 3)
    assert sets("spawn", False, loop="lightning", num_epochs=1) == (2, 3), "the training begins once"
    assert sets("spawn", True, loop="lightning") == (2, 2), "they are the same in each epoch"
    assert sets("fork", False, loop="lightning") == (1, 2) and sets("spawn", False) == (1, 1)


def test_a_host_has_its_processes_and_their_state_beside_the_loaders_and_libraries_once(torch_loader, monkeypatch):
    data = np.zeros((64, 256), np.float32)
    train = torch_loader(data, 4, num_workers=2, multiprocessing_context="fork")
    valid = torch_loader(data, 4, num_workers=1, multiprocessing_context="fork")
    loaders = loader_footprint(train, valid, LoaderUse(num_ranks=4))
    host = host_footprint(train, valid, LoaderUse(num_ranks=4), training_bytes=MIB)
    assert (host.parts["interpreter"], host.parts["training"]) == (800 * MIB, 4 * MIB)
    assert host.private_bytes == sum(host.parts.values()) == loaders.private_bytes + 804 * MIB
    assert host.shared_bytes == loaders.shared_bytes + 90 * MIB
    assert host.phases["train"].private_bytes == loaders.phases["train"].private_bytes + 804 * MIB


def test_making_a_batch_to_see_its_size_draws_nothing(torch_loader):
    import torch

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, number):
            return torch.rand(4) + np.random.rand()

    torch.manual_seed(1)
    np.random.seed(1)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(1)
    np.random.seed(1)
    loader_footprint(torch_loader(Noisy(), 3))
    assert (torch.rand(1), np.random.rand()) == expected


# --- what real processes take


def told(script, *words):
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.proves("S3-11")
@pytest.mark.slow
def test_two_workers_of_a_data_loader_take_what_was_forecast(tmp_path):
    listed, array, spawned = told(CHILD, str(tmp_path), "list:fork", "array:fork", "list:spawn")
    for found in (listed, array, spawned):
        forecast = sum(size for name, size in found["parts"].items() if name != "data")
        # The measured workers belong to a training, whose process writes to pages that it shares with them: 9 MiB each.
        assert found["grown_bytes"] < 1.1 * forecast, "docs/loading.md adds 10 % for a limit"
        assert forecast < 1.1 * found["grown_bytes"] + 2 * 10 * MIB, found
    assert listed["parts"]["dataset copies"] > 20 * MIB > MIB > array["parts"]["dataset copies"]
    assert listed["grown_bytes"] - array["grown_bytes"] > 20 * MIB


@pytest.mark.proves("S3-12")
@pytest.mark.slow
def test_validation_peaks_lower_when_the_workers_of_training_are_released_by_what_was_forecast():
    both, released = told(VALIDATION, "1", "0")
    saved = both["grown"]["validate"] - released["grown"]["validate"]
    assert saved == pytest.approx(both["phases"]["validate"] - released["phases"]["validate"], rel=0.25)
    assert both["grown"]["validate"] > 1.6 * both["grown"]["train"]
    assert released["grown"]["validate"] < 1.2 * released["grown"]["train"]


@pytest.mark.slow
def test_memfits_threads_take_what_was_forecast(make_table, tmp_path):
    panel = Panel.build(
        make_table(200, 300, 40, missing=0), tmp_path, features=[f"f{j}" for j in range(40)], targets=["ret"]
    )
    arguments = {"lookback": 20, "target": None, "shuffle": 1, "num_workers": 2}
    loader = Loader(panel, range(200), batch=11_000, **arguments)
    found = loader_footprint(loader)
    assert found.private_bytes > 4 * 32 * MIB, "so large that the allocator has no such piece lying about"
    next(iter(Loader(panel, range(200), batch=64, **arguments)))  # what a first batch loads
    before, most = held(), 0
    for _ in loader:
        most = max(most, held() - before)
    assert most == pytest.approx(found.private_bytes, rel=0.3)
    assert found.shared_bytes == panel.nbytes and found.parts["data"] == found.parts["dataset copies"] == 0


def held():
    pids = [psutil.Process().pid, *(child.pid for child in psutil.Process().children(recursive=True))]
    rollups = [ProcReader().rollup(pid) for pid in pids]
    return sum(found.held + found.shared_memory for found in rollups if found is not None)


def test_tensors_are_sized_as_arrays_are():
    torch = pytest.importorskip("torch")
    batch = (torch.ones(4, 3, dtype=torch.bfloat16), [torch.zeros(4), "ab"], torch.ones(6, 4).t(), torch.empty(0))
    assert data_size(batch)["tensor"] == 24 + 16 + 96
