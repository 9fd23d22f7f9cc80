"""From a fold's checkpoints to scores on the dates that its model may score. This loads torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memfit.data import Panel
from memfit.errors import DamagedError, UsageError
from memfit.pipeline._provenance import Indices, Provenance, read_provenance
from memfit.pipeline._workload import FoldWorkload, ScoreContext, read_params

_NUM_NAMED = 5


def blend(folder: Path, pattern: str) -> tuple[Path, list[str]]:
    """The average of a fold's checkpoints that match a pattern, as ``blended.pt`` beside them, and their names.

    Raises:
        UsageError: If none matches.
        DamagedError: If one is cut short or differs from its checksum.
    """
    from memfit.training import average_checkpoints

    output = folder / "blended.pt"
    paths = sorted(path for path in folder.glob(pattern) if path != output)
    if not paths:
        there = sorted(path.name for path in folder.glob("*.pt"))
        raise UsageError(
            f"{folder} has no checkpoint that matches '{pattern}'; it has {', '.join(there[:_NUM_NAMED]) or 'none'}.",
            rule="workflow.blend names the checkpoints of a fold that are averaged; an early stop leaves out snapshots "
            "of later epochs.",
            remedy="list earlier epochs for the snapshots, or --set workflow.blend=latest_checkpoint.pt",
        )
    try:
        average_checkpoints(paths, output)
    except DamagedError as error:
        remedy = (
            "remove that file, and the others are averaged by the same command; or train anew: memfit workflow --new"
        )
        raise DamagedError(error.what, rule=error.rule, remedy=remedy) from error
    return output, [path.name for path in paths]


def score(workload: FoldWorkload[Any], params: Any, panel: Panel, checkpoint: Path, dates: Indices) -> pa.Table:
    """A checkpoint's scores on dates, with the columns that all else relies on.

    Raises:
        UsageError: If the workload gives other columns.
    """
    assert workload.score is not None  # checked when the order was resolved
    table = workload.score(ScoreContext(panel, dates, checkpoint), params)
    missing = [name for name in ("date", "code", "target_h1") if name not in table.column_names]
    if missing or not any(name.startswith("score_h") for name in table.column_names):
        raise UsageError(
            f"score() of the workload gave the columns {', '.join(table.column_names)}.",
            rule="scores have date, code, target_h1, and score_h5 and target_h5 for a horizon of 5 dates.",
            remedy=f"add {', '.join(missing) or 'a score_h... column'}",
        )
    return table


def score_out_of_fold(
    workload: FoldWorkload[Any], panel: Panel, checkpoints: Sequence[Path], dates: Indices
) -> tuple[dict[int, pa.Table], list[dict[str, Any]]]:
    """The scores of several models, each on those of the dates that it may score, with the parameters of its training.

    Returns:
        The tables by fold; and per checkpoint what it is and how many dates it scored.

    Raises:
        UsageError: If a checkpoint does not say what it was trained on, two are of one fold, they are of different
            runs or of another panel, or none may score any of the dates.
    """
    found = {path: read_provenance(path) for path in checkpoints}
    check_related(found, panel)
    tables: dict[int, pa.Table] = {}
    told = []
    for path, provenance in found.items():
        if provenance.fold in tables:
            raise UsageError(
                f"{path} is of fold {provenance.fold}, and so is another checkpoint.",
                rule="each fold is judged by one model.",
                remedy="average the checkpoints of a fold first: memfit average",
            )
        mine = dates[provenance.scorable(panel)[dates]]
        told.append({"fold": provenance.fold, "checkpoint": str(path), "run": provenance.run, "num_dates": len(mine)})
        if len(mine):
            params = read_params(workload, provenance.params)
            tables[provenance.fold] = score(workload, params, panel, path, mine)
    if not tables:
        raise UsageError(
            f"none of the {len(found)} checkpoints may score any of the {len(dates)} dates.",
            rule="a date is scored only by models that were not trained on it nor on labels that overlap with its own.",
            remedy="choose dates outside the training dates, or add the checkpoints of the other folds",
        )
    return tables, told


def check_related(found: Mapping[Path, Provenance], panel: Panel, *, run: str | None = None) -> None:
    """Refuse checkpoints of different runs, of another than the named one, or of another panel.

    Raises:
        UsageError: If there are any.
    """
    first_path, first = next(iter(found.items()))
    wanted, where = (first.run, f"{first_path} is of") if run is None else (run, "this run is")
    for path, provenance in found.items():
        if provenance.run != wanted:
            raise UsageError(
                f"{path} is of the run {provenance.run[:8]}, and {where} {wanted[:8]}.",
                rule="models that are judged together come from one run: one config, one code, one data set.",
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

    Where several models scored a date, a score is the mean of theirs, each standardised within its date, and the fold
    is the first of theirs.
    """
    numbers = {fold: pa.array(np.full(len(table), fold, np.int32)) for fold, table in tables.items()}
    named = [table.append_column("fold", numbers[fold]) for fold, table in tables.items()]
    dates = [set(pc.unique(table.column("date")).to_pylist()) for table in named]
    order = [("date", "ascending"), ("code", "ascending")]
    if sum(map(len, dates)) == len(set().union(*dates)):
        return pa.concat_tables(named).sort_by(order)
    names = [name for name in named[0].column_names if name not in ("date", "code")]
    how = {name: "mean" if name.startswith("score_") else "min" if name == "fold" else "first" for name in names}
    whole = pa.concat_tables([_standardised(table) for table in named]).group_by(["date", "code"], use_threads=False)
    joined = whole.aggregate(list(how.items()))
    plain = {f"{name}_{function}": name for name, function in how.items()}
    joined = joined.rename_columns([plain.get(name, name) for name in joined.column_names])
    return joined.select(named[0].column_names).sort_by(order)


def _standardised(table: pa.Table) -> pa.Table:
    """Scores less their mean within the date, over their standard deviation there."""
    _, date = np.unique(table.column("date").to_numpy(), return_inverse=True)
    count = np.maximum(np.bincount(date), 1)
    for name in table.column_names:
        if not name.startswith("score_"):
            continue
        values = table.column(name).to_numpy().astype(np.float64)
        values -= (np.bincount(date, values) / count)[date]
        sd = np.sqrt(np.bincount(date, values**2) / count)[date]
        values = np.divide(values, sd, out=np.zeros_like(values), where=sd > 0)
        table = table.set_column(table.column_names.index(name), name, pa.array(values.astype(np.float32)))
    return table
