"""Targets of the user's: what two runs reached, what is missing, and which stored run proves it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from memfit import config
from memfit.errors import ConfigError
from memfit.reports._compare import Number, read_numbers
from memfit.reports._differences import read_manifests
from memfit.reports._numbers import format_number, or_dash, plain_table, say
from memfit.reports._run_view import finite
from memfit.rundir import RunDir, read_own


class Target(config.Settings):
    """A target of the user's.

    Attributes:
        target: The number to reach.
        direction: Whether it is reached from ``higher`` numbers or from ``lower`` ones.
        milestone: The milestone that it belongs to; empty for one of its own.
    """

    target: float
    direction: Literal["higher", "lower"] = "higher"
    milestone: str = ""


class _Targets(config.Settings):
    targets: dict[str, dict[str, Target]]


@dataclass(frozen=True)
class TargetGap:
    """A target with the numbers of two runs.

    Attributes:
        before: The number of B; None if it has none.
        after: The number of A.
        gap: How much A lacks; 0 or less if the target is reached.
        factor: By how much A must be multiplied, or divided where lower is better; None unless both are above 0.
        evidence: The run A by its path, the fingerprint of its config and the hash of its manifests, if A completed
            and reached the target; None otherwise.
    """

    number: str
    target: Target
    before: Number | None
    after: Number | None
    gap: float | None
    factor: float | None
    evidence: Mapping[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        found: dict[str, Any] = finite(asdict(self) | {"target": self.target.model_dump()})
        return found


def read_targets(file: Path) -> dict[str, Target]:
    """Return the targets of a file by the names of their numbers.

    Raises:
        ConfigError: If the file is no mapping of ``stage.number`` to targets.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "targets.yaml").write_text("fold.loss: {target: 0.1, direction: lower}")
        ...     read_targets(Path(folder) / "targets.yaml")
        {'fold.loss': Target(target=0.1, direction='lower', milestone='')}
    """
    nested: dict[str, dict[str, Any]] = {}
    for name, one in config.read_file(file).items():
        stage, dot, number = name.partition(".")
        if not (dot and number):
            raise ConfigError(
                f"{file}: {name} is no name of a number.",
                rule="a target is named stage.number, as the stage returned it.",
                remedy="write for example: fold.rank_ic: {target: 0.04}",
            )
        nested.setdefault(stage, {})[number] = one
    try:
        found = config.resolve(_Targets, values={"targets": nested}, env={}).value.targets
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.what}", rule=error.rule, remedy=error.remedy) from None
    if not found:
        raise ConfigError(
            f"{file} holds no target.",
            rule="a file of targets maps stage.number to a target.",
            remedy="write for example: fold.rank_ic: {target: 0.04}",
        )
    return {f"{stage}.{number}": one for stage, own in found.items() for number, one in own.items()}


def judge_targets(targets: Mapping[str, Target], a: RunDir, b: RunDir) -> list[TargetGap]:
    """Return how far A is from each target, beside B, and the evidence for those that A reached."""
    before, after, found = read_numbers(b), read_numbers(a), []
    for name, target in targets.items():
        number, gap, factor, evidence = after.get(name), None, None, None
        if number is not None:
            sign = 1 if target.direction == "higher" else -1
            gap = sign * (target.target - number.mean)
            factor = (target.target / number.mean) ** sign if min(target.target, number.mean) > 0 else None
            evidence = _evidence(a, name.partition(".")[0]) if gap <= 0 and a.state == "completed" else None
        found.append(TargetGap(name, target, before.get(name), number, gap, factor, evidence))
    return found


def _evidence(run: RunDir, stage: str) -> dict[str, Any]:
    """Return where a stage's numbers are stored; the hash is that of its manifests, one after the other."""
    files = [path for path, made in read_manifests(run).items() if made["stage"] == stage]
    hashed = hashlib.sha256(b"".join(map(read_own, files))).hexdigest()
    config_hash = run.header.get("fingerprint")
    return {"run": str(run.path), "config": config_hash, "manifests": [one.name for one in files], "sha256": hashed}


def print_targets(found: Sequence[TargetGap], console: Console) -> None:
    """Print the gaps, and a box for each milestone: ticked if a stored run reached all its targets."""
    table = plain_table("number", "before (B)", "after (A)", "target", "gap", left=("number",))
    for one in found:
        factor = "" if one.factor is None else f" (factor {one.factor:.3g})"
        gap = "-" if one.gap is None else "reached" if one.gap <= 0 else f"{one.gap:.4g}{factor}"
        limit = f"{'>=' if one.target.direction == 'higher' else '<='} {format_number(one.target.target)}"
        table.add_row(one.number, or_dash(one.before, str), or_dash(one.after, str), limit, gap)
    console.print(table)
    milestones: dict[str, list[TargetGap]] = {}
    for one in found:
        milestones.setdefault(one.target.milestone or one.number, []).append(one)
    for name, own in milestones.items():
        missing = [one.number for one in own if one.evidence is None]
        say(console, f"[{' ' if missing else 'x'}] {name}" + (f": open ({', '.join(missing)})" if missing else ""))
        for one in own:
            if one.evidence is not None:
                facts = one.evidence
                say(console, f"    {one.number} {one.after}: {facts['run']}")
                say(console, f"      config {facts['config']}")
                say(console, f"      manifests {facts['sha256']} ({len(facts['manifests'])} files)")
