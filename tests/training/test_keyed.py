"""Where an epoch of training data stands, and how a resumed one gets there."""

import io
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from memfit.errors import DataError, UsageError
from memfit.training import KeyedDataset, KeyedSampler, TrainingData, keyed_rng, remade, rng_state, seed_everything


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


def keyed(num_workers=0, **settings):
    data = KeyedDataset(Augmented(), seed=4)
    return DataLoader(data, 2, sampler=KeyedSampler(data, seed=4), num_workers=num_workers, **settings)


def with_generator():
    return DataLoader(Augmented(), 2, shuffle=True, generator=torch.Generator().manual_seed(9))


class Own(Augmented):
    def __init__(self, generator):
        self.draws = generator


def with_noise(rows):
    return torch.stack(rows) + torch.rand(())


def keyed_over(dataset, num_workers=0, collate_fn=None, **settings):
    data = KeyedDataset(dataset, seed=4)
    return DataLoader(
        data, 2, sampler=KeyedSampler(data, seed=4, **settings), num_workers=num_workers, collate_fn=collate_fn
    )


KINDS = {
    "collates at random": ("replayed", lambda: keyed_over(Augmented(), 2, with_noise)),
    "collates": ("keyed", lambda: keyed_over(Augmented(), 2, torch.stack, deterministic_collate=True)),
    "list": ("indexed", lambda: [torch.tensor([n]) for n in range(5)]),
    "numbered": ("indexed", Numbered),
    "stateful": ("stateful", Stateful),
    "keyed": ("keyed", keyed),
    "keyed without batches": (
        "keyed",
        lambda: DataLoader(KeyedDataset(Augmented()), None, sampler=KeyedSampler(range(10))),
    ),
    "plain": ("replayed", lambda: DataLoader(Augmented(), 2, shuffle=True)),
    "generator": ("replayed", with_generator),
    "sampler's generator": (
        "replayed",
        lambda: DataLoader(
            Augmented(), 2, sampler=RandomSampler(range(10), generator=torch.Generator().manual_seed(1))
        ),
    ),
    "iterable": ("replayed", lambda: DataLoader(ShuffleBuffer(), 2)),
    "workers": ("replayed", lambda: DataLoader(Augmented(), 2, shuffle=True, num_workers=2)),
}


def train_on(data, epoch, batches, *, disturb=True):
    """Some batches, with a training between them that draws from the global generators."""
    found = []
    for _ in range(batches):
        found.append(next(data))
        if disturb:
            random.random(), np.random.rand(), torch.rand(3)
    return found


