"""Random numbers by key for loops that are not memfit's, and what is refused before the first step."""

import itertools
import os
import random
import signal

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


class Odd(Noisy):
    """Draws from a generator of its own, or counts."""

    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, index):
        return super().__getitem__(index) + self.draw()


class Shuffled:
    """An order that no key reaches."""

    own = random.Random(3)

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(self.own.sample(range(12), 12))


@pytest.mark.parametrize(
    ("loader", "name", "said"),
    [
        (DataLoader(Noisy(), 4, sampler=Shuffled()), "sampler", "another order under the same key"),
        (DataLoader(Odd(random.Random(3).random), 4), "data", "differs when it is made a second time"),
        (DataLoader(Odd(itertools.count().__next__), 4), "data", "differs when it is made a second time"),
    ],
)
def test_a_loader_that_gives_something_else_under_the_same_key_is_refused(loader, name, said):
    with pytest.raises(UsageError, match=said) as caught:
        check_loader(loader, allow=("learning_rate",))
    assert f"allow=('learning_rate', '{name}')" in caught.value.remedy
    check_loader(loader, allow=(name,))


def test_a_trial_of_a_loader_leaves_the_random_state():
    before = torch.get_rng_state()
    check_loader(DataLoader(Noisy(), batch_size=4, shuffle=True))
    assert torch.equal(before, torch.get_rng_state())


class Fields:
    def __init__(self, items):
        self.items = items


def twelve(items):
    assert len(items) == 12
    return items


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(
            range(12), batch_size=4, collate_fn=lambda items: np.array([str(one) * 50 for one in items], object)
        ),
        DataLoader(range(12), batch_size=4, collate_fn=lambda items: torch.tensor(items).to_sparse()),
        DataLoader(range(12), batch_size=4, collate_fn=lambda items: torch.tensor(items) * torch.nan),
        DataLoader(range(12), batch_size=4, collate_fn=Fields),
        DataLoader(range(12), batch_size=12, collate_fn=twelve),
        DataLoader(torch.arange(12), batch_size=None, sampler=BatchSampler(RandomSampler(range(12)), 4, False)),
        DataLoader(range(12), batch_sampler=torch.randperm(12).split(4)),
        DataLoader(range(12), batch_sampler=[np.arange(4), np.arange(4, 8)]),
    ],
)
def test_a_trial_takes_what_is_exact(loader, capsys):
    check_loader(loader)
    assert not capsys.readouterr().err
    assert len(list(KeyedStream(0).loader(loader))) == len(loader)


class InWorkers(Noisy):
    """Its file is opened in a worker alone."""

    def __getitem__(self, index):
        return self.file[index]


def test_a_loader_that_cannot_be_tried_is_reported_and_trains(capsys):
    check_loader(DataLoader(InWorkers()))
    said = capsys.readouterr().err
    assert "could not be tried" in said and "AttributeError: " in said and "allow=('data',)" in said
    check_loader(DataLoader(InWorkers()), allow=("data",))
    assert not capsys.readouterr().err


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
