"""What memfit costs: a safe step, a step of several ranks, a step in other loops, a checkpoint, and a start.

    python benchmarks/costs.py [--part step|loops|ranks|saves|starts ...] [--rounds N] [--json FILE]

Each compares equal work in turns, round by round; the ratio of each round counts, as its median with a 95 % interval.

- *step*: `SafeStep` beside the loop that people write: zero_grad, loss, backward, clip_grad_norm_, step. On the CPU it
  is of the process's CPU time, which other processes disturb least; with ``--device cuda`` of wall clock, each step
  ended by a synchronization. glibc is told to keep freed memory, for it may fault it in again in either loop, which
  takes up to 20 ms of a step of 40 ms. At most 1.02, but of steps shorter than 20 ms, which do not count.
- *loops*: *watch*, *stop* and *exact* in transformers' and Lightning's Trainers and in Accelerate's loop beside the
  plain training: the median CPU time of a turn's steps. At most 1.02 at 10 million parameters; the tiny model's count
  for nothing.
- *ranks*: `SafeStep` beside DistributedDataParallel's own step, on ``--ranks`` ranks of gloo, or of NCCL with
  ``--device cuda``: 4.2 million parameters. DDP sums the gradients while the backward pass still runs; memfit sums them
  after a vote. At most 1.1.
- *saves*: a sealed checkpoint of 115 MiB, written by ``torch.save``, beside that file alone, by CPU time and by clock;
  and beside the file forced to disk, by clock. At most 1.3 of the file alone.
- *starts*: a run of two folds that do nothing, or make one step with torch, forked and in new interpreters, and a
  command that does nothing. Nothing is asked.

Exit status: 0 all as asked, 1 not.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness import in_turns, interval, parser, print_table, ratio, told, write_json
from memfit.training import SafeStep, SealedFolder, seed_everything

MOST, MOST_OF_RANKS, MOST_OF_SAVES, SHORTEST_SECONDS, MAX_GRAD_NORM = 1.02, 1.1, 1.3, 0.020, 1.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
Made = tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]


# --- a safe step


def _stack(blocks: int, *make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(one() for _ in range(blocks) for one in make))


def mlp(is_gpu: bool) -> Made:
    """Few large layers, 1.3 million weights: the update is a large part of the step."""
    width, count = (4096, 8192) if is_gpu else (512, 1024)
    model = _stack(5, lambda: nn.Linear(width, width), nn.GELU, lambda: nn.Dropout(0.1))
    return model, (torch.randn(count, width), torch.randn(count, width))


def deep(is_gpu: bool) -> Made:
    """Many small tensors, 100 layers with 400 parameters: what is done per tensor weighs most."""
    width, count = (512, 8192) if is_gpu else (64, 1024)
    model = _stack(100, lambda: nn.Linear(width, width), lambda: nn.LayerNorm(width), nn.ReLU)
    return model, (torch.randn(count, width), torch.randn(count, width))


def encoder(is_gpu: bool) -> Made:
    width, count, length = (512, 128, 256) if is_gpu else (96, 16, 64)
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return model, (torch.randn(count, length, width), torch.randn(count, length, width))


def convolutions(is_gpu: bool) -> Made:
    """Convolutions with batch statistics: buffers that change in every step."""
    width, count, side = (128, 128, 64) if is_gpu else (16, 32, 32)
    own = (lambda: nn.BatchNorm2d(width), nn.ReLU, lambda: nn.Conv2d(width, width, 3, padding=1))
    model = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), _stack(4, *own))
    return model, (torch.randn(count, 3, side, side), torch.randn(count, width, side, side))


CASES: dict[str, Callable[[bool], Made]] = {one.__name__: one for one in (mlp, deep, encoder, convolutions)}


def squared_error(model: Any, batch: Any) -> tuple[torch.Tensor, float]:
    x, y = batch
    return (model(x) - y).square().sum(), float(y.numel())


def make_steps(name: str, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A plain step, and a safe step over an equal model."""
    models = []
    for _ in range(2):
        seed_everything(0)
        model, batch = CASES[name](device.type == "cuda")
        models.append(model.to(device).train())
    batch = (batch[0].to(device), batch[1].to(device))
    plain, optimizer = models[0], torch.optim.AdamW(models[0].parameters(), lr=1e-4)

    def own() -> float:
        optimizer.zero_grad()
        loss_sum, weight = squared_error(plain, batch)
        loss = loss_sum / weight
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        return float(loss.detach())

    safe_optimizer = torch.optim.AdamW(models[1].parameters(), lr=1e-4)
    safe = SafeStep(models[1], safe_optimizer, squared_error, max_grad_norm=MAX_GRAD_NORM)
    return own, lambda: safe(batch)


