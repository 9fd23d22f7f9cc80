"""The memory of a Slurm job, reckoned by scope: what a task took, times the tasks of a node, against the node's limit.

A MaxRSS below ``--mem`` proves nothing: it is of one task, and the limit holds for all tasks of a node together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memfit.slurm import Row, Shape
from memfit.units import format_bytes

Verdict = Literal["over_in_steady_state", "over_if_tasks_are_alike", "below", "unknown"]
_TOTAL = "ReqMem over its nodes"
#: The share of a limit from which on samples that stay below it still speak for it.
_CLOSE = 0.85


@dataclass(frozen=True)
class NodeAccount:
    """A step's memory on one node against what the node may use.

    Attributes:
        step: The step whose tasks count, as ``273202.0``.
        limit_bytes: What all of its processes on one node may use together; None when not told.
        limit_source: Which setting says so.
        num_nodes, tasks_per_node: The step's shape; the fullest node counts.
        average_bytes: AveRSS, of one task; None when not sampled.
        peak_bytes: MaxRSS, of the largest task; None when not sampled.
    """

    step: str
    limit_bytes: int | None
    limit_source: str
    num_nodes: int
    tasks_per_node: int
    average_bytes: int | None
    peak_bytes: int | None

    @property
    def steady_bytes(self) -> int | None:
        """What the tasks of a node take together on average."""
        return None if self.average_bytes is None else self.average_bytes * self.tasks_per_node

    @property
    def worst_bytes(self) -> int | None:
        """What they take when each is as large as the largest."""
        return None if self.peak_bytes is None else self.peak_bytes * self.tasks_per_node

    @property
    def verdict(self) -> Verdict:
        """Whether the node was over its limit."""
        limit, steady, worst = self.limit_bytes, self.steady_bytes, self.worst_bytes
        if limit is not None and steady is not None and steady > limit:
            return "over_in_steady_state"
        if limit is None or worst is None:
            return "unknown"
        return "over_if_tasks_are_alike" if worst > limit else "below"

    @property
    def text(self) -> str:
        """The arithmetic in a sentence."""
        if self.limit_bytes is None:
            return f"step {self.step}: the limit of a node is not told, so its tasks' memory cannot be held against it"
        limit = f"{format_bytes(self.limit_bytes)} of a node ({self.limit_source})"
        if self.average_bytes is not None and self.verdict == "over_in_steady_state":
            return f"{self._product(self.average_bytes)} on average, over the {limit}"
        if self.peak_bytes is None or self.worst_bytes is None:
            return f"step {self.step}: no sample of its tasks' memory to hold against the {limit}"
        what = self._product(self.peak_bytes)
        if self.verdict == "over_if_tasks_are_alike":
            mean = "" if self.average_bytes is None else "; their mean is below it"
            return f"{what} when all are as large as the largest, over the {limit}{mean}"
        if self.worst_bytes >= _CLOSE * self.limit_bytes:
            return f"{what} at most, close to the {limit}: samples miss what lies between them"
        return f"{what} at most, below the {limit}: what was sampled does not explain a kill"

    def _product(self, each: int) -> str:
        tasks = self.tasks_per_node
        return f"{tasks} task{'s' if tasks != 1 else ''} x {format_bytes(each)} = {format_bytes(each * tasks)}"


def account_nodes(rows: Sequence[Row], *, shape: Shape | None = None) -> list[NodeAccount]:
    """The account of each step that ran tasks, of the last attempt of one job; the step that was killed comes first."""
    last = max((row.attempt for row in rows), default=1)
    rows = [row for row in rows if row.attempt == last]
    job = next((row for row in rows if not row.step), None)
    steps = [
        row for row in rows if row.step and row.step != "extern" and (row.max_rss_bytes is not None or row.num_tasks)
    ]
    found = []
    for step in steps:
        known = _count_nodes(step, job, shape)
        nodes = known or 1
        limit, source = _node_limit(job, step, nodes, shape)
        tasks = step.num_tasks or (shape.num_tasks if shape else None) or 1
        each = math.ceil(tasks / nodes)
        fullest = shape.tasks_per_node if shape else None
        if fullest and each <= fullest <= tasks:
            each = fullest
        elif known is None and tasks > 1 and source != _TOTAL:
            each = 1
        if not step.step.isdigit():
            each = 1
        # A task that was never sampled shows 0: that is no measurement.
        total = step.total_rss_bytes // (step.num_tasks or 1) if step.total_rss_bytes else None
        peak, average = step.max_rss_bytes or None, step.ave_rss_bytes or total
        found.append(NodeAccount(step.id, limit, source, nodes, each, average, peak))
    killed = {row.id for row in steps if row.state == "OUT_OF_MEMORY"}
    # A step's kill ends its batch script's step too, whose own memory says nothing.
    return sorted(
        found,
        key=lambda one: (one.step not in killed, not one.step.rpartition(".")[2].isdigit(), -(one.worst_bytes or 0)),
    )


def _count_nodes(step: Row, job: Row | None, shape: Shape | None) -> int | None:
    told = [step.num_nodes, count_names(step.nodes), shape.num_nodes if shape else None]
    told += [job.num_nodes, count_names(job.nodes)] if job else []
    return next((count for count in told if count), None)


def count_names(nodes: str) -> int | None:
    """How many nodes a list names; None for none, or one that was cut."""
    count = 0
    for name, inside in re.findall(r"([\w.-]+)(?:\[([\d,-]+)\])?(?:,|$)", nodes.strip()):
        spans = [span.partition("-") for span in inside.split(",")] if inside else []
        count += sum(int(last or first) - int(first) + 1 for first, _, last in spans) if spans else bool(name)
    whole = re.fullmatch(r"(?:[\w.-]+(?:\[[\d,-]+\])?(?:,|$))+", nodes.strip())
    return count if whole else None


def _node_limit(job: Row | None, step: Row, nodes: int, shape: Shape | None) -> tuple[int | None, str]:
    """What one node's processes may use, and which setting says so."""
    cpus = (step.num_cpus or (job.num_cpus if job else None) or (shape.num_cpus if shape else None) or 0) // nodes
    for request, source in (
        (shape and shape.request, "scontrol's MinMemory"),
        (job and job.request, "ReqMem"),
        (step.request, "ReqMem"),
    ):
        if not request or not request.bytes:
            continue
        if request.scope == "node":
            return request.bytes, source
        if request.scope == "cpu" and cpus:
            return request.bytes * cpus, f"{source} of a CPU x {cpus} CPUs"
    for total, count, source in (
        (step.allocated_bytes, nodes, "AllocTRES over its nodes"),
        (job and job.allocated_bytes, (job and job.num_nodes) or nodes, "AllocTRES over its nodes"),
        (shape and shape.allocated_bytes, (shape and shape.num_nodes) or nodes, "AllocTRES over its nodes"),
    ):
        if total:
            return total // count, source
    if job is not None and job.request is not None and job.request.bytes:
        return job.request.bytes // (job.num_nodes or nodes), _TOTAL  # without n or c: of the whole job since 21.08
    return None, ""
