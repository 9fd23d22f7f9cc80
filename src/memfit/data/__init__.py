"""Data that many processes read and none copies: the panel, its windows and its batches. Modules load when used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.data._batches import DateBatch as DateBatch
    from memfit.data._batches import DateBatches as DateBatches
    from memfit.data._batches import WindowBatch as WindowBatch
    from memfit.data._batches import windows as windows
    from memfit.data._lines import JsonLines as JsonLines
    from memfit.data._loader import Loader as Loader
    from memfit.data._loader_footprint import loader_footprint as loader_footprint
    from memfit.data._measure import choose_mode as choose_mode
    from memfit.data._measure import measure_loader as measure_loader
    from memfit.data._packed import PackedDataset as PackedDataset
    from memfit.data._packed import pack as pack
    from memfit.data._padding import Padding as Padding
    from memfit.data._padding import Tokenized as Tokenized
    from memfit.data._panel import Panel as Panel
    from memfit.data._sequences import SequenceLoader as SequenceLoader
    from memfit.data._sizes import ColumnSize as ColumnSize
    from memfit.data._sizes import column_sizes as column_sizes
    from memfit.data._source import Columns as Columns
    from memfit.data._source import match_columns as match_columns
    from memfit.data._verdict import Choice as Choice
    from memfit.data._verdict import LoaderReport as LoaderReport
    from memfit.data._verdict import ModeReport as ModeReport
    from memfit.data._verdict import Pace as Pace
    from memfit.data._verdict import Verdict as Verdict
    from memfit.data._verdict import choose_num_workers as choose_num_workers
    from memfit.data._verdict import verdict as verdict
    from memfit.data._versions import Version as Version
    from memfit.data._versions import prune as prune

_NAMES = {
    "_batches": "DateBatch DateBatches WindowBatch windows",
    "_lines": "JsonLines",
    "_loader": "Loader",
    "_loader_footprint": "loader_footprint",
    "_measure": "choose_mode measure_loader",
    "_packed": "PackedDataset pack",
    "_padding": "Padding Tokenized",
    "_panel": "Panel",
    "_sequences": "SequenceLoader",
    "_sizes": "ColumnSize column_sizes",
    "_source": "Columns match_columns",
    "_verdict": "Choice LoaderReport ModeReport Pace Verdict choose_num_workers verdict",
    "_versions": "Version prune",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"memfit.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
