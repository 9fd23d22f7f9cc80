"""The device memory of a training step, before it runs and without the device.

Only tracing loads torch; `estimate_formula`, `find_gpu` and the records do not.
"""

from memfit.estimation._allocator_settings import VARIABLES as ALLOCATOR_VARIABLES
from memfit.estimation._allocator_settings import (
    AllocatorSettings,
    allocator_faults,
    check_allocator,
)
from memfit.estimation._changes import Change, find_batch, find_change, in_words, list_changes
from memfit.estimation._estimate import METRICS, Estimate, judge
from memfit.estimation._estimator import estimate, estimate_config, estimate_step
from memfit.estimation._families import check_names
from memfit.estimation._formula import estimate_formula
from memfit.estimation._gpus import GPUS, Gpu, find_gpu
from memfit.estimation._interval import Interval
from memfit.estimation._lengths import LengthStatistics, describe_batches, read_lengths
from memfit.estimation._setup import (
    Dtype,
    Optimizer,
    Setup,
    equation_of_batch,
    split_batch,
)
from memfit.estimation._time_limit import TIME_LIMIT, limit_time

__all__ = [
    "ALLOCATOR_VARIABLES",
    "GPUS",
    "METRICS",
    "TIME_LIMIT",
    "AllocatorSettings",
    "Change",
    "Dtype",
    "Estimate",
    "Gpu",
    "Interval",
    "LengthStatistics",
    "Optimizer",
    "Setup",
    "allocator_faults",
    "check_allocator",
    "check_names",
    "describe_batches",
    "equation_of_batch",
    "estimate",
    "estimate_config",
    "estimate_formula",
    "estimate_step",
    "find_batch",
    "find_change",
    "find_gpu",
    "in_words",
    "judge",
    "limit_time",
    "list_changes",
    "read_lengths",
    "split_batch",
]
