"""Random numbers by key for loops that are not memfit's, what is refused before the first step, and sealed folders."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from memfit.errors import DamagedError, JobFailedError, StoppedError, UsageError
from memfit.rundir import RunDir
from memfit.training import (
    CheckpointWarning,
    KeyedDataset,
    KeyedSampler,
    KeyedStream,
    SealedFolder,
    Stopper,
    check_loader,
    check_model,
    deaf_workers,
    feed_of,
    order_of,
    refuse_changed,
)


class Noisy:
    """Draws from all three global generators."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()), np.random.random(), random.random()])


def mask(items):
    """A collation that draws."""
    return torch.stack(items) * (torch.rand(len(items), 1) + 1)


def test_a_stream_keys_no_loader_twice_and_no_two_items_draw_the_same():
    data = KeyedDataset(Noisy(), seed=1)
    for loader in (DataLoader(Noisy(), 4, shuffle=True), DataLoader(data, 4, sampler=KeyedSampler(data, seed=1))):
        made = KeyedStream(7).loader(loader)
        assert KeyedStream(7).loader(made) is made and order_of(loader) is None
        found = torch.cat(list(made))
        assert [len({*column}) for column in found.T.tolist()] == [12] * 4
    assert torch.equal(found, torch.cat(list(loader)))


class Views:
    """Its samples are (number, side), or their names."""

    def __getitem__(self, key):
        number, side = key.split("-") if isinstance(key, str) else key
        return torch.tensor([float(number), float(side == "left"), torch.rand(())])


@pytest.mark.parametrize("key", [lambda number, side: (number, side), lambda number, side: f"{number}-{side}"])
@pytest.mark.parametrize(
    ("options", "wrap"),
    [
        ({"batch_size": 2}, list),
        ({"batch_size": 2, "num_workers": 1}, list),
        ({"batch_size": None}, list),
        ({}, lambda keys: {"batch_sampler": [keys[:2], tuple(keys[2:])]}),
    ],
)
def test_an_index_may_be_a_tuple_or_a_name(key, options, wrap):
    keys = wrap([key(number, side) for number in range(2) for side in ("left", "right")])
    options |= keys if isinstance(keys, dict) else {"sampler": keys}
    loader = DataLoader(Views(), **options)
    check_loader(loader)
    made = KeyedStream(7).loader(loader)
    first, again = [torch.cat([batch.view(-1, 3) for batch in made]) for _ in range(2)]
    assert first[:, :2].tolist() == [[0, 1], [0, 0], [1, 1], [1, 0]]
    assert torch.equal(first, again) and len(set(first[:, 2].tolist())) == 4


def test_an_index_whose_name_is_another_in_each_process_is_refused():
    with pytest.raises(UsageError, match="gives a object as an index"):
        list(KeyedStream(7).loader(DataLoader(Views(), sampler=[object()])))


def test_a_step_seeds_all_generators():
    stream, other = KeyedStream(3), KeyedStream(4)

    def draw():
        return torch.rand(()).item(), np.random.random(), random.random()

    found = []
    for one, number in [(stream, 5), (stream, 5), (stream, 6), (other, 5)]:
        one.step(number)
        found.append(draw())
    assert found[0] == found[1]
    assert all(len(set(column)) == 3 for column in zip(*found[1:], strict=True))


class Endless:
    def __iter__(self):
        return itertools.cycle(range(4))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader(Stream()), "stream"),
        (DataLoader(Noisy(), num_workers=1, in_order=False), "in_order"),
        (DataLoader(Noisy(), batch_size=None, collate_fn=mask), "batch_size=None"),
        ([1, 2], "stream"),
        (DataLoader(Noisy(), sampler=Endless()), "no length"),
    ],
)
def test_what_has_no_key_is_refused(loader, said):
    with pytest.raises(UsageError, match=said):
        KeyedStream(0).loader(loader)


IDS = itertools.count()


