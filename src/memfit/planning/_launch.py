"""What starts a training elsewhere: its sizes worked out from a plan, of which each format is a rendering."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from memfit.amounts import Amount, Layout
from memfit.config import ByteSize, Settings
from memfit.errors import DoesNotFitError
from memfit.planning._ledger import Forecast
from memfit.planning._machine import Count
from memfit.units import format_bytes

LaunchFormat = Literal["sbatch", "compose", "kubernetes"]
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]
_Folder = Annotated[str, Field(pattern=r"^[\w./][\w./ +@=,-]*$")]
_Claim = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*)?$")]
_Image = Annotated[str, Field(pattern=r"^(\w[\w./:@-]*)?$")]


class LaunchSettings(Settings):
    """What a config says of its start elsewhere, beside what ``memfit run`` reads; docs/launch.md has each key."""

    start_with: Literal["memfit", "srun"] = "memfit"  # who starts the ranks: ``memfit run`` on one node, or Slurm
    cpus_per_rank: Count | None = None
    num_epochs: Count | None = None
    epoch_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
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
    time_why: str
    grace_seconds: float  # how long a job may take to save and end after SIGTERM
    grace_why: str
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
                limit=limit,
                limit_from=where,
                shm_limit=None,
                slack_counts=True,
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
        names = "memory_why shm_why time time_why grace_seconds grace_why"
        sizes = {"memory_bytes": self.memory.bytes, "shm_bytes": self.shm.bytes, "cpus_per_node": self.num_cpus}
        ranks = {"num_nodes": self.num_nodes, "num_ranks": self.num_nodes * self.num_ranks}
        return ranks | sizes | {name: getattr(self, name) for name in names.split()}
