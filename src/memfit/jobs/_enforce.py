"""Keeps running jobs within the budget: grows reservations, moves limits, and asks jobs to give way.

A job that passes its reservation gets more from what is free. When nothing is free, no job starts until others have
ended, and a job at its limit waits. When that lasts, the job whose end loses the least work is asked to checkpoint and
stop. It is restarted later with what it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from memfit.jobs._admission import HELD_BY_OTHERS, LocalAdmission
from memfit.jobs._job import Backend, Verdict
from memfit.jobs._reservation import Reservation, Wait, cheapest
from memfit.memory import HOST, Sizes
from memfit.units import format_bytes

#: How long a job may wait at its limit, and how long when all that run wait at theirs.
_STALL_SECONDS, _DEADLOCK_SECONDS = 10.0, 0.5
#: What is free is divided by this number at least, so that not every start and end moves the limits of all jobs.
_LEAST_PARTS = 8
#: How long a grown reservation stays before its unused part goes back; how long a job that waits at its limit may take
#: to stop.
_GROWN_SECONDS, _LEAVING_SECONDS = 1.0, 2.0
#: A reservation grows by at least this factor: smaller steps are not worth a word.
_LEAST_GROWTH = 1.02


class Enforcement:
    """Holds the running jobs of one run within its budget.

    ``say`` is called with the kind and the fields of each event: ``grow``, ``short``, ``aside``.
    """

    def __init__(self, backend: Backend, admission: LocalAdmission, say: Callable[..., None]) -> None:
        self.backend, self.walls, self.admission = backend, backend.enforcer, admission
        self._running = admission.running
        self._now, self._say = admission.now, say
        self._short = ""
        self._favoured: str | None = None
        self._favoured_at = 0.0
        self._capped_at: float | None = None

    def why_none_starts(self) -> Wait | None:
        """Return why running jobs need what is free; None when they do not."""
        if self._short:
            return Wait("memory", self._short)
        if self._favoured is not None:
            return Wait("memory", f"{self._favoured} goes first: another job gave way to it")
        return None

    def first_grant(self, entry: Reservation) -> Sizes:
        """Give a job that is about to start its grant; return what it may take of each of its devices."""
        if self.admission.policy.force or not self.admission.is_shared:
            return Counter()
        free, num = self.admission.parts(), max(_LEAST_PARTS, len(self._running))
        entry.wall_bytes = entry.wall_of(free[HOST] // num, self.admission.capacity_bytes())
        if self.admission.budget.others.num:
            self._cap()
        if self.walls is not None:
            self.walls.grant(entry.job.id, entry.wall_bytes)
        return Counter({place: entry.reserved[place] + free[place] // num for place in entry.devices})

    def relieve(self) -> None:
        """Grow reservations, hand out grants, and help jobs that wait at their limit."""
        if self.admission.policy.force or not self.admission.is_shared:
            return
        self._review_favour()
        self.admission.read_budget()
        if self._capped_at != self.admission.budget.read_at:
            self._cap()
        if not self._running:
            self._short = ""
            return
        self._hand_out(self._grow_all())
        leaving = [entry for entry in self._running.values() if entry.set_aside is not None]
        for entry in leaving:
            if entry.status.stalled and self._now() - (entry.set_aside or 0.0) > _LEAVING_SECONDS:
                self.backend.cancel(entry.job.id, now=True, verdict=entry.verdict)
        if leaving:
            return  # one that was asked to stop gives its memory back first
        self._relieve_stalled()
        self._enforce_headroom()

    def _grow_all(self) -> int:
        """Grow and shrink reservations; return what is free on the host then."""
        free, short = self.admission.parts(), ""
        for entry in sorted(self._running.values(), key=Reservation.seconds_since_checkpoint, reverse=True):
            for place in entry.reserved:
                lack = self._grow(entry, place, free)
                short = short or lack
        if short and not self._short:
            self._say("short", job=None, reason=short, text=f"Memory is short, no job starts now: {short}")
        self._short = short
        return free[HOST]

    def _grow(self, entry: Reservation, place: str, free: Sizes) -> str:
        """Grow a reservation to what its job wants there; return why what is free was not enough, or nothing."""
        now = self._now()
        if now - entry.grew.get(place, now) > _GROWN_SECONDS:
            spare = entry.spare_bytes(place)
            entry.reserved[place] -= spare
            free[place] += spare
        before, wanted = entry.reserved[place], entry.wanted_bytes(free[place], place)
        if not before or wanted <= before:
            return ""
        held = max(before, entry.used[place])  # what it has taken already is not free any more
        more = min(wanted - held, self._free_for(entry, free[place]) if place == HOST else free[place])
        if held + more > _LEAST_GROWTH * before:
            entry.reserved[place], entry.grew[place] = held + more, now
            free[place] -= more
            where = self.admission.rooms()[place].where
            why = f"{format_bytes(free[place])} available{where and ' '}{where}"
            fields = {"from_bytes": before, "to_bytes": held + more, "place": place, "why": why}
            text = f"{entry.job.id} grew: {format_bytes(before)} to {format_bytes(held + more)} reserved ({why})"
            self._say("grow" if place == HOST else "grow_device", job=entry.job.id, **fields, text=text)
        # One that outgrows its part of a device takes nothing from jobs elsewhere: those may start.
        if place == HOST and more < wanted - held and entry.wants_more():
            return f"{entry.job.id} outgrew its {format_bytes(before)} and nothing is free"
        return ""

    def _cap(self) -> None:
        """Move the limit above all jobs, a second barrier above their own limits."""
        admission, budget = self.admission, self.admission.budget
        self._capped_at = budget.read_at
        if self.walls is None:
            return
        spare = budget.checkpoint_bytes + budget.now.reserve_bytes // 8
        # Other runs have counted what this one reserved: it stays, whatever they take meanwhile.
        reserved = sum(entry.reserved[HOST] for entry in self._running.values()) if budget.others.num else 0
        self.walls.cap(max(1, reserved, admission.capacity_bytes()) + spare)

    def _review_favour(self) -> None:
        """Let the job that another gave way to go first, until it has ended or wanted no more for a while."""
        entry = self._running.get(self._favoured or "")
        if entry is not None and entry.wants_more():
            self._favoured_at = self._now()
        if entry is None or self._now() - self._favoured_at > _STALL_SECONDS:
            self._favoured = None

    def _free_for(self, entry: Reservation, free_bytes: int) -> int:
        """Return what of the free bytes this job may take: while one goes first, the others get none."""
        return free_bytes if self._favoured in (None, entry.job.id) else 0

    def _hand_out(self, free_bytes: int) -> None:
        """Move the limits of all jobs, those that come down first."""
        if self.admission.budget.others.num:  # with a part alone, it follows each reservation at once
            self._cap()
        changes, capacity = [], self.admission.capacity_bytes()
        # Each has a part for a burst. All limits together stay within the budget, so no job is held back by another.
        num = max(_LEAST_PARTS, len(self._running)) if self._favoured is None else 1
        for job_id, entry in self._running.items():
            if entry.set_aside is not None:
                continue  # it has what it needs to leave
            wall, old = entry.wall_of(self._free_for(entry, free_bytes) // num, capacity), entry.wall_bytes or 0
            is_pressed = entry.status.stalled or entry.status.used_bytes > 0.8 * old
            if not old or abs(wall - old) > (0 if is_pressed else wall // 64):
                changes.append((wall - old, job_id, wall))
        for more, job_id, wall in sorted(changes):
            entry = self._running[job_id]
            if more > 0:
                entry.stalled_since = None  # it has yet to show whether that is enough
            entry.wall_bytes = wall
            if self.walls is not None:
                self.walls.grant(job_id, wall)

    def _relieve_stalled(self) -> None:
        """Ask a job to give way when others have waited at their limits for too long."""
        now = self._now()
        for entry in self._running.values():
            entry.stalled_since = (entry.stalled_since or now) if entry.status.stalled else None
        stalled = [entry for entry in self._running.values() if entry.stalled_since is not None]
        favoured = self._running.get(self._favoured or "")
        if not stalled or favoured not in (None, *stalled):
            return  # the one that goes first does go on
        waited = now - min(entry.stalled_since or now for entry in ([favoured] if favoured else stalled))
        is_deadlock = len(stalled) == len(self._running)
        if waited < (_DEADLOCK_SECONDS if is_deadlock else _STALL_SECONDS):
            return
        if len(self._running) == 1:
            if self.admission.budget.can_others_help:
                self._set_aside(stalled[0], HELD_BY_OTHERS)
            else:
                self._give_up(stalled[0])
            return
        first = favoured or max(stalled, key=Reservation.seconds_since_checkpoint)
        others = [entry for entry in self._running.values() if entry is not first]
        self._favoured, self._favoured_at = first.job.id, now
        self._set_aside(cheapest(others), f"{first.job.id} waits for memory and nothing is free")

    def _enforce_headroom(self) -> None:
        """Ask a job to give way before the kernel kills one: without groups, or when others took the reserve."""
        admission, budget = self.admission, self.admission.budget
        least = admission.read_budget().reserve_bytes // 8
        if admission.rooms()[HOST].headroom_bytes >= least:
            return
        budget.read(admission.in_use())  # measured, not reckoned
        headroom, least = admission.rooms()[HOST].headroom_bytes, budget.now.reserve_bytes // 8
        if headroom >= least:
            return
        first = cheapest(self._running.values())
        lonely = len(self._running) == 1 and not budget.can_others_help
        if lonely and budget.outsiders_bytes < budget.now.reserve_bytes // 2:
            self._give_up(first)
        else:
            self._set_aside(first, f"only {format_bytes(max(0, headroom))} is left of {budget.now.binding.name}")

    def _set_aside(self, entry: Reservation, reason: str) -> None:
        """Ask a job to checkpoint and stop; it is restarted later."""
        entry.set_aside = self._now()
        if entry.wall_bytes and self.walls is not None:
            # A job that waits in the kernel runs no signal handler. It gets the room to leave, from the reserve.
            more = self.admission.budget.checkpoint_bytes + self.admission.read_budget().reserve_bytes // 8
            self.walls.grant(entry.job.id, entry.wall_bytes + more)
        text = f"{entry.job.id} gives way and is restarted later: {reason}"
        self._say("aside", job=entry.job.id, reason=reason, now=False, text=text)
        self.backend.cancel(entry.job.id)

    def _give_up(self, entry: Reservation) -> None:
        """End a job that had the whole budget and wants more."""
        budget = self.admission.read_budget()
        binding, capacity_bytes = budget.binding, self.admission.budget.capacity_bytes
        entry.verdict = Verdict(
            "out_of_memory",
            f"it needs more than the whole budget of {format_bytes(capacity_bytes)} under {binding.name} of "
            f"{format_bytes(binding.limit_bytes)} ({binding.source}; {format_bytes(budget.reserve_bytes)} reserve): "
            "ended at its limit by memfit, before the kernel would; raise that limit or make the job smaller",
        )
        entry.set_aside = self._now()
        self.backend.cancel(entry.job.id, now=True, verdict=entry.verdict)
