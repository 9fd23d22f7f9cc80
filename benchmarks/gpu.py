"""What only a GPU can show: each part in processes of its own on the first GPU, and a table.

    PYTHONPATH=src python benchmarks/gpu.py [--part step] [--part estimate] [--json FILE]

It needs a Python whose torch knows CUDA. Parts: ``devices`` (the budget and CUDA's context beside nvidia-smi), ``step``
(SafeStep against real out-of-memories), ``estimate`` (estimates beside measured peaks), ``resume`` (trainings by
`Trainer` and by that of transformers, stopped and killed on the GPU), ``jobs`` (reservations that torch
enforces, several jobs on one GPU), ``warm`` (folds that are forked, and folds in new interpreters). What a step costs:
``costs.py --device cuda``. Nobody else may use the GPU meanwhile. Exit status: 0 every check holds, 1 one does not, 2
there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
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

from _gpu_models import CASES, Encoder, loss_of
from costs import squared_error
from harness import parser, write_json
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
    words = ["nvidia-smi", "-i", "0", f"--query-gpu=memory.{field}", "--format=csv,noheader,nounits"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout) * MIB


def mib(num_bytes: float) -> str:
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
    before = used_bytes()
    layers = {"context": torch.nn.Identity(), "cuBLAS": torch.nn.Linear(512, 512), "cuDNN": torch.nn.Conv2d(3, 8, 3)}
    for name, layer in layers.items():
        layer.cuda()(torch.randn(2, 3, 512, 512, device="cuda"))
        torch.cuda.synchronize()
        size = used_bytes() - before - torch.cuda.memory_reserved()
        yield Row("devices", f"outside of torch's allocator: {name}", mib(size), "614 to 1,228 MiB", size < 1228 * MIB)


def _digest(*states: Any) -> str:
    """The SHA-256 of states: tensors by their bytes, the rest by its text."""
    total = hashlib.sha256()
    for one in torch.utils._pytree.tree_leaves(list(states)):
        is_tensor = isinstance(one, torch.Tensor)
        total.update(one.detach().cpu().contiguous().numpy().tobytes() if is_tensor else repr(one).encode())
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
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seed_everything(0)
    model = Encoder().cuda()
    batch = torch.randn(256, 256, 512, device="cuda"), torch.randn(256, 256, 512, device="cuda")
    optimizer, step, outcomes = torch.optim.AdamW(model.parameters(), lr=1e-4), None, []
    for size in sizes:
        if step is None or size != "auto":
            step = SafeStep(model, optimizer, squared_error, microbatch_size=size, max_grad_norm=1.0)  # type: ignore[arg-type]
        outcomes.append(step(batch))
    torch.cuda.synchronize()
    peak, held = torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
    found = tuple(one.microbatch_size for one in outcomes)
    return Taken(_digest(model.state_dict()), peak, held, found, sum(one.num_ooms for one in outcomes))


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


def _compare(how: str, found: Taken) -> Rows:
    """Set two steps that ran out of memory beside two that had their last sizes from the start."""
    same = _two_steps(*found.sizes)
    text = f"{found.num_ooms} out of memory, {found.sizes} at once, weights {found.weights}"
    holds = found.num_ooms > 0 and same.num_ooms == 0 and same.weights == found.weights
    yield Row("step", how, text, same.weights, holds)
    yield Row("step", f"{how}: held after it", mib(found.held), mib(same.held), found.held == same.held)


def trace(name: str) -> dict[str, Any]:
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


_STEPS = 8  # of an epoch: 64 samples in batches of 4, two of which are a step


class _Noise(torch.utils.data.Dataset[Any]):
    """Inputs that are drawn at random in the workers."""

    def __len__(self) -> int:
        return 8 * _STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64, 512), float(index)) / 512 + 0.1 * torch.randn(64, 512)


def _end_at(step: int) -> None:
    """End this process at the step that ``BENCH_END`` names, with the signal that it names."""
    if os.environ.get("BENCH_END") == str(step):
        os.environ.pop("BENCH_END")
        os.kill(os.getpid(), int(os.environ["BENCH_SIGNAL"]))


def _in_memfit(folder: str, precision: str) -> tuple[Any, ...]:
    num_losses = 0

    def loss(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        nonlocal num_losses
        num_losses += 1
        _end_at(num_losses // 2)
        return (model(x) - x).float().square().sum(), float(x.numel())

    how: Any = {"float32": "float32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}[precision]
    model, data = Encoder(), KeyedDataset(_Noise(), seed=1)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, sampler=KeyedSampler(data, seed=1), num_workers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trainer = Trainer(
        model, loss=loss, optimizer=optimizer, device="cuda", precision=how, seed=1, max_grad_norm=1.0,
        global_batch_size=8, checkpoint_dir=Path(folder) / "checkpoints",
    )  # fmt: skip
    trainer.fit(loader, num_epochs=3, preflight=False)
    return model, optimizer, None


def _in_transformers(folder: str, precision: str) -> tuple[Any, ...]:
    import transformers

    from memfit.integrations.huggingface import exact

    class End(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _end_at(state.global_step)

    def masked(items: Any) -> Any:
        words = torch.stack(items)
        hidden = torch.rand(words.shape) < 0.3
        return {"input_ids": words.masked_fill(hidden, 4), "labels": words.masked_fill(~hidden, -100)}

    sizes = {"vocab_size": 400, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: Any = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=256))  # type: ignore[arg-type]
    how: dict[str, Any] = {"fp16": precision == "fp16", "bf16": precision == "bf16"}
    args = transformers.TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=3, save_steps=3,
        learning_rate=1e-3, report_to="none", disable_tqdm=True, dataloader_num_workers=2, **how,
    )  # fmt: skip
    words: Any = list(torch.randint(5, 400, (8 * _STEPS, 64), generator=torch.Generator().manual_seed(0)))
    trainer: Any = transformers.Trainer(model, args, train_dataset=words, data_collator=masked, callbacks=[End()])
    exact(trainer)
    trainer.train()
    return trainer.model, trainer.optimizer, trainer.accelerator.scaler


LOOPS = {"memfit": _in_memfit, "transformers": _in_transformers}


def training(folder: str) -> dict[str, Any]:
    """A training in one of the loops: what it leaves."""
    torch.use_deterministic_algorithms(True)
    seed_everything(1)
    model, optimizer, scaler = LOOPS[os.environ["BENCH_LOOP"]](folder, os.environ["BENCH_PRECISION"])
    scale = scaler.state_dict() if scaler is not None else {}
    kept = {"weights": _digest(model.state_dict()), "optimizer": _digest(optimizer.state_dict(), scale)}
    return kept | {"scale": scale.get("scale"), "devices": sorted({str(one.device) for one in model.parameters()})}


def _broken(name: str, precision: str, number: signal.Signals) -> Row:
    """An unbroken training beside one that is stopped or killed in the middle of its second epoch."""
    more = {"BENCH_LOOP": name, "BENCH_PRECISION": precision, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    env = os.environ | more
    with tempfile.TemporaryDirectory() as work:
        ends = env | {"BENCH_END": str(_STEPS + 4), "BENCH_SIGNAL": str(int(number))}
        found, codes = [], []
        for folder, given in (("whole", env), ("part", ends), ("part", env)):
            words = [sys.executable, __file__, "--training", f"{work}/{folder}"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=150, env=given)
            codes.append(done.returncode)
            found.append(json.loads(done.stdout.strip().split("\n")[-1]) if not done.returncode else {})
            if done.returncode not in (0, 75, -9):
                sys.stderr.write(f"--- {name}, {precision}, {number.name}, exit {done.returncode}:\n{done.stderr}\n")
    holds = codes == [0, 75 if number == signal.SIGTERM else -9, 0] and found[0] == found[2]
    return Row("resume", f"{name}, {precision}, {number.name}", f"{found[2]}, exits {codes}", str(found[0]), holds)


def resume() -> Rows:
    """Trainings in four loops, in float32, bf16 and fp16, ended in mid-epoch and resumed in a new process."""
    cases = [
        (name, precision, number)
        for number in (signal.SIGTERM, signal.SIGKILL)
        for precision in ("fp16", "float32", "bf16")
        for name in LOOPS
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
    (work / "take.py").write_text(_GREEDY)
    words = [sys.executable, "-m", "memfit", "run", "--num-gpus", "1", "--runs-dir", str(work), "--name", name, *more]
    words += ["--param", f"size={sizes}", "--", sys.executable, str(work / "take.py"), "{size}", str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    if not (found := sorted(work.glob(f"{name}/run_*"))):
        raise RuntimeError(f"exit {done.returncode}: {done.stdout[-300:]} {done.stderr[-600:]}")
    return done.returncode, done.stdout, found[-1]


def jobs() -> Rows:
    """Commands on one GPU: one that takes more than it reserved, and ten whose peaks are not known."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        code, said, run = _map(work, "greedy", "24", 5, "--gpu-memory", "3GiB")
        refused = re.search(r"OutOfMemoryError.*", "".join(path.read_text() for path in run.rglob("err*.log")))
        again = next((line.strip()[:110] for line in said.split("\n") if "restarts" in line), said[-200:])
        text, beside = f"exit {code}; {again}", (refused or [""])[0][:80]
        yield Row("jobs", "24 GiB with 3 GiB reserved", text, beside, bool(refused) and not code)
        code, said, run = _map(work, "many", "12,12.1,12.2,12.3,12.4,12.5,12.6,12.7,12.8,12.9", 6)
        outcomes = [json.loads(path.read_text()) for path in run.glob("jobs/*/outcome*.json")]
        spans = [(one["started"], one["ended"]) for one in outcomes if one.get("started")]
        most = max((sum(start <= at < end for start, end in spans) for at, _ in spans), default=0)
        ooms = sum(one.get("state") == "out_of_memory" for one in outcomes)
        text = f"{most} at once at most, {len(outcomes)} ends, {ooms} out of memory"
        yield Row("jobs", "ten of 12 to 13 GiB", text, f"exit {code}", code == 0 and not ooms and most > 1)
        first = min(run.glob("jobs/*/outcome*.json"))
        peak = max((json.loads(first.read_text())["footprint"]["device_bytes"] or {"": 0}).values())
        reserved = int((first.parent / "out.log").read_text().split()[0])
        text, beside = f"{mib(peak)}, context {mib(peak - reserved)}", f"torch reserved {mib(reserved)}"
        yield Row("jobs", "device memory of the first job", text, beside, 400 * MIB < peak - reserved < 800 * MIB)


