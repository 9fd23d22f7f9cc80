"""Says why a job cannot run here: the arithmetic of one that has outgrown the budget, or does not fit it."""

from __future__ import annotations

from memfit.errors import DoesNotFitError
from memfit.jobs._job import Verdict
from memfit.jobs._placement import place
from memfit.jobs._slot import Slot
from memfit.memory import Budget, Footprint, Lendable
from memfit.units import format_bytes


def outgrown(capacity_bytes: int, budget: Budget) -> Verdict:
    """Return the verdict on a job that had the whole budget to itself and wants more."""
    binding = budget.binding
    return Verdict(
        "out_of_memory",
        f"it needs more than the {format_bytes(capacity_bytes)} that it had alone, all that may be lent under "
        f"{binding.name} of {format_bytes(binding.limit_bytes)} ({binding.source}), "
        f"{format_bytes(budget.reserve_bytes)} of which are kept back (--reserve): ended at its wall "
        "by memfit, before the kernel would; raise that limit or make the job smaller",
    )


def refusal(
    slot: Slot, needed_bytes: int, expected: Footprint | None, room: Lendable, budget: Budget
) -> DoesNotFitError:
    """Return the error for a job that does not fit although no other runs.

    Args:
        slot: The job.
        needed_bytes: What it needs of host memory.
        expected: What that rests on; None when nothing is known of it.
        room: What may be lent.
        budget: The budget.
    """
    job_id, device_bytes = slot.job.id, slot.needed_device_bytes or slot.job.device_bytes
    if needed_bytes <= room.bytes and device_bytes is not None:
        _, what = place(budget.devices, {}, device_bytes)
        return DoesNotFitError(
            f"{job_id}: {what}.",
            rule="a job that declares device memory runs on one GPU that has it free.",
            remedy="declare less with --gpu-memory, free a GPU, or leave the option out",
        )
    method = expected.method if expected else ""
    source = {"measured": "measured on a job like it", "declared": "as declared"}.get(method, "to start at all")
    binding = budget.binding
    return DoesNotFitError(
        f"{job_id} needs {format_bytes(needed_bytes)} of host memory ({source}); {room.explain()}.",
        rule=f"{binding.name} of {format_bytes(binding.limit_bytes)} ({binding.source}).",
        remedy="free memory or raise that limit, make the job smaller, or run it all the same with --force",
    )
