"""Feeds a graph's units to the scheduler as jobs, and does what the graph only decides: link, check, hash, say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from memfit.errors import MemfitError
from memfit.files import refresh
from memfit.jobs import JobStatus, name_jobs
from memfit.pipeline._graph import Graph, Step
from memfit.pipeline._manifest import link_result, remove_result
from memfit.pipeline._results import HOST, NOT_MADE, Ended, Proofs, Unit
from memfit.units import format_bytes, format_duration

_WORD_SECONDS = 5.0


class UnitSource:
    """The units of a graph, which has looked at its run, as a source of jobs for the scheduler.

    A unit that may run waits here while files that it reads are compared with their hashes, and while another graph of
    the same run makes its key.
    """

    def __init__(
        self,
        graph: Graph,
        make_job: Callable[[Unit], Any],
        *,
        say: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        self.graph, self._results, self._index = graph, graph.results, graph.results.index
        self._make_job, self._say = make_job, say
        self._held: list[Unit] = []
        self._running: dict[str, Unit] = {}
        self._sealing: dict[str, tuple[Unit, Future[None]]] = {}
        self._reading: dict[str, tuple[Unit, Future[str | None]]] = {}
        self._changed: list[Unit] = []
        self._is_stale = self._is_closed = False
        self._num_read, self._next_word = 0, 0.0
        self._pool = ThreadPoolExecutor(2, "hash")
        if self._index.proofs is None:
            self._index.proofs = Proofs(graph.run, self._index.runs, anew=graph.order.choice.check_files)
        self._proofs = self._index.proofs
        self._conclude({})

    # The scheduler's side

    def next(self, num_free: int) -> list[Any]:
        self._proofs.looked.clear()
        for unit, proof in [one for one in self._reading.values() if one[1].done()]:
            self._conclude_reading(unit, proof)
        ended, jobs = self._sealed(), list[Any]()
        while True:
            if ended or self._is_stale:
                self._conclude(ended)
            ended, ready = self._hand_over()
            self._say_changes()
            jobs += [self._make_job(unit) for unit in ready]
            if not ended and not self._is_stale:
                return jobs

    def ended(self, status: JobStatus) -> None:
        unit = self._running[status.job_id]
        refresh(unit.manifest(self.graph.run).with_suffix(""))  # another host may have filled it
        if status.state == "completed" and unit.stage.command is not None:
            # Large outputs take long to hash. Meanwhile the scheduler must watch the other jobs.
            self._sealing[unit.job_id] = unit, self._pool.submit(self._results.seal, unit, status)
            return
        if status.state == "completed":
            found = self._found(unit)
        elif status.state in ("preempted", "cancelled", "pending"):
            found = Ended("cancelled", status.cause or "it was stopped")
        else:
            found = Ended("failed", status.cause)
        self._conclude({unit.job_id: found})

    @property
    def is_done(self) -> bool:
        return not (self._running or self._held or self._reading or self._is_stale)

    def close(self) -> None:
        self._is_closed = True
        for _, sealing in self._sealing.values():
            sealing.exception()  # waits for it
        self._conclude(self._sealed())
        self._pool.shutdown(cancel_futures=True)

    def give_up(self, why: str) -> list[str]:
        """Start no more units, and return the jobs that were handed over and have not ended."""
        self.graph.give_up(why)
        held, self._held, self._reading = self._held, [], {}
        self._conclude({unit.job_id: Ended("cancelled", why) for unit in held})
        return list(self._running)

    def given_up(self, job_id: str) -> str:
        return self.graph.why_given_up

    def num_like(self, job_id: str) -> int:
        unit = self._running.get(job_id)
        return len(self.graph.units[unit.stage.name]) if unit else 1

    # Units

    def _take(self, step: Step) -> None:
        """Keep what became ready, link what another run has, and check what is kept if that was asked for."""
        self._held += step.ready
        self._changed += step.changed
        for unit in [unit for unit in step.changed if unit.state == "reused"]:
            try:
                assert unit.elsewhere is not None
                link_result(unit.elsewhere, unit.manifest(self.graph.run), unit.made)
            except (MemfitError, OSError) as error:
                self._undo(unit, "failed", _why(error))
        if self.graph.order.choice.check_files:
            for unit in [unit for unit in step.changed if unit.state in ("kept", "reused")]:
                self._may_be_damaged(unit)

    def _hand_over(self) -> tuple[dict[str, Ended], list[Unit]]:
        """Return the units whose result is there after all, and those whose jobs start now."""
        there, ready = dict[str, Ended](), list[Unit]()
        for unit in list(self._held):
            key, path = (unit.stage.name, unit.key), unit.manifest(self.graph.run)
            if self._index.making.get(key, unit.job_id) != unit.job_id:
                continue
            if any([self._may_be_damaged(one) for one in unit.read]):  # noqa: C419
                continue
            self._held.remove(unit)
            try:
                if (found := self._results.find(unit) or self._results.take_left(unit)) is not None:
                    there[unit.job_id] = found
                    continue
                if path.exists() or unit.stage.name in self.graph.anew:
                    remove_result(path)  # or a training would continue from checkpoints of another key
            except OSError as error:
                there[unit.job_id] = Ended("failed", str(error))
                continue
            self._index.making[key] = unit.job_id
            self._running[unit.job_id] = unit
            unit.state = "running"
            ready.append(unit)
        self._changed += ready
        return there, ready

    def _sealed(self) -> dict[str, Ended]:
        found = {}
        for unit, sealing in [one for one in self._sealing.values() if one[1].done()]:
            del self._sealing[unit.job_id]
            error = sealing.exception()
            found[unit.job_id] = self._found(unit) if error is None else Ended("failed", _why(error))
        return found

    def _found(self, unit: Unit) -> Ended:
        if (made := self._results.made(unit)) is None:
            return Ended("failed", "its result is not there")
        self._index.known.setdefault((unit.stage.name, unit.key), unit.manifest(self.graph.run))
        return Ended("completed", made=made)

    def _conclude(self, ended: Mapping[str, Ended]) -> None:
        self._is_stale = False
        for job_id in ended:
            unit = self._running.pop(job_id, None)  # another graph may make its key now
            if unit is not None and self._index.making.get(key := (unit.stage.name, unit.key)) == job_id:
                del self._index.making[key]
        self._take(self.graph.advance(ended))
        self._say_changes()

    def _undo(self, unit: Unit, state: str = "waiting", why: str = "") -> None:
        self.graph.undo(unit, state, why)
        anew = self.graph.order.readers_of(unit.stage.name)
        self._held, self._is_stale = [one for one in self._held if one.stage.name not in anew], True

    # Damage

    def _may_be_damaged(self, unit: Unit) -> bool:
        """Return whether a result may differ from what was saved; if so, another thread begins to read it."""
        if unit.state == "completed" and unit.made.get("host") != HOST:
            return False  # hashed elsewhere in this very run
        look = partial(self._proofs.why_damaged, unit.manifest(self.graph.run), unit.made)
        if unit.job_id not in self._reading and look() != "":
            self._reading[unit.job_id] = unit, self._pool.submit(look, self._count)
        return unit.job_id in self._reading

    def _count(self, num: int) -> None:
        if self._is_closed:
            raise InterruptedError
        self._num_read, now = self._num_read + num, time.monotonic()
        if now > self._next_word:
            if self._next_word:
                self._say("plan", text=f"Checking files before jobs read them: {format_bytes(self._num_read)} read")
            self._next_word = now + _WORD_SECONDS

    def _conclude_reading(self, unit: Unit, proof: Future[str | None]) -> None:
        """Let a unit run again whose result is damaged, and look anew at all that reads it."""
        error = proof.exception()
        if error is None and proof.result():
            readers = self.graph.order.readers_of(unit.stage.name)
            if any(one.stage.name in readers for one in self._running.values()):
                return  # not while they read it
            remove_result(unit.manifest(self.graph.run))
            self._index.known.pop((unit.stage.name, unit.key), None)
            self._say("plan", text=f"{proof.result()}. {unit.job_id} runs again")
            self._undo(unit)
        elif error is not None:  # of the disk or the network: nothing is removed
            self._undo(unit, "failed", _why(error))
        del self._reading[unit.job_id]

    # Words

    def _say_changes(self) -> None:
        """Write one event for all units of a stage that changed alike."""
        groups: dict[tuple[str, str, str], list[Unit]] = {}
        for unit in {unit.job_id: unit for unit in self._changed}.values():
            state, why = ("waiting", "") if unit.state == "ready" else (unit.state, unit.why)
            groups.setdefault((unit.stage.name, state, why), []).append(unit)
        self._changed = []
        for (name, state, why), units in groups.items():
            seconds = round(sum(unit.seconds for unit in units), 3)
            text = self._text(units, state, why, seconds)
            jobs = [unit.job_id for unit in units]
            self._say("stage", stage=name, state=state, why=why, jobs=jobs, seconds=seconds, text=text)

    def _text(self, units: Sequence[Unit], state: str, why: str, seconds: float) -> str:
        """Say what became of some units of a stage; empty where the events of their jobs say it."""
        names, is_one, stage = name_jobs([unit.job_id for unit in units]), len(units) == 1, units[0].stage
        are = f"{names} {'is' if is_one else 'are'} {state}"
        if self.graph.order.kind == "commands" and state == "kept":
            num = len(self.graph.units[stage.name])
            text = "the command was" if num == 1 else f"{len(units)} of {num} commands were"
            return f"{text} done already; --new starts over"
        if state in ("kept", "reused"):
            source = f" from {Path(why).parent.parent.name}" if state == "reused" else ""
            return f"{are}{source}" + (f", which saves {format_duration(seconds)}" if seconds else "")
        if state == "running" and why not in ("", NOT_MADE):
            return f"{names} {'runs' if is_one else 'run'} again: {why}"
        if state == "stopped":
            return f"{names} stops the run here: {why}"
        return f"{are}: {why}" if state in ("skipped", "passed") else ""


def _why(error: BaseException) -> str:
    """Return what a file's error says; raise any other."""
    if not isinstance(error, MemfitError | OSError):
        raise error
    return error.what if isinstance(error, MemfitError) else str(error)
