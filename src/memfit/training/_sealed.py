"""Keep checkpoints that are folders of a framework's files, each whole by its seal or not taken.

The files are written in place, under a mark that says whose they are. Then each is forced to disk and
summed up, both at the same time, and the mark is renamed to the seal: no seal, no checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memfit.errors import DamagedError, MemfitError, UsageError
from memfit.files import read_json, refresh, sync_folder, write_atomic
from memfit.rundir import canary_folder, record
from memfit.training._beat import beat
from memfit.training._checkpoint import hold, report_damage, writing
from memfit.training._process import check_save_seconds
from memfit.training._ranks import Ranks
from memfit.training._replay import is_known_beyond, journal_name
from memfit.units import format_count

SEAL = "SEAL.json"
_MARK, _OLD = ".unsealed", ".replaced-"
_HALF_FILE = re.compile(r"\.(latest|best|ema_epoch_\d+\.pt)\.[\d-]+\.tmp")
#: The layout of a seal.
FORMAT = 4
_SHAPE = {"memfit_seal": int, "step": int, "facts": dict, "files": dict}
_THREADS, _READ_BYTES = 8, 1 << 20
#: A resume goes back by so many seconds at most to be proved.
_MOST_REPEATED_SECONDS = 600.0


@dataclass(frozen=True)
class Sealed:
    """A whole checkpoint: its folder, the optimizer steps that it holds, and the facts sealed with it."""

    path: Path
    step: int
    facts: Mapping[str, Any]


class SealedFolder:
    """The checkpoints ``<prefix><step>/`` in a folder. What has neither mark nor seal is not touched. With ``ranks``,
    several call each method together: rank 0 alone locks, marks, seals and chooses, and tells them."""

    def __init__(self, path: Path | str, prefix: str = "step-") -> None:
        self.path = canary_folder(path)
        self.prefix = prefix
        self.ranks: Ranks | None = None
        self.has_journal = False
        self._began, self._newest_step = time.monotonic(), 0
        self._name = re.compile(re.escape(prefix) + r"(\d+)")

    @contextmanager
    def held(self) -> Iterator[None]:
        with ExitStack() as stack:
            self.lead(lambda: stack.enter_context(hold(self.path)))
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a disk that refuses what is written inside into a ``JobFailedError`` that says what is lost; what was
        begun is removed."""
        try:
            with writing(self.path, self._newest_name):
                yield
        except MemfitError:
            if self.ranks is None or self.ranks.rank == 0:
                with suppress(OSError):
                    self._clear()
            raise

    def folder_of(self, step: int) -> Path:
        return self.path / f"{self.prefix}{step}"

    def holds(self, step: int, more: int = 0) -> str:
        """Return what a stop between two steps says of its checkpoint, behind which ``more`` steps were made."""
        kept = f"{self.folder_of(step)} holds all steps so far" if step else "nothing was trained yet"
        if more:
            return f"{kept}; {format_count(more, 'step')} more will be made again, to prove the resume."
        return f"{kept}: nothing will be repeated."

    def begin(self, step: int) -> Path:
        """Make and mark the folder of a checkpoint, and return it; a sealed one of that step stays until this is."""
        beat("save")
        self._began = time.monotonic()
        self.lead(partial(self._begin, step))
        return self.folder_of(step)

    def _begin(self, step: int) -> None:
        path = self.folder_of(step)
        with self.writing():
            if (path / SEAL).exists():
                shutil.rmtree(self._replaced(step), ignore_errors=True)
                path.rename(self._replaced(step))
            path.mkdir(parents=True, exist_ok=True)
            (path / _MARK).touch()
            if self.has_journal:  # a kill right after the seal must not look like a training without one
                (path / journal_name()).touch()

    def seal(self, step: int, facts: Mapping[str, Any]) -> Path:
        """Force the files of a step's folder to disk, sum them up, and seal them with these facts (plain values)."""
        if self.ranks is not None:
            self.ranks.settle()  # all have written
            beat("save")
        self.lead(partial(self._seal, step, facts))
        self._newest_step = step
        beat("sealed", step, training=str(self.path))
        return self.folder_of(step)

    def _seal(self, step: int, facts: Mapping[str, Any]) -> None:
        path = self.folder_of(step)
        with self.writing():
            files = _sum_all(path)
            text = json.dumps({"memfit_seal": FORMAT, "step": step, "facts": dict(facts), "files": files}, indent=1)
            with open(path / _MARK, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            for one in {path, *((path / name).parent for name in files)}:
                sync_folder(one)
            os.replace(path / _MARK, path / SEAL)
            sync_folder(path)
            sync_folder(self.path)
            shutil.rmtree(self._replaced(step), ignore_errors=True)
        took, epoch_step = time.monotonic() - self._began, facts.get("position", {}).get("epoch_step")
        facts = {"epoch": facts.get("epoch"), "epoch_step": epoch_step, "step": step, "bytes": _total(files)}
        record("checkpoint", path=str(path), seconds=round(took, 3), **facts)
        check_save_seconds(took)

    def mark(self, name: str, step: int) -> None:
        """Let a small text file of this name say which checkpoint is meant by it."""
        path, text = self.path / name, self.folder_of(step).name
        with self.writing():
            if not path.is_file() or path.read_bytes() != text.encode():
                write_atomic(path, text)

    def prune(self, keep: int, spared: Collection[Path] = ()) -> None:
        """Remove sealed checkpoints beside the ``keep`` newest and the ``spared``; a newer one than was taken or sealed
        last is damaged, and counts for nothing."""
        if self.ranks is not None and self.ranks.rank:
            return
        found = [path for step, path in self._paths().items() if step <= self._newest_step and (path / SEAL).exists()]
        with self.writing():
            for path in found[keep:]:
                if path not in spared:
                    os.replace(path / SEAL, path / _MARK)  # what a kill leaves of it is removed at the next start
                    shutil.rmtree(path)

    def newest(self) -> Sealed | None:
        """Return the newest whole checkpoint; DamagedError if all are damaged: starting over silently would hide the
        loss. One that a kill left without its seal is removed."""
        found: Sealed | None = self.lead(self._newest)
        self._newest_step = 0 if found is None else found.step
        return found

    def _newest(self) -> Sealed | None:
        self._clear()
        damaged = []
        for step, path in self._paths().items():
            if not (path / SEAL).exists():
                continue
            try:
                found = _read(path, step)
            except DamagedError as error:
                damaged.append(error)
                continue
            for one in damaged:
                report_damage(one, f"Taken instead: {path.name}.")
            return found if damaged else self._proving(found) or found
        if damaged:
            raise damaged[0]
        return None

    def _proving(self, newest: Sealed) -> Sealed | None:
        """Return the checkpoint before the newest one if a kill left too few steps after this to prove a resume, and
        that one is not much older."""
        sealed = (path for step, path in self._paths().items() if step < newest.step and (path / SEAL).exists())
        older = next(sealed, None)
        if older is None or is_known_beyond(newest.path) or not (older / journal_name()).exists():
            return None
        if (newest.path / SEAL).stat().st_mtime - (older / SEAL).stat().st_mtime > _MOST_REPEATED_SECONDS:
            return None
        with suppress(DamagedError):
            return _read(older, int(older.name.removeprefix(self.prefix)))
        return None

    def since(self, path: Path) -> list[Path]:
        """Return the checkpoints of this folder after one of it, oldest first."""
        paths = list(self._paths().values())
        return paths[: paths.index(path)][::-1] if path in paths else []

    def read(self, step: int) -> Sealed:
        """Return the checkpoint of a step, once its checksums were compared."""
        found: Sealed = self.lead(lambda: _read(self.folder_of(step), step))
        return found

    def foreign(self) -> list[Path]:
        """Return the folders named like checkpoints that were never sealed, newest first: the framework's own."""
        return [path for path in self._paths().values() if not (path / SEAL).exists() and not (path / _MARK).exists()]

    def lead(self, function: Callable[[], Any]) -> Any:
        """Call a function, of several ranks on rank 0 alone, and return on all what it returned."""
        return function() if self.ranks is None else self.ranks.lead(function)

    def _clear(self) -> None:
        """Remove what was never sealed or is half a file; put back what was to be replaced by it."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if _HALF_FILE.fullmatch(path.name):
                path.unlink()
        for path in self._paths().values():
            is_torn = (path / _MARK).exists() and not (path / SEAL).exists()
            if is_torn or (path.is_dir() and not any(path.iterdir())):  # made, and not yet marked
                shutil.rmtree(path)
        for path in self.path.glob(f"{_OLD}{self.prefix}*") if self.path.is_dir() else ():
            target = self.path / path.name.removeprefix(_OLD)
            if (target / SEAL).exists():
                shutil.rmtree(path)
            else:  # not there, or made and not yet marked
                shutil.rmtree(target, ignore_errors=True)
                path.rename(target)

    def _replaced(self, step: int) -> Path:
        return self.path / f"{_OLD}{self.prefix}{step}"

    def _paths(self) -> dict[int, Path]:
        """Return the folders by step, newest first; another host may have sealed one."""
        entries = list(self.path.iterdir()) if self.path.is_dir() else []
        found = {int(match[1]): one for one in entries if (match := self._name.fullmatch(one.name)) and refresh(one)}
        return dict(sorted(found.items(), reverse=True))

    def _newest_name(self) -> str | None:
        return next((path.name for path in self._paths().values() if (path / SEAL).exists()), None)


def _read(path: Path, step: int) -> Sealed:
    seal = read_json(path / SEAL, _SHAPE)
    if seal is None or seal["memfit_seal"] != FORMAT:
        raise UsageError(
            f"{path / SEAL} is a seal of another version.",
            rule=f"this version of memfit reads seals of format {FORMAT}.",
            remedy="go on with the memfit that wrote it, or start over in another folder",
        )
    for name in seal["files"]:
        if not (path / name).is_file():
            raise _damaged(path, f"{name} is missing")
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda name: _sum(path / name, seal["files"][name]), seal["files"])
        for name, sums in zip(seal["files"], found, strict=True):
            if sums != seal["files"][name]:
                raise _damaged(path, f"{name} differs from its checksum")
    return Sealed(path, step, seal["facts"])


def _damaged(path: Path, what: str) -> DamagedError:
    return DamagedError(
        f"{path} is damaged: {what}.",
        rule="a checkpoint is sealed with the checksum of each of its files, so it was changed from outside.",
        remedy="put the file back; or remove the folder, so that an older one is taken or the training starts over",
    )


def _sum_all(path: Path) -> dict[str, list[int]]:
    """Return the sums of the files below a folder by name, and force these to disk meanwhile."""
    names = sorted(one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file())
    names = [name for name in names if name not in (_MARK, SEAL, journal_name())]
    with ThreadPoolExecutor(_THREADS) as pool:
        forced = [pool.submit(_force, path / name) for name in names]
        found = {name: pool.submit(_sum, path / name) for name in names}
        for one in forced:
            one.result()
        return {name: one.result() for name, one in found.items()}


def _force(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sum(path: Path, told: list[int] | None = None) -> list[int]:
    """Return a file's size, a place in it, and the CRC-32 of all from there on: of a file of ``torch.save`` that is its
    directory, which has the CRC-32 of each record. Beside those that are told, the records are compared as well."""
    crc, buffer = 0, memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        start = told[1] if told else _directory_of(file)
        file.seek(start)
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
        found = [file.tell(), start, crc]
        if start and found == told:
            with suppress(zipfile.BadZipFile, ValueError, EOFError, RuntimeError), zipfile.ZipFile(file) as archive:
                return found if archive.testzip() is None else []
            return []
    return found


def _directory_of(file: Any) -> int:
    """Return where the directory of a zip archive begins that is the whole file; 0 of any other file."""
    if torch.serialization.get_crc32_options() and zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if min((one.header_offset for one in archive.infolist()), default=1) == 0:
                return archive.start_dir
    return 0


def _total(files: Mapping[str, list[int]]) -> int:
    return sum(size for size, *_ in files.values())
