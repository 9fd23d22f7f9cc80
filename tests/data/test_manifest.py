"""Nothing in a panel's folder can change unnoticed."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from memfit.data import Panel, _manifest, pack, write_sealed
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
        for verify in ("sample", "full"):
            with pytest.raises(DamagedError, match=name):
                Panel.open(panel.path, verify=verify)
        flip(file, int(offset), mask)
    panel.verify()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["assets.json", "dates.npy", "manifest.json"])
def test_a_flipped_byte_in_the_labels_or_the_manifest_is_refused_at_every_open(panel: Panel, name: str) -> None:
    for offset in range((panel.path / name).stat().st_size):
        flip(panel.path / name, offset, 1)
        with pytest.raises(DamagedError, match=name):
            Panel.open(panel.path)
        flip(panel.path / name, offset, 1)


def test_a_damaged_panel_in_the_cache_is_refused_and_not_silently_rebuilt(
    panel: Panel, make_table: Callable[..., pa.Table]
) -> None:
    (panel.path / "values.npy").write_bytes(b"")
    with pytest.raises(DamagedError, match=f"rm -r {panel.path}"):
        Panel.build(make_table(), panel.path.parent, features=["f0", "f1", "f2"], targets=["ret"])


def test_damage_is_named_to_within_a_block(
    make_table: Callable[..., pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_manifest, "BLOCK_BYTES", 1024)
    panel = Panel.build(make_table(40, 30), tmp_path, features=["f0"])
    flip(panel.path / "values.npy", 3000, 4)
    with pytest.raises(DamagedError, match=r"values\.npy was changed between bytes 2048 and 3072"):
        panel.verify()


@pytest.fixture
def large(make_table: Callable[..., pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Panel:
    """A panel of far more blocks than an opening checks: each has 1 KiB, and an opening checks 20."""
    monkeypatch.setattr(_manifest, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(_manifest, "_NUM_SAMPLED", 20)
    panel = Panel.build(make_table(100, 100), tmp_path, features=["f0"])
    assert panel.nbytes > 80 * 1024
    return panel


def is_refused(path: Path) -> bool:
    try:
        Panel.open(path)
    except DamagedError as error:
        assert "values.npy was changed between bytes 9216 and 10240" in str(error)
        return True
    return False


@pytest.mark.slow
def test_an_opening_of_a_large_panel_checks_a_part_of_it_that_is_drawn_anew(large: Panel) -> None:
    flip(large.path / "values.npy", 10_000, 1)
    assert {is_refused(large.path) for _ in range(300)} == {True, False}
    assert pickle.loads(pickle.dumps(large)).path == large.path


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".npy")])
def test_an_opening_of_a_large_panel_checks_the_first_and_last_bytes_of_each_file(large: Panel, name: str) -> None:
    size = (large.path / name).stat().st_size
    for offset in (0, 100, size - 1):
        flip(large.path / name, offset, 1)
        with pytest.raises(DamagedError, match=name):
            Panel.open(large.path)
        flip(large.path / name, offset, 1)


@pytest.mark.parametrize("name", ["history.npy", "present.npy", "targets.npy", "values.npy"])
def test_the_same_build_reads_every_byte_of_what_is_there(
    make_table: Callable[..., pa.Table], tmp_path: Path, name: str
) -> None:
    table = make_table()

    def build() -> Panel:
        return Panel.build(table, tmp_path, features=["f0"], targets=["ret"])

    panel = build()
    flip(panel.path / name, 200, 1)
    Panel.open(panel.path, verify="sizes")
    with pytest.raises(DamagedError, match=name):
        build()
    flip(panel.path / name, 200, 1)
    assert (build().reused, build().verified, Panel.open(panel.path).verified) == (True, True, False)


def test_a_manifest_of_another_panel_with_the_same_bytes_is_refused(
    make_table: Callable[..., pa.Table], tmp_path: Path
) -> None:
    table = make_table()
    panel = Panel.build(table, tmp_path, features=["f0"])
    other = Panel.build(table.rename_columns(["date", "code", "g0", "f1", "f2", "ret"]), tmp_path, features=["g0"])
    shutil.copy(other.path / "manifest.json", panel.path)
    with pytest.raises(DamagedError, match=f"another panel's: the one in {other.path.name}"):
        Panel.open(panel.path)


def test_a_copy_under_a_name_of_its_own_is_opened(panel: Panel, tmp_path: Path) -> None:
    shutil.copytree(panel.path, tmp_path / "prices")
    assert Panel.open(tmp_path / "prices", verify="full").fingerprint == panel.fingerprint


def test_packed_objects_are_refused_as_no_panel(tmp_path: Path) -> None:
    pack(["one"], tmp_path / "packed")
    with pytest.raises(DataError, match=r"holds no panel: its manifest\.json describes packed objects"):
        Panel.open(tmp_path / "packed")


@pytest.mark.proves("S0-41")
def test_a_panel_of_another_format_is_refused_as_such(panel: Panel) -> None:
    fields = json.loads((panel.path / "manifest.json").read_text())
    write_sealed(panel.path, {**{name: fields[name] for name in fields if name != "checksum"}, "format": 99})
    with pytest.raises(DataError, match="has the panel format 99"):
        Panel.open(panel.path)


def test_what_is_no_panel_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(DataError, match="holds no panel"):
            Panel.open(path)
