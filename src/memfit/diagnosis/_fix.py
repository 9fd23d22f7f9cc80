"""Correct a batch script: the smallest change that the diagnosis asks for, with its reason."""

from __future__ import annotations

import difflib
import itertools
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.amounts import Amount
from memfit.checks import Check
from memfit.diagnosis._batch_script import BatchScript, Setting, held_to, read_script
from memfit.diagnosis._job import ACCUMULATE, BATCH, CHECKPOINTING, MEMORY_OPTIONS, OPTION_OF, Job
from memfit.diagnosis._remedies import DEVICES, list_remedies, raise_request, wanted_request, wanted_time, with_figures
from memfit.diagnosis._remedy_table import Remedy
from memfit.diagnosis._sacct import parse_request, parse_seconds
from memfit.errors import UsageError
from memfit.slurm import format_time
from memfit.units import format_bytes, write_size

if TYPE_CHECKING:
    from memfit.diagnosis._record import Diagnosis


@dataclass(frozen=True)
class Edit:
    """One changed line by its number in the old file; a new line has an empty ``old`` and the number before it."""

    line: int
    old: str
    new: str
    reason: str


@dataclass(frozen=True)
class Fix:
    """A corrected file."""

    path: Path  # the old file
    text: str  # the new content
    edits: tuple[Edit, ...]  # what was changed, and why
    checks: tuple[Check, ...] = ()  # what no edit can fix
    new_path: Path | None = None  # where it was written

    @property
    def diff(self) -> str:
        old = self.path.read_text(errors="replace").splitlines()
        named = str(self.new_path or next(self._names()))
        return "\n".join(difflib.unified_diff(old, self.text.splitlines(), str(self.path), named, lineterm=""))

    def write(self) -> Fix:
        """Write it beside the old file, under a name that is not taken."""
        for path in self._names():
            with suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
                shutil.copymode(self.path, path)
                file.write(self.text)
                break
        return replace(self, new_path=path)

    def _names(self) -> Iterator[Path]:
        """Where it may go: beside the old file, as ``train.fixed.slurm``."""
        for number in itertools.count(1):
            yield self.path.with_name(f"{self.path.stem}.fixed{f'.{number}' if number > 1 else ''}{self.path.suffix}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "fixed": None if self.new_path is None else str(self.new_path),
            "edits": [vars(edit) for edit in self.edits],
            "checks": [check.to_dict() for check in self.checks],
            "diff": self.diff,
        }


def make_fix(path: Path, diagnosis: Diagnosis, job: Job | None = None) -> Fix:
    """Return the corrected batch script; nothing is written. ``job`` is what was measured of it."""
    script = read_script(path)
    if not script.given and script.first_command is None:
        raise UsageError(
            f"{path}: has neither an #SBATCH line nor a command that starts a training.",
            rule="--fix corrects Slurm batch scripts.",
            remedy="name the script that was given to sbatch",
        )
    fixer = _Fixer(script, diagnosis, job or Job())
    notes = [*fixer.memory(), *fixer.apply_remedy(), *fixer.time()]
    return Fix(path, fixer.text(), tuple(fixer.edits), tuple(notes))