def part_step(args: argparse.Namespace) -> dict[str, Any]:
    with contextlib.suppress(OSError, AttributeError):
        for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            ctypes.CDLL("libc.so.6").mallopt(setting, 1 << 30)
    device, found = torch.device(args.device), dict[str, Any]()
    clock = time.perf_counter if device.type == "cuda" else time.process_time

    def timed(step: Callable[[], Any]) -> float:
        began = clock()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - began

    for name in CASES:
        plain, safe = make_steps(name, device)
        own = in_turns({"plain": lambda p=plain: timed(p), "safe": lambda s=safe: timed(s)}, args.rounds or 200, warm=3)  # type: ignore[misc]
        middle, low, high = ratio(own["safe"], own["plain"])
        seconds = statistics.median(own["plain"])
        counts = seconds >= SHORTEST_SECONDS
        note = "" if counts else ", too short to count"
        text = f"step, {name}: {middle:.3f} ({low:.3f} to {high:.3f}) of {1e3 * seconds:.1f} ms{note}"
        found[name] = {"ratio": middle, "low": low, "high": high, "seconds": seconds}
        found[name]["ok"] = told(not counts or middle <= MOST, text)
    return found


# --- a step in other loops

FORMS = ("plain", "watch", "stop", "exact")
#: The width of the model by size, and the steps of a turn.
SIZES = {"tiny": (16, 200), "large": (3160, 40)}
BATCH = 16


class Net(nn.Module):
    """A model of about ``width`` squared parameters, that gives its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - x).square().mean()}


def _loader(steps: int) -> Any:
    data: Any = torch.rand(steps * BATCH, 8)
    return torch.utils.data.DataLoader(data, BATCH, shuffle=True)


def by_lightning(form: str, width: int, steps: int, folder: str) -> list[float]:
    """Return the CPU seconds at the end of each step."""
    import lightning.pytorch as pl

    from memfit.integrations.lightning import Exact, MemfitCallback, Stop

    times: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net(width)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return self.model(batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Clock(pl.Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.process_time())

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    off: dict[str, Any] = dict.fromkeys(names, False)
    watch = [MemfitCallback()] if form == "watch" else []
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[Clock(), *watch], **off)
    fits: dict[str, Any] = {"stop": Stop, "exact": lambda *given, **more: Exact(*given, seed=1, **more)}
    fit = fits[form](folder, every=10**9, allow=("rehearsal",)).fit if form in fits else pl.Trainer.fit
    fit(trainer, Module(), _loader(steps))
    return times


def by_accelerate(form: str, width: int, steps: int, folder: str) -> list[float]:
    """Return the CPU seconds at the end of each step."""
    import accelerate

    from memfit.integrations.accelerate import Exact, MemfitCallback, Stop

    accelerator, model, loader = accelerate.Accelerator(cpu=True), Net(width), _loader(steps)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    loop: Any = MemfitCallback(accelerator)
    if form == "stop":
        loop = Stop(accelerator, folder, every=10**9)
    elif form == "exact":
        loop = Exact(accelerator, folder, seed=1, every=10**9)
        loader = loop.loader(loader)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    times = []
    for _ in [0] if form == "plain" else loop.epochs(1):
        for batch in loader if form == "plain" else loop.batches(loader):
            accelerator.backward(model(batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.process_time())
    return times


def by_transformers(form: str, width: int, steps: int, folder: str) -> list[float]:
    """Return the CPU seconds at the end of each step."""
    import transformers

    from memfit.integrations.huggingface import MemfitCallback, exact, stoppable

    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.process_time())

    off: dict[str, Any] = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
    settings = transformers.TrainingArguments(
        folder, num_train_epochs=1, per_device_train_batch_size=BATCH, use_cpu=True, dataloader_pin_memory=False, **off
    )
    data: Any = [{"x": row} for row in torch.rand(steps * BATCH, 8)]
    watch = [MemfitCallback()] if form == "watch" else []
    trainer = transformers.Trainer(Net(width), settings, train_dataset=data, callbacks=[Clock(), *watch])
    if form == "stop":
        stoppable(trainer, allow=("rehearsal",))
    elif form == "exact":
        exact(trainer, allow=("rehearsal",))
    trainer.train()
    return times


def part_loops(args: argparse.Namespace) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for size, (width, steps) in SIZES.items():
        for way in (by_transformers, by_lightning, by_accelerate):

            def turn(form: str, way: Any = way, width: int = width, steps: int = steps) -> float:
                with tempfile.TemporaryDirectory() as folder:
                    times = way(form, width, steps, folder)
                return float(statistics.median(after - before for before, after in pairwise(times)))

            turns = in_turns({form: lambda f=form, t=turn: t(f) for form in FORMS}, args.rounds or 4, warm=1)  # type: ignore[misc]
            for form in FORMS[1:]:
                name, (middle, low, high) = f"{size} {way.__name__[3:]} {form}", ratio(turns[form], turns["plain"])
                plain = 1e3 * statistics.median(turns["plain"])
                text = f"loops, {name}: {middle:.3f} ({low:.3f} to {high:.3f}) of {plain:.2f} ms"
                found[name] = {"ratio": middle, "low": low, "high": high}
                found[name]["ok"] = told(size == "tiny" or middle <= MOST, text)
    return found


# --- a step of several ranks

_WIDTH = 1024
_BATCHES = ((64, 1), (512, 1), (64, 4))


def _ranks_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.parallel.DistributedDataParallel(_stack(4, lambda: nn.Linear(_WIDTH, _WIDTH), nn.GELU).to(device))


def _ranks_loss(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, float]:
    return model(x).square().sum(), float(len(x))


def ranks_steps(batches: Sequence[torch.Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a step of DDP's own, and one of memfit over an equal model."""
    plain: Any = _ranks_model(batches[0].device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)

    def own() -> None:
        optimizer.zero_grad()
        for number, batch in enumerate(batches, start=1):
            with contextlib.nullcontext() if number == len(batches) else plain.no_sync():
                loss_sum, weight = _ranks_loss(plain, batch)
                (loss_sum / (weight * len(batches))).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()

    model = _ranks_model(batches[0].device)
    safe = SafeStep(model, torch.optim.AdamW(model.parameters(), lr=1e-4), _ranks_loss, max_grad_norm=1.0)
    return own, lambda: safe(*batches)


