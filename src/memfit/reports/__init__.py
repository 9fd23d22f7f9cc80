"""Reports, read from run directories alone."""

from memfit.reports._budget import print_budget
from memfit.reports._live import LiveRun
from memfit.reports._run_view import JobRow, RunView
from memfit.reports._summary import print_summary, summarize

__all__ = ["JobRow", "LiveRun", "RunView", "print_budget", "print_summary", "summarize"]
