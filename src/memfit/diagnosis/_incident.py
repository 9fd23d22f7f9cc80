"""Write an incident report: the diagnosis, its remedies and the fix in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memfit.diagnosis._figures import NOTICEABLE
from memfit.diagnosis._job import Job
from memfit.diagnosis._remedies import DEVICES, wanted_request, wanted_time, with_figures
from memfit.diagnosis._remedy_table import Remedy
from memfit.masking import redact
from memfit.units import format_bytes, format_duration

if TYPE_CHECKING:
    from memfit.diagnosis._diagnose import Diagnosis
    from memfit.diagnosis._fix import Fix

_KINDS = {
    "gpu": "out of the GPU's memory",
    "gpu_fragmentation": "out of the GPU's memory, although its cache had room (fragmentation)",
    "host_cgroup": "killed at a limit of host memory",
    "host_kernel": "killed as the whole host ran out of memory",
    "shm": "out of /dev/shm",
    "host_alloc": "refused host memory",
    "pinned": "refused pinned host memory",
    "other_accelerator": "out of the accelerator's memory",
}
_CAUSES = {
    "killed": "killed; by whom and why is not shown",
    "exit_status": "ended by itself, with an exit status that is an error",
    "limit_touched": "touched its limit of host memory; nothing was killed",
}


_HYPOTHESES = {
    "proved": "The job was {0}. The lines above prove it.",
    "likely": "The job was probably {0}. The lines above suggest it, and none proves it.",
    "not shown": "Not known. No line that was read shows a cause; give more files, such as the kernel's log or sacct.",
}
_RESULT = [
    "Fill this in after the next run.",
    "",
    "| question | answer |",
    "|---|---|",
    "| Did the job end by itself? | |",
    "| Its peak memory, and the limit | |",
    "| Does the hypothesis hold? | |",
]


def what_happened(diagnosis: Diagnosis) -> str:
    """Return the diagnosis in a few words.

    >>> from memfit.diagnosis import Diagnosis
    >>> what_happened(Diagnosis(True, False, "shm", "out_of_memory", "load", "proved"))
    'out of /dev/shm'
    """
    cause, checked = diagnosis.cause, diagnosis.checked
    is_full = checked.total is not None and (checked.slack or 0) < NOTICEABLE * checked.total
    kind = diagnosis.kind.removesuffix("_fragmentation") if is_full else diagnosis.kind
    return _CAUSES.get(cause) or _KINDS.get(kind, cause.replace("_", " "))


def headline_of(diagnosis: Diagnosis) -> str:
    """Return the diagnosis in a few words, and how sure it is."""
    if diagnosis.cause == "unknown":
        return "unknown: no line proves a cause"
    return f"{what_happened(diagnosis)} ({diagnosis.confidence})"


def facts_of(diagnosis: Diagnosis) -> str:
    """Return kind, cause, phase and place, with commas."""
    where = (f"{name} {value}" for name, value in diagnosis.where.items() if value is not None)
    return ", ".join((f"kind {diagnosis.kind}", f"cause {diagnosis.cause}", f"phase {diagnosis.phase}", *where))


def write_incident(
    diagnosis: Diagnosis, remedies: Sequence[Remedy], job: Job | None = None, fix: Fix | None = None
) -> str:
    """Return the report.

    Args:
        diagnosis: What killed the job.
        remedies: What to do, from `list_remedies`.
        job: What is known of the job.
        fix: The corrected script, if there is one.
    """
    job = with_figures(job or Job(), diagnosis)
    is_known = diagnosis.cause != "unknown"
    went_on = ", the work went on" if diagnosis.recovered else ""
    fixed = [f"- line {edit.line}: `{edit.new}`: {edit.reason}" for edit in fix.edits] if fix else []
    if fix is not None:
        fixed = [*fixed, "", "```diff", fix.diff, "```"] if fixed else [f"Nothing in `{fix.path}` causes it."]
    sections = {
        "## Symptom": [
            f"{facts_of(diagnosis)}{went_on}.",
            "",
            *(f"- `{one.file}:{one.line}` `{_code(one.text)}`" for one in diagnosis.evidence),
        ],
        "### Timeline": [
            f"- {one.time or 'no time'}: {one.what}, `{one.file}:{one.line}` `{_code(one.text)}`"
            for one in diagnosis.timeline
        ],
        "### Memory": [*(f"- {line}" for line in (*diagnosis.arithmetic, *diagnosis.notes)), *_memory(diagnosis, job)],
        "## Hypothesis": [
            _HYPOTHESES[diagnosis.confidence if is_known else "not shown"].format(what_happened(diagnosis))
        ],
        "## Experiment": ["Change one thing, and run again."],
        "### Options": list(_options(remedies)),
        "### Fix": fixed,
        "### Next run": list(_next_run(job, fix)),
        "## Result": _RESULT,
    }
    text = [f"# Incident: {headline_of(diagnosis)}", ""]
    for heading, lines in sections.items():
        text += [heading, "", *(lines or ["Nothing in what was read."]), ""]
    return redact("\n".join(text))


def _code(text: str) -> str:
    return text.strip().replace("`", "'")[:300]


def _memory(diagnosis: Diagnosis, job: Job) -> Iterator[str]:
    """The figures of a node and those of a device; they are never added up."""
    if job.disagreement:
        yield f"- {job.disagreement[:1].upper()}{job.disagreement[1:]}."
    measured, wanted = job.peak(), wanted_request(job) if diagnosis.kind == "host_cgroup" else None
    if measured and job.task_peak_bytes:
        yield f"- {measured[1]} = {measured[0]}. MaxRSS is of one task, --mem is of a node."
    if measured and wanted and wanted[0].per == "node":
        margin = wanted[0].bytes - measured[0].bytes
        yield f"- Margin = request - measured = {format_bytes(margin)}, {margin / measured[0].bytes:.0%} of the peak."
    sizes = {"requested": job.limit, "measured": measured and measured[0], "to request": wanted and wanted[0]}
    node = {name: one.bytes if one and one.per == "node" else None for name, one in sizes.items()}
    ledgers: dict[str, dict[str, int | None]] = {"Host memory of each node": {**node, "a node has": job.most_bytes}}
    if diagnosis.kind in DEVICES:
        figures = diagnosis.checked
        ledgers["Memory of the device"] = {
            "total": figures.total,
            "tensors": figures.allocated,
            "unused cache": figures.slack,
            "other processes and the driver": figures.foreign,
            "the request that failed": figures.tried,
        }
    for title, rows in ledgers.items():
        known = [f"| {name} | {format_bytes(count)} |" for name, count in rows.items() if count is not None]
        yield from ("", f"| {title} | |", "|---|---:|", *known) if known else ()


def _options(remedies: Sequence[Remedy]) -> Iterator[str]:
    helpful = [one for one in remedies if one.helps]
    if helpful:
        yield from ("| option | setting | bytes | costs in speed | enough alone | why |", "|---|---|---|---|---|---|")
    for one in helpful:
        saves = format_bytes(one.saves_bytes) if one.saves_bytes else "not known"
        enough = {True: "yes", False: "no", None: "not known"}[one.enough]
        cells = (one.title, f"`{one.setting}`" if one.setting else "", saves, one.cost, enough, one.reason)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    useless = [f"- {one.title}: {one.reason}" for one in remedies if not one.helps]
    yield from ("", "These would change nothing:", "", *useless) if useless else ()


def _next_run(job: Job, fix: Fix | None) -> Iterator[str]:
    script = str(fix.new_path or fix.path) if fix is not None and fix.edits else "FIXED"
    yield f"- `memfit diagnose --verify RUN --against {script}` says whether the settings were in force."
    if job.samples and job.batch and job.devices:
        steps = math.ceil(math.ceil(job.samples / job.devices) / job.batch)
        total = job.batch * job.devices * (job.accumulate or 1)
        yield f"- A batch of {job.batch} on {job.devices} devices: {steps} steps an epoch, {total} samples an update."
    wanted = wanted_time(job)
    if wanted is not None:
        limit = f"; {format_duration(job.limit_seconds, short=True)} allowed" if job.limit_seconds else ""
        yield f"- Time: {wanted[1]}{limit}."
