"""Prove a resume: what each step did is kept beside its checkpoint, and compared when the step is made again.

A line holds an optimizer step's batches and random state as checksums, its losses to the bit, the rates and settings of
its optimizers. It goes to the page cache, which a kill leaves as it is. What a GPU computes is read once it is there.
"""

from __future__ import annotations

import collections
import functools
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfit.units import list_some

#: From so many bytes on a sum of integers is faster than a CRC-32.
_LARGE_BYTES = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DEPTH, _MOST_ITEMS, _NUM_SAMPLED, _MOST_LEAVES = 6, 10_000, 4096, 100_000
#: The parts of a line that must be the same; ``draws`` only explains what is not.
_COMPARED = ("batch", "loss", "rate", "settings")
#: The steps after a checkpoint that prove a resume from it.
PROVING_STEPS = 2
#: Of a loss, what the order of its sums may change.
_MOST_DRIFT, _FIRST_DRIFT = 1e-3, 1e-5  # the first one goes forward from the same weights


# --- checksums


def digest_of(value: Any) -> int:
    """Return a checksum of plain values, tensors, arrays, generators and containers of these, the same in each process.
    >>> digest_of({"x": torch.ones(2), "n": [1, "a"]}) == digest_of({"n": [1, "a"], "x": torch.ones(2)})
    True
    """
    return _crc([int(one) for one in leaves_of(value)])


