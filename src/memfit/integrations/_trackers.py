"""TensorBoard, Weights & Biases and MLflow: how each is shown an epoch and an end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from memfit.rundir import RunDir

Name = Literal["tensorboard", "wandb", "mlflow"]
_MOST_TEXT = 1000


class Tracker(Protocol):
    """One run of a tracker. It goes on when the run of memfit does."""

    def show(self, job: str, epoch: int, numbers: Mapping[str, float]) -> None:
        """Show the numbers of a job's epoch."""

    def end(self, job: str, state: str, cause: str) -> None:
        """Show how a job ended, and why."""

    def flush(self) -> None:
        """Write what was shown, if the tracker does not by itself."""

    def close(self, state: str, cause: str) -> None:
        """Close the tracker's run with the state and the cause of the run's end."""


class _TensorBoard(Tracker):
    """Scalars and texts by job, in ``RUN/tensorboard``."""

    def __init__(self, run: RunDir, _: str) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        self.writer = EventFileWriter(str(run.path / "tensorboard"))
        self.flush()  # fails here if the folder cannot be written

    def show(self, job: str, epoch: int, numbers: Mapping[str, float]) -> None:
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb  # type: ignore[import-untyped]

        for name, value in numbers.items():
            self._add(epoch, scalar_pb(f"{job}/{name}", value))

    def end(self, job: str, state: str, cause: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb  # type: ignore[import-untyped]

        self._add(0, text_pb(f"{job}/end", _sentence(state, cause)))

    def _add(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        self.writer.flush()

    def close(self, state: str, cause: str) -> None:
        self.end("run", state, cause)
        self.writer.close()


class _Wandb(Tracker):
    """One run of Weights & Biases; offline below ``RUN/wandb``. Its summary holds the ends."""

    def __init__(self, run: RunDir, project: str) -> None:
        import wandb

        self.run: Any = wandb.init(
            project=project, id=run.path.name, name=run.path.name, dir=str(run.path), resume="allow"
        )
        self.jobs = set[str]()

    def show(self, job: str, epoch: int, numbers: Mapping[str, float]) -> None:
        if job not in self.jobs:  # each job counts its own epochs
            self.jobs.add(job)
            self.run.define_metric(f"{job}/*", step_metric=f"{job}/epoch")
        self.run.log({f"{job}/{name}": value for name, value in numbers.items()} | {f"{job}/epoch": epoch})

    def end(self, job: str, state: str, cause: str) -> None:
        self.run.summary.update({f"{job}/state": state, f"{job}/cause": cause})

    def close(self, state: str, cause: str) -> None:
        self.run.summary.update({"state": state, "cause": cause})
        if state == "preempted":
            self.run.mark_preempting()
        self.run.finish(exit_code=0 if state in ("completed", "stopped") else 1)


class _MLflow(Tracker):
    """One run of MLflow; offline below ``RUN/mlflow``. Its tags hold the ends."""

    def __init__(self, run: RunDir, project: str) -> None:
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # else it wants a database, which its small package has not
        import mlflow

        self.client: Any = mlflow.MlflowClient()
        found = self.client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self.client.create_experiment(project)
        name = run.path.name
        runs = self.client.search_runs([experiment], f"tags.memfit_run = '{name}'", max_results=1)
        tags = {"memfit_run": name}
        self.id = (runs[0] if runs else self.client.create_run(experiment, run_name=name, tags=tags)).info.run_id
        self.client.update_run(self.id, status="RUNNING")

    def show(self, job: str, epoch: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.client.log_metric(self.id, f"{job}/{name}", value, step=epoch)

    def end(self, job: str, state: str, cause: str) -> None:
        self.client.set_tag(self.id, f"{job}/end", _sentence(state, cause))

    def close(self, state: str, cause: str) -> None:
        self.end("run", state, cause)
        asked = "KILLED" if state in ("preempted", "cancelled") else "FAILED"
        self.client.set_terminated(self.id, "FINISHED" if state in ("completed", "stopped") else asked)


TRACKERS: Mapping[Name, Callable[[RunDir, str], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _MLflow,
}


def environment(name: Name, run: RunDir, *, offline: bool) -> dict[str, str]:
    """Return the variables of a tracker's process: if ``offline``, it writes into the run directory."""
    given = dict(os.environ)
    if name == "wandb":
        given |= {"WANDB_SILENT": "true", "WANDB_MODE": "offline" if offline else "online"}
    elif name == "mlflow" and offline:
        given["MLFLOW_TRACKING_URI"] = (run.path / "mlflow").as_uri()
    return given


def _sentence(state: str, cause: str) -> str:
    return f"{state}: {cause}"[:_MOST_TEXT] if cause else state
