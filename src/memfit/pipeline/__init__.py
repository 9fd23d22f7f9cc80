"""Runs a workload's stages and folds, and any command, under one budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit.pipeline._backtest import backtest_checkpoints
from memfit.pipeline._bench import LoaderBench, bench_loader
from memfit.pipeline._commands import resolve_settings, resume, run_commands
from memfit.pipeline._config import CommandSettings, MemorySettings, RunConfig, parse_folds
from memfit.pipeline._estimate import estimate_workload
from memfit.pipeline._grid import expand, fill
from memfit.pipeline._run import run
from memfit.pipeline._supervise import RunResult, read_budget
from memfit.pipeline._workflow import GATE_EXIT_CODES, WORKFLOW_FILE, workflow

if TYPE_CHECKING:
    from memfit.pipeline._workload import FoldContext, FoldWorkload, PrepareContext, Prepared, ScoreContext

_OF_WORKLOADS = ("FoldContext", "FoldWorkload", "PrepareContext", "Prepared", "ScoreContext")

__all__ = [
    "GATE_EXIT_CODES",
    "CommandSettings",
    "FoldContext",
    "FoldWorkload",
    "LoaderBench",
    "MemorySettings",
    "PrepareContext",
    "Prepared",
    "RunConfig",
    "RunResult",
    "WORKFLOW_FILE",
    "ScoreContext",
    "backtest_checkpoints",
    "bench_loader",
    "estimate_workload",
    "expand",
    "fill",
    "parse_folds",
    "read_budget",
    "resolve_settings",
    "resume",
    "run",
    "run_commands",
    "workflow",
]


def __getattr__(name: str) -> Any:
    # Workloads load NumPy and Arrow; the process that admits their jobs needs neither.
    if name in _OF_WORKLOADS:
        from memfit.pipeline import _workload

        return getattr(_workload, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
