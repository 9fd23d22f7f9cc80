"""Reports, read from run directories alone, and the runs of this host."""

from memfit.reports._budget import print_budget
from memfit.reports._charts import COLOURS, Frame, Layer, draw_stack
from memfit.reports._diagnosis import (
    explain_in_a_line,
    print_checks,
    print_diagnosis,
    print_fix,
    print_verification,
)
from memfit.reports._estimate import print_estimate
from memfit.reports._live import LiveRun, Room, describe, read_pressure, read_room, render
from memfit.reports._numbers import format_column, format_number, or_dash, plain_table
from memfit.reports._page import write_page
from memfit.reports._plan import print_run_plan
from memfit.reports._run_view import JobRow, RunView, summarize_metrics
from memfit.reports._runs import Overview, find_run, find_target, has_supervisor, is_live, list_runs
from memfit.reports._summary import count_kills, explain_record, forecast_error, print_summary, summarize

__all__ = [
    "COLOURS",
    "Frame",
    "JobRow",
    "Layer",
    "LiveRun",
    "Overview",
    "Room",
    "RunView",
    "draw_stack",
    "count_kills",
    "describe",
    "explain_in_a_line",
    "explain_record",
    "find_run",
    "find_target",
    "forecast_error",
    "format_column",
    "format_number",
    "has_supervisor",
    "is_live",
    "list_runs",
    "or_dash",
    "plain_table",
    "print_budget",
    "print_checks",
    "print_diagnosis",
    "print_estimate",
    "print_fix",
    "print_run_plan",
    "print_summary",
    "print_verification",
    "read_pressure",
    "read_room",
    "render",
    "summarize",
    "write_page",
    "summarize_metrics",
]
