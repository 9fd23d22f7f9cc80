"""Targets of the user's: what a run reached, what is missing, and which stored run proves it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from memfit import config
from memfit.errors import ConfigError
from memfit.files import read_own
from memfit.reports import read_manifests, read_numbers
from memfit.rundir import RunDir


class Target(config.Settings):
    """A target of the user's."""

    target: float
    direction: Literal["higher", "lower"] = "higher"
    milestone: str = ""


def judge_targets(file: Path, run: RunDir) -> list[dict[str, Any]]:
    """Return how far a run is from each target of a file, for example ``fold.rank_ic: {target: 0.04}``.

    Each has its ``name`` and settings, ``mean``, ``standard_error`` and ``n`` of the run's number, and ``gap``: how
    much is missing, 0 or less if the target is reached, None without a number. ``evidence`` is there if a completed run
    reached the target: the run, the fingerprint of its config, and the SHA-256 of the manifests of the stage, one after
    the other.

    Raises:
        ConfigError: If the file is no mapping of ``stage.number`` to targets.
    """
    try:
        targets = TypeAdapter(dict[str, Target]).validate_python(config.read_file(file))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}.",
            rule="a file of targets maps stage.number to a target.",
            remedy="write for example: fold.rank_ic: {target: 0.04}",
        ) from error
    numbers, manifests, found = read_numbers(run), read_manifests(run), []
    for name, target in targets.items():
        number, gap, evidence = numbers.get(name), None, None
        if number is not None:
            gap = (target.target - number.mean) * (1 if target.direction == "higher" else -1)
        if gap is not None and gap <= 0 and run.state == "completed":
            files = [path for path, made in manifests.items() if made["stage"] == name.partition(".")[0]]
            hashed = hashlib.sha256(b"".join(map(read_own, files))).hexdigest()
            evidence = {"run": str(run.path), "config": run.header.get("fingerprint"), "sha256": hashed}
        of_run = {key: getattr(number, key, None) for key in ("mean", "standard_error", "n")}
        found.append({"name": name, **target.model_dump(), **of_run, "gap": gap, "evidence": evidence})
    return found