class Odd(Noisy):
    def __init__(self, kind=""):
        self.kind, self.counter, self.generator, self.numpy = kind, 0, torch.Generator(), np.random.default_rng(0)

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if self.kind == "counter":
            self.counter += 1
        if self.kind == "generator":
            return item + torch.rand((), generator=self.generator)
        if self.kind == "numpy":
            return item + self.numpy.random()
        if self.kind == "hidden":
            return item + next(IDS)
        return item + time.monotonic_ns() % 1e6 if self.kind == "clock" else item


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("counter", "dataset.counter"),
        ("generator", "dataset.generator"),
        ("numpy", "dataset.numpy"),
        ("hidden", "data"),
        ("clock", "data"),
    ],
)
def test_a_probe_names_the_part_that_moves(kind, name):
    loader = DataLoader(Odd(kind), batch_size=4)
    with pytest.raises(UsageError) as caught:
        check_loader(loader)
    assert f'allow=("{name}",)' in str(caught.value)
    check_loader(DataLoader(Odd(), batch_size=4, shuffle=True))
    if kind == "counter":
        check_loader(loader, allow=(name,))


def test_a_probe_leaves_the_random_state():
    before = torch.get_rng_state()
    check_loader(DataLoader(Noisy(), batch_size=4, shuffle=True))
    assert torch.equal(before, torch.get_rng_state())


class Harmless(Noisy):
    """Moves, and depends on nothing that it has moved."""

    def __init__(self, kind):
        self.kind, self.file_number, self.last = kind, -1, 0
        self.generators = type("", (), {})()
        self.generators.torch, self.generators.numpy = torch.Generator(), np.random.RandomState(0)

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if self.kind == "late":
            self.file_number = 7
        if self.kind == "last":
            self.last = index
        if self.kind == "seeded":
            item += torch.rand((), generator=self.generators.torch.manual_seed(index))
            self.generators.numpy.seed(index)
            item += self.generators.numpy.random()
        return item


class Ring:
    def __init__(self, items):
        self.itself, self.items = self, items


def twelve(items):
    assert len(items) == 12
    return items


@pytest.mark.parametrize(
    "loader",
    [
        *(DataLoader(Harmless(kind), batch_size=4, shuffle=True) for kind in ("late", "last", "seeded")),
        DataLoader(
            range(12), batch_size=4, collate_fn=lambda items: np.array([str(one) * 50 for one in items], object)
        ),
        DataLoader(range(12), batch_size=4, collate_fn=lambda items: torch.tensor(items).to_sparse()),
        DataLoader(range(12), batch_size=4, collate_fn=lambda items: torch.tensor(items) * torch.nan),
        DataLoader(range(12), batch_size=4, collate_fn=Ring),
        DataLoader(range(12), batch_size=12, collate_fn=twelve),
        DataLoader(torch.arange(12), batch_size=None, sampler=BatchSampler(RandomSampler(range(12)), 4, False)),
        DataLoader(range(12), batch_sampler=torch.randperm(12).split(4)),
        DataLoader(range(12), batch_sampler=[np.arange(4), np.arange(4, 8)]),
    ],
)
def test_a_probe_takes_what_is_exact(loader):
    check_loader(loader)
    stream = KeyedStream(0)
    assert len(list(stream.loader(loader))) == len(loader)


class Longest:
    """Pads to the longest so far."""

    longest = 0

    def __init__(self):
        self.longest = 0

    def __call__(self, items):
        self.longest = max(self.longest, *items)
        return torch.zeros(self.longest)


@pytest.mark.parametrize("lengths", [range(12), range(12, 0, -1)])
def test_what_the_order_of_batches_has_set_is_refused(lengths):
    with pytest.raises(UsageError, match=r"collator\.longest"):
        check_loader(DataLoader(lengths, batch_size=4, collate_fn=Longest()))


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout())
        self.calls = 0
        self.register_buffer("lost", torch.zeros(()), persistent=False)
        self.moves = True

    def forward(self, x):
        if self.moves:
            self.calls += 1
            self.lost += 1
        return self.layer(x)


