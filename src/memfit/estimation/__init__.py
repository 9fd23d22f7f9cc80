"""What device memory a training step will take, told before it runs and without the device.

Only what traces a step loads torch; `estimate_formula`, `find_gpu` and the records do not.
"""

from typing import TYPE_CHECKING, Any

from memfit.estimation._allocator_settings import VARIABLES as ALLOCATOR_VARIABLES
from memfit.estimation._allocator_settings import (
    AllocatorFault,
    AllocatorSettings,
    allocator_faults,
    check_allocator,
)
from memfit.estimation._changes import Change, find_batch, find_change, list_changes
from memfit.estimation._estimate import METRICS, Estimate, Metric, judge
from memfit.estimation._estimator import (
    estimate,
    estimate_config,
    estimate_formula,
    estimate_step,
)
from memfit.estimation._gpus import GPUS, Gpu, find_gpu
from memfit.estimation._interval import Interval
from memfit.estimation._model_config import check_names
from memfit.estimation._setup import (
    Attention,
    Checkpointing,
    Dtype,
    Loading,
    Optimizer,
    Quantization,
    Setup,
    Strategy,
    equation_of_batch,
    split_batch,
)
from memfit.estimation._time_limit import TIME_LIMIT, limit_time
from memfit.successors import missing_name

if TYPE_CHECKING:
    from memfit.estimation._lengths import LengthStatistics, describe_batches, read_lengths

_OF_LENGTHS = ("LengthStatistics", "describe_batches", "read_lengths")

__all__ = [
    "ALLOCATOR_VARIABLES",
    "GPUS",
    "METRICS",
    "TIME_LIMIT",
    "AllocatorFault",
    "AllocatorSettings",
    "Attention",
    "Change",
    "Checkpointing",
    "Dtype",
    "Estimate",
    "Gpu",
    "Interval",
    "LengthStatistics",
    "Loading",
    "Metric",
    "Optimizer",
    "Quantization",
    "Setup",
    "Strategy",
    "allocator_faults",
    "check_allocator",
    "check_names",
    "equation_of_batch",
    "estimate",
    "estimate_config",
    "estimate_formula",
    "estimate_step",
    "find_batch",
    "find_change",
    "find_gpu",
    "judge",
    "limit_time",
    "list_changes",
    "describe_batches",
    "read_lengths",
    "split_batch",
]


def __getattr__(name: str) -> Any:
    # Lengths load NumPy; a process that only checks the allocator's settings needs none.
    if name in _OF_LENGTHS:
        from memfit.estimation import _lengths

        return getattr(_lengths, name)
    raise missing_name(__name__, name)
