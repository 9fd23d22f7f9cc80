"""Decides whether a job may start now: by the budget, by the other runs on this host, and by the forecast."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple

from memfit.errors import DoesNotFitError
from memfit.jobs._budget_watch import DEVICE, BudgetWatch, ReadBudget
from memfit.jobs._forecast import Forecast
from memfit.jobs._job import Job, Policy
from memfit.jobs._reservation import Entry, Wait
from memfit.jobs._retry import WHOLE
from memfit.jobs.policy import STILL_SECONDS, Held, Need, start, why_no_core
from memfit.memory import (
    HOST,
    Claims,
    Footprint,
    Lendable,
    Others,
    Sizes,
    default_reserve_of,
    held_bytes,
    keep_cache,
    reservation_bytes,
    why_tight,
)
from memfit.units import format_bytes, format_count


class Admitted(NamedTuple):
    """A job may start, and why. ``note`` is what the log must say of that. Nothing is ``reserved`` on the host of a
    cluster's node that a job of unknown size has to itself."""

    reserved: Sizes
    why: str
    note: str = ""
    is_measured: bool = True


class LocalAdmission:
    """Admits jobs under the budget of this host. Where they do not share it (``is_shared``), each may have it whole, as
    on a node of a cluster. On this host a queued job counts for nothing."""

    def __init__(
        self,
        read_budget: ReadBudget,
        *,
        policy: Policy | None = None,
        known: Sequence[tuple[str, Mapping[str, str], Footprint]] = (),
        claims: Claims | None = None,
        now: Callable[[], float] = monotonic,
        is_shared: bool = True,
    ) -> None:
        self.policy, self.claims, self.now, self.is_shared = policy or Policy(), claims, now, is_shared
        others = claims.others if claims else Others
        self.budget = BudgetWatch(read_budget, now, self.in_use, self.unused, others)
        self.forecast = Forecast(self.policy.slack)
        for stage, params, footprint in known:
            self.forecast.learn(Job("known", command=("-",), params=params, stage=stage), footprint)
        self.running: dict[str, Entry] = {}
        self.least_bytes = 1

    def held(self) -> list[Held]:
        now = self.now()
        return [entry.held(self.forecast.guess(entry.job), now) for entry in self._sharing() if not entry.is_queued]

    def read_own(self) -> int:
        """Return what memfit's own processes hold: this one, the watchers, and those from which jobs are forked."""
        return held_bytes(os.getpid(), {entry.status.pid or 0 for entry in self.running.values()})

    def in_use(self) -> Sizes:
        return sum((entry.used for entry in self._sharing()), Counter[str]())

    def unused(self, expected: bool = True) -> Sizes:
        """Return what the running jobs have reserved, or are also expected to take, and do not use yet."""
        return sum((entry.unused(expected=expected) for entry in self._sharing()), Counter[str]())

    def _sharing(self) -> list[Entry]:
        return [*self.running.values()] if self.is_shared else []

    def capacity_bytes(self) -> int:
        """Return what all jobs may take now: other runs on this host may take a part of what is free meanwhile."""
        budget = self.budget
        return budget.capacity_bytes - max(0, budget.rooms(expected=False)[HOST].bytes) + budget.parts()[HOST]

    def memory(self) -> dict[str, int]:
        """Return the limit that binds now, what is used under it, and what the running jobs map (PSS), in bytes."""
        binding, pss = self.budget.fresh().binding, sum(entry.status.pss_bytes for entry in self.running.values())
        return {"limit_bytes": binding.limit_bytes, "used_bytes": binding.used_bytes, "pss_bytes": pss}

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Keep other runs from deciding meanwhile, so that no two give the same free bytes away."""
        with self.claims.deciding() if self.claims else nullcontext(Others()) as self.budget.others:
            yield
            if self.claims is not None:
                self.claims.write(used=self.in_use(), unused=self.unused())

    def learn(self) -> list[dict[str, Any]]:
        """Learn what the running jobs took so far, and revise the reservations of similar ones."""
        for entry in self._sharing():
            entry.hold_devices(self.measured(entry.job), self.policy.slack)
        found = [self._learn(entry) for entry in self.running.values()]
        standing = {job.id: job.used for job in self.held() if job.still >= STILL_SECONDS}
        self.forecast.see({job_id: (self.running[job_id].job, used) for job_id, used in standing.items()})
        if any(fields is not None for fields in found):
            for entry in self.running.values():
                if measured := self.measured(entry.job):
                    entry.revise(measured, self.policy.slack)
        return [fields for fields in found if fields]

    def _learn(self, entry: Entry) -> dict[str, Any] | None:
        """Learn what a job took so far if that is enough to judge similar ones; return the event if it is news."""
        status, footprint = entry.status, entry.status.footprint
        self.budget.checkpoint_bytes = max(self.budget.checkpoint_bytes, status.checkpoint_bytes)
        if footprint is None or (footprint.sizes <= entry.progress.learned and status.state != "completed"):
            return None
        known, is_whole = self.measured(entry.job), status.state == "completed" or status.settled
        outgrew = known is not None and (status.peak_bytes > known.private_bytes or footprint.exceeds(known))
        if not (is_whole or outgrew):
            return None
        if not is_whole and known is not None and not known.bytes_per_device:
            footprint = replace(footprint, device_bytes={})  # what it takes there still grows
        entry.progress.learned |= footprint.sizes
        progress, is_final = entry.progress, status.state == "completed"
        cores, times = status.cpu_seconds / max(progress.age, 0.1), {"peaked": progress.peaked, "seconds": progress.age}
        self.forecast.learn(entry.job, footprint, is_final=is_final, cores=cores, **times)
        if known is not None and not footprint.exceeds(known, 1.01):
            return {}
        return {
            "job": entry.job.id,
            "footprint": footprint.to_dict(),
            "reservation_bytes": reservation_bytes(footprint, self.policy.slack),
            "in_use_bytes": self.in_use()[HOST],
        }

    def measured(self, job: Job) -> Footprint | None:
        """Return the forecast for a job if it was measured on similar ones, not declared."""
        expected = self.forecast.predict(job)
        return expected if expected is not None and expected.method == "measured" else None

    def why_none_starts(self) -> Wait | None:
        most = self.policy.max_parallel
        if most is not None and len(self.running) >= most:
            return Wait("max_parallel", f"at most {most} at once (max_parallel)")
        if self.policy.force:
            return None
        if most is None and self.is_shared:
            cores = max(1, self.budget.now.num_cpus // (1 + self.budget.others.num[HOST]))
            if why := why_no_core(self.held(), cores):
                return Wait("cores", f"{why} (max_parallel: auto)")
        for entry in () if self.is_shared else self.running.values():
            if not (entry.reserved[HOST] or entry.status.settled):
                passed = "passed each phase once" if entry.job.phases else "stopped growing"
                return Wait("measuring", f"{entry.job.id} is being measured until it has {passed}")
        return None

    @property
    def is_alone(self) -> bool:
        return all(self.is_shared and entry.is_queued for entry in self.running.values())

    def likeness(self, entry: Entry) -> Hashable:
        """Return what decides whether a job fits: two for which it is equal fit or do not fit both."""
        job, progress = entry.job, entry.progress
        needed, guess = (*sorted(progress.needed.items()), progress.gets_all), self.forecast.guess(job)
        return job.stage, job.num_devices, job.device_bytes, job.mapped_bytes, guess, needed, progress.restarts["aside"]

    def admit(self, entry: Entry) -> Admitted | Wait:
        """Admit a job if it fits now at each place; else return why it does not."""
        job, alone, rooms = entry.job, self.is_alone, self.budget.rooms()
        if self.policy.force:
            devices = _choose(rooms, self._num_devices(job), held=())
            sizes = Counter(() if isinstance(devices, Wait) else devices)
            return Admitted(sizes, "forced: not checked against the budget", "not checked against the budget (--force)")
        if not alone:
            mapped = max(job.mapped_bytes, *(other.job.mapped_bytes for other in self.running.values()))
            rooms[HOST] = keep_cache(self.budget.now, rooms[HOST], mapped)
        needs, note = self._needs(entry, rooms)
        is_unknown = needs[HOST] is None
        if is_unknown and not self.is_shared:  # it has a node to itself, whatever it takes
            if not alone:
                return Wait("measuring", "its size is unknown, so it runs alone first")
            return Admitted(Counter(), rooms[HOST].explain(), note, is_measured=False)
        if why := self._why_tight(entry, needs):
            return Wait("tight", why)
        held = self.budget.devices_of_others.union(*(other.devices for other in self.running.values()))
        devices = _choose(rooms, self._num_devices(job), held, is_unknown=needs.get(DEVICE, ()) is None)
        if isinstance(devices, Wait):
            return devices
        jobs, asides, walls = [] if alone else self.held(), entry.progress.restarts["aside"], self.forecast.has_walls
        known, capacity = (needs[HOST], self.forecast.guess(job)), self.capacity_bytes()
        size = start(*known, jobs, rooms[HOST].bytes, capacity, asides=asides, has_walls=walls)
        if isinstance(size, str):
            return Wait("measuring" if is_unknown else "memory", size)
        reserved = Counter({HOST: max(self.least_bytes, size)})
        for place in devices:
            need, room = needs[DEVICE], rooms[place].bytes
            wanted = room if need is None else need.wanted if place in held else min(need.wanted, max(need.least, room))
            reserved[place] = max(1, wanted)
        for place, size in reserved.items():
            if size > rooms[place].bytes:
                return _lack(entry, place, size, rooms[place])
        why = "; ".join(rooms[place].explain() for place in (HOST, *devices))
        return Admitted(reserved, why, note, not is_unknown)

    def _num_devices(self, job: Job) -> int:
        """Return how many devices are chosen for a job here; in Slurm, Slurm chooses them."""
        return job.num_devices if self.is_shared else 0

    def _needs(self, entry: Entry, rooms: Mapping[str, Lendable]) -> tuple[dict[str, Need | None], str]:
        """Return what a job needs on the host and on each device, and what the log must say about that."""
        num, note = self._num_devices(entry.job), ""
        needs = {kind: self.need(entry, kind) for kind in (HOST, DEVICE)[: 1 + bool(num)]}
        if self.is_alone and self.forecast.is_inferred(entry.job):  # what similar jobs took is no reason to refuse it
            devices = sorted((room.bytes for place, room in rooms.items() if place != HOST), reverse=True)
            most = {HOST: rooms[HOST].bytes, DEVICE: devices[num - 1] if 0 < num <= len(devices) else 0}
            for kind, need in needs.items():
                own = entry.progress.needed.get(kind, 0)
                if need is not None and need.least > most[kind] >= own:
                    needs[kind] = Need(own, need.wanted) if own else None
                    note = f"similar jobs took {format_bytes(need.least)}, it gets all there is"
        return needs, note

    def _why_tight(self, entry: Entry, needs: Mapping[str, Need | None]) -> str:
        """Return why a job is to be refused whose declared peak is tight; empty if it is not."""
        if self.policy.refuse_tight and self.measured(entry.job) is None:
            most = self.budget.most(entry.job.num_devices)
            for kind in sorted(needs.keys() - entry.progress.needed):
                if (need := needs[kind]) is not None and (why := why_tight(need.least, most[kind])):
                    return f"{entry.job.id} is tight{'' if kind == HOST else ' on its GPU'}, as declared: {why}"
        return ""

    def need(self, entry: Entry, kind: str) -> Need | None:
        """Return the least that a job can start with on the host or each device, and what it is to have, if known."""
        job, slack = entry.job, self.policy.slack
        if needed := entry.progress.needed.get(kind):
            most = self.budget.most(job.num_devices)[kind]
            needed = min(max(needed, entry.forecast_bytes(kind, self.measured(job)) or 0), most)
            return Need(round(WHOLE * needed), most if entry.progress.gets_all else needed)
        expected = self.forecast.predict(job)
        least, wanted = entry.forecast_bytes(kind, expected), entry.forecast_bytes(kind, expected, slack)
        if kind == HOST and self.is_shared:
            guess = self.forecast.guess(job)
            wanted = None if guess is None else guess.size
        return None if least is None or wanted is None else Need(min(least, wanted), wanted)

    def size(self, entry: Entry) -> tuple[float, ...]:
        """Return what a job needs on its devices and on the host, to sort by; infinite where that is unknown."""
        needs = (self.need(entry, kind) for kind in (DEVICE, HOST))
        return entry.job.num_devices, *(math.inf if need is None else need.wanted for need in needs)

    def why_others(self, entry: Entry) -> str:
        """Return who holds what a job needs that will fit once they gave it back; empty if nobody does."""
        num, unknown = self._num_devices(entry.job), Need(self.least_bytes, 0)  # as much as a process needs
        here, most, words = self.budget.here(num), self.budget.most(num), ""
        for kind in (HOST, DEVICE)[: 1 + bool(num)]:
            if max(self.least_bytes, (self.need(entry, kind) or unknown).least) > most[kind]:
                return ""
            words = self.held_in_words(kind) if most[kind] > here[kind] else words
        return words

    def held_in_words(self, kind: str = HOST) -> str:
        """Return who else holds memory of the host or of the devices, as the reason for a wait."""
        words = self.budget.held(kind).words or "others hold memory"
        return f"{words}{' of GPU memory' * (kind == DEVICE)}, and it needs a part of that"

    def refusal(self, entry: Entry, wait: Wait) -> DoesNotFitError:
        """Return the error for a job that waits although no other runs."""
        if wait.on == "tight":
            rule = "a peak that was declared, not measured, leaves 5 % or more of what its job gets alone."
            remedy = "raise that limit, make the job smaller, or accept it: --accept-tight"
            return DoesNotFitError(f"{wait.reason}.", rule=rule, remedy=remedy)
        job, budget, measured = entry.job, self.budget.fresh(), self.measured(entry.job)
        binding, reserve = budget.binding, budget.reserve_bytes
        if is_host := wait.on == "memory":
            is_measured, is_declared, where = measured is not None, job.footprint is not None, "of host memory"
            rule = f"{binding.name} of {format_bytes(binding.limit_bytes)} ({binding.source})."
            remedy = "free memory or raise that limit, make the job smaller, or run it all the same with --force"
            usual, _ = default_reserve_of(binding, budget.swap)
            if reserve > usual and wait.lacks <= binding.limit_bytes - usual:
                rule = f"{rule[:-1]}, less the reserve of {format_bytes(reserve)} (--reserve)."
                remedy = f"lower the reserve, for example --reserve {usual >> 20}MiB"
        else:
            is_measured = measured is not None and measured.bytes_per_device > 0
            is_declared, where = bool(job.device_bytes), f"on {format_count(job.num_devices, 'GPU')}"
            rule = "a job gets as many GPUs as it asks for, each with room for what it takes there."
            remedy = "free a GPU, make the job smaller, or ask for less with --gpu-memory or --num-gpus"
        source = "measured on a similar job" if is_measured else "as declared" if is_declared else "to start at all"
        what = f"{job.id} needs {format_bytes(wait.lacks)} {where} ({source})" if wait.lacks or is_host else ""
        what = what or f"{job.id}: {wait.reason}"
        return DoesNotFitError(f"{'; '.join(filter(None, (what, wait.detail)))}.", rule=rule, remedy=remedy)


def _choose(
    rooms: Mapping[str, Lendable], num_devices: int, held: Container[str], *, is_unknown: bool = False
) -> list[str] | Wait:
    """Return the devices of a job, those with the most room; or why it gets none. CUDA gives a process one MIG instance
    at most, so a job that needs several devices gets whole GPUs. One of unknown size gets devices that are not ``held``
    by other jobs. Source: NVIDIA MIG User Guide, CUDA_VISIBLE_DEVICES."""
    devices, here, why = [place for place in rooms if place != HOST], "are here", ""
    if num_devices > 1 and any(place.startswith("MIG-") for place in devices):
        devices = [place for place in devices if not place.startswith("MIG-")]
        here = "whole ones are here, beside MIG instances: a process can use only one MIG instance"
    if len(devices) >= num_devices and is_unknown:
        devices = [place for place in devices if place not in held]
        here, why = "have no other job", " for itself, for its size there is unknown,"
    if len(devices) < num_devices:
        return Wait("device", f"it needs {format_count(num_devices, 'GPU')}{why} and {len(devices)} {here}")
    return sorted(devices, key=lambda place: -rooms[place].bytes)[:num_devices]


def _lack(entry: Entry, place: str, needed_bytes: int, room: Lendable) -> Wait:
    where = "" if place == HOST else f" on {format_count(entry.job.num_devices, 'GPU')}"
    on = "memory" if place == HOST else "device"
    return Wait(on, f"it needs {format_bytes(needed_bytes)}{where}", room.explain(), needed_bytes, room.bytes)
