"""Runs a workload's stages and folds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit.pipeline._config import MemorySettings, RunConfig, parse_folds
from memfit.pipeline._run import RunResult, run

if TYPE_CHECKING:
    from memfit.pipeline._workload import FoldContext, FoldWorkload, PrepareContext, Prepared

_OF_WORKLOADS = ("FoldContext", "FoldWorkload", "PrepareContext", "Prepared")

__all__ = [
    "FoldContext",
    "FoldWorkload",
    "MemorySettings",
    "PrepareContext",
    "Prepared",
    "RunConfig",
    "RunResult",
    "parse_folds",
    "run",
]


def __getattr__(name: str) -> Any:
    # Workloads load NumPy and Arrow; the process that admits their jobs needs neither.
    if name in _OF_WORKLOADS:
        from memfit.pipeline import _workload

        return getattr(_workload, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