def equal(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("name", KINDS)
def test_a_resume_in_mid_epoch_gets_the_batches_that_were_left(name, events):
    kind, make = KINDS[name]
    first = TrainingData(make(), seed=3)
    assert first.kind == kind
    seed_everything(1)
    states = {}
    for epoch in (1, 3):
        first.open(epoch)
        train_on(first, epoch, 2)
        torch.save(first.state_dict(), file := io.BytesIO())
        states[epoch] = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        rest = list(first)
        first.close()
    second = TrainingData(make(), seed=3)
    seed_everything(2)  # the resumed training draws otherwise; where it goes on is the checkpoint's affair
    second.load_state_dict(states[3])
    second.open(3, 2)
    again = list(second)
    second.close()
    replays = [(one["epoch"], one["num_batches"]) for one in events("replay")]
    assert replays == ([(3, 2)] if kind == "replayed" else [])
    assert rest and equal(rest, again)


@pytest.mark.parametrize("name", ["generator", "sampler's generator", "plain", "workers"])
def test_a_resume_at_an_epochs_end_gets_the_next_epochs_order(name):
    first, second = (TrainingData(KINDS[name][1](), seed=3) for _ in range(2))
    first.open(1)
    ones = list(first)
    first.close()
    state = first.state_dict()
    first.open(2)
    twos = list(first)
    second.load_state_dict(state)
    second.open(2)
    assert equal(twos, list(second))
    assert not equal(ones, twos)


@pytest.mark.parametrize("name", ["plain", "workers", "iterable", "keyed", "stateful"])
def test_data_do_not_draw_from_the_stream_of_the_training(name):
    data = TrainingData(KINDS[name][1](), seed=3)
    seed_everything(7)
    before = repr(rng_state())
    data.open(1)
    train_on(data, 1, 3, disturb=False)
    data.close()
    assert repr(rng_state()) == before


def test_numbered_batches_are_skipped_and_not_made():
    data = TrainingData(Numbered(), seed=0)
    data.open(4, skip=3)
    assert [batch.tolist() for batch in data] == [[4, 3], [4, 4]]
    assert data.batches.asked == [3, 4]


def test_keyed_data_are_the_same_with_any_number_of_workers_and_skip_in_the_sampler():
    made = []

    class Watched(Augmented):
        def __getitem__(self, index):
            made.append(index)
            return super().__getitem__(index)

    one, many = TrainingData(keyed(), seed=0), TrainingData(keyed(2, persistent_workers=True), seed=0)
    many.check_replayable()
    for epoch in (1, 2):
        one.open(epoch)
        many.open(epoch)
        assert equal(list(one), list(many))
        many.close()
    pids = many.worker_pids()
    assert len(pids) == 2
    many.close(persistent_too=True)
    assert not any(map(psutil.pid_exists, pids))
    data = KeyedDataset(Watched(), seed=4)
    watched = TrainingData(DataLoader(data, 2, sampler=KeyedSampler(data, seed=4)), seed=0)
    watched.open(2, skip=4)
    assert len(list(watched)) == 1
    assert len(made) == 2


def test_a_keyed_item_depends_on_epoch_and_index_alone_and_leaves_the_random_state():
    data = KeyedDataset(Augmented(), seed=1)
    seed_everything(1)
    before = repr(rng_state())
    first = data[(1, 3)]
    assert repr(rng_state()) == before
    random.random()
    assert torch.equal(first, data[(1, 3)])
    assert not torch.equal(first, data[(2, 3)])
    assert not torch.equal(first, KeyedDataset(Augmented(), seed=2)[(1, 3)])
    assert torch.equal(data[3], data[(0, 3)])


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


def test_the_number_of_workers_is_part_of_what_must_not_change_except_for_keyed_data():
    assert TrainingData(DataLoader(Augmented(), 2, num_workers=2), 0).identity()["num_workers"] == 2
    assert "num_workers" not in TrainingData(keyed(2), 0).identity()
    assert "num_workers" not in TrainingData([1], 0).identity()


def test_keyeds_whose_batches_cannot_be_had_again_are_refused():
    persistent = TrainingData(DataLoader(Augmented(), 2, num_workers=1, persistent_workers=True), 0)
    with pytest.raises(UsageError, match="has persistent_workers=True"):
        persistent.check_replayable()
    with pytest.raises(UsageError, match="has in_order=False"):
        TrainingData(keyed(1, in_order=False), 0).check_replayable()
    TrainingData(DataLoader(Augmented(), 2, in_order=False), 0).check_replayable()


def test_data_that_end_before_where_the_resume_should_be_are_refused():
    data = TrainingData(DataLoader(TensorDataset(torch.ones(4)), 2), 0)
    with pytest.raises(DataError, match="Epoch 1 ended after 2 batches, and 3 were trained"):
        data.open(1, 3)


def test_a_stop_ends_the_way_forward():
    data = TrainingData(DataLoader(TensorDataset(torch.ones(8)), 2), 0)
    asked = []

    def check_stop():
        asked.append(1)
        if len(asked) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.open(1, 3, check_stop)


def test_epochs_are_told_to_whatever_a_loader_is_made_of():
    told = []

    class Sampler(RandomSampler):
        def set_epoch(self, epoch):
            told.append(epoch)

    data = TrainingData(DataLoader(Augmented(), 2, sampler=Sampler(range(10))), 0)
    data.open(3)
    assert told == [3]


def test_workers_are_gone_once_an_epoch_is_closed():
    loader = DataLoader(Augmented(), 2, num_workers=2)
    data = TrainingData(loader, 0)
    data.open(1)
    workers = data._iterator._workers
    next(data)
    data.close()
    assert not any(worker.is_alive() for worker in workers)


OWN = {
    "python": lambda: random.Random(3),
    "numpy": lambda: np.random.default_rng(3),
    "legacy": lambda: np.random.RandomState(3),
    "torch": lambda: torch.Generator(),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("wrap", [DataLoader, keyed_over, lambda data: DataLoader(KeyedDataset(KeyedDataset(data)))])
def test_a_data_set_with_a_generator_of_its_own_is_refused_where_a_resume_would_need_it(name, wrap):
    with pytest.raises(UsageError, match=r"Own\.draws is a random generator of its own"):
        TrainingData(wrap(Own(OWN[name]())), 0).check_replayable()


def test_another_number_of_generators_is_refused():
    state = TrainingData(with_generator(), 0).state_dict()
    with pytest.raises(UsageError, match="hold 0 random generators, and 1 are saved"):
        TrainingData(DataLoader(Augmented(), 2), 0).load_state_dict(state)


def test_a_keyed_data_set_tells_the_epoch_on_also_to_workers_that_live_on():
    class Told(Augmented):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __getitem__(self, index):
            return torch.tensor(self.epoch)

    data = KeyedDataset(Told())
    loader = DataLoader(data, 5, sampler=KeyedSampler(data), num_workers=1, persistent_workers=True)
    training = TrainingData(loader, 0)
    for epoch in (1, 2):
        training.open(epoch)
        assert data.dataset.epoch == epoch
        assert {int(value) for batch in training for value in batch} == {epoch}
        training.close()
    training.close(persistent_too=True)


def mark_worker(number):
    os.environ["MARKED"] = str(number + 7)


class Marked(Augmented):
    def __getitem__(self, index):
        return torch.tensor(int(os.environ["MARKED"]))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_users_own_start_of_a_worker_is_kept(method):
    loader = DataLoader(Marked(), 10, num_workers=1, worker_init_fn=mark_worker, multiprocessing_context=method)
    data = TrainingData(loader, 0)
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
    data = TrainingData(DataLoader(Stuck(), 2, num_workers=1), 0)
    data.open(1)
    (worker,) = data._iterator._workers
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
import test_keyed
if __name__ == "__main__":
    opened = []
    for method in ("fork", "spawn"):
        loader = test_keyed.DataLoader(test_keyed.Stuck(), 2, num_workers=1, multiprocessing_context=method)
        opened.append(test_keyed.TrainingData(loader, 0))
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
