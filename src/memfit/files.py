"""Files that survive kills and are read with care: written aside and renamed, opened only if they are a user's own.

A reader of a run directory meets files that other users, jobs or a full disk left there. So it opens regular files of
its own user alone, follows no link, waits for no FIFO, and checks the shape of what it reads.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from memfit.errors import DamagedError, UsageError
from memfit.masking import mask_record

M = TypeVar("M", bound=Mapping[str, Any])
T = TypeVar("T")
#: What numbers in a file stay below: 64 bits, and what a float can hold the square of.
_BELOW: Mapping[Any, float] = {int: 2**63, float: 1e100}
_MOST_DIGITS = 300
_SECRETS, _MASKED = "secrets", "masked"  # the field of a file that holds the fields that are masked in it
REFUSED = frozenset({errno.EINVAL, errno.EPERM, errno.EACCES})  # what ``open_own`` says of a file that it refuses
#: What a network drive says whose server does not answer (nfs(5), ``softerr``), a broken disk, or of a replaced file.
AWAY = frozenset({errno.EIO, errno.ETIMEDOUT, errno.ESTALE})
_AWAY_SECONDS, _AWAY_PAUSE = 90.0, 1.0  # clients remember for 60


def write_atomic(path: Path | str, content: bytes | str, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace a file's content so that no reader ever sees a part of it; ``durable`` outlasts a power cut."""

    def write() -> None:
        opener = functools.partial(os.open, mode=mode)
        with replacing(Path(path), durable=durable) as aside, open(aside, "wb", opener=opener) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())

    outlast(write) if durable else write()


def outlast(call: Callable[[], T]) -> T:
    """Return what a call returns, made again for 90 s while a network drive does not answer."""
    until = time.monotonic() + _AWAY_SECONDS
    while True:
        try:
            return call()
        except OSError as error:
            if error.errno not in AWAY or time.monotonic() >= until:
                raise
            pass_over(f"{error.filename or 'a file'}: {error.strerror}: trying again for {_AWAY_SECONDS:.0f} s", "")
        time.sleep(_AWAY_PAUSE)


@functools.cache
def pass_over(what: str, word: str = "passed over: ") -> None:
    """Say on standard error, once, which file is not read, and why."""
    print(f"memfit: {word}{what}", file=sys.stderr, flush=True)


@contextmanager
def until_next_look() -> Iterator[None]:
    """Leave the block if the server of a network drive does not answer: its caller looks again soon."""
    try:
        yield
    except OSError as error:
        if error.errno not in AWAY:
            raise


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a path aside; the file or folder that is made there gets this name at the end of the block."""
    # A rename without an answer may be made later.
    aside = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}.tmp")
    try:
        yield aside
        if aside.is_dir() and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif aside.is_dir():
            path.unlink(missing_ok=True)
        os.replace(aside, path)
    except BaseException as error:
        with suppress(OSError):
            shutil.rmtree(aside) if aside.is_dir() else aside.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # not the one aside
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path | str) -> None:
    """Force a folder's entries to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refresh(folder: Path) -> bool:
    """Have the names in a folder looked up anew; return whether it is there. An NFS client remembers absent names."""
    for one in (folder.parent, folder):
        with suppress(OSError):  # opening a folder makes it ask: nfs(5), "Close-to-open cache consistency"
            os.close(os.open(one, os.O_RDONLY | os.O_DIRECTORY))
    return folder.is_dir()


def write_json(path: Path, value: Any, *, durable: bool = True, mode: int = 0o666) -> None:
    write_atomic(path, json.dumps(value, indent=2, sort_keys=False) + "\n", durable=durable, mode=mode)


def open_regular(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, readable by its owner alone if this call makes it.

    It follows no link and waits for no writer of a FIFO: other users may reach the folder.
    """
    refused = OSError(errno.EINVAL, "not a regular file", str(path))
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise (refused if error.errno in (errno.ELOOP, errno.ENXIO) else error) from None  # a link, a socket
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise refused


def open_own(path: Path | str) -> BinaryIO:
    """Open a file of a run directory to read it. Every reader of a run directory opens its files here."""
    file = open(open_regular(path), "rb")  # noqa: SIM115 - the caller closes it
    owner, folder = os.fstat(file.fileno()).st_uid, Path(path).parent
    if owner == os.geteuid() or (owner == folder.stat().st_uid and is_own(folder)):
        return file
    file.close()
    raise OSError(errno.EPERM, f"it belongs to uid {owner}, this is uid {os.geteuid()}", str(path))


def read_own(path: Path | str, most_bytes: int = -1) -> bytes:
    def read(first: bool = True) -> bytes:
        try:
            with open_own(path) as file:
                return file.read(most_bytes)
        except OSError as error:
            if error.errno != errno.ESTALE or not first:
                raise
        refresh(Path(path).parent)  # another host replaced it or took it away
        return read(False)

    return outlast(read)


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text; an integer that no float can hold is infinite, so that it can be compared.

    >>> parse_json("[7, " + "9" * 400 + "]")
    [7, inf]
    """
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < _MOST_DIGITS else float(digits))


