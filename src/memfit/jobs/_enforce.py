"""Does what the policy decides over running jobs: grows reservations, moves limits, asks jobs to give way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from memfit.jobs import policy
from memfit.jobs._admission import LocalAdmission
from memfit.jobs._job import Backend, Verdict
from memfit.jobs._reservation import Entry, Wait
from memfit.jobs._retry import WHOLE
from memfit.memory import HOST, Sizes
from memfit.units import MIB, format_bytes

#: How long a job that waits at its limit may take to stop, and how long one goes first to which another gave way.
_LEAVING_SECONDS, _FAVOUR_SECONDS = 2.0, 10.0
_LEAST_GROWTH = 1.02  # a reservation that grows by less than this share is not worth a word
_WORTH_A_LINE = 0.02  # the least share of the limit by which a reservation grows for a line that all see
_PRESSED = 0.8  # a limit rises at once for a job that uses this share of it; else by a 64th of it at least
#: A job that outgrew its part of a device gets this share of what it uses on top, or this step if that is more.
_DEVICE_GROWTH, _DEVICE_STEP_BYTES = 1.15, 32 * MIB


class Enforcement:
    """Holds the running jobs of one run within its budget; ``say`` gets each event: ``grow``, ``short``, ``aside``."""

    def __init__(self, backend: Backend, admission: LocalAdmission, say: Callable[..., None]) -> None:
        self.backend, self.walls, self.admission = backend, backend.enforcer, admission
        admission.forecast.has_walls, admission.least_bytes = self.walls is not None, backend.traits.least_bytes
        self._running = admission.running
        self._now, self._say = admission.now, say
        self._short = ""
        self._favoured = ""
        self._favoured_at = 0.0
        self._capped_at: float | None = None

    def why_none_starts(self) -> Wait | None:
        """Return why running jobs need what is free; None when they do not."""
        if self._short:
            return Wait("memory", self._short)
        if self._favoured:
            return Wait("memory", f"{self._favoured} goes first: another job gave way to it")
        return None

    def first_grant(self, entry: Entry) -> Sizes:
        """Give a job that is about to start its grant; return what it may take of each of its devices."""
        if self.admission.policy.force or not self.admission.is_shared:
            return Counter()
        free = self.admission.budget.parts()
        # The others' limits come down first: a process that starts while all memory is taken fails to fork.
        self._hand_out(free[HOST], is_exact=True)
        num = max(8, len(self._running))
        return Counter({place: entry.reserved[place] + free[place] // num for place in entry.devices})

    def relieve(self) -> None:
        if self.admission.policy.force or not self.admission.is_shared:
            return
        self._review_favour()
        self.admission.budget.fresh()
        if self._capped_at != self.admission.budget.read_at:
            self._cap()
        if not self._running:
            self._short = ""
            return
        self._hand_out(self._grow_all())
        leaving = [entry for entry in self._running.values() if entry.progress.set_aside is not None]
        for entry in leaving:
            if entry.status.stalled and self._now() - (entry.progress.set_aside or 0.0) > _LEAVING_SECONDS:
                self.backend.cancel(entry.job.id, now=True, verdict=entry.progress.verdict)
        if leaving:
            return  # one that was asked to stop gives its memory back first
        self._relieve_stalled()
        self._enforce_headroom()

    def _grow_all(self) -> int:
        free, capacity, jobs = self.admission.budget.parts(), self.admission.capacity_bytes(), self.admission.held()
        has_walls, least = self.walls is not None, self.admission.least_bytes
        grown = policy.grow(jobs, free[HOST], capacity, self._favoured, has_walls=has_walls, least=least)
        for job in jobs:
            entry, size = self._running[job.id], grown.reserved[job.id]
            if size != job.reserved:
                entry.reserved[HOST] = size
            entry.expected[HOST] = policy.wanted(job, capacity, has_walls=has_walls)
            if 0 < _LEAST_GROWTH * entry.progress.told_bytes < size:
                before, entry.progress.told_bytes = entry.progress.told_bytes, size
                self._say_grown(entry, HOST, before, f"{format_bytes(grown.free)} available")
            for place in entry.devices:
                self._grow_device(entry, place, free)
        short = ""
        if grown.short:
            had = format_bytes(self._running[grown.short].reserved[HOST])
            short = f"{grown.short} outgrew its {had} and what is free is reserved"
            if not self._short:
                text = f"Memory is short, no job starts now: {short}"
                self._say("short", job=None, outgrew=grown.short, reason=short, text=text)
        self._short = short
        return grown.free

    def _grow_device(self, entry: Entry, place: str, free: Sizes) -> None:
        """Grow what a job has of a device once it uses more; jobs elsewhere lose nothing by it."""
        before, used = entry.reserved[place], entry.used[place]
        step = min(_DEVICE_STEP_BYTES, free[place] // 8)
        wanted = max(entry.expected[place], round(used * _DEVICE_GROWTH), used + step) if used > before else 0
        held = max(before, used)
        more = min(wanted - held, free[place])
        if before and wanted > before and held + more > _LEAST_GROWTH * before:
            entry.reserved[place] = held + more
            free[place] -= more
            where = self.admission.budget.rooms()[place].where
            self._say_grown(entry, place, before, f"{format_bytes(free[place])} available {where}")

    def _say_grown(self, entry: Entry, place: str, before: int, why: str) -> None:
        now = entry.reserved[place]
        text = f"{entry.job.id} grew: {format_bytes(before)} to {format_bytes(now)} reserved ({why})"
        fields: dict[str, Any] = {"from_bytes": before, "to_bytes": now, "place": place, "why": why}
        if now - before < _WORTH_A_LINE * self.admission.budget.now.limit_bytes:
            fields["level"] = "verbose"
        self._say("grow" if place == HOST else "grow_device", job=entry.job.id, **fields, text=text)

    def _cap(self) -> None:
        admission, budget = self.admission, self.admission.budget
        self._capped_at = budget.read_at
        if self.walls is None:
            return
        spare, entries = budget.checkpoint_bytes + budget.now.reserve_bytes // 8, self._running.values()
        # What jobs use stays, and each keeps what a process needs: else one that starts now fails.
        held = sum(max(admission.least_bytes, entry.status.used_bytes) for entry in entries)
        # Other runs have counted what this one reserved: it stays, whatever they take meanwhile.
        reserved = sum(entry.reserved[HOST] for entry in entries) if budget.others.num else 0
        self.walls.cap(max(admission.least_bytes, held, reserved, admission.capacity_bytes()) + spare)

    def _review_favour(self) -> None:
        """Let the job that another gave way to go first, until it has ended or wanted no more for a while."""
        entry = self._running.get(self._favoured)
        if entry is not None and entry.status.stalled:
            self._favoured_at = self._now()
        if entry is None or self._now() - self._favoured_at > _FAVOUR_SECONDS:
            self._favoured = ""

    def _hand_out(self, free_bytes: int, *, is_exact: bool = False) -> None:
        """Move the limits of all jobs, those that come down first; by little only if they are to be exact."""
        if self.admission.budget.others.num:  # with a part alone, it follows each reservation at once
            self._cap()
        admission, changes = self.admission, []
        jobs, capacity, least = admission.held(), admission.capacity_bytes(), admission.least_bytes
        for job_id, wall in policy.walls(jobs, free_bytes, capacity, self._favoured, least=least).items():
            entry = self._running[job_id]
            if entry.progress.set_aside is not None:
                continue  # it has what it needs to leave
            old = entry.wall_bytes or 0
            is_pressed = entry.status.stalled or entry.status.used_bytes > _PRESSED * old
            if not old or abs(wall - old) > (0 if is_pressed or is_exact else wall // 64):
                changes.append((wall - old, job_id, wall))
        for more, job_id, wall in sorted(changes):
            entry = self._running[job_id]
            if more > 0:
                entry.progress.stalled_since = None  # it has yet to show whether that is enough
            entry.wall_bytes = wall
            if self.walls is not None:
                self.walls.grant(job_id, wall)

    def _relieve_stalled(self) -> None:
        """Ask a job to give way to one that waits at its limit, if the policy says so."""
        found = policy.relieve(self.admission.held(), self._favoured)
        if found is None:
            return
        entry = self._running[found.id]
        if found.id == found.to and self._has_all(entry):
            self._give_up(entry)
        elif found.id == found.to:
            self._set_aside(entry, self.admission.held_in_words())
        else:
            self._favoured, self._favoured_at = found.to, self._now()
            self._set_aside(entry, f"{found.to} waits for memory and what is free is reserved", to=found.to)

    def _enforce_headroom(self) -> None:
        """Ask a job to give way before the kernel kills one: without groups, or when others took the reserve."""
        admission, budget = self.admission, self.admission.budget
        least = admission.budget.fresh().reserve_bytes // 8
        if admission.budget.rooms()[HOST].headroom_bytes >= least:
            return
        budget.read()  # measured, not reckoned
        headroom, least = admission.budget.rooms()[HOST].headroom_bytes, budget.now.reserve_bytes // 8
        if headroom >= least:
            return
        first = self._running[policy.cheapest(admission.held()).id]
        lonely = len(self._running) == 1 and self._has_all(first)
        if lonely and budget.outsiders_bytes < budget.now.reserve_bytes // 2:
            self._give_up(first)
        else:
            left = f"only {format_bytes(max(0, headroom))} is left of {budget.now.binding.name}"
            self._set_aside(first, "; ".join(filter(None, (left, budget.held().words))))

    def _has_all(self, entry: Entry) -> bool:
        """Return True if a job can get no more than it has, also once others gave back what they hold."""
        here, most = self.admission.budget.here(0)[HOST], self.admission.budget.most(0)[HOST]
        return most <= here or entry.status.used_bytes >= WHOLE * most

    def _set_aside(self, entry: Entry, reason: str, *, to: str | None = None) -> None:
        """Ask a job to checkpoint and stop; it is restarted later."""
        entry.progress.set_aside = self._now()
        if entry.wall_bytes and self.walls is not None:
            # A job that waits in the kernel runs no signal handler. It gets the room to leave, from the reserve.
            more = self.admission.budget.checkpoint_bytes + self.admission.budget.fresh().reserve_bytes // 8
            self.walls.grant(entry.job.id, entry.wall_bytes + more)
        text = f"{entry.job.id} gives way and is restarted later: {reason}"
        self._say("aside", job=entry.job.id, reason=reason, now=False, to=to, text=text)
        self.backend.cancel(entry.job.id)

    def _give_up(self, entry: Entry) -> None:
        """End a job that had the whole budget and wants more."""
        budget = self.admission.budget.fresh()
        binding, capacity_bytes = budget.binding, self.admission.budget.most(0)[HOST]
        grows = entry.status.growth
        remedy = "more memory only delays its end" if grows else "raise that limit or make the job smaller"
        entry.progress.verdict = Verdict(
            "out_of_memory",
            f"it needs more than the whole budget of {format_bytes(capacity_bytes)} under {binding.name} of "
            f"{format_bytes(binding.limit_bytes)} ({binding.source}; {format_bytes(budget.reserve_bytes)} reserve): "
            f"ended at its limit by memfit, before the kernel would; {remedy}",
        )
        entry.progress.set_aside = self._now()
        self.backend.cancel(entry.job.id, now=True, verdict=entry.progress.verdict)
