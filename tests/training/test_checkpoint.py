"""Checkpoint files that are whole or refused, and the folder that keeps the last good ones."""

import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from forked import call
from memfit.errors import DamagedError, DoesNotFitError, JobFailedError, UsageError
from memfit.training import CheckpointFolder, CheckpointWarning, Trainer, load_checkpoint, save_checkpoint

STATE = {"epoch": 3, "model": {"weight": torch.arange(6.0)}, "note": (1, None, "x")}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    """Three epochs of a tiny fit, all kept, the second one best."""
    train_to(tmp_path, 3, values=[2.0, 1.0, 3.0])
    return tmp_path


def train_to(path, num_epochs, *, values, keep_epochs=3, **settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    trainer = Trainer(model, loss=squared, checkpoint_dir=path, keep_epochs=keep_epochs, **settings)
    left = iter(values)
    result = trainer.fit(
        [torch.ones(3, 2), torch.eye(2)], [None], num_epochs=num_epochs, preflight=False,
        evaluate=lambda *_: {"valid_loss": next(left)},
    )  # fmt: skip
    return model, result


def squared(model, x):
    return model(x).square().sum(), len(x)


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_gives_back_what_was_saved(tmp_path):
    save_checkpoint(tmp_path / "a.pt", STATE, prove=True)
    loaded = load_checkpoint(tmp_path / "a.pt")
    assert torch.equal(loaded["model"]["weight"], STATE["model"]["weight"])
    assert (loaded["epoch"], loaded["note"]) == (3, (1, None, "x"))
    assert names(tmp_path) == ["a.pt"]
    parts = {"model.a": torch.ones(2), "optimizer.a": torch.zeros(9)}
    torch.distributed.checkpoint.save(parts, checkpoint_id=tmp_path / "shards", no_dist=True)
    save_checkpoint(tmp_path / "shards/trainer.pt", {"epoch": 4})
    loaded = load_checkpoint(tmp_path / "shards")
    assert (loaded["epoch"], list(loaded["model"]), loaded["model"]["a"].tolist()) == (4, ["a"], [1, 1])


def test_a_save_is_proved_by_a_mapped_load_that_reads_no_tensor(tmp_path, monkeypatch):
    asked, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **options: asked.append(options) or load(*args, **options))
    save_checkpoint(tmp_path / "a.pt", STATE, prove=True)
    assert [one["mmap"] for one in asked] == [True]


def test_a_checkpoint_is_an_ordinary_torch_file_with_checksums_even_where_they_are_switched_off(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(tmp_path / "a.pt", STATE, prove=False)
        assert not torch.serialization.get_crc32_options()
        torch.save(STATE, tmp_path / "without.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.load(tmp_path / "a.pt", weights_only=True)["epoch"] == 3
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None and all(one.CRC for one in archive.infolist())
    with pytest.raises(DamagedError, match=r"without\.pt is damaged: its record .* differs"):
        load_checkpoint(tmp_path / "without.pt")


def places_of(whole, count):
    """Up to ``count`` places in each part of an archive, by part: headers and padding, every record, the directory."""
    places = {}
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        for one in archive.infolist():
            start = whole.index(one.filename.encode(), one.header_offset) + len(one.filename)
            content = whole.index(archive.read(one), start)
            places[one.filename] = range(content, content + one.file_size)
            places[f"header of {one.filename}"] = range(one.header_offset, content)
        places["directory"] = range(archive.start_dir, len(whole))
    return {name: part[:: max(1, len(part) // count)] for name, part in places.items()}


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, STATE, prove=False)
    whole, number = path.read_bytes(), 0
    for name, places in places_of(whole, 40).items():
        for place in places:
            number += 1
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << number % 8]) + whole[place + 1 :])
            try:
                loaded = load_checkpoint(path)
            except DamagedError as error:
                assert "a.pt" in error.what
                continue
            is_redundant = name == "directory" or name.startswith(
                "header of "
            )  # what torch writes twice, or as padding
            assert is_redundant and torch.equal(loaded["model"]["weight"], STATE["model"]["weight"]), (name, place)
            assert loaded | {"model": 0} == STATE | {"model": 0}
    assert number > 300


def test_a_record_that_the_directory_calls_a_folder_is_refused(tmp_path):
    save_checkpoint(tmp_path / "a.pt", STATE, prove=False)
    whole = (tmp_path / "a.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        attributes = archive.start_dir + 38  # of the first record: a flag there makes torch read nothing
    (tmp_path / "a.pt").write_bytes(whole[:attributes] + b"\x10" + whole[attributes + 1 :])
    with pytest.raises(DamagedError, match=r"a\.pt is damaged: its record .*data\.pkl differs"):
        load_checkpoint(tmp_path / "a.pt")


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    save_checkpoint(path, STATE, prove=False)
    whole = path.read_bytes()
    for length in range(0, len(whole), 31):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError, match="cut short"):
            load_checkpoint(path)


@pytest.mark.proves("C-30")
def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    save_checkpoint(path, STATE, prove=False)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, {"epoch": 4}, prove=False)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["a.pt"]


