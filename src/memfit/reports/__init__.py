"""Reports, read from run directories alone, and the runs of this host.

The names load their modules when they are first used: a run needs few of them.
"""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.reports._charts import CHART_STYLE as CHART_STYLE
    from memfit.reports._charts import COLOURS as COLOURS
    from memfit.reports._charts import Layer as Layer
    from memfit.reports._charts import draw_stack as draw_stack
    from memfit.reports._compare import compare_numbers as compare_numbers
    from memfit.reports._compare import find_changes as find_changes
    from memfit.reports._compare import find_differences as find_differences
    from memfit.reports._compare import print_before_after as print_before_after
    from memfit.reports._compare import print_changes as print_changes
    from memfit.reports._compare import read_manifests as read_manifests
    from memfit.reports._compare import read_numbers as read_numbers
    from memfit.reports._compare import read_settings as read_settings
    from memfit.reports._diagnosis import print_checks as print_checks
    from memfit.reports._diagnosis import print_diagnosis as print_diagnosis
    from memfit.reports._diagnosis import print_fix as print_fix
    from memfit.reports._diagnosis import print_verification as print_verification
    from memfit.reports._diagnosis import write_incident as write_incident
    from memfit.reports._live import LiveRun as LiveRun
    from memfit.reports._live import Room as Room
    from memfit.reports._live import describe as describe
    from memfit.reports._live import read_pressure as read_pressure
    from memfit.reports._live import read_room as read_room
    from memfit.reports._live import render as render
    from memfit.reports._numbers import format_number as format_number
    from memfit.reports._numbers import or_dash as or_dash
    from memfit.reports._numbers import wilson_interval as wilson_interval
    from memfit.reports._page import write_page as write_page
    from memfit.reports._parts import Table as Table
    from memfit.reports._parts import plain_table as plain_table
    from memfit.reports._parts import to_text as to_text
    from memfit.reports._plan import print_budget as print_budget
    from memfit.reports._plan import print_estimate as print_estimate
    from memfit.reports._plan import print_run_plan as print_run_plan
    from memfit.reports._runs import find_run as find_run
    from memfit.reports._runs import find_runs as find_runs
    from memfit.reports._runs import find_target as find_target
    from memfit.reports._runs import has_supervisor as has_supervisor
    from memfit.reports._runs import is_live as is_live
    from memfit.reports._runs import list_runs as list_runs
    from memfit.reports._runs import print_runs as print_runs
    from memfit.reports._study import print_study as print_study
    from memfit.reports._study import study_of as study_of
    from memfit.reports._study import summarize_study as summarize_study
    from memfit.reports._summary import print_summary as print_summary
    from memfit.reports._summary import summarize as summarize

__all__ = [
    "find_changes",
    "find_differences",
    "find_run",
    "find_runs",
    "format_number",
    "plain_table",
    "print_changes",
    "read_manifests",
    "read_numbers",
    "read_settings",
]

__getattr__, __dir__ = load_lazily(__name__)
