"""Runs jobs side by side: takes them from a source, submits them to a backend, follows each to its last end.

``policy`` decides which of those that fit may start, ``_admission`` which fit. ``_enforce`` keeps those that run within
the budget.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import replace
from typing import Any

from memfit.errors import DoesNotFitError
from memfit.jobs._admission import Admitted, LocalAdmission
from memfit.jobs._budget_watch import DEVICE
from memfit.jobs._enforce import Enforcement
from memfit.jobs._folder import device_env
from memfit.jobs._job import Backend, JobSource, StopRequest, Submission, Verdict
from memfit.jobs._reservation import Entry, Wait
from memfit.jobs._retry import End, what_follows
from memfit.memory import HOST
from memfit.rundir import ENDED, JobStatus, State
from memfit.units import format_bytes, format_count

_TICK_SECONDS = 0.1
#: How long a lack of memory must last: the kernel brings a group's counters up to date within two seconds.
_LACK_SECONDS = 3.0
_NUMBER = re.compile(r"\b[0-9]+(\.[0-9]+)?( [KMGT]?i?B)?\b")
#: How many waiting jobs are looked at when the first does not fit, and how many may pass it by.
_BACKFILL, _MOST_PASSED = 32, 64
#: Where the largest job starts first: once so many have passed the oldest, that one starts as soon as it fits.
_PASSED_ENOUGH = 2


class Scheduler:
    """Runs a source's jobs on a backend, as many at once as the admission lets in; ``say`` gets each event."""

    def __init__(
        self,
        source: JobSource,
        backend: Backend,
        admission: LocalAdmission,
        *,
        say: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        self.source, self.backend, self.admission, self.say = source, backend, admission, say
        self.policy = admission.policy
        self.statuses: dict[str, JobStatus] = {}
        self._enforcement = Enforcement(backend, admission, say)
        self._waiting: list[Entry] = []
        self._running = admission.running
        self._stop_level = 0
        self._refused, self._started_stages = dict[str, DoesNotFitError](), set[str]()
        self._why_waiting = ""
        self._lacking_since: float | None = None
        self._num_passed = 0
        self._orders: list[Submission] = []

    def run(self, **options: Any) -> dict[str, JobStatus]:
        for _ in self.steps(**options):
            self.backend.wait(_TICK_SECONDS)
        return self.statuses

    def steps(
        self,
        *,
        stop: StopRequest | None = None,
        on_tick: Callable[[], None] = lambda: None,
        still_running: Collection[str] = (),
        stopped: Callable[[str], str] = lambda job_id: "",
    ) -> Iterator[None]:
        """Run jobs until the source is done; yield whenever all is decided for now, so that the caller waits. Jobs of
        ``still_running`` count as started when they are handed over: their memory is in use already. ``stopped`` says
        why a queued job must not start any more."""
        while True:
            self._poll()
            self._take_in(still_running)
            self._obey(stop.level if stop else 0)
            with self.admission.deciding():
                self._enforcement.relieve()
                self._admit(stopped)
            on_tick()
            if not self._waiting and not self._running and (self.source.is_done or self._stop_level):
                for stage, error in self._refused.items():
                    if stage not in self._started_stages:
                        raise error
                return
            yield

    def _take_in(self, still_running: Collection[str]) -> None:
        if self._stop_level or self.source.is_done:
            return
        found = [Entry(job, JobStatus(job.id, "pending")) for job in self.source.next(self._num_free())]
        self._waiting += found
        taken = [entry for entry in found if entry.job.id in still_running]
        for entry in taken:
            need = self.admission.need(entry, HOST)
            reserved = Counter({HOST: need.wanted if need else 0})
            self._start(entry, Admitted(reserved, "it still runs and is taken over"), is_adopted=True)
        if taken:  # what they use was read before they were known
            self._poll()
            self.admission.budget.read()

    def _num_free(self) -> int:
        """How many more jobs could start now; where memory decides, one at a time."""
        most = self.policy.max_parallel
        free = len(self._running) + 1 if most is None else most
        return max(0, free - len(self._running) - len(self._waiting))

    def _poll(self) -> None:
        found = self.backend.poll()
        for job_id, entry in self._running.items():
            entry.status = self.statuses[job_id] = found[job_id]
            entry.progress.note(entry.status, self.admission.now())
        for fields in self.admission.learn():
            self.say("footprint", **fields)
        for job_id, entry in list(self._running.items()):
            if entry.status.state in ENDED:
                del self._running[job_id]
                self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        status, end = entry.status, self._end_of(entry)
        again = what_follows(end)
        if isinstance(again, str):
            self._end(entry, again, is_said=end.was_given_up and not end.has_grown)
            return
        number, size = status.attempt + 1, again.needed.get(HOST)
        found = {"state": status.state, "cause": status.cause, "reservation_bytes": size}
        text = f"{entry.job.id} restarts as attempt {number}: {again.reason}"
        self.say("retry", job=entry.job.id, attempt=number, reason=again.reason, **found, text=text)
        entry.take_back(again, is_forgiven=end.is_forgiven)
        self._waiting.insert(0, entry)

    def _end_of(self, entry: Entry) -> End:
        progress, budget, num = entry.progress, self.admission.budget, entry.job.num_devices
        budget.read()  # what it had may be another's already
        guess = self.admission.forecast.guess(entry.job)
        return End(
            entry.status,
            self.backend.traits,
            entry.had(is_enforced=self.backend.traits.enforces_memory),
            alone=budget.most(num),
            now=budget.here(num),
            held=budget.held(DEVICE if entry.status.evidence.get("place") == "device" else HOST),
            expected=None if guess is None else guess.size,
            retries=self.policy.retries,
            restarts=progress.restarts,
            gave_way=progress.set_aside is not None,
            was_given_up=progress.verdict is not None,
            is_stopping=self._stop_level > 0,
        )

    def _end(self, entry: Entry, why_final: str, *, is_said: bool) -> None:
        """Record a job's last end, and stop what must not start after it."""
        is_short = entry.status.state == "out_of_memory" and entry.status.evidence.get("place") != "device"
        if is_short and not is_said:
            self._record(entry, Verdict("out_of_memory", f"{entry.status.cause}; {why_final}"))
        self._say_end(entry, why_final=why_final)
        has_failed = entry.status.state not in ("completed", "preempted", "cancelled")
        if has_failed and self.policy.on_failure == "stop":
            self._obey(1)

    def _obey(self, level: int) -> None:
        if level <= self._stop_level:
            return
        self._stop_level = level
        given_up, self._waiting = self._waiting, []
        for entry in given_up:
            cause = "the run was asked to stop"
            status = JobStatus(entry.job.id, "pending", cause=cause, attempt=0)
            if entry.job.id in self.statuses:  # it was to be restarted
                status = self.statuses[entry.job.id] = replace(status, attempt=entry.status.attempt)
            self.source.ended(status)
        num = len(self._running)
        jobs = format_count(num, "running job")
        text = f"Stopping {jobs} at a checkpoint. Ctrl-C again ends them now"
        text = f"Ending {jobs} now" if level > 1 else text if num else "Stopping: no more jobs start"
        self.say("stop", asked=level, num_running=num, text=text)
        for job_id in self._running:
            self.backend.cancel(job_id, now=level > 1)

    def _admit(self, stopped: Callable[[str], str]) -> None:
        for entry in self._waiting[:_BACKFILL]:
            if reason := stopped(entry.job.id):
                self._drop(entry, "cancelled", reason)
        try:
            self._admit_waiting()
        finally:  # together, so that a queue gets one array
            orders, self._orders = self._orders, []
            if orders:
                self.backend.submit(orders)

    def _admit_waiting(self) -> None:
        held = self._enforcement.why_none_starts()
        while self._waiting:
            head = self._waiting[0]
            if wait := held or self.admission.why_none_starts():
                self._wait(head, wait)
                return
            waits: dict[Hashable, Wait] = {}
            candidates = self._waiting[: _BACKFILL if self._num_passed < _MOST_PASSED else 1]
            if self.policy.largest_first:
                candidates.sort(key=self.admission.size, reverse=True)
                if self._num_passed >= _PASSED_ENOUGH:
                    candidates.sort(key=lambda entry: entry is not head)
            for entry in candidates:
                if (needs := self.admission.likeness(entry)) in waits:
                    continue  # another one that needs the same does not fit
                found = self.admission.admit(entry)
                if isinstance(found, Admitted):
                    self._num_passed = 0 if entry is head else self._num_passed + 1
                    self._start(entry, found)
                    break
                waits[needs] = found
            else:
                why = waits[self.admission.likeness(head)]
                if self.admission.is_alone:
                    self._refuse(head, why)
                else:
                    self._wait(head, why)
                return

    def _start(self, entry: Entry, admitted: Admitted, *, is_adopted: bool = False) -> None:
        self._waiting.remove(entry)
        self._why_waiting, self._lacking_since = "", None
        before, job, was_started = self.admission.memory(), entry.job, entry.job.id in self.statuses
        entry.reserve(admitted.reserved)
        entry.progress.begin(self.admission.now())
        entry.status = JobStatus(job.id, "pending")
        self._running[job.id], self.statuses[job.id] = entry, entry.status
        self._started_stages.add(job.stage)
        most = self._enforcement.first_grant(entry)
        if entry.devices:
            env = device_env(job, entry.devices, most, self.admission.budget.now.devices)
            job = replace(job, env=dict(job.env) | env)
        if not is_adopted:
            self._orders.append(Submission(job, self._limit_of(entry)))
        size, num = entry.reserved[HOST] if admitted.is_measured else None, len(self._running)
        entry.progress.told_bytes = size or 0
        found: dict[str, object] = {"reservation_bytes": size, "num_running": num, "why": admitted.why}
        found["devices"] = {place: entry.reserved[place] for place in entry.devices}
        verb, others, after = "submitted", " before starting the others" if self._waiting else "", ""
        if self.admission.is_shared:
            free = format_bytes(max(0, self.admission.budget.fresh().headroom_bytes))
            verb, others, after = "started", "", f" ({f'{num} running, ' if size else ''}{free} free)"
        verb = "taken over" if is_adopted else f"re{verb}" if was_started else verb
        how = f" with {format_bytes(size)} reserved" if size else f". Measuring its memory{others}"
        note = f", {admitted.note}" if admitted.note else ""
        self.say("admit", job=job.id, **found, **before, text=f"{job.id} {verb}{how}{note}{after}")

    def _limit_of(self, entry: Entry) -> int | None:
        """Return what an attempt asks for: its grant here, or in a queue its reservation and what it shares."""
        if self.admission.is_shared:
            return entry.wall_bytes
        expected, reserved = self.admission.forecast.predict(entry.job), entry.reserved[HOST]
        wanted = reserved + (expected.shared_bytes if expected else 0)
        return min(wanted, self.admission.budget.capacity_bytes) if reserved else None

    def _wait(self, entry: Entry, wait: Wait) -> None:
        """Say why a job waits if the kind of the reason has changed; another name or size in it is no news."""
        words = _NUMBER.sub("", wait.reason).split()
        kind = " ".join([wait.on, *(word for word in words if word.strip(":,") not in self.statuses)])
        if kind != self._why_waiting:
            self._why_waiting, running = kind, len(self._running)
            fields = {"reason": wait.reason, "arithmetic": wait.detail, "on": wait.on, "num_running": running}
            available = f", {format_bytes(max(0, wait.available))} available" if wait.lacks else ""
            self.say("wait", job=entry.job.id, **fields, text=f"{entry.job.id} waits: {wait.reason}{available}")

    def _refuse(self, entry: Entry, wait: Wait) -> None:
        """Drop a job that does not fit although no other runs, when that has lasted; the others may fit."""
        if wait.on != "tight" and (words := self.admission.why_others(entry)):
            self._wait(entry, Wait("others", words))
            return
        now = self.admission.now()
        self._lacking_since = self._lacking_since or now
        # One that gave way had room when it started, so there will be some again.
        if now - self._lacking_since < _LACK_SECONDS * (1 + 20 * entry.progress.restarts["aside"]):
            self._wait(entry, wait)
            return
        if self.backend.make_room():
            self._lacking_since = None
            return
        error = self.admission.refusal(entry, wait)
        self._refused.setdefault(entry.job.stage, error)
        self._drop(entry, "failed", error.what)
        if self.policy.on_failure == "stop":
            self._obey(1)

    def _record(self, entry: Entry, verdict: Verdict) -> None:
        """Record the end of a job that does not run, wherever its end is read."""
        self.backend.cancel(entry.job.id, verdict=verdict)
        entry.status = replace(entry.status, state=verdict.state, cause=verdict.cause)
        self.statuses[entry.job.id] = entry.status

    def _drop(self, entry: Entry, state: State, cause: str) -> None:
        self._waiting.remove(entry)
        if entry.job.id not in self.statuses:
            entry.status = replace(entry.status, attempt=0)
        self._record(entry, Verdict(state, cause))
        self._say_end(entry, exit_code=None)

    def _say_end(self, entry: Entry, **fields: object) -> None:
        status = entry.status
        ended = {name: getattr(status, name) for name in ("state", "cause", "exit_code")} | fields
        cause = f": {status.cause}" if status.cause else ""
        text = f"{status.job_id} {status.describe_end(entry.progress.told_bytes)}{cause}"
        self.say("end", job=status.job_id, **ended, **self.admission.memory(), text=text)
        self.source.ended(status)
