"""An incident report in Markdown, of nothing but what was diagnosed and measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memfit.diagnosis._job import Job, twice_asked
from memfit.diagnosis._remedies import with_figures
from memfit.diagnosis._remedies_device import foreign_bytes
from memfit.diagnosis._remedies_host import wanted_request
from memfit.diagnosis._remedies_other import wanted_time
from memfit.diagnosis._remedy import Remedy
from memfit.units import format_bytes, format_duration

if TYPE_CHECKING:
    from memfit.diagnosis._diagnose import Diagnosis
    from memfit.diagnosis._fix import Fix

SECTIONS = (
    "Problem", "Cause", "Evidence", "Timeline", "Memory", "Options", "Fix", "Budget", "Verification", "Lesson",
)  # fmt: skip
_KINDS = {
    "gpu": "out of the GPU's memory",
    "gpu_fragmentation": "out of the GPU's memory, with memory in its allocator that no request fitted",
    "host_cgroup": "killed at a limit of host memory",
    "host_kernel": "killed as the whole host ran out of memory",
    "shm": "out of /dev/shm",
    "host_alloc": "refused host memory",
    "pinned": "refused pinned host memory",
    "other_accelerator": "out of the accelerator's memory",
}


def what_happened(diagnosis: Diagnosis) -> str:
    """The diagnosis in a few words.

    >>> from memfit.diagnosis._diagnose import Diagnosis
    >>> what_happened(Diagnosis(True, False, "shm", "out_of_memory", "load", "proved"))
    'out of /dev/shm'
    >>> what_happened(Diagnosis(False, False, "none", "walltime", "train", "proved"))
    'walltime'
    """
    if diagnosis.cause == "killed":
        return "killed; by whom and why is not shown"
    if diagnosis.cause == "limit_touched":
        return "touched its limit of host memory; nothing was killed"
    return _KINDS.get(diagnosis.kind, diagnosis.cause.replace("_", " "))


def write_incident(
    diagnosis: Diagnosis, remedies: Sequence[Remedy], job: Job | None = None, fix: Fix | None = None
) -> str:
    """The report.

    Args:
        diagnosis: What killed the job.
        remedies: What to do, from `list_remedies`.
        job: What is known of the job.
        fix: The corrected script, where there is one.
    """
    job = with_figures(job or Job(), diagnosis)
    parts = (
        _problem(diagnosis, job),
        _cause(diagnosis),
        _evidence(diagnosis),
        _timeline(diagnosis),
        _memory(diagnosis, job),
        _options(remedies),
        _fix(remedies, fix),
        _budget(diagnosis, job),
        _verification(job, fix),
        _lesson(diagnosis, job),
    )
    text = [f"# Incident: {what_happened(diagnosis)}", ""]
    for title, lines in zip(SECTIONS, parts, strict=True):
        text += [f"## {title}", "", *lines, ""]
    return "\n".join(text)


def _problem(diagnosis: Diagnosis, job: Job) -> Iterator[str]:
    place = ", ".join(f"{name} {value}" for name, value in diagnosis.where.items() if value is not None)
    said = what_happened(diagnosis)
    phase = "" if diagnosis.phase == "unknown" else f", in phase {diagnosis.phase}"
    ended = ". It recovered and went on" if diagnosis.recovered else ""
    yield f"{said[:1].upper()}{said[1:]}{f' ({place})' if place else ''}{phase}{ended}."
    if job.ran_seconds:
        limit = f" of {format_duration(job.limit_seconds, short=True)} allowed" if job.limit_seconds else ""
        yield f"It ran {format_duration(job.ran_seconds)}{limit}."


def _cause(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.cause == "unknown":
        yield "Not known: no line that was read proves one."
        return
    said = what_happened(diagnosis)
    yield f"{said[:1].upper()}{said[1:]} (kind `{diagnosis.kind}`, {diagnosis.confidence})."
    yield from (f"- {line}" for line in diagnosis.arithmetic)
    others = [one for one in diagnosis.findings[1:4] if (one.kind, one.cause) != (diagnosis.kind, diagnosis.cause)]
    if others:
        yield f"Also said, and explained by it or less sure: {', '.join(dict.fromkeys(one.cause for one in others))}."


def _evidence(diagnosis: Diagnosis) -> Iterator[str]:
    for one in diagnosis.evidence:
        yield f"- `{one.file}:{one.line}` `{one.text.strip().replace('`', chr(39))[:300]}`"
    if not diagnosis.evidence:
        yield "None."


def _timeline(diagnosis: Diagnosis) -> Iterator[str]:
    for moment in diagnosis.timeline:
        text = moment.text.strip().replace("`", "'")[:160]
        yield f"- {moment.time or 'no time'}: {moment.what}, `{moment.file}:{moment.line}` `{text}`"
    if not diagnosis.timeline:
        yield "No line that was read has a time or shows progress."


def _memory(diagnosis: Diagnosis, job: Job) -> Iterator[str]:
    measured = job.node_bytes
    if job.told_twice is not None:
        said = twice_asked(job.told_twice)
        yield f"- {said[:1].upper()}{said[1:]}."
    if job.step_bytes and job.step_bytes != job.request_bytes:
        yield f"- The script's srun asks for {format_bytes(job.step_bytes)} of each node: its step is held to that."
    if measured is not None:
        line = f"- Host, each node: {measured[1]} = {format_bytes(measured[0])}"
        if job.limit_bytes:
            over = measured[0] - job.limit_bytes
            side = "over" if over > 0 else "below"
            line += f", {format_bytes(abs(over))} {side} the {format_bytes(job.limit_bytes)} asked for"
        yield line + "."
        if job.task_mean_bytes and job.task_peak_bytes:
            steady = (job.tasks_per_node or 1) * job.task_mean_bytes
            over_mean = job.limit_bytes is not None and steady > job.limit_bytes
            where = "already over the limit in steady state" if over_mean else "on average"
            yield f"- Host, each node: the tasks' means add up to {format_bytes(steady)}, {where}."
            if over_mean and diagnosis.phase in ("validate", "checkpoint"):
                yield f"- What {diagnosis.phase} added is at most the last straw."
        yield "- MaxRSS and AveRSS are of one task and count shared pages in each; --mem is of a node."
    figures = diagnosis.figures
    for name, said in (
        ("device_total", "in all"),
        ("reserved", "held by the allocator"),
        ("allocated", "in tensors"),
        ("tried", "asked for when it failed"),
    ):
        if name in figures:
            place = "Device" if diagnosis.kind not in ("host_alloc", "shm", "pinned") else "Request"
            yield f"- {place}: {format_bytes(figures[name])} {said}."
    if measured is None and not figures:
        yield "No figure is in what was read. `--sacct` gives the accounting's."


def _options(remedies: Sequence[Remedy]) -> Iterator[str]:
    helpful = [one for one in remedies if one.helps]
    if helpful:
        yield "The cheapest in speed first; bytes are what each makes room for."
        yield ""
        yield "| option | setting | bytes | costs in speed | enough alone | why |"
        yield "|---|---|---|---|---|---|"
    for one in helpful:
        saves = format_bytes(one.saves_bytes) if one.saves_bytes else "not known"
        enough = {True: "yes", False: "no", None: "not known"}[one.enough]
        cells = (one.title, f"`{one.setting}`" if one.setting else "", saves, one.cost, enough, one.reason)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    useless = [one for one in remedies if not one.helps]
    if useless:
        yield ""
        yield "Would change nothing here:"
        yield ""
    for one in useless:
        yield f"- {one.title}: {one.reason}."
    if not remedies:
        yield "None follows from what was read."


def _fix(remedies: Sequence[Remedy], fix: Fix | None) -> Iterator[str]:
    if fix is not None and fix.edits:
        for edit in fix.edits:
            yield f"- line {edit.line}: `{edit.new}`: {edit.reason}"
        yield from ("", "```diff", fix.diff, "```")
        return
    if fix is not None:
        yield f"Nothing in `{fix.path}` causes it."
    first = next((one for one in remedies if one.helps), None)
    if first is not None:
        yield f"{first.title[:1].upper()}{first.title[1:]}{f': `{first.setting}`' if first.setting else ''}."
    elif fix is None:
        yield "None follows from what was read."


def _budget(diagnosis: Diagnosis, job: Job) -> Iterator[str]:
    """Two ledgers, of each node and of each device; they are never added up."""
    wanted, measured = wanted_request(job), job.node_bytes
    rows = []
    if job.request_bytes or measured:
        rows = [
            ("asked for", job.limit_bytes),
            ("measured", measured[0] if measured else None),
            ("to ask for", wanted[0] if wanted and diagnosis.kind == "host_cgroup" else None),
            ("a node has", job.most_bytes),
        ]
        yield from _ledger("Host memory of each node", rows)
        if measured and wanted and diagnosis.kind == "host_cgroup":
            margin = wanted[0] - measured[0]
            yield ""
            share = f"{margin / measured[0]:.0%} of what was measured"
            yield f"Margin = to ask for - measured = {format_bytes(margin)}, {share}."
    figures = diagnosis.figures
    if diagnosis.kind in ("gpu", "gpu_fragmentation", "other_accelerator") and figures:
        values = dict(diagnosis.findings[0].values) if diagnosis.findings else {}
        tensors, held = figures.get("allocated"), figures.get("reserved")
        if rows:
            yield ""
        yield from _ledger(
            "Device memory of the device that was full",
            [
                ("in all", figures.get("device_total")),
                ("tensors", tensors),
                ("allocator, unused", held - tensors if held is not None and tensors is not None else None),
                ("others and the driver", foreign_bytes(values)),
                ("asked for beyond", figures.get("tried")),
            ],
        )
    elif not rows:
        yield "No figure of host or device memory is in what was read."


def _ledger(title: str, rows: Sequence[tuple[str, int | None]]) -> Iterator[str]:
    yield f"| {title} | |"
    yield "|---|---:|"
    yield from (f"| {name} | {format_bytes(count)} |" for name, count in rows if count is not None)


def _verification(job: Job, fix: Fix | None) -> Iterator[str]:
    script = str(fix.new_path or fix.path) if fix is not None and fix.edits else "FIXED"
    yield f"- `memfit diagnose --verify RUN --against {script}` says whether the settings were in force."
    if job.samples and job.batch and job.devices:
        steps = math.ceil(math.ceil(job.samples / job.devices) / job.batch)
        total = job.batch * job.devices * (job.accumulate or 1)
        yield f"- A batch of {job.batch} on {job.devices} devices: {steps} steps an epoch, {total} samples an update."
    if job.request_bytes:
        yield (
            "- While it runs: `sstat -j JOBID --format=JobID,NTasks,AveRSS,MaxRSS,MaxRSSNode`, or `memfit watch`; "
            "squeue shows no memory that is used."
        )
    wanted = wanted_time(job)
    if wanted is not None:
        limit = f"; {format_duration(job.limit_seconds, short=True)} allowed" if job.limit_seconds else ""
        yield f"- Time: {wanted[1]}{limit}."


def _lesson_of_node(job: Job) -> str:
    """What a task's figure teaches beside what was asked for a whole node; empty where not both are known."""
    measured, limit, tasks = job.node_bytes, job.limit_bytes, job.tasks_per_node or 1
    task = job.task_peak_bytes or job.task_mean_bytes or 0
    if not (measured and limit and task):
        return ""
    if task >= limit:
        return f"One task alone, {format_bytes(task)}, was as large as the {format_bytes(limit)} of its node."
    if tasks > 1 and measured[0] > limit:
        return (
            f"{format_bytes(task)} of one task looked small beside {format_bytes(limit)}; the limit "
            f"holds for the {tasks} tasks of a node together: {format_bytes(measured[0])}."
        )
    if tasks > 1:
        return (
            f"{format_bytes(task)} is the MaxRSS of one task; the limit of {format_bytes(limit)} holds for the {tasks} "
            f"tasks of a node together, at least {format_bytes(tasks * task)} by samples that may miss a peak."
        )
    return (
        f"MaxRSS showed {format_bytes(task)}, and the node was held to {format_bytes(limit)}: it is sampled and of one "
        "task, so below the limit it proves nothing."
    )


def _lesson(diagnosis: Diagnosis, job: Job) -> Iterator[str]:
    """What the figures teach; nothing where they teach nothing."""
    figures = diagnosis.figures
    if (diagnosis.kind.startswith("host") or diagnosis.cause == "killed") and (said := _lesson_of_node(job)):
        yield said
        return
    if diagnosis.kind in ("gpu", "gpu_fragmentation") and "device_total" in figures and diagnosis.findings:
        held = foreign_bytes(diagnosis.findings[0].values)
        if held is not None and held > 0.25 * figures["device_total"]:
            yield (
                f"{format_bytes(held)} of the device were not this process's: see who is on it before a training is "
                "made smaller."
            )
            return
    yield "The figures that were read teach none beyond the cause."
