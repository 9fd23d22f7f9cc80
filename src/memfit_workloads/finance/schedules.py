"""Schedules of the learning rate by name. This module needs torch, so the package does not import it by itself."""

from __future__ import annotations

import math
from typing import Literal

import torch

from memfit.errors import UsageError, check_counts, nearest
from memfit_workloads.finance.cycles import check_cycles

ScheduleName = Literal["constant", "cosine", "warm_restarts"]

_SCHEDULES = ("constant", "cosine", "warm_restarts")


class ShapedSchedule(torch.optim.lr_scheduler.LRScheduler):
    """The learning rate as a share of the base rate, by a shape that fits the number of steps.

    Attributes:
        shape: Its name.
        num_steps: The steps of the run. After them the rate stays at the end of the shape.
        floor_share: The share at the end of each cosine.
        bounds: The steps at which a cosine begins, and ``num_steps``.

    Source:
        I. Loshchilov, F. Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, ICLR 2017, equation 5.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shape: ScheduleName,
        num_steps: int,
        floor_share: float,
        bounds: list[int],
    ) -> None:
        self.shape, self.num_steps, self.floor_share, self.bounds = shape, num_steps, floor_share, bounds
        super().__init__(optimizer)

    def share(self, step: int) -> float:
        """Return the share of the base rate at a step, counted from 0."""
        if step < self.bounds[0]:
            return (step + 1) / (self.bounds[0] + 1)
        if self.shape == "constant":
            return 1.0
        begin, end = next(
            ((a, b) for a, b in zip(self.bounds, self.bounds[1:], strict=False) if step < b), (0, 1)
        )  # none: the run is over
        done = min(1.0, (step - begin) / (end - begin))
        return self.floor_share + (1 - self.floor_share) * 0.5 * (1 + math.cos(math.pi * done))

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group of parameters."""
        return [base * self.share(self.last_epoch) for base in self.base_lrs]


def make_schedule(
    name: ScheduleName,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    *,
    floor_share: float = 0.0,
    cycles: int = 2,
    warmup_share: float = 0.0,
) -> ShapedSchedule:
    """Return a schedule of the learning rate, to be stepped after each optimizer step.

    All begin with a straight line up to the base rate. Then ``constant`` stays there, ``cosine`` goes down to the floor
    once, and ``warm_restarts`` in cycles, each twice as long as the one before. The last cycle ends with the run.

    Args:
        name: ``constant``, ``cosine`` or ``warm_restarts``.
        optimizer: Its rates are the base rates.
        num_steps: Optimizer steps of the whole run.
        floor_share: The end of each cosine, as a share of the base rate: 0 to less than 1.
        cycles: Cycles of ``warm_restarts``.
        warmup_share: The share of steps on the line, 0 to less than 1.

    Raises:
        UsageError: If the name is not known, a share is out of its range, or the cycles do not fit the steps.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> schedule = make_schedule("warm_restarts", torch.optim.SGD([weight], lr=1.0), 6, floor_share=0.1, cycles=2)
        >>> [round(schedule.share(step), 2) for step in range(7)]
        [1.0, 0.55, 1.0, 0.87, 0.55, 0.23, 0.1]
    """
    if name not in _SCHEDULES:
        raise UsageError(
            f"schedule is {name!r}.",
            rule=f"it is one of {', '.join(_SCHEDULES)}.",
            remedy=nearest(str(name), _SCHEDULES),
        )
    check_counts(UsageError, 1, num_steps=num_steps, cycles=cycles)
    for share, value in {"floor_share": floor_share, "warmup_share": warmup_share}.items():
        if not 0 <= value < 1:
            raise UsageError(
                f"{share} is {value}.",
                rule=f"{share} is a share of the base rate or of the steps: 0 to less than 1.",
                remedy=f"pass {share}=0.1",
            )
    num_warmup = int(warmup_share * num_steps)
    num_cycles = cycles if name == "warm_restarts" else 1
    units, room = 2**num_cycles - 1, num_steps - num_warmup
    check_cycles(num_cycles, num_steps, warmup_share, setting="pass cycles")
    bounds = [num_warmup + round(room * (2**cycle - 1) / units) for cycle in range(num_cycles + 1)]
    return ShapedSchedule(optimizer, name, num_steps, floor_share, bounds)
