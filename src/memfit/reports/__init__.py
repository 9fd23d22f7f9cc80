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
    from memfit.reports._compare import read_manifests as read_manifests
    from memfit.reports._compare import read_numbers as read_numbers
    from memfit.reports._compare import read_settings as read_settings
    from memfit.reports._compare import view_before_after as view_before_after
    from memfit.reports._compare import view_changes as view_changes
    from memfit.reports._diagnosis import view_checks as view_checks
    from memfit.reports._diagnosis import view_diagnosis as view_diagnosis
    from memfit.reports._diagnosis import view_fix as view_fix
    from memfit.reports._diagnosis import view_verification as view_verification
    from memfit.reports._diagnosis import write_incident as write_incident
    from memfit.reports._live import LiveRun as LiveRun
    from memfit.reports._live import Room as Room
    from memfit.reports._live import describe as describe
    from memfit.reports._live import read_room as read_room
    from memfit.reports._live import render as render
    from memfit.reports._numbers import format_number as format_number
    from memfit.reports._page import write_page as write_page
    from memfit.reports._parts import Part as Part
    from memfit.reports._parts import Table as Table
    from memfit.reports._parts import to_text as to_text
    from memfit.reports._plan import view_budget as view_budget
    from memfit.reports._plan import view_estimate as view_estimate
    from memfit.reports._plan import view_run_plan as view_run_plan
    from memfit.reports._runs import find_run as find_run
    from memfit.reports._runs import find_runs as find_runs
    from memfit.reports._runs import find_target as find_target
    from memfit.reports._runs import list_runs as list_runs
    from memfit.reports._runs import view_runs as view_runs
    from memfit.reports._study import study_of as study_of
    from memfit.reports._study import summarize_study as summarize_study
    from memfit.reports._study import view_study as view_study
    from memfit.reports._summary import summarize as summarize
    from memfit.reports._summary import view_summary as view_summary

__all__ = [
    "Table",
    "find_changes",
    "find_differences",
    "find_run",
    "find_runs",
    "format_number",
    "to_text",
    "view_changes",
    "read_manifests",
    "read_numbers",
    "read_settings",
]

__getattr__, __dir__ = load_lazily(__name__)