def test_state_that_a_safe_load_refuses_fails_in_the_first_epoch_and_not_at_the_resume(tmp_path):
    class Odd(torch.nn.Linear):
        def get_extra_state(self):
            return Path("/tmp")

        def set_extra_state(self, state):
            pass

    trainer = Trainer(Odd(2, 1), loss=squared, checkpoint_dir=tmp_path)
    with pytest.raises(UsageError, match="cannot be loaded"):
        trainer.fit([torch.ones(3, 2)], num_epochs=1)
    assert names(tmp_path) == []


@pytest.mark.proves("S1-35", "S1-37")
def test_the_newest_epochs_and_the_best_one_are_kept(tmp_path):
    _, result = train_to(tmp_path, 6, values=[3.0, 1.0, 2.0, 2.0, 2.0, 2.0], keep_epochs=2)
    assert result.best_epoch == 2
    epochs = [f"checkpoint_epoch_{epoch}.pt" for epoch in (2, 5, 6)]
    assert names(tmp_path) == ["best_model.pt", *epochs, "latest_checkpoint.pt"]
    assert load_checkpoint(tmp_path / "best_model.pt")["epoch"] == 2
    assert load_checkpoint(tmp_path / "latest_checkpoint.pt")["epoch"] == 6


def test_an_epoch_costs_its_bytes_once_however_many_names_it_has(folder):
    assert (folder / "latest_checkpoint.pt").samefile(folder / "checkpoint_epoch_3.pt")
    assert (folder / "best_model.pt").samefile(folder / "checkpoint_epoch_2.pt")


def test_without_hard_links_the_names_are_copies(tmp_path, monkeypatch):
    def refused(source, target):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    train_to(tmp_path, 2, values=[1.0, 2.0])
    assert not (tmp_path / "latest_checkpoint.pt").samefile(tmp_path / "checkpoint_epoch_2.pt")
    assert load_checkpoint(tmp_path / "latest_checkpoint.pt")["epoch"] == 2
    flip(tmp_path / "latest_checkpoint.pt", 100)
    with pytest.warns(CheckpointWarning, match=r"latest_checkpoint\.pt .* damaged.*checkpoint_epoch_2\.pt") as caught:
        CheckpointFolder(tmp_path, 2).newest()
    assert caught[0].filename == __file__
    assert load_checkpoint(tmp_path / "latest_checkpoint.pt")["epoch"] == 2


