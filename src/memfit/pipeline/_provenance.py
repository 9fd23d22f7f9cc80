"""Which dates a model may score: those that it was not trained on, and whose labels do not overlap with its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.data import Panel
from memfit.errors import DamagedError, UsageError

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Provenance:
    """Where a checkpoint comes from, as it says itself.

    Attributes:
        run: The fingerprint of its run: of config, code and data.
        fold: The number of its fold.
        panel: The fingerprint of the panel that it was trained on.
        trained: The dates that it was trained on, as ranges of neighbouring dates of the panel, both ends included.
        label_dates: How many dates its longest label looked ahead.
        embargo_size: Dates kept apart beyond that.
        forward_only: Whether it scores only dates after those that it was trained on.
        params: The workload's parameters that it was trained with; it scores with the same.

    Example:
        >>> found = Provenance("ab", 2, "cd", (("2020-01-01", "2020-01-03"),), label_dates=1, embargo_size=0)
        >>> Provenance.of(found.to_dict()) == found
        True
    """

    run: str
    fold: int
    panel: str
    trained: tuple[tuple[str, str], ...]
    label_dates: int
    embargo_size: int
    forward_only: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_fold(
        cls,
        run: str,
        fold: int,
        panel: Panel,
        train_dates: Indices,
        stage: Mapping[str, Any],
        params: Mapping[str, Any],
    ) -> Provenance:
        """What the checkpoints of a fold say; ``stage`` is what the prepare stage left."""
        return cls(
            run=run,
            fold=fold,
            panel=panel.fingerprint,
            trained=tuple((str(panel.dates[a]), str(panel.dates[b])) for a, b in _runs(np.sort(train_dates))),
            label_dates=int(stage["label_dates"]),
            embargo_size=int(stage["embargo_size"]),
            forward_only=bool(stage["forward_only"]),
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
        remedy = f"name another checkpoint of this fold: {path.parent}/*.pt; or make it again: memfit workflow --new"
        raise DamagedError(error.what, rule=error.rule, remedy=remedy) from error
    try:
        return Provenance.of(content or {})
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} does not say which dates its model was trained on.",
            rule="a date is scored only by models that were not trained on it: a checkpoint names its training dates.",
            remedy="train with Trainer(..., provenance=context.provenance), and average files of one training",
        ) from error
