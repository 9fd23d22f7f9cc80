"""Five folds under one memory limit, twice: without memfit the kernel kills some, with memfit all of them finish.

    python benchmarks/demo.py [--limit 900MiB] [--svg FILE] [--new]

Each fold trains a small stock ranker on eleven years of real prices. *Without memfit* five processes start at once and
each builds its own data, as people write it. *With memfit* one command runs the same folds under the same limit.

A real limit needs root and a memory control group. Elsewhere the script says so, and runs the folds with memfit alone.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pyarrow import feather
from rich.console import Console
from rich.table import Table

from limited import Limited, find_parent
from memfit import config
from memfit.memory import read_series
from memfit.pipeline import RunConfig, context_of
from memfit.reports import COLOURS, Frame, Layer, draw_stack
from memfit.rundir import RunDir
from memfit.units import format_bytes, format_duration, parse_bytes

CONFIG = Path("src/memfit_workloads/ranker/config.yaml")
PICTURE = Path("docs/folds.svg")
FOLDS = range(1, 6)
#: How the demo runs the folds: nothing after them, and the gate behind the first fold is skipped.
WORDS = ["--until", "fold", "--skip", "health"]
INTERVAL_SECONDS = 0.25
_WIDTH, _HEIGHT = 470, 250


@dataclass
class Seen:
    """What a way of running the folds came to.

    Attributes:
        finished: The folds that finished.
        killed: The folds that the kernel killed, with the seconds after which it did.
        seconds: How long all of it took.
        memory: For each fold its private memory: pairs of seconds and bytes.
    """

    finished: list[int] = field(default_factory=list)
    killed: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    memory: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: {fold: [] for fold in FOLDS})


def train_alone(fold: int) -> None:
    """Build the data and train one fold, as a plain script does."""
    from memfit_workloads.ranker.stages import train_fold

    with tempfile.TemporaryDirectory() as folder:
        whole = config.resolve(RunConfig, file=CONFIG, env={}, overrides=[f"panels_dir={folder}/panels"])
        context, params = context_of(whole.value.target, whole, "fold", Path(folder), unit=str(fold))
        train_fold(context, params)


def run_without(group: Limited, console: Console) -> Seen:
    """Start five processes at once under the limit and watch them."""
    seen, env, started = Seen(), os.environ | {"OMP_NUM_THREADS": "1"}, time.monotonic()
    options = {"env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = {
        fold: group.start([sys.executable, __file__, "--fold", str(fold)], **options) for fold in FOLDS
    }  # fmt: skip
    try:
        with console.status("five processes start") as status:
            while running:
                time.sleep(INTERVAL_SECONDS)
                now = time.monotonic() - started
                for fold, process in list(running.items()):
                    seen.memory[fold].append((now, _private_bytes(process.pid)))
                    if process.poll() is None:
                        continue
                    del running[fold]
                    if process.returncode == 0:
                        seen.finished.append(fold)
                        console.print(f"  fold {fold} finished after {format_duration(now)}")
                    else:
                        seen.killed[fold] = now
                        console.print(f"  fold {fold} [red]was killed by the kernel[/red] after {format_duration(now)}")
                used = sum(seen.memory[fold][-1][1] for fold in running)
                status.update(f"{len(running)} of 5 running, {format_bytes(int(used))} used, {format_duration(now)}")
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    seen.seconds = time.monotonic() - started
    return seen


def _private_bytes(pid: int) -> float:
    """Return what a process holds alone; 0 after its end."""
    with suppress(psutil.Error):
        found = psutil.Process(pid).memory_info()
        return float(found.rss - found.shared)
    return 0.0


def run_with(group: Limited | None, words: Sequence[str]) -> tuple[Seen, RunDir, int]:
    """Run the same folds with one command, and read what it left."""
    command = [str(Path(sys.executable).with_name("memfit")), "run", str(CONFIG), *WORDS, *words]
    started = time.monotonic()
    process = subprocess.Popen(command, text=True) if group is None else group.start(command)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # memfit has got the signal too: it stops its jobs at a checkpoint
        process.wait()
        raise
    whole = config.resolve(RunConfig, file=CONFIG, env={}).value
    run = RunDir.all(whole.runs_dir, whole.experiment)[0]
    seen = Seen(seconds=time.monotonic() - started)
    series = {fold: read_series(run.job_dir(f"fold_{fold}") / "memory.jsonl") for fold in FOLDS}
    start = min(samples[0].time for samples in series.values())
    seen.memory = {fold: [(one.time - start, one.private_bytes) for one in own] for fold, own in series.items()}
    seen.finished = [fold for fold in FOLDS if run.manifest_path("fold", f"fold_{fold}").exists()]
    return seen, run, code


def draw(without: Seen, with_it: Seen, limit: int) -> str:
    """Return the picture: the memory of the five folds over time, without and with memfit, on one scale."""
    seconds = max(map(_end, (without, with_it)))
    stacks = [_layers(one, seconds) for one in (without, with_it)]
    most = max(limit, *(max(map(sum, zip(*(layer.values for layer in stack), strict=True))) for stack in stacks))
    titles = [
        f"Without memfit: {len(without.killed)} of 5 folds killed",
        f"With memfit: {len(with_it.finished)} of 5 folds finish",
    ]
    parts = []
    for number, (one, stack, title) in enumerate(zip((without, with_it), stacks, titles, strict=True)):
        marks = [(seconds, f"fold {fold} killed") for fold, seconds in one.killed.items()]
        frame = Frame(title, title, _WIDTH, _HEIGHT, styled=True)
        chart = draw_stack(stack, seconds, frame, limit=("limit", limit), marks=marks, most_bytes=most)
        place = f'x="{number * (_WIDTH + 20)}" width="{_WIDTH}" height="{_HEIGHT}"'
        parts.append(chart.replace("<svg ", f"<svg {place} ", 1))
    size = f"0 0 {2 * _WIDTH + 20} {_HEIGHT}"
    label = f"Memory of five folds, each in its colour. {titles[0]}. {titles[1]}."
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="{label}">'
    return f"{head}{''.join(parts)}</svg>\n"


def _end(seen: Seen) -> float:
    return max(at for samples in seen.memory.values() for at, _ in samples)


def _layers(seen: Seen, end: float, num_points: int = 200) -> list[Layer]:
    layers = []
    for fold, samples in seen.memory.items():
        values = []
        for point in range(num_points):
            now = end * point / (num_points - 1)
            before = [size for at, size in samples if at <= now]
            is_over = not samples or now > samples[-1][0] + end / num_points
            values.append(0.0 if is_over or not before else before[-1])
        layers.append(Layer(f"fold {fold}", COLOURS[fold - 1], values))
    return layers


def report(without: Seen | None, with_it: Seen, run: RunDir, console: Console) -> None:
    """Print both ways side by side, and what the folds' scores mean."""
    table = Table("", *(["without memfit"] if without else []), "with memfit", box=None, pad_edge=False)
    ways = [one for one in (without, with_it) if one is not None]
    table.add_row("folds finished", *(f"{len(one.finished)} of 5" for one in ways))
    table.add_row("killed by the kernel", *(str(len(one.killed)) for one in ways))
    table.add_row("time", *(format_duration(one.seconds) for one in ways))
    console.print(table)
    found = feather.read_table(run.path / "kfold_results.feather")["rank_ic"].to_pylist()
    mean = sum(found) / len(found)
    error = (sum((one - mean) ** 2 for one in found) / (len(found) - 1) / len(found)) ** 0.5
    console.print(
        f"\nRank IC of the five folds: {mean:+.4f} ± {error:.4f}. This small model shows no skill on twenty large "
        "stocks,\nand none was expected: the demo is about memory. memfit report shows this run.",
        soft_wrap=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit", default="900MiB", help="the memory limit of both ways (default: 900MiB)")
    parser.add_argument("--svg", type=Path, help="draw both ways into this file")
    parser.add_argument("--new", action="store_true", help="run the folds again instead of keeping their results")
    parser.add_argument("--fold", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fold:
        train_alone(options.fold)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console, limit, parent, words = Console(), parse_bytes(options.limit), find_parent(), ["--new"] * options.new
    command = shlex.join(["memfit", "run", str(CONFIG), *WORDS, *words])
    if parent is None:
        console.print(
            "memfit may not set a memory limit here, so nothing is killed on purpose.\n"
            f"{PICTURE} shows the same five folds under a limit, without and with memfit.\n\n[bold]$ {command}[/bold]"
        )
        with_it, run, code = run_with(None, words)
        report(None, with_it, run, console)
        return code
    console.print(
        f"[bold]1. Five folds at once without memfit, limit {format_bytes(limit)}[/bold] (all: three minutes)"
    )
    with Limited(parent, limit) as group:
        without = run_without(group, console)
    console.print(f"\n[bold]2. The same five folds with memfit, the same limit[/bold]\n$ {command}", soft_wrap=True)
    with Limited(parent, limit) as group:
        with_it, run, code = run_with(group, words)
        kills = group.num_oom_kills
    console.print("\n[bold]3. Both ways[/bold]")
    report(without, with_it, run, console)
    if options.svg:
        options.svg.write_text(draw(without, with_it, limit))
        console.print(f"wrote {options.svg}")
    return code or int(kills > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; make demo goes on with memfit's part, make demo ARGS=--new begins anew", file=sys.stderr)
        sys.exit(130)
