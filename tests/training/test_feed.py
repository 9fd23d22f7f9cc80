"""Where an epoch of training data stands, and how a resumed one gets there."""

import io
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from memfit.errors import DataError, UsageError
from memfit.training import KeyedDataset, KeyedSampler, feed_of, keyed_rng, remade, rng_state, seed_everything


def test_a_loader_made_anew_keeps_its_options():
    options = {"num_workers": 2, "timeout": 7, "pin_memory": True, "prefetch_factor": 3, "persistent_workers": True}
    options |= {"in_order": False, "worker_init_fn": print, "generator": torch.Generator(), "collate_fn": list}
    made = remade(DataLoader(range(8), 4, multiprocessing_context="fork", **options), batch_sampler=[[1], [2]])
    assert options.items() <= vars(made).items() and made.multiprocessing_context.get_start_method() == "fork"
    assert [*remade(made, num_workers=0, timeout=0, pin_memory=False, batch_sampler=[[5]])] == [[5]]


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


class ShuffleBuffer(IterableDataset):
    """Draws while it is iterated: what comes next depends on all draws before."""

    def __len__(self):
        return 10

    def __iter__(self):
        buffer = list(range(4))
        for number in range(4, 14):
            place = random.randrange(4)
            yield buffer[place]
            buffer[place] = number


class Numbered:
    def __init__(self):
        self.asked = []

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 5

    def __getitem__(self, number):
        self.asked.append(number)
        return torch.tensor([self.epoch, number])


class Stateful:
    """As torchdata's StatefulDataLoader behaves."""

    def __init__(self):
        self.position = 0
        self.order = None

    def __len__(self):
        return 5

    def __iter__(self):
        if self.order is None:
            self.order, self.position = torch.randperm(5).tolist(), 0
        while self.position < 5:
            self.position += 1
            yield torch.tensor(self.order[self.position - 1])
        self.order = None

    def state_dict(self):
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state):
        self.position, self.order = state["position"], state["order"]


def keyed(data=None, num_workers=0, **settings):
    data = KeyedDataset(data or Augmented(), seed=4)
    return DataLoader(data, 2, sampler=KeyedSampler(data, seed=4), num_workers=num_workers, **settings)


def plain(num_workers=0, data=None, **settings):
    return DataLoader(data or Augmented(), 2, shuffle=True, num_workers=num_workers, **settings)


def generator():
    return torch.Generator().manual_seed(9)


def with_noise(rows):
    return torch.stack(rows) + torch.rand(())


class OwnWay(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


class Together(Augmented):
    """Makes the items of a batch at once."""

    def __getitems__(self, indices):
        return [self[index] + torch.rand(()) for index in indices]


class Own(Augmented):
    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, index):
        return super().__getitem__(index) + self.draw()


#: What makes batches, and what makes them for the resume.
KEYED = {
    "keyed": (keyed, partial(keyed, None, 2)),
    "keyed without batches": [lambda: DataLoader(KeyedDataset(Augmented()), None, sampler=KeyedSampler(range(10)))] * 2,
    "plain": (plain, partial(plain, 2)),
    "workers that live on": (partial(plain, 2, persistent_workers=True), plain),
    "draws of the collation": (partial(plain, 2, collate_fn=with_noise), partial(plain, collate_fn=with_noise)),
    "made together": (partial(plain, 2, Together()), partial(plain, 0, Together())),
    "generator": [lambda: plain(generator=generator())] * 2,
    "sampler": [lambda: DataLoader(Augmented(), 2, sampler=RandomSampler(range(10), generator=generator()))] * 2,
    "batch sampler": [lambda: DataLoader(Augmented(), batch_sampler=BatchSampler(RandomSampler(range(10)), 2, True))]
    * 2,
}
FORWARD = {
    "stream": [lambda: DataLoader(ShuffleBuffer(), 2)] * 2,
    "stream of a worker": [lambda: DataLoader(ShuffleBuffer(), 2, num_workers=1, generator=generator())] * 2,
    "in a way of its own": [lambda: OwnWay(Augmented(), 2)] * 2,
}
OTHERS = {
    "list": [lambda: [torch.tensor([n]) for n in range(5)]] * 2,
    "numbered": [Numbered] * 2,
    "stateful": [Stateful] * 2,
}
KINDS = KEYED | FORWARD | OTHERS


def feed(batches):
    return feed_of(batches, seed=3)


