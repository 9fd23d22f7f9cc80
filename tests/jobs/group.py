"""A training of several ranks that saves after each step, and faults at its places."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as group

from memfit.errors import StoppedError
from memfit.training import beat, joined_group, keep_beats, leave, load_checkpoint, save_checkpoint

STEPS = 6


class Faults:
    """Faults by generation, rank and place: ``kill``, ``hang``, ``stop`` (the process), or an error."""

    def __init__(self, faults: list[dict[str, Any]]) -> None:
        self.generation, self.rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
        self.own = [one for one in faults if (one["generation"], one["rank"]) == (self.generation, self.rank)]

    def at(self, place: str, step: int | None = None) -> None:
        if place != "start":  # before the first beat
            beat(place, step)
        for one in self.own:
            if one["place"] == place and one.get("step", step) == step:
                self._do(one["does"])

    def _do(self, fault: str) -> None:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "hang":
            time.sleep(600)
        elif fault == "smaller":
            beat("smaller")
            leave("out of memory with 8 at once; the group begins again with 4")
        elif fault == "seals an old step":
            beat("sealed", 1)
            raise ValueError(fault)
        elif fault == "ends slowly":
            beat("end")
            time.sleep(3)
            raise ValueError(fault)
        elif fault == "slow":
            beat("repeat")
            time.sleep(8)
        else:
            raise ValueError(fault)


@contextmanager
def group_of(faults: Faults) -> Iterator[int]:
    faults.at("begin")
    with joined_group() as rank:
        yield rank


def train(folder: str, faults: list[dict[str, Any]]) -> dict[str, float]:
    """Sum what the ranks draw, step by step; each step is in the checkpoint."""
    may_fail, path = Faults(faults), Path(folder) / "latest.pt"
    may_fail.at("start")
    keep_beats(folder)
    stops = []
    signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
    with group_of(may_fail) as rank:
        may_fail.at("load")
        first, weight = 0, torch.zeros(1)
        if path.exists():
            state = load_checkpoint(path)
            first, weight = state["step"], state["weight"]
        for step in range(first, STEPS):
            may_fail.at("microbatch", step)
            gradient = torch.tensor([float(step * (rank + 1)), float(bool(stops))])
            may_fail.at("vote", step)
            group.all_reduce(gradient)
            weight = weight + gradient[0]
            may_fail.at("save", step)
            if rank == 0:
                save_checkpoint(path, {"step": step + 1, "weight": weight})
            beat("sealed", step)
            if gradient[1]:
                raise StoppedError(f"stopped after step {step}", rule="it was asked to", remedy="start it again")
            time.sleep(0.02)
    return {"weight": float(weight)}


if __name__ == "__main__":
    print(train(sys.argv[1], json.loads(sys.argv[2])))
