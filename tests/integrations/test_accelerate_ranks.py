"""A loop of Accelerate on several ranks: one seal, one step of a stop, and each rank's bytes as without a stop."""

import functools
import os
import signal
import tempfile
from pathlib import Path

import pytest

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402

import ranked  # noqa: E402
from integrations import test_accelerate  # noqa: E402
from training.loops import NUM_SAMPLES, plain  # noqa: E402

pytestmark = pytest.mark.slow


def train(rank, size, folder, victim=None, settings=()):
    """Train on one rank; ``victim``: (rank, moment, signal)."""
    return as_rank(rank, size, victim, functools.partial(test_accelerate.train, folder, **dict(settings)))


def as_rank(rank, size, victim, function):
    AcceleratorState._reset_state(True)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

    def at(moment):
        if victim is not None and (rank, moment) == victim[:2]:
            os.kill(os.getpid(), victim[2])

    return function(at)


def run(size, folder, victim=None, **settings):
    folder.mkdir(exist_ok=True)
    return ranked.run(size, folder, train, size, folder / "kept", victim, tuple(settings.items()))


@functools.cache
def whole(size, **settings):
    """What each rank ends with if nothing stops it."""
    return ranked.values(run(size, Path(tempfile.mkdtemp()), **settings))


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (4, {"workers": 1}),
        (2, {"split": True}),
        (2, {"mode": "stop", "collate": plain}),
        (2, {"with_loss": True}),
    ],
    ids=["four with workers", "split", "stop", "rehearsed"],
)
def test_a_signal_to_one_rank_stops_all_at_one_step_and_each_goes_on_to_its_bytes(tmp_path, size, settings):
    at = ("batch", 1, 2 if size == 2 else 1)
    ends = run(size, tmp_path, (1, at, signal.SIGTERM), **settings)
    steps = {end.error.partition("StoppedError: Stopped by SIGTERM after ")[2][:6] for end in ends}
    assert len(steps) == 1 and steps != {""}, ends[0].error
    found = ranked.values(run(size, tmp_path, **settings))
    assert [left for left, *_ in found] == [left for left, *_ in whole(size, **settings)]
    for (_, seen, _), (_, undisturbed, _) in zip(found, whole(size, **settings), strict=True):
        assert seen == undisturbed[-len(seen) :]
    first_epoch = {one for _, seen, _ in whole(size, **settings) for batch in seen[: len(seen) // 3] for one in batch}
    assert first_epoch == {*range(1, NUM_SAMPLES + 1)}


def recovered(rank, folder, victim=None):
    """Train by a SafeStep on one rank of two; the device of the second fits three samples."""
    return as_rank(rank, 2, victim, functools.partial(test_accelerate.safe, folder, fits=3 if rank else 99))


def test_safe_step_recovers_one_rank_and_all_stop_and_go_on_to_the_same_bytes(tmp_path):
    expected = ranked.values(ranked.run(2, tmp_path, recovered, tmp_path / "whole"))
    assert [(ooms > 0, step) for _, ooms, step in expected] == [(False, 6), (True, 6)]
    assert expected[0][0] == expected[1][0]
    ends = ranked.run(2, tmp_path, recovered, tmp_path / "out", (1, ("batch", 1, 2), signal.SIGTERM))
    assert all("StoppedError: Stopped by SIGTERM" in end.error for end in ends), ends
    again = ranked.values(ranked.run(2, tmp_path, recovered, tmp_path / "out"))
    assert [left for left, *_ in again] == [left for left, *_ in expected]
