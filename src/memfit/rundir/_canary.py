"""What a process knows of the canary, or of ``memfit prove``, that it is part of: a few steps before a long run."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from memfit.errors import StoppedError

CANARY_VARIABLE = "MEMFIT_CANARY"  # the folder for what a canary writes; set in the processes of a canary alone
PROVE_VARIABLE = "MEMFIT_PROVE"  # the folder of ``memfit prove``, in the processes that it starts
#: In that folder: what the run is to do, where it is, its outputs, and a copy of these from when it sealed.
PROVE_PLAN, PROVE_PLACE, PROVE_OUTPUTS, PROVE_SEALED = "plan.json", "place.json", "outputs", "sealed"
#: So many optimizer steps does a training make in a canary, and so many batches does it validate.
CANARY_STEPS, CANARY_BATCHES = 5, 5


def is_canary() -> bool:
    return bool(os.environ.get(CANARY_VARIABLE))


def scratch_folder() -> Path | None:
    """Return the folder for what a canary writes, or a run of ``memfit prove``; None in all other processes."""
    if is_canary():
        return Path(os.environ[CANARY_VARIABLE]).absolute()
    proves = os.environ.get(PROVE_VARIABLE)
    return Path(proves).absolute() / PROVE_OUTPUTS if proves else None


def canary_folder(path: Path | str) -> Path:
    """Return the folder that stands in for another one below ``scratch_folder()``, the same on all ranks; without such
    a folder that path itself."""
    path, own = Path(path), scratch_folder()
    if own is None or path.is_relative_to(own):
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
