"""What starts a training elsewhere: its sizes, and the batch script or Kubernetes Job that has them."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field, replace
from posixpath import join, normpath
from typing import Annotated, Any, Literal

from pydantic import Field

from memfit import config
from memfit.amounts import Amount, Layout
from memfit.config import ByteSize, Settings
from memfit.errors import DoesNotFitError, UsageError
from memfit.jobs import render_script
from memfit.planning._ledger import Forecast
from memfit.planning._machine import Count
from memfit.units import format_bytes, write_size

LaunchFormat = Literal["sbatch", "kubernetes"]
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]
_Folder = Annotated[str, Field(pattern=r"^[\w./][\w./ +@=,-]*$")]
_Claim = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*)?$")]
_Image = Annotated[str, Field(pattern=r"^(\w[\w./:@-]*)?$")]

_EARLY_SECONDS = 60  # Slurm may send a signal up to a minute early
_ENDING_SECONDS = 10  # what memfit takes to end, after its job
_MOST_REQUEUES, _MOST_RESTARTS = 20, 5
_HOME = "/app"  # where the code lies in an image
_STEP = "srun --kill-on-bad-exit=1 --wait=60"


class LaunchSettings(Settings):
    """What a config says of its start elsewhere, beside what ``memfit run`` reads; docs/launch.md has each key."""

    start_with: Literal["memfit", "srun"] = "memfit"  # who starts the ranks: ``memfit run`` on one node, or Slurm
    cpus_per_rank: Count | None = None
    shm: ByteSize | None = None  # None: from the loaders that the plan counts, 64 MiB at least
    image: _Image = ""  # as it was pushed
    claim: _Claim = ""  # empty: the name of the experiment
    data: list[_Folder] = Field(default_factory=list)
    outputs: list[_Folder] = Field(default_factory=list)
    env: dict[_Variable, _Line] = Field(default_factory=dict)
    pass_env: list[_Variable] = Field(default_factory=list)


@dataclass(frozen=True)
class Launch:
    """A training with its sizes; each ``_why`` says how a figure follows, in words."""

    name: str  # names the job, the service and its image
    settings: LaunchSettings  # the config's block ``launch``
    command: tuple[str, ...]  # what starts the run on one node; with ``srun``, one rank
    layout: Layout  # nodes, ranks on each, CPUs of a rank, GPUs of a node
    forecast: Forecast  # the ledger that memory follows from, of the stage that takes most
    memory: Amount  # what a node or container needs
    memory_why: str
    shm: Amount  # the part of it that /dev/shm must hold
    shm_why: str
    time: str  # the time limit; the partition's own when empty
    grace_seconds: float  # how long a job may take to save and end after SIGTERM
    env: dict[str, str] = field(default_factory=dict)  # variables of the training
    slurm: dict[str, str] = field(default_factory=dict)  # options of ``sbatch`` that say where it runs
    slurm_extra: tuple[str, ...] = ()  # further ones, as they were given

    @property
    def by_srun(self) -> bool:
        """True if Slurm starts each rank as a task."""
        return self.settings.start_with == "srun"

    @property
    def num_nodes(self) -> int:
        """The nodes of the job."""
        return self.layout.nodes or 1

    @property
    def num_ranks(self) -> int:
        """The ranks on each node."""
        return self.layout.tasks_per_node or 1

    @property
    def num_cpus(self) -> int:
        """The cores on each node."""
        return self.num_ranks * (self.layout.cpus_per_task or 1)

    def check_node(self, limit: Amount, where: str) -> None:
        """Refuse more memory than one node has."""
        if not self.memory <= limit:
            found = replace(
                self.forecast,
                limit=limit.scaled(1 / (1 + self.forecast.slack)),
                limit_from=where,
                shm_limit=None,
                num_ranks=self.num_nodes * self.num_ranks,
                num_nodes=self.num_nodes,
                uncounted=(),
            )
            raise DoesNotFitError(
                f"{self.name} needs {self.memory}: {self.memory_why}.",
                rule=f"{where} has {format_bytes(limit.bytes)}.",
                remedy=found.change or "request less on top: --set memory.slack=0.05, or use nodes that have it",
            )

    def figures(self) -> dict[str, Any]:
        """Return the sizes as JSON values; bytes are of one node."""
        names = "memory_why shm_why time grace_seconds"
        sizes = {"memory_bytes": self.memory.bytes, "shm_bytes": self.shm.bytes, "cpus_per_node": self.num_cpus}
        ranks = {"num_nodes": self.num_nodes, "num_ranks": self.num_nodes * self.num_ranks}
        return ranks | sizes | {name: getattr(self, name) for name in names.split()}


def render(launch: Launch, form: LaunchFormat) -> str:
    """Return the file; refuse a format that has no place for ranks of Slurm or for a folder."""
    if form != "sbatch" and launch.by_srun:
        raise UsageError(
            f"{launch.name} has ranks that srun starts.",
            rule=f"--format {form} starts all ranks in one container.",
            remedy="give --format sbatch; or one node: --set slurm.nodes=1 --set launch.start_with=memfit",
        )
    return {"sbatch": _sbatch, "kubernetes": _kubernetes}[form](launch)


def _sbatch(launch: Launch) -> str:
    tasks, gpus = launch.num_ranks if launch.by_srun else 1, launch.layout.gpus_per_node
    words = shlex.join(launch.command)
    start = words if launch.by_srun else f"sh -c {shlex.quote(f'exec {words}')}"
    options: dict[str, str | None] = {
        "job-name": launch.name,
        **launch.slurm,
        "nodes": str(launch.num_nodes),
        "ntasks": str(launch.num_nodes * tasks),
        "ntasks-per-node": str(tasks),
        "cpus-per-task": str(launch.num_cpus // tasks),
        "gres": f"gpu:{gpus}" if gpus else "",
        "mem": write_size(launch.memory.bytes),
        "time": launch.time,
        # To the ranks and not to this script, which has to start the job again.
        "signal": f"TERM@{math.ceil(launch.grace_seconds) + _EARLY_SECONDS}",
        "requeue": None,
        "open-mode": "append",
        "output": f"{launch.name}_%j.log",
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in launch.env.items()]
    needed = [f': "${{{name}:?set it before sbatch}}"' for name in launch.settings.pass_env]
    again = f'[ "$code" -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {_MOST_REQUEUES} ]'
    body = [
        f"# memory: {launch.memory_why}",
        f"# signal: grace_seconds, {launch.grace_seconds:g} s, and a minute that Slurm may be early",
        *needed,
        *exports,
        f"{_STEP} {start}",
        "code=$?",
        "# 75: it was stopped, and has saved. It goes on where it stood.",
        f'if {again}; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$code"',
    ]
    return render_script(options, launch.slurm_extra, "\n".join(body))


def _kubernetes(launch: Launch) -> str:
    """Return a Job. Source of its fields: the API batch/v1, Kubernetes 1.31, where podFailurePolicy is stable."""
    settings, memory = launch.settings, write_size(launch.memory.bytes, ("Gi", "Mi"))
    limits: dict[str, Any] = {"memory": memory}
    if launch.layout.gpus_per_node:
        limits["nvidia.com/gpu"] = launch.layout.gpus_per_node
    env: dict[str, dict[str, Any]] = {name: {"value": _plain(value)} for name, value in launch.env.items()}
    for name in settings.pass_env:
        env[name] = {"valueFrom": {"secretKeyRef": {"name": launch.name, "key": name}}}
    env["MEMFIT_RUNS_DIR"] = {"value": f"{_HOME}/runs"}
    container = {
        "name": launch.name,
        "image": settings.image or launch.name,
        "command": [_plain(word) for word in launch.command],
        "env": [{"name": name} | value for name, value in env.items()],
        "resources": {"requests": limits | {"cpu": launch.num_cpus}, "limits": limits},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *_mounts(launch)],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(launch.grace_seconds) + _ENDING_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": write_size(launch.shm.bytes, ("Gi", "Mi"))}},
            {"name": "files", "persistentVolumeClaim": {"claimName": settings.claim or launch.name}},
        ],
    }
    rules = [
        {"action": "Ignore", "onExitCodes": {"containerName": launch.name, "operator": "In", "values": [75]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": launch.name, "operator": "In", "values": [2, 3]}},
    ]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": launch.name},
        "spec": {"backoffLimit": _MOST_RESTARTS, "podFailurePolicy": {"rules": rules}, "template": {"spec": pod}},
    }
    notes = [
        f"# memory: {launch.memory_why}",
        f"# /dev/shm: {launch.shm_why}; it counts towards the memory",
        f"# terminationGracePeriodSeconds: grace_seconds, and {_ENDING_SECONDS} s for memfit",
        "# podFailurePolicy: a stop (exit code 75) and an eviction start a new pod, which goes on; bad settings (2)",
        f"# and too little memory (3) end the Job; a kill or an error counts, {_MOST_RESTARTS} times at most",
        f"# volumes: the claim {settings.claim or launch.name} holds runs and the folders of launch.data and .outputs",
    ]
    return "\n".join([*notes, config.write_yaml(job)])


def _mounts(launch: Launch) -> list[dict[str, Any]]:
    """Return where the folders of the claim appear; each is a folder of the claim."""
    found: list[dict[str, Any]] = []
    written = dict.fromkeys(map(normpath, ("runs", *launch.settings.outputs)), False)
    folders = written | {one: True for one in map(normpath, launch.settings.data) if one not in written}
    for one, reads in folders.items():
        below = one.lstrip("/")
        if below.startswith("..") or below in ("", ".", "dev/shm"):
            raise UsageError(
                f"the folder {one} cannot be a part of a claim.",
                rule="Kubernetes mounts folders of a volume by a path below it, and not over the code or /dev/shm.",
                remedy="name the folder without ..: an absolute path, or one below the current folder",
            )
        mount: dict[str, Any] = {"name": "files", "mountPath": join(_HOME, one), "subPath": below}
        found.append(mount | ({"readOnly": True} if reads else {}))
    return found


def _plain(text: str) -> str:
    """Return a text in which Kubernetes replaces nothing."""
    return text.replace("$", "$$")
