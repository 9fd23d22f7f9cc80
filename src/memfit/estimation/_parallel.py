"""A training step as one of several ranks runs it: rank 0, whose share is the largest.

Everything is emulated by hooks on fake tensors. What the libraries below torch take beside its allocator (NCCL's
buffers) is not here.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.estimation._data_parallel import shard_ddp, shard_zero
from memfit.estimation._fully_sharded import shard_fully
from memfit.estimation._program import Program
from memfit.estimation._setup import Setup, Strategy
from memfit.estimation._tensor_parallel import shard_tensors
from memfit.estimation._zero3 import shard_zero3

_SHARDERS: dict[Strategy, Callable[[Program, Setup], Program]] = {
    "ddp": shard_ddp,
    "zero1": shard_zero,
    "zero2": shard_zero,
    "zero3": shard_zero3,
    "fsdp": shard_fully,
    "tp": shard_tensors,
}


def shard(program: Program, setup: Setup) -> Program:
    """The program that one rank of ``setup.world_size`` runs; within a fake tensor mode.

    The model and the optimizer are changed in place. Full weights that the program was built with die in its build
    phase: real programs build on the host or shard by shard.

    Args:
        program: Of one device.
        setup: Its ``strategy`` and ``world_size``; its ``dtype`` decides on mixed precision.
    """
    if setup.world_size == 1 or setup.strategy == "none":
        return program
    return _SHARDERS[setup.strategy](program, setup)
