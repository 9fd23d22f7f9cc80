"""Compare what a run was granted and did with what a script requests."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.checks import Check, Verdict
from memfit.diagnosis._batch_script import held_to, read_script
from memfit.diagnosis._job import SETTINGS, Job, read_number
from memfit.diagnosis._progress import read_counters, read_progress
from memfit.diagnosis._runs import Checkpoint, judge_checkpoints, logs_below, names_of, read_log, read_or_say
from memfit.diagnosis._sacct import account_steps, parse_sacct
from memfit.diagnosis._text import Line
from memfit.units import format_bytes, format_count, format_duration

_KEYS = {key: name for name, keys in SETTINGS.items() for key in keys if key not in ("batch", "workers")}
_PRINTED = re.compile(
    rf"(?<![\w])(?P<key>{'|'.join(sorted(_KEYS, key=len, reverse=True))})['\"]?\s*[:=]\s*['\"]?"
    r"(?P<value>\d+)\b"
)
_SAMPLES = re.compile(
    r"(?:Num examples = |train\w*(?: set| data ?set)?(?: size| samples| examples| length)\W{1,3})(\d[\d,]*)"
    r"|(\d[\d,]*) train(?:ing)? (?:samples|examples)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ran:
    """What a run showed of itself."""

    job: Job = field(default_factory=Job)  # its shape, memory and settings, as far as they were shown
    steps_per_epoch: int | None = None  # by its progress bars, else by a checkpoint such as ``epoch=39-step=9680``
    printed: dict[str, dict[str, str]] = field(default_factory=dict)  # of each setting its values, and where
    checkpoints: tuple[Checkpoint, ...] = ()


def read_ran(paths: Iterable[Path], accounting: str = "") -> Ran:
    """Return what runs left in logs, folders and run directories, and in what sacct printed (``accounting``)."""
    paths, lines = list(paths), list[Line]()
    for log in [log for path in paths if str(path) != "-" for log in logs_below(path)]:
        lines += [line for stream in read_or_say(read_log, log) or () for line in stream.lines]
    texts, samples = [line.text for line in lines], None
    printed: dict[str, dict[str, str]] = {}
    for line in (line for line in lines if "=" in line.text or ":" in line.text or "rain" in line.text):
        for match in _PRINTED.finditer(line.text):
            where = f"{line.file}:{line.number}"
            printed.setdefault(_KEYS[match["key"]], {}).setdefault(match["value"], where)
        samples = samples or _SAMPLES.search(line.text)
    steps = account_steps(parse_sacct(accounting or texts))
    progress = read_progress(lines, read_counters(lines))
    sole: dict[str, Any] = {name: read_number(*found) for name, found in printed.items() if len(found) == 1}
    job = replace(
        steps[0].job if steps else Job(),
        **{name: sole.get(name) for name in SETTINGS} | {"epochs": progress.num_epochs or sole.get("epochs")},
        epoch_seconds=progress.epoch_seconds,
        samples=int((samples[1] or samples[2]).replace(",", "")) if samples else None,
        mentioned=tuple(printed),
    )
    checkpoints = judge_checkpoints(paths)
    names = [re.search(r"epoch[=_](\d+)[-_]step[=_](\d+)", one.name) for one in checkpoints]
    shown = [(int(found[2]), int(found[1]) + 1) for found in names if found]  # counted from epoch 0
    by_name = next((steps // epochs for steps, epochs in shown if steps % epochs == 0), None)
    return Ran(job, progress.steps_per_epoch or by_name, printed, checkpoints)


def job_of(ran: Ran, script: Path | None = None) -> Job:
    """Return what is known of a job: its memory and tasks as they were, its settings as its script has them."""
    return ran.job if script is None else held_to(read_script(script).job, ran.job)


#: What a witness says, how to make it say more, and what to do where it says something else.
_SLURM = ("what Slurm granted", "add --sacct JOBID, or a file of sacct -j JOBID -P -o ALL",
          "submit the fixed script itself; options of the sbatch command override its lines")  # fmt: skip
_PROGRAM = ("what the program printed", "print the effective settings when the program starts",
            "check which setting the program reads: the override's key must exist in its config")  # fmt: skip


def verify_fix(ran: Ran, against: Path, *, before: Ran | None = None) -> list[Check]:
    """Return one check for each setting of the fixed script; ``before`` stands in for the number of samples."""
    old_path = against.with_name(against.stem.partition(".fixed")[0] + against.suffix)
    old = read_script(old_path).job if old_path.exists() else Job()
    fixed, found = read_script(against).job, ran.job
    # Memory of a CPU or a GPU counts by the layout that was granted.
    memory = replace(found, request=fixed.request).node_request or fixed.node_request
    size, held = (one.bytes if one else None for one in (memory, found.node_request))
    granted: tuple[tuple[str, int | None, int | None, Callable[[int], str]], ...] = (
        ("memory", size, held, lambda count: f"{format_bytes(count)} of each node"),
        ("nodes", fixed.nodes, found.nodes, str),
        ("tasks", fixed.tasks_per_node, found.tasks_per_node, lambda count: f"{count} on each node"),
        ("cpus", fixed.cpus_per_task, found.cpus_per_task, lambda count: f"{count} of each task"),
        ("time", fixed.limit_seconds, found.limit_seconds, lambda count: format_duration(count, short=True)),
    )
    checks: list[Check] = []
    verdict: Verdict
    for name, wanted, got, write in granted:
        if wanted is not None:
            least, most = 0.999 * wanted, math.inf if name == "cpus" else 1.001 * wanted  # Slurm grants whole cores
            verdict = "ok" if least <= (got or 0) <= most else "problem"
            checks.append(_compare(name, write(wanted), write(got) if got is not None else "", _SLURM, verdict))
    for name in SETTINGS:  # only the program's own lines can show the others than the batch
        if (value := getattr(fixed, name)) is not None:
            by_steps = _batch(ran, fixed, old, before) if name == "batch" else None
            places = ran.printed.get(name, {})  # of several values nobody can say which was in force
            verdict = "problem" if str(value) not in places else "warning" if len(places) > 1 else "ok"
            shown, first = [f"{one} ({where})" for one, where in places.items()], next(iter(places.values()), "")
            checks.append(by_steps or _compare(name, str(value), ", ".join(shown), _PROGRAM, verdict, first))
    return [*checks, *_checkpoints(ran)]


def is_any_shown(checks: Sequence[Check]) -> bool:
    return any(check.verdict == "problem" or (check.verdict == "ok" and check.source) for check in checks)


def _compare(
    name: str, wanted: str, said: str, witness: tuple[str, str, str], verdict: Verdict, where: str = "accounting"
) -> Check:
    says, ask, mend = witness
    if not said:
        return Check(name, "warning", f"{wanted} in the fixed script; not shown", "", ask)
    more = "" if verdict == "ok" else f", {wanted} in the fixed script"
    return Check(name, verdict, f"{said} in force{more}", says, mend if more else "", where)


def _batch(ran: Ran, fixed: Job, old: Job, before: Ran | None) -> Check | None:
    """The batch that ran, by the steps of an epoch: a printed batch may have been overridden."""
    steps, devices = ran.steps_per_epoch, fixed.with_known(ran.job).devices or 1
    samples = ran.job.samples or (before.job.samples if before else None)
    last = before.steps_per_epoch if before else None
    if samples:
        least = most = math.ceil(samples / devices)
        known = f"{samples:,} samples on {format_count(devices, 'device')}"
    elif last and old.batch:
        least, most = (last - 1) * old.batch + 1, last * old.batch
        known = f"{last} before with a batch of {old.batch}"
    else:
        return None
    if not steps or steps < 2 or not fixed.batch:
        return None
    sizes = range(math.ceil(least / steps), (most - 1) // (steps - 1) + 1)
    good = fixed.batch in sizes
    said = f"{steps} steps an epoch, {known}: a batch of {' or '.join(map(str, sizes))}"
    total = format_count(fixed.batch * (fixed.devices or 1) * (fixed.accumulate or 1), "sample")
    why, mend = f"{total} an update in the fixed script", "" if good else _PROGRAM[2]
    return Check("batch", "ok" if good else "problem", said, why, mend, f"{steps} steps of an epoch")


def _checkpoints(ran: Ran) -> Iterator[Check]:
    """The checkpoints: how many, how large, how old; one that cannot be loaded was not fully written."""
    said = f"{format_count(len(ran.checkpoints), 'file')}, {format_bytes(sum(one.bytes for one in ran.checkpoints))}"
    if torn := names_of(ran.checkpoints, "damaged"):
        yield Check("checkpoints", "problem", f"{said}; cannot be loaded: {torn}", "they were not fully written")
    elif open_ := names_of(ran.checkpoints, "not proved"):
        why = "an older file of torch.save has no table of contents"
        yield Check("checkpoints", "warning", f"{said}; not proved: {open_}", why, "load the one that you need")
    elif ran.checkpoints:
        newest = max(ran.checkpoints, key=lambda one: (one.written, one.name))
        age = format_duration(max(0.0, time.time() - newest.written), short=True)
        yield Check("checkpoints", "ok", f"{said}, the newest {newest.name}, {age} old", "what is in its folder")
