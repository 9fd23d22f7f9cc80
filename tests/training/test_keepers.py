"""What every keeper of files promises: a row for each promise, a column for each keeper."""

import itertools
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest

import forked
from memfit.data import Panel
from memfit.errors import MemfitError
from memfit.files import read_json, write_json
from memfit.training import SealedFolder, load_checkpoint, save_checkpoint


class Keeper(NamedTuple):
    """Writes a text into a folder, in place of the one before unless it keeps both, and reads what is whole there."""

    write: Callable[[Path, str], object]
    read: Callable[[Path], list[str]]
    has_hashes: bool = True


def seal(folder, text):
    sealed = SealedFolder(folder)
    (sealed.begin(1) / "deep").mkdir()
    (sealed.folder_of(1) / "deep" / "text").write_text(text)
    sealed.seal(1, {})


def read_sealed(folder):
    newest = SealedFolder(folder).newest()
    return [] if newest is None else [(newest.path / "deep" / "text").read_text()]


def build(folder, text):
    table = pa.table({"date": ["2024-01-01"] * 9, "code": list("abcdefghi"), "f0": [float(len(text))] * 9})
    Panel.build(table, folder, features=["f0"], parameters={"text": text})


def read_panels(folder):
    panels = [Panel.open(path) for path in sorted(folder.glob("[!.]*")) if path.name != "notes"]
    return sorted(({3.0: "old", 5.0: "newer"}[float(panel.values.flat[0])] for panel in panels), reverse=True)


def read_file(folder):
    return [load_checkpoint(folder / "a.pt")["text"]] if (folder / "a.pt").exists() else []


def read_value(folder):
    found = read_json(folder / "a.json")
    return [] if found is None else [found["text"]]


KEEPERS = {
    "sealed folder": Keeper(seal, read_sealed),
    "checkpoint": Keeper(lambda at, text: save_checkpoint(at / "a.pt", {"text": text}, prove=False), read_file),
    "panel": Keeper(build, read_panels),
    "JSON file": Keeper(lambda at, text: write_json(at / "a.json", {"text": text}), read_value, has_hashes=False),
}


@pytest.fixture(params=KEEPERS)
def keeper(request):
    return KEEPERS[request.param]


def files_in(folder):
    """The files that count: neither locks nor half a file aside, which its folder's owner removes."""
    return sorted(
        one.relative_to(folder)
        for one in folder.rglob("*")
        if one.is_file() and not one.name.endswith((".lock", ".tmp"))
    )


def write_until(keeper, folder, text, deadly):
    """Write in this child, which is killed at its ``deadly``-th moment: before an operation on a file, or as soon as
    one was opened."""
    seen = []

    def watch(event, arguments):
        reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
        is_file = event in ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir")
        if is_file and not reads and str(folder) in str(arguments[0]) and len(seen) < deadly:
            for is_open in [False, True][: 1 + (event == "open")]:
                seen.append(event)
                if len(seen) == deadly:
                    if is_open:
                        with suppress(OSError):
                            os.close(os.open(arguments[0], arguments[2], 0o666))
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    keeper.write(folder, text)


@pytest.mark.core
@pytest.mark.proves("S0-42")
def test_a_kill_at_any_operation_on_a_file_leaves_the_old_or_the_new_and_the_next_write_is_whole(keeper, tmp_path):
    (before := tmp_path / "before").mkdir()
    keeper.write(before, "old")
    keeper.write(whole := shutil.copytree(before, tmp_path / "whole"), "newer")
    assert keeper.read(whole)[-1] == "newer"
    for deadly in itertools.count(1):
        folder = shutil.copytree(before, tmp_path / str(deadly))
        with suppress(EOFError):
            forked.call(write_until, keeper, folder, "newer", deadly)
            break  # all moments were passed
        assert keeper.read(folder) in (["old"], ["newer"], ["old", "newer"])
        keeper.write(folder, "newer")
        assert keeper.read(folder) == keeper.read(whole)
        assert [one.name for one in files_in(folder)] == [one.name for one in files_in(whole)]
    assert deadly > 3


def write_with_little_room(keeper, folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        keeper.write(folder, "newer")
    except (MemfitError, OSError) as error:
        return str(error)


@pytest.mark.proves("C-30")
def test_a_disk_that_refuses_is_told_and_leaves_the_old_and_nothing_beside_it(keeper, tmp_path):
    keeper.write(tmp_path, "old")
    before = files_in(tmp_path)
    told = forked.call(write_with_little_room, keeper, tmp_path)
    assert "File too large" in told and str(tmp_path) in told
    assert (keeper.read(tmp_path), files_in(tmp_path)) == (["old"], before)


def damages(content):
    middle = len(content) // 2
    for place in (0, middle, len(content) - 1):
        yield content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    yield from (content[:-1], content[:middle], b"", content + b"\0", None)


@pytest.mark.parametrize("name", [name for name, one in KEEPERS.items() if one.has_hashes])
def test_a_byte_that_is_changed_and_a_file_that_is_cut_or_missing_are_named(name, tmp_path):
    keeper = KEEPERS[name]
    keeper.write(tmp_path, "old")
    for path in (tmp_path / one for one in files_in(tmp_path)):
        content = path.read_bytes()
        for damaged in damages(content):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            try:
                found = keeper.read(tmp_path)
            except MemfitError as error:
                assert path.name in str(error)
            else:  # it counts by this file; or an archive holds the byte twice
                assert found == ([] if damaged is None else ["old"]) and len(damaged or content) >= len(content)
            path.write_bytes(content)
    assert keeper.read(tmp_path) == ["old"]


def test_what_others_wrote_is_left_alone(keeper, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.tmp").write_text("kept")
    for text in ("old", "newer"):
        keeper.write(tmp_path, text)
    assert keeper.read(tmp_path)[-1] == "newer"
    assert (tmp_path / "notes" / "mine.tmp").read_text() == "kept"
