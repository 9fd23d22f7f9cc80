"""Make steps of ranks whose passes hold collectives: FSDP2, and DDP that keeps its own reduction.

No rank can repeat such a pass alone. After an out-of-memory the rank writes the smaller size down and leaves, its peers
leave when they see that, and the group begins again from its last checkpoint, smaller.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit.files import read_json, write_json
from memfit.rundir import RANKS_VARIABLE, record
from memfit.training._beat import beat, leave, lost_peers, peers_lost
from memfit.training._checks import bad_setting
from memfit.training._gradients import Batch, Failure, Local
from memfit.training._ranks import Ranks, or_leave
from memfit.training._team import Team
from memfit.units import format_count

_NAME = "smaller_size.json"
_SHAPE = {"sizes": list, "is_single": bool}


class Together(Team):
    """The ranks of a model whose passes hold collectives. The smaller size is written into ``folder``, that of the run
    or of the checkpoints, for the next start."""

    heals = False

    def __init__(self, step: Any, ranks: Ranks, called: Any) -> None:
        super().__init__(step, ranks, lambda: None)
        if step.skip is not None:
            raise bad_setting("skip", step.skip, "it is None: all ranks make each pass together", "leave skip out")
        step.called = called
        run = os.environ.get(RANKS_VARIABLE)
        self.folder = Path(run).parent if run else None
        self._divisor, self._has_begun, self._was_single = 1.0, False, False
        self.read_size()

    def read_size(self) -> None:
        """Take over the size that a rank wrote down before it left."""
        found = None if self.folder is None else read_json(self.folder / _NAME, _SHAPE)
        if found is not None:
            self._was_single = found["is_single"]
            self._step.sizes.agree([self._step.sizes.numbers(), found["sizes"]])

    def forget_size(self) -> None:
        if self.folder is not None and self.ranks.rank == 0:
            (self.folder / _NAME).unlink(missing_ok=True)

    def local(self, batches: Sequence[Batch]) -> Local | Failure:
        self._has_begun = False
        local: Local | Failure = self._step.local(batches)
        if not isinstance(local, Failure):
            return replace(local, divisor=self._divisor * self.ranks.size)  # the passes took the mean over the ranks
        if peers_lost(local.error):
            leave(lost_peers(local.error))
        if self._has_begun or self.ranks.is_over:
            self.ranks.is_over = True  # peers in a pass hear no vote: they leave when this process ends
            raise self._step.error_of(local)
        return local

    def fail(self, error: BaseException) -> None:
        """Leave after a peer; else tell the peers, unless they may be in a pass of a validation and hear no vote."""
        if peers_lost(error):
            leave(lost_peers(error))
        if not self._step.is_sharded:
            super().fail(error)

    def begin_part(self, *, is_last: bool) -> None:
        super().begin_part(is_last=is_last)
        if hasattr(self._step.called, "require_backward_grad_sync"):  # as DDP's no_sync() does
            self._step.called.require_backward_grad_sync = is_last

    def cut(self, todo: Sequence[Batch]) -> None:
        """Cut so that all ranks make the same number of passes."""
        num_units = sum(batch.count for batch in todo)
        num_parts = sum(len(batch.parts) for batch in todo)
        numbers = self._step.sizes.numbers()
        votes = self.ranks.vote(self.ranks.ballot(sizes=numbers, num_left=num_parts, weight=float(num_units)))
        self.ranks.raise_failed(votes)
        self._step.sizes.agree([vote.sizes for vote in votes])
        most, least = max(vote.num_left for vote in votes), int(min(vote.weight for vote in votes))
        if least < most:
            self.ranks.is_over = True
            raise UsageError(
                f"A rank has {format_count(least, 'sample')} in this step, and the passes of another are {most}.",
                rule="the passes of this model hold collectives, so all ranks make as many, each over samples.",
                remedy="make the global batch larger, with drop_last=True; or wrap the model in "
                "DistributedDataParallel, with recovery='repeat'",
            )
        for _ in range(most - num_parts):
            batch = max(todo, key=lambda one: one.size)
            index = max(range(len(batch.parts)), key=lambda one: batch.parts[one][1] - batch.parts[one][0])
            start, stop = batch.parts[index]
            batch.parts[index : index + 1] = [(start, (start + stop + 1) // 2), ((start + stop + 1) // 2, stop)]
        self._divisor, self._has_begun = sum(vote.weight for vote in votes), True

    def divisor_of(self, own: Any) -> Any:
        """Return the units of all ranks: the same on each, as the passes take the mean of their gradients."""
        return self._divisor

    def go_on_with(self, size: int | None, failed: int) -> int | None:
        """Write the smaller size down and leave; return None if a single unit did not fit the last time either."""
        if size is None or (size == failed and self._was_single):
            return None
        if self.folder is not None:
            numbers = list(self._step.sizes.numbers())
            write_json(self.folder / _NAME, {"sizes": numbers, "is_single": size == failed})
            beat("smaller", self.ranks.step)
        record("restart_smaller", size=size, previous_size=failed, rank=self.ranks.rank, **self._step.where)
        leave(f"out of memory with {failed} at once; the group begins again with {size}")

    def reduce(self, factor: float) -> float:
        """Give all ranks the buffers of rank 0; return what is left of the factor: the passes have summed."""
        with or_leave("sharing the buffers failed"):
            self._share_buffers()
        beat("update", self.ranks.step)
        return factor
