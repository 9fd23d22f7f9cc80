"""What a job asked for and what was measured of it: by node, by task and by epoch, from all who know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from memfit.diagnosis._batch_script import BatchScript, Setting
from memfit.slurm import Limit, Row, Shape, parse_request, parse_seconds
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
WORKERS = ("num_workers", "dataloader_num_workers", "workers", "n_workers")
EPOCHS = ("max_epochs", "num_train_epochs", "num_epochs", "epochs", "n_epochs")
PERSISTENT = ("persistent_workers", "dataloader_persistent_workers")
PREFETCH = ("prefetch_factor", "dataloader_prefetch_factor")
#: The same by the field of `Job`.
SETTINGS = {
    "batch": BATCH, "accumulate": ACCUMULATE, "workers": WORKERS, "epochs": EPOCHS, "prefetch": PREFETCH,
    "persistent_workers": PERSISTENT,
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What is known of a job beside the cause of its death; None is not known.

    Attributes:
        nodes, tasks_per_node, cpus_per_task, gpus_per_node: Its shape.
        request_bytes: The memory of each node that it asked for.
        step_bytes: What the ``srun`` of its script asks for of each node; that step is held to it.
        script_bytes: What its script asks for of each node, where the accounting may say something else.
        most_bytes: What a node of its partition has for jobs.
        task_peak_bytes: The largest of its tasks (MaxRSS: of one task, wherever it ran).
        task_mean_bytes: The mean over its tasks (AveRSS).
        node_peak_bytes: The peak of a whole node or container, as its control group counted it.
        worker_bytes: What one loader worker holds of its own.
        batch_bytes: The size of one batch in host memory.
        batch, accumulate: Samples of a microbatch on one device, and microbatches of an update.
        workers, prefetch: Loader workers of a task, and batches that each has ready.
        persistent_workers: Whether they outlive an epoch; False is what torch does when nothing is said.
        samples: Samples of an epoch, over all devices.
        steps_per_epoch: Batches of an epoch on one device.
        epochs: How many it was to run.
        epoch_seconds: How long one took, with its validation.
        limit_seconds, ran_seconds: How long it was allowed to run, and ran.
        shm_bytes: The size of its /dev/shm.
        partition: Its name.
        env: Environment variables that its script sets.
        options: Every setting that its script's commands name, by the last part of the key.
        mentioned: The fields above that the script, a config or a log names, whatever the value.
        under_memfit: It ran under memfit, whose settings then hold in place of Slurm's.
    """

    nodes: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    request_bytes: int | None = None
    most_bytes: int | None = None
    task_peak_bytes: int | None = None
    task_mean_bytes: int | None = None
    node_peak_bytes: int | None = None
    worker_bytes: int | None = None
    batch_bytes: int | None = None
    batch: int | None = None
    accumulate: int | None = None
    workers: int | None = None
    prefetch: int | None = None
    persistent_workers: bool | None = None
    samples: int | None = None
    steps_per_epoch: int | None = None
    epochs: int | None = None
    epoch_seconds: float | None = None
    limit_seconds: int | None = None
    ran_seconds: int | None = None
    shm_bytes: int | None = None
    partition: str = ""
    env: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    step_bytes: int | None = None
    script_bytes: int | None = None
    mentioned: tuple[str, ...] = ()
    under_memfit: bool = False

    def with_known(self, other: Job) -> Job:
        """This job, with what it does not know from another account of it.

        >>> Job(batch=8).with_known(Job(batch=4, workers=2)).workers
        2
        """
        mine = {one.name: getattr(self, one.name) for one in fields(self)}
        theirs = {name: getattr(other, name) for name, value in mine.items() if value is None or value in ("", {})}
        theirs["mentioned"] = tuple(dict.fromkeys((*self.mentioned, *other.mentioned)))
        return replace(self, **theirs)

    @property
    def limit_bytes(self) -> int | None:
        """What a node's tasks are held to: what their step asks for, else the job."""
        return self.step_bytes or self.request_bytes

    @property
    def told_twice(self) -> tuple[int, int] | None:
        """What the accounting and what the script say was asked for of each node, where they differ."""
        told, written = self.request_bytes, self.script_bytes
        return (told, written) if told and written and abs(told - written) > 0.02 * written else None

    @property
    def devices(self) -> int | None:
        """The ranks of the training: its tasks where each has a device, else its GPUs."""
        nodes = self.nodes or 1
        per_node = max(self.tasks_per_node or 0, self.gpus_per_node or 0)
        return nodes * per_node if per_node else None

    @property
    def node_bytes(self) -> tuple[int, str] | None:
        """The memory of a node that was measured, and how it was reckoned; None when nothing was measured."""
        found = []
        tasks = self.tasks_per_node or 1
        if self.task_peak_bytes:
            found.append((tasks * self.task_peak_bytes, f"{tasks} x {_gib(self.task_peak_bytes)} (MaxRSS of a task)"))
        elif self.task_mean_bytes:
            found.append((tasks * self.task_mean_bytes, f"{tasks} x {_gib(self.task_mean_bytes)} (AveRSS of a task)"))
        if self.node_peak_bytes:
            found.append((self.node_peak_bytes, f"{_gib(self.node_peak_bytes)} (the node's own count)"))
        return max(found) if found else None

    @property
    def needed_seconds(self) -> float | None:
        """How long all of its epochs take at the pace that was seen."""
        return self.epochs * self.epoch_seconds if self.epochs and self.epoch_seconds else None


