"""How many cycles of warm restarts fit into a training. This loads no torch, so that a config is checked by it."""

from __future__ import annotations

from memfit.errors import UsageError


def check_cycles(cycles: int, num_steps: int, warmup_share: float, *, setting: str = "cycles", more: str = "") -> None:
    """Refuse cycles that do not fit the steps of a training.

    Args:
        cycles: Cycles, each twice as long as the one before.
        num_steps: Optimizer steps of the training.
        warmup_share: The share of them before the first cycle.
        setting: The name of the setting that the error says to change.
        more: How to train for more steps.

    Raises:
        UsageError: If the first cycle would have less than 2 steps.

    Example:
        >>> check_cycles(2, 6, 0.0)
        >>> check_cycles(2, 5, 0.0, setting="--set params.train.cycles")
        Traceback (most recent call last):
        memfit.errors.UsageError: 2 cycles take 6 steps at least, and the run has 5 after its warm-up.
          rule: the first cycle has 2 steps or more, each other is twice as long as the one before it.
          do:   --set params.train.cycles=1, or train for more steps
    """
    least, room = 2 * (2**cycles - 1), num_steps - int(warmup_share * num_steps)
    if cycles > 1 and room < least:
        raise UsageError(
            f"{cycles} cycles take {least} steps at least, and the run has {room} after its warm-up.",
            rule="the first cycle has 2 steps or more, each other is twice as long as the one before it.",
            remedy=f"{setting}={(room // 2 + 1).bit_length() - 1 or 1}, or {more or 'train for more steps'}",
        )
