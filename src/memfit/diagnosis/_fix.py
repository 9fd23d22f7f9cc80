"""Correct a batch script: the smallest change that the diagnosis asks for, with its reason."""

from __future__ import annotations

import difflib
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.amounts import Amount
from memfit.checks import Check
from memfit.diagnosis._job import ACCUMULATE, BATCH, OPTION_OF, Job, amount_of, job_of_script, read_value
from memfit.diagnosis._remedies import (
    DEVICES,
    list_remedies,
    raise_request,
    wanted_request,
    wanted_time,
    with_figures,
)
from memfit.errors import UsageError
from memfit.slurm import MEMORY_OPTIONS, BatchScript, Setting, format_time, parse_script, parse_seconds, read_script
from memfit.units import GIB, format_bytes, format_count, write_size

if TYPE_CHECKING:
    from memfit.diagnosis._record import Diagnosis

_SIZE = re.compile(r"\d+[KMGTkmgt]?")


@dataclass(frozen=True)
class Edit:
    """One changed line by its number in the old file; a new line has an empty ``old`` and the number before it."""

    line: int
    old: str
    new: str
    reason: str


@dataclass(frozen=True)
class Fix:
    """A corrected file.

    Attributes:
        path: The old file.
        text: The new content.
        edits: What was changed, and why.
        checks: What is not consistent in the new file, and what no file can fix.
        new_path: Where it was written; None before `write`.
    """

    path: Path
    text: str
    edits: tuple[Edit, ...]
    checks: tuple[Check, ...] = ()
    new_path: Path | None = None

    @property
    def diff(self) -> str:
        """The unified diff; empty if nothing changed."""
        old = self.path.read_text(errors="replace").splitlines()
        named = str(self.new_path or fixed_name(self.path))
        return "\n".join(difflib.unified_diff(old, self.text.splitlines(), str(self.path), named, lineterm=""))

    def write(self) -> Fix:
        """Write it beside the old file, under a name that is not taken."""
        number = 1
        while True:
            path = fixed_name(self.path, number)
            with suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
                shutil.copymode(self.path, path)
                file.write(self.text)
                return replace(self, new_path=path)
            number += 1

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {
            "path": str(self.path),
            "fixed": None if self.new_path is None else str(self.new_path),
            "edits": [vars(edit) for edit in self.edits],
            "checks": [check.to_dict() for check in self.checks],
            "diff": self.diff,
        }


def fixed_name(path: Path, number: int = 1) -> Path:
    """Return where the corrected file goes: beside the old one, as ``train.fixed.slurm``."""
    return path.with_name(f"{path.stem}.fixed{'' if number == 1 else f'.{number}'}{path.suffix}")


def make_fix(
    path: Path, diagnosis: Diagnosis, job: Job | None = None, *, config: Mapping[str, Any] | None = None
) -> Fix:
    """Return the corrected batch script. Nothing is written.

    Args:
        path: The file that started the job.
        diagnosis: What killed the job.
        job: What was measured of it; what the file requests is read from it.
        config: The model's ``config.json``.

    Raises:
        UsageError: The file cannot be read, or is none.
    """
    script = read_script(path)
    if not script.given and script.first_command is None:
        raise UsageError(
            f"{path}: has neither an #SBATCH line nor a command that starts a training.",
            rule="--fix corrects Slurm batch scripts.",
            remedy="name the script that was given to sbatch; memfit launch --format compose writes a Compose file",
        )
    fixer = _Fixer(script, diagnosis, job or Job())
    notes = [*fixer.memory(), *fixer.apply_remedy(config), *fixer.tasks(), *fixer.time()]
    text = fixer.text()
    return Fix(path, text, tuple(fixer.edits), (*_inconsistent(parse_script(text), fixer.job), *notes))


