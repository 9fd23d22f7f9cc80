"""A workload without torch for studies: a stage that runs once, and two folds that save a checkpoint after each epoch."""

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from memfit.errors import StoppedError
from memfit.files import read_json, write_json
from memfit.pipeline import Context, Probe, Stage, Workload
from memfit.rundir import phase, record

MIB = 1 << 20


class StudyParams(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    lr: float = 0.03
    width: int = 4
    kind: Literal["a", "b"] = "a"
    num_folds: int = 2
    num_epochs: int = 5
    epoch_seconds: float = 0.05
    save_seconds: float = 0.0
    prepare_seconds: float = 0.0
    widths_that_fail: list[int] = []
    widths_without_value: list[int] = []
    num_reported: int = 99
    hold_mib_per_width: int = 0
    estimate_mib: int = 30
    widths_too_large: int = 99
    api_key: str = ""

    @model_validator(mode="after")
    def _kinds_have_widths(self) -> "StudyParams":
        if self.kind == "b" and self.width < 3:
            raise ValueError(f"width ({self.width}) of kind b must be 3 or more")
        return self


def estimate(params: StudyParams) -> int:
    """A table over all pairs of units from some width on, which no host can hold."""
    return (params.estimate_mib if params.width < params.widths_too_large else 1 << 20) * MIB


def prepare(context: Context, params: StudyParams) -> dict[str, Any]:
    phase("load")
    time.sleep(params.prepare_seconds)
    context.save("start", {"weights": [1.0, 2.0, 3.0]})
    return {"folds": list(range(1, params.num_folds + 1))}


def save(context: Context, state: dict[str, Any], seconds: float) -> None:
    """Save a checkpoint; a file ``saving`` is there meanwhile."""
    marker = context.dir / "saving"
    marker.touch()
    time.sleep(seconds)
    while Path("hold_save").exists():
        time.sleep(0.02)
    write_json(context.dir / "state.json", state, durable=False)
    marker.unlink()


def train(context: Context, params: StudyParams) -> dict[str, float]:
    phase("load")
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    start = {"epoch": 0, "weights": context["prepare"].json("start")["weights"]}
    state = read_json(context.dir / "state.json") or start
    target, loss = context.seed % 1000 / 1000, 0.0
    block = bytearray(b"x") * (params.hold_mib_per_width * params.width * MIB)
    for epoch in range(state["epoch"] + 1, params.num_epochs + 1):
        phase("train")
        time.sleep(params.epoch_seconds)
        while Path("hold").exists() and not stopping:
            time.sleep(0.02)
        if params.width in params.widths_that_fail:
            raise ValueError(f"a planted bug at width {params.width}")
        weights = [one - params.lr * (one - target) for one in state["weights"]]
        loss = sum((one - target) ** 2 for one in weights) + 0.1 * params.width + (params.kind == "b")
        if epoch <= params.num_reported:
            record("epoch", epoch=epoch, num_epochs=params.num_epochs, loss=loss)
        context.report("half", loss / 2, epoch)
        phase("checkpoint")
        state = {"epoch": epoch, "weights": weights, "loss": loss, "pid": os.getpid()}
        save(context, state, params.save_seconds)
        if stopping:
            raise StoppedError("stopped.", rule="asked to.", remedy="start again")
    del block
    context.save("weights", {"weights": state["weights"]})
    return {"loss": float("nan") if params.width in params.widths_without_value else state["loss"]}


STUDY = Workload(
    params=StudyParams,
    stages=(
        Stage("prepare", prepare, reads=("num_folds", "prepare_seconds")),
        Stage("fold", train, needs=("prepare",), each="fold in prepare.folds", probe=Probe(memory=estimate)),
    ),
)
