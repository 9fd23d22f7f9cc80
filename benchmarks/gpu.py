"""What only a GPU can show: each part in processes of its own on the first GPU, and a table.

    python benchmarks/gpu.py [--part step] [--part estimate] [--json FILE]

Parts: ``devices`` (the budget and CUDA's context beside nvidia-smi), ``step`` (SafeStep against real out-of-memories),
``allocator`` (the model of torch's allocator beside it, request by request), ``estimate`` (estimates beside measured
peaks), ``resume`` (a training stopped and killed on the GPU), ``jobs`` (reservations that torch enforces, several jobs
on one GPU), ``folds`` (folds an hour side by side and one after the other), ``warm`` (folds that are forked, and folds
in new interpreters), ``frameworks`` (transformers, Lightning and Accelerate stopped, killed and resumed),
``cost`` (how often a safe step waits for the GPU), ``pace`` (an epoch's device use beside
nvidia-smi), ``trials`` (``memfit tune`` of the forecaster in bf16, side by side), ``rows`` (batches of 16,384 and
32,768 rows by accumulation). Nobody else may use the GPU meanwhile.
Exit status: 0 every check holds, 1 one does not, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_models import CASES, Encoder, loss_of
from memfit.training import KeyedDataset, KeyedSampler, SafeStep, Trainer, seed_everything

MIB, GIB = 1 << 20, 1 << 30
#: The most that an estimate may be off in the median, by figure, as in ``benchmarks/ground_truth.py``.
TARGETS = {"allocated": 0.03, "active": 0.03, "reserved": 0.07, "device": 0.10}
_HOLD = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Row:
    """A check: what was found, what it was held against, and whether it holds (None: a figure alone)."""

    part: str
    what: str
    found: str
    beside: str
    holds: bool | None = None


Rows = Iterator[Row]


def used_bytes(field: str = "used") -> int:
    """The GPU's memory by nvidia-smi."""
    words = ["nvidia-smi", "-i", "0", f"--query-gpu=memory.{field}", "--format=csv,noheader,nounits"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout) * MIB


def mib(num_bytes: float) -> str:
    """Bytes in MiB."""
    return f"{num_bytes / MIB:,.0f} MiB"


@contextlib.contextmanager
def stranger(num_bytes: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds so much of the GPU."""
    words = [sys.executable, "-c", _HOLD, str(num_bytes)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            if process.stdout.readline() != "held\n":
                raise RuntimeError("the other process could not take its memory")
            yield process
        finally:
            process.stdin.close()


def devices() -> Rows:
    """The budget beside nvidia-smi with a stranger on the GPU; CUDA's context by what was used so far."""
    with stranger(3 * GIB) as other:
        words = [sys.executable, "-m", "memfit", "budget", "--json"]
        told = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)["devices"][0]
        total, used, free = (used_bytes(field) for field in ("total", "used", "free"))
        yield Row("devices", "total", mib(told["total_bytes"]), mib(total), abs(told["total_bytes"] - total) < 2 * MIB)
        yield Row("devices", "free", mib(told["free_bytes"]), mib(free), abs(told["free_bytes"] - free) < 16 * MIB)
        holds = any((one["used_bytes"] or 0) >= 3 * GIB for one in told["processes"])
        yield Row("devices", "a stranger's 3 GiB", str(told["processes"])[:90], f"pid {other.pid}", holds)
        yield Row("devices", "foreign", mib(told["foreign_bytes"]), mib(used), told["foreign_bytes"] >= 3 * GIB)
    yield from _visible()
    before = used_bytes()
    torch.empty(1, device="cuda")
    steps: dict[str, Callable[[], object]] = {
        "context": lambda: None,
        "with cuBLAS": lambda: torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda"),
        "with cuDNN": lambda: torch.nn.Conv2d(3, 8, 3, device="cuda")(torch.randn(2, 3, 32, 32, device="cuda")),
    }
    for name, step in steps.items():
        step()
        torch.cuda.synchronize()
        size = used_bytes() - before - torch.cuda.memory_reserved()
        yield Row("devices", f"outside of torch's allocator: {name}", mib(size), "614 to 1,228 MiB", size < 1228 * MIB)


