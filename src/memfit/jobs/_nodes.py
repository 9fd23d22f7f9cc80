"""One job on several nodes of Slurm: a shim on each, and one that starts them, follows them and ends as they do."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from memfit.errors import PeerFailedError
from memfit.files import open_own, outlast, refresh, write_masked
from memfit.jobs._child import ERROR, RESULT
from memfit.jobs._folder import JOB, ask_to_stop
from memfit.jobs._monitor import Monitor
from memfit.jobs._processes import spawn
from memfit.jobs._ranks import ELSEWHERE, LEAVING_SECONDS, RANKS, Headway, free_port
from memfit.jobs._watch import Shim, Stop
from memfit.memory import Footprint
from memfit.rundir import CANARY_VARIABLE, OUTCOME, STATUS, EventWriter, JobStatus, read_beats, read_record

#: Which end is told of all: a node that was short of memory ends the others.
_FIRST = ("out_of_memory", "failed", "timeout", "node_fail", "preempted", "cancelled", "completed")


def make_nodes(job_dir: Path, order: Mapping[str, Any], generation: int) -> Path:
    """Write the orders of the nodes' shims; return their folder, a new one for each generation of ranks."""
    folder = job_dir / (f"nodes_{order['attempt']}" + f"_{generation}" * bool(generation))
    (folder / "events").mkdir(parents=True, exist_ok=True)
    num_nodes, ranks = order["num_nodes"], order["ranks"]
    # torchrun takes these for its arguments. Source: torch.distributed.run, the action "env" of its parser.
    rendezvous = {
        "PET_NNODES": str(num_nodes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ID": os.environ["SLURM_JOB_ID"],
        "PET_RDZV_ENDPOINT": f"{socket.gethostname()}:{free_port()}",
        "PET_MAX_RESTARTS": "0",
    } | ({"MEMFIT_GENERATION": str(generation)} if ranks > 1 else {})
    for index in range(num_nodes):
        path = folder / "jobs" / f"node_{index}"
        path.mkdir(parents=True, exist_ok=True)
        own = {"id": path.name, "node": index, "num_nodes": 1, "num_devices": order["num_devices"] // num_nodes}
        if ranks > 1:
            own["threads"] = max(1, order["threads"] // num_nodes)
        write_masked(path / JOB, {**order, **own, "env": rendezvous | order["env"]}, durable=False)
    return folder


class NodesShim(Shim):
    """Starts a shim on each node, and is one job to the supervisor: the peak is that of the node that took most. If a
    rank is lost, all begin again in another step of the same allocation."""

    def __init__(self, job: Mapping[str, Any], job_dir: Path, stop: Stop, *, forks: bool = False) -> None:
        self.order, self.generation, self.headway = job, 0, Headway(CANARY_VARIABLE in job["env"])
        self._was_lost = False
        super().__init__(self._make_step(job_dir), job_dir, stop)

    def _make_step(self, job_dir: Path) -> dict[str, Any]:
        self._look_at, self._lost_at = 0.0, math.inf
        self.folder = make_nodes(job_dir, self.order, self.generation)
        # Ranks leave by themselves once one is lost, and say what they saw.
        ends = ("--kill-on-bad-exit=0", "--wait=0") if self.has_ranks else ("--kill-on-bad-exit=1", "--wait=60")
        shim = (sys.executable, "-P", "-m", "memfit.jobs", "shim", str(self.folder), "--node")
        return {**self.order, "command": ["srun", *self.order["step"], *ends, *shim], "target": None, "ranks": 1}

    @property
    def has_ranks(self) -> bool:
        return int(self.order["ranks"]) > 1

    def run(self) -> JobStatus:
        status, ends = super().run(), self._ends()
        if not ends:
            return status
        worst = _worst(ends)
        for name, node in ((RESULT, "node_0"), (ERROR, worst)):
            with contextlib.suppress(OSError):
                shutil.copyfile(self.folder / "jobs" / node / name, self.job_dir / name)
        end, status = ends[worst], self._merged(status)
        if self._was_lost and end.state != "out_of_memory" and (gone := self._without_end(ends)):
            cause = f"{', '.join(gone)} failed: its ranks left no outcome, and those of the other nodes lost them"
            return replace(status, state="node_fail", cause=cause, ended_by="platform")
        if end.state == "completed" or self.stop.since is not None:
            return status
        cause = f"{end.node or worst}: {end.cause}"
        return replace(status, state=end.state, cause=cause, ended_by=end.ended_by, evidence=end.evidence)

    def follow(self, pid: int, monitor: Monitor) -> tuple[int, str | None]:
        while True:
            returncode, stopped_by = super().follow(pid, monitor)
            self._take_logs()
            if self.stop.since is not None or not self._begins_again():
                self._was_lost |= self.has_ranks and stopped_by is None  # all ended before a stop was passed on
                return returncode, stopped_by
            self.generation += 1
            self.job = self._make_step(self.job_dir)
            pid, _ = spawn(self.job, self.job_dir, self.group)
            monitor.note(pid=pid)

    def _begins_again(self) -> bool:
        """Return whether the ranks begin again after a loss, and say so."""
        ends = self._ends()
        if not self.has_ranks or len(ends) < self.order["num_nodes"]:  # a node is gone: another allocation is needed
            return False
        end = ends[_worst(ends)]
        beats = read_beats(self.folder / RANKS / f"{self.attempt}_{self.generation}").values()
        if end.state != "failed" or not self.headway.begins_again(beats, end.exit_code):
            return False
        text = (
            f"{end.node}: {end.cause}. All {self.order['ranks']} ranks begin again from the last checkpoint "
            f"(generation {self.generation + 1})"
        )
        events = EventWriter(self.run_dir.events_dir, self.job_dir.name)
        events.write("ranks_again", generation=self.generation + 1, text=f"{self.job_dir.name} {text}")
        events.close()
        return True

    def _take_logs(self) -> None:
        for log in ("out.log", "err.log"):
            for path in self._files(log):
                with contextlib.suppress(OSError), open_own(path) as own, open(self.job_dir / log, "ab") as file:
                    shutil.copyfileobj(own, file)

    def _files(self, name: str) -> list[Path]:
        """Return the files of this name that the nodes have; other hosts write them, so none is taken for absent."""
        found = [folder / name for folder in sorted(self.folder.glob("jobs/*")) if refresh(folder)]
        return [path for path in found if path.exists()]

    def _ends(self) -> dict[str, JobStatus]:
        found = outlast(lambda: [read_record(path) for path in self._files(OUTCOME)])
        return {end.job_id: end for end in found if end is not None}

    def _without_end(self, ends: Mapping[str, JobStatus]) -> list[str]:
        """Return the nodes whose shims wrote no outcome: they were killed with all else there, or never began."""
        folders = [path.parent for path in self._files(JOB) if path.parent.name not in ends]
        known = [(folder.name, read_record(folder / STATUS)) for folder in folders]
        return [one.node if one is not None and one.node else name for name, one in known]

    def _merged(self, status: JobStatus) -> JobStatus:
        """Return the job's status with the memory of the node that takes most, in each phase too."""
        files = [*self._files(STATUS), *self._files(OUTCOME)]
        nodes = [one for path in files if (one := read_record(path)) is not None]
        if not nodes:
            return status
        sizes = [one.footprint for one in nodes if one.footprint is not None]
        every = [{**one, "node": node.node} for node in nodes for one in node.ranks]
        ranks = {one["rank"]: one for one in sorted(every, key=itemgetter("peak_bytes"))}
        devices = {uuid: held for one in nodes for uuid, held in one.device_used_bytes.items()}
        return replace(
            status,
            device_used_bytes=devices,
            ranks=[ranks[rank] for rank in sorted(ranks)],
            used_bytes=max(one.used_bytes for one in nodes),
            peak_bytes=max(one.peak_bytes for one in nodes),
            footprint=functools.reduce(Footprint.merge, sizes) if sizes else None,
            node=f"{self.order['num_nodes']} nodes",
        )

    def write(self, status: JobStatus) -> None:
        with contextlib.suppress(OSError):
            super().write(self._merged(status))

    def pass_on_stop(self, pid: int, sent: str | None) -> str | None:
        """Ask the nodes' shims to stop, and end ``srun`` only after them."""
        if self.stop.since is None:
            self._end_late()
            return None
        if sent is None:  # of a node that is gone Slurm may tell, by this stop, just when the others noticed it
            ended = self.has_ranks and any(end.state == "failed" for end in self._ends().values())
            self._was_lost = ended or self._lost_at < math.inf
        is_over = self.stop.is_over(self.grace_seconds)
        word = "SIGKILL" if is_over else "SIGTERM"
        if word != sent:
            for path in self._files(JOB):
                ask_to_stop(path.parent, now=is_over)
        return word

    def _end_late(self) -> None:
        """End the ranks of nodes that have not left a while after those of another node."""
        now = time.monotonic()
        if not self.has_ranks or now < self._look_at:
            return
        self._look_at, ends = now + 1.0, self._ends()
        if any(end.state != "completed" for end in ends.values()):
            self._lost_at = min(self._lost_at, now)
        if now - self._lost_at > LEAVING_SECONDS:
            for path in self._files(JOB):
                if path.parent.name not in ends:
                    ask_to_stop(path.parent, now=True)


def _worst(ends: Mapping[str, JobStatus]) -> str:
    """Return the node whose end is told of all: of ranks, the one where the first was lost."""
    return min(
        ends,
        key=lambda name: (
            _FIRST.index(ends[name].state),
            ends[name].exit_code == PeerFailedError.exit_code,
            ELSEWHERE in (ends[name].cause or ""),
            ends[name].ended or 0.0,
            name,
        ),
    )
