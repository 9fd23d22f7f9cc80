"""What is known of one row: how its program is made, and how the published figure is to be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.estimation import Program

GIB = 1 << 30


@dataclass(frozen=True)
class Spec:
    """One measured run.

    Attributes:
        make: Makes its program; called inside of a fake tensor mode.
        metric: Which of the four peaks was published.
        gpu: The device, by a name that ``find_gpu`` knows.
        world_size: Devices.
        assumed: What the source does not say; empty for an exact one.
        expandable_segments: Whether the run set this option of the allocator.
        minus_inputs: Whether the published figure leaves out what was there before the step, as operator tests do.
        memory_gib: The memory of a device that ``find_gpu`` knows with another size only.
        context_gib: What a process takes with next to no model, where the source measured it on the same machine.
        cudnn_gib: What cuDNN adds to it, in the same way.
    """

    make: Callable[[], Program]
    metric: str
    gpu: str | None = None
    world_size: int = 1
    assumed: str = ""
    expandable_segments: bool = False
    minus_inputs: bool = False
    memory_gib: float | None = None
    context_gib: float | None = None
    cudnn_gib: float | None = None
