"""Find what is wrong with a place, or with a command's environment, before anything runs: ``memfit doctor``."""

from memfit.doctor._case import Setup
from memfit.doctor._doctor import examine
from memfit.doctor._interpreter import Interpreter
from memfit.doctor._secrets import scan_secrets

__all__ = ["Interpreter", "Setup", "examine", "scan_secrets"]
