"""Runs a workload's stages, a plain function or any command under one budget.

The names load their modules when they are first used: the processes beside each job need few of them.
"""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.pipeline._code import code_of as code_of
    from memfit.pipeline._command import Choice as Choice
    from memfit.pipeline._command import check_placeholders as check_placeholders
    from memfit.pipeline._command import chosen_units as chosen_units
    from memfit.pipeline._command import config_of_command as config_of_command
    from memfit.pipeline._command import expand as expand
    from memfit.pipeline._command import expand_range as expand_range
    from memfit.pipeline._command import fill as fill
    from memfit.pipeline._command import parse_param as parse_param
    from memfit.pipeline._config import RunConfig as RunConfig
    from memfit.pipeline._config import StageSettings as StageSettings
    from memfit.pipeline._config import resolve_settings as resolve_settings
    from memfit.pipeline._contract import Context as Context
    from memfit.pipeline._contract import Output as Output
    from memfit.pipeline._contract import Probe as Probe
    from memfit.pipeline._contract import Stage as Stage
    from memfit.pipeline._contract import Stop as Stop
    from memfit.pipeline._contract import Workload as Workload
    from memfit.pipeline._describe import StageSpec as StageSpec
    from memfit.pipeline._describe import describe as describe
    from memfit.pipeline._describe import setting_of as setting_of
    from memfit.pipeline._first_steps import FirstSteps as FirstSteps
    from memfit.pipeline._graph import Graph as Graph
    from memfit.pipeline._launch import plan_launch as plan_launch
    from memfit.pipeline._manifest import fingerprint_files as fingerprint_files
    from memfit.pipeline._order import Order as Order
    from memfit.pipeline._order import Warm as Warm
    from memfit.pipeline._order import newest_run as newest_run
    from memfit.pipeline._order import order_of_config as order_of_config
    from memfit.pipeline._places import read_budget as read_budget
    from memfit.pipeline._plan_run import RunPlan as RunPlan
    from memfit.pipeline._plan_run import StagePlan as StagePlan
    from memfit.pipeline._plan_run import plan_run as plan_run
    from memfit.pipeline._probe import call_alone as call_alone
    from memfit.pipeline._probe import context_of as context_of
    from memfit.pipeline._probe import estimate_workload as estimate_workload
    from memfit.pipeline._results import Index as Index
    from memfit.pipeline._results import Unit as Unit
    from memfit.pipeline._run import make_job as make_job
    from memfit.pipeline._run import resume as resume
    from memfit.pipeline._run import run as run
    from memfit.pipeline._run import run_commands as run_commands
    from memfit.pipeline._run import start_folder as start_folder
    from memfit.pipeline._run import take_up as take_up
    from memfit.pipeline._run import write_config as write_config
    from memfit.pipeline._run import write_order as write_order
    from memfit.pipeline._source import UnitSource as UnitSource
    from memfit.pipeline._supervise import RunResult as RunResult
    from memfit.pipeline._supervise import Supervisor as Supervisor
    from memfit.pipeline._supervise import View as View
    from memfit.pipeline._supervise import Watcher as Watcher
    from memfit.pipeline._supervise import supervised as supervised


__all__ = [
    "Context",
    "Output",
    "Probe",
    "RunConfig",
    "RunPlan",
    "RunResult",
    "Stage",
    "Stop",
    "Warm",
    "Workload",
    "call_alone",
    "context_of",
    "expand",
    "fill",
    "fingerprint_files",
    "plan_run",
    "resume",
    "run",
    "run_commands",
]

__getattr__, __dir__ = load_lazily(__name__)
