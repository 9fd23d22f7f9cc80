"""The agent of a job of several ranks: it starts them, and all of them again when one is lost.

It has the place of the job's process: the shim watches it, and its ranks are its children. It imports the standard
library only. A rank gets the variables that torchrun sets; each generation has a port, and so a store, of its own.
"""

from __future__ import annotations

import os
import random
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from memfit.errors import DamagedError, DoesNotFitError, InterruptedRunError, PeerFailedError, StoppedError, UsageError
from memfit.files import read_json, read_whole, write_json
from memfit.jobs._child import ERROR, RESULT, die_with, main
from memfit.jobs._death import Counters
from memfit.jobs._folder import JOB
from memfit.jobs._fork import begin_anew, end_descriptors, fork_job, fork_program, stop_targets, thread_env
from memfit.memory import JobGroup
from memfit.rundir import (
    CANARY_VARIABLE,
    LOST,
    RANKS_VARIABLE,
    START_PATIENCE,
    WAITING,
    Beat,
    is_further,
    launch_of,
    open_beats,
    read_beats,
    record,
)

#: The folder of the ranks in the job's folder, and what it holds at the end of the job if a rank was lost.
RANKS, END = "ranks", "end.json"
LEAVING_SECONDS, _SOON_SECONDS = 10.0, 2.0
#: What the agent of a node says where the first rank was lost on another one.
ELSEWHERE = "a rank of another node was lost"
_BEGINS = frozenset({"begin", "load"})  # where a rank has nothing to save yet, and does not notice that another is gone
_START = "start"  # where a rank has given no beat of its own yet; a later generation is one of a script that beats
_LEFT, _STOPPED = PeerFailedError.exit_code, StoppedError.exit_code
#: Ends that another start would repeat, or that somebody asked for. 10 and 11 are a gate's.
_FINAL = {UsageError.exit_code, DoesNotFitError.exit_code, 10, 11, InterruptedRunError.exit_code}
_FINAL |= {-signal.SIGINT, -signal.SIGTERM}
_MOST_WITHOUT = 2  # so many generations in a row may end without a new checkpoint
#: Below those that the kernel gives to clients by itself: nobody takes it before rank 0 does.
_PORTS = range(20000, 32000)
_TAIL_BYTES, _TICK_SECONDS = 4096, 0.2


@dataclass
class Headway:
    """How far the ranks of a job came, generation after generation: whether another one is worth a try."""

    is_canary: bool = False
    num_without: int = 0
    _best: dict[str, int] = field(default_factory=dict)
    _has_beaten: bool = False

    def begins_again(self, beats: Collection[Beat], code: int | None = None) -> bool:
        """Take in how a generation ended; return whether its script has checkpoints, and new ones still come."""
        if code in _FINAL or self.is_canary:
            return False
        self._has_beaten = self._has_beaten or any(one.count for one in beats)
        self.num_without += 1
        for one in beats:
            if one.sealed is not None and is_further(self._best, one.training, one.sealed):
                self._best[one.training], self.num_without = one.sealed, 0
        return self._has_beaten and self.num_without < _MOST_WITHOUT


