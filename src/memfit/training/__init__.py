"""Training that survives running out of memory and resumes bit-exact after a kill: see ``docs/training.md``.

This is the only package of memfit that imports torch.
"""

from memfit.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError.of("torch", "torch", "memfit.training") from error

from memfit.training._activations import CheckpointedBlocks, checkpoint_activations
from memfit.training._average import average_checkpoints
from memfit.training._checkpoint import CheckpointWarning, load_checkpoint, save_checkpoint
from memfit.training._compute import autocast, find_device, to_device
from memfit.training._ema import Ema
from memfit.training._keyed import KeyedDataset, KeyedSampler
from memfit.training._leaks import Leak, LeakDetector
from memfit.training._oom import Cleanup, OomKind, classify_oom, clean_up
from memfit.training._preflight import Longest, PhaseMemory, PreflightReport, find_longest, preflight
from memfit.training._process import rng_state, seed_everything, set_rng_state
from memfit.training._records import EpochRecord, FitResult, SkipPolicy, StepOutcome
from memfit.training._sizes import MicrobatchSizes
from memfit.training._split import WHOLE, ByGroup, BySample, Split
from memfit.training._step import SafeStep
from memfit.training._trainer import Trainer

__all__ = [
    "WHOLE",
    "ByGroup",
    "BySample",
    "CheckpointWarning",
    "CheckpointedBlocks",
    "Cleanup",
    "Ema",
    "EpochRecord",
    "FitResult",
    "KeyedDataset",
    "KeyedSampler",
    "Leak",
    "LeakDetector",
    "Longest",
    "MicrobatchSizes",
    "OomKind",
    "PhaseMemory",
    "PreflightReport",
    "SafeStep",
    "SkipPolicy",
    "Split",
    "StepOutcome",
    "Trainer",
    "autocast",
    "average_checkpoints",
    "checkpoint_activations",
    "classify_oom",
    "clean_up",
    "find_device",
    "find_longest",
    "load_checkpoint",
    "preflight",
    "rng_state",
    "save_checkpoint",
    "seed_everything",
    "set_rng_state",
    "to_device",
]
