"""Faults at every place of a training of several ranks: no stall, the same weights, nothing hangs.

    python benchmarks/faults.py [--faults 100] [--ranks 4] [--each 10] [--seed 0] [--sharded] [--json FILE]

Each launch is a job under memfit's agent, as ``memfit run --nproc 4``: memfit's Trainer on a model in
DistributedDataParallel, or sharded by ``fully_shard``, with validation and a checkpoint after each step. It meets
``--each`` faults one after another. A fault is a place (forward, loss, backward, in the update, reduction, validation,
save, rendezvous, load), what happens there (out of memory, an error, SIGKILL, a hang) and a rank. The weights are
compared with those of a launch without a fault: to the byte where no batch was split, else to 1e-9 in float64.

Printed for each fault: the time to the next optimizer step, and the steps that were done again. Exit status 0: every
launch ended by itself with the same weights, and no next step took longer than 10 s and one start of the ranks; after a
hang, longer than its rule and that. The ranks are forked from a process that has imported torch.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PLACES = ("forward", "loss", "backward", "update", "reduction", "validation", "save", "rendezvous", "load")
HAPPENS = ("out of memory", "error", "SIGKILL", "hang")
#: What ends the generation before it has a checkpoint, so that two in a row would end the job.
EARLY = ("rendezvous", "load")
HANG_SECONDS, NUM_STEPS, LONGEST_SECONDS = 1.0, 16, 10.0
_LONGER = 30


class Fault(Exception):
    """An error of the user's own."""


class Plan:
    """The faults of a launch, one after another, in files that all ranks see."""

    def __init__(self, folder: Path, faults: list[dict[str, Any]]) -> None:
        self.folder, self.faults, self.rank = folder, faults, int(os.environ["RANK"])
        self.began, self.fired = self._count("steps"), self._count("fired")

    def _count(self, name: str) -> int:
        path = self.folder / name
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def note(self, name: str, *numbers: object) -> None:
        with open(self.folder / name, "a") as file:
            file.write(" ".join(map(str, (time.time(), *numbers))) + "\n")

    def note_step(self, number: Callable[[], int], outcome: object) -> None:
        self.note("steps", number())

    def at(self, place: str) -> None:
        """Do what is next if it is for here: after two steps of this generation, where it is not at its start."""
        fired, steps = self._count("fired"), self._count("steps")
        if fired == len(self.faults):
            return
        fault = self.faults[fired]
        if steps and fired and fired != self.fired:  # by another rank, in this generation
            self.fired, self.began = fired, steps
        is_due = place in EARLY or steps >= self.began + 2
        if (fault["place"], fault["rank"]) != (place, self.rank) or not is_due:
            return
        self.note("fired", fired)
        self.fired, self.began = fired + 1, steps
        if fault["does"] == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault["does"] == "hang":
            time.sleep(3600)
        if fault["does"] == "error":
            raise Fault(f"at {place}")
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")


def parts_of(plan: Plan) -> tuple[Any, Any, Any, Any]:
    """Return the model, its optimizer's class, the data and the loss, with faults in them."""
    import torch

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            plan.at("backward")
            return gradient

    class Model(torch.nn.Sequential):
        def forward(self, x: Any) -> Any:
            plan.at("forward" if self.training else "validation")
            apply: Any = Backward.apply
            for layer in self:
                x = layer(x)
            return apply(x)

    class Optimizer(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            found = super().step(closure)
            plan.at("update")
            return found

    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8 * NUM_STEPS

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.randn(8, generator=torch.Generator().manual_seed(index), dtype=torch.float64)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        found = (model(x) - x).square().sum()
        if model.training:
            plan.at("loss")
        return found, len(x)

    torch.manual_seed(1)
    model = Model(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)).double()
    return model, Optimizer, Data(), loss


