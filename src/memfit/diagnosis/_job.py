"""What a job requested and what was measured of it, by node, by task and by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from memfit.amounts import Amount, Layout, Scope
from memfit.slurm import MEMORY_OPTIONS, BatchScript, Limit, Setting, parse_request, parse_seconds
from memfit.units import format_bytes

#: What the settings of a training are called, by the last part of their key.
BATCH = (
    "batch_size", "per_device_train_batch_size", "train_batch_size_per_gpu", "train_micro_batch_size_per_gpu",
    "micro_batch_size", "train_batch_size", "batch",
)  # fmt: skip
ACCUMULATE = (
    "accumulate_grad_batches", "gradient_accumulation_steps", "accumulation_steps", "grad_accum_steps",
    "num_microbatches",
)  # fmt: skip
#: The option of sbatch that requests memory of each thing of a scope; a whole job's has none.
OPTION_OF = {scope: name for name, scope in MEMORY_OPTIONS.items()}
#: The same by the field of `Job`.
SETTINGS = {
    "batch": BATCH,
    "accumulate": ACCUMULATE,
    "workers": ("num_workers", "dataloader_num_workers", "workers", "n_workers"),
    "epochs": ("max_epochs", "num_train_epochs", "num_epochs", "epochs", "n_epochs"),
    "prefetch": ("prefetch_factor", "dataloader_prefetch_factor"),
    "persistent_workers": ("persistent_workers", "dataloader_persistent_workers"),
}


@dataclass(frozen=True)
class Job:
    """What is known of a job beside the cause of its death; None is unknown.

    Attributes:
        nodes, tasks_per_node, cpus_per_task, gpus_per_node: Its shape.
        request: The memory that it requested.
        step_request: What its script's ``srun`` requests; that step is held to it.
        script_request: What its script requests, where the accounting may say something else.
        node_memory: The memory of a node of its partition.
        task_peak, task_mean: Of its largest task (MaxRSS), and the mean over its tasks (AveRSS).
        node_peak: The peak of a whole node or container, as its cgroup counted it.
        batch, accumulate: Samples of a microbatch on one device, and microbatches of an update.
        workers, prefetch: Loader workers of a task, and batches that each keeps ready.
        persistent_workers: Whether they outlive an epoch.
        samples: Samples of an epoch, over all devices.
        epochs, epoch_seconds: How many epochs it was to run, and how long one took with its validation.
        limit_seconds: How long it was allowed to run.
        shm_bytes: The size of its /dev/shm.
        partition: Its name.
        env, options: Variables and options that its script sets; options by the last part of their key.
        mentioned: The fields above that the script, a config or a log names, whatever the value.
        under_memfit: It ran under memfit, whose settings then hold instead of Slurm's.
    """

    nodes: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    request: Amount | None = None
    step_request: Amount | None = None
    script_request: Amount | None = None
    node_memory: Amount | None = None
    task_peak: Amount | None = None
    task_mean: Amount | None = None
    node_peak: Amount | None = None
    batch: int | None = None
    accumulate: int | None = None
    workers: int | None = None
    prefetch: int | None = None
    persistent_workers: bool | None = None
    samples: int | None = None
    epochs: int | None = None
    epoch_seconds: float | None = None
    limit_seconds: int | None = None
    shm_bytes: int | None = None
    partition: str = ""
    env: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    mentioned: tuple[str, ...] = ()
    under_memfit: bool = False

    def with_known(self, other: Job) -> Job:
        """Return this job, with what it does not know taken from another account of it."""
        mine = {one.name: getattr(self, one.name) for one in fields(self)}
        theirs = {name: getattr(other, name) for name, value in mine.items() if value is None or value in ("", {})}
        theirs["mentioned"] = tuple(dict.fromkeys((*self.mentioned, *other.mentioned)))
        return replace(self, **theirs)

    @property
    def layout(self) -> Layout:
        """How it lies on its nodes."""
        return Layout(self.nodes, self.tasks_per_node, self.cpus_per_task, self.gpus_per_node)

    @property
    def node_request(self) -> Amount | None:
        """The memory that it requested of each node; None if that is not known."""
        return self.request and self.layout.to(self.request, "node")

    @property
    def limit(self) -> Amount | None:
        """What its tasks are held to, the request of their step or of the job: of a node, if that is known."""
        given = self.step_request or self.request
        return given and (self.layout.to(given, "node") or given)

    @property
    def disagreement(self) -> str:
        """A sentence, if the accounting and the script name different requests."""
        granted, written = self.node_request, replace(self, request=self.script_request).node_request
        if not granted or not written or written.scaled(0.98) <= granted <= written.scaled(1.02):
            return ""
        return (
            f"the accounting has {granted}, the script requests {format_bytes(written.bytes)}: "
            "it was submitted with another request"
        )

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
            found.append((task, f"{times}{_gib(each)} ({name} of a task)"))
        if self.node_peak and (node := self.layout.to(self.node_peak, per)):
            found.append((node, f"{_gib(self.node_peak)} (the node's own count)"))
        return max(found, key=lambda one: one[0], default=None)

    @property
    def halved(self) -> tuple[int, int]:
        """Half the batch (1 at least), and the microbatches of an update that then see as many samples."""
        batch = self.batch or 1
        smaller = max(1, batch // 2)
        return smaller, (self.accumulate or 1) * -(-batch // smaller)

    @property
    def needed_seconds(self) -> float | None:
        """How long all epochs take at the pace that was seen."""
        return self.epochs * self.epoch_seconds if self.epochs and self.epoch_seconds else None


def _gib(amount: Amount) -> str:
    return f"{amount.bytes / (1 << 30):.1f} GiB"  # one place, as sacct shows it


def job_of_script(script: BatchScript) -> Job:
    """Return what a batch script requests."""
    given = {name: one.value for name, one in script.directives.items()}
    nodes, tasks, per_node, cpus = (
        read_value(given.get(name)) for name in ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
    )
    if not {"nodes", "ntasks", "gpus"} & given.keys():
        nodes = 1  # sbatch(1): the nodes that one task needs
    if per_node is None and tasks and nodes and tasks % nodes == 0:
        per_node = tasks // nodes
    steps = [size for one in script.step_memory if (size := amount_of(one))]
    memory, shm = script.memory, script.find("shm_size")
    request = amount_of(memory) if memory else None
    settings = {name: found for name, keys in SETTINGS.items() if (found := script.find(*keys))}
    return Job(
        nodes=nodes,
        tasks_per_node=per_node,
        cpus_per_task=cpus,
        gpus_per_node=_gpus(given, nodes, per_node),
        request=request,
        step_request=steps[-1] if steps else None,
        script_request=request,
        shm_bytes=_size(shm.value) if shm else None,
        limit_seconds=parse_seconds(given.get("time", "")),
        partition=given.get("partition", ""),
        env={name: one.value for name, one in script.env.items()},
        options={one.name: found.value for one in script.settings if (found := script.find(one.name))},
        mentioned=tuple(settings),
        **{name: value_of(name, one.value) for name, one in settings.items()},
    )


def amount_of(setting: Setting) -> Amount | None:
    """Return what an option of `MEMORY_OPTIONS` requests, in its own unit; None for all memory, and for no size."""
    size = _size(setting.value)
    return Amount(size, MEMORY_OPTIONS[setting.key]) if size else None


def _size(text: str) -> int | None:
    """Bytes; GB is read as G, which Slurm counts in 1024s."""
    found = parse_request(text.upper().removesuffix("B").removesuffix("I"))
    return None if found is None or not found.bytes else found.bytes


def _gpus(given: dict[str, str], nodes: int | None, tasks_per_node: int | None) -> int | None:
    """The GPUs that the directives request of each node."""
    for part in given.get("gres", "").split(","):
        if part.partition(":")[0] == "gpu":
            return read_value(part.rpartition(":")[2]) or 1
    counts = {name: read_value(given.get(name, "").rpartition(":")[2]) for name in _GPU_OPTIONS}
    per_node, per_task, total = (counts[name] for name in _GPU_OPTIONS)
    if per_task:
        return per_node or (per_task * tasks_per_node if tasks_per_node else None)
    return per_node or (total // nodes if total and nodes and total % nodes == 0 else None)


_GPU_OPTIONS = ("gpus-per-node", "gpus-per-task", "gpus")


def most_of_node(limits: Sequence[Limit], partition: str = "") -> Amount | None:
    """Return the memory of a node: of its partition if that is known, else of the largest node."""
    own = [one.bytes for one in limits if one.name == partition]
    most = min(own) if own else max((one.bytes for one in limits), default=None)
    return None if most is None else Amount(most, "node")


def value_of(name: str, text: str | None) -> Any:
    """Return the value of a setting of `SETTINGS`; None for a text of another type."""
    found = read_value(text)
    return found if isinstance(found, bool) == (name == "persistent_workers") else None


def read_value(text: str | None) -> Any:
    """Return a whole number, or the truth that a word says; None for another text."""
    text = (text or "").lower()
    if text.isascii() and text.isdigit():
        return int(text)
    return {"true": True, "yes": True, "false": False, "no": False}.get(text)
