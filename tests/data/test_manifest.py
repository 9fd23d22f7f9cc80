"""Nothing in a panel's folder can change unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from memfit.data import Panel
from memfit.data._manifest import _sealed
from memfit.errors import DamagedError, DataError

FILES = ["assets.json", "dates.npy", "history.npy", "manifest.json", "present.npy", "targets.npy", "values.npy"]


@pytest.fixture
def panel(make_table: Callable[..., pa.Table], tmp_path: Path) -> Panel:
    return Panel.build(make_table(), tmp_path, features=["f0", "f1", "f2"], targets=["ret"])


def flip(file: Path, offset: int, mask: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= mask
    file.write_bytes(content)


def test_the_folder_holds_these_files_and_no_others(panel: Panel) -> None:
    assert sorted(path.name for path in panel.path.iterdir()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_refused_by_name(panel: Panel, name: str) -> None:
    file = panel.path / name
    rng = np.random.default_rng(len(name))
    for offset in [0, file.stat().st_size - 1, *rng.integers(0, file.stat().st_size, 30)]:
        mask = int(rng.integers(1, 256))
        flip(file, int(offset), mask)
        with pytest.raises(DamagedError, match=name):
            Panel.open(panel.path, verify="full")
        flip(file, int(offset), mask)
    panel.verify()


@pytest.mark.parametrize("name", ["assets.json", "dates.npy", "manifest.json"])
def test_a_flipped_byte_in_the_labels_or_the_manifest_is_refused_at_every_open(panel: Panel, name: str) -> None:
    for offset in range((panel.path / name).stat().st_size):
        flip(panel.path / name, offset, 1)
        with pytest.raises(DamagedError, match=name):
            Panel.open(panel.path)
        flip(panel.path / name, offset, 1)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_lengthened_file_is_refused_at_every_open(panel: Panel, name: str) -> None:
    file = panel.path / name
    content = file.read_bytes()
    for changed in (content[:-1], content[: len(content) // 2], b"", content + b"\0"):
        file.write_bytes(changed)
        with pytest.raises(DamagedError, match=name):
            Panel.open(panel.path)
    file.write_bytes(content)
    panel.verify()


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
def test_a_missing_file_is_refused_by_name(panel: Panel, name: str) -> None:
    (panel.path / name).unlink()
    with pytest.raises(DamagedError, match=f"{name} is not there"):
        Panel.open(panel.path)


def test_a_damaged_panel_in_the_cache_is_refused_and_not_silently_rebuilt(
    panel: Panel, make_table: Callable[..., pa.Table]
) -> None:
    (panel.path / "values.npy").write_bytes(b"")
    with pytest.raises(DamagedError, match=f"rm -r {panel.path}"):
        Panel.build(make_table(), panel.path.parent, features=["f0", "f1", "f2"], targets=["ret"])


def test_damage_is_named_to_within_a_chunk(
    make_table: Callable[..., pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.data._chunks.CHUNK_BYTES", 1024)
    monkeypatch.setattr("memfit.data._manifest.CHUNK_BYTES", 1024)
    panel = Panel.build(make_table(40, 30), tmp_path, features=["f0"])
    flip(panel.path / "values.npy", 3000, 4)
    with pytest.raises(DamagedError, match=r"values\.npy was changed between bytes 2048 and 3072"):
        panel.verify()


def test_a_panel_of_another_format_is_refused_as_such(panel: Panel) -> None:
    file = panel.path / "manifest.json"
    fields = json.loads(file.read_text())
    file.write_text(_sealed({**{name: fields[name] for name in fields if name != "checksum"}, "format": 99}))
    with pytest.raises(DataError, match="has panel format 99"):
        Panel.open(panel.path)


def test_what_is_no_panel_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(DataError, match="is no panel"):
            Panel.open(path)


def test_another_panels_folder_under_this_ones_name_is_refused(
    panel: Panel, make_table: Callable[..., pa.Table]
) -> None:
    other = Panel.build(make_table(seed=1), panel.path.parent, features=["f0"])
    panel.path.rename(panel.path.with_name("aside"))
    other.path.rename(panel.path)
    with pytest.raises(DamagedError, match="another panel's"):
        Panel.build(make_table(), panel.path.parent, features=["f0", "f1", "f2"], targets=["ret"])
