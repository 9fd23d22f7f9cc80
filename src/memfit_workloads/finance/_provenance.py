"""The dates of a fold, and which dates its model may score: those whose labels meet none that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from memfit.data import Panel
from memfit.errors import DamagedError, SplitError, UsageError
from memfit.pipeline import Context

Indices = npt.NDArray[np.int64]


def save_folds(
    context: Context,
    panel: Panel,
    splits: Sequence[tuple[Indices, Indices]],
    *,
    label_dates: int,
    embargo_size: int = 0,
    forward_only: bool = False,
) -> dict[str, Any]:
    """Save a panel and its folds, as the stages that judge read them; gives what the stage ``prepare`` returns.

    Args:
        context: Of the stage.
        panel: The panel that every fold maps.
        splits: For each fold the positions in ``panel.dates`` to train on and to test on.
        label_dates: How many dates the longest label looks ahead.
        embargo_size: Dates that are kept apart beyond that, after the dates that a model scores.
        forward_only: Whether a model scores only dates after those that it was trained on, as in a walk forward.

    Raises:
        SplitError: If there is no fold.
    """
    if not splits:
        raise SplitError(
            "the dates were split into no fold.",
            rule="a run has at least one fold.",
            remedy="set the number of folds in params to 2 or more",
        )
    context.save("panel", panel)
    rows = {f"train_{fold}": train for fold, (train, _) in enumerate(splits, 1)}
    context.save("splits", rows | {f"test_{fold}": test for fold, (_, test) in enumerate(splits, 1)})
    return {
        "num_dates": len(panel.dates),
        "num_assets": len(panel.assets),
        "num_features": len(panel.feature_names),
        "first_date": str(panel.dates[0]),
        "last_date": str(panel.dates[-1]),
        "label_dates": label_dates,
        "embargo_size": embargo_size,
        "forward_only": forward_only,
        "folds": [
            {
                "fold": fold,
                "num_train_dates": len(train),
                "num_test_dates": len(test),
                "first_test_date": str(panel.dates[min(test)]),
                "last_test_date": str(panel.dates[max(test)]),
            }
            for fold, (train, test) in enumerate(splits, 1)
        ],
    }


def fold_of(context: Context) -> tuple[Panel, Indices, Indices]:
    """The panel, and the positions of the dates that this job's fold trains on and is tested on."""
    prepared, fold = context["prepare"], context.unit["fold"]
    splits = prepared.arrays("splits")
    return prepared.panel(), splits[f"train_{fold}"], splits[f"test_{fold}"]