def leaves_of(value: Any, depth: int = _DEPTH, *, sampled: bool = False) -> Iterator[int | torch.Tensor]:
    """Yield the checksums of what a value holds; those of a GPU's tensors are tensors there. Other objects than
    ``digest_of`` names have none. ``sampled``: of a large tensor or array only some elements count."""
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value.detach(), sampled=sampled)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        yield _crc(value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        kind = _crc((value.dtype.str, value.shape))
        value = value.reshape(-1)[:: max(1, value.size // _NUM_SAMPLED)] if sampled else value
        yield zlib.crc32(np.ascontiguousarray(value).tobytes(), kind)
    elif isinstance(value, np.random.Generator):
        yield _crc(str(value.bit_generator.state))
    elif isinstance(value, np.random.RandomState):
        yield _crc(str(value.get_state()))
    elif isinstance(value, random.Random):
        yield _crc(value.getstate())
    elif isinstance(value, torch.Generator):
        yield from _of_tensor(value.get_state())
    elif depth:
        yield from _inside(value, depth - 1, sampled=sampled)


def _inside(value: Any, depth: int, *, sampled: bool) -> Iterator[int | torch.Tensor]:
    if isinstance(value, Mapping) and len(value) <= _MOST_ITEMS:
        for key in sorted(value, key=repr):
            yield _crc(key)
            yield from leaves_of(value[key], depth, sampled=sampled)
    elif isinstance(value, (Mapping, list, tuple, collections.deque, set, frozenset, np.ndarray)):
        yield len(value)
        if len(value) <= _MOST_ITEMS:
            for one in sorted(value, key=repr) if isinstance(value, set | frozenset) else value:
                yield from leaves_of(one, depth, sampled=sampled)
    elif not sampled and not isinstance(value, type) and hasattr(value, "__dict__"):  # a batch's own class
        yield from leaves_of(vars(value), depth)


def _crc(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


def _of_tensor(value: torch.Tensor, *, sampled: bool = False) -> Iterator[int | torch.Tensor]:
    if hasattr(value, "to_local"):  # this rank's part of one that several share
        value = value.to_local()
    yield _crc((str(value.dtype), tuple(value.shape)))
    if value.layout is not torch.strided:
        value = value.to_dense()
    if value.is_meta or not value.numel():
        return
    if value.is_complex():
        value = torch.view_as_real(value)
    if sampled:
        value = value.reshape(-1)[:: max(1, value.numel() // _NUM_SAMPLED)]
    if value.device.type == "cpu" and value.nbytes < _LARGE_BYTES:
        yield zlib.crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return
    rows = value.reshape(len(value) if value.ndim else 1, -1).contiguous()
    is_even = rows.shape[1] * rows.element_size() % 8 == rows.storage_offset() * rows.element_size() % 8 == 0
    rows = rows.view(torch.int64 if is_even else _INTEGERS[rows.element_size()])
    weights = torch.arange(1, len(rows) + 1, device=rows.device)
    total = (rows.sum(1, dtype=torch.int64) * weights).sum()  # wraps: the same in any order
    yield total if value.device.type == "cuda" else int(total)


def _draws() -> int:
    """Return a checksum of torch's random state on the CPU: others cost more."""
    return zlib.crc32(torch.get_rng_state().numpy().data)


# --- the journal


@dataclass
class _Step:
    """What is known of the step under way. Losses and checksums may be a device's tensors."""

    batch: list[list[Any]] = field(default_factory=list)
    loss: list[Any] = field(default_factory=list)
    rate: list[Any] = field(default_factory=list)
    settings: list[int] = field(default_factory=list)
    parts: int = 0


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """Let a journal that cannot be kept prove nothing, and end no training."""

    @functools.wraps(method)
    def call(self: Replay, *args: Any, **options: Any) -> None:
        try:
            method(self, *args, **options)
        except Exception:
            self._file, self._now = None, _Step()
            self._late.clear()

    return call


class Replay:
    """The journal of one rank of one training. ``difference`` says of the first step that did not come out as before
    what differed, and the training ends unless it ``goes_on``; ``compared`` are the steps that did; ``strange`` are the
    names of what stood otherwise at the checkpoint."""

    def __init__(self, rank: int = 0, *, goes_on: bool = False) -> None:
        self.rank, self.goes_on = rank, goes_on
        self.difference = ""
        self.compared: list[int] = []
        self.strange: list[str] = []
        #: Whether losses may differ a little: kernels add in no fixed order, or are another machine's.
        self.drifts, self.drift = False, ""
        self.splits = False  # whether a step that runs out of memory is repeated in parts
        self.left: dict[int, dict[str, Any]] = {}
        self._old_notes: dict[int, dict[str, int]] = {}
        self._file: Any = None
        self._now = _Step()
        self._late: collections.deque[tuple[int, _Step, int, Any, Any]] = collections.deque()
        self.is_note_due = False

    def open(self, paths: Sequence[Path], step: int) -> None:
        """Go on from the first of these checkpoints, which is of this step; their journals hold what came after it."""
        self.close()
        self.left, self._old_notes, self._now = {}, {}, _Step()
        for line in (line for path in paths for line in _lines(path / self._name)):
            if "note" in line and line["at"] >= step:
                self._old_notes[line["at"]] = line["note"]
            elif "loss" in line and line["at"] > step:
                self.left[line["at"]] = line
        self.seal(paths[0])

    @property
    def words(self) -> str:
        """What stood otherwise at the checkpoint, as the end of a sentence."""
        return f"; what differs since the checkpoint: {list_some(self.strange)}" if self.strange else ""

    def verdict(self, path: Path) -> str:
        """Say how the steps after this checkpoint came out, of which none differs."""
        steps = self.compared
        if not steps:
            return f"not proved: no step after {path.name} was kept to compare with{self.words}"
        which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        return f"{which} came out as before{self.drift}{self.words}"

    def forget(self) -> None:
        """Compare nothing, and keep nothing beside a checkpoint that was made with other settings."""
        self.left, self._old_notes = {}, {}
        self.close()

    @_harmless
    def seal(self, path: Path) -> None:
        """Write what follows beside this checkpoint."""
        self.close()
        self._file = open(path / self._name, "a", buffering=1)  # noqa: SIM115 - it stays open from step to step
        self.is_note_due = True

    @property
    def _name(self) -> str:
        return journal_name(self.rank)

    @_harmless
    def close(self) -> None:
        self.read_late(wait=True)
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def mark(self, step: int) -> None:
        """Say that this training has left after a step, and was not killed."""
        self._write({"left": step})

    def note(self, step: int, found: Mapping[str, int]) -> None:
        """Keep what the user's own state is at a checkpoint, or compare it with what it was."""
        self.is_note_due = False
        was = self._old_notes.pop(step, None)
        if was is not None:
            self.strange = [name for name in was if name in found and was[name] != found[name]]
            gone = [name for name in was if name not in found]  # what a loop binds is not there yet
            self.strange += [name for name in gone if "(local)" not in name and "(global)" not in name]
        if was != found:
            self._write({"at": step, "note": found})

    # --- what a step does

    @_harmless
    def took(self, batch: Any) -> None:
        if self._file is not None:
            self._now.batch.append(list(islice(leaves_of(batch), _MOST_LEAVES)))

    def drop(self) -> None:
        """Forget the batches of a step that was not made."""
        self._now = _Step()

    @_harmless
    def heard(self, loss: torch.Tensor | float, parts: int = 1) -> None:
        """Note what a step goes backward from, in how many parts; outside of a step nothing."""
        if not self._now.batch:
            return
        if isinstance(loss, torch.Tensor):
            found = loss.detach().sum()  # of its own: a loop may add to its loss in place
            loss = found.double() if found.device.type == "cuda" else found.item()
        self._now.loss.append(loss)
        self._now.parts += parts

    @_harmless
    def moved(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note an optimizer's step."""
        if not self._now.batch:
            return
        for group in optimizer.param_groups:
            rate: Any = group.get("lr")
            if isinstance(rate, torch.Tensor):
                rate = rate.detach().clone() if _is_late(rate) else rate.item()
            self._now.rate.append(rate if rate is None or _is_late(rate) else float(rate))
            plain = [(name, value) for name, value in group.items() if isinstance(value, (int, float, tuple))]
            self._now.settings.append(_crc([pair for pair in plain if pair[0] != "lr"]))

    @_harmless
    def end_step(self, step: int) -> None:
        """Write or compare the line of a step; of one whose numbers are on a GPU later."""
        if not self._now.batch:
            return
        now, self._now = self._now, _Step()
        late = [one for one in (*chain(*now.batch), *now.loss, *now.rate) if _is_late(one)]
        values, event = None, None
        if late:
            bits = [one.reshape(()).double().view(torch.int64) if one.is_floating_point() else one for one in late]
            values = torch.empty(len(bits), dtype=torch.int64, pin_memory=True)
            with torch.cuda.device(late[0].device):  # the first of several
                values.copy_(torch.stack([one.to(late[0].device) for one in bits]), non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
        self._late.append((step, now, _draws(), values, event))
        self.read_late()

    @_harmless
    def read_late(self, *, wait: bool = False) -> None:
        """Write or compare the lines of the steps whose numbers have come."""
        while self._late and (self._late[0][-1] is None or wait or self._late[0][-1].query()):
            step, now, draws, values, event = self._late.popleft()
            if event is not None:
                event.synchronize()
            numbers = iter(values.tolist() if values is not None else ())

            def read(one: Any, numbers: Iterator[int] = numbers) -> Any:
                if not _is_late(one):
                    return one
                number = next(numbers)
                return struct.unpack("d", struct.pack("q", number))[0] if one.is_floating_point() else int(number)

            batch = [_crc([read(one) for one in leaves]) for leaves in now.batch]
            loss, rate = [read(one) for one in now.loss], [read(one) for one in now.rate]
            line = {"batch": batch, "loss": [float(one).hex() for one in loss], "rate": rate, "parts": now.parts}
            self._line({"at": step, **line, "settings": now.settings, "draws": draws})

    def _line(self, line: dict[str, Any]) -> None:
        was = self.left.pop(line["at"], None)
        if was is not None and not self.difference:
            differing = [name for name in _COMPARED if was.get(name) != line[name]]
            if not (was["rate"] and line["rate"]):  # an update that was left half-way has none
                differing = [name for name in differing if name not in ("rate", "settings")]
            if differing == ["loss"] and self._drifts(was, line):
                differing = []
            if differing:
                self.difference = f"step {line['at']} is not what it was: {_describe(was, line, differing)}"
                self.left = {}
            else:
                self.compared.append(line["at"])
        if was != line and (self.goes_on or not self.difference):  # else the next start finds what was, too
            self._write(line)

    def _drifts(self, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
        """Return whether losses differ for a reason that is no fault; then they tell nothing any more."""
        pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(was["loss"], now["loss"], strict=False)]
        is_small = all(abs(a - b) <= (_MOST_DRIFT if self.compared else _FIRST_DRIFT) * abs(a) for a, b in pairs)
        why = "a batch that was split otherwise" if self.splits and was["parts"] != now["parts"] else ""
        if not why and is_small and self.drifts:
            why = "kernels that do not repeat to the bit"
        self.drift = self.drift or (why and f" but for {why}, from step {now['at']} on")
        return bool(self.drift)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            with suppress(OSError):  # a disk that is full
                self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def journal_name(rank: int = 0) -> str:
    return f"replay-{rank}.jsonl" if rank else "replay.jsonl"


def is_known_beyond(path: Path) -> bool:
    """Return whether enough steps after a checkpoint are in its journal, or its training has left there; True also of
    one that keeps no journal."""
    if not (path / journal_name()).exists():
        return True
    lines = list(_lines(path / journal_name()))
    steps = {line["at"] for line in lines if "loss" in line}
    return len(steps) >= PROVING_STEPS or any("left" in line for line in lines)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError), open(path) as file:
        for text in file:
            with suppress(ValueError):  # the last one may be torn
                line = json.loads(text)
                if isinstance(line, dict) and ("at" in line or "left" in line):
                    yield line


def _is_late(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.device.type == "cuda"


def _describe(was: Mapping[str, Any], now: Mapping[str, Any], differing: Sequence[str]) -> str:
    words = [_numbers(name, was[name], now[name]) for name in ("loss", "rate") if name in differing]
    words += ["other settings of an optimizer"] * ("settings" in differing)
    words += ["another batch"] * ("batch" in differing)
    same = [name for name in ("batch", "rate") if name not in differing]
    words += [f"the {' and the '.join(same)} the same"] if same else []
    words += ["and other random numbers were drawn"] if was.get("draws") != now["draws"] else []
    return ", ".join(words)


def _numbers(name: str, was: Sequence[Any], now: Sequence[Any]) -> str:
    if len(was) != len(now):
        return f"{len(now)} numbers of its {name} in place of {len(was)}"
    pair = next(pair for pair in zip(was, now, strict=True) if pair[0] != pair[1])
    before, after = [float.fromhex(one) if name == "loss" else float(one) for one in pair]
    digits = ".6g" if f"{before:.6g}" != f"{after:.6g}" else ".17g"
    return f"{name} {after:{digits}} in place of {before:{digits}}"


@contextmanager
def heard_by(replay: Replay) -> Iterator[None]:
    """Let a journal hear each ``loss.backward()`` and each optimizer's step."""
    own: Any = torch.Tensor.backward

    @functools.wraps(own)
    def backward(loss: torch.Tensor, *args: Any, **options: Any) -> Any:
        replay.heard(loss)
        return own(loss, *args, **options)

    hook = register_optimizer_step_post_hook(replay.moved)
    try:
        setattr(torch.Tensor, "backward", backward)  # noqa: B010 - mypy lets no method be assigned
        yield
    finally:
        setattr(torch.Tensor, "backward", own)  # noqa: B010
        hook.remove()
