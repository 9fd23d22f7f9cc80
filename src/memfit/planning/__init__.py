"""Decisions from budgets and footprints, before anything runs."""

from memfit.planning._plan import Plan, plan

__all__ = ["Plan", "plan"]
