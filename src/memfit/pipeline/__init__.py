"""Runs a workload's stages, a plain function or any command under one budget.

The names load their modules when they are first used: the processes beside each job need few of them.
"""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.pipeline._config import CommandSettings, MemorySettings, RunConfig, StageSettings
    from memfit.pipeline._contract import Context, Output, Probe, Stage, Stop, Workload
    from memfit.pipeline._graph import Choice, Graph
    from memfit.pipeline._grid import expand, fill
    from memfit.pipeline._manifest import fingerprint_files
    from memfit.pipeline._order import Order, order_of_config, resolve_settings
    from memfit.pipeline._plan_run import RunPlan, StagePlan, plan_commands, plan_run
    from memfit.pipeline._probe import call_alone, context_of, estimate_workload
    from memfit.pipeline._results import Index, Unit
    from memfit.pipeline._run import make_job, resume, run, run_commands, start_folder, take_up, write_order
    from memfit.pipeline._supervise import RunResult, Supervisor, View, read_budget, supervised

__all__ = [
    "Choice",
    "CommandSettings",
    "Context",
    "Graph",
    "Index",
    "MemorySettings",
    "Order",
    "Output",
    "Probe",
    "RunConfig",
    "RunPlan",
    "RunResult",
    "Stage",
    "StagePlan",
    "StageSettings",
    "Stop",
    "Supervisor",
    "Unit",
    "View",
    "Workload",
    "call_alone",
    "estimate_workload",
    "expand",
    "fill",
    "fingerprint_files",
    "context_of",
    "make_job",
    "order_of_config",
    "plan_commands",
    "plan_run",
    "read_budget",
    "resolve_settings",
    "resume",
    "run",
    "run_commands",
    "start_folder",
    "supervised",
    "take_up",
    "write_order",
]

__getattr__, __dir__ = load_lazily(__name__)