@dataclass(frozen=True)
class Provenance:
    """Where a checkpoint comes from, as it says itself.

    Attributes:
        fold: The number of its fold.
        panel: The fingerprint of the panel that it was trained on.
        trained: The dates that it was trained on, as ranges of neighbouring dates of the panel, both ends included.
        label_dates: How many dates its longest label looked ahead.
        embargo_size: Dates kept apart beyond that.
        forward_only: Whether it scores only dates after those that it was trained on.
        params: The settings that it was trained with; it scores with the same.

    Example:
        >>> found = Provenance(2, "cd", (("2020-01-01", "2020-01-03"),), label_dates=1, embargo_size=0)
        >>> Provenance.of(found.to_dict()) == found
        True
    """

    fold: int
    panel: str
    trained: tuple[tuple[str, str], ...]
    label_dates: int
    embargo_size: int
    forward_only: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_fold(
        cls, fold: int, panel: Panel, train_dates: Indices, prepared: Mapping[str, Any], params: Mapping[str, Any]
    ) -> Provenance:
        """What the checkpoints of a fold say; ``prepared`` is what `save_folds` gave."""
        return cls(
            fold=fold,
            panel=panel.fingerprint,
            trained=tuple((str(panel.dates[a]), str(panel.dates[b])) for a, b in _runs(np.sort(train_dates))),
            label_dates=prepared["label_dates"],
            embargo_size=prepared["embargo_size"],
            forward_only=prepared["forward_only"],
            params=dict(params),
        )

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Provenance:
        """From the plain values of a checkpoint."""
        trained = tuple((str(first), str(last)) for first, last in content["trained"])
        return cls(**{**content, "trained": trained})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a checkpoint holds them."""
        return asdict(self) | {"trained": [list(pair) for pair in self.trained]}

    def scorable(self, panel: Panel) -> npt.NDArray[np.bool_]:
        """Which dates of the panel the model may score, (num_dates,).

        A label spans its date and ``label_dates`` more. A date is left out if its label meets one that the model
        learned, or if a date that it learned from lies within the embargo behind it.

        Raises:
            UsageError: If the panel has not the dates that it was trained on.
        """
        position = {str(date): number for number, date in enumerate(panel.dates)}
        learned = np.zeros(len(panel.dates), bool)
        for first, last in self.trained:
            if first not in position or last not in position:
                raise UsageError(
                    f"fold {self.fold} was trained on {first} to {last}, and {panel.path} does not have these dates.",
                    rule="a checkpoint scores dates of the panel that it was trained on, or of a longer one.",
                    remedy="name the config that it was trained with",
                )
            learned[position[first] : position[last] + 1] = True
        free = ~_near(learned, before=self.label_dates + self.embargo_size, after=self.label_dates)
        if self.forward_only:
            free[: int(np.flatnonzero(learned)[-1])] = False
        return free


def _runs(positions: Indices) -> list[tuple[int, int]]:
    """Ascending positions as ranges of neighbours, both ends included.

    >>> _runs(np.array([0, 1, 2, 5, 7, 8]))
    [(0, 2), (5, 5), (7, 8)]
    """
    breaks = np.flatnonzero(np.diff(positions) != 1)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, len(positions) - 1)
    return (
        [(int(positions[a]), int(positions[b])) for a, b in zip(firsts, lasts, strict=True)] if len(positions) else []
    )


def _near(marked: npt.NDArray[np.bool_], *, before: int, after: int) -> npt.NDArray[np.bool_]:
    """Where a mark lies within so many places: a mark blocks ``before`` places ahead of itself and ``after`` behind.

    >>> _near(np.array([0, 0, 0, 1, 0, 0, 0], bool), before=2, after=1).astype(int)
    array([0, 1, 1, 1, 1, 0, 0])
    """
    count = np.append(0, np.cumsum(marked))
    place = np.arange(len(marked))
    first, stop = np.maximum(place - after, 0), np.minimum(place + before + 1, len(marked))
    near: npt.NDArray[np.bool_] = count[stop] > count[first]
    return near


def provenance(context: Context, params: BaseModel) -> dict[str, Any]:
    """What the checkpoints of this job's fold say of themselves: hand it on as ``Trainer(..., provenance=)``."""
    panel, train_dates, _ = fold_of(context)
    prepared = context["prepare"].result
    found = Provenance.of_fold(context.unit["fold"], panel, train_dates, prepared, params.model_dump(mode="json"))
    return found.to_dict()


def read_provenance(path: Path) -> Provenance:
    """What a checkpoint says of where it comes from. This loads torch.

    Raises:
        UsageError: If it does not say.
        DamagedError: If it is cut short or differs from its checksum.
    """
    from memfit.training import load_checkpoint

    try:
        content = load_checkpoint(path, mmap=True).get("provenance")
    except DamagedError as error:
        remedy = f"name another checkpoint of this fold: {path.parent}/*.pt; or make it again: memfit run --new"
        raise DamagedError(error.what, rule=error.rule, remedy=remedy) from error
    try:
        return Provenance.of(content or {})
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} does not say which dates its model was trained on.",
            rule="a date is scored only by models that were not trained on it: a checkpoint names its training dates.",
            remedy="train with Trainer(..., provenance=provenance(context, params)), and average files of one training",
        ) from error