def _memfit_json(*words: str, **env: str) -> Any:
    """What a command of memfit prints as JSON."""
    command = [sys.executable, "-m", "memfit", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
    if done.returncode not in (0, 3):
        raise RuntimeError(f"exit {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)


def _visible() -> Rows:
    """CUDA_VISIBLE_DEVICES as the budget and as torch read it, and the GPU that an estimate is for."""
    words = ["nvidia-smi", "-i", "0", "--query-gpu=uuid,name", "--format=csv,noheader"]
    uuid, name = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    for visible in ("", "0", "1", "0,1", "1,0", "-1", "0,-1", uuid, uuid[:12], "GPU-nothing"):
        env = {"CUDA_VISIBLE_DEVICES": visible}
        mine = len(_memfit_json("budget", **env)["devices"])
        real = int(subprocess.run(count, capture_output=True, text=True, env=os.environ | env).stdout)
        yield Row("devices", f"CUDA_VISIBLE_DEVICES={visible[:14]!r}: GPUs", str(mine), f"torch {real}", mine == real)
    config = {"model_type": "gpt2", "n_layer": 4, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    with tempfile.TemporaryDirectory() as folder, stranger(20 * GIB):
        (Path(folder) / "config.json").write_text(json.dumps(config))
        found = _memfit_json("estimate", "--hf-config", folder, "--formula")
        free = used_bytes("free")
    told = (found["gpu"] or {}).get("total_bytes", 0)
    holds = abs(told - free) < 1 * GIB
    yield Row("devices", "estimate without --gpu, 20 GiB in use", mib(told), f"{name}, {mib(free)} free", holds)


def squared_error(model: Any, batch: Any) -> tuple[torch.Tensor, float]:
    """The summed loss and its weight."""
    x, y = batch
    return (model(x) - y).square().sum(), float(y.numel())


def _digest(model: torch.nn.Module) -> str:
    total = hashlib.sha256()
    for value in model.state_dict().values():
        total.update(value.detach().cpu().numpy().tobytes())
    return total.hexdigest()[:12]


@dataclass(frozen=True)
class Taken:
    """Two steps: their weights, the peak that torch reserved, what tensors held at the end, and the outcomes."""

    weights: str
    reserved: int
    held: int
    sizes: tuple[int, ...]
    num_ooms: int


def _two_steps(*sizes: int | str) -> Taken:
    """Make two steps, with these microbatch sizes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seed_everything(0)
    model = Encoder().cuda()
    batch = torch.randn(256, 256, 512, device="cuda"), torch.randn(256, 256, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step: Any = None
    found, num_ooms = [], 0
    for size in sizes:
        if step is None or size != "auto":
            step = SafeStep(model, optimizer, squared_error, microbatch_size=size, max_grad_norm=1.0)  # type: ignore[arg-type]
        outcome = step(batch)
        found.append(outcome.microbatch_size)
        num_ooms += outcome.num_ooms
    torch.cuda.synchronize()
    peak, held = torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
    return Taken(_digest(model), peak, held, tuple(found), num_ooms)


def safe_step() -> Rows:
    """Out-of-memories in forward, backward, update and validation: by torch's fraction, and by a full device."""
    torch.use_deterministic_algorithms(True)  # else attention adds up gradients in any order
    total = torch.cuda.get_device_properties(0).total_memory
    by_size = {size: _two_steps(size, size) for size in (256, 128, 64, 32)}
    for size, taken in by_size.items():
        yield Row("step", f"never out of memory, {size} of 256 at once", mib(taken.reserved), taken.weights)
    again = {size: _two_steps(size, size).weights for size in by_size}
    same = sum(again[size] == taken.weights for size, taken in by_size.items())
    yield Row("step", "the same steps once more", f"the same weights at {same} of {len(again)} sizes", "", same == 4)
    for size in (128, 64, 32):
        room = (by_size[size].reserved + by_size[2 * size].reserved) // 2
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(room / total)
        found = _two_steps("auto", "auto")
        torch.cuda.set_per_process_memory_fraction(1.0)
        yield from _compare(f"fraction for {mib(room)}", found)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        with stranger(free + torch.cuda.memory_reserved() - room - 700 * MIB):
            how = f"a stranger leaves {mib(torch.cuda.mem_get_info()[0])}"
            found = _two_steps("auto", "auto")
        yield from _compare(how, found)
    yield from _retries(total, by_size[128].reserved)
    yield from _update(total)
    yield from _validation(total)


def _compare(how: str, found: Taken) -> Rows:
    """Set two steps that ran out of memory beside two that had their last sizes from the start."""
    same = _two_steps(*found.sizes)
    text = f"{found.num_ooms} out of memory, {found.sizes} at once, weights {found.weights}"
    holds = found.num_ooms > 0 and same.num_ooms == 0 and same.weights == found.weights
    yield Row("step", how, text, same.weights, holds)
    yield Row("step", f"{how}: held after it", mib(found.held), mib(same.held), found.held == same.held)


def _retries(total: int, room: int) -> Rows:
    """Batches whose lengths differ: the allocator empties its caches and tries again before it is out of memory."""
    torch.cuda.empty_cache()
    seed_everything(0)
    torch.cuda.set_per_process_memory_fraction(room / total)
    model = Encoder().cuda()
    step = SafeStep(model, torch.optim.AdamW(model.parameters(), lr=1e-4), squared_error, max_grad_norm=1.0)
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    found, num_ooms = [], 0
    for length in (256, 96, 224, 128, 248, 64, 232, 160, 256, 200, 256, 104, 256):
        batch = torch.randn(128, length, 512, device="cuda"), torch.randn(128, length, 512, device="cuda")
        outcome = step(batch)
        retries = torch.cuda.memory_stats()["num_alloc_retries"] - before
        found.append((outcome.microbatch_size, retries))
        num_ooms += outcome.num_ooms
        if num_ooms:
            break
    torch.cuda.set_per_process_memory_fraction(1.0)
    smaller = any(size < 128 for size, _ in found)
    text = f"(microbatch, retries so far) {found}, {num_ooms} out of memory"
    yield Row("step", f"128 of several lengths in {mib(room)}", text, "smaller before the first failure", smaller)


def _update(total: int) -> Rows:
    """An update that does not fit: the optimizer's states, or its temporaries."""
    for room in (int(2.5 * GIB), int(3.6 * GIB), int(6.0 * GIB)):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(room / total)
        seed_everything(0)
        try:
            model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(12))).cuda()
            before = _digest(model)
            step = SafeStep(model, torch.optim.AdamW(model.parameters()), squared_error)
            batch = torch.randn(64, 4096, device="cuda"), torch.randn(64, 4096, device="cuda")
            try:
                outcome = step(batch)
                ended = f"went through, {outcome.num_ooms} out of memory"
                holds = _digest(model) != before
            except Exception as error:
                ended = f"{type(error).__name__}: {error}".split("\n")[0][:160]
                holds = type(error).__module__.startswith("memfit") and _digest(model) == before
        finally:
            model = step = batch = None  # type: ignore[assignment]
            torch.cuda.set_per_process_memory_fraction(1.0)
        yield Row(
            "step", f"update of 201 million weights in {mib(room)}", ended, "through, or weights as before", holds
        )


def _validation(total: int) -> Rows:
    """A validation whose batches are larger than those of the training."""
    found: list[float | str] = []
    seed_everything(3)
    train = [(torch.randn(16, 256, 512), torch.randn(16, 256, 512)) for _ in range(4)]
    valid = [(torch.randn(1024, 256, 512), torch.randn(1024, 256, 512))]
    for room in (None, 3 * GIB):
        torch.cuda.empty_cache()
        if room:
            torch.cuda.set_per_process_memory_fraction(room / total)
        seed_everything(0)
        model = Encoder()
        trainer = Trainer(model, loss=squared_error, device="cuda", optimizer=None)
        try:
            last = trainer.fit(train, valid, num_epochs=1, preflight=False).history[-1]
            found.append((last.metrics or {})["valid_loss"])
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}"[:150])
        torch.cuda.set_per_process_memory_fraction(1.0)
        del trainer, model
    whole, split = found
    holds = isinstance(whole, float) and isinstance(split, float) and abs(split / whole - 1) < 1e-5
    yield Row("step", "validation of 1024 at once in 3 GiB", f"loss {split}", f"with all memory {whole}", holds)