def test_a_rehearsal_names_what_no_checkpoint_holds():
    model, x = Counting(), torch.randn(4, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"model\.lost"):
        check_model(model, lambda: model(x))
    with pytest.raises(UsageError, match=r"model\.calls"):
        check_model(model, lambda: model(x), allow=("model.lost",))
    check_model(model, lambda: model(x), allow=("model.lost", "model.calls"))
    model.moves = False
    check_model(model, lambda: model(x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Moving(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer, self.dropout = kind, torch.nn.Linear(2, 2), torch.nn.Dropout()
        self.height, self.last_loss, self.length, self.scale, self.is_ready = 0, 0.0, 2, 0.0, False
        self.register_buffer("table", torch.arange(2.0), persistent=False)
        self.register_buffer("bands", torch.ones(2), persistent=False)

    def forward(self, x):
        loss, length = self.dropout(self.layer(x)).sum(), len(x)
        if self.kind == "output":
            self.height, self.last_loss = length, loss.item()
            self.register_buffer("bands", torch.ones(2) * length, persistent=False)
        if self.kind in ("table", "bands") and length > self.length:
            self.length = length
            value = torch.arange(float(length)) if self.kind == "table" else torch.ones(2) * length
            self.register_buffer(self.kind, value, persistent=False)
        if self.kind == "scale":
            self.scale = self.scale or x.abs().max().item()
        if self.kind == "is_ready" and not self.is_ready:
            self.layer.weight.mul_(2)
            self.is_ready = True
        return loss


@pytest.mark.parametrize("kind", ["output", "table"])
def test_a_rehearsal_takes_what_a_pass_only_writes(kind):
    model, x = Moving(kind), torch.randn(5, 2)
    check_model(model, lambda: model(x))
    assert (model.height, model.length, len(model.table)) == (0, 2, 2)  # all is put back


@pytest.mark.parametrize("kind", ["bands", "scale", "is_ready"])
def test_a_rehearsal_refuses_what_the_first_pass_has_set(kind):
    model, x = Moving(kind), torch.randn(5, 2)
    with pytest.raises(UsageError, match=rf"model\.{kind}"):
        check_model(model, lambda: model(x))


class Forces(torch.nn.Module):
    """Needs gradients in each forward pass."""

    def forward(self, x):
        x = x.requires_grad_()
        return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]


class InWorkers(Noisy):
    """Its file is opened in a worker alone."""

    def __getitem__(self, index):
        return self.file[index]


def test_what_cannot_be_tried_is_said_and_ends_nothing(capsys):
    probes = [
        ("rehearsal", lambda allow: check_model(Forces(), lambda: Forces()(torch.ones(2)), allow)),
        ("data", lambda allow: check_loader(DataLoader(InWorkers()), allow)),
    ]
    for name, probe in probes:
        probe(())
        said = capsys.readouterr().err
        assert "could not be tried" in said and "Error: " in said and f"allow=('{name}',)" in said
        probe((name,))
        assert not capsys.readouterr().err


def test_a_metric_may_count():
    torchmetrics = pytest.importorskip("torchmetrics")
    model = torch.nn.ModuleDict({"metric": torchmetrics.MeanMetric(), "layer": torch.nn.Linear(2, 2)})
    check_model(model, lambda: model["metric"](model["layer"](torch.randn(4, 2)).sum()))


def fed(loader):
    (feed := feed_of(loader, 0)).open(1)
    return feed.workers.iterator


@pytest.mark.parametrize("start", [lambda loader: iter(deaf_workers(loader)), fed])
def test_a_signal_to_the_group_reaches_no_worker(start):
    batches = start(DataLoader(Noisy(), batch_size=2, num_workers=2))
    next(batches)
    workers = batches._workers
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker.pid, number)
    assert len(list(batches)) == 5
    del batches
    assert not any(worker.is_alive() for worker in workers)


def test_a_stop_is_noted_and_ends_with_75():
    before = signal.getsignal(signal.SIGTERM)
    stopper = Stopper()
    stopper.listen()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a framework does
    stopper.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopper.noted == "SIGTERM"
    error = stopper.end("after step 3", "step-3 holds all steps so far.", epoch=0, step=3)
    assert isinstance(error, StoppedError)
    assert error.exit_code == 75
    stopper.close()
    assert signal.getsignal(signal.SIGTERM) == before


def write(folder, step, text="whole"):
    (folder.begin(step) / "deep").mkdir()
    (folder.folder_of(step) / "deep" / "weights").write_text(text)
    return folder.seal(step, {"epoch": 0, "lr": (0.1, 0.2)})


def test_the_newest_whole_one_is_taken(tmp_path, monkeypatch):
    folder, forced = SealedFolder(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: forced.append(os.fstat(descriptor).st_ino))
    assert folder.newest() is None
    for step in (9, 10):
        write(folder, step)
    assert {path.stat().st_ino for path in [tmp_path, *tmp_path.rglob("*")]} <= {*forced}  # a power cut takes none
    (folder.begin(11) / "weights").write_text("never sealed")
    assert folder.newest().step == 10
    assert not folder.folder_of(11).exists()
    (folder.folder_of(10) / "deep" / "weights").write_text("flipp")  # as long as before
    with pytest.warns(CheckpointWarning, match="step-9"):
        assert folder.newest().step == 9
    (folder.folder_of(9) / "deep" / "weights").unlink()
    with pytest.raises(DamagedError, match="differs"):
        folder.newest()


@pytest.mark.parametrize("place", [0, 16 << 20, -1])
def test_one_byte_of_a_file_of_several_parts_is_seen(tmp_path, place):
    folder = SealedFolder(tmp_path)
    path = folder.begin(1) / "weights"
    path.write_bytes(bytes((33 << 20) + 5))
    (path.parent / "empty").touch()
    folder.seal(1, {})
    assert folder.newest().step == 1
    with open(path, "r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        file.write(b"x")
    with pytest.raises(DamagedError, match="weights differs"):
        folder.newest()


@pytest.mark.parametrize("is_whole", [True, False])
def test_each_bit_of_a_file_of_torch_counts(tmp_path, is_whole):
    folder, state = SealedFolder(tmp_path), {"a": torch.arange(100.0), "b": "text"}
    path = folder.begin(1) / "weights.pt"
    torch.save(state, path)
    if not is_whole:  # shards are archives one after the other
        path.write_bytes(path.read_bytes() * 2)
    folder.seal(1, {})
    whole = path.read_bytes()
    assert folder.newest().step == 1
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert folder.newest().step == 1
        except DamagedError:
            continue
        assert is_whole and same(torch.load(path, weights_only=True), state), place  # padding, or what stands twice


def same(one, other):
    return one["b"] == other["b"] and torch.equal(one["a"], other["a"])


def test_a_checkpoint_is_there_until_the_one_in_its_place_is(tmp_path):
    folder = SealedFolder(tmp_path)
    write(folder, 10, "old")
    (folder.begin(10) / "weights").write_text("torn")
    again = SealedFolder(tmp_path)
    assert (again.newest().path / "deep" / "weights").read_text() == "old"
    write(folder, 10, "new")
    assert (folder.newest().path / "deep" / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


def test_what_others_wrote_is_left_alone(tmp_path):
    folder = SealedFolder(tmp_path, "checkpoint-")
    (tmp_path / "checkpoint-50").mkdir()
    (tmp_path / "notes").mkdir()
    for step in (10, 20, 30):
        write(folder, step)
    folder.prune(1, spared=[folder.folder_of(10)])
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-50", "notes", "checkpoint-10", "checkpoint-30"}
    assert [path.name for path in folder.foreign()] == ["checkpoint-50"]
    assert folder.newest().facts["lr"] == [0.1, 0.2]


HOLDER = """
import sys
from memfit.training import SealedFolder
folder = SealedFolder(sys.argv[1])
with folder.held():
    (folder.begin(2) / "weights").write_text("half")
    print("held", flush=True)
    sys.stdin.read()
    folder.seal(2, {})
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_another_process_that_trains_there_is_named_and_loses_nothing(tmp_path, is_killed):
    folder = SealedFolder(tmp_path)
    write(folder, 1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], **pipes) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=f"Process {holder.pid} trains into") as caught, folder.held():
            pass
        assert caught.value.exit_code == 2
        assert (folder.folder_of(2) / "weights").read_text() == "half"
        if is_killed:
            holder.kill()
        holder.stdin.close()
        assert holder.wait() == (-signal.SIGKILL if is_killed else 0)
    with folder.held():
        assert folder.newest().step == (1 if is_killed else 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"][: 2 - is_killed]


def test_a_disk_that_refuses_is_told_with_what_stays(tmp_path):
    folder = SealedFolder(tmp_path)
    write(folder, 1)
    with pytest.raises(JobFailedError, match="No space") as caught, folder.writing():
        raise OSError(28, "No space left on device")
    assert "step-1 stays" in str(caught.value)


def test_a_change_is_refused_or_named(tmp_path):
    saved, now = {"betas": [0.9, 0.99], "lr": 0.1}, {"betas": (0.9, 0.99), "lr": 0.2}
    with pytest.raises(UsageError, match=r"lr: 0\.1 then, 0\.2 now"):
        refuse_changed(tmp_path, saved, now)
    with pytest.raises(UsageError, match=r"add allow=\('lr',\): .* recorded as a fork"):
        refuse_changed(tmp_path, saved, now, allow=())
    assert refuse_changed(tmp_path, saved, now, allow=("lr",)) == {"lr": (0.1, 0.2)}


@pytest.mark.parametrize(("grace", "told"), [(0, 1), (60, 0)])
def test_a_save_that_a_stop_has_no_time_for_is_told_once(grace, told, tmp_path, monkeypatch, capsys):
    run = RunDir.create(tmp_path, "slow", "0" * 64)
    run.job_dir("cmd").mkdir(parents=True)
    monkeypatch.setenv("MEMFIT_RUN_DIR", str(run.path))
    monkeypatch.setenv("MEMFIT_JOB_ID", "cmd")
    (run.job_dir("cmd") / "job.json").write_text(f'{{"grace_seconds": {grace}}}')
    for _ in range(2):
        write(SealedFolder(tmp_path / "checkpoints"), 1)
    assert capsys.readouterr().err.count("--grace") == told
    assert [event["kind"] for event in run.events()].count("slow_save") == told


@pytest.mark.parametrize(("job", "seconds", "told"), [("7", 40, 1), ("8", 4, 0), (None, 40, 0)])
def test_in_slurm_alone_a_slow_save_says_what_signal_it_needs(job, seconds, told, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MEMFIT_RUN_DIR", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    now = itertools.count(0, seconds)
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(now))
        for step in (1, 2):
            write(SealedFolder(tmp_path), step)
    assert capsys.readouterr().err.count("--signal=TERM@80 or more") == told


class Recurrent(torch.nn.Module):
    def __init__(self, carries):
        super().__init__()
        self.cell, self.hidden, self.carries, self.attention = torch.nn.RNNCell(2, 2), None, carries, None

    def forward(self, x):
        hidden = self.cell(x, self.hidden[0] if self.hidden else None)
        if self.carries:
            self.hidden = (hidden.detach(),)
        self.attention = torch.nn.functional.dropout(hidden)  # kept for a log, and drawn
        return hidden


def test_a_hidden_state_that_is_carried_is_refused_and_what_a_pass_keeps_is_not():
    x = torch.ones(3, 2)
    with pytest.raises(UsageError, match=r"model\.hidden is carried"):
        check_model(model := Recurrent(carries=True), lambda: model(x))
    check_model(model := Recurrent(carries=True), lambda: model(x), allow=("model.hidden", "model.attention"))
    check_model(model := Recurrent(carries=False), lambda: model(x))


def test_a_seal_of_a_later_version_is_refused_and_not_taken_for_damage(tmp_path):
    folder = SealedFolder(tmp_path)
    seal = write(folder, 1) / "SEAL.json"
    seal.write_text(seal.read_text().replace('"memfit_seal": 4', '"memfit_seal": 5'))
    with pytest.raises(UsageError, match="another version"):
        folder.newest()
