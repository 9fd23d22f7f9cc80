"""The arithmetic of a training: which batch size really ran, how long it takes, and what a change can do at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memfit.diagnosis._slurm_account import NodeAccount


def count_steps(num_samples: int, world_size: int, batch_size: int, *, drop_last: bool = False) -> int:
    """The steps of one epoch: each rank gets its share, rounded up, in batches of which the last may be short.

    >>> count_steps(85_109, 16, 22), count_steps(85_109, 16, 20)
    (242, 266)
    """
    share = -(-num_samples // world_size)
    return share // batch_size if drop_last else -(-share // batch_size)


def batch_sizes_of(num_steps: int, num_samples: int, world_size: int) -> tuple[int, ...]:
    """The batch sizes per rank that give so many steps an epoch, short last batches kept or dropped.

    >>> batch_sizes_of(242, 85_109, 16)
    (22,)
    """
    share = -(-num_samples // world_size)
    if num_steps < 1:
        return ()
    low, high = max(1, share // (num_steps + 1)), share // max(1, num_steps - 1) + 1 if num_steps > 1 else share + 1
    return tuple(
        size
        for size in range(low, min(high, share + 1) + 1)
        if num_steps in {count_steps(num_samples, world_size, size, drop_last=dropped) for dropped in (False, True)}
    )


@dataclass(frozen=True)
class BatchCheck:
    """Which batch size ran, by the number of steps.

    Attributes:
        num_steps: Steps of an epoch that were seen.
        ran: The batch sizes per rank that give them.
        wanted: What was asked for; None when nothing was.
        wanted_steps: The steps that it would give.
        num_epochs: Whole epochs in the last global step; None without one or when it is no multiple.
    """

    num_steps: int
    ran: tuple[int, ...]
    wanted: int | None = None
    wanted_steps: int | None = None
    num_epochs: int | None = None

    @property
    def in_force(self) -> bool | None:
        """Whether the batch size that was asked for ran; None when nothing tells."""
        return None if self.wanted is None or not self.ran else self.wanted in self.ran

    @property
    def text(self) -> str:
        """In a sentence."""
        ran = " or ".join(map(str, self.ran)) or "none that divides the samples so"
        said = f"{self.num_steps} steps an epoch mean a batch of {ran}"
        if self.in_force is False:
            return f"{said}; a batch of {self.wanted} would take {self.wanted_steps}: the change was not in force"
        return said


def check_batch(
    num_samples: int,
    world_size: int,
    *,
    num_steps: int | None = None,
    global_step: int | None = None,
    num_epochs: int | None = None,
    wanted: int | None = None,
) -> BatchCheck | None:
    """Which batch really ran, from the steps of an epoch or from the last global step and the number of epochs.

    >>> check = check_batch(85_109, 16, global_step=9_680, num_epochs=40, wanted=20)
    >>> check.ran, check.in_force, check.num_steps
    ((22,), False, 242)
    """
    if num_steps is None and global_step and num_epochs and global_step % num_epochs == 0:
        num_steps = global_step // num_epochs
    if not num_steps:
        return None
    whole = global_step // num_steps if global_step and global_step % num_steps == 0 else None
    steps = count_steps(num_samples, world_size, wanted) if wanted else None
    return BatchCheck(num_steps, batch_sizes_of(num_steps, num_samples, world_size), wanted, steps, whole)


@dataclass(frozen=True)
class RateCheck:
    """A bar's rate against the clock.

    Attributes:
        num_steps: Steps of an epoch.
        bar_seconds: What they take at the bar's rate.
        wall_seconds: What they took by the clock.
    """

    num_steps: int
    bar_seconds: float
    wall_seconds: float

    @property
    def ratio(self) -> float:
        """How many times longer it took."""
        return self.wall_seconds / self.bar_seconds

    @property
    def text(self) -> str:
        """In a sentence."""
        real = self.num_steps / self.wall_seconds
        minutes = f"{self.bar_seconds / 60:.0f} min by the bar's rate, {self.wall_seconds / 60:.0f} min by the clock"
        return f"{self.num_steps} steps: {minutes}, which is {real:.3f} steps a second"


def check_rate(num_steps: int, steps_per_second: float, wall_seconds: float) -> RateCheck:
    """A bar's rate against the clock.

    >>> print(check_rate(242, 0.21, 22 * 60 + 54).text)
    242 steps: 19 min by the bar's rate, 23 min by the clock, which is 0.176 steps a second
    """
    return RateCheck(num_steps, num_steps / steps_per_second, wall_seconds)


def predict_seconds(num_epochs: int, train_seconds: float, validate_seconds: float = 0.0, *, done: int = 0) -> float:
    """How long the epochs that are left will take.

    >>> round(predict_seconds(40, 23 * 60) / 3600, 1)
    15.3
    """
    return (num_epochs - done) * (train_seconds + validate_seconds)


def effective_batch(batch_size: int, world_size: int, accumulate: int = 1) -> int:
    """The samples of one optimizer step.

    >>> effective_batch(22, 16), effective_batch(20, 16), effective_batch(11, 16, 2)
    (352, 320, 352)
    """
    return batch_size * world_size * accumulate


# What a change can do.


@dataclass(frozen=True)
class Effect:
    """What a change of a setting does for a host that ran out of memory.

    Attributes:
        setting: Its last part, as ``batch_size``.
        old, new: The effective values.
        effect: ``none``: nothing changes at all; ``not_host``: only the device's memory; ``some``: only what the
            setting's own buffers take; ``limit``: the limit itself.
        text: Why, in a sentence.
    """

    setting: str
    old: Any
    new: Any
    effect: Literal["none", "not_host", "some", "limit"]
    text: str


#: What torch's DataLoader takes when nothing is said. Source: torch.utils.data.DataLoader, 2.x.
DEFAULTS: Mapping[str, Any] = {
    "persistent_workers": False,
    "num_workers": 0,
    "pin_memory": False,
    "prefetch_factor": 2,
    "drop_last": False,
    "accumulate_grad_batches": 1,
    "gradient_accumulation_steps": 1,
}
_NOT_HOST = frozenset({"accumulate_grad_batches", "gradient_accumulation_steps"})
_BATCH = frozenset({"batch_size", "per_device_train_batch_size", "train_batch_size", "micro_batch_size"})


def judge_change(setting: str, old: Any, new: Any, *, account: NodeAccount | None = None) -> Effect:
    """What a change does for host memory; an ``old`` of None stands for the default.

    Args:
        setting: A key with or without the path before it, as ``dataloader.params.batch_size``.
        old, new: Its values.
        account: The node's account; when the node was over in steady state, no change at the border of phases helps.

    >>> judge_change("dataloader.params.persistent_workers", None, False).effect
    'none'
    """
    name = setting.rpartition(".")[2].strip("-").replace("-", "_")
    old = DEFAULTS.get(name) if old is None else old
    over = account is not None and account.verdict == "over_in_steady_state"
    if old == new:
        origin = "its default" if DEFAULTS.get(name) == new else "what it was"
        return Effect(name, old, new, "none", f"{name}={new} is {origin}: nothing changes")
    if name in ("mem", "mem_per_cpu", "mem_per_node"):
        return Effect(name, old, new, "limit", f"the limit goes from {old} to {new}; what the tasks take stays")
    if name in _NOT_HOST:
        return Effect(
            name, old, new, "not_host", f"{name} sets the samples of an optimizer step, not the bytes on the host"
        )
    if name in _BATCH:
        text = (
            f"{name} {old} -> {new} shrinks activations on the device; on the host it shrinks no more than the batches "
            "that workers hold ready, which is num_workers x prefetch_factor + 1 of them for each task"
        )
        return Effect(name, old, new, "not_host", text)
    if name in ("num_workers", "prefetch_factor", "pin_memory"):
        return Effect(name, old, new, "some", f"{name} {old} -> {new} scales only what the workers hold of their own")
    text = f"{name} {old} -> {new}: no effect on the host's memory is known"
    if over and name == "persistent_workers":
        text = f"{name} {old} -> {new} acts between epochs; the node was over its limit in the steady state before"
    return Effect(name, old, new, "some" if name == "persistent_workers" else "none", text)
