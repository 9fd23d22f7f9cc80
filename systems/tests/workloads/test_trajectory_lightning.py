"""The trajectory model in Lightning: a stop in the middle of an epoch goes on to the same weights."""

import hashlib
import os
import signal

import numpy as np
import pytest

pytest.importorskip("lightning")

from memfit.errors import StoppedError, UsageError
from memfit_workloads.trajectory import lightning_train
from memfit_workloads.trajectory.params import TrajectoryParams

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*")]
#: Hydra's names, as the job of the field report was started with.
WORDS = ("dataloader.params.batch_size=4", "trainer.params.accumulate_grad_batches=2", "trainer.params.max_epochs=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with 40 made-up scenes of one place: 28 to train on, 12 to validate."""
    folder = tmp_path_factory.mktemp("trajectory") / "run_1"
    data, rng, num = TrajectoryParams().data, np.random.default_rng(0), 40
    scenes, taught = folder / "checkpoints/prepare_here/scenes.arrays", folder / "checkpoints/teacher_here"
    words = folder / "checkpoints/stage_vocabulary/vocabulary.arrays"
    for one in (scenes, taught, words):
        one.mkdir(parents=True)
    future = rng.normal(size=(num, data.num_future, 2)).cumsum(axis=1).astype(np.float32)
    np.save(scenes / "history.npy", rng.normal(size=(num, data.num_history, 2)).astype(np.float32))
    np.save(scenes / "raster.npy", rng.integers(0, 255, (num, 3, data.raster_size, data.raster_size), np.uint8))
    np.save(scenes / "future.npy", future)
    np.save(scenes / "split.npy", np.repeat(np.array([0, 1], np.int8), [28, 12]))
    np.save(taught / "teacher.npy", rng.random((num, 4, 16), np.float32))
    np.save(words / "paths.npy", future[:16])
    (folder / "config.yaml").write_text("experiment: trajectory\nparams: {data: {places: [here], held_out: []}}\n")
    return folder


def digest(module):
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in module.parameters())).hexdigest()


def test_a_stop_in_the_middle_of_an_epoch_goes_on_to_the_same_weights(run, tmp_path, monkeypatch):
    whole = digest(lightning_train.train(run, WORDS, tmp_path / "whole", every=3))
    assert digest(lightning_train.train(run, WORDS, tmp_path / "other", seed=2, every=3)) != whole

    def stop(module):
        if module.global_step == 5:  # the second of four updates of the second epoch
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(lightning_train.Scorer, "on_after_backward", stop)
        with pytest.raises(StoppedError):
            lightning_train.train(run, WORDS, tmp_path / "part", every=3)
    assert digest(lightning_train.train(run.parent, WORDS, tmp_path / "part", every=3)) == whole


def test_a_folder_without_a_run_is_refused_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(UsageError, match=r"memfit run .*config.yaml --until teacher"):
        lightning_train.train(tmp_path, (), tmp_path / "out")
