"""What memfit's step of several ranks costs: against DistributedDataParallel's own, turn by turn.

    python benchmarks/ranks.py [--ranks 4] [--rounds 12] [--block 4] [--most 1.1] [--device cuda]

Two equal models of 4.2 million parameters take equal steps on each rank, one by `SafeStep`, one by the loop that people
write with DDP: no_sync() for all microbatches but the last, clip_grad_norm_, step. DDP sums the gradients while the
backward pass still runs; memfit sums them after a vote, so this overlap is lost. Blocks of steps alternate, and from
round to round the order does; each round gives one ratio of wall clock, and their median counts. Printed is also where
memfit's step was: waiting at the vote, and summing. Then memory runs out once on one rank, and the weights must be
those of steps without it. With --device cuda each rank has a GPU, and the group is NCCL. Exit status: 0 every ratio is
within --most and the weights are the same, 1 not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memfit.training import SafeStep

_WIDTH, _LAYERS = 1024, 4
_CASES = ((64, 1), (512, 1), (64, 4))


def model_of() -> torch.nn.Module:
    """Return 4.2 million parameters."""
    torch.manual_seed(0)
    parts: list[torch.nn.Module] = []
    for _ in range(_LAYERS):
        parts += [torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU()]
    return torch.nn.Sequential(*parts)


def squared_error(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the summed loss and its weight."""
    return model(x).square().sum(), float(len(x))


class Timed:
    """Adds up the seconds in a method."""

    def __init__(self, holder: Any, name: str) -> None:
        self.seconds, self._call = 0.0, getattr(holder, name)
        setattr(holder, name, self)

    def __call__(self, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._call(*args)
        finally:
            self.seconds += time.perf_counter() - began


def same_after_oom(rank: int, batch: torch.Tensor) -> bool:
    """Return whether an out-of-memory on rank 1 leaves the same weights."""
    found = []
    for fails in (False, True):
        left = [3 if fails and rank == 1 else 0]

        def loss(model: Any, x: torch.Tensor, left: list[int] = left) -> tuple[torch.Tensor, float]:
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return squared_error(model, x)

        model = DistributedDataParallel(model_of().to(batch.device))
        step = SafeStep(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loss, microbatch_size=1)
        for _ in range(4):
            step(batch[:2])
        found.append(torch.cat([one.detach().flatten() for one in step.model.parameters()]))
    return torch.equal(*found)


def steps(batches: list[torch.Tensor]) -> tuple[Callable[[], object], Callable[[], object], SafeStep]:
    """Return a step of DDP's own, one of memfit over an equal model, and the latter's SafeStep."""
    device = batches[0].device
    plain = DistributedDataParallel(model_of().to(device))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)

    def own() -> None:
        optimizer.zero_grad()
        for number, batch in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else plain.no_sync():
                loss_sum, weight = squared_error(plain, batch)
                (loss_sum / (weight * len(batches))).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()

    model = DistributedDataParallel(model_of().to(device))
    safe = SafeStep(model, torch.optim.AdamW(model.parameters(), lr=1e-4), squared_error, max_grad_norm=1.0)
    return own, lambda: safe(*batches), safe


def meet(device: torch.device) -> None:
    """Wait for the device and for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def measure(rank: int, args: argparse.Namespace, store: str) -> None:
    """Time all cases on one rank; rank 0 prints."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    place = dist.FileStore(store, args.ranks)  # type: ignore[attr-defined]
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=place, rank=rank, world_size=args.ranks)
    is_ok = True
    for size, accumulation in _CASES:
        generator = torch.Generator().manual_seed(rank)
        own, safe, step = steps(
            [torch.randn(size, _WIDTH, generator=generator).to(device) for _ in range(accumulation)]
        )
        own(), safe()
        assert step.ranks is not None and step.team is not None
        vote, reduce = Timed(step.ranks, "vote"), Timed(step.team, "reduce")
        plain, ours = [], []
        for number in range(args.rounds):
            found = {}
            for action in (own, safe) if number % 2 else (safe, own):
                meet(device)
                began = time.perf_counter()
                for _ in range(args.block):
                    action()
                meet(device)
                found[action] = (time.perf_counter() - began) / args.block
            plain.append(found[own])
            ours.append(found[safe])
        ratio = statistics.median(one / other for one, other in zip(ours, plain, strict=True))
        is_ok &= ratio <= args.most
        if rank == 0:
            shares = [1e3 * part.seconds / (args.rounds * args.block) for part in (vote, reduce)]
            print(
                f"batch {size:4} x {accumulation}  DDP {1e3 * statistics.median(plain):7.1f} ms  "
                f"memfit {1e3 * statistics.median(ours):7.1f} ms  ratio {ratio:.3f}  "
                f"(vote {shares[0]:.1f} ms, sum {shares[1]:.1f} ms)",
                flush=True,
            )
    is_same = same_after_oom(rank, torch.ones(2, _WIDTH, device=device) * (rank + 1))
    if rank == 0:
        print(f"after an out-of-memory on rank 1: {'the same weights' if is_same else 'OTHER WEIGHTS'}", flush=True)
    is_ok &= is_same
    os._exit(0 if is_ok else 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=4, help="steps that are timed together")
    parser.add_argument("--most", type=float, default=1.1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    torch.optim.SGD([torch.zeros(1)])  # its imports are for all ranks
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        store = str(Path(folder) / "store")
        ranks = [context.Process(target=measure, args=(rank, args, store)) for rank in range(args.ranks)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
    return max(one.exitcode or 0 for one in ranks)


if __name__ == "__main__":
    raise SystemExit(main())
