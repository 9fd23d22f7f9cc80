"""Data that many processes read and none copies: the panel, its windows and its batches."""

from memfit.data._batches import DateBatch, DateBatches, WindowBatch, windows
from memfit.data._columns import Columns, match_columns
from memfit.data._loader import Loader
from memfit.data._measure import measure_loader
from memfit.data._packed import PackedDataset, pack
from memfit.data._panel import Panel
from memfit.data._pool import WorkerPool
from memfit.data._sizes import ColumnSize, column_sizes
from memfit.data._verdict import Choice, LoaderReport, Pace, Verdict, choose_num_workers, verdict
from memfit.data._versions import Version, prune

__all__ = [
    "Choice",
    "ColumnSize",
    "Columns",
    "DateBatch",
    "DateBatches",
    "Loader",
    "LoaderReport",
    "Pace",
    "PackedDataset",
    "Panel",
    "Verdict",
    "Version",
    "WindowBatch",
    "WorkerPool",
    "choose_num_workers",
    "column_sizes",
    "match_columns",
    "measure_loader",
    "pack",
    "prune",
    "verdict",
    "windows",
]
