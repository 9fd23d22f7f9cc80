"""The dates of a fold, and which dates its model may score: those whose labels meet none that it was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from memfit.data import Panel
from memfit.errors import DamagedError, UsageError
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
        splits: For each fold the positions in ``panel.dates`` to train on and to test on.
        label_dates: How many dates the longest label looks ahead.
        embargo_size: Dates that are kept apart beyond that, after the dates that a model scores.
        forward_only: Whether a model scores only dates after those that it was trained on, as in a walk forward.
    """
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


class Provenance(BaseModel, frozen=True):
    """Where a checkpoint comes from, as it says itself; dates and sizes are those of `save_folds`.

    ``panel`` is the fingerprint of the panel that it was ``trained`` on, on ranges of neighbouring dates, both ends
    included. ``params`` are the settings of its training; it scores with the same.
    """

    fold: int
    panel: str
    trained: tuple[tuple[str, str], ...]
    label_dates: int
    embargo_size: int
    forward_only: bool = False
    params: dict[str, Any] = {}

    @classmethod
    def of_fold(cls, fold: int, panel: Panel, train_dates: Indices, **facts: Any) -> Provenance:
        """What the checkpoints of a fold say: ``facts`` are the sizes and the params."""
        ordered = np.sort(train_dates)
        parts = np.split(panel.dates[ordered], np.flatnonzero(np.diff(ordered) != 1) + 1)
        trained = tuple((str(one[0]), str(one[-1])) for one in parts if len(one))
        return cls(fold=fold, panel=panel.fingerprint, trained=trained, **facts)

    def scorable(self, panel: Panel) -> npt.NDArray[np.bool_]:
        """Which dates of the panel the model may score, (num_dates,).

        A label spans its date and ``label_dates`` more. A date is left out if its label meets one that the model
        learned, or if a date that it learned from lies within the embargo behind it.
        """
        learned = np.zeros(len(panel.dates), bool)
        for first, last in self.trained:
            learned |= (panel.dates >= np.datetime64(first)) & (panel.dates <= np.datetime64(last))
        before, after = self.label_dates + self.embargo_size, self.label_dates
        near = np.convolve(learned, np.ones(before + after + 1))[before : before + len(learned)]
        free: npt.NDArray[np.bool_] = near == 0
        if self.forward_only:
            free[: int(np.flatnonzero(learned)[-1])] = False
        return free


def provenance(context: Context, params: BaseModel) -> dict[str, Any]:
    """What the checkpoints of this job's fold say of themselves: hand it on as ``Trainer(..., provenance=)``."""
    panel, train_dates, _ = fold_of(context)
    facts = {name: context["prepare"].result[name] for name in ("label_dates", "embargo_size", "forward_only")}
    found = Provenance.of_fold(context.unit["fold"], panel, train_dates, params=params.model_dump(mode="json"), **facts)
    return found.model_dump(mode="json")


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
        return Provenance.model_validate(content or {})
    except ValueError as error:
        raise UsageError(
            f"{path} does not say which dates its model was trained on.",
            rule="a date is scored only by models that were not trained on it: a checkpoint names its training dates.",
            remedy="train with Trainer(..., provenance=provenance(context, params)), and average files of one training",
        ) from error
