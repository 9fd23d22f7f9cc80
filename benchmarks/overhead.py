"""What the safe step costs: against a plain training loop, in one process, turn by turn.

    python benchmarks/overhead.py [--device cuda] [--seconds 60] [--block 1] [--most 0.02] [--json FILE]

Two equal models take equal steps, one by `SafeStep`, one by the loop that people write: zero_grad, loss, backward,
clip_grad_norm_, step. Single steps alternate (blocks of --block steps), and from pair to pair the order does: on a
machine whose speed drifts, only neighbours can be compared. Each pair gives one ratio; their median counts, and its
95 % interval (by the binomial distribution of order statistics) is printed. On the CPU it is of the process's CPU time,
which other processes disturb least, and wall clock is printed beside it; on a GPU it is of wall clock, each block ended
by a synchronization. glibc is told to keep freed memory: by default it gives it back to the kernel and faults it in
again at times that depend on what else lies on the heap, which takes up to 20 ms of CPU time of a step of 40 ms, in
either loop. Steps shorter than 20 ms are printed and do not count. Exit status: 0 every model is within --most, 1 one
is not, or none has steps that long.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from memfit.training import SafeStep, seed_everything

MOST_RATIO = 0.02
SHORTEST_SECONDS = 0.020
MAX_GRAD_NORM = 1.0
_LEAST_PAIRS = 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
Step = Callable[[Any], object]


@dataclass(frozen=True)
class Case:
    """A model and its batches, on the CPU and on a GPU: more there, for the same time."""

    name: str
    build: Callable[[bool], tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]]


class Encoder(torch.nn.Module):
    """A small transformer over float sequences; input (N, length, width), output (N, length, width)."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def mlp(is_gpu: bool) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Few large layers, 1.3 million weights: the update is a large part of the step."""
    width, count = (4096, 8192) if is_gpu else (512, 1024)
    parts: list[torch.nn.Module] = []
    for _ in range(5):
        parts += [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.1)]
    return torch.nn.Sequential(*parts), (torch.randn(count, width), torch.randn(count, width))


def deep(is_gpu: bool) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Many small tensors, 100 layers with 400 parameters: what is done per tensor weighs most."""
    width, count = (512, 8192) if is_gpu else (64, 1024)
    parts: list[torch.nn.Module] = []
    for _ in range(100):
        parts += [torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts), (torch.randn(count, width), torch.randn(count, width))


def encoder(is_gpu: bool) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A transformer with dropout."""
    width, count, length = (512, 128, 256) if is_gpu else (96, 16, 64)
    model = Encoder(width, 4)
    return model, (torch.randn(count, length, width), torch.randn(count, length, width))


def convolutions(is_gpu: bool) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Convolutions with batch statistics: buffers that change in every step."""
    width, count, side = (128, 128, 64) if is_gpu else (16, 32, 32)
    parts: list[torch.nn.Module] = [torch.nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(4):
        parts += [torch.nn.BatchNorm2d(width), torch.nn.ReLU(), torch.nn.Conv2d(width, width, 3, padding=1)]
    return torch.nn.Sequential(*parts), (torch.randn(count, 3, side, side), torch.randn(count, width, side, side))


CASES = [Case("mlp", mlp), Case("deep", deep), Case("encoder", encoder), Case("convolutions", convolutions)]


def squared_error(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """The summed loss and its weight."""
    x, y = batch
    return (model(x) - y).square().sum(), float(y.numel())


def make_steps(case: Case, device: torch.device) -> tuple[Step, Step, Any]:
    """A plain step, a safe step over an equal model, and their batch."""
    models = []
    for _ in range(2):
        seed_everything(0)
        model, batch = case.build(device.type == "cuda")
        models.append(model.to(device).train())
    batch = (batch[0].to(device), batch[1].to(device))
    plain_model, safe_model = models
    optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-4)

    def plain(batch: Any) -> float:
        optimizer.zero_grad()
        loss_sum, weight = squared_error(plain_model, batch)
        loss = loss_sum / weight
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(plain_model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        return float(loss.detach())

    safe_optimizer = torch.optim.AdamW(safe_model.parameters(), lr=1e-4)
    return plain, SafeStep(safe_model, safe_optimizer, squared_error, max_grad_norm=MAX_GRAD_NORM), batch


def block(step: Step, batch: Any, num_steps: int, device: torch.device) -> tuple[float, float]:
    """Wall clock and CPU seconds of one step, as the mean of a block."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(num_steps):
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - wall) / num_steps, (time.process_time() - cpu) / num_steps