def equal(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("name", KINDS)
def test_a_resume_gets_the_batches_that_were_left(name, events):
    first, second = (feed(make()) for make in KINDS[name])
    seed_everything(1)
    for epoch in (1, 3):
        before = rng_state()
        first.open(epoch)
        seen = [next(first), next(first)]
        assert repr(before) == repr(rng_state())  # the training draws from a stream of its own
        torch.rand(3)
        torch.save(first.state_dict(), file := io.BytesIO())
        rest = list(first)
        first.close()
    at_end = first.state_dict()
    first.open(4)
    following = list(first)
    first.close(persistent_too=True)
    seed_everything(2)  # the resumed training draws otherwise; where it goes on is the checkpoint's affair
    second.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    second.open(3, 2)
    assert rest and equal(rest, list(second))
    second.close()
    second.load_state_dict(at_end)
    second.open(4)
    assert equal(following, list(second))
    second.close(persistent_too=True)
    assert name == "list" or not equal(seen + rest, following)
    replays = [(one["epoch"], one["num_batches"]) for one in events("replay")]
    assert replays == ([(3, 2)] if name in FORWARD else [])


def test_what_was_trained_is_left_out_and_not_made():
    made = []

    class Watched(Augmented):
        def __getitem__(self, index):
            made.append(index)
            return super().__getitem__(index)

    for loader in (plain(data=Watched()), keyed(Watched())):
        made.clear()
        (data := feed(loader)).open(2, skip=4)
        assert (len(list(data)), len(made)) == (1, 2)
    (data := feed(numbered := Numbered())).open(4, skip=3)
    assert [batch.tolist() for batch in data] == [[4, 3], [4, 4]]
    assert numbered.asked == [3, 4]


def test_feed_data_have_the_draws_of_their_loader_and_its_workers_may_live_on():
    loader = keyed()
    data, many = feed(loader), feed(keyed(None, 2, persistent_workers=True))
    for epoch in (1, 2):
        loader.sampler.set_epoch(epoch)
        expected = list(loader)
        for one in (data, many):
            one.check()
            one.open(epoch)
            assert equal(list(one), expected)
            one.close()
    assert torch.equal(loader.dataset[3], loader.dataset[(0, 3)])
    pids = many.worker_pids()
    assert len(pids) == 2
    many.close(persistent_too=True)
    assert not any(map(psutil.pid_exists, pids))


def test_the_number_of_workers_must_not_change_where_data_have_no_keys():
    assert feed(DataLoader(ShuffleBuffer(), 2, num_workers=2)).identity()["num_workers"] == 2
    assert not any("num_workers" in feed(batches).identity() for batches in (keyed(None, 2), plain(2), [1]))


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (lambda: DataLoader(ShuffleBuffer(), num_workers=1, persistent_workers=True), "has persistent_workers=True"),
        (lambda: keyed(None, 1, in_order=False), "has in_order=False"),
        (lambda: plain(data=Own(random.Random(3).random)), "or pass allow_inexact=True"),
        (lambda: keyed(Own(np.random.default_rng(3).random)), "differs when it is made a second time"),
    ],
)
def test_batches_that_cannot_be_had_again_are_refused_where_a_resume_would_need_them(batches, said):
    with pytest.raises(UsageError, match=said):
        feed(batches()).check()
    feed(plain(in_order=False)).check()


def test_a_stop_ends_the_way_forward():
    data = feed(DataLoader(ShuffleBuffer(), 2))
    asked = iter([None])
    with pytest.raises(StopIteration):
        data.open(1, 3, lambda: next(asked))


class Told(Augmented):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.tensor(self.epoch)


class ToldSampler(RandomSampler):
    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("wrap", [KeyedDataset, lambda data: data])
def test_epochs_are_told_to_whatever_a_loader_is_made_of_also_in_workers_that_live_on(wrap):
    data, sampler = Told(), ToldSampler(range(10))
    loader = DataLoader(wrap(data), 5, sampler=sampler, num_workers=1, persistent_workers=True)
    training = feed(loader)
    for epoch in (1, 2):
        training.open(epoch)
        assert data.epoch == sampler.epoch == epoch
        assert {int(value) for batch in training for value in batch} == {epoch}
        training.close()
    training.close(persistent_too=True)


def test_a_keyed_order_covers_everything_and_differs_by_epoch():
    sampler = KeyedSampler(range(50), seed=1)
    orders = []
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        orders.append([index for _, index in sampler])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))
    assert orders[0] != orders[1]
    assert [index for _, index in KeyedSampler(range(4), shuffle=False)] == [0, 1, 2, 3]


def test_a_keyed_stream_goes_on_after_another_within_it():
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    with keyed_rng(0, 1, 2):
        alone = [draw(), draw(), draw()]
    with keyed_rng(0, 1, 2):
        nested = [draw()]
        with keyed_rng(0, 7, 7):
            draw()
            with keyed_rng(0, 8, 8):
                draw()
        nested += [draw(), draw()]
    assert nested == alone


def test_data_that_end_before_where_the_resume_should_be_are_refused():
    with pytest.raises(DataError, match="Epoch 1 ended after 5 batches, and 6 were trained"):
        feed(DataLoader(ShuffleBuffer(), 2)).open(1, 6)


def mark_worker(number):
    os.environ["MARKED"] = str(number + 7)


class Marked(Augmented):
    def __getitem__(self, index):
        return torch.tensor(int(os.environ["MARKED"]))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_users_own_start_of_a_worker_is_kept(method):
    loader = DataLoader(Marked(), 10, num_workers=1, worker_init_fn=mark_worker, multiprocessing_context=method)
    data = feed_of(loader, 0)
    data.open(1)
    assert next(data).tolist() == [7] * 10
    data.close()
    assert loader.worker_init_fn is mark_worker


class Stuck(Augmented):
    def __getitem__(self, index):
        if index == 2:
            print("stuck", os.getpid(), flush=True)
            time.sleep(600)
        return torch.ones(())


def test_a_worker_that_is_busy_is_killed(monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.05)
    data = feed_of(DataLoader(Stuck(), 2, num_workers=1), 0)
    data.open(1)
    (worker,) = data.workers.iterator._workers
    next(data)
    data.close()
    assert not psutil.pid_exists(worker.pid)


@pytest.mark.slow
def test_workers_die_with_a_killed_trainer(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_feed
if __name__ == "__main__":
    opened = []
    for method in ("fork", "spawn"):
        loader = test_feed.DataLoader(test_feed.Stuck(), 2, num_workers=1, multiprocessing_context=method)
        opened.append(test_feed.feed_of(loader, 0))
        opened[-1].open(1)
    list(opened[0])
"""
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as trainer:
        workers = [psutil.Process(int(trainer.stdout.readline().split()[1])) for _ in range(2)]
        trainer.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(workers, 30)
    for worker in left:
        worker.kill()
    assert not left
