"""What a job requested and what was measured of it, by node, by task and by epoch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from memfit.amounts import Amount, Layout, Scope
from memfit.units import GIB

#: What the settings of a training are called, by the last part of their key, and by the field of `Job`.
SETTINGS = {
    "batch": (
        "batch_size", "per_device_train_batch_size", "train_batch_size_per_gpu", "train_micro_batch_size_per_gpu",
        "micro_batch_size", "train_batch_size", "batch",
    ),
    "accumulate": (
        "accumulate_grad_batches", "gradient_accumulation_steps", "accumulation_steps", "grad_accum_steps",
        "num_microbatches",
    ),
    "workers": ("num_workers", "dataloader_num_workers", "workers", "n_workers"),
    "epochs": ("max_epochs", "num_train_epochs", "num_epochs", "epochs", "n_epochs"),
}  # fmt: skip
BATCH, ACCUMULATE, CHECKPOINTING = SETTINGS["batch"], SETTINGS["accumulate"], "gradient_checkpointing"
#: The options of sbatch and srun that request memory, each with its scope. Source: sbatch(1), srun(1), Slurm 24.11.
MEMORY_OPTIONS: dict[str, Scope] = {"mem": "node", "mem-per-cpu": "cpu", "mem-per-gpu": "gpu"}
OPTION_OF = {scope: name for name, scope in MEMORY_OPTIONS.items()}


@dataclass(frozen=True)
class Job:
    """What is known of a job beside the cause of its death; None is unknown."""

    nodes: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    request: Amount | None = None  # the memory that it requested
    script_request: Amount | None = None  # what its script requests, where the accounting may say something else
    no_single_limit: str = ""  # why its script does not say what the tasks that died were held to; empty if it does
    task_peak: Amount | None = None  # of its largest task (MaxRSS)
    task_mean: Amount | None = None  # over its tasks (AveRSS)
    node_peak: Amount | None = None  # of a whole node or container, as its cgroup counted it
    batch: int | None = None  # samples of a microbatch on one device
    accumulate: int | None = None  # microbatches of an update
    workers: int | None = None  # loader workers of a task
    samples: int | None = None  # of an epoch, over all devices
    epochs: int | None = None  # that it was to run
    epoch_seconds: float | None = None  # of one, with its validation
    limit_seconds: int | None = None  # how long it was allowed to run
    env: dict[str, str] = field(default_factory=dict)  # variables that its script sets
    options: dict[str, str] = field(default_factory=dict)  # of its script, by the last part of their key
    mentioned: tuple[str, ...] = ()  # fields above that the script, a config or a log names, whatever the value

    def with_known(self, other: Job) -> Job:
        """Return this job, with what it does not know taken from another account of it."""
        theirs = {name: getattr(other, name) for name, value in vars(self).items() if value in (None, "", {})}
        theirs["mentioned"] = tuple(dict.fromkeys((*self.mentioned, *other.mentioned)))
        return replace(self, **theirs)

    @property
    def layout(self) -> Layout:
        return Layout(self.nodes, self.tasks_per_node, self.cpus_per_task, self.gpus_per_node)

    @property
    def node_request(self) -> Amount | None:
        """The memory that it requested of each node; None if that is not known."""
        return self.request and self.layout.to(self.request, "node")

    @property
    def limit(self) -> Amount | None:
        """What its tasks are held to: of a node, if that is known."""
        return self.node_request or self.request

    @property
    def halved(self) -> tuple[int, int]:
        """Half the batch (1 at least), and the microbatches of an update that then see as many samples."""
        smaller = max(1, (self.batch or 2) // 2)
        return smaller, (self.accumulate or 1) * -(-(self.batch or 2) // smaller)

    @property
    def devices(self) -> int | None:
        """The ranks of the training: its tasks where each has a device, else its GPUs."""
        per_node = max(self.tasks_per_node or 0, self.gpus_per_node or 0)
        return self.nodes * per_node if self.nodes and per_node else None

    def peak(self, per: Scope = "node") -> tuple[Amount, str] | None:
        """Return what was measured, in this scope, and its arithmetic; None if that is not known."""
        each, name = (self.task_peak, "MaxRSS") if self.task_peak else (self.task_mean, "AveRSS")
        found: list[tuple[Amount, str]] = []
        if each and (task := self.layout.to(each, per)):
            times = f"{self.tasks_per_node} x " if per == "node" else ""
            found.append(
                (task, f"{times}{each.bytes / GIB:.1f} GiB ({name} of a task)")
            )  # one place, as sacct shows it
        if self.node_peak and (node := self.layout.to(self.node_peak, per)):
            found.append((node, f"{self.node_peak.bytes / GIB:.1f} GiB (the node's own count)"))
        return max(found, key=lambda one: one[0], default=None)

    @property
    def needed_seconds(self) -> float | None:
        """How long all epochs take at the pace that was seen."""
        return self.epochs * self.epoch_seconds if self.epochs and self.epoch_seconds else None


def read_number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None
