"""Decisions from budgets, footprints and estimates, before anything runs."""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily
from memfit.planning._plan import Plan as Plan
from memfit.planning._plan import decide as decide
from memfit.planning._plan import plan as plan

if TYPE_CHECKING:
    from memfit.planning._estimate import Question as Question
    from memfit.planning._estimate import ask as ask
    from memfit.planning._estimate import find_this_gpu as find_this_gpu
    from memfit.planning._launch import Launch as Launch
    from memfit.planning._launch import LaunchFormat as LaunchFormat
    from memfit.planning._launch import LaunchSettings as LaunchSettings
    from memfit.planning._launch import render as render
    from memfit.planning._ledger import Forecast as Forecast
    from memfit.planning._ledger import Ledger as Ledger
    from memfit.planning._ledger import Line as Line
    from memfit.planning._ledger import describe_batch as describe_batch
    from memfit.planning._ledger import footprint_lines as footprint_lines
    from memfit.planning._ledger import shm_bytes as shm_bytes
    from memfit.planning._ledger import step_line as step_line
    from memfit.planning._machine import Machine as Machine

# A run plans without these, and they take a while to load.
__all__ = ["Launch", "Ledger", "Plan", "ask", "decide", "plan"]

__getattr__, __dir__ = load_lazily(__name__)
