"""Training that can be killed at any moment and goes on bit-exact from the end of its last whole epoch.

    Trainer                  trains a model by epochs, validates, saves, resumes
    FitResult, EpochRecord   what a fit gave back, as a whole and by epoch
    load_checkpoint          a checkpoint's content, after its checksum was checked
    seed_everything          seeds Python, NumPy and torch; call it before building a model
    CheckpointWarning        a damaged checkpoint was passed over, or a resume cannot be bit-exact

This is the only package of memfit that imports torch.
"""

from memfit.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError.of("torch", "torch", "memfit.training") from error

from memfit.training._checkpoint import CheckpointWarning, load_checkpoint
from memfit.training._process import seed_everything
from memfit.training._result import EpochRecord, FitResult
from memfit.training._trainer import Trainer

__all__ = ["CheckpointWarning", "EpochRecord", "FitResult", "Trainer", "load_checkpoint", "seed_everything"]
