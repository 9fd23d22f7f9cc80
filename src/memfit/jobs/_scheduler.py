"""Runs jobs side by side under one budget.

The first job runs alone until it has passed each of its phases once; its measured footprint then speaks for its like.
From then on a job is admitted as soon as what may be lent covers what it reserves: no batches, no pauses. What may be
lent is measured anew at every step, so a neighbour outside memfit that grows is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from memfit.errors import DoesNotFitError
from memfit.jobs._job import ENDED, Backend, Job, JobStatus
from memfit.memory import DEFAULT_SLACK, Budget, Claim, Footprint, Lendable, reservation_bytes
from memfit.units import format_bytes

OnFailure = Literal["stop", "continue"]
#: The budget as it is now, given the private bytes that running jobs use now (a cap of the user's counts those).
ReadBudget = Callable[[int], Budget]

#: The kernel brings a group's counters up to date within two seconds: so long must a lack of memory last to be one.
_PATIENCE_TICKS = 30
_TICK_SECONDS = 0.1


@dataclass(frozen=True)
class Policy:
    """How jobs are admitted.

    Attributes:
        max_parallel: The most jobs at once; None for as many as fit.
        on_failure: ``stop`` asks the running jobs to stop and starts no more when one fails; ``continue`` goes on.
        slack: The share that is reserved on top of a measured footprint.
        force: Admit without asking whether it fits, and without measuring one job first.
    """

    max_parallel: int | None = None
    on_failure: OnFailure = "continue"
    slack: float = DEFAULT_SLACK
    force: bool = False


class StopRequest:
    """How a run is stopped from a signal handler: ``ask`` for a checkpoint and an end, or end it ``now``."""

    level = 0

    def ask(self) -> None:
        self.level = max(self.level, 1)

    def now(self) -> None:
        self.level = 2


def say_nothing(kind: str, **fields: object) -> None:
    """The listener of a scheduler that nobody listens to."""


class Scheduler:
    """Admits jobs of one kind to a backend while they fit.

    Args:
        jobs: The jobs, in the order in which they are to start; one's measured footprint speaks for the others.
        backend: Where they run.
        read_budget: Gives the budget as it is now.
        policy: How jobs are admitted.
        known: A footprint measured on an earlier job of this kind, or None.
        say: Called with the kind and the fields of each event: ``admit``, ``wait``, ``footprint``, ``stop``, ``end``.
            Around each job (``admit``, ``end``) they hold what is used under the binding limit, in bytes.
        sleep: How to wait between two steps; a test passes a function that moves a fake backend on.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        backend: Backend,
        read_budget: ReadBudget,
        *,
        policy: Policy | None = None,
        known: Footprint | None = None,
        say: Callable[..., None] = say_nothing,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.backend = backend
        self.read_budget = read_budget
        self.policy = policy or Policy()
        self.known = known
        self.say = say
        self.sleep = sleep
        self.statuses: dict[str, JobStatus] = {}
        self._jobs = {job.id: job for job in jobs}
        self._waiting = list(jobs)
        self._reserved: dict[str, int | None] = {}
        self._stop_level = 0
        self._why_waiting = ""
        self._ticks_without_room = 0

    def run(
        self,
        *,
        stop: StopRequest | None = None,
        on_tick: Callable[[], None] = lambda: None,
        still_running: Collection[str] = (),
    ) -> dict[str, JobStatus]:
        """Run all jobs to their ends; the last status of every job that was started, by id.

        Args:
            stop: Lets the caller stop the run from a signal handler.
            on_tick: Called ten times a second, for a live view.
            still_running: The ids of jobs that an earlier supervisor started and that run now: they are taken over
                first, whatever is free, for what they use is taken already.

        Raises:
            DoesNotFitError: If the next job does not fit although no other runs, unless the policy forces it.
        """
        for job in [job for job in self._waiting if job.id in still_running]:
            self._start(job, self._needed(job, alone=False), "it still runs and is taken over")
        while True:
            self._poll()
            self._obey(stop.level if stop else 0)
            self._admit()
            on_tick()
            if not self._waiting and not self._running():
                return self.statuses
            self.sleep(_TICK_SECONDS)

    def _running(self) -> list[JobStatus]:
        return [status for status in self.statuses.values() if status.state not in ENDED]

    def _in_use_bytes(self) -> int:
        return sum(status.used_bytes for status in self._running())

    def _poll(self) -> None:
        before = dict(self.statuses)
        self.statuses |= {job_id: status for job_id, status in self.backend.poll().items() if job_id in before}
        for job_id, status in self.statuses.items():
            if status.footprint is not None and (self._has_passed(status) or self._outgrew(status)):
                self._learn(job_id, status.footprint)
            if status.state in ENDED and before[job_id].state not in ENDED:
                ended = {"state": status.state, "cause": status.cause, "exit_code": status.exit_code}
                self.say("end", job=job_id, **ended, **self._memory())
                if status.state not in ("completed", "preempted", "cancelled") and self.policy.on_failure == "stop":
                    self._obey(1)

    def _has_passed(self, status: JobStatus) -> bool:
        return status.state == "completed" or status.num_phases_passed >= max(1, len(self._jobs[status.job_id].phases))

    def _outgrew(self, status: JobStatus) -> bool:
        return self.known is not None and status.peak_bytes > self.known.private_bytes

    def _learn(self, job_id: str, footprint: Footprint) -> None:
        if self.known is not None and footprint.private_bytes <= self.known.private_bytes:
            return
        grown = self.known is None or footprint.private_bytes > 1.01 * self.known.private_bytes
        self.known = footprint if self.known is None else self.known.merge(footprint)
        needed = reservation_bytes(self.known, self.policy.slack)
        self._reserved = {id: max(needed, reserved or 0) for id, reserved in self._reserved.items()}
        if grown:
            in_use = self._in_use_bytes()
            self.say(
                "footprint", job=job_id, footprint=self.known.to_dict(), reservation_bytes=needed, in_use_bytes=in_use
            )

    def _obey(self, level: int) -> None:
        if level <= self._stop_level:
            return
        self._stop_level = level
        self._waiting.clear()
        self.say("stop", level=level, num_running=len(self._running()))
        for status in self._running():
            self.backend.cancel(status.job_id, now=level > 1)

    def _admit(self) -> None:
        while self._waiting:
            job, running = self._waiting[0], self._running()
            if self.policy.max_parallel is not None and len(running) >= self.policy.max_parallel:
                return self._wait(job, f"at most {self.policy.max_parallel} at once (max_parallel)")
            if self.policy.force:
                self._start(job, None, "forced: not checked against the budget")
                continue
            if self.known is None and running:
                return self._wait(job, f"{running[0].job_id} is being measured until it has passed each phase once")
            lendable = self._lendable(running)
            needed = self._needed(job, alone=not running)
            if (needed or 1) > lendable.bytes:
                if running:
                    return self._wait(job, f"it needs {format_bytes(needed or 1)}", lendable.explain())
                self._ticks_without_room += 1
                if self._ticks_without_room < _PATIENCE_TICKS:
                    return None
                raise self._refusal(job, needed or 1, lendable)
            self._start(job, needed, lendable.explain())
        return None

    def _needed(self, job: Job, *, alone: bool) -> int | None:
        """What the job reserves; None for a first job of unknown size, which runs alone."""
        if self.known is not None:
            # A job that runs alone may use all there is, so its like's peak is enough without the slack.
            return self.known.private_bytes if alone else reservation_bytes(self.known, self.policy.slack)
        return reservation_bytes(job.footprint) if job.footprint else None

    def _lendable(self, running: Sequence[JobStatus]) -> Lendable:
        budget = self.read_budget(self._in_use_bytes())
        claims = {s.job_id: Claim(self._reserved.get(s.job_id) or 0, s.used_bytes) for s in running}
        return Lendable.now(budget.headroom_bytes, budget.reserve_bytes, claims)

    def _start(self, job: Job, reserved: int | None, why: str) -> None:
        self._waiting.remove(job)
        before = self._memory()
        self._why_waiting, self._ticks_without_room = "", 0
        self._reserved[job.id] = reserved
        self.backend.submit(job)
        self.statuses[job.id] = JobStatus(job.id, "pending")
        num_running = len(self._running())
        self.say("admit", job=job.id, reservation_bytes=reserved, num_running=num_running, why=why, **before)

    def _memory(self) -> dict[str, int]:
        """What is used under the limit that binds now, and what the running jobs map (PSS), in bytes."""
        running, binding = self._running(), self.read_budget(self._in_use_bytes()).binding
        used = {"limit_bytes": binding.limit_bytes, "used_bytes": binding.used_bytes}
        return used | {"pss_bytes": sum(status.pss_bytes for status in running)}

    def _wait(self, job: Job, reason: str, arithmetic: str = "") -> None:
        if reason != self._why_waiting:
            self._why_waiting = reason
            self.say("wait", job=job.id, num_running=len(self._running()), reason=reason, arithmetic=arithmetic)

    def _refusal(self, job: Job, needed: int, lendable: Lendable) -> DoesNotFitError:
        binding = self.read_budget(self._in_use_bytes()).binding
        source = "measured on a job like it" if self.known else "as declared" if job.footprint else "to start at all"
        return DoesNotFitError(
            f"{job.id} needs {format_bytes(needed)} of host memory ({source}); {lendable.explain()}.",
            rule=f"{binding.name} of {format_bytes(binding.limit_bytes)} ({binding.source}).",
            remedy="free memory or raise that limit, make the job smaller, or run it all the same with --force",
        )
