"""Write checkpoint files that are whole or refused.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from memfit.errors import DamagedError, JobFailedError, UsageError
from memfit.files import replacing
from memfit.rundir import record
from memfit.training._oom import classify_oom
from memfit.units import format_bytes

#: The file of a checkpoint folder that holds what is not in shards or in a framework's own files.
PARTS = "parts.pt"
_LOCK = ".lock"
_NAME, _MOST_NAME_BYTES = re.compile(rb"[\w-]+"), 255


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

    Args:
        path: A file of ``save_checkpoint``; the folder of a checkpoint; or ``best`` or ``latest`` beside those of a
            ``Trainer``. That of a ``Trainer`` has ``model`` and ``optimizer`` (state dicts), ``epoch`` (whole epochs),
            ``history``, and more; one in shards has the whole ``model``, and no ``optimizer``.
        mmap: Map the tensors' bytes instead of reading them.

    Raises:
        DamagedError: If the file is cut short or differs from its checksums.
        UsageError: If it cannot be read, or holds objects that a safe load refuses.
    """
    try:
        if (path := checkpoint_path(path)).is_dir():
            state = load_checkpoint(path / PARTS, mmap=mmap)
            return state | {"model": _join_shards(path)} if (path / ".metadata").exists() else state
        with open(path, "rb") as file:
            _verify(file, path)
            if mmap:
                return _load(path, path, mmap=True)
            file.seek(0)  # the same open file: no rename in between can change what is loaded
            return _load(file, path)
    except OSError as error:
        if error.errno == errno.ENOMEM:  # of memory
            raise
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.",
            rule="a checkpoint is a file, or the folder that a Trainer wrote, such as latest in its checkpoint_dir.",
            remedy="check the path",
        ) from error


def checkpoint_path(path: Path | str) -> Path:
    """Return the folder that ``best`` or ``latest`` names, which are small text files; another path as it is.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "step-12").mkdir()
        >>> _ = (folder / "best").write_text("step-12\\n")
        >>> checkpoint_path(folder / "best").name
        'step-12'
    """
    path = Path(path)
    is_short = path.is_file() and path.stat().st_size <= _MOST_NAME_BYTES
    name = _NAME.fullmatch(path.read_bytes().strip()) if is_short else None
    return path.with_name(name[0].decode()) if name else path


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
