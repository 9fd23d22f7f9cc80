"""Decides whether a job may start now: by the budget, by what other runs on this host claim, and by the forecast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple

from memfit.errors import DoesNotFitError
from memfit.jobs._budget_watch import BudgetWatch, ReadBudget
from memfit.jobs._forecast import Forecast
from memfit.jobs._job import Job
from memfit.jobs._placement import choose, count_gpus
from memfit.jobs._policy import Policy
from memfit.jobs._reservation import Reservation, Wait
from memfit.memory import HOST, Budget, Claim, Claims, Footprint, Lendable, Others, Sizes, reservation_bytes
from memfit.units import format_bytes

#: A job that stepped aside so often runs alone the next time.
_MOST_ASIDES = 3
#: A job that is to have so much starts with this share of it: what is free is never to the byte what it was.
_ALMOST = 0.97
HELD_BY_OTHERS = "another run on this host has the memory that it needs"


class Admitted(NamedTuple):
    """A job may start.

    Attributes:
        reserved: What it reserves by place; nothing on the host when its size is unknown and it has the whole budget.
        why: Why it fits, in words.
        is_routine: Whether that is only the sum of what may be lent, which the log need not repeat.
    """

    reserved: Sizes
    why: str
    is_routine: bool = False


class LocalAdmission:
    """Admits jobs under the budget of this host.

    A queued job, one that was submitted and has not started, counts for nothing here.

    Args:
        read_budget: Gives the budget as it is now.
        policy: How jobs are admitted.
        known: Footprints measured earlier, each with the stage and the parameters of its job.
        claims: What other supervisors on this host have lent; None when there is none to ask.
        now: Monotonic seconds.

    Attributes:
        running: The jobs that were submitted and have not ended, by id. The scheduler keeps it.
    """

    def __init__(
        self,
        read_budget: ReadBudget,
        *,
        policy: Policy | None = None,
        known: Sequence[tuple[str, Mapping[str, str], Footprint]] = (),
        claims: Claims | None = None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self.policy, self.claims, self.now = policy or Policy(), claims, now
        self.budget = BudgetWatch(read_budget, now, claims.others if claims else Others)
        self.forecast = Forecast()
        for stage, params, footprint in known:
            self.forecast.learn(Job("known", command=("-",), params=params, stage=stage), footprint)
        self.running: dict[str, Reservation] = {}

    # What is there

    def in_use(self) -> Sizes:
        """What the running jobs use now, by place."""
        return sum((entry.used for entry in self.running.values()), Counter[str]())

    def read_budget(self) -> Budget:
        """The budget, read anew when the last reading is too old."""
        if self.budget.is_due:
            self.budget.read(self.in_use())
        return self.budget.now

    def rooms(self, claim_of: Callable[[Reservation], Claim] = Reservation.expectation) -> dict[str, Lendable]:
        """What may be lent now at each place, beside what running jobs are expected to take."""
        self.read_budget()
        return self.budget.lendable(self.in_use(), self._claims(claim_of))

    def parts(self) -> Sizes:
        """What of the free bytes at each place this run may hand out to its running jobs."""
        self.read_budget()
        return self.budget.parts(self.in_use(), self._claims(Reservation.claim))

    def capacity_bytes(self) -> int:
        """What all jobs may take now: of what is free, other runs on this host may take a part at the same time."""
        return self.budget.capacity_bytes - max(0, self.rooms(Reservation.claim)[HOST].bytes) + self.parts()[HOST]

    def _claims(self, claim_of: Callable[[Reservation], Claim]) -> list[Claim]:
        return [claim_of(entry) for entry in self.running.values()]

    def memory(self) -> tuple[dict[str, int], str]:
        """What is used under the limit that binds now, and what the running jobs map (PSS): in bytes, and in words."""
        binding, pss = self.read_budget().binding, sum(entry.status.pss_bytes for entry in self.running.values())
        sizes = {"limit_bytes": binding.limit_bytes, "used_bytes": binding.used_bytes, "pss_bytes": pss}
        own = f", {format_bytes(pss)} of it by the jobs (PSS)" if pss else ""
        return sizes, f"; {format_bytes(binding.used_bytes)} of {format_bytes(binding.limit_bytes)} used{own}"

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Keep other runs from deciding, so that no two give the same free bytes away; tell them what was decided."""
        with self.claims.deciding() if self.claims else nullcontext(Others()) as self.budget.others:
            yield
            if self.claims is not None:
                unused = sum((claim.unused for claim in self._claims(Reservation.expectation)), Counter[str]())
                self.claims.write(used=self.in_use(), unused=unused)

    # What jobs take

    def learn(self) -> list[dict[str, Any]]:
        """Take in what the running jobs took so far, and let the reservations of those like them follow.

        Returns:
            The fields of a ``footprint`` event for each job that changed what is known.
        """
        for entry in self.running.values():
            entry.hold_devices(self._measured(entry), self.policy.slack)
        found = [self._learn(entry) for entry in self.running.values()]
        if any(fields is not None for fields in found):
            self._revise()
        return [fields for fields in found if fields]

    def _learn(self, entry: Reservation) -> dict[str, Any] | None:
        """Take in what a job took so far if that speaks for its like, else return None; the event when it is news."""
        status, footprint = entry.status, entry.status.footprint
        self.budget.checkpoint_bytes = max(self.budget.checkpoint_bytes, status.checkpoint_bytes)
        if footprint is None or (footprint.sizes <= entry.learned and status.state != "completed"):
            return None
        known, is_whole = self._measured(entry), status.state == "completed" or status.settled
        outgrew = known is not None and (status.peak_bytes > known.private_bytes or footprint.exceeds(known))
        if not (is_whole or outgrew):
            return None
        if not is_whole and known is not None and not known.bytes_per_device:
            footprint = replace(footprint, device_bytes={})  # what it takes there still grows
        entry.learned |= footprint.sizes
        self.forecast.learn(entry.job, footprint, is_final=status.state == "completed")
        if known is not None and not footprint.exceeds(known, 1.01):
            return {}
        needed = reservation_bytes(footprint, self.policy.slack)
        told = {"footprint": footprint.to_dict(), "reservation_bytes": needed, "in_use_bytes": self.in_use()[HOST]}
        return {"job": entry.job.id} | told

    def _revise(self) -> None:
        """Reservations of running jobs follow what was measured on their like; a hint may also turn out too large."""
        for entry in self.running.values():
            if expected := self._measured(entry):
                entry.revise(expected, self.policy.slack)

    # Who may start

    def why_none_starts(self) -> Wait | None:
        """Why no job at all may start now; None when one may."""
        most = self.policy.max_parallel
        if most is not None and len(self.running) >= most:
            return Wait("max_parallel", f"at most {most} at once (max_parallel)")
        if self.policy.force:
            return None
        for entry in self.running.values():
            if not entry.is_queued and not entry.is_measured:
                passed = "passed each phase once" if entry.job.phases else "stopped growing"
                return Wait("measuring", f"{entry.job.id} is being measured until it has {passed}")
        return None

    @property
    def is_alone(self) -> bool:
        """True when a job that starts now would run alone."""
        return all(entry.is_queued for entry in self.running.values())

    def admit(self, entry: Reservation) -> Admitted | Wait:
        """Admit a job if it fits now; else say why it does not."""
        alone, rooms = self.is_alone, self.rooms()
        if self.policy.force:
            devices = choose(rooms, entry.job.num_devices, 1, held=())
            reserved = Counter[str]() if isinstance(devices, Wait) else devices
            return Admitted(reserved, "forced: not checked against the budget")
        needed, room, is_inferred = self.needed(entry, alone=alone), rooms[HOST], self.forecast.is_inferred(entry.job)
        if needed is None and not alone:
            return Wait("measuring", "its size is unknown, so it runs alone first")
        if entry.num_asides >= _MOST_ASIDES and not alone:
            return Wait("memory", f"it stepped aside {entry.num_asides} times, so it runs alone next")
        why, is_routine = room.explain(), True
        if (needed or 1) > room.bytes and alone and is_inferred and entry.needed_bytes is None:
            why = f"others like it took {format_bytes(needed or 1)}; it has all there is and its wall"
            needed, is_routine = None, False
        elif alone and needed is not None:
            if entry.needed_bytes is not None and room.bytes >= _ALMOST * needed:
                needed = min(needed, room.bytes)
            # The slack is for those beside whom it will run.
            needed = max(1, needed, min(self.needed(entry, alone=False) or 0, room.bytes))
        devices = self._devices_for(entry, rooms)
        if isinstance(devices, Wait):
            return devices
        reserved = Counter({HOST: max(1, needed)} if needed is not None else {}) + devices
        for place, size in {HOST: 1, **reserved}.items():
            if size > rooms[place].bytes:
                return _lack(entry, place, size, rooms[place])
        return Admitted(reserved, "; ".join([why, *(rooms[place].explain() for place in devices)]), is_routine)

    def _devices_for(self, entry: Reservation, rooms: Mapping[str, Lendable]) -> Sizes | Wait:
        """What a job would reserve on each of its devices, whether or not there is room; or why there are none."""
        num = entry.job.num_devices
        held = self.budget.devices_of_others.keys() | {
            place for other in self.running.values() for place in other.devices
        }
        least, need = self._device_needs(entry)
        devices = choose(rooms, num, need, held)
        if need is None or least is None or isinstance(devices, Wait):
            return devices
        for place in devices.keys() - held:  # the slack is for those beside whom it runs
            if least <= rooms[place].bytes < need:
                devices[place] = rooms[place].bytes
        too_large = any(size > rooms[place].bytes for place, size in devices.items())
        if too_large and self.is_alone and self.forecast.is_inferred(entry.job) and not entry.needed_device_bytes:
            return choose(rooms, num, None, held)  # others like it took more: it has all there is
        return devices

    def needed(self, entry: Reservation, *, alone: bool) -> int | None:
        """What a job reserves; None for one of unknown size, which runs alone."""
        expected = self.forecast.predict(entry.job)
        if entry.needed_bytes is not None:
            measured = self._measured(entry)
            return min(max(entry.needed_bytes, measured.private_bytes if measured else 0), self.budget.most_bytes)
        if expected is None:
            return None
        # A job that runs alone may use all there is, so its like's peak is enough without the slack.
        return expected.private_bytes if alone else reservation_bytes(expected, self.policy.slack)

    def _device_needs(self, entry: Reservation) -> tuple[int | None, int | None]:
        """The least and what a job is to have of each of its devices; None when that is not known."""
        measured = self._measured(entry)
        if entry.needed_device_bytes:
            need = min(entry.needed_device_bytes, self.budget.most_device_bytes(entry.job.num_devices))
            return round(_ALMOST * need), need
        return entry.device_need(measured, 0.0), entry.device_need(measured, self.policy.slack)

    def _measured(self, entry: Reservation) -> Footprint | None:
        """What a job will take, if that was measured on its like."""
        expected = self.forecast.predict(entry.job)
        return expected if expected is not None and expected.method == "measured" else None

    def waits_for_others(self, entry: Reservation) -> bool:
        """True if a job that does not fit will fit once other runs on this host have ended."""
        budget, num = self.budget, entry.job.num_devices
        if (self.needed(entry, alone=True) or 1) > budget.most_bytes:
            return False
        if num and (self._device_needs(entry)[0] or 1) > budget.most_device_bytes(num):
            return False
        return budget.can_others_help or bool(num and budget.devices_of_others)

    def refusal(self, entry: Reservation, wait: Wait) -> DoesNotFitError:
        """Return the error for a job that waits although no other runs."""
        job, expected, binding = entry.job, self.forecast.predict(entry.job), self.read_budget().binding
        measured = expected if expected is not None and expected.method == "measured" else None
        if wait.on == "memory":
            source = "measured on a job like it" if measured else "as declared" if expected else "to start at all"
            return DoesNotFitError(
                f"{job.id} needs {format_bytes(wait.lacks)} of host memory ({source}); {wait.detail}.",
                rule=f"{binding.name} of {format_bytes(binding.limit_bytes)} ({binding.source}).",
                remedy="free memory or raise that limit, make the job smaller, or run it all the same with --force",
            )
        what = f"{job.id}: {wait.reason}"
        if wait.lacks:
            source = "as declared" if job.device_bytes else "to start at all"
            source = "measured on a job like it" if measured and measured.bytes_per_device else source
            what = f"{job.id} needs {format_bytes(wait.lacks)} on {count_gpus(job.num_devices)} ({source})"
        return DoesNotFitError(
            f"{'; '.join(filter(None, (what, wait.detail)))}.",
            rule="a job gets as many GPUs as it asks for, each with room for what it takes there.",
            remedy="free a GPU, make the job smaller, or ask for less with --gpu-memory or --num-gpus",
        )


def _lack(entry: Reservation, place: str, needed_bytes: int, room: Lendable) -> Wait:
    where = "" if place == HOST else f" on {count_gpus(entry.job.num_devices)}"
    on = "memory" if place == HOST else "device"
    return Wait(on, f"it needs {format_bytes(needed_bytes)}{where}", room.explain(), needed_bytes)