def allocator() -> Rows:
    """3,000 requests and releases of random sizes, and each time what torch's allocator holds and reserves."""
    from memfit.estimation import Allocator, AllocatorSettings

    text = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    mine = Allocator(AllocatorSettings.parse(text))
    draw, tensors, different = random.Random(0), dict[int, torch.Tensor](), 0
    differ_held = 0
    torch.empty(1, device="cuda")
    torch.cuda.empty_cache()
    start = torch.cuda.memory_stats()
    worst = 0
    for number in range(3000):
        if tensors and (draw.random() < 0.45 or sum(map(len, tensors.values())) > 12 * GIB):
            chosen = draw.choice(sorted(tensors))
            del tensors[chosen]
            mine.free(chosen)
        elif number % 500 == 499:
            torch.cuda.empty_cache()
            mine.release()
        else:
            size = int(2 ** draw.uniform(6, 29))
            tensors[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
            mine.allocate(number, size)
        now = torch.cuda.memory_stats()
        held, reserved = (
            now[f"{name}_bytes.all.current"] - start[f"{name}_bytes.all.current"] for name in ("allocated", "reserved")
        )
        differ_held += held != mine.allocated_bytes
        off = abs(reserved - mine.reserved_bytes)
        different += bool(off)
        worst = max(worst, off)
    found = f"held differs at {differ_held} of 3000 moments, reserved at {different}, by {mib(worst)} at most"
    # Blocks of one size are taken by their address, which only cudaMalloc knows: small segments may differ.
    holds = not differ_held and worst <= 4 * MIB
    yield Row("allocator", text or "torch's defaults", found, f"reserves {mib(reserved)} at the end", holds)


def trace(name: str) -> dict[str, Any]:
    """The estimate of a case, without the GPU."""
    from memfit.estimation import estimate

    case = next(one for one in CASES if one.name == name)
    started = time.monotonic()
    found = estimate(case.build, case.batch(), loss=loss_of, setup=case.setup, gpu=_gpu_name())
    return {**found.to_dict(), "seconds": time.monotonic() - started}


def _gpu_name() -> str:
    return "H200" if "H200" in os.environ.get("BENCH_GPU", "") else "H100-80GB"


def measure(name: str) -> dict[str, float]:
    """The peaks of three training steps of a case."""
    case = next(one for one in CASES if one.name == name)
    before = used_bytes()
    dtype = torch.bfloat16 if case.setup.dtype == "bf16" else torch.float32
    model = case.build().to(device="cuda", dtype=dtype).train()
    batch: Any = case.batch()
    is_named = isinstance(batch, dict)
    batch = {key: value.cuda() for key, value in batch.items()} if is_named else batch.to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=case.setup.dtype == "bf16-amp"):
            loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "active": torch.cuda.memory_stats()["active_bytes.all.peak"],
        "reserved": torch.cuda.max_memory_reserved(),
        "device": used_bytes() - before,
    }


def _child(option: str, name: str, **env: str) -> Any:
    words = [sys.executable, __file__, option, name]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=os.environ | env)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().split("\n")[-1][:200])
    return json.loads(done.stdout.strip().split("\n")[-1])


def estimates() -> Rows:
    """Each case traced on the CPU and measured on the GPU."""
    wanted = os.environ.get("BENCH_ONLY", "").split(",")
    cases = [case for case in CASES if any(text in case.name for text in wanted)]
    errors: dict[str, list[float]] = {figure: [] for figure in TARGETS}
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 2)) as pool:
        hidden = {"CUDA_VISIBLE_DEVICES": "", "BENCH_GPU": torch.cuda.get_device_name(0), "OMP_NUM_THREADS": "1"}
        traced = {case.name: pool.submit(_child, "--trace", case.name, **hidden) for case in cases}
        for case in cases:
            try:
                real, found = _child("--measure", case.name), traced[case.name].result()
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                yield Row("estimate", case.name, str(error), "", False)
                continue
            texts, holds = [], True
            for figure in TARGETS:
                one = found["device"][f"{figure}_bytes"]
                off = one["value"] / real[figure] - 1
                errors[figure].append(abs(off))
                texts.append(f"{figure} {off:+.1%}")
                holds &= real[figure] <= one["upper"]
            upper = found["device"]["device_bytes"]["upper"] / real["device"] - 1
            beside = f"{real['allocated'] / GIB:.2f}, {real['reserved'] / GIB:.2f}, {real['device'] / GIB:.2f} GiB"
            texts.append(f"bound {upper:+.0%} ({found['seconds']:.0f} s)")
            yield Row("estimate", case.name, ", ".join(texts), beside, holds)
    for figure, most in TARGETS.items():
        if errors[figure]:
            middle = statistics.median(errors[figure])
            text = f"{middle:.1%}, largest {max(errors[figure]):.1%}"
            yield Row(
                "estimate", f"{figure}: median error of {len(errors[figure])}", text, f"{most:.0%}", middle <= most
            )


