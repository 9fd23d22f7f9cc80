"""Take part in ``memfit prove``: seal a checkpoint early, make more steps, report, end by a kill.

The first run chooses when. The second is started over a copy of what the first had written then. Nothing of the
training is shortened: schedules read its length.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import NoReturn

from memfit.files import read_json, write_json
from memfit.rundir import PROVE_OUTPUTS, PROVE_PLACE, PROVE_PLAN, PROVE_SEALED, PROVE_VARIABLE
from memfit.training._journal import Journal
from memfit.training._loop_parts import LoopParts
from memfit.training._notes import WEIGHTS, note_of
from memfit.training._replay import PROVING_STEPS, Replay, digest_of
from memfit.training._sealed import SealedFolder
from memfit.units import format_count, list_some

#: The steps by which the seconds of a step are known.
_MEASURED_STEPS = 3
#: Where two epochs take too long: the step of the checkpoint, and the last one.
_SHORT = (5, 12)
_PLAN = {"seconds": (int, float), "seal": int, "end": int}


def is_proving() -> bool:
    return bool(os.environ.get(PROVE_VARIABLE))


class Proof:
    """What one rank does in ``memfit prove``. ``is_sealed``: the checkpoint is there that the steps are made after;
    others that follow keep no journal of their own."""

    def __init__(self, keeper: SealedFolder, parts: LoopParts, journal: Journal, replay: Replay, began_at: int) -> None:
        self._keeper, self._parts, self._journal, self._replay = keeper, parts, journal, replay
        self._folder = Path(os.environ[PROVE_VARIABLE]).absolute()
        plan = read_json(self._folder / PROVE_PLAN, _PLAN) or {}
        self._seconds, self._seal, self._last = plan["seconds"], plan["seal"], plan["end"]
        self._step, self._passed = began_at, Counter(journal.passed)
        self.is_sealed = self._is_second = self._seal > 0
        if self._is_second and began_at != self._seal:
            self.end(f"it began at step {began_at}, not at {self._seal}")

    def made(self, step: int, num_steps: int, seconds: float) -> None:
        """Say where the training is, and end after the last step, or at the first one that is another."""
        self._step, ranks = step, self._keeper.ranks
        if not self._seal and step >= min(_MEASURED_STEPS, max(2, num_steps)):
            is_short = self._journal.num_epochs != 1 and 0 < 2 * num_steps * seconds <= self._seconds
            within = num_steps + min(3, max(1, num_steps // 2))  # of the second epoch
            chosen = (within, 2 * num_steps + 2) if is_short else _SHORT
            self._seal, self._last = self._keeper.lead(lambda: chosen)
        if self._replay.rank == 0:
            write_json(self._folder / PROVE_PLACE, {"step": step, "end": self._last}, durable=False)
        if self.is_sealed and (step >= self._last or (ranks is None and self._replay.difference)):
            self.end()

    def wants(self, step: int) -> bool:
        """Return whether the checkpoint is due."""
        return not self.is_sealed and 0 < self._seal <= step

    def sealed(self, path: Path, step: int) -> Path:
        """Return where the journal belongs that begins at this checkpoint: if it is the one to go on from, in a copy
        of all outputs."""
        if not self.wants(step):
            return path
        outputs, copy = self._folder / PROVE_OUTPUTS, self._folder / PROVE_SEALED
        self._keeper.lead(lambda: shutil.copytree(outputs, copy, symlinks=True))
        self._seal, self.is_sealed, self._passed = step, True, Counter(self._journal.passed)
        return copy / path.relative_to(outputs)

    def end(self, why: str = "") -> NoReturn:
        """Report, and end this process without a further word; all ranks together. ``why`` nothing is proved."""
        replay, steps = self._replay, format_count(self._step, "step")
        replay.read_late(wait=True)
        made = len(replay.compared) if self._is_second else (self._step - self._seal) * self.is_sealed
        few = f"it ended after {steps}, {made} of them after the checkpoint: let it make more, or try --seconds 0"
        why = why or (replay.drift and f"it came out as before{replay.drift}") or few * (made < PROVING_STEPS)
        difference = f"{replay.difference}{replay.words}" if replay.difference else ""
        if not difference:
            replay.strange = []
            gc.collect()  # what nobody has any more is not compared
            replay.note(self._step, note_of(self._parts.models().values()) | self._digests())
            if not why and any(name.startswith("the ") or name.endswith(WEIGHTS) for name in replay.strange):
                difference = f"each step came out as before; what differs at the end: {list_some(replay.strange)}"
        passed = self._journal.passed - self._passed
        report = {
            "why": why,
            "seal": self._seal,
            "planned_end": self._last,
            "end": self._step,
            "epoch_ends": passed["epoch"],
            "validations": passed["validate"],
            "difference": difference,
            "differs": replay.strange,
        }
        write_json(self._folder / f"report-{replay.rank}.json", report)
        if self._keeper.ranks is not None:
            self._keeper.ranks.settle()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(0)

    def _digests(self) -> dict[str, int]:
        """Return the checksums of weights, buffers and optimizers by name; each name begins with "the "."""
        found, names = {}, {}
        for prefix, model in self._parts.models().items():
            for name, one in chain(model.named_parameters(), model.named_buffers()):
                names[id(one)] = f"{name} of {prefix}"
                found[f"the {names[id(one)]}"] = digest_of(one)
        for optimizer in self._parts.optimizers():
            for number, (one, state) in enumerate(optimizer.state.items()):
                found[f"the optimizer's state of {names.get(id(one), number)}"] = digest_of(state)
        return found
