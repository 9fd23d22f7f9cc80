"""The trainings of ``rank_faults.py``, and the faults that strike in them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from memfit.rundir import RANKS_VARIABLE, WAITING, read_beats

RANKS = 4
OUT_OF_MEMORY, ERROR, KILL, HANG, SLOW = "out of memory", "error", "SIGKILL", "hang", "slow"
#: What trains. SMALLER is FSDP2, too, with eight samples in a microbatch at first: each out-of-memory halves that.
DDP, FSDP2, SMALLER, TRANSFORMERS = "DDP", "FSDP2", "FSDP2, smaller", "transformers"
LONGER = 30


@dataclass(frozen=True)
class Fault:
    """What happens once, to some ranks, at a place of the step after ``at`` steps, or as a generation starts."""

    number: int
    place: str
    what: str
    ranks: tuple[int, ...]
    at: int | None = None
    generation: int | None = None
    seconds: float = 0.0

    @property
    def name(self) -> str:
        where = "all ranks" if len(self.ranks) == RANKS else f"rank {', '.join(map(str, self.ranks))}"
        return f"{self.what} in {self.place}, {where}"


class Faults:
    """Strikes at the places of one rank, and notes when, and when each optimizer step was done."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.generation = int(os.environ["RANK"]), int(os.environ["MEMFIT_GENERATION"])
        self.folder = folder
        self.optimizer: Any = None
        plan = [Fault(**one) for one in json.loads((folder / "plan.json").read_text())]
        self.own = [one for one in plan if self.rank in one.ranks]
        self.log = os.open(folder / f"log_{self.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far, those before a checkpoint included."""
        states: Any = () if self.optimizer is None else self.optimizer.state.values()
        return max((int(state["step"]) for state in states), default=0)

    def note(self, **fields: Any) -> None:
        content = {"time": time.time(), "rank": self.rank, "generation": self.generation, **fields}
        os.write(self.log, json.dumps(content).encode() + b"\n")

    def at(self, place: str, half: Callable[[], object] = lambda: None) -> None:
        """Strike if a fault is due here; ``half`` is done before."""
        for one in self.own:
            if one.place != place or self.generation != (self.generation if one.at is not None else one.generation):
                continue
            if one.at is not None and one.at != self.num_steps:
                continue
            with suppress(FileExistsError):
                os.close(os.open(self.folder / f"struck_{one.number}_{self.rank}", os.O_CREAT | os.O_EXCL))
                self._strike(one, half)

    def _strike(self, one: Fault, half: Callable[[], object]) -> None:
        import torch

        beat = read_beats(Path(os.environ[RANKS_VARIABLE]))[self.rank]
        rule = (beat.patience or 0.0) * (LONGER if beat.place in WAITING else 1)
        waits = beat.place in (*WAITING, "begin")  # so do its peers: nobody can tell which of them hangs
        self.note(fault=one.number, steps=self.num_steps, rule=rule if one.what == HANG else 0.0, waits=waits)
        half()
        if one.what == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if one.what == ERROR:
            raise ValueError("a fault on purpose")
        if one.what == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if one.what == HANG and self.rank % 2 == 0 and self.rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(one.seconds or 1e6)

    def before(self, holder: Any, name: str, place: str, of: type = object) -> None:
        """Strike before each call of a function whose first argument, if it has one, is an ``of``."""
        call = getattr(holder, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            if isinstance(next(iter(args), None), of):
                self.at(place)
            return call(*args, **kwargs)

        setattr(holder, name, faulty)

    def before_updates(self, optimizer: Any, weight: Any) -> None:
        """Strike in the updates of an optimizer, with a weight changed half-way, and note each that was done."""
        import torch

        self.optimizer = optimizer

        def done(*_: Any) -> None:
            if optimizer.param_groups[0]["lr"]:  # a load of shards steps with a rate of 0 to make the state
                self.note(steps=self.num_steps)

        half = partial(torch.Tensor.mul_, weight.data, 0.5)
        optimizer.register_step_pre_hook(lambda *_: self.at("update", half))
        optimizer.register_step_post_hook(done)


def make_net(faults: Faults, dropout: float) -> Any:
    """Return a small model that is struck in its passes."""
    import torch

    class FailsBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            faults.at("backward")
            return grad

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(6, 64), torch.nn.Linear(64, 1)
            self.dropout = torch.nn.Dropout(dropout)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            if self.training:
                faults.at("forward")
            found = self.last(torch.relu(self.first(self.dropout(x))))
            return found if labels is None else {"loss": self.loss(found, labels).mean(), "logits": found}

        def loss(self, found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            faults.at("loss" if self.training else "validation")
            errors = (found - labels).square()
            return FailsBackward.apply(errors) if self.training else errors  # type: ignore[no-untyped-call]

    torch.manual_seed(0)
    return Net().double()


def train(folder: str, num_epochs: int, loop: str) -> None:
    """Train on one rank of a group, with the faults of ``plan.json``; leave a digest of all that was trained."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faults = Faults(Path(folder))
    faults.before(dist, "init_process_group", "rendezvous")
    trained = (by_transformers if loop == TRANSFORMERS else by_memfit)(faults, num_epochs, loop)
    sha, numbers = hashlib.sha256(), []
    for leaf in torch.utils._pytree.tree_leaves([*trained, torch.get_rng_state()]):
        own = leaf.to_local() if hasattr(leaf, "to_local") else leaf
        sha.update(own.numpy().tobytes() if isinstance(own, torch.Tensor) else repr(own).encode())
        numbers += own.flatten().tolist() if isinstance(own, torch.Tensor) and own.is_floating_point() else []
    (Path(folder) / f"digest_{faults.rank}").write_text(json.dumps([sha.hexdigest(), numbers]))


def by_memfit(faults: Faults, num_epochs: int, loop: str) -> list[Any]:
    """Train by memfit's Trainer, in DistributedDataParallel or sharded; return all that was trained."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from memfit.training import Ema, KeyedDataset, KeyedSampler, Trainer, joined_group

    num_samples, batch = (128, 32) if loop == SMALLER else (30, 8) if loop == DDP else (32, 8)
    if loop == DDP:
        faults.before(torch, "load", "load")
        faults.before(dist, "all_reduce", "reduction")
        if faults.rank == 0:
            faults.before(torch, "save", "save", of=dict)  # of a checkpoint
        else:
            faults.before(dist, "broadcast_object_list", "save")
    else:
        import torch.distributed.checkpoint as dcp

        faults.before(dcp, "load", "load")
        faults.before(dcp, "save", "save")
        faults.before(dist, "reduce_scatter_single", "reduction")

    def loss(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return net.loss(model(x), x.sum(1, keepdim=True)).sum(), len(x)

    with joined_group():
        net = make_net(faults, 0.0 if loop == SMALLER else 0.2)  # draws depend on the microbatch
        model, ema = wrapped(net, loop), Ema(0.9) if loop == DDP else None
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        samples = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(5)).double()
        data = KeyedDataset(samples, seed=1)
        loader = DataLoader(data, batch, sampler=KeyedSampler(data, seed=1))
        trainer = Trainer(
            model, loss=loss, optimizer=optimizer, seed=3, microbatch_size=8 if loop == SMALLER else 1,
            max_grad_norm=1.0, checkpoint_dir=faults.folder / "checkpoints", ema=ema,
        )  # fmt: skip
        faults.before(trainer.step.guard, "try_memory", "trial")
        faults.before_updates(optimizer, net.last.weight)
        result = trainer.fit(loader, list(torch.split(samples[:32], 4)), num_epochs=num_epochs)
    states = [net.state_dict(), optimizer.state_dict(), *([] if ema is None else [ema.state_dict()])]
    return [*states, [one.metrics for one in result.history]]


def wrapped(net: Any, loop: str) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    if loop == DDP:
        return DistributedDataParallel(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (net.first, net.last, net):
        fully_shard(part, mesh=mesh)
    return net


def by_transformers(faults: Faults, num_epochs: int, loop: str) -> list[Any]:
    """Train by the Trainer of transformers, which is made ``exact``; return all that was trained."""
    import torch
    import transformers

    from memfit.integrations.huggingface import exact

    faults.before(torch, "load", "load")
    faults.before(torch, "save", "save", of=dict)  # the optimizer, or the random state of a rank
    samples = torch.randn(32, 6, generator=torch.Generator().manual_seed(5)).double()
    data = [{"x": x, "labels": x.sum(0, keepdim=True)} for x in samples]
    args = transformers.TrainingArguments(
        str(faults.folder / "checkpoints"), per_device_train_batch_size=2, num_train_epochs=num_epochs,
        save_strategy="epoch", eval_strategy="epoch", logging_strategy="epoch", save_total_limit=2, learning_rate=0.01,
        report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False,
        ddp_find_unused_parameters=False, label_names=["labels"],
    )  # fmt: skip
    net = make_net(faults, 0.2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    faults.before_updates(optimizer, net.last.weight)
    trainer = transformers.Trainer(net, args, train_dataset=data, eval_dataset=data, optimizers=(optimizer, None))
    exact(trainer)
    trainer.train()
    told = [(one["step"], one[name]) for one in trainer.state.log_history for name in one if name.endswith("loss")]
    return [net.state_dict(), optimizer.state_dict(), told]