@dataclass
class _Rank:
    """A rank of this generation; ``said`` is the end of its standard error."""

    number: int
    pid: int
    pipes: dict[int, int] = field(default_factory=dict)
    code: int | None = None
    was_killed: bool = False
    said: bytes = b""
    _begun: dict[int, bytes] = field(default_factory=dict)

    @property
    def is_consequence(self) -> bool:
        """True if its own last words are of a peer that was lost."""
        return LOST.search(self.said.decode(errors="replace")) is not None

    def pass_on(self, pipe: int) -> bool:
        """Pass on the lines that it wrote, those of others than rank 0 with their number; False at the end."""
        try:
            new = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return True
        if self.pipes[pipe] == 2:
            self.said = (self.said + new)[-_TAIL_BYTES:]
        content = self._begun.pop(pipe, b"") + new
        end = max(content.rfind(b"\n"), content.rfind(b"\r")) + 1 if new else len(content)
        self._begun[pipe] = content[end:]
        self._write(pipe, content[:end])
        return bool(new)

    def flush(self) -> None:
        """Pass on a line that has no end yet, such as a question or a bar."""
        for pipe in [*self._begun]:
            self._write(pipe, self._begun.pop(pipe))

    def _write(self, pipe: int, content: bytes) -> None:
        if self.number:
            mark = b"[rank%d]: " % self.number
            lines = [line.removeprefix(mark) for line in re.split(rb"[\n\r]+", content) if line]
            content = b"".join(mark + line + b"\n" for line in lines)
        with suppress(OSError):  # a full disk costs the log, not the job
            os.write(self.pipes[pipe], content)

    def has_ended(self) -> bool:
        """Reap it if it has ended, and end what it left running."""
        if (end := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            return False
        if end.si_status:
            with suppress(ProcessLookupError, PermissionError):  # its loader workers; its number is still its own
                os.killpg(self.pid, signal.SIGKILL)
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return True


class Agent:
    """The ranks of one job on this host, generation after generation. Of a job on several nodes they run for one
    generation: who started it on all nodes begins the next."""

    def __init__(self, job: Mapping[str, Any], job_dir: Path, *, forks: bool = False) -> None:
        self.job, self.job_dir, self.forks = job, job_dir, forks
        self.size, self.num_nodes = int(job["ranks"]), int(job["env"].get("PET_NNODES", "1"))
        self.shared_dir = job_dir if self.num_nodes == 1 else job_dir.parents[1]  # where ranks of all nodes beat
        self.group = JobGroup.at(Path(job["group"])) if job["group"] else None
        self.is_stopping = self.has_failed = False  # the second: a rank had failed before the stop was asked for
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _stop(self, *_: object) -> None:
        self.is_stopping = True

    def run(self) -> int:
        """Run generations until one is the last; return the exit code, negative for a signal."""
        generation = int(os.environ.get("MEMFIT_GENERATION", "0")) if self.num_nodes > 1 else 0
        (self.job_dir / RANKS / END).unlink(missing_ok=True)
        headway = Headway(CANARY_VARIABLE in self.job["env"])
        while True:
            counters = Counters.read(self.group)
            folder = self.shared_dir / RANKS / f"{self.job['attempt']}_{generation}"
            folder.mkdir(parents=True, exist_ok=True)
            ranks = self._start(generation, folder)
            ended = self._follow(ranks, folder, generation)
            beats = read_beats(folder)
            code = self._code(ended)
            if code in (0, _STOPPED):
                if code == 0 and self.job["target"] is not None:
                    os.replace(folder / f"{ranks[0].number}_{RESULT}", self.job_dir / RESULT)
                return code
            cause = self._cause(ended, beats)
            told = self._tell(cause, ended, generation, beats)
            begins_again = headway.begins_again(beats.values(), code)
            may_go_on = not (self.is_stopping or self.num_nodes > 1)
            now = Counters.read(self.group)
            oom = now.rise_since(counters) if now.is_own or code == -signal.SIGKILL else ""
            if not (may_go_on and begins_again and not oom):
                if may_go_on and headway.num_without == _MOST_WITHOUT:
                    told += f"; {_MOST_WITHOUT} generations in a row ended without a new checkpoint"
                self._close(cause, generation, folder, told)
                return code
            generation += 1
            text = f"all {self.size} ranks begin again from the last checkpoint (generation {generation})"
            record("ranks_again", generation=generation, text=text)

    def _start(self, generation: int, folder: Path) -> list[_Rank]:
        here, node, address, port = self.size // self.num_nodes, self.job.get("node", 0), "127.0.0.1", free_port()
        if self.num_nodes > 1:
            address, _, text = self.job["env"]["PET_RDZV_ENDPOINT"].rpartition(":")
            port = int(text)
        common = {
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(here),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": self.job["id"],
            "TORCHELASTIC_RESTART_COUNT": str(generation),
            "MEMFIT_GENERATION": str(generation),
            RANKS_VARIABLE: str(folder),
            **thread_env(max(1, int(self.job["threads"]) // here)),
        }
        ranks = []
        for local in range(here):
            env = common | {"RANK": str(node * here + local), "LOCAL_RANK": str(local)}
            ranks.append(self._start_one(node * here + local, env, folder))
        pids = {str(one.number): one.pid for one in ranks}
        text = f"{self.size} ranks, port {port}"
        record("ranks", level="verbose", generation=generation, port=port, pids=pids, text=text)
        return ranks

    def _start_one(self, number: int, env: Mapping[str, str], folder: Path) -> _Rank:
        job, agent = self.job, os.getpid()
        command = list(job["command"])
        if job["target"] is not None:
            command = [sys.executable, "-m", "memfit.jobs", "child", str(self.job_dir), f"{folder}/{number}_"]

        def become_rank() -> None:
            die_with(agent)
            launch = f"{launch_of({**os.environ, **env})}:{env['WORLD_SIZE']}"
            first = Beat(number, os.getpid(), socket.gethostname(), launch, _START, patience=START_PATIENCE)
            descriptor = open_beats(folder, number)
            os.pwrite(descriptor, first.to_line(), 0)
            os.close(descriptor)

        def become_function() -> None:
            become_rank()
            begin_anew(job["id"], env)

        streams, pipes, closed = [0, 1, 2], {}, []
        if number:
            streams[0] = os.open(os.devnull, os.O_RDONLY)
            closed.append(streams[0])
        for stream in (1, 2) if number else (2,):
            reading, streams[stream] = os.pipe()
            os.set_blocking(reading, False)
            pipes[reading] = stream
            closed.append(streams[stream])
        try:
            if self.forks:
                call = partial(main, self.job_dir, f"{folder}/{number}_")
                return _Rank(number, fork_job(become_function, call, streams)[0], pipes)
            return _Rank(number, fork_program(become_rank, command, env, streams), pipes)
        finally:
            for one in closed:
                os.close(one)

    def _follow(self, ranks: Sequence[_Rank], folder: Path, generation: int) -> list[_Rank]:
        ended: list[_Rank] = []
        poll, failed, was_asked = select.poll(), float("inf"), False
        begins = _BEGINS | {_START} if generation else _BEGINS
        of_pipe = {pipe: one for one in ranks for pipe in one.pipes}
        for descriptor in [*of_pipe, *(end for one in ranks for end in end_descriptors(one.pid))]:
            poll.register(descriptor, select.POLLIN)
        while live := [one for one in ranks if one.code is None]:
            ready = poll.poll(1000 * _TICK_SECONDS)
            for descriptor, _ in ready:
                is_pipe = descriptor in of_pipe
                if not (is_pipe and of_pipe[descriptor].pass_on(descriptor)):
                    poll.unregister(descriptor)
                    os.close(descriptor)
                    of_pipe.pop(descriptor, None)
            if not ready:
                ranks[0].flush()
            ended += (new := [one for one in live if one.has_ended()])
            if any(one.code not in (0, _STOPPED) for one in new):
                failed = min(failed, time.monotonic())
            if self.is_stopping and not was_asked:
                was_asked, self.has_failed = True, failed < float("inf")
                _send([one for one in live if one.code is None], signal.SIGTERM)
            late = [one for one in live if one.code is None]
            since = time.monotonic() - failed  # nothing is read before: at its limit, a job may open no file
            if late and since > 0 and since > _leaving_seconds(late, ended, folder, begins):
                for one in late:
                    one.was_killed = True
                _send(late, signal.SIGKILL)
        for pipe, one in of_pipe.items():  # a process that it left behind may hold the other end for ever
            while select.select([pipe], [], [], 0)[0] and one.pass_on(pipe):
                pass
            os.close(pipe)
            one.flush()
        return ended

    def _code(self, ended: Sequence[_Rank]) -> int:
        codes = {one.code or 0 for one in ended}
        if codes <= {0, _STOPPED}:
            return max(codes)
        if self.is_stopping and _STOPPED in codes and codes <= {0, _STOPPED, _LEFT, -signal.SIGTERM}:
            return _STOPPED
        return first.code or _LEFT if (first := _first_failure(ended)) else _LEFT

    def _cause(self, ended: Sequence[_Rank], beats: Mapping[int, Beat]) -> _Rank:
        """Return the rank that was lost first: the first end that is not 79, else the rank that hung."""
        if first := _first_failure(ended):
            return first
        known = [one for one in ended if one.number in beats]
        at_work = [one for one in known if beats[one.number].place not in (*WAITING, "end")]
        left = [one for one in known if beats[one.number].has_own_reason]
        stuck = [one for one in ended if one.was_killed] or left or at_work or ended
        return min(stuck, key=lambda one: beats[one.number].time if one.number in beats else 0.0)

    def _tell(self, cause: _Rank, ended: Sequence[_Rank], generation: int, beats: Mapping[int, Beat]) -> str:
        """Record which rank was lost, where it was, and how; return it as a sentence."""
        last = beats.get(cause.number)
        left = last.left if last is not None and last.has_own_reason else ""
        left = "" if left.startswith("it hangs") else left
        has_hung = cause.was_killed or (cause.code == _LEFT and not left)
        at_work = [one for one in beats.values() if one.place not in (*WAITING, "end")]
        if self.num_nodes > 1 and has_hung and last != min(at_work, key=attrgetter("time"), default=None):
            return f"rank {cause.number} left: {ELSEWHERE}"
        seconds = round(time.time() - last.time, 1) if last and last.count else None
        where = f" in {last.where}" if last and last.count and last.place != "end" else ""
        if has_hung and last and last.place in (*WAITING, "begin"):
            where += " (or a peer: all waited there)"
        how = "hung" if has_hung else f"ended with exit code {cause.code}"
        if not has_hung and (number := -(cause.code or 0)) > 0:
            how = f"was ended by {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"
        how = "left" if left else how
        text = f"rank {cause.number} {how}{where}{f': {left}' if left else ''}"
        if cause.is_consequence and (gone := [one.number for one in ended[: ended.index(cause)] if one.code == 0]):
            text += f", after rank {gone[0]} had left with exit code 0"
        record(
            "rank_lost",
            rank=cause.number,
            generation=generation,
            code=cause.code,
            place=last.place if last else None,
            step=last.step if last else None,
            seconds=seconds,
            asked=self.is_stopping and not self.has_failed,
            text=text,
        )
        return text

    def _close(self, cause: _Rank, generation: int, folder: Path, told: str) -> None:
        """Leave the cause where the shim and a reader of the log find it."""
        (self.job_dir / RANKS).mkdir(exist_ok=True)
        end = {"rank": cause.number, "generation": generation, "text": told}
        write_json(self.job_dir / RANKS / END, end, durable=False)
        with suppress(OSError):
            os.replace(folder / f"{cause.number}_{ERROR}", self.job_dir / ERROR)
        lines = [line for line in cause.said.decode(errors="replace").splitlines() if line.strip()]
        mark = f"[rank{cause.number}]: "
        print(f"memfit: {told}", *(line.removeprefix(mark) for line in lines[-1:]), sep="\n", file=sys.stderr)


def read_lost(job_dir: Path) -> dict[str, Any] | None:
    """Return which rank of a job that failed was lost first: ``rank``, ``generation`` and ``text``."""
    with suppress(DamagedError):
        return read_json(job_dir / RANKS / END, {"rank": int, "generation": int, "text": str})
    return None


def _first_failure(ended: Sequence[_Rank]) -> _Rank | None:
    """Return the first rank that failed by itself, or at least was the first to notice that another was lost."""
    failed = [one for one in ended if one.code not in (0, _STOPPED, _LEFT) and not one.was_killed]
    return next((one for one in failed if not one.is_consequence), failed[0] if failed else None)


def _leaving_seconds(late: Sequence[_Rank], ended: Sequence[_Rank], folder: Path, begins: Collection[str]) -> float:
    """Return how long ranks may take to leave once another has: not long where they have nothing to save."""
    beats = read_beats(folder)
    begin = all(one.number in beats and beats[one.number].place in begins for one in late)
    ends = any(one.number in beats and beats[one.number].patience is None for one in late)  # an error may be on its way
    hangs = all(one.code == _LEFT for one in ended)  # whoever can leave has left
    return _SOON_SECONDS if (begin or hangs) and not ends else LEAVING_SECONDS


def _send(ranks: Sequence[_Rank], number: signal.Signals) -> None:
    for one in ranks:
        for pid in stop_targets(one.pid) if number == signal.SIGTERM else [one.pid]:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def free_port() -> int:
    for port in random.sample(_PORTS, 100):
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            return port
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def run_ranks(job_dir: Path, *, forks: bool = False) -> int:
    """Be the agent of a job's ranks; end as their cause did: with its exit code, or by its signal."""
    job = read_whole(job_dir / JOB)
    assert job is not None, f"{job_dir / JOB} is missing"
    code = Agent(job, job_dir, forks=forks).run()
    if code < 0:
        sys.stderr.flush()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code
