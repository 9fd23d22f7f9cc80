"""Whether a folder's checkpoints can be loaded, by their files alone."""

import json
import os
import pickle
import struct
import zipfile

import pytest

from memfit.diagnosis import _checkpoints, diagnose, read_ran

LOG = "max_epochs: 1\nEpoch 0: 100%|##########| 242/242 [10:00<00:00, 1.0it/s]\nTraining completed successfully\n"
TENSOR = bytes(range(256)) * 16


def archive(path, *, crc=True, mark=0, folders=()):
    """What torch.save writes: stored records, with the checksum 0 where it was told to make none.

    ``mark`` is set in the attributes of the tensor's record; ``folders`` are entries that zip programs add.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as made:
        for name in folders:
            made.writestr(name, b"")
        made.writestr("archive/data.pkl", b"pickle")
        made.writestr("archive/data/0", TENSOR)
        made.getinfo("archive/data/0").external_attr |= mark
        if not crc:
            for record in made.infolist():
                record.CRC = 0
    return path


def safetensors(path, lost=0, promised=8):
    header = json.dumps(
        {"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, promised]}}
    )
    path.write_bytes((struct.pack("<Q", len(header)) + header.encode() + bytes(8))[: -lost or None])
    return path


def flip(path):
    content = bytearray(path.read_bytes())
    content[content.find(TENSOR) + 100] ^= 1
    path.write_bytes(content)


def states(folder, **more):
    return {one.name: one.state for one in read_ran([folder], **more).checkpoints}


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


@pytest.mark.parametrize(
    ("name", "make", "state"),
    [
        ("a.pt", lambda path: archive(path), "whole"),
        ("a.pt", lambda path: flip(archive(path)), "damaged"),
        ("a.pt", lambda path: os.truncate(archive(path), 2000), "damaged"),
        ("a.pt", lambda path: archive(path, crc=False), "not proved"),
        ("a.pt", lambda path: flip(archive(path, crc=False)), "not proved"),
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


def test_each_part_that_an_index_names_is_judged_the_missing_too(tmp_path):
    parts = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"w{at}": part for at, part in enumerate(parts)}}))
    safetensors(tmp_path / parts[0])
    safetensors(tmp_path / parts[1], lost=1)
    assert states(tmp_path) == dict(zip(parts, ["whole", "damaged", "damaged"], strict=True))
    index.write_text('{"weight_map": {"w')
    assert states(tmp_path)[index.name] == "damaged"


def test_large_checkpoints_are_read_whole_only_when_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(_checkpoints, "_MOST_READ", 3000)
    flip(archive(tmp_path / "large.pt"))
    archive(tmp_path / "torn.pt")
    os.truncate(tmp_path / "torn.pt", 4000)
    assert states(tmp_path) == {"large.pt": "not proved", "torn.pt": "damaged"}
    assert states(tmp_path, whole=True) == {"large.pt": "damaged", "torn.pt": "damaged"}


def test_a_good_end_names_the_checkpoints_that_are_not_proved(tmp_path):
    (tmp_path / "train.log").write_text(LOG)
    archive(tmp_path / "out/last.ckpt", crc=False)
    found = diagnose(tmp_path)
    assert found.cause == "completed" and "out/last.ckpt" in found.checks[-1]
