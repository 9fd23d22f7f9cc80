"""Diagnosis: what is wrong with a place, or with a command's effective environment, before anything runs."""

from memfit.diagnosis._allocator import Fault, allocator_faults
from memfit.diagnosis._case import Setup
from memfit.diagnosis._check import VERDICTS, Check, Verdict
from memfit.diagnosis._doctor import examine
from memfit.diagnosis._interpreter import Interpreter

__all__ = ["VERDICTS", "Check", "Fault", "Interpreter", "Setup", "Verdict", "allocator_faults", "examine"]
