"""The section ``tune`` of a config: which settings are searched, for what, and how many trials."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from memfit.config import Settings, read_plain
from memfit.errors import UsageError
from memfit.pipeline import check_placeholders, config_of_command, expand_range, parse_param

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(?P<low>{NUMBER})\.\.(?P<high>{NUMBER})(?P<log>:log)?")
Choice = bool | int | float | str


class Searched(Settings):
    """One searched setting, and its values: ``choices``, or a range (of whole numbers, if both ends are)."""

    name: Annotated[str, Field(pattern=_DOTTED.pattern)]  # the setting, such as ``params.train.learning_rate``
    choices: list[Choice] | None = None  # the values to choose from
    low: int | float | None = None  # the range, both ends included
    high: int | float | None = None
    log: bool = False  # draw on a logarithmic scale; ``low`` must be above 0

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Searched:
        is_range = self.low is not None and self.high is not None
        if is_range == bool(self.choices) or (self.low is None) != (self.high is None):
            raise ValueError("give either choices, or low and high")
        if self.low is not None and self.high is not None:
            if not self.low < self.high:
                raise ValueError(f"low ({self.low}) must be below high ({self.high})")
            if self.log and self.low <= 0:
                raise ValueError(f"low ({self.low}) must be above 0 on a logarithmic scale")
        elif self.log:
            raise ValueError("log belongs to a range")
        if self.choices and len({repr(one) for one in self.choices}) < len(self.choices):
            raise ValueError("choices name a value twice")
        return self


class TuneSettings(Settings):
    """How a study searches.

    Attributes:
        space: The searched settings.
        objective: The number to make best, as ``stage.number`` of a stage's result; the mean over the stage's units.
        direction: Whether more or less of it is better.
        report: The number that the pruner looks at after each epoch: a metric of the ``epoch`` events, or a name that
            ``Context.report`` was given. The objective's name if empty.
        n_trials: How many trials; a later start with more goes on.
        num_slots: The most trials at once. Trial k is drawn from the results of trials 0 to k - ``num_slots``, however
            many run at once: so the study is the same after any kill.
        seed: The study's seed.
        sampler: Optuna's sampler: ``tpe`` or ``random``.
        pruner: ``median`` ends a trial that is worse than the median of earlier ones at the same epoch.
        pruner_startup: Completed trials before any is pruned.
        pruner_warmup: Epochs before a trial can be pruned.
        epochs: The setting that ``--max-epochs`` sets, such as ``params.train.num_epochs``. With it, the study starts
            with one trial of 1 epoch and one of 3.
        final_epochs: What ``best.yaml`` sets ``epochs`` to; the trials' own number if None.
    """

    space: Annotated[list[Searched], Field(min_length=1)]
    objective: Annotated[str, Field(pattern=r"[A-Za-z]\w*\.\S+")]
    direction: Literal["maximize", "minimize"]
    report: str = ""
    n_trials: Annotated[int, Field(ge=1)] = 20
    num_slots: Annotated[int, Field(ge=1)] = 2
    seed: Annotated[int, Field(ge=0)] = 0
    sampler: Literal["tpe", "random"] = "tpe"
    pruner: Literal["median", "none"] = "median"
    pruner_startup: Annotated[int, Field(ge=1)] = 4
    pruner_warmup: Annotated[int, Field(ge=0)] = 1
    epochs: Annotated[str, Field(pattern=_DOTTED.pattern)] | None = None
    final_epochs: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _names_are_distinct(self) -> TuneSettings:
        names = [one.name for one in self.space]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"space names {twice} twice")
        if self.epochs in names:
            raise ValueError(f"{self.epochs} is searched, and epochs names it")
        return self

    @property
    def stage(self) -> str:
        """The stage of the objective."""
        return self.objective.partition(".")[0]

    @property
    def number(self) -> str:
        """The objective's name in the result of its stage."""
        return self.objective.partition(".")[2]


def read_param(text: str) -> dict[str, Any]:
    """Return a searched setting from ``--param``, as `memfit run` reads it; a range may also be ``1e-5..1e-3:log``."""
    name, values = parse_param(text, _read_values)
    if not name.isidentifier() or (len(values) > 1 and any(isinstance(one, dict) for one in values)):
        raise UsageError(
            f"--param {text} cannot be searched.",
            rule="a searched parameter has a plain name, and one range or a list of values.",
            remedy="write for example --param lr=1e-5..1e-3:log, or --param batch=32,64",
        )
    return {"name": f"params.{name}"} | (values[0] if isinstance(values[0], dict) else {"choices": values})


def _read_values(name: str, text: str) -> list[Any]:
    """Return the bounds of a range, or a value; ``1..9..2`` are five values."""
    if (match := _RANGE.fullmatch(text)) is None:
        return [read_plain(one) for one in expand_range(name, text)]
    bounds: dict[str, Any] = {"low": read_plain(match["low"]), "high": read_plain(match["high"])}
    return [bounds | ({"log": True} if match["log"] else {})]


def of_command(command: Sequence[str], params: Sequence[str], name: str, tune: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a study over a command whose parameters stand in braces."""
    space = [read_param(text) for text in params]
    names = [one["name"].removeprefix("params.") for one in space]
    check_placeholders(command, names)
    words = list(command)
    for one in names:
        words = [word.replace(f"{{{one}}}", f"{{params.{one}}}") for word in words]
    first = {one["name"]: one["choices"][0] if "choices" in one else one["low"] for one in space}
    return {
        **config_of_command(words, "trial"),
        "experiment": name,
        "params": {one.removeprefix("params."): value for one, value in first.items()},
        "tune": {**tune, "space": space},
    }