class _Noise(torch.utils.data.Dataset[Any]):
    """Inputs that are drawn at random in the workers."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64, 512), float(index)) / 512 + 0.1 * torch.randn(64, 512)


def training(folder: str) -> dict[str, Any]:
    """A training that ends itself at the step that ``BENCH_END`` names, with the signal that it names."""
    torch.use_deterministic_algorithms(True)
    end, number = os.environ.get("BENCH_END", ""), int(os.environ.get("BENCH_SIGNAL", "15"))
    precision: Any = os.environ["BENCH_PRECISION"]
    num_losses = 0

    def loss(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        nonlocal num_losses
        num_losses += 1
        if end and num_losses == int(end):
            os.kill(os.getpid(), number)
        return (model(x) - x).float().square().sum(), float(x.numel())

    seed_everything(1)
    model, data = Encoder(), KeyedDataset(_Noise(), seed=1)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=32, sampler=KeyedSampler(data, seed=1), num_workers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trainer = Trainer(
        model, loss=loss, optimizer=optimizer, device="cuda", precision=precision, seed=1, max_grad_norm=1.0,
        checkpoint_dir=Path(folder) / "checkpoints",
    )  # fmt: skip
    trainer.fit(loader, num_epochs=3, preflight=False)
    return {"weights": _digest(model), "steps": num_losses}


def resume() -> Rows:
    """A training of 48 steps that is stopped in its first epoch and killed in its third, beside an unbroken one."""
    for precision in ("float32", "bf16-mixed", "fp16-mixed"):
        env = {"BENCH_PRECISION": precision, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(1) as pool:
            whole = pool.submit(_child, "--training", f"{work}/whole", **env)
            codes = []
            for end, number in (("7", signal.SIGTERM), ("30", signal.SIGKILL)):
                words = [sys.executable, __file__, "--training", f"{work}/broken"]
                more = os.environ | env | {"BENCH_END": end, "BENCH_SIGNAL": str(int(number))}
                codes.append(subprocess.run(words, capture_output=True, timeout=200, env=more).returncode)
            last = _child("--training", f"{work}/broken", **env)
            expected = whole.result()
        text = f"weights {last['weights']} after {codes} and {last['steps']} more steps"
        holds = last["weights"] == expected["weights"] and codes == [75, -9]
        yield Row("resume", f"stopped and killed, {precision}", text, expected["weights"], holds)


_STEPS = 8  # of an epoch: 64 samples in batches of 4, two of which are a step


def _all_bytes(*states: Any) -> str:
    """The SHA-256 of states: tensors by their bytes, the rest by its text."""
    total = hashlib.sha256()
    for one in torch.utils._pytree.tree_leaves(list(states)):
        is_tensor = isinstance(one, torch.Tensor)
        total.update(one.detach().cpu().contiguous().numpy().tobytes() if is_tensor else repr(one).encode())
    return total.hexdigest()


class _Few(_Noise):
    def __len__(self) -> int:
        return 8 * _STEPS


def _end_at(step: int) -> None:
    """End this process at the step that ``BENCH_END`` names, with the signal that it names."""
    if os.environ.get("BENCH_END") == str(step):
        os.environ.pop("BENCH_END")
        os.kill(os.getpid(), int(os.environ["BENCH_SIGNAL"]))


def _masked(items: Any) -> Any:
    words = torch.stack(items)
    hidden = torch.rand(words.shape) < 0.3
    return {"input_ids": words.masked_fill(hidden, 4), "labels": words.masked_fill(~hidden, -100)}


def _in_transformers(folder: str, precision: str) -> tuple[Any, ...]:
    import transformers

    from memfit.integrations.huggingface import exact

    class End(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _end_at(state.global_step)

    sizes = {"vocab_size": 400, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: Any = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=256))  # type: ignore[arg-type]
    how: dict[str, Any] = {"fp16": precision == "fp16", "bf16": precision == "bf16", "full_determinism": False}
    args = transformers.TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=3, save_steps=3,
        learning_rate=1e-3, report_to="none", disable_tqdm=True, dataloader_num_workers=2, **how,
    )  # fmt: skip
    words: Any = list(torch.randint(5, 400, (8 * _STEPS, 64), generator=torch.Generator().manual_seed(0)))
    trainer: Any = transformers.Trainer(model, args, train_dataset=words, data_collator=_masked, callbacks=[End()])
    exact(trainer)
    trainer.train()
    return trainer.model, trainer.optimizer, trainer.accelerator.scaler, trainer.state.global_step


def _in_lightning(folder: str, precision: str) -> tuple[Any, ...]:
    import lightning.pytorch as pl

    from memfit.integrations.lightning import Exact

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(Encoder(), torch.nn.Dropout(0.2))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            _end_at(self.trainer.global_step)
            loss: torch.Tensor = (self.net(batch) - batch).float().square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    names: dict[str, Any] = {"float32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
    trainer: Any = pl.Trainer(
        accelerator="gpu", devices=1, precision=names[precision], max_epochs=3, accumulate_grad_batches=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module = Module()
    loader: Any = torch.utils.data.DataLoader(_Few(), batch_size=4, shuffle=True, num_workers=2)
    Exact(folder, seed=1, every=3).fit(trainer, module, loader)
    return module, trainer.optimizers[0], getattr(trainer.precision_plugin, "scaler", None), trainer.global_step


def _in_accelerate(folder: str, precision: str) -> tuple[Any, ...]:
    import accelerate

    from memfit.integrations.accelerate import Exact

    names = {"float32": "no", "bf16": "bf16", "fp16": "fp16"}
    accelerator: Any = accelerate.Accelerator(mixed_precision=names[precision], gradient_accumulation_steps=2)
    model: Any = torch.nn.Sequential(Encoder(), torch.nn.Dropout(0.2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    exact = Exact(accelerator, folder, seed=1, every=3)
    loader: Any = exact.loader(torch.utils.data.DataLoader(_Few(), batch_size=4, shuffle=True, num_workers=2))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with exact:
        for epoch in exact.epochs(3):
            for batch in exact.batches(loader):
                if exact.batch % 2:
                    _end_at(epoch * _STEPS + exact.batch // 2)
                with accelerator.accumulate(model):
                    loss = (model(batch) - batch).float().square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                exact.log(loss)
    return accelerator.unwrap_model(model), optimizer.optimizer, accelerator.scaler, 3 * _STEPS


def framework(folder: str) -> dict[str, Any]:
    """A training in a framework: what it leaves."""
    import importlib.metadata

    torch.use_deterministic_algorithms(True)
    seed_everything(1)
    name, precision = os.environ["BENCH_FRAMEWORK"], os.environ["BENCH_PRECISION"]
    calls = {"transformers": _in_transformers, "lightning": _in_lightning, "accelerate": _in_accelerate}
    model, optimizer, scaler, num_steps = calls[name](folder, precision)
    at = {str(one.device) for one in model.parameters()}
    scale = scaler.state_dict() if scaler is not None else {}
    weights, all_of_it = _all_bytes(model.state_dict()), _all_bytes(optimizer.state_dict(), scale)
    version = importlib.metadata.version(name)
    kept = {"weights": weights, "optimizer": all_of_it, "scale": scale.get("scale"), "devices": sorted(at)}
    return kept | {"steps": num_steps, "version": version}


def _broken(name: str, precision: str, number: signal.Signals) -> Row:
    """An unbroken training beside one that is stopped or killed in the middle of its second epoch."""
    more = {"BENCH_FRAMEWORK": name, "BENCH_PRECISION": precision, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    env = os.environ | more
    with tempfile.TemporaryDirectory() as work:
        whole, part = [sys.executable, __file__, "--framework", f"{work}/whole"], f"{work}/part"
        ends = env | {"BENCH_END": str(_STEPS + 4), "BENCH_SIGNAL": str(int(number))}
        found, codes = [], []
        for words, given in ((whole, env), ([*whole[:-1], part], ends), ([*whole[:-1], part], env)):
            done = subprocess.run(words, capture_output=True, text=True, timeout=150, env=given)
            codes.append(done.returncode)
            found.append(json.loads(done.stdout.strip().split("\n")[-1]) if not done.returncode else {})
            goes_on = re.search(r"goes on[^\n(]*", done.stderr + done.stdout)
            if done.returncode not in (0, 75, -9):
                sys.stderr.write(f"--- {name}, {precision}, {number.name}, exit {done.returncode}:\n{done.stderr}\n")
    keys = ("weights", "optimizer")
    text = f"{[str(found[2].get(key))[:12] for key in keys]}, exits {codes}, {(goes_on or [''])[0].strip()}"
    beside = (
        f"{[str(found[0].get(key))[:12] for key in keys]}, scale {found[0].get('scale')}, {found[0].get('devices')}"
    )
    holds = codes == [0, 75 if number == signal.SIGTERM else -9, 0] and found[0] == found[2]
    return Row("frameworks", f"{name} {found[0].get('version')}, {precision}, {number.name}", text, beside, holds)


def frameworks() -> Rows:
    """Trainings in three frameworks, in float32, bf16 and fp16, ended in mid-epoch and resumed in a new process."""
    cases = [
        (name, precision, number)
        for number in (signal.SIGTERM, signal.SIGKILL)
        for precision in ("fp16", "float32", "bf16")
        for name in ("transformers", "lightning", "accelerate")
    ]
    with ThreadPoolExecutor(6) as pool:
        yield from pool.map(lambda one: _broken(*one), cases)


_GREEDY = """
import sys, time, torch
size = int(float(sys.argv[1]) * 2**30)
held = [torch.empty(size // 8, dtype=torch.uint8, device="cuda") for _ in range(8)]
print(torch.cuda.max_memory_reserved(), flush=True)
time.sleep(float(sys.argv[2]))
"""


def _map(work: Path, name: str, sizes: str, seconds: int, *more: str) -> tuple[int, str, Path]:
    """Run a command that takes so many GiB for each of some sizes."""
    program = work / "take.py"
    program.write_text(_GREEDY)
    words = [sys.executable, "-m", "memfit", "run", "--num-gpus", "1", "--runs-dir", str(work), "--name", name, *more]
    words += ["--param", f"size={sizes}", "--", sys.executable, str(program), "{size}", str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    found = sorted(work.glob(f"{name}/run_*"))
    if not found:
        raise RuntimeError(f"exit {done.returncode}: {done.stdout[-300:]} {done.stderr[-600:]}")
    return done.returncode, done.stdout, found[-1]


def jobs() -> Rows:
    """Commands on one GPU: one that takes more than it reserved, and ten whose peaks are not known."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        code, said, run = _map(work, "greedy", "24", 5, "--gpu-memory", "3GiB")
        logs = "".join(path.read_text() for path in run.rglob("err*.log"))
        refused = re.search(r"OutOfMemoryError.*", logs)
        again = next((line.strip()[:110] for line in said.split("\n") if "restarts" in line), said[-200:])
        holds = bool(refused) and not code
        yield Row("jobs", "24 GiB with 3 GiB reserved", f"exit {code}; {again}", (refused or [""])[0][:80], holds)
        code, said, run = _map(work, "many", "12,12.1,12.2,12.3,12.4,12.5,12.6,12.7,12.8,12.9", 6)
        yield _concurrency(run, "jobs", "ten of 12 to 13 GiB", code)
        first = min(run.glob("jobs/*/outcome*.json"))
        peak = max((json.loads(first.read_text())["footprint"]["device_bytes"] or {"": 0}).values())
        reserved = int((first.parent / "out.log").read_text().split()[0])
        text, beside = f"{mib(peak)}, context {mib(peak - reserved)}", f"torch reserved {mib(reserved)}"
        yield Row("jobs", "device memory of the first job", text, beside, 400 * MIB < peak - reserved < 800 * MIB)


def _concurrency(run: Path, part: str, what: str, code: int) -> Row:
    """How many jobs of a run were on the GPU at once, and how many ran out of memory."""
    outcomes = [json.loads(path.read_text()) for path in run.glob("jobs/*/outcome*.json")]
    spans = [(one["started"], one["ended"]) for one in outcomes if one.get("started")]
    most = max((sum(start <= at < end for start, end in spans) for at, _ in spans), default=0)
    ooms = sum(one.get("state") == "out_of_memory" for one in outcomes)
    states = {str(one.get("state")) for one in outcomes}
    text = f"{most} at once at most, {len(outcomes)} ends, {ooms} out of memory, {sorted(states)}"
    return Row(part, what, text, f"exit {code}", code == 0 and not ooms and most > 1)


def _ended(run: Path, pattern: str = "*") -> dict[str, dict[str, Any]]:
    """The last outcome of each job of a run that was started, by the job's name."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(run.glob(f"jobs/{pattern}/outcome*.json"), key=lambda one: one.stat().st_mtime):
        found[path.parent.name] = json.loads(path.read_text())
    return {name: one for name, one in found.items() if one.get("started") and one.get("ended")}


def _span(ended: dict[str, dict[str, Any]]) -> float:
    """The seconds from the first start to the last end."""
    return float(max(one["ended"] for one in ended.values()) - min(one["started"] for one in ended.values()))


def folds() -> Rows:
    """The folds of a forecaster on one GPU: one after the other, and as many at once as memfit admits."""
    kinds = {"small": (128, 2048, 3), "large": (512, 8192, 2)}
    with tempfile.TemporaryDirectory() as work:
        for kind, (width, batch, num_epochs) in kinds.items():
            params = {
                "train": {"num_epochs": num_epochs, "batch_size": batch, "precision": "bf16-mixed"},
                "splits": {"n_splits": 8, "embargo_size": 20},
                "model": {"hidden_size": width, "num_layers": 3, "num_heads": 4, "dropout": 0.2},
            }
            spans, ended = dict[str, float](), dict[str, dict[str, dict[str, Any]]]()
            for how, most in (("alone", 1), ("beside", "auto")):
                code, _, run = _forecast(Path(work), "run", f"{kind}-{how}", params, max_parallel=most)
                ended[how] = _ended(run, "fold*")
                spans[how] = _span(ended[how])
                rate = len(ended[how]) * 3600 / spans[how]
                peaks = [
                    max((one["footprint"] or {})["device_bytes"].values(), default=0) for one in ended[how].values()
                ]
                text = f"{rate:.0f} folds an hour, {len(ended[how])} in {spans[how]:.1f} s, peak {mib(max(peaks))}"
                yield Row("folds", f"{kind}, {how}", text, f"exit {code}", code == 0)
            times = {how: {name: one["ended"] - one["started"] for name, one in ended[how].items()} for how in ended}
            names = sorted(times["alone"].keys() & times["beside"].keys())
            slower = [times["beside"][name] / times["alone"][name] for name in names]
            text = f"{spans['alone'] / spans['beside']:.2f} x the folds an hour"
            each = ", ".join(f"{one:.2f}" for one in slower)
            yield Row("folds", f"{kind}, side by side", text, f"each fold takes {each} x its time alone")


_FORKED = """
import os, time
from pathlib import Path

from pydantic import BaseModel

from memfit.pipeline import Stage, Workload


def step(ctx, params):
    began = time.time()
    has_driver = "libcuda.so" in Path("/proc/self/maps").read_text()
    import torch

    loaded = time.time()
    model = torch.nn.Linear(64, 64).cuda()
    on_gpu = time.time()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    stepped = time.time()
    held = [torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(4 * params.gib)]
    return {
        "began": began, "loaded": loaded, "on_gpu": on_gpu, "stepped": stepped, "has_driver": has_driver,
        "setting": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""), "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_reserved(),
    }


class Params(BaseModel):
    folds: int = 8
    gib: int = 0


WORKLOAD = Workload(Params, stages=(Stage("fold", step, each="fold in params.folds"),))
"""


def _fork(work: Path, *settings: str) -> tuple[float, int, str, Path]:
    """Run folds that make one step each; return the run's seconds, exit code, what it said, and its folder."""
    runs = work / f"runs_{len(list(work.iterdir()))}"
    words = [sys.executable, "-m", "memfit", "run", "forked:WORKLOAD", "--new", "--runs-dir", str(runs)]
    for one in ("memory.num_gpus=1", *settings):
        words += ["--set", one]
    path = os.pathsep.join([str(work), os.environ.get("PYTHONPATH", "")])
    start = time.monotonic()
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=150, cwd=work, env=os.environ | {"PYTHONPATH": path}
    )
    seconds = time.monotonic() - start
    found = sorted(runs.glob("*/run_*"))
    if not found:
        raise RuntimeError(f"exit {done.returncode}: {done.stdout[-600:]} {done.stderr[-900:]}")
    return seconds, done.returncode, done.stdout + done.stderr, found[-1]


