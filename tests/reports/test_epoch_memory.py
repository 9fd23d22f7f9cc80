"""The memory of an epoch in the log, the summary, the page and the trackers."""

import io
import json
import re

import pytest
from rich.console import Console

from memfit.integrations._track import numbers_of
from memfit.memory import Sample, SeriesWriter
from memfit.reports import LiveRun, print_summary, summarize, write_page

GIB, MIB = 1 << 30, 1 << 20
DEVICE = {"cuda:0": {"allocated_peak_bytes": 3 * GIB, "reserved_peak_bytes": 4 * GIB}}
MEMORY = {
    "metric": "non_reclaimable",
    "phases": {
        "train": {"host_bytes": 900 * MIB, "devices": DEVICE},
        "validate": {"host_bytes": 800 * MIB, "devices": {}},
    },
}
LINE = "host non-reclaimable: train 900.0 MiB, validate 800.0 MiB; cuda:0 peak: train 3.00 GiB of 4.00 GiB reserved"


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


def test_the_summary_has_that_of_each_jobs_last_epoch(trained):
    texts = []
    for verbose in (False, True):
        file = io.StringIO()
        print_summary(trained.run, Console(file=file, width=120), verbose=verbose)
        texts.append(file.getvalue())
    assert f"memory    fold_1 epoch 2: {LINE}" in texts[1] and "non-reclaimable" not in texts[0]
    found = json.loads(json.dumps(summarize(trained.run)))
    jobs = {job["job"]: (job["epoch"], job["epoch_memory"]) for job in found["jobs"]}
    assert jobs["fold_1"] == (2, MEMORY) and jobs["fold_2"] == (None, None)


def test_the_page_has_a_table_of_all(trained, tmp_path):
    series = SeriesWriter(trained.path / "jobs" / "fold_1" / "memory.jsonl")
    for at in (20.0, 1600.0):
        series.append(Sample(trained.start + at, 1, MIB, 0, MIB, MIB, "train"))
    series.close()
    text = write_page(trained.run, tmp_path / "page.html").read_text()
    table = text[text.index("Memory of each epoch, by phase") :]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", table[: table.index("</table>")])
    rows = [tuple(cells[at : at + 5]) for at in range(0, len(cells), 5)]
    assert ("fold_1", "2", "end of validate", "host, non-reclaimable", "800.0 MiB") in rows
    assert ("fold_1", "2", "peak of train", "cuda:0", "3.00 GiB of 4.00 GiB reserved") in rows
    assert len(rows) == 3


def test_a_tracker_shows_each_figure_by_its_name():
    numbers = dict(numbers_of({"kind": "epoch", "epoch": 2, "train_loss": 0.5, "memory": MEMORY}))
    assert numbers["memory/phases/train/host_bytes"] == 900 * MIB
    assert numbers["memory/phases/train/devices/cuda:0/reserved_peak_bytes"] == 4 * GIB
    assert len(numbers) == 1 + 2 + 2
