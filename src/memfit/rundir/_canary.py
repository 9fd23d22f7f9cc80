"""What a process knows of the canary that it is part of: a few steps of every phase before a long run."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from memfit.errors import StoppedError

CANARY_VARIABLE = "MEMFIT_CANARY"  # the folder for what a canary writes; set in the processes of a canary alone
#: So many optimizer steps does a training make in a canary, and so many batches does it validate.
CANARY_STEPS, CANARY_BATCHES = 5, 5


def is_canary() -> bool:
    return bool(os.environ.get(CANARY_VARIABLE))


def canary_folder(path: Path | str) -> Path:
    """Return the folder that stands in for another one in a canary, the same on all ranks; else that path itself."""
    path = Path(path)
    own = Path(os.environ.get(CANARY_VARIABLE, "")).absolute()
    if not is_canary() or path.is_relative_to(own):
        return path
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
    return own / f"{path.name}-{digest}"


def canary_over() -> StoppedError:
    """Return what ends a process with exit code 75 once it has trained, saved and begun to validate."""
    return StoppedError(
        "The canary ends here.",
        rule=f"it trains {CANARY_STEPS} steps, saves once, and validates {CANARY_BATCHES} batches.",
        remedy="see what memfit run --canary says; the long run is the same command without it",
    )