_FORKED = """
import time
from pathlib import Path

from pydantic import BaseModel

from memfit.pipeline import Stage, Workload


def step(ctx, params):
    began, has_driver = time.time(), "libcuda.so" in Path("/proc/self/maps").read_text()
    import torch

    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    return {"began": began, "stepped": time.time(), "has_driver": has_driver}


class Params(BaseModel):
    folds: int = 8


WORKLOAD = Workload(Params, stages=(Stage("fold", step, each="fold in params.folds"),))
"""


def warm() -> Rows:
    """Folds that are forked from a process with torch, and folds in new interpreters: their first step on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "forked.py").write_text(_FORKED)
        env = os.environ | {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
        for how in ("never", "auto", "never", "auto"):
            runs = Path(tempfile.mkdtemp(dir=folder))
            words = [sys.executable, "-m", "memfit", "run", "forked:WORKLOAD", "--runs-dir", str(runs)]
            words += ["--set", "memory.num_gpus=1", "--set", "memory.gpu_job=2GiB", "--set", f"warm={how}"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=150, cwd=folder, env=env)
            results = [
                json.loads(one.read_text())["result"] for one in sorted(runs.glob("*/*/checkpoints/fold_*.json"))
            ]
            ended = {path.parent.name: json.loads(path.read_text()) for path in runs.glob("*/*/jobs/*/outcome.json")}
            if done.returncode or not results or len(results) != len(ended):
                yield Row("warm", f"warm: {how}", (done.stdout + done.stderr)[-400:], f"exit {done.returncode}", False)
                continue
            starts = [one["started"] for _, one in sorted(ended.items())]
            parts = []
            for key in ("began", "stepped"):
                middle = statistics.median(one[key] - at for one, at in zip(results, starts, strict=True))
                parts.append(f"{key} {middle:.2f} s")
            span = max(one["ended"] for one in ended.values()) - min(starts)
            num_forked = sum((one.get("evidence") or {}).get("start") == "warm" for one in ended.values())
            drivers = sum(one["has_driver"] for one in results)
            beside = f"{num_forked} of {len(ended)} forked, {drivers} with the driver loaded at their first line"
            holds = num_forked == (len(ended) if how == "auto" else 0) and not drivers
            text = f"{len(ended) * 3600 / span:.0f} folds an hour, {', '.join(parts)}"
            yield Row("warm", f"warm: {how}", text, beside, holds)


PARTS: dict[str, tuple[Callable[[], Rows], int]] = {
    "devices": (devices, 60),
    "step": (safe_step, 180),
    "estimate": (estimates, 240),
    "resume": (resume, 400),
    "jobs": (jobs, 150),
    "warm": (warm, 240),
}


def run_part(name: str) -> list[Row]:
    """A part in a process of its own; its failure is a row."""
    found: list[Row] = []
    more = {} if name == "devices" else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # it takes memory of its own
    env, started = os.environ | more, time.monotonic()
    words = [sys.executable, __file__, "--inside", name]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        timer = threading.Timer(PARTS[name][1], process.kill)
        timer.start()
        for line in process.stdout:
            if line.startswith("{"):
                found.append(Row(**json.loads(line)))
                show(found[-1])
        timer.cancel()
    seconds = f"{time.monotonic() - started:.0f} s"
    if process.returncode:
        found.append(Row(name, "ended", f"exit {process.returncode}", seconds, False))
        show(found[-1])
    print(f"# {name}: {seconds}", flush=True)
    return found


def show(row: Row) -> None:
    mark = {None: "    ", True: "ok  ", False: "NOT "}[row.holds]
    print(f"{mark}{row.part:10} {row.what}: {row.found}  |  {row.beside}", flush=True)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--part", choices=[*PARTS], action="append")
    options.add_argument("--only", default="", help="estimate: the cases whose names have this in them, by commas")
    single: dict[str, Callable[[str], Any]] = {"trace": trace, "measure": measure, "training": training}
    for option in ("inside", *single):
        options.add_argument(f"--{option}", help=argparse.SUPPRESS)
    args = options.parse_args()
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
    write_json(args.json, [asdict(row) for row in found])
    bad = sum(row.holds is False for row in found)
    print(f"{len(found)} rows, {bad} do not hold")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