def _gib(count: int) -> str:
    """GiB to one place, as sacct shows them.

    >>> _gib(77846282240)
    '72.5 GiB'
    """
    return f"{count / (1 << 30):.1f} GiB"


def job_of_script(script: BatchScript) -> Job:
    """What a batch script asks for."""
    given = {name: one.value for name, one in script.directives.items()}
    nodes, tasks = whole(given.get("nodes")), whole(given.get("ntasks"))
    per_node = whole(given.get("ntasks-per-node"))
    if per_node is None and tasks and nodes and tasks % nodes == 0:
        per_node = tasks // nodes
    cpus = whole(given.get("cpus-per-task"))
    of_node = (per_node or 1) * (cpus or 1)
    steps = [size for one in script.step_memory if (size := bytes_of(one, of_node))]
    request, shm = memory_of(script, of_node), script.find("shm_size")
    is_sure = script.memory is not None and (script.memory.key == "mem" or bool(per_node and cpus))
    return Job(
        nodes=nodes,
        tasks_per_node=per_node,
        cpus_per_task=cpus,
        gpus_per_node=gpus_of(script, per_node or 1),
        request_bytes=request,
        step_bytes=steps[-1] if steps else None,
        script_bytes=request if is_sure else None,
        shm_bytes=_size(shm.value) if shm else None,
        batch=_training(script, BATCH),
        accumulate=_training(script, ACCUMULATE),
        workers=_training(script, WORKERS),
        prefetch=_training(script, PREFETCH),
        persistent_workers=truth(found.value) if (found := script.find(*PERSISTENT)) else None,
        epochs=_training(script, EPOCHS),
        limit_seconds=parse_seconds(given.get("time", "")),
        partition=given.get("partition", ""),
        env={name: one.value for name, one in script.env.items()},
        options={one.name: found.value for one in script.settings if (found := script.find(one.name))},
        mentioned=tuple(name for name, keys in SETTINGS.items() if script.find(*keys)),
    )


def twice_asked(told: tuple[int, int]) -> str:
    """Two accounts of one request in a sentence.

    >>> twice_asked((96 << 30, 64 << 30))
    'the accounting has 96.00 GiB of each node, the script asks for 64.00 GiB: it was submitted with another request'
    """
    return (
        f"the accounting has {format_bytes(told[0])} of each node, the script asks for {format_bytes(told[1])}: it was "
        "submitted with another request"
    )


def memory_of(script: BatchScript, cpus: int) -> int | None:
    """The bytes of each node that it asks for; GB is read as G, which Slurm counts in 1024s."""
    return None if script.memory is None else bytes_of(script.memory, cpus)


def bytes_of(setting: Setting, cpus: int) -> int | None:
    """The bytes of each node that ``--mem`` or ``--mem-per-cpu`` asks for; None for all of a node's."""
    size = _size(setting.value)
    return size * (1 if setting.key == "mem" else cpus) if size else None


def _size(text: str) -> int | None:
    found = parse_request(text.upper().removesuffix("B").removesuffix("I"))
    return None if found is None or not found.bytes else found.bytes


