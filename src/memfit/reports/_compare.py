"""Compare two runs, before and after a change: what differs between them, and their numbers.

One difference of settings, code or data is the change; the others must be named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit.config import differences, read_file
from memfit.errors import UsageError, nearest
from memfit.files import damaged, read_json, read_own
from memfit.masking import mask
from memfit.reports._columns import BAD
from memfit.reports._numbers import format_number, metrics_of, summarize_metrics
from memfit.reports._parts import Facts, Part, Table
from memfit.rundir import RunDir, read
from memfit.units import list_some

#: Settings that change no result: names, places, the memory and the order of jobs, and who is told.
_NO_RESULT = re.compile(
    r"(schema_version|experiment|runs_dir|panels_dir|max_parallel|on_failure|retries|grace_seconds|backend|notify|track|tune|planned"
    r"|memory(?!\.num_gpus)|slurm(?!\.nodes)|resources\.memory"
    r"|stages\.\w+\.(memory|gpu_memory|loaders|resources\.memory|slurm(?!\.nodes)))(\..*)?"
)


_MANIFEST = {"stage": str, "job": str, "digest": str, "parts": {str: str}, "code": {str: str}, "result": dict}


@dataclass(frozen=True)
class Difference:
    """A setting that differs; ``code`` and ``data`` too, whose values are digests by what they are of."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if self.name not in ("code", "data"):
            return f"{self.name}: {self.before!r:.40} -> {self.after!r:.40}"
        return f"{self.name} of {list_some([*self.before], 3)}"


@dataclass(frozen=True)
class Changes:
    found: Sequence[Difference]  # all that may change a result
    named: Sequence[str]  # the names of those that the user named
    notes: Sequence[str]  # what else may explain a difference of results

    @property
    def change(self) -> Difference | None:
        """The one difference that was not named."""
        return next((one for one in self.found if one.name not in self.named), None)

    def to_dict(self) -> dict[str, Any]:
        change = self.change.name if self.change else None
        return {"change": change, "differences": [asdict(one) for one in self.found], "notes": list(self.notes)}


def read_manifests(run: RunDir) -> dict[Path, dict[str, Any]]:
    """Return the manifests of a run by path."""
    read = {path: read_json(path, _MANIFEST) for path in sorted((run.path / "checkpoints").glob("*.json"))}
    return {path: manifest for path, manifest in read.items() if manifest is not None}


def read_settings(run: RunDir) -> dict[str, Any]:
    """Return a run's resolved config, of commands also their parameters and folder; secrets are masked."""
    config, header = run.path / "config.yaml", run.header
    try:
        found = read_file(config, read_own(config).decode())
    except FileNotFoundError:
        found = {}
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(config, f"cannot be read: {error}") from None
    found |= {name: header.get(name) for name in ("combinations", "cwd") if header.get("kind") == "commands"}
    shown: dict[str, Any] = mask(found)
    return shown


def find_changes(a: RunDir, b: RunDir, named: Sequence[str] = ()) -> Changes:
    """Return what differs from B to A, and refuse to compare them if more than one difference was not named."""
    found = find_differences(a, b)
    silent = [one for one in found if one.name not in named]
    for name in named:
        if name not in [one.name for one in found]:
            raise UsageError(
                f"A and B do not differ in {name}.",
                rule="--differs names a difference of the two runs.",
                remedy=nearest(name, [one.name for one in found]) if found else f"leave out --differs {name}",
            )
    if len(silent) > 1:
        flags = " ".join(f"--differs {one.name}" for one in silent[1:])
        raise UsageError(
            f"A and B differ in {len(silent)} things (B -> A): {'; '.join(map(str, silent))}.",
            rule="a comparison shows what one change did, so every further difference must be named.",
            remedy=f"run one of them again with one change, or accept the others: {flags}",
        )
    return Changes(found, named, _notes(a, b))


