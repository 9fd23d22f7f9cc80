"""Make one step on all ranks: each makes its gradients alone, all vote, then the sum of all is applied on each.

What runs out of memory before the vote is repeated by that rank alone, while its peers wait there. An update that runs
out of memory on some ranks is an error on all of them after the next vote: they go back to a checkpoint together.

No rank can repeat alone what holds collectives: FSDP2, and DDP that keeps its own reduction. After an out-of-memory it
writes the smaller size down and leaves. Its peers leave when they see that, and the group begins again, smaller.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from memfit.errors import DoesNotFitError, HalfUpdatedError, JobFailedError, SampleTooLargeError, UsageError
from memfit.files import read_json, write_json
from memfit.rundir import RANKS_VARIABLE, record
from memfit.training._beat import beat, leave, lost_peers, peers_lost
from memfit.training._checks import alone, bad_setting
from memfit.training._exactness import place
from memfit.training._gradients import Batch, Failure, Local
from memfit.training._oom import Failed, OomKind, attempt, memory_now
from memfit.training._process import say
from memfit.training._ranks import GradientSum, Ranks, Vote, first_line, or_leave
from memfit.units import format_count, list_some

_MOST_TRIALS = 3
#: Where a smaller size is written down for the next start of the ranks.
_SMALLER = "smaller_size.json"
_SMALLER_SHAPE = {"sizes": list, "is_single": bool}
_REDUCE_LATER = "reduce metrics after the step, and call the model that the loss is given, not its wrapper"


class Team:
    """The part of a step, which is a ``SafeStep``, that all ranks make together. A smaller size may be written into
    ``folder``. ``counts``: the skipped batches and all batches, of all ranks, that the last vote knew."""

    #: Whether a rank repeats its passes alone.
    repeats = True

    def __init__(self, step: Any, ranks: Ranks, check: Callable[[], None]) -> None:
        self.ranks, self._step, self._check = ranks, step, check
        self._sum = GradientSum(ranks, step.parameters())
        self._buffers = [one for one in step.model.buffers() if not one.is_inference()]
        self._versions = [one._version for one in self._buffers]
        self._is_half = self._has_new_buffers = False
        self.counts = (step.num_skipped, step.num_batches)
        self.folder: Path | None = None
        self._cost = (1, 0)

    def local(self, batches: Sequence[Batch]) -> Local | Failure:
        """Make this rank's gradients, and allocate what the rest of the step will need while it may still fail."""
        step, ranks = self._step, self.ranks
        try:
            self._check()
            before = ranks.sequence()
            local: Local | Failure = step.local(batches)
            if ranks.sequence() != before:
                raise alone("The loss called a collective of its group.", _REDUCE_LATER)
        except UsageError as error:
            return Failure(error)
        if isinstance(local, Failure):
            return local
        local = replace(local, used=self._sum.used())
        for _ in range(_MOST_TRIALS):
            try:
                failed = attempt(self._reserve)
            except Exception as error:
                return Failure(error)
            if failed is None:
                return local
        assert failed is not None
        no_room = DoesNotFitError(
            f"In {place(step.where)} the buffers for the sum over the ranks have no room: {failed.first_line}",
            rule=memory_now(failed.kind),
            remedy="give more memory, or train fewer weights",
        )
        return Failure(no_room, failed.kind, "reduce", step.sizes.limit)

    def agree(self, local: Local | Failure) -> Local:
        """Return the sums of all ranks, or raise what one of them failed with."""
        step, ranks = self._step, self.ranks
        votes = ranks.vote(self._vote(local))
        if not any(vote.status for vote in votes if not vote.is_half):  # what fails on half weights follows from them
            self._refuse_half(votes)
        own = local if isinstance(local, Failure) else None
        ranks.raise_failed(votes, None if own is None else step.error_of(own))
        assert isinstance(local, Local)
        if self.repeats:  # else the passes have summed
            with or_leave("the step failed after the vote"):
                self._sum.fit(votes)
        return self._take_over(local, votes)

    def begin_part(self, *, is_last: bool) -> None:
        beat("microbatch", self.ranks.step)

    def cut(self, todo: Sequence[Batch]) -> None:
        """Change how the batches are cut: each rank cuts its own."""

    def divisor_of(self, own: Any) -> Any:
        """Return what the losses of a step are divided by in the backward pass: each rank has its own."""
        return own

    def go_on_with(self, size: int | None, failed: int) -> int | None:
        """Return the units to try next after ``failed`` at once did not fit: this rank repeats its step alone."""
        beat("repeat", self.ranks.step)
        return size

    def _take_over(self, local: Local, votes: Sequence[Vote]) -> Local:
        """Return the sums of all ranks, and take over what they found."""
        step = self._step
        step.sizes.agree([vote.sizes for vote in votes])
        self._count(votes)
        self._cost = (max(vote.cost for vote in votes), max(vote.num_retries for vote in votes))
        self._has_new_buffers = any(vote.has_new_buffers for vote in votes)
        sums = (sum(vote.loss_sum for vote in votes), sum(vote.weight for vote in votes))
        return replace(local, loss_sum=sums[0], weight=sums[1], is_skipped=not any(vote.num_left for vote in votes))

    def refuse(self, error: Exception) -> NoReturn:
        """Tell all ranks that this one has no gradients, and raise why."""
        self.agree(Failure(error))
        raise error

    def reduce(self, factor: float) -> float:
        """Sum gradients x ``factor`` over the ranks, and return the factor that is left; share the buffers."""
        beat("reduce", self.ranks.step)
        with or_leave("the sum over the ranks failed"):
            self._sum.sum(factor)
            self._share_buffers()
        beat("update", self.ranks.step)
        return 1.0

    def _share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, as DDP does, after a pass of any rank changed one."""
        if self._has_new_buffers:
            self.ranks.share(self._buffers)
            self._versions = [one._version for one in self._buffers]

    def finish(
        self, action: Callable[[], tuple[float, bool]], note: Callable[[str, OomKind], object], update: bool
    ) -> Any:
        """Return what the update returned; an out-of-memory in it is told in the next vote."""
        try:
            done = attempt(action, note)
            if not isinstance(done, Failed):
                return done
            why = done.first_line
        except (HalfUpdatedError, DoesNotFitError) as error:
            why = error.what
        except (JobFailedError, UsageError):  # follows from what all have: they raise it too
            self.ranks.is_over = True
            raise
        except Exception as error:
            leave(f"the update failed: {first_line(error)}")
        if not update or not self.repeats:
            leave(f"out of memory after the vote: {why}")
        self._is_half = True
        record("half_updated", rank=self.ranks.rank, error=why, **self._step.where)
        say(f"out of memory in the update: {why}")
        return math.nan, False

    def fail(self, error: BaseException) -> None:
        """Tell the peers, at their next vote, that this rank ends outside of a step."""
        self.ranks.fail(error)

    def read_size(self) -> None:
        """Take over a size that was written down before the group began again: it never begins again for that."""

    def forget_size(self) -> None:
        """Forget what was written down: a checkpoint has it."""

    def settle(self) -> None:
        """Raise if one has failed or stops, or if the last update was left half-way on some ranks."""
        votes = self.ranks.vote(self.ranks.ballot(is_half=self._is_half))
        self.ranks.raise_failed(votes)
        self._refuse_half(votes)
        beat("end")  # until what comes next says so

    def remember(self) -> bool:
        """Tell the sizes how the step went on all ranks; return whether the limit changed."""
        return bool(self._step.sizes.succeeded(*self._cost))

    def _reserve(self) -> None:
        for parameter in self._sum.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise alone("A gradient is sparse.", "make the embedding with sparse=False")
        self._sum.reserve()
        self._step.guard.try_memory()

    def _vote(self, local: Local | Failure) -> Vote:
        step, ranks = self._step, self.ranks
        own = {"is_half": self._is_half, "sizes": step.sizes.numbers()}
        if isinstance(local, Failure):
            return ranks.ballot(local.error, **own)
        num_retries = step.num_alloc_retries() - local.alloc_retries
        largest = 1
        if local.batches and not step.never_splits and (step.sizes.limit is not None or num_retries):
            largest = max(batch.largest_cost for batch in local.batches)
            num_retries *= max(batch.size for batch in local.batches) > 1
        return ranks.ballot(
            num_batches=step.num_batches - self.counts[1],
            num_skipped=step.num_skipped - self.counts[0],
            num_left=len(local.batches),
            cost=largest,
            num_retries=0 if largest == 1 else num_retries,
            has_new_buffers=[one._version for one in self._buffers] != self._versions,
            loss_sum=local.loss_sum,
            weight=local.weight,
            used=local.used,
            **own,
        )

    def _count(self, votes: Sequence[Vote]) -> None:
        """Count the batches of all ranks, and those that were skipped; refuse too many on all of them."""
        step, (skipped, batches) = self._step, self.counts
        step.num_skipped = skipped + sum(vote.num_skipped for vote in votes)
        step.num_batches = batches + sum(vote.num_batches for vote in votes)
        self.counts = step.num_skipped, step.num_batches
        if step.num_skipped > skipped and step.skip and not step.skip.allows(step.num_skipped, step.num_batches):
            self.ranks.is_over = True
            raise SampleTooLargeError(
                f"In {place(step.where)} {step.num_skipped} of {step.num_batches} batches of all ranks were skipped.",
                rule=f"{step.skip} allows no more.",
                remedy="the events 'skip' of each rank say what did not fit; make it smaller, or allow more",
            )

    def _refuse_half(self, votes: Sequence[Vote]) -> None:
        """Raise on all ranks if the last update was left half-way on some."""
        self._is_half = False
        if half := [f"rank {vote.rank}" for vote in votes if vote.is_half]:
            raise HalfUpdatedError(
                f"Memory ran out inside {type(self._step.optimizer).__name__}.step on {list_some(half)}.",
                rule="some weights are updated there and some are not, and all ranks have the same.",
                remedy="go back to the last checkpoint, as Trainer does by itself; fused=True allocates nothing",
            )


class Together(Team):
    """The ranks of a model whose passes hold collectives. The smaller size is written into ``folder``, that of the run
    or of the checkpoints, for the next start."""

    repeats = False

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
        found = None if self.folder is None else read_json(self.folder / _SMALLER, _SMALLER_SHAPE)
        if found is not None:
            self._was_single = found["is_single"]
            self._step.sizes.agree([self._step.sizes.numbers(), found["sizes"]])

    def forget_size(self) -> None:
        if self.folder is not None and self.ranks.rank == 0:
            (self.folder / _SMALLER).unlink(missing_ok=True)

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
            write_json(self.folder / _SMALLER, {"sizes": numbers, "is_single": size == failed})
            beat("smaller", self.ranks.step)
        record("restart_smaller", size=size, previous_size=failed, rank=self.ranks.rank, **self._step.where)
        leave(f"out of memory with {failed} at once; the group begins again with {size}")

    def reduce(self, factor: float) -> float:
        """Give all ranks the buffers of rank 0; return what is left of the factor: the passes have summed."""
        with or_leave("sharing the buffers failed"):
            self._share_buffers()
        beat("update", self.ranks.step)
        return factor
