"""Bytes, durations and numbered names as people write and read them: a byte count becomes text only here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memfit.errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_FACTOR = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": TIB, "tib": TIB, "tb": 1000**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([a-zA-Z]*)\s*")  # 19 digits: no machine has more bytes


def parse_bytes(text: str | int) -> int:
    """Return the bytes of a size such as ``8GiB``, ``512M`` (single letters: powers of 1024) or ``2GB`` (of 1000)."""
    match = _SIZE.fullmatch(str(text))
    factor = _FACTOR.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"'{text}' is not a size.",
            rule="a size is a number with an optional unit: B, KiB, MiB, GiB, TiB (1024) or kB, MB, GB, TB (1000).",
            remedy="write for example 8GiB, 512MiB or 2GB",
        )
    from fractions import Fraction  # which is loaded slowly, and seldom needed

    return int(Fraction(match.group(1)) * factor)


def parse_memory(text: str | int) -> int:
    """Return the bytes of a request, a limit or a forecast of memory; less than 1 MiB, and not 0, is refused."""
    size = parse_bytes(text)
    if 0 < size < MIB:
        raise ConfigError(
            f"'{text}' is {format_bytes(size)}: less than 1 MiB.",
            rule="no job runs in less than 1 MiB, and a number without a unit is bytes.",
            remedy=f"did you mean {suggest_size(text)}?",
        )
    return size


def suggest_size(given: object) -> str:
    """Return the size that was probably meant by a bare number, such as ``12GiB``."""
    return f"{given}GiB" if re.fullmatch("[1-9][0-9]{0,3}", str(given)) else "4GiB"


def format_bytes(count: int) -> str:
    """A byte count as people read it, in the largest unit of which there is at least one."""
    size, sign = abs(count), "-" if count < 0 else ""
    if size < KIB:
        return f"{sign}{size} B"
    for factor, unit, digits in ((KIB, "KiB", 1), (MIB, "MiB", 1), (GIB, "GiB", 2)):
        if round(size / factor, digits) < 1024:
            return f"{sign}{size / factor:.{digits}f} {unit}"
    return f"{sign}{size / TIB:.2f} TiB"


def format_duration(seconds: float, *, short: bool = False) -> str:
    """A duration as people read it; ``short`` leaves the seconds out from one hour on."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m" if short else f"{hours}h {minutes:02d}m {rest:02d}s"
    return f"{minutes}m {rest:02d}s"


def format_count(count: int, name: str) -> str:
    """Return a count and what it counts, whose plural ends with s or es.

    >>> format_count(1, "rank"), format_count(0, "batch"), format_count(3, "epoch of 60 s")
    ('1 rank', '0 batches', '3 epochs of 60 s')
    """
    first, gap, rest = name.partition(" of ")
    ending = "" if count == 1 else "es" if first.endswith(("tch", "s", "x")) else "s"
    return f"{count} {first}{ending}{gap}{rest}"


def list_some(names: Sequence[str], most: int = 5) -> str:
    """Return the first names with commas, and how many more there are.

    >>> list_some(["a", "b"]), list_some(["a", "b", "c", "d"], 2)
    ('a, b', 'a, b and 2 more')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def natural_order(text: object) -> list[tuple[int, str]]:
    """Return the key that sorts ``epoch_3`` before ``epoch_10``.

    >>> sorted(["epoch_10", "epoch_3"], key=natural_order)
    ['epoch_3', 'epoch_10']
    """
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", str(text))]


def write_size(count: int, units: tuple[str, str] = ("G", "M")) -> str:
    """Return a size in GiB or MiB as a tool takes it, rounded up; from 64 GiB on in whole GiB.

    >>> write_size(8 << 30), write_size(1 << 29, ("g", "m"))
    ('8G', '512m')
    """
    if count >= GIB and (count % GIB == 0 or count >= 64 * GIB):
        return f"{-(-count // GIB)}{units[0]}"
    return f"{-(-count // MIB)}{units[1]}"


def round_up_size(count: float) -> int:
    """Return a request that people would write: whole GiB from 4 GiB on, else whole 256 MiB."""
    step = GIB if count >= 4 * GIB else 256 * MIB
    return -(-int(count) // step) * step
