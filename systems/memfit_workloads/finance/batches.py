"""Batches of several whole dates over a loader that makes one date at a time, and the scores of a model on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from memfit.data import DateBatch, Loader, Panel
from memfit_workloads.finance._provenance import Indices
from memfit_workloads.finance.panels import DataParams

if TYPE_CHECKING:
    import torch

_Batch = TypeVar("_Batch")


class GroupedDates(Generic[_Batch]):
    """Batches of neighbouring dates of a loader; a derived class says which dates and what they are joined to.

    What batch k of an epoch holds depends on the loader, the epoch and k: a training resumes at the loader's position.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def borders(self) -> Sequence[int]:
        """Return at which dates of the epoch batches begin, and where the last one ends."""
        raise NotImplementedError

    def joined(self, group: Sequence[DateBatch]) -> _Batch:
        """Return one batch of several dates."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.borders()) - 1

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of an epoch, and go to its start."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[_Batch]:
        dates, position = iter(self._loader), self._loader.state_dict()["position"]
        borders = [position, *(border for border in self.borders() if border > position)]
        for start, stop in itertools.pairwise(borders):
            yield self.joined(list(itertools.islice(dates, stop - start)))  # type: ignore[arg-type]
        next(dates, None)  # the loader then knows that the epoch is over

    def repeated(self, number: int) -> _Batch:
        """Return a batch of so many of the longest date, at most as many as there are dates."""
        return self.joined([self._loader.longest()] * min(number, len(self._loader)))  # type: ignore[list-item]

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position: that of the first date that was not given yet."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state)

    @property
    def num_workers(self) -> int:
        """How many threads make dates ahead."""
        return self._loader.num_workers

    def close(self) -> None:
        self._loader.close()


def targets_of(panel: Panel, data: DataParams, group: Sequence[DateBatch]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the targets of the rows of several dates, (n, num_horizons) float32; NaN where not known."""
    columns = [panel.target_names.index(data.target(horizon)) for horizon in data.horizons]
    found = np.concatenate([panel.targets[one.date_index][one.asset_indices][:, columns] for one in group])
    return found.astype(np.float32, copy=False)


def windows_of(group: Sequence[DateBatch]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the windows of several dates, one after the other; those of a single date are not copied."""
    return group[0].windows if len(group) == 1 else np.concatenate([one.windows for one in group])


def scores_of(
    model: torch.nn.Module,
    panel: Panel,
    data: DataParams,
    batches: Iterable[Any],
    *,
    rows: Callable[[Any], tuple[Indices, Indices, Any]],
    precision: str,
) -> pa.Table:
    """Return the scores of a model in evaluation mode: ``date``, ``code``, and by horizon ``score_h5``, ``target_h5``.

    ``target_h1`` is always there; a target that is not known is null. ``rows`` gives the positions of a batch's dates
    and assets in the panel, and what the model says of them, (n, num_horizons).
    """
    import torch

    from memfit.training import autocast

    parts = []
    with torch.no_grad(), autocast(model, precision):  # type: ignore[arg-type]
        for batch in batches:
            dates, assets, found = rows(batch)
            parts.append((dates, assets, found.float().cpu().numpy()))
    date, asset, scores = (np.concatenate(one) for one in zip(*parts, strict=True))
    columns: dict[str, Any] = {
        "date": pa.array(panel.dates[date], pa.date32()),
        "code": pa.array(panel.assets).take(pa.array(asset)),
    }
    columns |= {f"score_h{horizon}": pa.array(scores[:, at]) for at, horizon in enumerate(data.horizons)}
    for horizon in data.labels:
        known = panel.target(data.target(horizon))[date, asset]
        columns[f"target_h{horizon}"] = pa.array(known, from_pandas=True)
    return pa.table(columns)