def test_a_fit_that_lost_its_last_checkpoint_ends_with_the_same_bytes(folder):
    expected = load_checkpoint(folder / "latest_checkpoint.pt")
    os.truncate(folder / "latest_checkpoint.pt", 500)
    with pytest.warns(CheckpointWarning, match=r"cut short.* Taken instead: checkpoint_epoch_2\.pt\.") as caught:
        _, result = train_to(folder, 3, values=[1.0, 3.0])
    damaged = " ".join(str(warning.message) for warning in caught)
    assert "latest_checkpoint.pt" in damaged and "checkpoint_epoch_3.pt" in damaged
    again = load_checkpoint(folder / "latest_checkpoint.pt")
    assert (result.resumed_from, result.epochs_run, result.best_epoch) == (2, 1, 2)
    assert torch.equal(again["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(again["rng"]["torch"], expected["rng"]["torch"])


def test_when_no_checkpoint_is_whole_the_fit_does_not_start_over_silently(folder):
    for path in folder.iterdir():
        os.truncate(path, 40)
    with pytest.raises(DamagedError, match="cut short") as error:
        train_to(folder, 3, values=[1.0])
    assert "to start over, pass another checkpoint_dir" in str(error.value)


@pytest.mark.parametrize(
    ("state", "found"), [({"model": {}, "epoch": 3}, None), ({"memfit_checkpoint": 1}, 1), (torch.ones(2), None)]
)
def test_a_checkpoint_of_another_format_in_the_folder_of_a_fit_is_refused(tmp_path, state, found):
    save_checkpoint(tmp_path / "latest_checkpoint.pt", state)
    with pytest.raises(
        UsageError, match=f"is no checkpoint of a Trainer of this version: its format is {found}, not 2"
    ):
        train_to(tmp_path, 3, values=[1.0] * 3)
    assert names(tmp_path) == ["latest_checkpoint.pt"]


def test_links_that_lead_nowhere_do_not_start_a_fit_over(folder):
    for path in folder.glob("*.pt"):
        path.unlink()
        path.symlink_to(folder / "gone" / path.name)
    with pytest.raises(UsageError, match=r"latest_checkpoint.pt cannot be read: No such file"):
        train_to(folder, 3, values=[1.0] * 3)


def test_a_kill_between_an_epoch_and_its_latest_name_loses_nothing(folder):
    os.replace(folder / "checkpoint_epoch_2.pt", folder / "latest_checkpoint.pt")
    path, state = CheckpointFolder(folder, 3).newest()
    assert (path.name, state["epoch"]) == ("checkpoint_epoch_3.pt", 3)
    assert load_checkpoint(folder / "latest_checkpoint.pt")["epoch"] == 3


def test_the_latest_is_enough_when_the_epochs_were_deleted(folder):
    for path in folder.glob("checkpoint_epoch_*.pt"):
        path.unlink()
    assert CheckpointFolder(folder, 3).newest()[1]["epoch"] == 3


def test_half_files_of_a_killed_writer_are_removed_and_nothing_else(folder):
    before = names(folder)
    (folder / ".checkpoint_epoch_4.pt.4711.tmp").write_bytes(b"half")
    (folder / ".best_model.pt.4711.tmp").write_bytes(b"half")
    (folder / "mine.tmp").write_bytes(b"kept")
    with (held := CheckpointFolder(folder, 3)).held():
        assert held.newest()[1]["epoch"] == 3
    assert names(folder) == sorted([*before, "mine.tmp"])


def saved(folder, *positions):
    for epoch, step in positions:
        state = {"epoch": epoch, "step": step, "model": torch.arange(50.0) + epoch}
        folder.save((epoch, step), {"memfit_checkpoint": 2, **state})


@pytest.mark.proves("S1-36")
def test_a_flip_a_cut_and_a_missing_file_each_fall_back_to_the_last_good_one(tmp_path):
    saved(folder := CheckpointFolder(tmp_path, 3), (0, 0), (1, 0), (1, 2))
    newest = tmp_path / "checkpoint_epoch_2_step_2.pt"
    whole = newest.read_bytes()
    in_tensor = whole.index(torch.arange(50.0).add(1).numpy().tobytes()) + 20
    for position in (0, whole.find(b"data.pkl"), in_tensor, len(whole) - 22):
        for bit in (1, 128):
            newest.write_bytes(whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :])
            (tmp_path / "latest_checkpoint.pt").unlink()
            os.link(newest, tmp_path / "latest_checkpoint.pt")
            with pytest.warns(CheckpointWarning, match="Taken instead"):
                assert folder.newest()[1]["epoch"] == 1
    newest.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(CheckpointWarning, match="cut short"):
        assert folder.newest()[0].name == "checkpoint_epoch_1.pt"
    newest.unlink()
    assert (folder.newest()[1]["epoch"], folder.newest()[1]["step"]) == (1, 0)


def test_a_step_comes_after_its_epochs_beginning_and_before_its_end(tmp_path):
    saved(folder := CheckpointFolder(tmp_path, 3), (1, 0), (1, 2), (1, 10))
    assert folder.newest()[0].name == "checkpoint_epoch_2_step_10.pt"
    (tmp_path / "latest_checkpoint.pt").unlink()
    assert folder.newest()[0].name == "checkpoint_epoch_2_step_10.pt"
    saved(folder, (2, 0))
    assert folder.newest()[0].name == "checkpoint_epoch_2.pt"


def test_the_last_two_steps_are_kept_and_go_when_their_epochs_own_checkpoint_is_there(tmp_path):
    saved(folder := CheckpointFolder(tmp_path, 2), (0, 0), (1, 0), (1, 1), (1, 2), (1, 3))
    folder.prune((1, 3), None)
    steps = ["checkpoint_epoch_2_step_2.pt", "checkpoint_epoch_2_step_3.pt"]
    assert names(tmp_path) == ["checkpoint_epoch_0.pt", "checkpoint_epoch_1.pt", *steps, "latest_checkpoint.pt"]
    saved(folder, (2, 0))
    folder.prune((2, 0), None)
    assert names(tmp_path) == ["checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt", "latest_checkpoint.pt"]


def test_milestones_stay(tmp_path):
    train_to(tmp_path, 5, values=[5.0, 4.0, 3.0, 2.0, 1.0], keep_epochs=1, milestones=(2, 3))
    assert [name for name in names(tmp_path) if "epoch" in name] == [f"checkpoint_epoch_{n}.pt" for n in (2, 3, 5)]


def test_nothing_is_deleted_before_the_newest_was_read_back_whole(tmp_path):
    saved(folder := CheckpointFolder(tmp_path, 1), (1, 0), (2, 0))
    flip(tmp_path / "checkpoint_epoch_2.pt", 300)
    with pytest.warns(CheckpointWarning, match=r"checkpoint_epoch_2\.pt .* damaged.* The older ones stay"):
        folder.prune((2, 0), None)
    assert (tmp_path / "checkpoint_epoch_1.pt").exists()
    saved(folder, (2, 0))
    folder.prune((2, 0), None)
    assert not (tmp_path / "checkpoint_epoch_1.pt").exists()


def test_a_damaged_newer_file_does_not_take_the_place_of_a_kept_one(tmp_path):
    saved(folder := CheckpointFolder(tmp_path, 1), (1, 0), (2, 0), (3, 0))
    flip(tmp_path / "checkpoint_epoch_3.pt", 300)
    with pytest.warns(CheckpointWarning):
        assert folder.newest()[1]["epoch"] == 2
    folder.prune((2, 0), None)
    assert (tmp_path / "checkpoint_epoch_2.pt").exists()


@pytest.mark.proves("S1-37")
def test_a_disk_that_cannot_hold_the_checkpoints_is_refused_before_a_step_is_made(tmp_path, monkeypatch):
    free = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free[-1]))
    folder = CheckpointFolder(tmp_path, 2, milestones=(1, 5))
    size = 1 << 20
    one = size + (1 << 16)
    free.append(8 * one)  # two epochs, two milestones, two steps, the best and the one being written
    folder.check_room(size, num_epochs=10)
    free.append(8 * one - 1)
    with pytest.raises(DoesNotFitError, match=r"8 checkpoints of 1\.1 MiB need 8\.5 MiB of disk"):
        folder.check_room(size, num_epochs=10)
    folder.check_room(size, num_epochs=4)  # one milestone is never reached
    folder.save((0, 0), {"epoch": 0, "model": torch.zeros(1 << 18)})
    folder.check_room(size, num_epochs=10)  # its own file will make room
    free.append(6 * 2 * one)  # of weights and random state, but not of what the optimizer's first step will make
    seen = []
    model = torch.nn.Linear(2, 1 << 17)
    trainer = Trainer(model, loss=lambda m, x: (seen.append(1), squared(m, x))[1], checkpoint_dir=tmp_path / "new")
    with pytest.raises(DoesNotFitError, match="keep_epochs=2"):
        trainer.fit([torch.ones(3, 2)], num_epochs=3, preflight=False)
    assert not seen
    assert not list((tmp_path / "new").iterdir())