def warm() -> Rows:
    """Folds that are forked from a process with torch, and folds in new interpreters: their first step on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "forked.py").write_text(_FORKED)
        for most in ("max_parallel=1", "memory.gpu_job=2GiB"):
            for how in ("never", "auto", "never", "auto"):
                seconds, code, said, run = _fork(work, most, f"warm={how}")
                ended = _ended(run)
                results = [json.loads(one.read_text())["result"] for one in sorted(run.glob("checkpoints/fold_*.json"))]
                if code:
                    for path in sorted(run.glob("jobs/*/*")):
                        if path.name.startswith(("err", "outcome")):
                            sys.stderr.write(f"--- {path.parent.name}/{path.name}\n{path.read_text()[-1500:]}\n")
                if len(results) != len(ended) or not results:
                    yield Row("warm", f"warm: {how}, {most}", said[-400:], f"exit {code}", False)
                    continue
                starts = [one["started"] for _, one in sorted(ended.items())]
                parts = []
                for key in ("began", "loaded", "on_gpu", "stepped"):
                    middle = statistics.median(one[key] - at for one, at in zip(results, starts, strict=True))
                    parts.append(f"{key} {middle:.2f} s")
                num_forked = sum((one.get("evidence") or {}).get("start") == "warm" for one in ended.values())
                span = _span(ended)
                text = f"{len(ended) * 3600 / span:.0f} folds an hour, run {seconds:.1f} s, {', '.join(parts)}"
                drivers = sum(one["has_driver"] for one in results)
                wanted = len(ended) if how == "auto" else 0
                beside = f"{num_forked} of {len(ended)} forked, {drivers} with the driver loaded at their first line"
                why = [line for line in said.splitlines() if "new interpreters" in line]
                holds = code == 0 and num_forked == wanted and not drivers
                yield Row("warm", f"warm: {how}, {most}", text, "; ".join([beside, *why])[:300], holds)
        for how in ("never", "auto"):
            _, code, said, run = _fork(work, f"warm={how}", "memory.gpu_job=3GiB", "params.gib=24", "params.folds=1")
            logs = "".join(path.read_text() for path in run.rglob("*.log"))
            refused = re.search(r"OutOfMemoryError.*", logs)
            results = [json.loads(one.read_text())["result"] for one in sorted(run.glob("checkpoints/fold_*.json"))]
            last = {key: results[0][key] for key in ("setting", "peak")} if results else said[-300:]
            text = f"exit {code}, {(refused or ['not refused'])[0][:90]}"
            yield Row("warm", f"24 GiB with 3 GiB reserved, {how}", text, str(last), bool(refused) and not code)


def cost() -> Rows:
    """How often a step waits for the GPU, by torch's own count: a plain one and a safe one."""
    import warnings

    from overhead import CASES as MODELS
    from overhead import make_steps

    for case in MODELS:
        plain, safe, batch = make_steps(case, torch.device("cuda"))
        counts = {}
        for name, step in (("plain", plain), ("safe", safe)):
            for _ in range(3):
                step(batch)
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                step(batch)
                torch.cuda.set_sync_debug_mode("default")
            counts[name] = sum("synchroniz" in str(one.message) for one in said)
        yield Row(
            "cost", f"waits for the GPU, {case.name}", f"{counts['safe']} in a safe step", f"plain {counts['plain']}"
        )
        del plain, safe, batch
        torch.cuda.empty_cache()


