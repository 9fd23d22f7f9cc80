"""Compare what a run was granted and did with what a script requests."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from memfit.checks import Check, Verdict
from memfit.diagnosis._checkpoints import CHECKPOINT, Checkpoint, judge_checkpoints, names_of
from memfit.diagnosis._job import SETTINGS, Job, job_of_script, most_of_node, value_of
from memfit.diagnosis._progress import Progress, read_progress
from memfit.diagnosis._runs import read_log, read_or_say
from memfit.diagnosis._slurm_account import account_steps
from memfit.diagnosis._text import Line, Stream
from memfit.slurm import BatchScript, Row, parse_node_limits, parse_sacct, parse_shapes, read_script
from memfit.units import format_bytes, format_count, format_duration

_KEYS = {key: name for name, keys in SETTINGS.items() for key in keys if key not in ("batch", "workers")}
_PRINTED = re.compile(
    r"(?<![\w])(?P<key>" + "|".join(sorted(_KEYS, key=len, reverse=True)) + r")['\"]?\s*[:=]\s*['\"]?"
    r"(?P<value>\d+|[Tt]rue|[Ff]alse)\b"
)
_SAMPLES = re.compile(
    r"(?:Num examples = |train\w*(?: set| data ?set)?(?: size| samples| examples| length)\W{1,3})(?P<count>\d[\d,]*)"
    r"|(?P<before>\d[\d,]*) (?:train(?:ing)? )?(?:samples|examples)\b",
    re.IGNORECASE,
)
_VALIDATION = re.compile(r"\bval(?:id\w*)?\b|\beval\w*|\btest\b", re.IGNORECASE)
_ENVIRONMENT = re.compile(
    r"\b(?P<key>PYTORCH\w*ALLOC_CONF|OMP_NUM_THREADS|NCCL_\w+)['\"]?\s*[:=]\s*['\"]?(?P<value>[^\s'\",;]+)"
)
_LOGS = (".log", ".out", ".err", ".txt", ".gz", ".json")
_MOST_FILES, _MOST_FOLDERS = 200, 2000
_NOT_SHOWN = "not shown"
_ACCOUNTING = (
    "sacct -j JOBID -P --format=JobID,JobName,State,ExitCode,ReqMem,MaxRSS,AveRSS,NTasks,NNodes,NCPUS,Timelimit"
)


@dataclass(frozen=True)
class Source:
    """A value that a run showed, and where."""

    value: str
    where: str


@dataclass(frozen=True)
class Ran:
    """What a run showed of itself.

    Attributes:
        job: Its shape, memory and settings, as far as they were shown.
        progress: How far it came.
        printed: Settings (by the field of `Job`) and variables that its lines name, each value once.
        checkpoints: Its checkpoint files.
    """

    job: Job = field(default_factory=Job)
    progress: Progress = field(default_factory=Progress)
    printed: dict[str, list[Source]] = field(default_factory=dict)
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def steps_per_epoch(self) -> int | None:
        """By its progress bars, else by a checkpoint such as ``epoch=39-step=9680``, counted from epoch 0."""
        if self.progress.steps_per_epoch:
            return self.progress.steps_per_epoch
        for one in self.checkpoints:
            found = re.search(r"epoch[=_](\d+)[-_]step[=_](\d+)", one.name)
            if found and int(found[2]) % (int(found[1]) + 1) == 0:
                return int(found[2]) // (int(found[1]) + 1)
        step, epochs = self.progress.global_step, self.progress.num_epochs
        return step // epochs if step and epochs and step % epochs == 0 else None


def read_ran(paths: Iterable[Path], accounting: str = "", *, whole: bool = False) -> Ran:
    """Return what runs left in logs, folders and run directories.

    Args:
        paths: Logs, or folders of them.
        accounting: What ``sacct`` printed of the job, and ``scontrol`` and ``sinfo`` behind it.
        whole: Read every byte of the checkpoints, however many there are.
    """
    files, checkpoints = find_files(paths)
    lines: list[Line] = []
    shown: list[tuple[str, str, str]] = []
    for path in files:
        lines += [line for stream in read_or_say(read_log, path) or () for line in stream.lines]
    texts = [line.text for line in lines]
    for line in (line for line in lines if "=" in line.text or ":" in line.text):
        found = (match for pattern in (_PRINTED, _ENVIRONMENT) for match in pattern.finditer(line.text))
        shown += [(match["key"], match["value"], f"{line.file}:{line.number}") for match in found]
    printed: dict[str, list[Source]] = {}
    for key, value, where in shown:
        known = printed.setdefault(_KEYS.get(key, key), [])
        known += [Source(value, where)] if value not in [one.value for one in known] else []
    other = [*texts, *accounting.split("\n")]
    shapes: list[Row | None] = [*parse_shapes(other)]
    steps = account_steps(parse_sacct(accounting or texts), shapes[-1] if shapes else None)
    job = steps[0].job if steps else Job()
    progress = read_progress(Stream(lines))
    sole: dict[str, Any] = {
        name: value_of(name, printed[name][0].value) if len(printed.get(name, ())) == 1 else None for name in SETTINGS
    }
    job = replace(
        job,
        node_memory=most_of_node(parse_node_limits(other), job.partition),
        **{**sole, "epochs": progress.num_epochs or sole["epochs"]},
        epoch_seconds=progress.epoch_seconds,
        samples=_samples(texts),
        mentioned=tuple(name for name in printed if name in SETTINGS),
    )
    return Ran(job, progress, printed, judge_checkpoints(checkpoints, whole=whole))


def job_of(ran: Ran, script: Path | None = None) -> Job:
    """Return what is known of a job: its memory and tasks as they were, its settings as its script has them.

    Args:
        ran: What it left.
        script: The batch script that started it.

    Raises:
        UsageError: The script cannot be read.
    """
    if script is None:
        return ran.job
    asked = job_of_script(read_script(script))
    return replace(asked, request=None, nodes=None, tasks_per_node=None).with_known(ran.job).with_known(asked)


def find_files(paths: Iterable[Path]) -> tuple[list[Path], dict[Path, str]]:
    """Return the logs below some paths, and the checkpoints with their names below a sole path."""
    files: list[Path] = []
    checkpoints: dict[Path, str] = {}
    paths = list(paths)
    for path in paths:
        if not path.is_dir():
            files += [path] if str(path) != "-" else []
            continue
        for folder, names, found in islice(os.walk(path), _MOST_FOLDERS):
            names.sort()
            for one in (Path(folder, name) for name in sorted(found)):
                if CHECKPOINT.fullmatch(one.name):
                    checkpoints[one] = str(one.relative_to(path) if len(paths) == 1 else one)
                elif one.suffix in _LOGS:
                    files.append(one)
    return files[:_MOST_FILES], checkpoints


def _samples(texts: Sequence[str]) -> int | None:
    """The samples of an epoch: by the first line about training, else by any that is not about validation."""
    counts: list[tuple[bool, int]] = []
    for text in texts:
        is_train = "train" in text.lower() or "Num examples" in text
        found = _SAMPLES.search(text) if is_train or "ampl" in text else None
        if found and not _VALIDATION.search(text):
            counts.append((not is_train, int((found["count"] or found["before"]).replace(",", ""))))
    return min(counts, key=lambda one: one[0])[1] if counts else None


def verify_fix(ran: Ran, against: Path, *, before: Ran | None = None) -> list[Check]:
    """Return one check for each setting of the fixed script: in force, not in force, or not shown.

    Args:
        ran: The run that should have used it.
        against: The fixed script.
        before: The run before it; its steps give the number of samples if no line does.

    Raises:
        UsageError: The script cannot be read.
    """
    script = read_script(against)
    old_path = against.with_name(against.stem.partition(".fixed")[0] + against.suffix)
    old = job_of_script(read_script(old_path)) if old_path.exists() else Job()
    fixed = job_of_script(script)
    found = [*_resources(ran.job, fixed), *_batch(ran, fixed, old, before)]
    for name in SETTINGS:  # only the program's own lines can show the others than the batch
        if name != "batch" and getattr(fixed, name) is not None:
            found.append(_setting(ran, name, getattr(fixed, name), getattr(old, name)))
    return [*found, *_environment(ran, script), *_checkpoints(ran)]


def is_any_shown(checks: Sequence[Check]) -> bool:
    """Return whether anything shows one of the settings, in force or not."""
    return any(check.verdict == "problem" or (check.verdict == "ok" and check.source) for check in checks)


def _resources(found: Job, fixed: Job) -> Iterator[Check]:
    """The shape and the memory that Slurm granted; memory of a CPU or a GPU by the layout that it granted."""
    memory = replace(found, request=fixed.request).node_request or fixed.node_request
    wanted, got = (one.bytes if one else None for one in (memory, found.node_request))
    sizes = (
        ("memory", wanted, got, lambda count: f"{format_bytes(count)} of each node"),
        ("nodes", fixed.nodes, found.nodes, str),
        ("tasks", fixed.tasks_per_node, found.tasks_per_node, lambda count: f"{count} on each node"),
        ("cpus", fixed.cpus_per_task, found.cpus_per_task, lambda count: f"{count} of each task"),
        ("time", fixed.limit_seconds, found.limit_seconds, lambda count: format_duration(count, short=True)),
    )
    for name, wanted, got, write in sizes:
        if wanted is None:
            continue
        if got is None:
            yield Check(name, "warning", f"{write(wanted)} requested; {_NOT_SHOWN}", "", f"--sacct: {_ACCOUNTING}")
            continue
        good = abs(got - wanted) <= 0.001 * wanted or (name == "cpus" and got > wanted)  # Slurm grants whole cores
        said = f"{write(got)} in force" + ("" if good else f", {write(wanted)} in the fixed script")
        remedy = "" if good else "submit the fixed script itself; options of the sbatch command override its lines"
        yield Check(name, "ok" if good else "problem", said, "what Slurm granted", remedy, "accounting")


def _batch(ran: Ran, fixed: Job, old: Job, before: Ran | None) -> Iterator[Check]:
    """The batch that ran, by the steps of an epoch: a printed batch may have been overridden."""
    if fixed.batch is None:
        return
    steps, devices = ran.steps_per_epoch, fixed.with_known(ran.job).devices or 1
    samples = ran.job.samples or (before.job.samples if before else None)
    last = before.steps_per_epoch if before else None
    share, known = range(0), f"{last} before with a batch of {old.batch}"
    if samples:
        share = range(math.ceil(samples / devices), math.ceil(samples / devices) + 1)
        known = f"{samples:,} samples on {format_count(devices, 'device')}"
    elif last and old.batch:
        share = range((last - 1) * old.batch + 1, last * old.batch + 1)
    if not steps or steps < 2 or not share:
        yield _setting(ran, "batch", fixed.batch, None)
        return
    sizes = range(math.ceil(share[0] / steps), (share[-1] - 1) // (steps - 1) + 1)
    good = fixed.batch in sizes
    total = fixed.batch * (fixed.devices or 1) * (fixed.accumulate or 1)
    yield Check(
        "batch",
        "ok" if good else "problem",
        f"{steps} steps an epoch, {known}: a batch of {' or '.join(map(str, sizes))}",
        f"{format_count(total, 'sample')} an update in the fixed script",
        "" if good else _OVERRIDE,
        f"{steps} steps of an epoch",
    )


_OVERRIDE = "check which setting the program reads: the override's key must exist in its config"


def _setting(ran: Ran, name: str, wanted: Any, before: Any) -> Check:
    """One setting against what the program printed."""
    title = name.replace("_", " ") if name in SETTINGS else name
    if name == "persistent_workers" and wanted == bool(before):
        return Check(title, "ok", f"{wanted}: no change", "it is the default, or the old script had it")
    shown = ran.printed.get(name, [])
    if not shown:
        remedy = "print the effective settings when the program starts"
        return Check(title, "warning", f"{wanted} in the fixed script; {_NOT_SHOWN}", "", remedy)
    said = ", ".join(f"{one.value} ({one.where})" for one in shown)
    values = [one.value.lower() for one in shown]
    if values == [str(wanted).lower()]:
        return Check(title, "ok", f"{said} in force", "what the program printed", "", shown[0].where)
    verdict: Verdict = "warning" if str(wanted).lower() in values else "problem"
    finding = f"printed {said}; {wanted} in the fixed script"
    return Check(title, verdict, finding, "what the program printed", _OVERRIDE, shown[0].where)


def _environment(ran: Ran, script: BatchScript) -> Iterator[Check]:
    first = script.first_command
    for name, setting in script.env.items():
        if not name.startswith(("PYTORCH", "OMP_NUM", "NCCL_")):
            continue
        if first is not None and setting.line > first:
            said = f"set on line {setting.line + 1}, after the command on line {first + 1}"
            yield Check(name, "problem", said, "a process reads it when it starts", f"move it above line {first + 1}")
        else:
            yield _setting(ran, name, setting.value, None)


def _checkpoints(ran: Ran) -> Iterator[Check]:
    """The checkpoints: how many, how large, how old; one that cannot be loaded was not fully written."""
    if not ran.checkpoints:
        return
    newest = max(ran.checkpoints, key=lambda one: (one.written, one.name))
    age = format_duration(max(0.0, time.time() - newest.written), short=True)
    said = f"{format_count(len(ran.checkpoints), 'file')}, {format_bytes(sum(one.bytes for one in ran.checkpoints))}"
    if torn := names_of(ran.checkpoints, "damaged"):
        yield Check("checkpoints", "problem", f"{said}; cannot be loaded: {torn}", "they were not fully written")
    elif unproved := names_of(ran.checkpoints, "not proved"):
        why = "such a file has no checksum, so only loading it proves it"
        yield Check("checkpoints", "warning", f"{said}; not proved: {unproved}", why, "load the one that you need")
    else:
        yield Check("checkpoints", "ok", f"{said}, the newest {newest.name}, {age} old", "what is in the run's folder")
