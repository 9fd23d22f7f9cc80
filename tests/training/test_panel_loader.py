"""A trainer over a panel's loader: stopped in mid-epoch, it goes on with any number of workers, bit for bit."""

import os
import signal

import numpy as np
import pyarrow as pa
import pytest
import torch

from memfit.data import Loader, Panel
from memfit.errors import StoppedError
from memfit.training import Trainer, seed_everything


@pytest.fixture(scope="module")
def panel(tmp_path_factory):
    rng = np.random.default_rng(0)
    days = np.repeat(np.arange(np.datetime64("2024-01-01"), np.datetime64("2024-01-17")), 6)
    table = {
        "date": pa.array(days),
        "code": list("ABCDEF") * 16,
        "close": rng.normal(size=96),
        "ret": rng.normal(size=96),
    }
    return Panel.build(pa.table(table), tmp_path_factory.mktemp("panels"), features=["close"], targets=["ret"])


def fit(panel, folder, num_workers, stop_after=None):
    """The weights after two epochs, or None when the fit was stopped."""
    seed_everything(1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    steps = []

    def loss(model, batch):
        steps.append(len(batch.targets))
        if len(steps) == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        scores = model(torch.from_numpy(batch.windows))[:, 0]
        return (scores - torch.from_numpy(batch.targets)).square().sum(), len(scores)

    with Loader(panel, range(16), lookback=3, target="ret", batch=5, shuffle=4, num_workers=num_workers) as loader:
        trainer = Trainer(model, loss=loss, checkpoint_dir=folder, microbatch_size=None)
        try:
            trainer.fit(loader, num_epochs=2, preflight=False)
        except StoppedError:
            return None
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_a_fit_that_was_stopped_in_mid_epoch_goes_on_with_another_number_of_workers(panel, tmp_path, before, after):
    straight = fit(panel, tmp_path / "straight", 0)
    assert fit(panel, tmp_path / "stopped", before, stop_after=7) is None
    resumed = fit(panel, tmp_path / "stopped", after)
    assert all(torch.equal(one, other) for one, other in zip(straight, resumed, strict=True))
