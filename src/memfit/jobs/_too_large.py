"""Says why a job cannot run here: the arithmetic of one that has outgrown the budget, or does not fit it."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.errors import DoesNotFitError
from memfit.jobs._job import Verdict
from memfit.jobs._placement import count_gpus
from memfit.jobs._reservation import Reservation, Wait
from memfit.memory import HOST, Budget, Footprint, Lendable, Sizes
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
    entry: Reservation,
    needed_bytes: int,
    expected: Footprint | None,
    rooms: Mapping[str, Lendable],
    devices: Sizes | Wait,
    budget: Budget,
) -> DoesNotFitError:
    """Return the error for a job that does not fit although no other runs.

    Args:
        entry: The job.
        needed_bytes: What it needs of host memory.
        expected: What that rests on; None when nothing is known of it.
        rooms: What may be lent at each place.
        devices: What it needs of each of the devices with the most room, or why there are none.
        budget: The budget.
    """
    job_id = entry.job.id
    method = expected.method if expected else ""
    source = {"measured": "measured on a job like it", "declared": "as declared"}.get(method, "to start at all")
    if needed_bytes <= rooms[HOST].bytes:
        if isinstance(devices, Wait):
            what = "; ".join(filter(None, (f"{job_id}: {devices.reason}", devices.detail)))
        else:
            lacking = min(devices, key=lambda place: rooms[place].bytes)
            if not (expected and method == "measured" and expected.bytes_per_device):
                source = "as declared" if entry.job.device_bytes else "to start at all"
            what = f"{job_id} needs {format_bytes(devices[lacking])} on {count_gpus(entry.job.num_devices)} ({source})"
            what += f"; {rooms[lacking].explain()}"
        return DoesNotFitError(
            f"{what}.",
            rule="a job gets as many GPUs as it asks for, each with room for what it takes there.",
            remedy="free a GPU, make the job smaller, or ask for less with --gpu-memory or --num-gpus",
        )
    room, binding = rooms[HOST], budget.binding
    return DoesNotFitError(
        f"{job_id} needs {format_bytes(needed_bytes)} of host memory ({source}); {room.explain()}.",
        rule=f"{binding.name} of {format_bytes(binding.limit_bytes)} ({binding.source}).",
        remedy="free memory or raise that limit, make the job smaller, or run it all the same with --force",
    )
