"""Data that many processes read and none copies: the panel, its windows and its batches.

The names load their modules when they are first used: importing this package loads no Arrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memfit.successors import missing_name

if TYPE_CHECKING:
    from memfit.data._batches import DateBatch, DateBatches, WindowBatch, windows
    from memfit.data._loader import Loader
    from memfit.data._loader_footprint import loader_footprint
    from memfit.data._measure import measure_loader
    from memfit.data._modes import choose_mode
    from memfit.data._packed import PackedDataset, pack
    from memfit.data._padding import Padding, Tokenized
    from memfit.data._panel import Panel
    from memfit.data._sequences import SequenceLoader
    from memfit.data._sizes import ColumnSize, column_sizes
    from memfit.data._source import Columns, match_columns
    from memfit.data._verdict import Choice, LoaderReport, ModeReport, Pace, Verdict, choose_num_workers, verdict
    from memfit.data._versions import Version, prune

_HOMES = {
    "Choice": "_verdict",
    "ColumnSize": "_sizes",
    "Columns": "_source",
    "DateBatch": "_batches",
    "DateBatches": "_batches",
    "Loader": "_loader",
    "LoaderReport": "_verdict",
    "ModeReport": "_verdict",
    "Pace": "_verdict",
    "PackedDataset": "_packed",
    "Padding": "_padding",
    "Panel": "_panel",
    "SequenceLoader": "_sequences",
    "Tokenized": "_padding",
    "Verdict": "_verdict",
    "Version": "_versions",
    "WindowBatch": "_batches",
    "choose_mode": "_modes",
    "choose_num_workers": "_verdict",
    "column_sizes": "_sizes",
    "loader_footprint": "_loader_footprint",
    "match_columns": "_source",
    "measure_loader": "_measure",
    "pack": "_packed",
    "prune": "_versions",
    "verdict": "_verdict",
    "windows": "_batches",
}

__all__ = [
    "Choice",
    "ColumnSize",
    "Columns",
    "DateBatch",
    "DateBatches",
    "Loader",
    "LoaderReport",
    "ModeReport",
    "Pace",
    "PackedDataset",
    "Padding",
    "Panel",
    "SequenceLoader",
    "Tokenized",
    "Verdict",
    "Version",
    "WindowBatch",
    "choose_mode",
    "choose_num_workers",
    "column_sizes",
    "loader_footprint",
    "match_columns",
    "measure_loader",
    "pack",
    "prune",
    "verdict",
    "windows",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"memfit.data.{_HOMES[name]}"), name)
    raise missing_name(__name__, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