def measure_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Time all cases on one rank; rank 0 prints, and leaves its figures."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    is_gpu = args.device == "cuda"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", args.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if is_gpu else "gloo", store=store, rank=rank, world_size=args.ranks)

    def timed(action: Callable[[], Any]) -> float:
        for is_end in (False, True):
            if is_gpu:
                torch.cuda.synchronize(device)
            dist.barrier()
            if not is_end:
                began = time.perf_counter()
                for _ in range(4):
                    action()
        return (time.perf_counter() - began) / 4

    found: dict[str, Any] = {}
    for size, number in _BATCHES:
        generator = torch.Generator().manual_seed(rank)
        batches = [torch.randn(size, _WIDTH, generator=generator).to(device) for _ in range(number)]
        own, safe = ranks_steps(batches)
        turns = in_turns({"own": lambda o=own: timed(o), "safe": lambda s=safe: timed(s)}, args.rounds or 12, warm=1)  # type: ignore[misc]
        middle, low, high = ratio(turns["safe"], turns["own"])
        name, seconds = f"batch {size} x {number}", statistics.median(turns["own"])
        found[name] = {"ratio": middle, "low": low, "high": high, "seconds": seconds, "ok": middle <= MOST_OF_RANKS}
        if rank == 0:
            told(found[name]["ok"], f"ranks, {name}: {middle:.3f} ({low:.3f} to {high:.3f}) of {1e3 * seconds:.1f} ms")
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    os._exit(0 if all(one["ok"] for one in found.values()) else 1)


def part_ranks(args: argparse.Namespace) -> dict[str, Any]:
    torch.optim.SGD([torch.zeros(1)])  # its imports are for all ranks
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=measure_rank, args=(rank, args, folder)) for rank in range(args.ranks)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    return found | {"exit": {"ok": not any(one.exitcode for one in ranks)}}


# --- a checkpoint

_NUM_NUMBERS = 30_000_000


