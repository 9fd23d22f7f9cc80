"""What the tests of the adapters share."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _no_accumulation_is_left():
    """A training that ends within an accumulation leaves Accelerate's state so, for all loops of the process."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.GradientState._reset_state()


@pytest.fixture
def no_device(monkeypatch, one_thread):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a forked child cannot use CUDA
