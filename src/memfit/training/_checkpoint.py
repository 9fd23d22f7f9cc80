"""Write checkpoints that are whole or refused, and keep the last good ones in a folder.

``torch.save`` writes a zip archive with a CRC-32 of each record, which is compared before anything is loaded.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from memfit.errors import DamagedError, DoesNotFitError, JobFailedError, UsageError
from memfit.files import replacing
from memfit.rundir import canary_folder, record
from memfit.training._oom import classify_oom
from memfit.units import format_bytes

LATEST, BEST = "latest_checkpoint.pt", "best_model.pt"
#: In a folder of shards, what all ranks have in common.
SHARED = "trainer.pt"
_LOCK = ".lock"

#: Where a fit is: whole epochs, then steps of the next one.
Position = tuple[int, int]

_FILE = re.compile(r"checkpoint_epoch_(\d+)(?:_step_(\d+))?\.pt")
_ASIDE_FILE = re.compile(r"\.((checkpoint|ema)_epoch_\d+(_step_\d+)?|latest_checkpoint|best_model)\.pt\.[\d-]+\.tmp")
_KEPT_STEPS = 2
#: The layout of what a Trainer saves, its entry ``memfit_checkpoint``; files of ``save_checkpoint`` have none.
FORMAT = 2
_PLAIN_VALUES_BYTES = 1 << 16  # of a checkpoint, beside its tensors


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was passed over, or a resume cannot be bit-exact."""


