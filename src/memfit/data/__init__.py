"""Data that many processes read and none copies: the panel, its windows and its batches. Modules load when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.data._batches import DateBatch as DateBatch
    from memfit.data._batches import DateBatches as DateBatches
    from memfit.data._batches import WindowBatch as WindowBatch
    from memfit.data._buffers import Buffers as Buffers
    from memfit.data._loader import Loader as Loader
    from memfit.data._manifest import check_panel as check_panel
    from memfit.data._manifest import write_sealed as write_sealed
    from memfit.data._packed import PackedDataset as PackedDataset
    from memfit.data._packed import pack as pack
    from memfit.data._padding import Padding as Padding
    from memfit.data._panel import Panel as Panel
    from memfit.data._pickles import pack_source as pack_source
    from memfit.data._pickles import remove_leftovers as remove_leftovers
    from memfit.data._sequences import SequenceLoader as SequenceLoader
    from memfit.data._source import Source as Source
    from memfit.data._source import decode_dates as decode_dates
    from memfit.data._source import match_columns as match_columns

__all__ = [
    "DateBatch",
    "DateBatches",
    "Loader",
    "PackedDataset",
    "Padding",
    "Panel",
    "SequenceLoader",
    "Source",
    "decode_dates",
    "pack",
]

__getattr__, __dir__ = load_lazily(__name__)
