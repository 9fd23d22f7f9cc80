"""Data that many processes read and none copies: the panel, its windows and its batches."""

from memfit.data._batches import DateBatch, DateBatches, windows
from memfit.data._panel import Panel
from memfit.data._sizes import ColumnSize, column_sizes

__all__ = ["ColumnSize", "DateBatch", "DateBatches", "Panel", "column_sizes", "windows"]
