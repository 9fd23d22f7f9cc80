"""Add up the memory of a Slurm job by scope: MaxRSS is one task's, the limit is a node's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from memfit.diagnosis._job import Job
from memfit.slurm import Row
from memfit.units import format_bytes

_TOTAL = "requested over its nodes"
#: Samples above this share of a limit can explain a kill at it.
_CLOSE = 0.85


class StepMemory(NamedTuple):
    """A step's memory on its fullest node, against what a node's tasks may use."""

    step: str
    job: Job
    most_bytes: int = 0  # of a node's tasks when each is as large as the largest; 0 when not sampled
    is_over: bool = False  # a node was over its limit, on average or when all tasks are as large as the largest
    text: str = ""  # the sum in a sentence; empty without a limit or a sample


def _sum_up(step: str, job: Job, limit_source: str) -> StepMemory:
    """Add up a node's tasks; ``limit_source`` is the setting that says what they may use."""
    tasks, limit = job.tasks_per_node or 1, job.request_bytes or 0
    mean, most = tasks * (job.task_mean_bytes or 0), tasks * (job.task_peak_bytes or 0)
    total, is_over = mean if mean > limit else most, max(mean, most) > limit
    if not limit or not total:
        return StepMemory(step, job, most)
    words = f"the {format_bytes(limit)} of a node ({limit_source})"
    said = f"{tasks} task{'s' if tasks != 1 else ''} x {format_bytes(total // tasks)} = {format_bytes(total)}"
    if mean > limit:
        said += f" on average, over {words}"
    elif most > limit:
        below = "; their mean is below it" if mean else ""
        said += f" when all are as large as the largest, over {words}{below}"
    elif most >= _CLOSE * limit:
        said += f" at most, close to {words}: samples can miss the peak"
    else:
        said += f" at most, below {words}: these samples do not explain a kill"
    return StepMemory(step, job, most, is_over, said)


def account_steps(rows: Sequence[Row], shape: Row | None = None) -> list[StepMemory]:
    """Return the steps of the first job's last attempt: the killed ones first, then those of ``srun``."""
    rows = [row for row in rows if row.job == rows[0].job]
    rows = [row for row in rows if row.attempt == rows[-1].attempt]
    whole = next((row for row in rows if not row.step), None)
    ran = [row for row in rows if row.step and row.step != "extern"]
    steps = [row for row in ran if row.max_rss_bytes is not None or row.num_tasks] or rows[:1]
    found = [_account(step, whole, shape) for step in steps or ([shape] if shape else [])]
    killed = {row.id for row in rows if row.state == "OUT_OF_MEMORY"}
    # A step's kill ends its batch script's step too, whose own memory says nothing.
    return sorted(
        found,
        key=lambda one: (one.step not in killed, not one.step.rpartition(".")[2].isdigit(), -one.most_bytes),
    )


def _account(step: Row, whole: Row | None, shape: Row | None) -> StepMemory:
    known = [one for one in (step, whole, shape) if one is not None]

    def first(name: str, rows: Sequence[Row] = known) -> Any:
        return next((value for row in rows if (value := getattr(row, name))), None)

    nodes = first("num_nodes") or next((count for one in known if (count := count_nodes(one.nodes))), None)
    cpus, tasks = first("num_cpus"), step.num_tasks or (shape.num_tasks if shape else None)
    limit, source = _limit([one for one in (shape, whole, step) if one is not None], nodes or 1, cpus)
    each = math.ceil((tasks or 1) / (nodes or 1))
    fullest = first("tasks_per_node")
    if fullest and each <= fullest <= (tasks or fullest):
        each = fullest
    elif nodes is None and source != _TOTAL:  # one task alone is surely on one node
        each = 1
    if step.step and not step.step.isdigit():
        each = 1
    # A task that was never sampled shows 0: that is no measurement.
    mean = step.ave_rss_bytes or (step.total_rss_bytes or 0) // (step.num_tasks or 1)
    job = Job(
        nodes=nodes,
        tasks_per_node=each if tasks or fullest else None,
        cpus_per_task=cpus // tasks or None if cpus and tasks else None,
        request_bytes=limit,
        task_peak_bytes=step.max_rss_bytes or None,
        task_mean_bytes=mean or None,
        limit_seconds=first("limit_seconds"),
        partition=first("partition") or "",
    )
    return _sum_up(step.id, job, source)


def _limit(known: Sequence[Row], nodes: int, cpus: int | None) -> tuple[int | None, str]:
    """What a node's tasks may use, and the setting that says so."""
    requests = [(one, one.request) for one in known if one.request and one.request.bytes]
    for _, request in requests:
        if request.scope == "node":
            return request.bytes, "requested"
        if request.scope == "cpu" and cpus:
            return request.bytes * (cpus // nodes), f"requested of a CPU x {cpus // nodes} CPUs"
    for one in reversed(known):
        if one.allocated_bytes:
            return one.allocated_bytes // (one.num_nodes or nodes), "AllocTRES over its nodes"
    for one, request in requests:  # without n or c: of the whole job, since Slurm 21.08
        if not one.step:
            return request.bytes // (one.num_nodes or nodes), _TOTAL
    return None, ""


def count_nodes(names: str) -> int | None:
    """Return how many nodes a list such as ``gpu[001-004,7],login1`` names; None for none, or a list that was cut."""
    if not re.fullmatch(r"(?:[\w.-]+(?:\[[\d,-]+\])?(?:,|$))+", names.strip()):
        return None
    count = 0
    for inside in re.findall(r"[\w.-]+(?:\[([\d,-]+)\])?(?:,|$)", names.strip()):
        spans = [span.partition("-") for span in inside.split(",")] if inside else [("0", "", "")]
        count += sum(int(last or first) - int(first) + 1 for first, _, last in spans)
    return count
