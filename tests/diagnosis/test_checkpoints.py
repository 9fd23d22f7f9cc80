"""Whether a folder's checkpoints can be loaded, by their files alone."""

import json
import os
import pickle
import struct
import zipfile

import pytest

from memfit.diagnosis import diagnose, read_ran

LOG = "max_epochs: 1\nEpoch 0: 100%|##########| 242/242 [10:00<00:00, 1.0it/s]\nTraining completed successfully\n"
TENSOR = bytes(range(256)) * 16


def archive(path, *, mark=0, folders=()):
    """What torch.save writes: stored records.

    ``mark`` is set in the attributes of the tensor's record; ``folders`` are entries that zip programs add.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as made:
        for name in folders:
            made.writestr(name, b"")
        made.writestr("archive/data.pkl", b"pickle")
        made.writestr("archive/data/0", TENSOR)
        made.getinfo("archive/data/0").external_attr |= mark
    return path


def safetensors(path, lost=0, promised=8):
    header = json.dumps(
        {"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, promised]}}
    )
    path.write_bytes((struct.pack("<Q", len(header)) + header.encode() + bytes(8))[: -lost or None])
    return path


def states(folder):
    return {one.name: one.state for one in read_ran([folder]).checkpoints}


@pytest.mark.parametrize("harm", [lambda path: path.write_bytes(b""), lambda path: archive(path, mark=0x10)])
def test_checkpoints_of_one_name_in_several_folders_are_all_judged(tmp_path, harm):
    (tmp_path / "train.log").write_text(LOG)
    for fold in (1, 2, 3):
        archive(tmp_path / f"fold_{fold}/last.ckpt")
    assert diagnose(tmp_path).cause == "completed"
    harm(tmp_path / "fold_1/last.ckpt")
    found = diagnose(tmp_path)
    assert (found.cause, found.arithmetic[0]) == (
        "incomplete",
        "checkpoints that cannot be loaded: fold_1/last.ckpt",
    )


@pytest.mark.proves("S3-29")
@pytest.mark.parametrize(
    ("name", "make", "state"),
    [
        ("a.pt", lambda path: archive(path), "whole"),
        ("a.pt", lambda path: os.truncate(archive(path), 2000), "damaged"),
        ("a.pt", lambda path: archive(path, mark=0x10), "damaged"),  # a folder: torch would not read its bytes
        ("a.pt", lambda path: archive(path, folders=["archive/", "archive/data/"]), "whole"),
        ("a.pt", lambda path: path.write_bytes(bytes(1000)), "damaged"),  # a power cut leaves a disk's zeros
        ("a.pth", lambda path: path.write_bytes(pickle.dumps({"w": [1.0]}, protocol=2)), "not proved"),
        ("a.ckpt", lambda path: path.write_bytes(b"x" * 1024), "not proved"),
        ("a.ckpt", lambda path: path.symlink_to("nowhere"), "damaged"),
        ("a.ckpt", os.mkfifo, "not proved"),
        ("a.safetensors", safetensors, "whole"),
        ("a.safetensors", lambda path: safetensors(path, lost=3), "damaged"),
        ("a.safetensors", lambda path: safetensors(path, promised=80), "damaged"),
        ("a.safetensors", lambda path: path.write_bytes(b"<html>not found</html>"), "damaged"),
    ],
)  # fmt: skip
def test_a_checkpoint_is_whole_damaged_or_not_proved(tmp_path, name, make, state):
    make(tmp_path / name)
    assert states(tmp_path) == {name: state}


def test_a_good_end_names_the_checkpoints_that_are_not_proved(tmp_path):
    (tmp_path / "train.log").write_text(LOG)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/last.ckpt").write_bytes(pickle.dumps({"w": [1.0]}, protocol=2))
    found = diagnose(tmp_path)
    assert found.cause == "completed" and "out/last.ckpt" in found.checks[-1]
