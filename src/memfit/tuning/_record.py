"""The records of a study: one file for each trial, which says how it was drawn and how it ended.

They are the truth of a study. Optuna's study is made from them in memory, again and again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from memfit.files import check_shape, damaged, fits, read_json, write_json
from memfit.rundir import RunDir

TrialState = Literal["asking", "running", "completed", "pruned", "infeasible", "out_of_memory", "timeout", "failed"]
#: The states that are final. A trial that was stopped is ``running`` still: it goes on.
ENDED_TRIALS: frozenset[TrialState] = frozenset(get_args(TrialState)) - {"asking", "running"}
SCHEMA_VERSION = 1
_NONE = type(None)
_SIZES = ({str: int}, _NONE)
_SHAPE: Mapping[str, Any] = {
    "schema_version": int,
    "name": str,
    "number": (int, _NONE),
    "state": frozenset(get_args(TrialState)),
    "params": dict,
    "refused": [{"params": dict, "why": str}],
    "value": (float, int, _NONE),
    "intermediate": {str: (float, int, frozenset({"nan", "inf", "-inf"}))},
    "measured": {"seconds": (float, int, _NONE), "peaks": _SIZES, "device_peaks": _SIZES},
    **dict.fromkeys(("cause", "kind", "job"), str),
    "epochs": (int, _NONE),
    "by_unit": {str: (float, int)},
}


@dataclass(frozen=True)
class Trial:
    """One trial of a study, or a canary: a short trial before the study.

    Attributes:
        name: ``trial_0017``; ``canary_1`` for one of 1 epoch.
        number: Its number in the study; None for a canary.
        state: How it ended; ``asking`` while its settings are drawn.
        params: Its searched settings by their dotted names.
        num_seen: It was drawn from the results of trials 0 to ``num_seen`` - 1.
        refused: Settings that were drawn before and cannot run: their ``params``, and ``why`` with the arithmetic.
        epochs: How many epochs it was to train; None if the study names no such setting.
        value: The objective; of a pruned trial, what it reported last.
        by_unit: The objective of each unit of its stage.
        intermediate: What its first unit reported after each epoch, up to the one that pruned it.
        cause: Why it was pruned, or failed; of an out-of-memory with bytes that may differ from run to run.
        kind: The class of a failure, such as ``ValueError``; empty where there is none.
        job: The job that failed.
        measured: What may differ from run to run. ``peaks`` and ``device_peaks`` are bytes by stage, ``seconds`` is the
            time of its longest job, ``started`` and ``ended`` are Unix seconds, ``effective`` is what its trainings
            said of optimizer, schedule, loss and threads.
    """

    name: str
    number: int | None = None
    state: TrialState = "asking"
    params: Mapping[str, Any] = field(default_factory=dict)
    num_seen: int = 0
    refused: Sequence[Mapping[str, Any]] = ()
    epochs: int | None = None
    value: float | None = None
    by_unit: Mapping[str, float] = field(default_factory=dict)
    intermediate: Mapping[int, float] = field(default_factory=dict)
    cause: str = ""
    kind: str = ""
    job: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """True if its state is final."""
        return self.state in ENDED_TRIALS

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        # JSON has no NaN and no infinity.
        steps = {str(step): _shown(value) for step, value in self.intermediate.items()}
        return {"schema_version": SCHEMA_VERSION} | asdict(self) | {"intermediate": steps}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any], path: Path) -> Trial:
        """Return the trial that ``to_dict`` gave, as it was read from a file."""
        check_shape(path, found, _SHAPE)
        if bad := [step for step in found["intermediate"] if not step.isdecimal()]:
            raise damaged(path, f"has a report of epoch {bad[0]}")
        known = {one.name: found[one.name] for one in fields(cls) if one.name in found}
        return cls(
            **known | {"intermediate": {int(step): float(value) for step, value in found["intermediate"].items()}}
        )


def folder_of(run: RunDir) -> Path:
    return run.path / "trials"


def write_trial(run: RunDir, trial: Trial) -> None:
    write_json(folder_of(run) / f"{trial.name}.json", trial.to_dict())


def _shown(value: float) -> float | str:
    """Return a number as a record holds it; one without a sane size counts as infinite."""
    if fits(float(value), float):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def read_trial(run: RunDir, name: str) -> Trial | None:
    path = folder_of(run) / f"{name}.json"
    return None if (found := read_json(path)) is None else Trial.from_dict(found, path)


def read_trials(run: RunDir) -> list[Trial]:
    """Return the records of a study's trials in their order, without canaries."""
    names = sorted((path.stem for path in folder_of(run).glob("trial_*.json")), key=lambda name: int(name[6:]))
    return [trial for name in names if (trial := read_trial(run, name)) is not None]


def name_of(number: int) -> str:
    return f"trial_{number:04d}"