def pace() -> Rows:
    """The device use of an epoch that keeps the GPU busy, and of one that waits for its data."""
    for name, wait in (("busy", 0.0), ("waits for data", 0.05)):
        seed_everything(0)
        batch = torch.randn(128, 256, 512, device="cuda"), torch.randn(128, 256, 512, device="cuda")

        shares: list[int] = []
        done = threading.Event()

        def sample(shares: list[int] = shares, done: threading.Event = done) -> None:
            words = ["nvidia-smi", "-i", "0", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
            while not done.wait(0.3):
                shares.append(int(subprocess.run(words, capture_output=True, text=True).stdout or 0))

        model = Encoder()
        trainer = Trainer(model, loss=squared_error, device="cuda", microbatch_size=None)
        watcher = threading.Thread(target=sample)
        watcher.start()
        last = trainer.fit(_Slow(batch, wait), num_epochs=1, preflight=False).history[-1]
        done.set()
        watcher.join()
        other, use = statistics.mean(shares[1:]) / 100, last.device_use
        text = f"{use}, waits {last.wait_share}"
        yield Row(
            "pace", f"device use, {name}", text, f"nvidia-smi {other:.2f}", use is not None and abs(use - other) < 0.15
        )


class _Slow:
    """One batch again and again, each time after a wait."""

    def __init__(self, batch: Any, wait: float) -> None:
        self.batch, self.wait = batch, wait

    def __len__(self) -> int:
        return 90

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            time.sleep(self.wait)
            yield self.batch


_FORECASTER = {
    "schema_version": 1,
    "target": "memfit_workloads.forecaster.stages:FORECASTER",
    "seed": 42,
    "memory": {"num_gpus": 1},
}


_MOST_SECONDS = 240


def _forecast(work: Path, verb: str, name: str, params: dict[str, Any], **more: Any) -> tuple[int, str, Path]:
    config = work / f"{name}.json"
    data = {"source": "generated", "num_dates": 320, "num_assets": 1024, "num_features": 16, "lookback": 20}
    base = {
        "data": data, "splits": {"n_splits": 2, "embargo_size": 20}, "graph": {"neighbours": 10, "window": 60},
        "model": {"hidden_size": 512, "num_layers": 4, "num_heads": 4, "dropout": 0.2},
    }  # fmt: skip
    content = _FORECASTER | {"experiment": name, "runs_dir": str(work / "runs"), "params": base | params} | more
    config.write_text(json.dumps(content))
    until = ["--until", "fold"] if verb == "run" else []
    words = [sys.executable, "-m", "memfit", verb, str(config), *until]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=work) as process:
        try:
            said, _ = process.communicate(timeout=_MOST_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
    if process.returncode:
        sys.stderr.write(said[-3000:])
    return process.returncode, said, next((work / "runs" / name).glob("run_*"))


def trials() -> Rows:
    """The field report's space in bf16, as many trials side by side as the measured device memory allows."""
    train = {
        "num_epochs": 2, "batch_size": 8192, "optimizer": "adabelief", "schedule": "warm_restarts", "cycles": 2,
        "precision": "bf16-mixed",
    }  # fmt: skip
    space = [
        {"name": "params.train.learning_rate", "low": 1e-5, "high": 1e-3, "log": True},
        {"name": "params.train.batch_size", "choices": [2048, 4096, 8192]},
        {"name": "params.model.hidden_size", "choices": [256, 384, 512]},
        {"name": "params.model.dropout", "low": 0.1, "high": 0.4},
        {"name": "params.model.num_layers", "low": 2, "high": 4},
    ]
    tune = {
        "space": space, "objective": "fold.valid_rank_ic", "direction": "maximize", "n_trials": 8, "num_slots": 4,
        "epochs": "params.train.num_epochs",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        code, said, run = _forecast(Path(work), "tune", "trials", {"train": train}, tune=tune)
        yield _concurrency(run, "trials", "8 trials of two folds, bf16", code)
        ended = [json.loads(path.read_text()) for path in run.glob("trials/*.json")]
        states = sorted(str(one.get("state")) for one in ended)
        peaks = sorted(max(one["measured"]["device_peaks"].values(), default=0) for one in ended if one.get("measured"))
        text = f"{len(states)} ended: {', '.join(sorted({*states}))}; peaks {mib(peaks[0])} to {mib(peaks[-1])}"
        yield Row("trials", "their states and device peaks", text, said.strip().split("\n")[-1][:90])


def rows() -> Rows:
    """Batches of 16,384 and 32,768 rows: whole, and by accumulation under a fraction in which they do not fit."""
    with tempfile.TemporaryDirectory() as work:
        for size in (16384, 32768):
            losses, texts, num_splits = [], [], 0
            for name, limit in (("whole", None), ("split", "5GiB")):
                train = {"num_epochs": 1, "batch_size": size, "precision": "bf16-mixed", "microbatch_size": "auto"}
                more: dict[str, Any] = {"stages": {"fold": {"gpu_memory": limit}}} if limit else {}
                code, _, run = _forecast(Path(work), "run", f"{name}-{size}", {"train": train}, **more)
                lines = [line for path in run.glob("events/*.jsonl") for line in path.read_text().splitlines()]
                events = [json.loads(line) for line in lines]
                num_splits = sum(one["kind"] == "microbatch" for one in events)
                states = [json.loads(path.read_text()) for path in run.glob("jobs/fold*/outcome*.json")]
                on_device = [(one.get("footprint") or {}).get("device_bytes") for one in states]
                done = [one for one in events if one["kind"] == "epoch"]
                losses.append([round(one["train_loss"], 5) for one in done if "train_loss" in one])
                texts.append(f"{name}: exit {code}, {num_splits} splits, {on_device}")
            pairs = list(zip(*losses, strict=False))
            holds = len(pairs) == 2 and num_splits > 0 and all(abs(b / a - 1) < 0.01 for a, b in pairs)
            yield Row("rows", f"{size:,} rows", "; ".join(texts)[:300], f"losses {losses}", holds)


def ranks() -> Rows:
    """A step of two ranks or more on NCCL: what it costs beside DDP's own, and an out-of-memory on one of them."""
    number = torch.cuda.device_count()
    if number < 2:
        yield Row("ranks", "a step of several ranks on NCCL", f"{number} GPU", "needs two")
        return
    words = [sys.executable, "benchmarks/ranks.py", "--device", "cuda", "--ranks", str(number)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        yield Row("ranks", f"{number} ranks", line, "ratio at most 1.1, the same weights")
    yield Row("ranks", "exit status", str(done.returncode), "0", done.returncode == 0)


PARTS: dict[str, tuple[Callable[[], Rows], int]] = {
    "devices": (devices, 60),
    "step": (safe_step, 180),
    "allocator": (allocator, 60),
    "estimate": (estimates, 240),
    "resume": (resume, 150),
    "frameworks": (frameworks, 300),
    "jobs": (jobs, 150),
    "folds": (folds, 400),
    "warm": (warm, 240),
    "cost": (cost, 60),
    "pace": (pace, 60),
    "trials": (trials, 300),
    "rows": (rows, 240),
    "ranks": (ranks, 240),
}
_ALLOCATORS = ("", "expandable_segments:True", "max_split_size_mb:128")


def run_part(name: str) -> list[Row]:
    """A part in a process of its own; its failure is a row."""
    found: list[Row] = []
    for text in _ALLOCATORS if name == "allocator" else ("",):
        env = os.environ | ({"PYTORCH_CUDA_ALLOC_CONF": text} if text else {}) | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if name == "devices":
            del env["CUBLAS_WORKSPACE_CONFIG"]
        started = time.monotonic()
        with subprocess.Popen(
            [sys.executable, __file__, "--inside", name], stdout=subprocess.PIPE, text=True, env=env
        ) as process:
            assert process.stdout is not None
            timer = threading.Timer(PARTS[name][1], process.kill)
            timer.start()
            for line in process.stdout:
                if line.startswith("{"):
                    found.append(Row(**json.loads(line)))
                    show(found[-1])
            timer.cancel()
        if process.returncode:
            found.append(Row(name, "ended", f"exit {process.returncode}", f"{time.monotonic() - started:.0f} s", False))
            show(found[-1])
        print(f"# {name}: {time.monotonic() - started:.0f} s", flush=True)
    return found


def show(row: Row) -> None:
    """Print a row."""
    mark = {None: "    ", True: "ok  ", False: "NOT "}[row.holds]
    print(f"{mark}{row.part:10} {row.what}: {row.found}  |  {row.beside}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS], action="append")
    parser.add_argument("--only", default="", help="estimate: the cases whose names have this in them, by commas")
    parser.add_argument("--json", type=Path)
    for option in ("--inside", "--trace", "--measure", "--training", "--framework"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    args = parser.parse_args()
    single: dict[str, Callable[[str], Any]] = {
        "trace": trace,
        "measure": measure,
        "training": training,
        "framework": framework,
    }
    for name, function in single.items():
        if getattr(args, name):
            print(json.dumps(function(getattr(args, name))))
            return 0
    if args.inside:
        try:
            for row in PARTS[args.inside][0]():
                print(json.dumps(asdict(row)), flush=True)
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    if not torch.cuda.is_available():
        print("there is no GPU here")
        return 2
    os.environ["BENCH_ONLY"] = args.only
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    found = [row for name in args.part or PARTS for row in run_part(name)]
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    bad = sum(row.holds is False for row in found)
    print(f"{len(found)} rows, {bad} do not hold")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
