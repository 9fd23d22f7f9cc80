"""The memory of an epoch in the log and the summary."""

import io
import json

import pytest
from rich.console import Console

from memfit.reports import LiveRun, print_summary, summarize
from memfit.rundir import read

GIB, MIB = 1 << 30, 1 << 20
DEVICE = {"cuda:0": {"allocated_peak_bytes": 3 * GIB, "reserved_peak_bytes": 4 * GIB}}
MEMORY = {
    "metric": "non_reclaimable",
    "phases": {
        "train": {"host_bytes": 900 * MIB, "devices": DEVICE},
        "validate": {"host_bytes": 800 * MIB, "devices": {}},
    },
}
LINE = (
    "train: host 900.0 MiB (non-reclaimable), cuda:0 peak 3.00 GiB of 4.00 GiB reserved; "
    "validate: host 800.0 MiB (non-reclaimable)"
)


@pytest.fixture
def trained(finished):
    finished.event(1500, "epoch", "fold_1", "host-2-2", epoch=2, num_epochs=2, memory=MEMORY, text="epoch 2/2")
    return finished


@pytest.mark.parametrize("verbose", [True, False])
def test_the_log_has_it_where_more_is_asked_for(made, verbose):
    file = io.StringIO()
    live = LiveRun(Console(file=file, soft_wrap=True), verbose=verbose)
    live.show(made.run)
    made.event(1, "epoch", "fold_1", epoch=1, num_epochs=2, memory=MEMORY, text="epoch 1/2  train_loss 2")
    made.event(2, "epoch", "fold_1", epoch=2, num_epochs=2, memory={"weights": "a lot"}, text="epoch 2/2")
    live.close()
    first, second = file.getvalue().splitlines()[1:]
    assert first.partition("  ")[2] == "epoch 1/2  train_loss 2" + (f"; {LINE}" if verbose else "")
    assert second.partition("  ")[2] == "epoch 2/2"


@pytest.mark.proves("S4-19")
def test_the_summary_has_that_of_each_jobs_last_epoch(trained):
    texts = []
    for verbose in (False, True):
        file = io.StringIO()
        print_summary(read(trained.run), Console(file=file, width=120), verbose=verbose)
        texts.append(file.getvalue())
    assert f"memory    fold_1 epoch 2: {LINE}" in texts[1] and "non-reclaimable" not in texts[0]
    found = json.loads(json.dumps(summarize(read(trained.run))))
    jobs = {job["job"]: (job["epoch"], job["epoch_memory"]) for job in found["jobs"]}
    assert jobs["fold_1"] == (2, MEMORY) and jobs["fold_2"] == (None, None)
