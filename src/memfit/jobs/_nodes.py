"""One job on several nodes of Slurm: a shim on each node, and one that starts them, follows them and ends as they do.

A node's shim sees the folder ``nodes_<attempt>`` of the job as a run of its own with one job for each node. ``srun``
starts it as ``python -m memfit.jobs shim FOLDER --node``.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.jobs._folder import JOB, OUTCOME, STATUS, ask_to_stop, read_record
from memfit.jobs._job import JobStatus
from memfit.jobs._shim import Shim, Stop, main
from memfit.rundir import open_own, refresh, write_masked

#: Which end is told of all: a node that was short of memory ends the others.
_FIRST = ("out_of_memory", "failed", "timeout", "node_fail", "preempted", "cancelled", "completed")
#: A port for torchrun's rendezvous, by the job's number.
_PORTS = range(20000, 40000)


def run_node(folder: Path) -> int:
    """Run the part of a job that is for this node; return its exit code."""
    return main(folder / "jobs" / f"node_{os.environ['SLURM_NODEID']}")


def make_nodes(job_dir: Path, order: Mapping[str, Any]) -> Path:
    """Write the orders of the nodes' shims; return their folder."""
    folder = job_dir / f"nodes_{order['attempt']}"
    (folder / "events").mkdir(parents=True, exist_ok=True)
    number = int(os.environ["SLURM_JOB_ID"])
    # torchrun takes these for its arguments. Source: torch.distributed.run, the action "env" of its parser.
    rendezvous = {
        "PET_NNODES": str(order["num_nodes"]),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ID": str(number),
        "PET_RDZV_ENDPOINT": f"{socket.gethostname()}:{_PORTS[number % len(_PORTS)]}",
        "PET_MAX_RESTARTS": "0",
    }
    for index in range(order["num_nodes"]):
        path = folder / "jobs" / f"node_{index}"
        path.mkdir(parents=True, exist_ok=True)
        own = {"id": path.name, "num_nodes": 1, "env": rendezvous | order["env"]}
        write_masked(path / JOB, {**order, **own}, durable=False)
    return folder


class NodesShim(Shim):
    """Starts a shim on each node, and is one job to the supervisor: the peak is that of the node that took most."""

    def __init__(self, job: Mapping[str, Any], job_dir: Path, stop: Stop) -> None:
        self.folder = make_nodes(job_dir, job)
        step = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=60", "--mem=0"]
        shim = [sys.executable, "-P", "-m", "memfit.jobs", "shim", str(self.folder), "--node"]
        super().__init__({**job, "command": [*step, *shim]}, job_dir, stop)

    def run(self) -> JobStatus:
        status = super().run()
        ends = {one.name: read_record(one.name, one / OUTCOME) for one in self.folder.glob("jobs/*") if refresh(one)}
        known = {name: end for name, end in ends.items() if end is not None}
        for name in sorted(known):
            for log in ("out.log", "err.log"):
                path = self.folder / "jobs" / name / log
                with suppress(OSError), open_own(path) as own, open(self.job_dir / log, "ab") as file:
                    shutil.copyfileobj(own, file)
        if not known:
            return status
        worst = min(known, key=lambda name: (_FIRST.index(known[name].state), name))
        end = known[worst]
        status = self._merged(status)
        if end.state == "completed" or self.stop.since is not None:
            return status
        node = f"{end.node or worst}: {end.cause}"
        return replace(status, state=end.state, cause=node, ended_by=end.ended_by, evidence=end.evidence)

    def _files(self, name: str) -> list[Path]:
        return sorted(self.folder.glob(f"jobs/*/{name}"))

    def _merged(self, status: JobStatus) -> JobStatus:
        """Return the job's status with the memory of the node that takes most."""
        files = [*self._files(STATUS), *self._files(OUTCOME)]
        nodes = [one for path in files if (one := read_record(status.job_id, path)) is not None]
        if not nodes:
            return status
        most = max(nodes, key=lambda one: one.peak_bytes)
        return replace(
            status,
            used_bytes=max(one.used_bytes for one in nodes),
            peak_bytes=most.peak_bytes,
            footprint=most.footprint,
            node=f"{self.job['num_nodes']} nodes",
        )

    def _write(self, status: JobStatus) -> None:
        super()._write(self._merged(status))

    def _pass_on_stop(self, pid: int, sent: str | None) -> str | None:
        """Ask the nodes' shims to stop, and end ``srun`` only after them."""
        if self.stop.since is None:
            return None
        is_over = self.stop.is_over(self.grace_seconds)
        word = "SIGKILL" if is_over else "SIGTERM"
        if word != sent:
            for path in self._files(JOB):
                ask_to_stop(path.parent, now=is_over)
        return word