def read_json(
    path: Path | str, shape: Mapping[str, Any] | None = None, *, most_bytes: int = 256 << 20
) -> dict[str, Any] | None:
    """Return a JSON file's object, whose fields have a ``shape`` (`fits`); None when the file is not there.

    Files here are renamed into place whole, so a broken one was changed from outside. A larger one than ``most_bytes``
    is damaged: a job may have written it.
    """
    try:
        text = read_own(path, most_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        raise damaged(path, f"cannot be read: {error.strerror}") from None
    if len(text) > most_bytes:
        raise damaged(path, f"has more than {most_bytes} bytes")
    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise damaged(path, f"is not a JSON object ({len(text)} bytes)")
    return check_shape(path, value, shape or {})


def check_shape(path: Path | str, value: M, shape: Mapping[str, Any]) -> M:
    """Return an object that was read from a file, once each field has its shape, as for ``fits``."""
    for name, kind in shape.items():
        if not fits(value.get(name), kind):
            told = f"{name}: {json.dumps(value[name])[:60]}" if name in value else f"no {name}"
            raise damaged(path, f"has {told}")
    return value


def write_masked(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    """Replace a JSON file, its secrets masked.

    If there are any, its owner alone may read the file, its field ``secrets`` holds the fields as they were, and
    ``masked`` their names, so that a file whose secrets were taken out is known.
    """
    shown = mask_record(value)
    hidden = {name: one for name, one in value.items() if one != shown[name]}
    if hidden:
        write_json(path, shown | {_MASKED: sorted(hidden), _SECRETS: hidden}, durable=durable, mode=0o600)
    else:
        write_json(path, shown, durable=durable)


def read_masked(path: Path, shape: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return a JSON file's object as it may be shown, as ``read_json`` does."""
    value = read_json(path, shape)
    return value and {name: value[name] for name in value if name not in (_SECRETS, _MASKED)}


def read_whole(path: Path) -> dict[str, Any] | None:
    """Return a JSON file's object with its secrets, as ``read_json`` does."""
    value = read_json(path, {_SECRETS: (dict, type(None)), _MASKED: ([str], type(None))})
    if value is None:
        return None
    secrets = value.pop(_SECRETS, None) or {}
    if gone := set(value.pop(_MASKED, None) or ()) - secrets.keys():
        raise DamagedError(
            f"{path} holds {', '.join(sorted(gone))} masked only: the field {_SECRETS} was taken out.",
            rule="a job starts with the values that its run was given, never with *** in their place.",
            remedy="start a new run with these values: memfit run --new",
        )
    return value | secrets


def damaged(path: Path | str, what: str) -> DamagedError:
    return DamagedError(
        f"{path} {what}.",
        rule="memfit writes this file aside and renames it, so a broken one was changed from outside.",
        remedy=f"restore it from a backup, or move it away: mv {path} {path}.broken",
    )


def fits(value: Any, shape: Any) -> bool:
    """Return whether a JSON value has a shape: a type, a tuple of shapes, a list's items or an object's fields.

    ``{str: shape}`` stands for an object whose fields have any names, a frozenset for one of its words. A number must
    be finite and of a sane size.

    >>> fits({"n": 1, "words": ["a"]}, {"n": int, "words": [str], "absent": (str, type(None))})
    True
    >>> fits({"n": 1, "words": ["a", 2]}, {"words": [str]}), fits({"a": 1, "b": "x"}, {str: int})
    (False, False)
    """
    if isinstance(shape, type):
        return isinstance(value, shape) and (not isinstance(value, int | float) or abs(value) < _BELOW.get(shape, 2))
    if isinstance(shape, frozenset):
        return isinstance(value, str) and value in shape
    if isinstance(shape, tuple):
        return any(fits(value, one) for one in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
    if not isinstance(value, dict):
        return False
    if str in shape:
        return all(fits(one, shape[str]) for one in value.values())
    return all(fits(value.get(name), kind) for name, kind in shape.items())


def is_own(path: Path) -> bool:
    """True if a folder is this user's, or not there."""
    try:
        owner = path.stat().st_uid
        if owner == os.geteuid():
            return True
        # Network drives may give every file to one user; then what this user makes there has that owner too.
        with tempfile.TemporaryFile(dir=path) as made:
            return os.fstat(made.fileno()).st_uid == owner
    except OSError:
        return not os.access(path, os.F_OK)


def check_owner(path: Path) -> None:
    if not is_own(path):
        uid = path.stat().st_uid
        raise UsageError(
            f"{path} belongs to uid {uid}; this is uid {os.geteuid()}.",
            rule="a user stops, watches and resumes own runs alone, root too: the files of others may be forged.",
            remedy=f"give the same command as that user: sudo -u '#{uid}' memfit ... {path}",
        )
