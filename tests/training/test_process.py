"""Random state and signals, which a fit shares with its process."""

import os
import random
import signal

import numpy as np
import pytest
import torch

from memfit.training._process import StopSignals, preserved_rng, rng_state, seed_everything, set_rng_state


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


def test_preserved_rng_puts_back_every_generator_also_after_an_error():
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    with pytest.raises(ZeroDivisionError), preserved_rng():
        draws()
        _ = 1 / 0
    assert draws() == expected


def test_a_stop_signal_is_noted_and_the_earlier_handler_is_back_afterwards():
    received = []
    before = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (stop.noted, received) == ("SIGUSR1", [])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)
