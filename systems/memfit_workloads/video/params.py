"""The parameters of the video classifier: the ``params`` section of its config."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from memfit import config
from memfit_workloads.own import Network, Target


class DataParams(config.Settings):
    """Where the videos come from."""

    source: Literal["samples", "files"] = "samples"
    num_clips: int = Field(160, ge=8, description="samples: clips to make, half of them tampered with")
    seconds: float = Field(1.0, gt=0, le=60, description="samples: length of a clip")
    bad_share: float = Field(0.0, ge=0, le=0.5, description="samples: share of clips that are damaged on purpose")
    path: Path | None = Field(
        None, description="files: a folder with one folder for each class, or a CSV of path, label and perhaps group"
    )
    most_bad: float = Field(0.2, ge=0, le=1, description="the largest share of files that may be skipped as damaged")

    @model_validator(mode="after")
    def _path_fits_the_source(self) -> DataParams:
        if (self.path is not None) != (self.source == "files"):
            raise ValueError("path belongs to source: files, which needs one")
        return self


class ClipParams(config.Settings):
    """What the model sees of a video."""

    num_frames: int = Field(16, ge=2, description="frames, evenly spaced in time")
    size: int = Field(48, ge=16, description="height and width of a frame in pixels")


class SplitParams(config.Settings):
    """The test set and the folds."""

    n_splits: int = Field(5, ge=2)
    test_share: float = Field(0.2, ge=0, le=0.5)
    grouped: bool = Field(True, description="false splits near-duplicates: only to show what that leak does")


class LoaderParams(config.Settings):
    """The batches."""

    batch_size: int = Field(8, ge=1)
    num_workers: int = Field(0, ge=0, description="processes that make batches, at most one for each core")


class CleanupParams(config.Settings):
    """When garbage is collected and the device's cache emptied. All is off: each has its price and frees little."""

    before_stage: bool = Field(False, description="proactive: before each stage")
    after_stage: bool = Field(False, description="after each stage")
    after_fold: bool = Field(False, description="after the training of each fold")
    after_epoch: bool = Field(False, description="periodic: after each epoch")
    every_batches: int | None = Field(None, ge=1, description="periodic: after so many batches")
    after_out_of_memory: bool = Field(False, description="reactive: after a step that ran out of memory")


class TrainParams(config.Settings):
    """The training of a fold."""

    num_epochs: int = Field(8, ge=1)
    learning_rate: float = Field(2e-3, gt=0)
    use_amp: bool = Field(False, description="mixed precision: bfloat16, on older GPUs float16")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: the granted GPU, else the CPU")


class ModelParams(Network):
    """The network: a small one of this width, or your own."""

    target: Target = "memfit_workloads.video.model:ClipNet"
    width: int = Field(8, ge=4, multiple_of=4, description="channels of the first layer")


class VideoParams(config.Settings):
    """All settings of the workload."""

    entry: Literal["pipeline", "notebook"] = Field("pipeline", description="notebook: one fold, in a Jupyter notebook")
    data: DataParams = DataParams()
    clip: ClipParams = ClipParams()
    splits: SplitParams = SplitParams()
    num_versions: int = Field(2, ge=1, description="versions of each training video: itself, and changed copies")
    model: ModelParams = ModelParams()
    loader: LoaderParams = LoaderParams()
    train: TrainParams = TrainParams()
    cleanup: CleanupParams = CleanupParams()
