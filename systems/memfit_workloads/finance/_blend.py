"""From a fold's checkpoints to scores on the dates that its model may score. This loads torch."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from memfit.data import Panel
from memfit.errors import UsageError
from memfit.pipeline import Output
from memfit_workloads.finance._provenance import Indices, Provenance, read_provenance

#: Gives a checkpoint's scores on dates, from panel, positions of the dates, checkpoint and params.
Score = Callable[[Panel, Indices, Path, Any], pa.Table]


def blend(fold: Output, pattern: str | None, output: Path) -> list[str]:
    """Average those checkpoints that a fold saved whose names match a pattern; gives their names.

    Without a pattern, those of the averaged weights, or the newest one where there are none.
    """
    from memfit_workloads.averages import average_checkpoints

    outputs = [one for one in fold.facts["outputs"] if one["path"].endswith(".pt") or one["name"] in ("best", "latest")]
    saved = {one["path"] if one["path"].endswith(".pt") else one["name"]: one["name"] for one in outputs}
    patterns = [pattern] if pattern else ["ema_epoch_*.pt", "latest"]
    found = (sorted(fnmatch.filter(saved, one)) for one in patterns)
    chosen = next(filter(None, found), [])
    if not chosen:
        raise UsageError(
            f"{fold.dir.name} saved no checkpoint that matches '{patterns[-1]}'; it saved "
            f"{', '.join(saved) or 'none'}.",
            rule="blend names the checkpoints of a fold that are averaged; an early stop leaves out snapshots of later "
            "epochs.",
            remedy="list earlier epochs for the snapshots, or --set params.blend=latest",
        )
    average_checkpoints([fold.path(saved[path]) for path in chosen], output)
    return chosen


def score_out_of_fold(
    score: Score, panel: Panel, checkpoints: Sequence[Path], dates: Indices, params: BaseModel
) -> tuple[dict[int, pa.Table], list[dict[str, Any]]]:
    """The scores of several models, each on those of the dates that it may score, with the settings of its training.

    Returns:
        The tables by fold; and per checkpoint what it is and how many dates it scored.
    """
    found = {path: read_provenance(path) for path in checkpoints}
    check_related(found, panel)
    tables: dict[int, pa.Table] = {}
    facts = []
    for path, provenance in found.items():
        if provenance.fold in tables:
            raise UsageError(
                f"{path} is of fold {provenance.fold}, and so is another checkpoint.",
                rule="each fold is judged by one model.",
                remedy="average the checkpoints of a fold first: memfit average",
            )
        mine = dates[provenance.scorable(panel)[dates]]
        facts.append({"fold": provenance.fold, "checkpoint": str(path), "num_dates": len(mine)})
        if len(mine):
            trained = type(params).model_validate_json(
                json.dumps(params.model_dump(mode="json") | dict(provenance.params))
            )
            tables[provenance.fold] = score(panel, mine, path, trained)
    if not tables:
        raise UsageError(
            f"none of the {len(found)} checkpoints may score any of the {len(dates)} dates.",
            rule="a date is scored only by models that were not trained on it nor on labels that overlap with its own.",
            remedy="choose dates outside the training dates, or add the checkpoints of the other folds",
        )
    return tables, facts


def check_related(found: Mapping[Path, Provenance], panel: Panel) -> None:
    """Refuse checkpoints that were trained with different settings, or on another panel."""
    first_path, first = next(iter(found.items()))
    for path, provenance in found.items():
        if provenance.params != first.params:
            raise UsageError(
                f"{path} was trained with other settings than {first_path}.",
                rule="models that are judged together come from one config.",
                remedy="name the checkpoints of one run",
            )
        if provenance.panel != panel.fingerprint:
            raise UsageError(
                f"{path} was trained on the panel {provenance.panel[:8]}, and this is {panel.fingerprint[:8]}.",
                rule="a checkpoint is judged on the data that it was trained on.",
                remedy="name the config that it was trained with",
            )


def join_scores(tables: Mapping[int, pa.Table]) -> pa.Table:
    """Several folds' scores as one table with a row for each date and asset, and a column ``fold``.

    Where several models may score a date, it has the scores of the last fold's, which has seen the newest dates.
    """
    parts, taken = [], set[Any]()
    for fold in sorted(tables, reverse=True):
        dates = tables[fold]["date"]
        kept = tables[fold].filter(pc.invert(pc.is_in(dates, pa.array(sorted(taken), dates.type))))
        parts.append(kept.append_column("fold", pa.array(np.full(len(kept), fold, np.int32))))
        taken |= set(pc.unique(dates).to_pylist())
    return pa.concat_tables(parts).sort_by([("date", "ascending"), ("code", "ascending")])
