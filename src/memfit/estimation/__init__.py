"""The device memory of a training step, before it runs and without the device.

Only tracing loads torch; `estimate_formula`, `find_gpu` and the records do not. A traced step is a `Program`: `trace`
records it, `replay` runs torch's allocator over the record, `bound_device` adds what may lie above.
"""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.estimation._allocator import Allocator as Allocator
    from memfit.estimation._allocator import Replay as Replay
    from memfit.estimation._allocator import replay as replay
    from memfit.estimation._allocator_settings import ALLOCATOR_VARIABLES as ALLOCATOR_VARIABLES
    from memfit.estimation._allocator_settings import AllocatorSettings as AllocatorSettings
    from memfit.estimation._allocator_settings import allocator_faults as allocator_faults
    from memfit.estimation._allocator_settings import check_allocator as check_allocator
    from memfit.estimation._assumptions import LEAST_SHARE as LEAST_SHARE
    from memfit.estimation._assumptions import share_that_moves as share_that_moves
    from memfit.estimation._attention import Call as Call
    from memfit.estimation._attention import pick_kernel as pick_kernel
    from memfit.estimation._blocks import ChunkedHead as ChunkedHead
    from memfit.estimation._blocks import checkpoint_blocks as checkpoint_blocks
    from memfit.estimation._bounds import ABOVE as ABOVE
    from memfit.estimation._bounds import bound_device as bound_device
    from memfit.estimation._changes import Change as Change
    from memfit.estimation._changes import find_batch as find_batch
    from memfit.estimation._changes import in_words as in_words
    from memfit.estimation._changes import list_changes as list_changes
    from memfit.estimation._changes import list_options as list_options
    from memfit.estimation._changes import rank_changes as rank_changes
    from memfit.estimation._cuda_ops import CudaOps as CudaOps
    from memfit.estimation._estimate import METRICS as METRICS
    from memfit.estimation._estimate import Estimate as Estimate
    from memfit.estimation._estimate import judge as judge
    from memfit.estimation._estimator import build_program as build_program
    from memfit.estimation._estimator import estimate as estimate
    from memfit.estimation._estimator import estimate_config as estimate_config
    from memfit.estimation._estimator import estimate_step as estimate_step
    from memfit.estimation._events import PARTS as PARTS
    from memfit.estimation._events import Event as Event
    from memfit.estimation._events import Peak as Peak
    from memfit.estimation._events import Trace as Trace
    from memfit.estimation._events import find_peaks as find_peaks
    from memfit.estimation._families import check_names as check_names
    from memfit.estimation._families import find_anatomy as find_anatomy
    from memfit.estimation._formula import estimate_formula as estimate_formula
    from memfit.estimation._gpus import GPUS as GPUS
    from memfit.estimation._gpus import Gpu as Gpu
    from memfit.estimation._gpus import find_gpu as find_gpu
    from memfit.estimation._interval import Interval as Interval
    from memfit.estimation._lora import LoraLinear as LoraLinear
    from memfit.estimation._lora import QuantizedLinear as QuantizedLinear
    from memfit.estimation._lora import add_lora as add_lora
    from memfit.estimation._lora import quantize_linears as quantize_linears
    from memfit.estimation._optimizers import InBackward as InBackward
    from memfit.estimation._optimizers import WeightByWeight as WeightByWeight
    from memfit.estimation._optimizers import build_optimizer as build_optimizer
    from memfit.estimation._parallel import shard as shard
    from memfit.estimation._parallel import shard_fully as shard_fully
    from memfit.estimation._program import Program as Program
    from memfit.estimation._program import find_tensors as find_tensors
    from memfit.estimation._program import map_tensors as map_tensors
    from memfit.estimation._recorder import part as part
    from memfit.estimation._setup import Dtype as Dtype
    from memfit.estimation._setup import Optimizer as Optimizer
    from memfit.estimation._setup import Setup as Setup
    from memfit.estimation._setup import equation_of_batch as equation_of_batch
    from memfit.estimation._setup import split_batch as split_batch
    from memfit.estimation._time_limit import TIME_LIMIT as TIME_LIMIT
    from memfit.estimation._time_limit import limit_time as limit_time
    from memfit.estimation._time_limit import time_left as time_left
    from memfit.estimation._trace import trace as trace

__all__ = ["Dtype", "Estimate", "Gpu", "Setup", "equation_of_batch", "estimate", "estimate_formula"]

__getattr__, __dir__ = load_lazily(__name__)