def part_saves(args: argparse.Namespace) -> dict[str, Any]:
    found, state = {}, {str(number): torch.rand(_NUM_NUMBERS // 30) for number in range(30)}
    with tempfile.TemporaryDirectory() as name:
        keeper, numbers = SealedFolder(name), count(1)

        def turn(way: str) -> tuple[float, float]:
            began, number = (time.process_time(), time.perf_counter()), next(numbers)
            path = keeper.begin(number) / "parts.pt" if way == "sealed" else Path(name, "own.pt")
            torch.save(state, path)
            if way == "sealed":
                keeper.seal(number, {})
                keeper.prune(2)
            elif way == "forced":
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            return time.process_time() - began[0], time.perf_counter() - began[1]

        turns = in_turns({way: partial(turn, way) for way in ("sealed", "file", "forced")}, args.rounds or 9, warm=1)
    for what, peer, clock in (("CPU time", "file", 0), ("clock", "file", 1), ("clock", "forced", 1)):
        took = [[one[clock] for one in turns[way]] for way in ("sealed", peer)]
        (middle, low, high), label = ratio(*took), f"{what} of the {peer}"
        text = f"saves, {label}: {middle:.2f} ({low:.2f} to {high:.2f}) of {1e3 * statistics.median(took[1]):.0f} ms"
        is_met = told(peer == "forced" or middle <= MOST_OF_SAVES, text)
        found[label] = {"ratio": middle, "low": low, "high": high, "ok": is_met}
    return found


# --- a start

_TARGET = '''
import os, time
from pathlib import Path

from pydantic import BaseModel

from memfit.pipeline import Stage, Workload


def begin():
    """When the process started and now, in seconds since boot, and the KiB that it holds alone."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    held = sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Private_Dirty"))
    return now - ticks / os.sysconf("SC_CLK_TCK"), held


def fold(ctx, params):
    seconds, held = begin()
    if params.steps:
        import torch

        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    done, held = begin()
    return {"begins": seconds, "done": done, "private": held / 1024}


class Params(BaseModel):
    folds: int = 2
    steps: bool = False


FOLDS = Workload(Params, stages=(Stage("fold", fold, each="fold in params.folds"),))
'''


def _seconds(words: Sequence[str], folder: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(words, cwd=folder, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(folder)})
    return time.perf_counter() - begin


def part_starts(args: argparse.Namespace) -> dict[str, Any]:
    rounds, memfit = args.rounds or 5, [str(Path(sys.executable).with_name("memfit")), "run"]
    lines: list[tuple[object, ...]] = [("seconds", "the run", "fold begins", "fold done", "private MiB")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "starts.py").write_text(_TARGET)

        def turn(warm: str, steps: bool) -> list[float]:
            settings = ("--set", f"warm={warm}", "--set", f"params.steps={steps}")
            seconds = _seconds([*memfit, "starts:FOLDS", "--new", "--quiet", *settings], folder)
            run = max((folder / "runs").glob("*/run_*"), key=lambda path: path.stat().st_mtime)
            results = [json.loads(one.read_text())["result"] for one in run.glob("checkpoints/fold_*.json")]
            return [seconds, *(statistics.median(one[key] for one in results) for key in ("begins", "done", "private"))]

        for steps in (False, True):
            ways = {warm: lambda w=warm, s=steps: turn(w, s) for warm in ("auto", "never")}
            for warm, rows in in_turns(ways, rounds).items():
                middles = [f"{statistics.median(column):.3f}" for column in zip(*rows, strict=True)]
                lines.append((f"two folds, {'a step' if steps else 'nothing'}, warm: {warm}", *middles))
        # Each in a folder of its own: in one folder, a run waits for a second of its own for its name.
        bare = [_seconds([*memfit, "-q", "--runs-dir", f"bare_{n}", "--", "true"], folder) for n in range(rounds)]
    print_table(lines)
    print(f"memfit run -- true: best {min(bare):.3f} s, median {statistics.median(bare):.3f} s {interval(bare)}")
    return {"starts": {"folds": lines, "bare": bare, "ok": True}}


PARTS = {"step": part_step, "loops": part_loops, "ranks": part_ranks, "saves": part_saves, "starts": part_starts}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--part", choices=[*PARTS], action="append")
    options.add_argument("--rounds", type=int, help="rounds of each comparison (default: each part's own)")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--ranks", type=int, default=4)
    args = options.parse_args()
    found = {name: PARTS[name](args) for name in args.part or PARTS}
    write_json(args.json, found)
    return 0 if all(one["ok"] for part in found.values() for one in part.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
