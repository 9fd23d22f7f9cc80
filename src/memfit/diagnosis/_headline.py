"""Say in a few words what happened to a job, how sure that is, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.diagnosis._figures import NOTICEABLE

if TYPE_CHECKING:
    from memfit.diagnosis._record import Diagnosis

_KINDS = {
    "gpu": "out of the GPU's memory",
    "gpu_fragmentation": "out of the GPU's memory, although its cache had room (fragmentation)",
    "host_cgroup": "killed at a limit of host memory",
    "host_kernel": "killed as the whole host ran out of memory",
    "shm": "out of /dev/shm",
    "host_alloc": "refused host memory",
    "pinned": "refused pinned host memory",
    "other_accelerator": "out of the accelerator's memory",
}
_CAUSES = {
    "killed": "killed; by whom and why is not shown",
    "exit_status": "ended by itself, with an exit status that is an error",
    "limit_touched": "touched its limit of host memory; nothing was killed",
}


def what_happened(diagnosis: Diagnosis) -> str:
    """Return the diagnosis in a few words.

    >>> from memfit.diagnosis import Diagnosis
    >>> what_happened(Diagnosis(True, False, "shm", "out_of_memory", "load", "proved"))
    'out of /dev/shm'
    """
    cause, checked = diagnosis.cause, diagnosis.checked
    is_full = checked.total is not None and (checked.slack or 0) < NOTICEABLE * checked.total
    kind = diagnosis.kind.removesuffix("_fragmentation") if is_full else diagnosis.kind
    return _CAUSES.get(cause) or _KINDS.get(kind, cause.replace("_", " "))


def headline_of(diagnosis: Diagnosis) -> str:
    """Return the diagnosis in a few words, and how sure it is."""
    if diagnosis.cause == "unknown":
        return "unknown: no line proves a cause"
    return f"{what_happened(diagnosis)} ({diagnosis.confidence})"


def facts_of(diagnosis: Diagnosis) -> str:
    """Return kind, cause, phase and place, with commas."""
    where = (f"{name} {value}" for name, value in diagnosis.where.items() if value is not None)
    return ", ".join((f"kind {diagnosis.kind}", f"cause {diagnosis.cause}", f"phase {diagnosis.phase}", *where))
