"""Reports, read from run directories alone, and the runs of this host."""

from memfit.reports._budget import print_budget
from memfit.reports._live import LiveRun
from memfit.reports._run_view import JobRow, RunView
from memfit.reports._runs import Overview, Target, find_run, find_target, has_supervisor, is_live, list_runs
from memfit.reports._summary import print_summary, summarize
from memfit.reports._workflow import print_backtest, print_workflow, summarize_workflow

__all__ = [
    "JobRow",
    "LiveRun",
    "Overview",
    "RunView",
    "Target",
    "find_run",
    "find_target",
    "has_supervisor",
    "is_live",
    "list_runs",
    "print_backtest",
    "print_budget",
    "print_summary",
    "print_workflow",
    "summarize",
    "summarize_workflow",
]