def gpus_of(script: BatchScript, tasks_per_node: int) -> int | None:
    """The GPUs of each node that it asks for."""
    given = {name: one.value for name, one in script.directives.items()}
    for part in given.get("gres", "").split(","):
        if part.partition(":")[0] == "gpu":
            return whole(part.rpartition(":")[2]) or 1
    if (count := whole(given.get("gpus-per-node", "").rpartition(":")[2])) is not None:
        return count
    if (count := whole(given.get("gpus-per-task", "").rpartition(":")[2])) is not None:
        return count * tasks_per_node
    total, nodes = whole(given.get("gpus", "").rpartition(":")[2]), whole(given.get("nodes")) or 1
    return None if total is None else total // nodes


def job_of_rows(rows: Sequence[Row]) -> Job:
    """What the accounting says of the last attempt of its first job."""
    if not rows:
        return Job()
    last = max(row.attempt for row in rows if row.job == rows[0].job)
    rows = [row for row in rows if row.job == rows[0].job and row.attempt == last]
    steps = [row for row in rows if row.step and row.step not in ("batch", "extern")] or rows
    largest = max(steps, key=lambda row: row.max_rss_bytes or 0)
    nodes = next((row.num_nodes for row in rows if row.num_nodes), None)
    tasks, cpus = largest.num_tasks, next((row.num_cpus for row in rows if row.num_cpus), None)
    request = next((row.request for row in rows if row.request and row.request.bytes), None)
    allocated = next((row.allocated_bytes for row in rows if row.allocated_bytes), None)
    size = None
    if request is not None:
        share = {"node": 1.0, "cpu": (cpus or 1) / (nodes or 1), "job": 1 / (nodes or 1)}[request.scope]
        size = round(request.bytes * share)
    elif allocated:
        size = allocated // (nodes or 1)
    num_cpus = largest.num_cpus or cpus
    limits = (row.limit_seconds for row in rows if row.limit_seconds)
    return Job(
        nodes=nodes,
        tasks_per_node=math.ceil(tasks / (nodes or 1)) if tasks else None,
        cpus_per_task=num_cpus // tasks or None if tasks and num_cpus else None,
        request_bytes=size,
        task_peak_bytes=largest.max_rss_bytes or None,
        task_mean_bytes=largest.ave_rss_bytes or None,
        limit_seconds=next(limits, None),
        ran_seconds=next((row.seconds for row in rows if row.seconds), None),
        partition=next((row.partition for row in rows if row.partition), ""),
    )


def job_of_shape(shape: Shape) -> Job:
    """What ``scontrol show job`` says."""
    nodes, request = shape.num_nodes, None
    if shape.request is not None and shape.request.bytes:
        cpus = (shape.num_cpus or 1) // (nodes or 1)
        request = shape.request.bytes * (cpus if shape.request.scope == "cpu" else 1)
    elif shape.allocated_bytes:
        request = shape.allocated_bytes // (nodes or 1)
    each = math.ceil(shape.num_tasks / (nodes or 1)) if shape.num_tasks else None
    return Job(
        nodes=nodes,
        tasks_per_node=shape.tasks_per_node or each,
        cpus_per_task=shape.num_cpus // shape.num_tasks or None if shape.num_tasks and shape.num_cpus else None,
        request_bytes=request,
        limit_seconds=shape.limit_seconds,
        ran_seconds=shape.seconds,
        partition=shape.partition,
    )


def most_of_node(limits: Sequence[Limit], partition: str = "") -> int | None:
    """What a node gives at most: of its partition where that is told, else of the largest that is told."""
    sizes = [(one.name == partition, one.bytes) for one in limits if one.scope == "node" and one.bytes]
    own = [size for is_own, size in sizes if is_own and size]
    return min(own) if own else max((size for _, size in sizes if size), default=None)


def _training(script: BatchScript, names: tuple[str, ...]) -> int | None:
    found = script.find(*names)
    return whole(found.value) if found else None


def whole(text: Any) -> int | None:
    """A whole number; None for another text.

    >>> whole("16"), whole("2-4"), whole(None)
    (16, None, None)
    """
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else None


def truth(text: str) -> bool | None:
    """What a word for yes or no says.

    >>> truth("False"), truth("true"), truth("4")
    (False, True, None)
    """
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text.lower())