class _Fixer:
    """Edits one script; each method concerns one resource and yields what no edit can solve."""

    def __init__(self, script: BatchScript, diagnosis: Diagnosis, job: Job) -> None:
        asked, known = job_of_script(script), with_figures(job, diagnosis)
        self.script, self.diagnosis, self.granted = script, diagnosis, job
        self.edits: list[Edit] = []
        self._pieces: dict[int, list[tuple[int, int, str]]] = {}
        self.job = asked.with_known(known)
        self.disagreement = replace(self.job, request=job.request).disagreement
        if self.job.node_request is None and known.request is not None:
            self.job = replace(self.job, request=known.request)

    def replace(self, at: int, start: int, end: int, text: str, reason: str) -> None:
        """Replace a part of a line; the columns are those of the old line."""
        old = self._line(at)
        self._pieces.setdefault(at, []).append((start, end, text))
        self.edits.append(Edit(at + 1, old.strip(), self._line(at).strip(), reason))

    def change(self, one: Setting, value: object, reason: str) -> None:
        """Give a setting another value."""
        self.replace(one.line, one.start, one.end, str(value), reason)

    def insert(self, after: int, text: str, reason: str) -> None:
        """Add a line after another; -1 for the top."""
        self.edits.append(Edit(after + 1, "", text, reason))

    def _line(self, at: int) -> str:
        text = self.script.lines[at]
        for start, end, piece in sorted(self._pieces.get(at, []), reverse=True):
            text = text[:start] + piece + text[end:]
        return text

    def text(self) -> str:
        """Return the new text, with the reason above each new line and above the command of a changed one."""
        above: dict[int, dict[str, None]] = {}
        behind: dict[int, list[str]] = {}
        for edit in self.edits:
            note = f"# memfit: {edit.reason}"
            if edit.old:
                above.setdefault(self.script.command_of(edit.line - 1), {})[note] = None
            else:
                behind.setdefault(edit.line, []).extend((note, edit.new))
        found = behind.get(0, [])
        for at in range(len(self.script.lines)):
            found += [*above.get(at, ()), self._line(at), *behind.get(at + 1, ())]
        return "\n".join(found) + "\n"

    def _request(self, name: str, value: str, reason: str, one: Setting | None = None) -> Iterator[Check]:
        """Write a request, unless it could be less than the old one. More in its own unit is more in every layout."""
        found = one or self.script.directives.get(name)
        memory = self.granted.node_request
        granted = {"mem": memory.bytes if memory else None, "time": self.granted.limit_seconds}
        old = _number(name, found.value) if found else granted.get(name)
        if old is None or (_number(name, value) or 0) < old:
            what = f"--{name}={found.value} stays" if found else f"the script has no --{name}"
            said = f"{what}: --{name}={value} could be less than the job was granted"
            yield Check(name, "problem", said, reason, "change it by hand, if it is more" if found else "add --sacct")
        elif found is not None:
            self.change(found, value, reason)
        else:
            has_shebang = bool(self.script.lines) and self.script.lines[0].startswith("#!")
            last = max((one.line for one in self.script.given), default=0 if has_shebang else -1)
            self.insert(last, f"#SBATCH --{name}={value}", reason)

    def memory(self) -> Iterator[Check]:
        """Raise what the step and the job request, each where it says so and in its own unit."""
        if self.disagreement:
            yield Check("memory", "warning", self.disagreement, "the accounting is what was in force", "", "accounting")
        given = [one for one in self.script.given if one.key in MEMORY_OPTIONS]
        if len({(one.key, one.value) for one in given}) > 1:
            what = " and ".join(f"--{one.key}={one.value}" for one in given) + " contradict each other"
            yield Check("memory", "problem", what, "Slurm takes the later one or refuses both", "keep one of them")
        if self.diagnosis.kind == "host_cgroup" and (wanted := wanted_request(self.job)):
            yield from self._raise_memory(given, *wanted)
            return
        for one in given:
            if (size := amount_of(one)) and not _SIZE.fullmatch(one.value):
                reason = f"--{one.key} takes K, M, G or T: {one.value} is written {write_size(size.bytes)}"
                yield from self._request(one.key, write_size(size.bytes), reason, one)

    def _raise_memory(self, given: Sequence[Setting], size: Amount, reason: str) -> Iterator[Check]:
        """Raise the request of the step that died (found by its size, else the last one), and each of the job's."""
        job, most = self.job, self.job.node_memory
        if most is not None and size.per == "node" and most < size:
            measured = job.peak()
            if measured is None or most < measured[0]:
                what = f"{write_size(size.bytes)} of each node is more than the {format_bytes(most.bytes)} that it has"
                remedy = "use fewer tasks per node, or a partition with larger nodes"
                yield Check("memory", "problem", what, reason, remedy, job.partition)
                return
            size = Amount(most.bytes // GIB * GIB, "node")
            reason += f", but no node of {job.partition or 'the partition'} has more than {format_bytes(most.bytes)}"
        steps = [one for one in self.script.step_memory if amount_of(one)] if job.step_request else []
        steps = [one for one in steps if amount_of(one) == job.step_request] or steps[-1:]
        whole = f"the job must hold what its srun requests: {size}" if steps else reason
        for one in (*steps, *given):
            old, why = amount_of(one), f"this step's own limit: {reason}" if one in steps else whole
            new = raise_request(job, old, size) if old else size
            if old is None or old < new:
                why += "" if new.per == size.per else f": {new}"
                yield from self._request(one.key, write_size(new.bytes), why, one)
        granted = self.granted.request and job.layout.to(self.granted.request, size.per)
        if given or (granted and size <= granted):
            return
        if option := OPTION_OF.get(size.per):
            yield from self._request(option, write_size(size.bytes), whole)
        else:
            yield Check("memory", "problem", f"{size} is to be requested of its nodes; how many is not known", reason)

    def tasks(self) -> Iterator[Check]:
        """Make nodes and tasks agree."""
        names = ("nodes", "ntasks", "ntasks-per-node")
        given = self.script.directives
        nodes, tasks, each = (read_value(given[name].value) if name in given else None for name in names)
        if nodes and tasks and each and tasks != nodes * each:
            reason = f"{format_count(nodes, 'node')} x {format_count(each, 'task of each')}"
            yield from self._request("ntasks", str(nodes * each), f"{reason} = {nodes * each}, not {tasks}")

    def time(self) -> Iterator[Check]:
        """Raise the time limit by the pace that was seen, if it is too short."""
        wanted, limit = wanted_time(self.job), self.job.limit_seconds
        if wanted is None or limit is None or wanted[0] <= limit:
            return
        if self.diagnosis.cause == "walltime" or (self.job.needed_seconds or 0) > limit:
            yield from self._request("time", format_time(wanted[0]), wanted[1])

    def apply_remedy(self, config: Mapping[str, Any] | None) -> Iterator[Check]:
        """Apply the cheapest remedy that a script can express; one at a time, so that the next run shows its effect."""
        kind = self.diagnosis.kind
        if kind not in DEVICES and kind != "shm":
            return
        for remedy in list_remedies(self.diagnosis, self.job, config=config):
            if not remedy.helps or remedy.enough is False:
                continue
            if remedy.edit == "none":
                yield Check("device", "problem", remedy.reason, "no script can change that", remedy.setting)
                return
            if remedy.edit == "variable":
                name, _, value = remedy.setting.removeprefix("export ").partition("=")
                self._set_env(name, value, remedy.reason)
                return
            if remedy.edit == "batch" and self._halve():
                return
            if remedy.edit == "checkpointing" and self._checkpoint(remedy.reason):
                return
        what = "the script names no setting of its memory that can be changed"
        yield Check("device" if kind in DEVICES else "/dev/shm", "problem", what, "see the remedies")

    def _halve(self) -> bool:
        """Halve the batch and double the accumulation, if the script names both, or Hugging Face's batch."""
        script, job = self.script, self.job
        batch, steps = script.find(*BATCH), script.find(*ACCUMULATE)
        if batch is None or not job.batch or job.batch < 2:
            return False
        named = next(one for one in reversed(script.settings) if one.name in BATCH)
        if steps is None and named.name != "per_device_train_batch_size":
            return False
        (smaller, more), before = job.halved, job.batch * (job.accumulate or 1)
        same = "as before" if smaller * more == before else f"before {before}"
        reason = f"{smaller} x {more} samples an update on each device, {same}"
        self.change(batch, smaller, reason)
        if steps is not None:
            self.change(steps, more, reason)
        else:
            self.replace(named.line, named.end, named.end, f" --gradient_accumulation_steps {more}", reason)
        return True

    def _checkpoint(self, reason: str) -> bool:
        """Turn activation checkpointing on, if the script names it or has Hugging Face's options."""
        one = self.script.find("gradient_checkpointing")
        named = next((one for one in self.script.settings if one.name == "per_device_train_batch_size"), None)
        if one is not None and one.value.lower() == "false":
            self.change(one, "True", reason)
        elif one is None and named is not None:
            self.replace(named.line, named.end, named.end, " --gradient_checkpointing True", reason)
        else:
            return False
        return True

    def _set_env(self, name: str, value: str, reason: str) -> None:
        """Set a variable before Python starts."""
        found = self.script.env.get(name) or self.script.env.get("PYTORCH_ALLOC_CONF")
        if found is not None:
            self.change(found, value, f"{reason} It replaces {found.value}.")
            return
        at = self.script.first_command
        before = len(self.script.lines) if at is None else self.script.command_of(at)
        self.insert(before - 1, f"export {name}={value}", reason)


def _number(name: str, text: str) -> float | None:
    """A request as a number in its own unit; ``--mem=0`` is all of a node's."""
    if name in MEMORY_OPTIONS:
        found = amount_of(Setting(name, text, 0, 0, 0))
        return found.bytes if found else math.inf if re.fullmatch(r"0+[KMGTkmgt]?", text) else None
    return parse_seconds(text) if name == "time" else read_value(text)


def _inconsistent(script: BatchScript, known: Job) -> Iterator[Check]:
    """Contradictions within the new script."""
    job = job_of_script(script)
    if job.node_request and known.node_memory and known.node_memory < job.node_request:
        said = f"{job.node_request}; a node has {format_bytes(known.node_memory.bytes)}"
        yield Check("memory", "problem", said, "Slurm refuses what no node has")
