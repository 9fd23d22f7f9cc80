"""Reports, read from run directories alone, and the runs of this host."""

from memfit.reports._budget import print_budget
from memfit.reports._charts import COLOURS, Frame, Layer, draw_stack
from memfit.reports._compare import compare_numbers, compare_over_seeds, print_before_after, print_seeds
from memfit.reports._diagnosis import (
    explain_in_a_line,
    print_checks,
    print_diagnosis,
    print_fix,
    print_verification,
    write_incident,
)
from memfit.reports._differences import find_changes, print_changes
from memfit.reports._estimate import print_estimate
from memfit.reports._live import LiveRun, Room, describe, read_pressure, read_room, render
from memfit.reports._numbers import format_column, format_number, or_dash, plain_table
from memfit.reports._page import write_page
from memfit.reports._plan import print_run_plan
from memfit.reports._run_view import JobRow, RunView, summarize_metrics
from memfit.reports._runs import Overview, find_run, find_runs, find_target, has_supervisor, is_live, list_runs
from memfit.reports._study import StudyView, summarize_study
from memfit.reports._study_text import print_study
from memfit.reports._summary import count_kills, explain_record, forecast_error, print_summary, summarize
from memfit.reports._targets import judge_targets, print_targets, read_targets

__all__ = [
    "COLOURS",
    "Frame",
    "JobRow",
    "Layer",
    "LiveRun",
    "Overview",
    "Room",
    "RunView",
    "StudyView",
    "compare_numbers",
    "compare_over_seeds",
    "count_kills",
    "describe",
    "draw_stack",
    "explain_in_a_line",
    "explain_record",
    "find_changes",
    "find_run",
    "find_runs",
    "find_target",
    "forecast_error",
    "format_column",
    "format_number",
    "has_supervisor",
    "is_live",
    "judge_targets",
    "list_runs",
    "or_dash",
    "plain_table",
    "print_before_after",
    "print_budget",
    "print_changes",
    "print_checks",
    "print_diagnosis",
    "print_estimate",
    "print_fix",
    "print_run_plan",
    "print_seeds",
    "print_study",
    "print_summary",
    "print_targets",
    "print_verification",
    "read_pressure",
    "read_room",
    "read_targets",
    "render",
    "summarize",
    "summarize_study",
    "summarize_metrics",
    "write_incident",
    "write_page",
]
