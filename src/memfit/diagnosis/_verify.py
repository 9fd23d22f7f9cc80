"""Whether the settings of a fixed script were really in force in a run, each with what shows it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from memfit.checks import Check, Verdict
from memfit.diagnosis._batch_script import BatchScript, read_script
from memfit.diagnosis._job import Job, job_of_script
from memfit.diagnosis._ran import Ran
from memfit.units import format_bytes, format_duration

_NOT_SHOWN = "nothing that was read shows it"
_ACCOUNTING = (
    "sacct -j JOBID -P --format=JobID,JobName,State,ExitCode,ReqMem,MaxRSS,AveRSS,NTasks,NNodes,NCPUS,Timelimit"
)


def verify_fix(ran: Ran, against: Path, *, before: Ran | None = None) -> list[Check]:
    """One check for each setting of the fixed script: in force, not in force, or not shown.

    Args:
        ran: The run that should have used it.
        against: The fixed script.
        before: The run before it, by whose steps the number of samples is known when no line tells it.

    Raises:
        UsageError: The script cannot be read.
    """
    script = read_script(against)
    fixed = job_of_script(script)
    old_path = original_of(against)
    old = job_of_script(read_script(old_path)) if old_path.exists() else Job()
    return [
        *_resources(ran.job, fixed),
        *_batch(ran, fixed, old, before),
        *_settings(ran, fixed, old),
        *_environment(ran, script),
        *_checkpoints(ran),
    ]


def is_any_shown(checks: Sequence[Check]) -> bool:
    """Whether anything that the run left shows one of the settings, in force or not."""
    return any(check.verdict == "problem" or (check.verdict == "ok" and check.source) for check in checks)


def original_of(fixed: Path) -> Path:
    """The file that a fixed one was made from.

    >>> str(original_of(Path("a/train.fixed.2.slurm")))
    'a/train.slurm'
    """
    return fixed.with_name(fixed.stem.partition(".fixed")[0] + fixed.suffix)


def _resources(found: Job, fixed: Job) -> Iterator[Check]:
    """What Slurm granted."""
    sizes = (
        ("memory", fixed.request_bytes, found.request_bytes, lambda count: f"{format_bytes(count)} of each node"),
        ("nodes", fixed.nodes, found.nodes, str),
        ("tasks", fixed.tasks_per_node, found.tasks_per_node, lambda count: f"{count} on each node"),
        ("cpus", fixed.cpus_per_task, found.cpus_per_task, lambda count: f"{count} of each task"),
        ("time", fixed.limit_seconds, found.limit_seconds, lambda count: format_duration(count, short=True)),
    )
    for name, wanted, got, write in sizes:
        if wanted is None:
            continue
        if got is None:
            yield Check(name, "warning", f"{write(wanted)} asked for; {_NOT_SHOWN}", "", f"--sacct: {_ACCOUNTING}")
            continue
        good = abs(got - wanted) <= 0.001 * wanted or (name == "cpus" and got > wanted)  # a whole core, a whole node
        said = f"{write(got)} in force" if good else f"{write(got)} in force, {write(wanted)} in the fixed script"
        remedy = "" if good else "submit the fixed script itself; options of the sbatch command go before its lines"
        yield Check(name, "ok" if good else "problem", said, "what Slurm granted", remedy, "accounting")


def _batch(ran: Ran, fixed: Job, old: Job, before: Ran | None) -> Iterator[Check]:
    """The batch that really ran, which the steps of an epoch tell whatever was printed."""
    wanted, steps = fixed.batch, ran.steps_per_epoch
    if wanted is None:
        return
    shape = fixed.with_known(ran.job)
    devices, samples = shape.devices or 1, ran.job.samples or (before.job.samples if before else None)
    source = f"{steps} steps of an epoch"
    sizes: tuple[int, ...] = ()
    if samples and steps:
        share = math.ceil(samples / devices)
        sizes, known = _sizes(share, share, steps), f"{samples:,} samples on {devices} devices"
    elif steps and before is not None and before.steps_per_epoch and old.batch:
        last = before.steps_per_epoch
        sizes = _sizes((last - 1) * old.batch + 1, last * old.batch, steps)
        known = f"{last} before with a batch of {old.batch}"
    if sizes:
        good = wanted in sizes
        total = wanted * (fixed.devices or 1) * (fixed.accumulate or 1)
        yield Check(
            "batch",
            "ok" if good else "problem",
            f"{steps} steps an epoch, {known}: a batch of {' or '.join(map(str, sizes))}",
            f"{total} samples an update in the fixed script; steps of an epoch follow from what ran",
            "" if good else "find what the program reads: the override's key must exist in its config",
            source,
        )
    elif shown := ran.printed.get("batch"):
        values = ", ".join(f"{one.value} ({one.where})" for one in shown)
        told = [one.value for one in shown]
        verdict: Verdict = "ok" if told == [str(wanted)] else "warning" if str(wanted) in told else "problem"
        yield Check(
            "batch",
            verdict,
            f"printed {values}; {wanted} in the fixed script",
            "a printed setting may be overridden later; steps of an epoch would tell",
            source=shown[0].where,
        )
    else:
        yield Check(
            "batch",
            "warning",
            f"{wanted} in the fixed script; {_NOT_SHOWN}",
            "steps of an epoch and the number of samples tell it",
            "give the logs of the run before as PATH",
        )


def _sizes(least: int, most: int, steps: int) -> tuple[int, ...]:
    """The sizes of a batch that give so many steps for a share of samples between two bounds.

    >>> _sizes(5320, 5320, 242), _sizes(241 * 22 + 1, 242 * 22, 266)
    ((22,), (20,))
    """
    return () if steps < 2 else tuple(range(math.ceil(least / steps), (most - 1) // (steps - 1) + 1))


def _settings(ran: Ran, fixed: Job, old: Job) -> Iterator[Check]:
    """Settings that only the program's own lines or its config can show."""
    for name in ("accumulate", "workers", "epochs", "prefetch", "persistent_workers"):
        wanted, before = getattr(fixed, name), getattr(old, name)
        if wanted is None:
            continue
        title = name.replace("_", " ")
        if name == "persistent_workers" and wanted == bool(before):
            yield Check(title, "ok", f"{wanted}: no change", "it is the default, or what the script said before")
            continue
        shown = ran.printed.get(name, [])
        values = [one.value for one in shown]
        said = ", ".join(f"{one.value} ({one.where})" for one in shown)
        if not shown:
            yield Check(
                title,
                "warning",
                f"{wanted} in the fixed script; {_NOT_SHOWN}",
                "",
                "have the program print its effective settings when it starts",
            )
        elif [value.lower() for value in values] == [str(wanted).lower()]:
            yield Check(title, "ok", f"{said} in force", "what the program printed", "", shown[0].where)
        else:
            verdict: Verdict = "warning" if str(wanted) in values else "problem"
            yield Check(
                title,
                verdict,
                f"printed {said}; {wanted} in the fixed script",
                "what the program printed",
                "find what the program reads: the override's key must exist in its config",
                shown[0].where,
            )


