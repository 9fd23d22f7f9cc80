"""Training that survives running out of memory and resumes bit-exact after a kill: see ``docs/training.md``.

This is the only package of memfit that imports torch.
"""

from memfit.errors import MissingExtraError as _MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise _MissingExtraError.of("torch", "torch", "memfit.training") from error

from memfit.training._beat import beat as beat
from memfit.training._beat import joined_group as joined_group
from memfit.training._beat import keep_beats as keep_beats
from memfit.training._beat import leave as leave
from memfit.training._beat import peers_lost as peers_lost
from memfit.training._checkpoint import CheckpointWarning as CheckpointWarning
from memfit.training._checkpoint import checkpoint_path as checkpoint_path
from memfit.training._checkpoint import load_checkpoint as load_checkpoint
from memfit.training._checkpoint import save_checkpoint as save_checkpoint
from memfit.training._checks import check_compiled as check_compiled
from memfit.training._compute import autocast as autocast
from memfit.training._compute import find_device as find_device
from memfit.training._compute import to_device as to_device
from memfit.training._ema import Ema as Ema
from memfit.training._feed import DealtOrder as DealtOrder
from memfit.training._feed import feed_of as feed_of
from memfit.training._flight import write_flight_record as write_flight_record
from memfit.training._guard import OptimizerGuard as OptimizerGuard
from memfit.training._identity import environment as environment
from memfit.training._identity import refuse_changed as refuse_changed
from memfit.training._journal import Journal as Journal
from memfit.training._journal import Unheard as Unheard
from memfit.training._loaders import remade as remade
from memfit.training._loop import Loop as Loop
from memfit.training._loop_parts import LoopParts as LoopParts
from memfit.training._loop_parts import is_stream as is_stream
from memfit.training._loop_parts import length_of as length_of
from memfit.training._oom import OomKind as OomKind
from memfit.training._oom import classify_oom as classify_oom
from memfit.training._oom import clean_up as clean_up
from memfit.training._oom import device_bytes as device_bytes
from memfit.training._oom import release as release
from memfit.training._preflight import Longest as Longest
from memfit.training._preflight import find_longest as find_longest
from memfit.training._preflight import preflight as preflight
from memfit.training._preflight import rehearse as rehearse
from memfit.training._process import Stopper as Stopper
from memfit.training._process import rng_state as rng_state
from memfit.training._process import say as say
from memfit.training._process import seed_everything as seed_everything
from memfit.training._process import set_rng_state as set_rng_state
from memfit.training._ranks import Ranks as Ranks
from memfit.training._records import EpochRecord as EpochRecord
from memfit.training._records import FitResult as FitResult
from memfit.training._records import SkipPolicy as SkipPolicy
from memfit.training._records import StepOutcome as StepOutcome
from memfit.training._recovery import StepRecovery as StepRecovery
from memfit.training._replay import digest_of as digest_of
from memfit.training._sealed import Sealed as Sealed
from memfit.training._sealed import SealedFolder as SealedFolder
from memfit.training._session import Course as Course
from memfit.training._session import Due as Due
from memfit.training._session import Position as Position
from memfit.training._session import Session as Session
from memfit.training._sizes import MicrobatchSizes as MicrobatchSizes
from memfit.training._split import WHOLE as WHOLE
from memfit.training._split import ByGroup as ByGroup
from memfit.training._split import BySample as BySample
from memfit.training._split import samples_in as samples_in
from memfit.training._stacks import Stack as Stack
from memfit.training._stacks import likely_cause as likely_cause
from memfit.training._stacks import register_stack_dump as register_stack_dump
from memfit.training._stacks import stacks_of as stacks_of
from memfit.training._step import SafeStep as SafeStep
from memfit.training._stream import KeyedDataset as KeyedDataset
from memfit.training._stream import KeyedSampler as KeyedSampler
from memfit.training._stream import KeyedStream as KeyedStream
from memfit.training._stream import check_loader as check_loader
from memfit.training._stream import keyed_rng as keyed_rng
from memfit.training._stream import order_of as order_of
from memfit.training._trainer import Trainer as Trainer
from memfit.training._workers import deaf_workers as deaf_workers

__all__ = [
    "ByGroup",
    "BySample",
    "CheckpointWarning",
    "Ema",
    "EpochRecord",
    "FitResult",
    "KeyedDataset",
    "KeyedSampler",
    "Loop",
    "SafeStep",
    "SkipPolicy",
    "StepOutcome",
    "Trainer",
    "autocast",
    "beat",
    "checkpoint_path",
    "clean_up",
    "find_device",
    "find_longest",
    "keep_beats",
    "load_checkpoint",
    "preflight",
    "rng_state",
    "save_checkpoint",
    "seed_everything",
    "set_rng_state",
]
