"""A loader's modes are judged over a whole training, refused where they do not fit, and the simplest good one taken."""

import numpy as np
import pytest

from memfit.data import DateBatches, LoaderReport, Pace, Panel, _measure, choose_mode
from memfit.errors import UsageError

SLOW = [np.ones((4, 8), np.float32)] * 10


def pace(wait, compute=0.0):
    return Pace(10, 40, 0, 10 * wait, 10 * compute)


def chosen(monkeypatch, reports, *, read_seconds=0.0, size=1000, trainer=True, **settings):
    """The choice among reports that stand in for measurements, of ten batches over a file of so many bytes."""

    class Files:
        def stat(self):
            return type("Stat", (), {"st_size": size})

    monkeypatch.setattr(_measure, "measure_loader", lambda *args, **more: reports)
    monkeypatch.setattr(_measure, "_read_seconds", lambda files, seconds: read_seconds)
    counts = [one.num_workers for one in reports[1:]]
    files = [Files()] if size else []
    return choose_mode(
        lambda number: SLOW, num_workers=counts, consume=1.0 if trainer else None, files=files, **settings
    )


def report(number, cold, wait, *, compute=1.0, start=0.0, private=0):
    return LoaderReport(number, start, pace(cold), pace(cold), pace(wait, compute), private, private)


def test_safe_is_taken_where_the_trainer_hardly_waits(monkeypatch):
    found = chosen(monkeypatch, [report(0, 0.05, 0.01), report(2, 0.0, 0.0, private=9)])
    assert (found.name, found.num_workers) == ("safe", 0)
    share = 0.1 * 0.05 + 0.9 * 0.01
    assert found.modes[0].wait_share == pytest.approx(share / (1 + share))
    assert found.modes[0].samples_per_second == pytest.approx(4 / (1 + share))


def test_preload_is_taken_where_the_first_epoch_is_what_is_waited_for_and_only_if_the_data_fit(monkeypatch):
    reports = [report(0, 5.0, 0.001), report(2, 5.0, 0.001, start=1.0, private=9)]
    found = chosen(monkeypatch, reports, read_seconds=1.0)
    assert found.name == "preload" and found.modes[1].start_seconds == 1.0 and found.modes[1].data_bytes == 1000
    assert found.modes[0].wait_share > 0.3 and found.modes[2].wait_share > 0.2
    slowly_read = chosen(monkeypatch, reports, read_seconds=500.0)
    assert slowly_read.name == "workers"
    no_room = chosen(monkeypatch, reports, read_seconds=1.0, budget_bytes=999)
    assert no_room.modes[1].refused == "1000 B of data, more than the 999 B that are left" and no_room.name == "workers"
    assert no_room.modes[0].wait_share == pytest.approx(5 / 6), "without room for the data every epoch reads the disk"


def test_workers_are_taken_where_making_batches_is_what_is_waited_for_and_only_if_they_fit(monkeypatch):
    reports = [report(0, 0.5, 0.5), report(1, 0.5, 0.1, private=1 << 20), report(2, 0.5, 0.0, private=2 << 20)]
    found = chosen(monkeypatch, reports)
    assert (found.name, found.num_workers) == ("workers", 2)
    assert found.modes[2].wait_share == 0.0, "what workers make while the trainer computes is not waited for"
    tight = chosen(monkeypatch, reports, budget_bytes=3 << 19)
    assert (tight.name, tight.num_workers) == ("workers", 1) and "none that fits keeps it below 2 %" in tight.text
    tighter = chosen(monkeypatch, reports, budget_bytes=1 << 19)
    assert tighter.modes[2].refused == "1.0 MiB of workers, more than the 512.0 KiB that are left"
    assert tighter.name in ("safe", "preload")
    lines = tighter.text.splitlines()
    assert len(lines) == 4 and lines[3].endswith(f"; refused: {tighter.modes[2].refused}")


def test_without_a_trainer_the_simplest_of_the_fastest_is_taken(monkeypatch):
    def bare(number, wait, private=0):
        return LoaderReport(number, 0.0, pace(wait), None, None, private, private)

    assert chosen(monkeypatch, [bare(0, 0.100), bare(2, 0.098)], trainer=False, size=0).name == "safe"
    found = chosen(monkeypatch, [bare(0, 0.100), bare(2, 0.05)], trainer=False, size=0)
    assert found.name == "workers" and "95% of the best rate" in found.text
    assert found.modes[1].refused == "no files are known to read in"


@pytest.mark.slow
def test_a_real_loader_over_a_panel_is_measured_in_each_mode(make_table, tmp_path):
    panel = Panel.build(make_table(30, 40), tmp_path, features=["f0", "f1"], targets=["ret"])
    batches = DateBatches(panel, range(30), lookback=2, target="ret")
    found = choose_mode(lambda number: batches, num_workers=[], seconds=0.05, consume=0.002, num_epochs=3)
    assert [mode.name for mode in found.modes] == ["safe", "preload"]
    assert found.modes[1].data_bytes == sum(file.stat().st_size for file in panel.path.glob("*.npy")) > 0
    assert all(0 <= mode.wait_share < 1 and mode.samples_per_second > 0 for mode in found.modes)


@pytest.mark.parametrize("wrong", [{"num_epochs": 0}, {"num_workers": [0]}])
def test_modes_that_cannot_be_compared_are_refused(wrong):
    with pytest.raises(UsageError, match="is a whole number of at least 1"):
        choose_mode(lambda number: SLOW, **wrong)