def _environment(ran: Ran, script: BatchScript) -> Iterator[Check]:
    first = script.first_command
    for name, setting in script.env.items():
        if not name.startswith(("PYTORCH", "OMP_NUM", "NCCL_")):
            continue
        if first is not None and setting.line > first:
            yield Check(
                name,
                "problem",
                f"set on line {setting.line + 1}, behind the command on line {first + 1}",
                "a process reads it when it starts",
                f"move it above line {first + 1}",
            )
            continue
        shown = ran.env.get(name)
        if shown is None:
            yield Check(
                name,
                "warning",
                f"{setting.value} in the fixed script; {_NOT_SHOWN}",
                "",
                "add env | grep ALLOC_CONF before the command: its log then shows it",
            )
        else:
            good = shown.value == setting.value
            said = f"{shown.value} in force" + ("" if good else f", {setting.value} in the fixed script")
            yield Check(name, "ok" if good else "problem", said, "what the log shows", "", shown.where)


def _checkpoints(ran: Ran) -> Iterator[Check]:
    """What it saved; an empty file was torn by whatever ended the run."""
    if not ran.checkpoints:
        return
    empty = [name for name, size in ran.checkpoints.items() if size == 0]
    said = f"{len(ran.checkpoints)} files, {format_bytes(sum(ran.checkpoints.values()))}"
    if empty:
        yield Check(
            "checkpoints", "problem", f"{said}; empty: {', '.join(empty[:5])}", "they were not written to the end"
        )
    else:
        yield Check("checkpoints", "ok", f"{said}, the newest {ran.newest}", "what lies in the run's folder")
