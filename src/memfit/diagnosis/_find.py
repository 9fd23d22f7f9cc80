"""Find the signatures of the table in a log, and read the figures in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from memfit.diagnosis._signatures import SIGNATURES, Kind, Row
from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Stream
from memfit.refusals import compile_pattern

_SIGNALS = {"1": "hangup", "6": "aborted", "7": "bus_error", "9": "killed", "11": "segfault", "15": "terminated"}
_SIGNALS |= {"hup": "hangup"} | {heading[:3]: heading for heading in _SIGNALS.values()}
_WORDS = {word for row in SIGNATURES for word in row.words}
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50, "e": 1 << 60}
#: What ends a message's figures: the next message, or its advice.
_END = compile_pattern(
    r"out of memory\. Tried | See documentation | Traceback \(most | If reserved (?:memory is >>|but unallocated)"
)
_AFTER, _NEAR = 1500, 20_000
#: How many of the first and of the last matches of a row are kept.
_MOST = 40
_GPU = re.compile(r"gpu|cuda|nvidia|tensorrt|bitsandbytes|thrust::|parallel_for", re.IGNORECASE)
_TPU = re.compile(r"TPU|hbm", re.IGNORECASE)
_BACKEND = re.compile(r"(?i:cuda|rocm|metal|mtl|vulkan|sycl|hip)")


def to_bytes(number: str, unit: str) -> int:
    """Return a size in bytes; decimal units count in 1024s, as torch and most tools mean them."""
    if re.fullmatch(r"\d+,\d\d", number):  # some locales write a decimal comma
        number = number.replace(",", ".")
    number = number.replace(",", "").rstrip(".")
    return int(float(number or 0) * _UNITS[unit[0].lower()]) if number.count(".") < 2 else 0


def _figures(row: Row, matches: Sequence[re.Match[str]]) -> dict[str, Any] | None:
    """The figures of the named groups; None for a number that is none, or that no machine can hold."""
    values: dict[str, Any] = {"who": row.who} if row.who else {}
    for found in (match.groupdict() for match in matches):
        for name, text in found.items():
            base, _, unit = name.rpartition("_")
            if text is None or unit == "u":
                continue
            try:
                if f"{name}_u" in found:
                    values[f"{name}_bytes"] = to_bytes(text, found[f"{name}_u"] or "b")
                elif unit in ("b", "kb", "mb", "gb") and base:
                    values[f"{base}_bytes"] = int(float(text.replace(",", "") or 0) * _UNITS[unit[0]])
                elif name in ("device", "pid", "count", "xid"):
                    values[name] = int(text)
                else:
                    values[name.rstrip("0123456789")] = text or True
            except (ValueError, OverflowError):
                return None
    return values


def find_signs(stream: Stream, index: int = 0) -> list[Sign]:
    found: list[Sign] = []
    said = {word for word in _WORDS if word in stream.flat}
    for row in SIGNATURES:
        if row.words and said.isdisjoint(row.words):
            continue
        signs = list(_in_lines(row, stream, index) if row.by_line else _in_text(row, stream, index))
        found += signs if len(signs) <= 2 * _MOST else [*signs[:_MOST], *signs[-_MOST:]]
    return found


def _in_lines(row: Row, stream: Stream, index: int) -> Iterator[Sign]:
    for place in stream.lines_with(row.words) if row.words else range(len(stream.lines)):
        line = stream.lines[place]
        if (match := row.regex.search(line.text)) and (values := _figures(row, [match])) is not None:
            name = _heading(row, values)
            of = _kind_of_words(values, stream, place) if row.name == "memory_words" else ""
            yield Sign(name, (line,), values, index, place, of, line.text[: match.start()], row.emitter)


def _in_text(row: Row, stream: Stream, index: int) -> Iterator[Sign]:
    text, end = stream.squeezed, -1
    for match in row.regex.finditer(text):
        if match.start() < end:
            continue
        after = text[match.end() : match.end() + _AFTER]
        stop = _END.search(after)
        own = after[: stop.start() if stop else None]
        near = text[max(0, match.start() - _NEAR) : match.end() + _NEAR]
        end = match.end() + max((one.end() for regex in row.more if (one := regex.search(own))), default=0)
        more = [one for regex in row.more if (one := regex.search(near if row.emitter == "tf" else match[0] + own))]
        values = _figures(row, [match, *more])
        if values is None:
            continue
        of, place = _kind(row.emitter, values, match, after, near), stream.line_at(match.start())
        emitter = row.emitter or (f"torch.{values['api'].lower()}" if row.name == "device_oom" else "")
        before = re.match(rf"(?:\s*\S){{{match.start() - stream.starts[place]}}}\s*", stream.lines[place].text)
        lines, said = stream.between(match.start(), end)[:8], before[0] if before else ""
        yield Sign(_heading(row, values), lines, values, index, place, of, said, emitter)


def _heading(row: Row, values: dict[str, Any]) -> str:
    """The heading of a row's sign: that of the signal that the text names, by name or number, else the row's."""
    signal = values.pop("signal", "")  # a shell adds 128 to the number, and Python makes it negative
    number = str(abs(int(signal)) % 128) if signal.lstrip("-").isdecimal() else signal[:3].lower()
    return _SIGNALS[number] if signal else row.name


def _kind_of_words(values: dict[str, Any], stream: Stream, place: int) -> Kind:
    """Which memory general words are about: that of a unit which has a limit, or a device's that is named near them."""
    near = " ".join(line.text for line in stream.lines[max(0, place - 12) : place + 3])
    return "host_cgroup" if values.pop("unit", None) else "gpu" if _GPU.search(near) else "host_alloc"


def _kind(emitter: str, values: dict[str, Any], match: re.Match[str], after: str, near: str) -> Kind | Literal[""]:
    """Which memory a message is about, where only the text around it says."""
    if emitter.startswith("vllm"):
        values["phase"] = "build"
    elif emitter == "jax":
        return "gpu" if _GPU.search(near) and not _TPU.search(match.group(0) + after[:300]) else "other_accelerator"
    elif emitter == "ort":
        return "gpu" if _GPU.search(near) else "host_alloc"
    elif emitter == "tf":
        text = match.group(0) + after[:600]
        if re.search(r"device:(?:XPU|TPU|NPU|MLU)", text):
            return "other_accelerator"
        is_cpu = "device:CPU" in text or "CPU:0byallocator" in text or "allocatorcpu" in text
        return "host_alloc" if is_cpu and "GPU" not in text and "gpu:" not in text else "gpu"
    elif emitter == "ggml":
        said = values.pop("backend", "") or match.string[max(0, match.start() - 60) : match.start()]
        found = _BACKEND.search(said.rpartition("ggml")[2])
        return "host_alloc" if found is None else "gpu" if found[0].upper() == "CUDA" else "other_accelerator"
    return "other_accelerator" if values.get("api", "CUDA") != "CUDA" else ""
