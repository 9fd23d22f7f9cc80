"""Add up the memory of a Slurm job by scope: MaxRSS is one task's, the limit is a node's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from memfit.amounts import Amount, Layout
from memfit.diagnosis._job import Job
from memfit.slurm import Row
from memfit.units import format_bytes, format_count

_TOTAL = "requested over its nodes"
#: Samples above this share of a limit can explain a kill at it.
_CLOSE = 0.85


class StepMemory(NamedTuple):
    """A step's memory on its fullest node, against what a node's tasks may use."""

    step: str
    job: Job
    most: Amount = Amount(0, "job")  # of all tasks when each is as large as the largest; 0 when not sampled
    is_over: bool = False  # a node was over its limit, on average or when all tasks are as large as the largest
    text: str = ""  # the sum in a sentence; empty without a limit or a sample


def _sum_up(step: Row, job: Job, limit_source: str) -> StepMemory:
    """Add up the tasks that share a limit; ``limit_source`` is the setting that says what they may use."""
    limit, none = job.request, Amount(0, "task")
    all_tasks = Layout(nodes=1, tasks_per_node=step.num_tasks or 1).to(job.task_peak or none, "job")
    found = StepMemory(step.id, job, all_tasks or Amount(0, "job"))
    known = step.num_tasks if limit and limit.per == "job" else job.tasks_per_node
    tasks = known or 1
    shared = Layout(nodes=1, tasks_per_node=tasks)  # the tasks that share the limit, as if they were on one node
    mean, most = (limit and shared.to(one or none, limit.per) for one in (job.task_mean, job.task_peak))
    if not limit or not mean or not most:
        return found
    total = mean if limit < mean else most
    if not total.bytes:
        return found
    words = f"the {format_bytes(limit.bytes)} of {'a node' if limit.per == 'node' else 'the job'} ({limit_source})"
    said = f"{format_count(tasks, 'task')} x {format_bytes(total.bytes // tasks)} = {format_bytes(total.bytes)}"
    if known is None and max(mean, most) <= limit:
        said += f" of {words}: how many tasks share them is not known"
    elif limit < mean:
        said += f" on average, over {words}"
    elif limit < most:
        below = "; their mean is below it" if mean.bytes else ""
        said += f" when all are as large as the largest, over {words}{below}"
    elif limit.scaled(_CLOSE) <= most:
        said += f" at most, close to {words}"
    else:
        said += f" at most, below {words}: these samples do not explain a kill"
    said += "; MaxRSS is one task's, and samples can miss the peak"
    return found._replace(is_over=limit < max(mean, most), text=said)


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
        key=lambda one: (one.step not in killed, not one.step.rpartition(".")[2].isdigit(), -one.most.bytes),
    )


def _account(step: Row, whole: Row | None, shape: Row | None) -> StepMemory:
    known = [one for one in (step, whole, shape) if one is not None]

    def first(name: str, rows: Sequence[Row] = known) -> Any:
        return next((value for row in rows if (value := getattr(row, name))), None)

    nodes = first("num_nodes") or next((count for one in known if (count := count_nodes(one.nodes))), None)
    cpus, tasks = first("num_cpus"), step.num_tasks or (shape.num_tasks if shape else None)
    each, fullest = math.ceil(tasks / nodes) if tasks and nodes else None, first("tasks_per_node")
    if tasks == 1 or (step.step and not step.step.isdigit()):  # one task is surely on one node
        each = 1
    elif fullest and (each or 1) <= fullest <= (tasks or fullest):
        each = fullest
    # A task that was never sampled shows 0: that is no measurement.
    mean = step.ave_rss_bytes or (step.total_rss_bytes or 0) // (step.num_tasks or 1)
    layout = Layout(nodes, each, cpus // tasks or None if cpus and tasks else None)
    if cpus and nodes and layout.cpus_per_task is None and cpus % nodes == 0:  # all CPUs of a node, as if of one task
        layout = Layout(nodes, 1, cpus // nodes)
    limit, source = _limit([one for one in (shape, whole, step) if one is not None], layout)
    job = Job(
        nodes=nodes,
        tasks_per_node=each,
        cpus_per_task=cpus // tasks or None if cpus and tasks else None,
        request=limit,
        task_peak=Amount(step.max_rss_bytes, "task") if step.max_rss_bytes else None,
        task_mean=Amount(mean, "task") if mean else None,
        limit_seconds=first("limit_seconds"),
        partition=first("partition") or "",
    )
    found = _sum_up(step, job, source)
    alone = Amount(max(mean, step.max_rss_bytes or 0), "node")  # of its largest task's node, at least
    if limit is None or source != _TOTAL or alone <= limit or max(one.num_nodes or 1 for one in known) == 1:
        return found
    said = f"ReqMem would be {limit} as the job's total, and one task held {format_bytes(alone.bytes)}: it may be a "
    said += "node's. What a node may use is not known without the script"
    return found._replace(job=replace(job, request=None), is_over=False, text=said)


def _limit(known: Sequence[Row], layout: Layout) -> tuple[Amount | None, str]:
    """What a node's tasks may use (else the whole job's, or a CPU), and the setting that says so."""
    asked = [(one, one.request, "requested") for one in known if one.request and one.request.bytes]
    found = [row for row in asked if row[1].per != "job"]
    found += [(one, Amount(one.allocated_bytes, "job"), "AllocTRES") for one in known[::-1] if one.allocated_bytes]
    found += [row for row in asked if row[1].per == "job" and not row[0].step]  # without n or c, since Slurm 21.08
    for one, amount, source in found:
        if node := replace(layout, nodes=one.num_nodes or layout.nodes).to(amount, "node"):
            of_cpu = f" of a CPU x {format_count(node.bytes // amount.bytes, 'CPU')}"
            return node, source + {"cpu": of_cpu, "job": " over its nodes"}.get(amount.per, "")
    return found[0][1:] if found else (None, "")


def count_nodes(names: str) -> int | None:
    """Return how many nodes a list such as ``gpu[001-004,7],login1`` names; None for none, or a list that was cut."""
    if not re.fullmatch(r"(?:[\w.-]+(?:\[[\d,-]+\])?(?:,|$))+", names.strip()):
        return None
    count = 0
    for inside in re.findall(r"[\w.-]+(?:\[([\d,-]+)\])?(?:,|$)", names.strip()):
        spans = [span.partition("-") for span in inside.split(",")] if inside else [("0", "", "")]
        count += sum(int(last or first) - int(first) + 1 for first, _, last in spans)
    return count
