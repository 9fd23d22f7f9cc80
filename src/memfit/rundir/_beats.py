"""Beats of a group's ranks: the last sign of life of each, in a file of its own that others read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from memfit.errors import DamagedError
from memfit.files import read_json

RANKS_VARIABLE = "MEMFIT_RANKS"  # the folder of this generation's beats, in the environment of a rank
WAITING = frozenset({"vote", "reduce"})  # where a rank waits for its peers: it does not hang there, one of them does
START_PATIENCE = 1800.0  # how long a rank may take from its start to its first beat, in seconds
#: A collective's error that means: another rank is gone or silent. Sources: gloo/transport/tcp/pair.cc and
#: unbound_buffer.cc, torch/csrc/distributed/c10d; seen with torch 2.13.
LOST = re.compile(
    r"Connection (?:closed|reset) by peer|Application timeout caused pair closure|Timed out waiting \d+ ?ms"
    r"|Socket Timeout|Broken pipe|Connection refused|ncclRemoteError|NCCL communicator was aborted"
)
#: Why a rank leaves that only noticed that another was lost.
_FOLLOWS = re.compile(r"it lost its peers|[Rr]ank \d+ (?:hangs|left|failed)")
_BYTES = 768
_encode = json.JSONEncoder(separators=(",", ":")).encode
_SHAPE = {"rank": int, "pid": int, "host": str, "launch": str, "place": str, "count": int, "sealed": (int, type(None))}
#: So many trainings of one job are told apart: more may be one that begins anew in another folder each time.
_MOST_TRAININGS = 16


@dataclass
class Beat:
    """The last sign of life of a rank; the rank itself changes it in place, which takes the least time."""

    rank: int  # who gave it
    pid: int
    host: str
    launch: str  # what tells the ranks of one launch from those of an earlier one that left files here
    place: str  # what it began to do then, such as ``microbatch``
    step: int | None = None  # the optimizer step that it was in; None outside of one
    count: int = 0  # how many beats it has given; two beats differ in it
    sealed: int | None = None  # the step of the last checkpoint that it sealed; None if it sealed none
    training: str = ""  # what that checkpoint is of: a script may make several trainings
    time: float = 0.0  # Unix seconds
    patience: float | None = None  # how many seconds the next one may take; None if nobody looks for it
    left: str = ""  # why it left with exit code 79; empty as long as it has not

    def to_line(self) -> bytes:
        """Return one line of JSON, as long as every other."""
        return _encode(vars(self)).encode().ljust(_BYTES - 1) + b"\n"

    @property
    def has_own_reason(self) -> bool:
        """True if it left for a reason of its own, and not since another rank was lost.

        >>> [Beat(1, 77, "a", "", "vote", left=why).has_own_reason for why in ("out of memory", "rank 0 hangs: no", "")]
        [True, False, False]
        """
        return bool(self.left) and _FOLLOWS.match(self.left) is None

    @property
    def where(self) -> str:
        """Its place in words.

        >>> Beat(1, 77, "a", "", "vote", step=12).where, Beat(1, 77, "a", "", "load").where
        ('vote of step 12', 'load')
        """
        return self.place if self.step is None else f"{self.place} of step {self.step}"


def is_further(best: Mapping[str, Any], training: str, at: Any) -> bool:
    return at > best[training] if training in best else len(best) < _MOST_TRAININGS


def launch_of(env: Mapping[str, str]) -> str:
    """Return what the ranks of one launch have in common, and no other launch has."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MEMFIT_GENERATION")
    return ":".join(env.get(name, "") for name in (*names, "SLURM_JOB_ID", "SLURM_STEP_ID"))[:200]


def open_beats(folder: Path, rank: int) -> int:
    """Return a descriptor for a rank's beats, of which each overwrites the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / f"rank_{rank}", os.O_RDWR | os.O_CREAT, 0o644)


def read_beats(folder: Path) -> dict[int, Beat]:
    """Return the last beat of each rank; a file that is torn or of another kind is passed over."""
    found: dict[int, Beat] = {}
    paths: list[Path] = []
    with suppress(OSError):  # at its limit, a job may open no folder
        paths = [*folder.glob("rank_*")]
    for path in paths:
        with suppress(DamagedError, OSError):
            content = read_json(path, _SHAPE)
            if content is not None and content.keys() == {one.name for one in fields(Beat)}:
                found[content["rank"]] = Beat(**content)
    return found