class _Fixer:
    """Edits one script; each method concerns one resource and yields what no edit can solve."""

    def __init__(self, script: BatchScript, diagnosis: Diagnosis, job: Job) -> None:
        self.script, self.diagnosis, self.granted = script, diagnosis, job
        self.edits: list[Edit] = []
        self._pieces: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        self.held = held_to(script.job, job)
        self.job = with_figures(self.held, diagnosis)  # as the advice has it

    def change(self, one: Setting, value: str, reason: str, *, behind: bool = False) -> None:
        old = self._line(one.line)
        self._pieces[one.line].append((one.end if behind else one.start, one.end, value))
        self.edits.append(Edit(one.line + 1, old.strip(), self._line(one.line).strip(), reason))

    def _line(self, at: int) -> str:
        text = self.script.lines[at]
        for start, end, piece in sorted(self._pieces[at], reverse=True):
            text = text[:start] + piece + text[end:]
        return text

    def text(self) -> str:
        """Return the new text, with the reason above each new line and above the command of a changed one."""
        above: dict[int, dict[str, None]] = defaultdict(dict)
        for edit in sorted(self.edits, key=lambda one: bool(one.old)):  # new lines first, then notes on the next line
            at = self.script.command_of(edit.line - 1) if edit.old else edit.line
            above[at] |= dict.fromkeys((f"# memfit: {edit.reason}", *(() if edit.old else (edit.new,))))
        num = len(self.script.lines)
        found = [one for at in range(num) for one in (*above[at], self._line(at))]
        return "\n".join((*found, *above[num])) + "\n"

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
            has_shebang = self.script.lines[0].startswith("#!")
            last = max((one.line for one in self.script.given), default=0 if has_shebang else -1)
            self.edits.append(Edit(last + 1, "", f"#SBATCH --{name}={value}", reason))

    def memory(self) -> Iterator[Check]:
        """Raise what the job requests, each where it says so and in its own unit."""
        granted, written = self.held.node_request, replace(self.held, request=self.held.script_request).node_request
        if granted and written and not written.scaled(0.98) <= granted <= written.scaled(1.02):
            said = f"the accounting has {granted}, the script requests {format_bytes(written.bytes)}"
            why = "it was submitted with another request; the accounting is what was in force"
            yield Check("memory", "warning", said, why, "", "accounting")
        given = [one for one in self.script.given if one.key in MEMORY_OPTIONS]
        is_limit = self.diagnosis.kind == "host_cgroup" and self.diagnosis.cause != "growth"
        why = self.job.no_single_limit
        if is_limit and why:
            yield Check("memory", "problem", why, "", "raise the request of the step that the log names")
            return
        if len({(one.key, one.value) for one in given}) > 1:
            what = " and ".join(f"--{one.key}={one.value}" for one in given) + " contradict each other"
            yield Check("memory", "problem", what, "Slurm takes the later one or refuses both", "keep one of them")
        if is_limit and (wanted := wanted_request(self.job)):
            yield from self._raise_memory(given, *wanted)
        elif is_limit:
            said = "what was granted is not known: the script requests no size"
            yield Check("memory", "problem", said, "", "add --sacct, or write a larger --mem by hand")

    def _raise_memory(self, given: Sequence[Setting], size: Amount, reason: str) -> Iterator[Check]:
        job = self.job
        for one in given:
            new = raise_request(job, one.amount, size) if one.amount else size
            if one.amount is None or one.amount < new:
                why = reason + ("" if new.per == size.per else f": {new}")
                yield from self._request(one.key, write_size(new.bytes), why, one)
        granted = self.granted.request and job.layout.to(self.granted.request, size.per)
        if given or (granted and size <= granted):
            return
        if option := OPTION_OF.get(size.per):
            yield from self._request(option, write_size(size.bytes), reason)
        else:
            yield Check("memory", "problem", f"{size} is to be requested of its nodes; how many is not known", reason)

    def time(self) -> Iterator[Check]:
        wanted, limit = wanted_time(self.job), self.job.limit_seconds or math.inf
        needed = math.inf if self.diagnosis.cause == "walltime" else self.job.needed_seconds or 0
        if wanted and min(wanted[0], needed) > limit:
            yield from self._request("time", format_time(wanted[0]), wanted[1])

    def apply_remedy(self) -> Iterator[Check]:
        """Apply the first remedy that the script can express."""
        if self.diagnosis.kind not in DEVICES:
            return
        edits = {"variable": self._set_env, "batch": self._halve, "checkpointing": self._checkpoint}
        for remedy in list_remedies(self.diagnosis, self.job):
            if remedy.enough is False:
                continue
            if remedy.edit == "none":
                yield Check("device", "problem", remedy.reason, "no script can change that", remedy.setting)
                return
            if remedy.edit and edits[remedy.edit](remedy):
                return
        what = "the script names no setting of its memory that can be changed"
        yield Check("device", "problem", what, "see the remedies")

    def _set_env(self, remedy: Remedy) -> bool:
        name, _, value = remedy.setting.removeprefix("export ").partition("=")
        env, at = self.script.env, self.script.first_command
        if (old := env.get(name) or env.get("PYTORCH_ALLOC_CONF")) is not None:
            self.change(old, value, f"{remedy.reason} It replaces {old.value}.")
        else:
            before = len(self.script.lines) if at is None else self.script.command_of(at)
            self.edits.append(Edit(before, "", remedy.setting, remedy.reason))
        return True

    @property
    def _hugging_face(self) -> Setting | None:
        """The option of the batch, if it is Hugging Face's: others of that library may follow it."""
        named = next((one for one in reversed(self.script.settings) if one.name in BATCH), None)
        return named if named and named.name == "per_device_train_batch_size" else None

    def _halve(self, _: Remedy) -> bool:
        job, batch, steps = self.job, self.script.find(*BATCH), self.script.find(*ACCUMULATE)
        if batch is None or not job.batch or job.batch < 2 or not (where := steps or self._hugging_face):
            return False
        (smaller, more), before = job.halved, job.batch * (job.accumulate or 1)
        same = "as before" if smaller * more == before else f"before {before}"
        reason = f"{smaller} x {more} samples an update on each device, {same}"
        self.change(batch, str(smaller), reason)
        self.change(where, str(more) if steps else f" --gradient_accumulation_steps {more}", reason, behind=not steps)
        return True

    def _checkpoint(self, remedy: Remedy) -> bool:
        """Turn activation checkpointing on, if the script names it or has Hugging Face's options."""
        one = self.script.find(CHECKPOINTING)
        where = one or self._hugging_face
        if where is None or (one and one.value.lower() != "false"):
            return False
        self.change(where, "True" if one else f" --{CHECKPOINTING} True", remedy.reason, behind=not one)
        return True


def _number(name: str, text: str) -> float | None:
    """A request as a number in its own unit; ``--mem=0`` is all of a node's."""
    if name == "time":
        return parse_seconds(text)
    found = parse_request(text)
    return (found.bytes or math.inf) if found else None