def test_state_that_comes_with_the_first_step_is_proven_too(tmp_path):
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]]["where"] = Path("/tmp")

    model = torch.nn.Linear(2, 1)
    trainer = Trainer(model, loss=squared, optimizer=Odd(model.parameters(), lr=0.1), checkpoint_dir=tmp_path)
    with pytest.raises(UsageError, match="cannot be loaded"):
        trainer.fit([torch.ones(3, 2)], num_epochs=1)
    assert names(tmp_path) == ["checkpoint_epoch_0.pt", "latest_checkpoint.pt"]


def test_a_disk_that_becomes_full_says_what_is_lost(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def evaluate(model, valid):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        return {"valid_loss": 1.0}

    model = torch.nn.Sequential(torch.nn.Linear(2, 20_000), torch.nn.Linear(20_000, 1))
    trainer = Trainer(model, loss=squared, checkpoint_dir=tmp_path)
    data = [torch.ones(3, 2)]
    try:
        with pytest.raises(JobFailedError, match=r"could not be written to .*: File too large; .* is free") as caught:
            trainer.fit(data, data, num_epochs=3, evaluate=evaluate, preflight=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "checkpoint_epoch_1.pt stays" in caught.value.rule
    assert load_checkpoint(tmp_path / "latest_checkpoint.pt")["epoch"] == 1
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", "/proc/self/below"):
        with pytest.raises(UsageError, match="No checkpoint can be written to"):
            Trainer(torch.nn.Linear(2, 1), loss=squared, checkpoint_dir=path).fit([torch.ones(3, 2)], num_epochs=1)


def test_a_missing_checkpoint_and_a_folder_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"nothing\.pt cannot be read: No such file"):
        load_checkpoint(tmp_path / "nothing.pt")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load_checkpoint(tmp_path)


HOLDER = """
import os, sys, time
from pathlib import Path
from memfit.training import CheckpointFolder
with CheckpointFolder(Path(sys.argv[1]), 2).held():
    if os.fork() == 0:  # as a loader's worker, which lives on for a while when this process is killed
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_folder_is_written_by_one_process_and_free_when_that_is_killed(tmp_path):
    own = CheckpointFolder(tmp_path, 2)
    half = tmp_path / ".checkpoint_epoch_1.pt.123.tmp"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    ) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            half.touch()
            with pytest.raises(UsageError, match=f"Process {other.pid} trains into") as caught, own.held():
                pass
            assert "another checkpoint_dir" in caught.value.remedy and half.exists()
            os.kill(other.pid, signal.SIGKILL)
            other.wait()
            with own.held():
                assert not half.exists()
            assert not list(tmp_path.iterdir())
        finally:
            os.killpg(other.pid, signal.SIGKILL)


def _told_elsewhere(folder):
    """What another process is told that wants to train there."""
    with pytest.raises(UsageError) as caught, CheckpointFolder(folder, 2).held():
        pass
    return caught.value.what


def test_a_fit_holds_its_folder(tmp_path):
    told = []

    def evaluate(model, batches):
        told.append(call(_told_elsewhere, tmp_path))
        return {"valid_loss": 1.0}

    (tmp_path / ".lock").write_text("12345678")  # of a process that was killed
    data, model = [torch.ones(2, 2)], torch.nn.Linear(2, 1)
    Trainer(model, loss=squared, checkpoint_dir=tmp_path).fit(
        data, data, num_epochs=1, evaluate=evaluate, preflight=False
    )
    assert told == [f"Process {os.getpid()} trains into {tmp_path} now."]
