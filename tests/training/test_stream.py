"""Random numbers by key for loops that are not memfit's, and what is refused before the first step."""

import itertools
import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from memfit.errors import StoppedError, UsageError
from memfit.training import (
    KeyedDataset,
    KeyedSampler,
    KeyedStream,
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


def test_a_change_is_refused_or_named(tmp_path):
    saved, now = {"betas": [0.9, 0.99], "lr": 0.1}, {"betas": (0.9, 0.99), "lr": 0.2}
    with pytest.raises(UsageError, match=r"lr: 0\.1 then, 0\.2 now"):
        refuse_changed(tmp_path, saved, now)
    with pytest.raises(UsageError, match=r"add allow=\('lr',\): .* recorded as a fork"):
        refuse_changed(tmp_path, saved, now, allow=())
    assert refuse_changed(tmp_path, saved, now, allow=("lr",)) == {"lr": (0.1, 0.2)}


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
