"""Schedules of the learning rate by name. This module needs torch, so the package does not import it by itself."""

from __future__ import annotations

import math
from typing import Literal

import torch

from memfit_workloads.finance.panels import check_cycles

ScheduleName = Literal["constant", "cosine", "warm_restarts"]


class ShapedSchedule(torch.optim.lr_scheduler.LRScheduler):
    """The learning rate as a share of the base rate, by a shape that fits the number of steps.

    ``bounds`` are the steps at which a cosine begins, and ``num_steps``; after them the rate stays at the floor.

    Source: I. Loshchilov, F. Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, ICLR 2017, equation 5.
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
    """Return a schedule of the learning rate, to be stepped after each of ``num_steps`` optimizer steps.

    All begin with a straight line up to the base rate. Then ``constant`` stays there, ``cosine`` goes down to the floor
    once, and ``warm_restarts`` in cycles, each twice as long as the one before. The last cycle ends with the run.

    Raises:
        UsageError: If the cycles do not fit the steps.
    """
    num_warmup = int(warmup_share * num_steps)
    num_cycles = cycles if name == "warm_restarts" else 1
    units, room = 2**num_cycles - 1, num_steps - num_warmup
    check_cycles(num_cycles, num_steps, warmup_share, setting="pass cycles")
    bounds = [num_warmup + round(room * (2**cycle - 1) / units) for cycle in range(num_cycles + 1)]
    return ShapedSchedule(optimizer, name, num_steps, floor_share, bounds)
