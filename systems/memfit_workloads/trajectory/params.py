"""The parameters of the trajectory model: the ``params`` section of its config."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import Field, model_validator

from memfit import config
from memfit_workloads.own import Network, Target

P = TypeVar("P")


class DataParams(config.Settings):
    """Where the scenes come from, and how they are cut."""

    #: Names of networks in the installed packages, or paths of .net.xml files.
    places: list[str] = Field(["A10KW", "RiLSA_example1"], min_length=1, description="networks of roads")
    held_out: list[str] = Field(default_factory=list, description="places that are only tested on")
    simulations: int = Field(2, ge=1, description="of each place, with a seed each")
    seconds: float = Field(120.0, gt=0, description="of each simulation")
    step: float = Field(0.1, gt=0, description="seconds of a step of the simulation")
    vehicles_per_minute: float = Field(40.0, gt=0, description="that set out in a place")
    hz: int = Field(5, ge=1, description="positions of a scene per second")
    num_history: int = Field(11, ge=2, description="positions that the model sees, the present one included")
    num_future: int = Field(20, ge=1, description="positions that it foretells")
    stride_seconds: float = Field(3.0, gt=0, description="from one scene of a vehicle to its next")
    block_seconds: float = Field(20.0, gt=0, description="scenes of one block of time are of one split")
    valid_share: float = Field(0.15, gt=0, lt=0.5)
    test_share: float = Field(0.15, gt=0, lt=0.5)
    num_neighbours: int = Field(6, ge=1, description="vehicles kept beside the scene's own: the nearest")
    raster_size: int = Field(32, ge=16, multiple_of=8, description="cells along a side of the raster")
    raster_cell: float = Field(2.0, gt=0, description="metres of a cell of the raster")

    @model_validator(mode="after")
    def _parts_fit(self) -> DataParams:
        if self.block_seconds * self.hz < self.num_history + self.num_future:
            raise ValueError("block_seconds must hold history and future: a scene lies within one block")
        if not set(self.held_out) < set(self.places):
            raise ValueError("held_out names some of places, and not all of them")
        return self


class VocabularyParams(config.Settings):
    """The trajectories to choose from, and the table of how teachers score them."""

    size: int = Field(512, ge=8, le=4096, description="trajectories; fewer where fewer scenes are trained on")


class ModelParams(Network):
    """The network, a small one of this width or your own, and its loss."""

    shared = ("temperature", "teacher_weight")
    target: Target = "memfit_workloads.trajectory.model:TrajectoryScorer"
    width: int = Field(64, ge=8, multiple_of=8)
    temperature: float = Field(0.5, gt=0, description="metres by which entries are as good as the nearest")
    teacher_weight: float = Field(1.0, ge=0, description="of the four teacher heads, beside the imitation head")


class LoaderParams(config.Settings):
    """The batches."""

    batch_size: int = Field(64, ge=1, description="scenes at once on each rank")
    num_workers: int = Field(0, ge=0, description="processes of each rank that load")


class TrainerParams(config.Settings):
    """The training."""

    max_epochs: int = Field(8, ge=1)
    accumulate_grad_batches: int = Field(1, ge=1, description="batches of an update")
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    gradient_clip_val: float | None = Field(1.0, gt=0)
    learning_rate: float = Field(2e-3, gt=0)


class Part(config.Settings, Generic[P]):
    """``dataloader.params`` and ``trainer.params``, as the configs of such models have them."""

    params: P


class TrajectoryParams(config.Settings):
    """All settings of the workload."""

    data: DataParams = DataParams()
    vocabulary: VocabularyParams = VocabularyParams()
    model: ModelParams = ModelParams()
    dataloader: Part[LoaderParams] = Part(params=LoaderParams())
    trainer: Part[TrainerParams] = Part(params=TrainerParams())
    seeds: int = Field(3, ge=1, description="trainings, from other first weights and in another order each")
