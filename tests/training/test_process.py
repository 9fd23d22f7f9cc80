"""Random state and signals, which a fit shares with its process."""

import contextlib
import os
import random
import signal

import numpy as np
import pytest
import torch

from memfit.errors import StoppedError
from memfit.training import Trainer, find_longest, rng_state, seed_everything, set_rng_state


def draws():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_the_same_seed_gives_the_same_draws_of_every_generator():
    seed_everything(5)
    first = draws()
    seed_everything(5)
    assert draws() == first
    seed_everything(6)
    assert not set(map(repr, draws())) & set(map(repr, first))


def test_the_random_state_survives_a_safe_file(tmp_path):
    seed_everything(1)
    draws()  # leaves a second normal number waiting in Python's and NumPy's generators
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = draws()
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draws() == expected


def test_random_states_of_gpus_that_are_gone_are_left_out(monkeypatch):
    restored = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.update({int(device): state}))
    states = [torch.full((16,), number, dtype=torch.uint8) for number in range(4)]
    set_rng_state(rng_state() | {"cuda": states})
    assert list(restored) == [0, 1] and all(torch.equal(restored[number], states[number]) for number in restored)


class Drawing(torch.utils.data.Dataset):
    def __init__(self, *, fails):
        self.fails = fails

    def __len__(self):
        return 4

    def __getitem__(self, index):
        draws()
        return 1 / (not self.fails)


@pytest.mark.parametrize("fails", [False, True])
def test_a_look_at_the_data_puts_back_every_generator_also_after_an_error(fails):
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    loader = torch.utils.data.DataLoader(Drawing(fails=fails), 2, shuffle=True)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        find_longest(loader)
    assert draws() == expected


def test_a_stop_signal_ends_the_fit_and_the_earlier_handler_is_back_afterwards():
    received = []
    before = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(
        model,
        loss=lambda model, x: (model(x).sum(), len(x)),
        on_step=lambda outcome: os.kill(os.getpid(), signal.SIGUSR1),
    )
    try:
        with pytest.raises(StoppedError, match="Stopped by SIGUSR1 in epoch 1, after its step 1 of 3"):
            trainer.fit([torch.ones(2, 1)] * 3, num_epochs=1)
        assert received == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)