def train(folder: str, faults: list[dict[str, Any]], is_sharded: bool = False) -> dict[str, Any]:
    """Train on each rank; return the weights."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader

    from memfit.training import KeyedDataset, KeyedSampler, Trainer, joined_group, seed_everything

    plan = Plan(Path(folder), faults)

    def at(place: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            if not any(isinstance(one, io.BytesIO) for one in given):  # not of what ranks send one another
                plan.at(place)
            return function(*given, **named)

        return call

    plan.at("rendezvous")
    with joined_group():
        dist.all_reduce = at("reduction", dist.all_reduce)
        torch.save, torch.load = at("save", torch.save), at("load", torch.load)
        seed_everything(1)
        model, optimizer, data, loss = parts_of(plan)
        model = fully_shard(model) if is_sharded else torch.nn.parallel.DistributedDataParallel(model)
        keyed = KeyedDataset(data, seed=1)
        loader = DataLoader(keyed, batch_size=8, sampler=KeyedSampler(keyed, seed=1))
        where: Any = {"checkpoint_dir": f"{folder}/checkpoints", "checkpoint_seconds": 0.0}
        own = optimizer(model.parameters())
        first = next(iter(model.parameters()))
        told = partial(plan.note_step, lambda: int(own.state[first]["step"]))
        trainer = Trainer(model, loss=loss, optimizer=own, on_step=told, **where)
        trainer.fit(loader, DataLoader(keyed, batch_size=8), num_epochs=1 + len(faults) // 3, preflight=False)
        tensors = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.state_dict().values()]
        return {"weights": torch.cat([one.flatten() for one in tensors]).tolist()}


def launch(folder: Path, faults: list[dict[str, Any]], num_ranks: int, parent: Any, is_sharded: bool) -> Any:
    """Run a training to its end; return its status and its weights."""
    from memfit.files import read_json
    from memfit.jobs import Job, LocalBackend, Submission
    from memfit.rundir import RunDir

    run = RunDir.create(folder, "faults", "0" * 64)
    backend = LocalBackend(run, parent=parent)
    arguments = {"folder": str(run.path), "faults": faults, "is_sharded": is_sharded}
    env = {"MEMFIT_HANG_SECONDS": str(HANG_SECONDS), "PYTHONPATH": str(Path(__file__).parent)}
    job = Job("train", target="faults:train", arguments=arguments, ranks=num_ranks, env=env, uses=("faults:*",))
    backend.submit([Submission(job)])
    while (status := backend.poll()["train"]).state in ("pending", "running"):
        time.sleep(0.05)
    result = read_json(run.job_dir("train") / "result.json") or {"result": {"weights": []}}
    return run, status, result["result"]["weights"]


def after(run: Any, number: int) -> tuple[float | None, int]:
    """Return the longest wait for one of the next two optimizer steps, and how many steps were done again.

    In the update and the reduction, rank 0 may end the step of the fault. None: the next fault came before.
    """
    fired = [float(line.split()[0]) for line in (run.path / "fired").read_text().splitlines()]
    lines = [line.split() for line in (run.path / "steps").read_text().splitlines()]
    steps = [(float(seconds), int(step)) for seconds, step in lines]
    later = [one for one in steps if one[0] > fired[number]][:2]
    before = [step for seconds, step in steps if seconds <= fired[number]]
    if not later or any(fired[number] < other < later[-1][0] for other in fired):
        return None, 0
    times = [fired[number], *(seconds for seconds, _ in later)]
    waited = max(second - first for first, second in itertools.pairwise(times))
    return waited, max(0, (before or [0])[-1] + 1 - min(step for _, step in later))


def plans(num: int, each: int, num_ranks: int, rng: random.Random) -> list[list[dict[str, Any]]]:
    """Return the faults of each launch: all pairs of a place and what happens there in turn, on ranks at random."""
    pairs = [pair for pair in itertools.product(PLACES, HAPPENS) if pair != ("rendezvous", "out of memory")]
    rng.shuffle(pairs)
    chosen = list(itertools.islice(itertools.cycle(pairs), num))
    early = [pair for pair in chosen if pair[0] in EARLY]
    late = [pair for pair in chosen if pair[0] not in EARLY]
    found: list[list[dict[str, Any]]] = []
    while early or late:
        one: list[dict[str, Any]] = []
        while len(one) < each and (early or late):
            # What is at the start of a generation comes after a fault that ended one with a checkpoint.
            has_begun = bool(one) and one[-1]["place"] not in EARLY and one[-1]["does"] in ("SIGKILL", "hang")
            place, does = early.pop() if early and has_begun else late.pop() if late else ("loss", "SIGKILL")
            rank = 0 if place == "save" else rng.randrange(num_ranks)
            one.append({"place": place, "does": does, "rank": rank})
        found.append(one)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--each", type=int, default=10, help="faults of one launch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sharded", action="store_true", help="fully_shard in place of DistributedDataParallel")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    given = parser.parse_args()

    from memfit.jobs import Parent, start_env

    env = {**os.environ, **start_env(tight_malloc=True, cuda_allocator=None)}
    parent = Parent.start("faults:train", env | {"PYTHONPATH": str(Path(__file__).parent)})
    assert parent is not None and not parent.refused, parent
    rows, is_good = [], True
    references: dict[int, list[float]] = {}
    print(f"{'place':<12}{'what':<15}{'rank':>4}{'next step':>11}{'lost':>6}  launch")
    with tempfile.TemporaryDirectory() as name:
        for number, faults in enumerate(plans(given.faults, given.each, given.ranks, random.Random(given.seed))):
            run, status, weights = launch(Path(name), faults, given.ranks, parent, given.sharded)
            if len(faults) not in references:
                idle = [{"place": "none", "does": "error", "rank": 0}] * len(faults)
                references[len(faults)] = launch(Path(name), idle, given.ranks, parent, given.sharded)[2]
            gaps = [abs(a - b) for a, b in zip(weights, references[len(faults)], strict=False)]
            error = max(gaps) if weights else float("inf")
            may_split = any(one["does"] == "out of memory" for one in faults)
            is_same = error < 1e-9 if may_split else error == 0.0
            num_fired = len((run.path / "fired").read_text().splitlines()) if (run.path / "fired").exists() else 0
            for place, fault in enumerate(faults[:num_fired]):
                seconds, lost = after(run, place)
                is_long = fault["place"] in (*EARLY, "save", "validation")
                allowed = LONGEST_SECONDS + (HANG_SECONDS * (_LONGER if is_long else 1)) * (fault["does"] == "hang")
                is_good = is_good and (seconds is None or seconds <= allowed)
                rows.append({**fault, "seconds": seconds, "lost": lost, "launch": number})
                told = "next fault" if seconds is None else f"{seconds:.1f} s"
                print(f"{fault['place']:<12}{fault['does']:<15}{fault['rank']:>4}{told:>11}{lost:>6}  {number}")
            told = f"launch {number}: {status.state}, {num_fired} of {len(faults)} faults, largest difference {error:g}"
            print(told + ("" if status.state == "completed" and is_same else f"  NOT AS WANTED: {status.cause[:300]}"))
            sys.stdout.flush()
            is_good = is_good and status.state == "completed" and is_same and num_fired == len(faults)
    parent.close()
    worst = max((row["seconds"] or 0.0 for row in rows if row["does"] != "hang"), default=0.0)
    print(f"{len(rows)} faults; the longest until a next step {worst:.1f} s, hangs left out")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