def find_differences(a: RunDir, b: RunDir) -> list[Difference]:
    """Return all that differs from B to A and may change a result; secrets are masked and do not count."""
    from memfit.pipeline import StageSettings  # loaded only here: it brings the settings of a run

    before, after = (read_settings(run) for run in (b, a))
    blank = StageSettings().model_dump(mode="json")
    stages = {name: blank for one in (before, after) for name in one.get("stages") or {}}
    for one in (before, after):
        one["stages"] = stages | {name: blank | own for name, own in (one.get("stages") or {}).items()}
    found = [Difference(*one) for one in differences(before, after) if not _NO_RESULT.fullmatch(one[0])]
    found.sort(key=lambda one: not one.name.startswith(("params.", "stages.")))  # what is tried, then its conditions
    old, new = (
        {one["stage"]: {"code": one["code"], "data": one["parts"].get("data")} for one in read_manifests(run).values()}
        for run in (b, a)
    )
    both = [stage for stage in old if stage in new]
    for part in ("code", "data"):
        then, now = ({stage: made[stage][part] for stage in both} for made in (old, new))
        if changes := [*differences(then, now)]:
            sides = ({name: one for name, one, _ in changes}, {name: one for name, _, one in changes})
            found.append(Difference(part, *sides))
    return found


def _notes(a: RunDir, b: RunDir) -> list[str]:
    before, after = ({one["job"]: one for one in read_manifests(run).values()} for run in (b, a))
    both = [job for job in before if job in after]
    if not both:
        return ["no stage has a result in both runs, so code and data are not compared"]
    then, now = (
        {name: text for job in both for name, text in (made[job].get("versions") or {}).items()}
        for made in (before, after)
    )
    found = [f"{name} {old} -> {new}" for name, old, new in differences(then, now)]
    alike = [job for job in both if before[job]["parts"] == after[job]["parts"]]
    for stage in dict.fromkeys(before[job]["stage"] for job in alike if before[job]["digest"] != after[job]["digest"]):
        cause = "it does not repeat exactly, or reads data that no fingerprint names"
        found.append(f"{stage} gave another result from equal settings, code and data: {cause}")
    return found


def view_changes(changes: Changes) -> Iterator[Part]:
    """Yield what differs from B to A, the change first."""
    change = changes.change
    facts = [("change", f"{change}   (B -> A)")] if change else []
    facts += [("named", str(one)) for one in changes.found if one is not change]
    facts = facts or [("change", "none found in settings, code and data")]
    yield Facts([*facts, *(("note", text) for text in changes.notes)])


@dataclass(frozen=True)
class Number:
    mean: float  # over the units
    standard_error: float | None  # of the mean, over the units; None for one unit
    n: int  # the number of units

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {format_number(self.standard_error)}"
        return f"{format_number(self.mean)}{error} (n {self.n})"


def read_numbers(run: RunDir) -> dict[str, Number]:
    """Return the numbers that a run's stages returned, by ``stage.number``."""
    made = list(read_manifests(run).values())
    found = {}
    for stage in dict.fromkeys(one["stage"] for one in made):
        units = [metrics_of(one["result"]) for one in made if one["stage"] == stage]
        for name, (mean, sd, n) in summarize_metrics(units).items():
            found[f"{stage}.{name}"] = Number(mean, None if sd is None else sd / math.sqrt(n), n)
    return found


def compare_numbers(a: RunDir, b: RunDir, metric: str | None = None) -> dict[str, Any]:
    """Return as JSON the numbers that both runs have (or one of them), before (B) and after (A), and their jobs."""
    before, after = read_numbers(b), read_numbers(a)
    shared = {name: {"before": asdict(before[name]), "after": asdict(after[name])} for name in before if name in after}
    if metric is not None:
        if metric not in shared:
            raise UsageError(
                f"A and B have no number {metric} in common.",
                rule="a number is named stage.number, as the stage returned it.",
                remedy=nearest(metric, shared) if shared else "run A and B to their end first",
            )
        shared = {metric: shared[metric]}
    return {"numbers": shared, "jobs": {"before": _completed(b), "after": _completed(a)}, "verdict": None}


def _completed(run: RunDir) -> dict[str, int]:
    """Return how many jobs completed of those that ended."""
    counts = read(run).counts
    return {"completed": counts.get("completed", 0), "n": sum(counts.get(one, 0) for one in ("completed", *BAD))}


def view_before_after(found: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the table of before and after, without a verdict."""
    jobs = (f"{one['completed']} of {one['n']}" for one in found["jobs"].values())
    rows = [("jobs completed", *jobs, "")]
    for name, numbers in found["numbers"].items():
        before, after = (Number(**side) for side in numbers.values())
        rows.append((name, str(before), str(after), f"{after.mean - before.mean:+.4g}"))
    yield Table(("number", "before (B)", "after (A)", "A less B"), rows, ("number",))
    proof = "One run each proves no difference: run both with five seeds or more."
    yield proof if found["numbers"] else "No number is in both runs."
    yield "±: standard error over n units."
