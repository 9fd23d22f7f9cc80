"""Training that survives running out of memory, and that can be killed at any moment and goes on bit-exact.

    Trainer                  trains a model by epochs, validates, saves, resumes
    FitResult, EpochRecord   what a fit gave back, as a whole and by epoch
    Ema                      an average of the weights over the steps, with snapshots at listed epochs
    average_checkpoints      the mean of late checkpoints of one training
    SafeStep, StepOutcome    one optimizer step that is split and replayed when memory runs out, for any loop
    autocast, find_device, to_device   what the trainer does for precision= and device=, for code of your own
    SkipPolicy, OomEvent     which batches may be left out; what was survived
    BySample, ByGroup, WHOLE how a batch may be cut; Split is what they are
    MicrobatchSizes          which cost of a microbatch fits
    KeyedDataset, KeyedSampler   data whose order and random draws allow a resume at once, with any num_workers
    preflight, find_longest  tries the longest batch, validation and a checkpoint first; gives a report
    checkpoint_activations   trades a third more time for the memory of a model's blocks
    clean_up, Cleanup        collects garbage and empties caches, and says what that freed
    LeakDetector, Leak       names what grows from epoch to epoch
    classify_oom, OomKind    whether an exception is a failed allocation, and of which memory
    load_checkpoint          a checkpoint's content, after its checksum was checked
    save_checkpoint          writes one, whole or not at all, from any loop
    rng_state, set_rng_state   the state of all global generators, for such a checkpoint
    seed_everything          seeds Python, NumPy and torch; call it before building a model
    CheckpointWarning        a damaged checkpoint was passed over, or a resume cannot be bit-exact

This is the only package of memfit that imports torch.
"""

from typing import Any

from memfit.errors import MissingExtraError
from memfit.successors import missing_name

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
from memfit.training._leaks import Cleanup, Leak, LeakDetector, clean_up
from memfit.training._oom import OomKind, classify_oom
from memfit.training._preflight import Longest, PhaseMemory, PreflightReport, find_longest, preflight
from memfit.training._process import rng_state, seed_everything, set_rng_state
from memfit.training._records import EpochRecord, FitResult, OomEvent, SkipPolicy, StepOutcome
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
    "OomEvent",
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


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
