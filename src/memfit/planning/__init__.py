"""Decisions from budgets, footprints and estimates, before anything runs."""

from memfit.planning._estimate import Question, ask
from memfit.planning._plan import Plan, plan

__all__ = ["Plan", "Question", "ask", "plan"]
