"""Checkpoint files that are whole or refused, and the folder that keeps the last good ones."""

import io
import resource
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from memfit.errors import DamagedError, DoesNotFitError, JobFailedError, UsageError
from memfit.training import CheckpointWarning, SealedFolder, Trainer, checkpoint_path, load_checkpoint, save_checkpoint

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
    save_checkpoint(tmp_path / "shards/parts.pt", {"epoch": 4})
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
def test_the_newest_epochs_the_best_one_and_milestones_are_kept(tmp_path):
    _, result = train_to(tmp_path, 6, values=[3.0, 3.0, 1.0, 2.0, 2.0, 2.0], keep_epochs=2, milestones=(2, 9))
    assert result.best_epoch == 3
    assert names(tmp_path) == ["best", "latest", "step-10", "step-12", "step-4", "step-6"]
    assert load_checkpoint(tmp_path / "best")["epoch"] == 3
    assert load_checkpoint(tmp_path / "latest")["epoch"] == 6
    assert checkpoint_path(tmp_path / "latest") == tmp_path / "step-12"


def test_a_kill_between_a_checkpoint_and_its_name_loses_nothing(folder):
    (folder / "latest").write_bytes(b"\xff\x00")
    (folder / "best").write_bytes(b"\xff\x00")
    (folder / ".best.4711-1.tmp").write_text("half")
    (folder / "mine.tmp").write_text("kept")
    _, result = train_to(folder, 3, values=[3.0])
    assert (result.resumed_from, load_checkpoint(folder / "latest")["epoch"]) == (3, 3)
    assert load_checkpoint(folder / "best")["epoch"] == 2
    assert names(folder) == ["best", "latest", "mine.tmp", "step-2", "step-4", "step-6"]


def test_the_last_two_within_an_epoch_are_kept_and_go_when_its_own_is_there(tmp_path):
    seen = []

    def look(outcome):
        seen.append(sorted(path.name for path in tmp_path.glob("step-*")))

    settings = {"checkpoint_seconds": 0.0, "keep_epochs": 1, "on_step": look}
    model = torch.nn.Linear(2, 1)
    Trainer(model, loss=squared, checkpoint_dir=tmp_path, **settings).fit([torch.ones(3, 2)] * 4, num_epochs=2)
    assert seen[3] == ["step-0", "step-2", "step-3"]
    assert seen[7] == ["step-4", "step-6", "step-7"]
    assert names(tmp_path) == ["latest", "step-8"]


def test_a_damaged_newer_checkpoint_does_not_take_the_place_of_a_kept_one(tmp_path):
    folder = SealedFolder(tmp_path)
    for step in (1, 2, 3):
        (folder.begin(step) / "weights").write_text("whole")
        folder.seal(step, {})
    flip(tmp_path / "step-3" / "weights", 2)
    with pytest.warns(CheckpointWarning):
        assert folder.newest().step == 2
    folder.prune(1)
    assert names(tmp_path) == ["step-2", "step-3"]


def test_what_a_kill_leaves_of_a_checkpoint_that_was_to_go_goes_at_the_next_start(tmp_path, monkeypatch):
    folder = SealedFolder(tmp_path)
    for step in (1, 2):
        (folder.begin(step) / "weights").write_text("whole")
        folder.seal(step, {})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path: (path / "SEAL.json").unlink(missing_ok=True))
        folder.prune(1)
    assert folder.newest().step == 2
    assert names(tmp_path) == ["step-2"]


@pytest.mark.proves("S1-37")
def test_a_disk_that_cannot_hold_the_checkpoints_is_refused_before_a_step_is_made(tmp_path, monkeypatch):
    free = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free[-1]))
    seen, model = [], torch.nn.Linear(2, 1 << 17)
    options = {"loss": lambda m, x: (seen.append(1), squared(m, x))[1], "milestones": (1, 5)}
    trainer = Trainer(model, checkpoint_dir=tmp_path, **options)
    # 4.5 MiB of weights and of what the optimizer's first step will make; two epochs, two milestones, two steps, the
    # best and the one being written; one milestone is never reached
    for num_epochs, number, room in ((10, 8, 36), (4, 7, 31)):
        free.append(room << 20)
        with pytest.raises(DoesNotFitError, match=rf"{number} checkpoints of 4\.6 MiB need 3"):
            trainer.fit([torch.ones(3, 2)], num_epochs=num_epochs, preflight=False)
    assert not seen
    assert not list(tmp_path.glob("step-*"))
    free.append(38 << 20)
    assert trainer.fit([torch.ones(3, 2)], num_epochs=10, preflight=False).epochs_run == 10


def test_state_that_comes_with_the_first_step_is_proven_too(tmp_path):
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]]["where"] = Path("/tmp")

    model = torch.nn.Linear(2, 1)
    trainer = Trainer(model, loss=squared, optimizer=Odd(model.parameters(), lr=0.1), checkpoint_dir=tmp_path)
    with pytest.raises(UsageError, match="cannot be loaded"):
        trainer.fit([torch.ones(3, 2)], num_epochs=1)
    assert names(tmp_path) == ["latest", "step-0"]


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
    assert "step-1 stays" in caught.value.rule
    assert load_checkpoint(tmp_path / "latest")["epoch"] == 1
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", "/proc/self/below"):
        with pytest.raises(UsageError, match="No checkpoint can be written to"):
            Trainer(torch.nn.Linear(2, 1), loss=squared, checkpoint_dir=path).fit([torch.ones(3, 2)], num_epochs=1)


def test_a_missing_checkpoint_and_a_folder_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"nothing\.pt cannot be read: No such file"):
        load_checkpoint(tmp_path / "nothing.pt")
    with pytest.raises(UsageError, match=r"parts\.pt cannot be read: No such file"):
        load_checkpoint(tmp_path)