class _Output:
    """A file for ``torch.save`` that keeps the reason of a failed write."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.flush = file.flush
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except Exception as error:  # torch raises an error of its own instead, without the reason
            self.error = error
            raise


def save_checkpoint(path: Path | str, state: dict[str, Any], *, prove: bool = True) -> None:
    """Write a checkpoint with checksums, force it to disk and rename it into place; no tensor is copied.

    Args:
        path: The file; its folder must exist.
        state: Tensors and plain values.
        prove: Load it back before it gets its name, mapped and so without its bytes.

    Raises:
        OSError: For example on a full disk; what stood at ``path`` before is still there.
        UsageError: If it could not be loaded back.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "own.pt"
        >>> save_checkpoint(path, {"epoch": 3, "weight": torch.ones(2)})
        >>> load_checkpoint(path)["epoch"]
        3
    """
    path = Path(path)
    has_checksums = torch.serialization.get_crc32_options()
    with replacing(path) as aside:
        with open(aside, "wb") as file:
            output = _Output(file)
            torch.serialization.set_crc32_options(True)
            try:
                torch.save(state, cast(BinaryIO, output))  # it needs write and flush alone
            except RuntimeError as error:
                raise (output.error or error) from None
            finally:
                torch.serialization.set_crc32_options(has_checksums)
            file.flush()
            os.fsync(file.fileno())
        if prove:
            _load(aside, path, mmap=True)


def load_checkpoint(path: Path | str, *, mmap: bool = False) -> dict[str, Any]:
    """Return a checkpoint's content, on the CPU, after the checksum of each record was compared.

    It has ``model`` and ``optimizer`` (state dicts), ``rng``, ``epoch`` (whole epochs), ``history``, and more. With
    ``mmap`` the tensors' bytes are mapped instead of read. Of a folder with the shards of several ranks it has the
    whole ``model``, and no ``optimizer``.

    Raises:
        DamagedError: If the file is cut short or differs from its checksums.
        UsageError: If it cannot be read, or holds objects that a safe load refuses.
    """
    try:
        if ((path := Path(path)) / SHARED).exists():
            return load_checkpoint(path / SHARED, mmap=mmap) | {"model": _join_shards(path)}
        with open(path, "rb") as file:
            _verify(file, Path(path))
            if mmap:
                return _load(Path(path), Path(path), mmap=True)
            file.seek(0)  # the same open file: no rename in between can change what is loaded
            return _load(file, Path(path))
    except OSError as error:
        if error.errno == errno.ENOMEM:  # of memory
            raise
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.",
            rule="a checkpoint is a file that a Trainer wrote, such as latest_checkpoint.pt in its checkpoint_dir.",
            remedy="check the path",
        ) from error


def _join_shards(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights that several ranks have saved in shards, in this process alone."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in saved.items()
        if name.startswith("model.") and isinstance(one, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)  # as was asked for
        dcp.load(state, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
    return {name.removeprefix("model."): one for name, one in state.items()}


def _load(source: Path | BinaryIO, path: Path, *, mmap: bool = False) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"The state in {path} cannot be loaded: {str(error).splitlines()[0]}",
            rule="checkpoints are loaded with weights_only=True: tensors and plain values, never code.",
            remedy="make the model's extra state and the optimizer's state tensors, numbers, strings, lists or dicts",
        ) from error
    except RuntimeError as error:
        if classify_oom(error) is not None:
            raise
        raise _damaged(path, str(error).partition("\n")[0]) from None
    return state


def _verify(file: BinaryIO, path: Path) -> None:
    """Compare the CRC-32 of each record in the archive."""
    try:
        with zipfile.ZipFile(file) as archive:
            # torch stores its records as plain files; one that is said to be something else would not be read as it is
            odd = [one.filename for one in archive.infolist() if one.is_dir() or one.compress_type or one.external_attr]
            record = odd[0] if odd else archive.testzip()
    except Exception as error:  # a flipped bit of a header can make many, also seeks to places before the file
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise _damaged(path, f"it is cut short, or not written by torch.save ({error})") from None
    if record is not None:
        raise _damaged(path, f"its record {record} differs from its checksum")


def _damaged(path: Path, what: str) -> DamagedError:
    return DamagedError(
        f"{path} is damaged: {what}.",
        rule="memfit writes a checkpoint aside and renames it, so a broken one was changed from outside.",
        remedy="name another checkpoint; to start over, pass another checkpoint_dir",
    )


class CheckpointFolder:
    """Keeps the checkpoints of one fit; the process of the fit alone writes here.

    checkpoint_epoch_<n>.pt            the newest epochs, the best one, the milestones; 0 is the start
    checkpoint_epoch_<n>_step_<s>.pt   epoch n after s of its steps: the last two, removed with the epoch's own
    latest_checkpoint.pt               the newest: what a resume goes on from; a hard link where there are any
    best_model.pt                      the best by the metric of validation; likewise ema_epoch_<n>.pt
    a milestone with the averaged weights, of a Trainer with an ``Ema``

    Nothing is deleted before the newest file was read back and found whole."""

    def __init__(self, path: Path, keep_epochs: int, milestones: Collection[int] = ()) -> None:
        self.path = canary_folder(path)
        self.keep_epochs = keep_epochs
        self.milestones = frozenset(milestones)
        self._proven = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the only process that writes here, and remove half-written files of a killed one."""
        with hold(self.path):
            for entry in self.path.iterdir():
                if _ASIDE_FILE.fullmatch(entry.name):
                    entry.unlink(missing_ok=True)
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a disk that refuses what is written inside into a ``JobFailedError`` that says what is lost."""
        with writing(self.path, lambda: next((path.name for path in self._files().values()), None)):
            yield

    def _files(self) -> dict[Position, Path]:
        found = {}
        for path in self.path.iterdir():
            if match := _FILE.fullmatch(path.name):
                epoch, step = int(match[1]), int(match[2] or 0)
                found[epoch - (step > 0), step] = path
        return dict(sorted(found.items(), reverse=True))

    def _file(self, position: Position) -> Path:
        epoch, step = position
        return self.path / (f"checkpoint_epoch_{epoch + 1}_step_{step}.pt" if step else f"checkpoint_epoch_{epoch}.pt")

    def check_room(self, one_bytes: int, num_epochs: int) -> None:
        """Refuse a fit whose checkpoints, of ``one_bytes`` each, the disk cannot hold."""
        one = one_bytes + _PLAIN_VALUES_BYTES
        milestones = sum(1 for epoch in self.milestones if epoch <= num_epochs)
        number = min(self.keep_epochs, num_epochs) + milestones + _KEPT_STEPS + 2
        own = {(stat.st_dev, stat.st_ino): stat.st_size for stat in map(Path.stat, self.path.iterdir())}
        free = shutil.disk_usage(self.path).free + sum(own.values())
        if number * one > free:
            raise DoesNotFitError(
                f"{number} checkpoints of {format_bytes(one)} need {format_bytes(number * one)} of disk, and "
                f"{format_bytes(free)} is free on that of {self.path} or taken by its checkpoints.",
                rule=f"keep_epochs={self.keep_epochs} and {milestones} milestones, the best, {_KEPT_STEPS} within an "
                "epoch, and the one being written.",
                remedy="free some space, pass fewer milestones or keep_epochs=1, or another checkpoint_dir",
            )

    def save(self, position: Position, state: dict[str, Any]) -> Path:
        """Write a checkpoint, make it the latest, and return its file."""
        path = self._file(position)
        save_checkpoint(path, state, prove=not self._proven)
        self._proven = position != (0, 0)  # before the first step an optimizer has no state that could be refused
        self._name(path, LATEST)
        return path

    def mark_best(self) -> None:
        self._name(self.path / LATEST, BEST)

    def prune(self, position: Position, best_epoch: int | None) -> None:
        """Remove what need not stay beside the checkpoint of ``position``, once that was read back whole."""
        files = {at: path for at, path in self._files().items() if at <= position}
        epochs = [epoch for epoch, step in files if step == 0]
        kept = {(epoch, 0) for epoch in {*epochs[: self.keep_epochs], best_epoch, *self.milestones}}
        kept |= {at for at in list(files)[:_KEPT_STEPS] if at[1] and position[1]}
        doomed = [path for at, path in files.items() if at not in kept]
        if not doomed or position not in files:
            return
        try:
            with open(files[position], "rb") as file:
                _verify(file, files[position])
        except DamagedError as error:
            report_damage(error, "The older ones stay.")
            return
        for path in doomed:
            path.unlink()

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest whole checkpoint; it becomes the latest. If all are damaged, that is a ``DamagedError``:
        starting over silently would hide the loss."""
        damaged: list[DamagedError] = []
        taken = self._try(self.path / LATEST, damaged)
        for position, path in self._files().items():
            if taken is not None and position <= position_of(taken[1]):
                break
            taken = self._try(path, damaged) or taken
        if taken is None:
            if damaged:
                raise damaged[0]
            if any(self.path.glob("sharded-*/SEAL.json")):
                raise UsageError(
                    f"{self.path} holds checkpoints of a sharded model.",
                    rule="a fit goes on with what wrote its checkpoints.",
                    remedy="shard the model by fully_shard as it was, or pass another checkpoint_dir",
                )
            return None
        path = self._file(position_of(taken[1]))
        for error in damaged:
            report_damage(error, f"Taken instead: {path.name}.")
        for name in (LATEST, path.name):
            other = self.path / name
            if not (other.exists() and other.samefile(taken[0])):
                self._name(taken[0], name)
        return path, taken[1]

    def read(self, path: Path) -> dict[str, Any]:
        return load_checkpoint(path)

    def _try(self, path: Path, damaged: list[DamagedError]) -> tuple[Path, dict[str, Any]] | None:
        if not os.path.lexists(path):
            return None
        try:
            state = load_checkpoint(path)
        except DamagedError as error:
            damaged.append(error)
            return None
        found = state.get("memfit_checkpoint") if isinstance(state, dict) else None
        if found != FORMAT:
            raise UsageError(
                f"{path} is no checkpoint of a Trainer of this version: its format is {found}, not {FORMAT}.",
                rule="a fit goes on from what a Trainer wrote into checkpoint_dir, not from a file of save_checkpoint.",
                remedy="move the file away, or pass another checkpoint_dir",
            )
        return path, state

    def _name(self, source: Path, name: str) -> None:
        """Give a checkpoint one more name, in place of what had it."""
        with replacing(self.path / name) as aside:
            try:
                os.link(source, aside)
            except OSError:  # a file system without hard links
                shutil.copyfile(source, aside)
                with open(aside, "rb") as file:
                    os.fsync(file.fileno())
        aside.unlink(missing_ok=True)  # a rename between two names of one file leaves both


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Be the only process that writes into a folder of checkpoints, which is made if need be. A POSIX lock: the kernel
    frees it with its process, and loader workers hold no part of it."""
    path = folder / _LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(path, "a+")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(
            f"No checkpoint can be written to {folder}: {error.strerror}.",
            rule="checkpoint_dir is a folder, made if need be, in which files are made and removed.",
            remedy="pass another checkpoint_dir, or make this one writable",
        ) from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_taken = not os.path.samestat(path.stat(), os.fstat(lock.fileno()))  # removed in that moment
        except (BlockingIOError, PermissionError, FileNotFoundError):
            is_taken = True
        except OSError:  # a file system without locks
            is_taken = False
        if is_taken:
            lock.seek(0)
            raise UsageError(
                f"Process {lock.read().strip() or 'unknown'} trains into {folder} now.",
                rule="one fit at a time writes to a checkpoint_dir: two would remove each other's files.",
                remedy="wait for its end, or pass another checkpoint_dir",
            )
        with suppress(OSError):
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def writing(folder: Path, newest: Callable[[], str | None]) -> Iterator[None]:
    """Turn a disk that refuses what is written inside into a ``JobFailedError`` that says what is lost, what stays."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOMEM:  # of memory, which a second try may find
            raise
        name = newest()
        good = f"{name} stays" if name else "there is no checkpoint yet"
        raise JobFailedError(
            f"A checkpoint could not be written to {folder}: {error.strerror or error}; "
            f"{format_bytes(shutil.disk_usage(folder).free)} is free on its disk.",
            rule=f"a file is written whole or not at all: {good}; what was trained since then is lost.",
            remedy="free space on that disk, check its quota and whether it can be written to, and run the same "
            "command again",
        ) from error


def position_of(state: Mapping[str, Any]) -> Position:
    return state["epoch"], state.get("step", 0)


def tensor_bytes(state: Any) -> int:
    """Return the bytes of all tensors in dicts, lists and tuples; what several of them share counts once.
    >>> weights = torch.zeros(1000)
    >>> tensor_bytes({"weights": weights, "part": [weights[:500]], "sparse": torch.eye(2).to_sparse(), "epoch": 3})
    4040
    """
    blocks: dict[Any, int] = {}
    for one in torch.utils._pytree.tree_leaves(state):
        is_tensor = isinstance(one, torch.Tensor)
        for part in [one._values(), one._indices()] if is_tensor and one.is_sparse else [one] * is_tensor:
            try:
                storage = part.untyped_storage()
                blocks[part.device, storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # a tensor that is made of others
                blocks[id(part)] = part.numel() * part.element_size()
    return sum(blocks.values())


def report_damage(error: DamagedError, instead: str) -> None:
    record("checkpoint_damaged", what=error.what, instead=instead)
    warnings.warn(f"{error.what} {instead}", CheckpointWarning, stacklevel=3)
