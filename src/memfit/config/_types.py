"""The base class of settings, sizes in bytes as a setting's type, and fingerprints of values."""

from __future__ import annotations

import contextlib
import datetime
import enum
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from memfit.errors import ConfigError
from memfit.units import GIB, KIB, MIB, TIB, parse_memory

_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,400})|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?((\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)")


class Settings(BaseModel):
    """The base of every model of settings: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True)


def _parse_size(value: object) -> int:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        with contextlib.suppress(ConfigError, OverflowError):
            return parse_memory(value)
    raise ValueError("must be a size of 1MiB or more, such as 8GiB; a bare number is bytes")


def _size_text(count: int) -> str | int:
    """Return a size as a settings file takes it: with the largest unit that is exact, or as a number of bytes."""
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return count


#: A setting in bytes of memory: an ``int`` that may be given as ``8GiB``, and is written back in such a form. Less than
#: 1 MiB, and not 0, was meant otherwise, and is refused.
ByteSize = Annotated[int, BeforeValidator(_parse_size), PlainSerializer(_size_text, when_used="json")]


def to_plain(value: Any) -> Any:
    """Return a value as a settings file can hold it; ConfigError where none can.

    Models become what they dump as JSON, paths their POSIX text, dates their ISO text, enumerations their values,
    sets sorted lists, and zero-dimensional arrays their item.
    """
    return json.loads(json.dumps(value, default=_as_plain))


def _as_plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(to_plain, value), key=_canonical)
    if getattr(value, "shape", None) == ():
        return value.item()
    raise ConfigError(
        f"a value of type {type(value).__name__} is no setting.",
        rule="settings are what a YAML file can hold.",
        remedy="pass numbers, text, lists and dicts",
    )


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of the value's canonical JSON: 64 hex digits, the same in every process and on every machine.

    It is that of ``to_plain``, with sorted keys, and floats that read back exactly.
    """
    return hashlib.sha256(_canonical(to_plain(value)).encode()).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting that differs: its dotted name, its value before and now; None where it is not set."""
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", old, new


def read_plain(text: str) -> bool | int | float | str | None:
    """Return an unquoted scalar in YAML 1.2. ``on``, ``no``, dates and digits behind a leading zero are text."""
    word = text.lower() if text in (text.lower(), text.upper(), text.capitalize()) else text
    if word in _WORDS:
        return _WORDS[word]
    if _INT.fullmatch(text):
        return int(text, 0)
    is_float = len(text) < 400 and _FLOAT.fullmatch(text)
    return float(re.sub(r"\.(?=[iInN])", "", text)) if is_float else text
