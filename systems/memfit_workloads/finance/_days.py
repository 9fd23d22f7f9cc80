"""The day table: how good the scores were on each date, by fold and horizon."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import feather

from memfit.errors import DataError, UsageError, nearest
from memfit_workloads.finance._inference import Summary, summarize
from memfit_workloads.finance._matrices import Scores, read_scores, values_of
from memfit_workloads.finance._metrics import divide, positive_rate, precision_at_k, quantile_spread, rank_ic

#: The columns of a day table that are no metrics.
_KEYS = ("fold", "date", "num_assets")
_METADATA = b"memfit_days"
_IN_FOLDER = ("days.feather", "checkpoints/stage_backtest/days.feather")


def evaluate_days(scores: Scores, *, horizons: Sequence[int], k_ratio: float) -> pa.Table:
    """Return the day table of some scores: one row per date.

    Its columns are ``fold``, ``date``, ``num_assets`` (assets with a score for any horizon), and for each horizon h, a
    number of dates, ``h{h}_rank_ic`` (`rank_ic`), ``h{h}_p_at_k_pos`` (`precision_at_k`), ``h{h}_random_p_at_k_pos``
    (`positive_rate`), ``h{h}_delta_p_at_k_pos`` (the first less the second, on average 0 for random scores), and
    ``h{h}_spread`` (`quantile_spread`, in returns over h dates). An undefined figure is NaN. The
    table's metadata hold what a comparison must share: k_ratio and assets.

    Raises:
        DataError: If a horizon has no score or no target.
    """
    return evaluate_folds({0: scores}, horizons=horizons, k_ratio=k_ratio)


def evaluate_folds(folds: Mapping[int, Scores | pa.Table], *, horizons: Sequence[int], k_ratio: float) -> pa.Table:
    """Return the day table of several folds, sorted by date, then fold; a date has a row of each fold that tests it."""
    parts, codes = [], set[str]()
    for fold, source in folds.items():
        scores = read_scores(source) if isinstance(source, pa.Table) else source
        scored: NDArray[np.bool_] = np.zeros((len(scores.dates), len(scores.codes)), bool)
        columns: dict[str, Any] = {}
        for horizon in horizons:
            score, target = scores.of(f"score_h{horizon}"), scores.of(f"target_h{horizon}")
            scored = scored | ~np.isnan(score)
            precision, random = precision_at_k(score, target, k_ratio=k_ratio), positive_rate(score, target)
            columns |= {
                f"h{horizon}_rank_ic": rank_ic(score, target),
                f"h{horizon}_p_at_k_pos": precision,
                f"h{horizon}_random_p_at_k_pos": random,
                f"h{horizon}_delta_p_at_k_pos": precision - random,
                f"h{horizon}_spread": quantile_spread(score, target),
            }
        codes |= {scores.codes[column] for column in np.flatnonzero(scored.any(axis=0))}
        head = {"fold": np.full(len(scores.dates), fold, np.int32), "date": pa.array(scores.dates, pa.date32())}
        parts.append(pa.table(head | {"num_assets": scored.sum(axis=1).astype(np.int32)} | columns))
    universe = hashlib.sha256("\n".join(sorted(codes)).encode()).hexdigest()[:16]
    described = {"k_ratio": k_ratio, "num_codes": len(codes), "universe": universe}
    table = pa.concat_tables(parts).sort_by([("date", "ascending"), ("fold", "ascending")])
    return table.replace_schema_metadata({_METADATA: json.dumps(described).encode()})


def read_days(path: Path) -> pa.Table:
    """Return the day table in a Feather file, or in a run's folder.

    Raises:
        UsageError: If it is not there, or no such file.
    """
    files = [path / name for name in _IN_FOLDER] if path.is_dir() else [path]
    try:
        return feather.read_table(next(filter(Path.is_file, files), path))
    except (OSError, pa.ArrowInvalid) as error:
        raise UsageError(
            f"{path} holds no day table: {str(error).splitlines()[0]}.",
            rule="a day table is the days.feather of a run that was judged.",
            remedy="name that file, or the run's folder; the baseline may also be the word random",
        ) from error


def summarize_days(days: pa.Table) -> dict[str, Summary]:
    """Return the `Summary` of each metric of a day table by column.

    The column's name gives the horizon of the standard error. A date of several folds counts once, with their mean.
    """
    found = {}
    for name in days.column_names:
        if name not in _KEYS:
            horizon = re.match(r"h([1-9]\d*)_", name)
            found[name] = summarize(by_date(days, name, "the table")[1], int(horizon[1]) if horizon else None)
    return found


def description(days: pa.Table) -> dict[str, Any]:
    """Return what a day table was evaluated with, of its metadata; empty where it does not say."""
    text = (days.schema.metadata or {}).get(_METADATA)
    return dict(json.loads(text)) if text else {}


def by_date(days: pa.Table, metric: str, which: str) -> tuple[NDArray[np.datetime64], NDArray[np.float64]]:
    """Return the distinct dates in ascending order, and a metric: the mean of a date's folds, NaN where none has it."""
    for name in ("date", metric):
        if name not in days.column_names:
            known = [column for column in days.column_names if column not in _KEYS]
            raise DataError(
                f"{which} has no column {name}.",
                rule="a day table has the column date and one column for each metric, as evaluate_days writes it.",
                remedy=nearest(name, known or days.column_names),
            )
    dates, row = np.unique(values_of(days, "date"), return_inverse=True)
    values = values_of(days, metric)
    defined = ~np.isnan(values)
    counts = np.bincount(row[defined], minlength=len(dates))
    return dates, divide(np.bincount(row[defined], values[defined], len(dates)), counts, counts > 0)
