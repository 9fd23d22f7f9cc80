"""Runs jobs side by side under one budget.

A job of which nothing is known runs alone until it has passed each of its phases once, or stopped growing; its measured
footprint then speaks for its like. From then on a job is admitted as soon as what may be lent covers what it reserves:
no batches, no pauses. What may be lent is measured anew at every step, so a neighbour outside memfit that grows is
noticed.

A job that passes its reservation gets more from what is free. When nothing is free, no job is admitted until
neighbours have ended; a job that reaches its wall waits there. Only when that lasts, the job whose end loses the least
work is asked to checkpoint and step aside, and comes again later with what it needs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from time import monotonic

from memfit.errors import DoesNotFitError
from memfit.jobs._budget_watch import BudgetWatch, ReadBudget
from memfit.jobs._cpu import CpuDemand
from memfit.jobs._forecast import Forecast
from memfit.jobs._job import ENDED, Backend, Job, JobStatus, State, Verdict
from memfit.jobs._placement import place
from memfit.jobs._policy import HostClaims, Policy, StopRequest, say_nothing
from memfit.jobs._retry import Retry, decide
from memfit.jobs._slot import Slot, Wait, cheapest, device_claims
from memfit.jobs._too_large import outgrown, refusal
from memfit.memory import Budget, Claim, Footprint, Lendable, Others, reservation_bytes
from memfit.units import format_bytes

_TICK_SECONDS = 0.1
#: The kernel brings a group's counters up to date within two seconds: so long must a lack of memory last to be one.
_LACK_SECONDS = 3.0
#: How long a job may wait at its wall for neighbours to end, and how long when all that run wait there.
_STALL_SECONDS, _DEADLOCK_SECONDS = 10.0, 0.5
#: A job counts as starting so long; so many may start at once on each core, and start-up is what keeps cores busy.
_STARTING_SECONDS, _STARTS_PER_CPU = 0.25, 3
#: How many waiting jobs are looked at when the first does not fit, and how many may pass it by.
_BACKFILL, _MOST_PASSED = 32, 64
#: How often requests to stop are looked for of those that wait behind the first.
_LOOK_SECONDS = 0.5
_MOST_ASIDES = 3
#: How a job may end that was asked to step aside.
_ASIDE = frozenset({"preempted", "cancelled", "node_fail", "out_of_memory"})
#: What is free is parted among so many jobs at least, so that not every start and end moves the walls of all others.
_LEAST_PARTS = 8
#: How long a grown reservation stands before what it holds for nothing goes back, and how long a job that waits at its
#: wall may take to leave.
_GROWN_SECONDS, _LEAVING_SECONDS = 1.0, 2.0
#: A job that is to have so much starts with this share of it: what is free is never to the byte what it was.
_ALMOST = 0.97
_HELD_BY_OTHERS = "another run on this host has the memory that it needs"
#: A reservation grows by at least this factor: smaller steps are not worth a word.
_LEAST_GROWTH = 1.02


class Scheduler:
    """Admits jobs to a backend while they fit, and keeps those that run within the budget.

    Args:
        jobs: The jobs, in the order in which they are to start.
        backend: Where they run.
        read_budget: Gives the budget as it is now.
        policy: How jobs are admitted.
        known: Footprints measured earlier, each with the parameters of its job.
        say: Called with the kind and the fields of each event: ``admit``, ``wait``, ``footprint``, ``grow``,
            ``short``, ``aside``, ``retry``, ``stop``, ``cpu``, ``end``. Around each job (``admit``, ``end``) they hold
            what is used under the binding limit, in bytes.
        claims: What other supervisors on this host have lent; None when there is none to ask.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        backend: Backend,
        read_budget: ReadBudget,
        *,
        policy: Policy | None = None,
        known: Sequence[tuple[dict[str, str], Footprint]] = (),
        say: Callable[..., None] = say_nothing,
        claims: HostClaims | None = None,
    ) -> None:
        self.backend = backend
        self.policy = policy or Policy()
        self.forecast = Forecast()
        for params, footprint in known:
            self.forecast.learn(Job("known", command=("-",), params=params), footprint)
        self.say = say
        self.claims = claims
        self.statuses: dict[str, JobStatus] = {}
        self._waiting = [Slot(job, JobStatus(job.id, "pending")) for job in jobs]
        self._running: dict[str, Slot] = {}
        self._stop_level, self._has_ended = 0, False
        self._why_waiting = ""
        self._lacking_since: float | None = None
        self._num_passed = 0
        self._short = ""
        self._favoured: str | None = None
        self._favoured_at = self._look_at = 0.0
        self._cpu = CpuDemand()
        self._budget = BudgetWatch(read_budget, lambda: monotonic(), claims.others if claims else Others)

    def run(
        self,
        *,
        stop: StopRequest | None = None,
        on_tick: Callable[[], None] = lambda: None,
        still_running: Collection[str] = (),
        hold: Callable[[], str] = lambda: "",
        stopped: Callable[[str], str] = lambda job_id: "",
    ) -> dict[str, JobStatus]:
        """Run all jobs to their ends; the last status of every job that was started, by id.

        Args:
            stop: Lets the caller stop the run from a signal handler.
            on_tick: Called at least ten times a second, for a live view.
            still_running: The ids of jobs that an earlier supervisor started and that run now: they are taken over
                first, whatever is free, for what they use is taken already.
            hold: A reason to start no job now, such as a full disk; empty when there is none.
            stopped: Why the user wants a job of this id, which waits, not to be started any more; empty when it is to.

        Raises:
            DoesNotFitError: If no job was started, because none fits although no other runs.
        """
        refused: DoesNotFitError | None = None
        for slot in [slot for slot in self._waiting if slot.job.id in still_running]:
            self._start(slot, self._needed(slot, alone=False), "it still runs and is taken over")
        if self._running:  # what they use was read before they were known
            self._poll()
            self._budget.read(self._in_use_bytes())
        while True:
            self._poll()
            self._obey(stop.level if stop else 0)
            held = hold()
            # One run at a time: no two grow or start a job into the same free bytes.
            with self.claims.deciding() if self.claims else nullcontext(Others()) as self._budget.others:
                self._relieve()
                latest = self._admit(held, stopped)
                self._write_claims()
            refused = refused or latest
            self._see_to_cpus()
            on_tick()
            if not self._waiting and not self._running:
                if refused is not None and all(status.started is None for status in self.statuses.values()):
                    raise refused
                return self.statuses
            self.backend.wait(_TICK_SECONDS)

    def _in_use_bytes(self) -> int:
        return sum(slot.status.used_bytes for slot in self._running.values())

    def _read_budget(self) -> Budget:
        if self._budget.is_due:
            self._budget.read(self._in_use_bytes())
            self._cap()
        return self._budget.now

    def _cap(self) -> None:
        """Move the wall above all jobs, which is for what their own miss: those lie within the budget."""
        spare = self._budget.checkpoint_bytes + self._budget.now.reserve_bytes // 8
        # Other runs have counted what this one lent: it stands, whatever they take meanwhile.
        lent = sum(slot.reserved_bytes for slot in self._running.values()) if self._budget.others.num else 0
        self.backend.cap(max(1, lent, self._capacity_bytes()) + spare)

    def _capacity_bytes(self) -> int:
        """What all jobs may take now: of what is free, other runs on this host may take a part at the same time."""
        return self._budget.capacity_bytes - max(0, self._room(Slot.claim).bytes) + self._part_bytes()

    def _part_bytes(self) -> int:
        """What of the free bytes this run may hand out to its running jobs."""
        self._read_budget()
        claims = {job_id: slot.claim() for job_id, slot in self._running.items()}
        return self._budget.part_bytes(self._in_use_bytes(), claims)

    def _room(self, claim_of: Callable[[Slot], Claim] = Slot.expectation) -> Lendable:
        """What may be lent now, beside what running jobs are expected to take."""
        self._read_budget()
        claims = {job_id: claim_of(slot) for job_id, slot in self._running.items()}
        return self._budget.lendable(self._in_use_bytes(), claims)

    # What became of the jobs

    def _poll(self) -> None:
        found = self.backend.poll()
        for job_id, slot in self._running.items():
            slot.status = self.statuses[job_id] = found[job_id]
            self._budget.checkpoint_bytes = max(self._budget.checkpoint_bytes, slot.status.checkpoint_bytes)
        if any(list(map(self._learn, self._running.values()))):  # a list: each of them is asked
            self._revise()
        for job_id, slot in list(self._running.items()):
            if slot.status.state in ENDED:
                del self._running[job_id]
                self._settle(slot)

    def _learn(self, slot: Slot) -> bool:
        """Take in what a job took so far, if that speaks for its like; whether it does."""
        status, footprint = slot.status, slot.status.footprint
        if footprint is None or (footprint.private_bytes <= slot.learned_bytes and status.state != "completed"):
            return False
        expected = self.forecast.predict(slot.job)
        is_measured = expected is not None and expected.method == "measured"
        outgrew = expected is not None and is_measured and status.peak_bytes > expected.private_bytes
        if not (status.state == "completed" or status.settled or outgrew):
            return False
        slot.learned_bytes = footprint.private_bytes
        self.forecast.learn(slot.job, footprint, is_final=status.state == "completed")
        if not is_measured or (expected and footprint.private_bytes > 1.01 * expected.private_bytes):
            needed = reservation_bytes(footprint, self.policy.slack)
            told = {"footprint": footprint.to_dict(), "reservation_bytes": needed, "in_use_bytes": self._in_use_bytes()}
            self.say("footprint", job=slot.job.id, **told)
        return True

    def _revise(self) -> None:
        """Reservations of running jobs follow what was measured on their like; a hint may also turn out too large."""
        for slot in self._running.values():
            expected = self.forecast.predict(slot.job)
            if expected is None or expected.method != "measured" or slot.needed_bytes is not None:
                continue
            slot.expected_bytes = reservation_bytes(expected, self.policy.slack)
            if slot.by_hint:
                slot.reserved_bytes, slot.by_hint = min(slot.reserved_bytes, slot.expected_bytes), False

    def _settle(self, slot: Slot) -> None:
        """Decide what follows from a job's end: it comes again, or it is done."""
        status = slot.status
        if slot.verdict is not None and status.state not in ("completed", slot.verdict.state):
            self._record(slot, slot.verdict)  # its watcher could not read it, on a full disk for example
            status = slot.status
        again: Retry | str = "it completed" if status.state == "completed" else "the run was asked to stop"
        if slot.verdict is not None:
            again = "it had the whole budget to itself"
        elif slot.set_aside is not None and status.state in _ASIDE and not self._stop_level:
            self._read_budget()
            grown = round(1.25 * status.peak_bytes) if slot.stalled_since is not None else 0
            needed = min(max(slot.reserved_bytes, slot.expected_bytes, grown), self._budget.most_bytes)
            again = Retry("it stepped aside for others", needed or None)
            slot.num_asides += 1
        elif status.state != "completed" and not self._stop_level:
            self._read_budget()
            again = decide(
                status,
                had_bytes=slot.had_bytes(),
                capacity_bytes=max(0, self._budget.capacity_bytes) and self._budget.most_bytes,
                is_last=slot.num_retries + 1 >= self.policy.retries,
                had_device_bytes=slot.device_bytes,
            )
            if isinstance(again, Retry) and slot.num_retries >= self.policy.retries:
                again = f"it was started again {slot.num_retries} times already (retries)"
            slot.num_retries += isinstance(again, Retry)
        if isinstance(again, str):
            if status.state == "out_of_memory" and slot.verdict is None and status.evidence.get("place") != "device":
                self._record(slot, Verdict("out_of_memory", f"{status.cause}; {again}"))
                status = slot.status
            ended = {"state": status.state, "cause": status.cause, "exit_code": status.exit_code, "why_final": again}
            self.say("end", job=slot.job.id, **ended, **self._memory())
            if status.state not in ("completed", "preempted", "cancelled") and self.policy.on_failure == "stop":
                self._obey(1)
            is_own_fault = status.state == "failed" and status.exit_code != -signal.SIGKILL
            if is_own_fault and self.policy.on_failure == "first" and not self._has_ended and self._waiting:
                self._clear_waiting()
                reason = f"{slot.job.id}, the first to end, failed by an error of its own"
                self.say("stop", level=0, num_running=len(self._running), reason=reason)
            self._has_ended = True
            return
        told = {"state": status.state, "cause": status.cause, "reservation_bytes": again.needed_bytes}
        self.say("retry", job=slot.job.id, attempt=status.attempt + 1, reason=again.reason, **told)
        slot.take_back(again.needed_bytes, again.device_bytes)
        self._waiting.insert(0, slot)

    def _obey(self, level: int) -> None:
        if level <= self._stop_level:
            return
        self._stop_level = level
        self._clear_waiting()
        self.say("stop", level=level, num_running=len(self._running))
        for job_id in self._running:
            self.backend.cancel(job_id, now=level > 1)

    def _clear_waiting(self) -> None:
        for slot in self._waiting:
            if slot.job.id in self.statuses:  # it was to be started again
                self.statuses[slot.job.id] = JobStatus(slot.job.id, "pending", attempt=slot.status.attempt)
        self._waiting.clear()

    # Keeping those that run within the budget

    def _relieve(self) -> None:
        """Grow what outgrows its reservation, hand out grants, and see to those that wait at their wall."""
        self._review_favour()
        if not self._running:
            self._short = ""
            return
        free, short = self._part_bytes(), ""
        for slot in sorted(self._running.values(), key=Slot.lost_seconds, reverse=True):
            if slot.grew and monotonic() - slot.grew > _GROWN_SECONDS:
                spare = slot.spare_bytes()
                slot.reserved_bytes, free = slot.reserved_bytes - spare, free + spare
            before, wanted = slot.reserved_bytes, slot.wanted_bytes(free)
            if self.policy.force or not before or wanted <= before:
                continue
            held = max(before, slot.status.used_bytes)  # what it has taken already is not free any more
            more = min(wanted - held, self._free_for(slot, free))
            if more < wanted - held and slot.wants_more:
                short = short or f"{slot.job.id} outgrows its {format_bytes(before)} and nothing is free"
            if held + more > _LEAST_GROWTH * before:
                slot.reserved_bytes, slot.grew, free = held + more, monotonic(), free - more
                told = {"from_bytes": before, "to_bytes": slot.reserved_bytes}
                self.say("grow", job=slot.job.id, why=f"{format_bytes(free)} is left to lend", **told)
        if short and not self._short:
            self.say("short", job=None, reason=short)
        self._short = short
        self._hand_out(free)
        leaving = [slot for slot in self._running.values() if slot.set_aside is not None]
        for slot in leaving:
            if slot.status.stalled and monotonic() - (slot.set_aside or 0.0) > _LEAVING_SECONDS:
                self.backend.cancel(slot.job.id, now=True, verdict=slot.verdict)
        if leaving or self.policy.force:
            return  # one that was asked to step aside gives its memory back first
        self._see_to_stalled()
        self._see_to_headroom()

    def _review_favour(self) -> None:
        """The job for which another stepped aside goes first, until it has ended or wanted no more for a while."""
        slot = self._running.get(self._favoured or "")
        if slot is not None and slot.wants_more:
            self._favoured_at = monotonic()
        if slot is None or monotonic() - self._favoured_at > _STALL_SECONDS:
            self._favoured = None

    def _free_for(self, slot: Slot, free_bytes: int) -> int:
        """What of the free bytes this job may take: while one goes first, the others get none."""
        return free_bytes if self._favoured in (None, slot.job.id) else 0

    def _part_of(self, slot: Slot, free_bytes: int) -> int:
        """A job's part of the free bytes for a burst: all walls together stay within the budget, so that no job is
        held back by what another takes."""
        num = max(_LEAST_PARTS, len(self._running)) if self._favoured is None else 1
        return self._free_for(slot, free_bytes) // num

    def _hand_out(self, free_bytes: int) -> None:
        """Bring the walls up to date, those that come down first."""
        if self.policy.force:
            return
        if self._budget.others.num:  # with a part alone, it follows each reservation at once
            self._cap()
        changes, capacity = [], self._capacity_bytes()
        for job_id, slot in self._running.items():
            if slot.set_aside is not None:
                continue  # it has what it needs to leave
            grant, old = slot.grant_of(self._part_of(slot, free_bytes), capacity), slot.grant
            is_pressed = slot.status.stalled or slot.status.used_bytes > 0.8 * (old.wall_bytes if old else 0)
            least = 0 if is_pressed else grant.wall_bytes // 64
            more = grant.wall_bytes - (old.wall_bytes if old else 0)
            if old is None or abs(more) > least or grant.soft_bytes != old.soft_bytes:
                changes.append((more, job_id, grant))
        for more, job_id, grant in sorted(changes, key=lambda change: change[0]):
            slot = self._running[job_id]
            if more > 0:
                slot.stalled_since = None  # it has yet to show whether that is enough
            slot.grant = grant
            self.backend.resize(job_id, grant)

    def _see_to_stalled(self) -> None:
        now = monotonic()
        for slot in self._running.values():
            slot.stalled_since = (slot.stalled_since or now) if slot.status.stalled else None
        stalled = [slot for slot in self._running.values() if slot.stalled_since is not None]
        if not stalled or self._running.get(self._favoured or "") not in (None, *stalled):
            return  # the one that goes first does go on
        favoured = self._running.get(self._favoured or "")
        waited = now - min(slot.stalled_since or now for slot in ([favoured] if favoured else stalled))
        is_deadlock = len(stalled) == len(self._running)
        if waited < (_DEADLOCK_SECONDS if is_deadlock else _STALL_SECONDS):
            return
        if len(self._running) == 1:
            if self._budget.can_others_help:
                self._set_aside(stalled[0], _HELD_BY_OTHERS)
            else:
                self._give_up(stalled[0])
            return
        first = favoured or max(stalled, key=Slot.lost_seconds)
        others = [slot for slot in self._running.values() if slot is not first]
        self._favoured, self._favoured_at = first.job.id, now
        self._set_aside(cheapest(others), f"{first.job.id} waits at its wall and nothing is free")

    def _see_to_headroom(self) -> None:
        """Have a job give way before the kernel ends one: without walls, or when a neighbour took all the reserve."""
        if self._room().headroom_bytes >= self._read_budget().reserve_bytes // 8:
            return
        self._budget.read(self._in_use_bytes())  # nobody gives way to a figure that was reckoned
        headroom = self._room().headroom_bytes
        if headroom >= self._read_budget().reserve_bytes // 8:
            return
        first = cheapest(self._running.values())
        lonely = len(self._running) == 1 and not self._budget.can_others_help
        if lonely and self._budget.outsiders_bytes < self._read_budget().reserve_bytes // 2:
            self._give_up(first)
        else:
            left = f"only {format_bytes(max(0, headroom))} is left of {self._read_budget().binding.name}"
            self._set_aside(first, left)

    def _see_to_cpus(self) -> None:
        wanted = sum(slot.status.wanted_cpus for slot in self._running.values())
        if told := self._cpu.take(wanted, len(self._running), self._read_budget().num_cpus, monotonic()):
            self.say("cpu", **told)

    def _set_aside(self, slot: Slot, reason: str) -> None:
        slot.set_aside = monotonic()
        if slot.grant:
            # What waits in the kernel runs no handler: it gets the room to leave, from what is never lent.
            more = self._budget.checkpoint_bytes + self._read_budget().reserve_bytes // 8
            self.backend.resize(slot.job.id, replace(slot.grant, wall_bytes=slot.grant.wall_bytes + more))
        self.say("aside", job=slot.job.id, reason=reason, now=False)
        self.backend.cancel(slot.job.id)

    def _give_up(self, slot: Slot) -> None:
        """End a job that had the whole budget to itself and wants more."""
        slot.verdict = outgrown(self._budget.capacity_bytes, self._read_budget())
        slot.set_aside = monotonic()
        self.backend.cancel(slot.job.id, now=True, verdict=slot.verdict)

    # Admission

    def _admit(self, hold: str, stopped: Callable[[str], str]) -> DoesNotFitError | None:
        is_due = monotonic() >= self._look_at  # at those behind the first, which is next
        if is_due:
            self._look_at = monotonic() + _LOOK_SECONDS
        for slot in self._waiting[: _BACKFILL if is_due else 1]:
            if reason := stopped(slot.job.id):
                self._drop(slot, "cancelled", reason)
        if not self._waiting:
            return None
        if hold or self._short:
            self._wait(self._waiting[0], Wait("other" if hold else "memory", hold or self._short))
            return None
        return self._admit_all()

    def _write_claims(self) -> None:
        if self.claims is not None:
            claims = [slot.expectation() for slot in self._running.values()]
            self.claims.write(
                used_bytes=sum(claim.used_bytes for claim in claims),
                unused_bytes=sum(claim.unused_bytes for claim in claims),
            )

    def _admit_all(self) -> DoesNotFitError | None:
        """Start every job that fits now; those behind the first may pass it by while it waits for room."""
        while self._waiting:
            head = self._waiting[0]
            if wait := self._why_none_starts():
                self._wait(head, wait)
                return None
            if self.policy.force:
                self._start(head, None, "forced: not checked against the budget")
                continue
            num_tried = _BACKFILL if self._num_passed < _MOST_PASSED else 1
            waits: list[Wait] = []
            for slot in self._waiting[:num_tried]:
                wait = self._try_start(slot)
                if wait is None:
                    self._num_passed = 0 if slot is head else self._num_passed + 1
                    break
                waits.append(wait)
            else:
                if not self._running:
                    return self._refuse(head)
                self._wait(head, waits[0])
                return None
        return None

    def _why_none_starts(self) -> Wait | None:
        """Why no job at all may start now; None when one may."""
        most = self.policy.max_parallel
        if most is not None and len(self._running) >= most:
            return Wait("max_parallel", f"at most {most} at once (max_parallel)")
        if self.policy.force:
            return None
        if self._favoured is not None:
            return Wait("memory", f"{self._favoured} goes first, for which another job stepped aside")
        for slot in self._running.values():
            if not slot.is_measured:
                passed = "passed each phase once" if slot.job.phases else "stopped growing"
                return Wait("measuring", f"{slot.job.id} is being measured until it has {passed}")
        starting = sum(monotonic() - slot.admitted < _STARTING_SECONDS for slot in self._running.values())
        if starting >= _STARTS_PER_CPU * max(1, self._read_budget().num_cpus):
            return Wait("starting", "others are starting")
        return None

    def _try_start(self, slot: Slot) -> Wait | None:
        """Start a job if it fits; else why it does not."""
        alone, room = not self._running, self._room()
        needed = self._needed(slot, alone=alone)
        if needed is None and not alone:
            return Wait("measuring", "its size is unknown, so it runs alone first")
        if slot.num_asides >= _MOST_ASIDES and not alone:
            return Wait("memory", f"it stepped aside {slot.num_asides} times, so it runs alone next")
        if (needed or 1) > room.bytes and alone and self.forecast.is_inferred(slot.job) and slot.needed_bytes is None:
            self._start(
                slot, None, f"others like it took {format_bytes(needed or 1)}; it has all there is and its wall"
            )
            return None
        if alone and slot.needed_bytes is not None and room.bytes >= _ALMOST * (needed or 1):
            needed = min(needed or 1, room.bytes)
        if needed is not None and alone:  # the slack is for those beside whom it will run
            needed = max(needed, min(self._needed(slot, alone=False) or 0, room.bytes))
        if (needed or 1) > room.bytes:
            return Wait("memory", f"it needs {format_bytes(needed or 1)}; {room.explain()}")
        why = room.explain()
        if slot.job.device_bytes is not None:
            expected = self.forecast.predict(slot.job)
            measured = max(expected.device_bytes.values(), default=0) if expected else 0
            on_device = slot.needed_device_bytes or round(measured * (1 + self.policy.slack)) or slot.job.device_bytes
            device, text = place(self._read_budget().devices, device_claims(self._running.values()), on_device)
            if device is None:
                return Wait("device", text)
            slot.device, slot.device_bytes, why = device.uuid, on_device, f"{why}; {text}"
        self._start(slot, needed, why)
        return None

    def _needed(self, slot: Slot, *, alone: bool) -> int | None:
        """What the job reserves; None for one of unknown size, which runs alone."""
        expected = self.forecast.predict(slot.job)
        if slot.needed_bytes is not None:
            is_measured = expected is not None and expected.method == "measured"
            return min(
                max(slot.needed_bytes, expected.private_bytes if expected and is_measured else 0),
                self._budget.most_bytes,
            )
        if expected is None:
            return None
        # A job that runs alone may use all there is, so its like's peak is enough without the slack.
        return expected.private_bytes if alone else reservation_bytes(expected, self.policy.slack)

    def _start(self, slot: Slot, reserved: int | None, why: str) -> None:
        self._waiting.remove(slot)
        self._why_waiting, self._lacking_since = "", None
        before, job = self._memory(), slot.job
        expected = self.forecast.predict(job)
        slot.reserved_bytes = max(1, reserved) if reserved is not None else 0
        slot.expected_bytes = slot.reserved_bytes
        slot.by_hint = expected is not None and expected.method == "declared" and slot.needed_bytes is None
        slot.status, slot.admitted = JobStatus(job.id, "pending"), monotonic()
        self._running[job.id], self.statuses[job.id] = slot, slot.status
        if not self.policy.force:
            slot.grant = slot.grant_of(
                self._part_bytes() // max(_LEAST_PARTS, len(self._running)), self._capacity_bytes()
            )
            if self._budget.others.num:
                self._cap()
        if slot.device is not None:
            env = {"CUDA_VISIBLE_DEVICES": slot.device, "MEMFIT_DEVICE_BYTES": str(slot.device_bytes)}
            job = replace(job, env=dict(job.env) | env)
        self.backend.submit(job, slot.grant)
        told = {"reservation_bytes": reserved, "num_running": len(self._running), "why": why, "device": slot.device}
        self.say("admit", job=job.id, **told, **before)

    def _memory(self) -> dict[str, int]:
        """What is used under the limit that binds now, and what the running jobs map (PSS), in bytes."""
        binding = self._read_budget().binding
        used = {"limit_bytes": binding.limit_bytes, "used_bytes": binding.used_bytes}
        return used | {"pss_bytes": sum(slot.status.pss_bytes for slot in self._running.values())}

    def _wait(self, slot: Slot, wait: Wait) -> None:
        short, _, arithmetic = wait.reason.partition("; ")
        if short != self._why_waiting:
            self._why_waiting, running = short, len(self._running)
            self.say("wait", job=slot.job.id, num_running=running, reason=short, arithmetic=arithmetic, on=wait.on)

    def _refuse(self, slot: Slot) -> DoesNotFitError | None:
        """Drop a job that does not fit although no other runs, when that has lasted; the others may fit."""
        if self._budget.can_others_help and (self._needed(slot, alone=True) or 1) <= self._budget.most_bytes:
            self._wait(slot, Wait("memory", _HELD_BY_OTHERS))
            return None
        self._lacking_since = self._lacking_since or monotonic()
        # One that has given way before came in when there was room, so there will be some again.
        if monotonic() - self._lacking_since < _LACK_SECONDS * (1 + 20 * slot.num_asides):
            return None
        needed, expected = self._needed(slot, alone=True) or 1, self.forecast.predict(slot.job)
        error = refusal(slot, needed, expected, self._room(), self._read_budget())
        self._drop(slot, "failed", error.what)
        if self.policy.on_failure == "stop":
            self._obey(1)
        return error

    def _record(self, slot: Slot, verdict: Verdict) -> None:
        """Have a job that does not run end so, wherever its end is read."""
        self.backend.cancel(slot.job.id, verdict=verdict)
        slot.status = replace(slot.status, state=verdict.state, cause=verdict.cause)
        self.statuses[slot.job.id] = slot.status

    def _drop(self, slot: Slot, state: State, cause: str) -> None:
        """Have a job that waits end so, without another start."""
        self._waiting.remove(slot)
        if slot.job.id not in self.statuses:
            slot.status = replace(slot.status, attempt=0)
        self._record(slot, Verdict(state, cause))
        self.say("end", job=slot.job.id, state=state, cause=cause, exit_code=None, **self._memory())