def pairs_of(case: Case, device: torch.device, seconds: float, num_steps: int) -> Iterator[tuple[float, ...]]:
    """Of each pair of blocks the seconds of one step: plain wall, plain CPU, safe wall, safe CPU."""
    plain, safe, batch = make_steps(case, device)
    for step in (plain, safe):
        block(step, batch, 3, device)
    until = time.monotonic() + seconds
    for index in itertools.count():
        order = [plain, safe] if index % 2 == 0 else [safe, plain]
        found = {id(step): block(step, batch, num_steps, device) for step in order}
        yield (*found[id(plain)], *found[id(safe)])
        if time.monotonic() > until and index >= _LEAST_PAIRS:
            return


@dataclass(frozen=True)
class Result:
    """What a model's rounds gave; shares are of the plain step."""

    name: str
    step_seconds: float
    cpu_overhead: float
    wall_overhead: float
    overheads: list[float]


def measure(case: Case, device: torch.device, seconds: float, num_steps: int) -> Result:
    """The medians over a model's pairs."""
    pairs = list(pairs_of(case, device, seconds, num_steps))
    wall = [safe / plain - 1 for plain, _, safe, _ in pairs]
    cpu = [safe / plain - 1 for _, plain, _, safe in pairs]
    return Result(
        case.name,
        statistics.median(plain for plain, *_ in pairs),
        statistics.median(cpu),
        statistics.median(wall),
        wall if device.type == "cuda" else cpu,
    )


def interval(values: list[float]) -> tuple[float, float]:
    """A 95 % interval of their median: the order statistics 1.96 standard deviations of a coin's heads apart."""
    ordered, number = sorted(values), len(values)
    reach = 0.98 * number**0.5
    return ordered[max(0, math.floor(number / 2 - reach))], ordered[min(number - 1, math.ceil(number / 2 + reach))]


def keep_freed_memory() -> None:
    """Have glibc return nothing to the kernel; does nothing elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            libc.mallopt(setting, 1 << 30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0, help="of one model")
    parser.add_argument("--block", type=int, default=1, help="steps that are timed together")
    parser.add_argument("--most", type=float, default=MOST_RATIO)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    keep_freed_memory()
    device = torch.device(args.device)
    results, ok = [], True
    counted = 0
    print(f"{'model':14} {'plain step':>11} {'overhead':>9}   95 % interval, pairs, wall clock")
    for case in [case for case in CASES if args.case is None or case.name in args.case]:
        result = measure(case, device, args.seconds, args.block)
        results.append(result)
        overhead = statistics.median(result.overheads)
        low, high = interval(result.overheads)
        counts = result.step_seconds >= SHORTEST_SECONDS
        counted += counts
        ok = ok and (overhead <= args.most or not counts)
        note = "" if counts else "   (too short to count)"
        print(
            f"{case.name:14} {1e3 * result.step_seconds:8.1f} ms {overhead:9.2%}   {low:.2%} to {high:.2%}, "
            f"{len(result.overheads)}, {result.wall_overhead:.2%}{note}",
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    print(
        f"{'at most' if ok and counted else 'NOT within'} {args.most:.0%} for steps of {SHORTEST_SECONDS * 1e3:.0f} ms"
    )
    return 0 if ok and counted else 1


if __name__ == "__main__":
    raise SystemExit(main())
