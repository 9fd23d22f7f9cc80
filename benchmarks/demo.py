"""Five folds under one memory limit: without memfit the kernel kills some, with memfit all of them finish.

    python benchmarks/demo.py [--limit 900MiB] [--svg FILE]

Each fold trains a small network on images of handwritten digits (`examples/images`).

1. *Without memfit* five processes of a plain script start at once, and each makes its own images. What the kernel
   killed runs again, one after the other, as one would do by hand.
2. *The same script with memfit*: one command in front of it, under the same limit.
3. *The same training as a workload of memfit*: a stage makes the images once, and all folds map them.
4. A fold of the workload is killed with SIGKILL in the middle. The same command goes on, to the same weights.

A real limit needs root and a memory control group. Elsewhere the script says so, and shows memfit's parts alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from harness import Limited, find_parent
from memfit.memory import read_series
from memfit.reports import CHART_STYLE, COLOURS, Layer, draw_stack
from memfit.rundir import RunDir, read
from memfit.units import format_bytes, format_duration, parse_bytes

EXAMPLE = Path("examples/images")
CONFIG = EXAMPLE / "config.yaml"
PICTURE = Path("docs/folds.svg")
PROVES = ("S0-49",)
FOLDS = range(1, 6)
INTERVAL_SECONDS = 0.25
#: The fold that is killed and goes on.
KILLED_FOLD = 1
_WIDTH, _HEIGHT = 470, 250


def find_program(name: str) -> str:
    """Return how a shell in this folder calls a program of this environment: by its name where PATH has it."""
    path, found = Path(sys.executable).with_name(name), shutil.which(name)
    return name if found and Path(found).absolute() == path else os.path.relpath(path)


MEMFIT, PYTHON = find_program("memfit"), find_program("python")


@dataclass(frozen=True)
class Way:
    """A way to run the folds with memfit: its column, its words, the name of its runs, and the job of a fold."""

    name: str
    words: tuple[str, ...]
    experiment: str
    job: str


SCRIPT = Way(
    "memfit, same script",
    ("--param", "fold=1..5", "--", PYTHON, str(EXAMPLE / "plain.py"), "--fold", "{fold}"),
    "plain",
    "cmd_{:04}",
)
WORKLOAD = Way("memfit, workload", (str(CONFIG),), "images", "fold_{}")


@dataclass
class Seen:
    """What a way of running the folds came to: those that finished at the first try, those that the kernel killed, with
    the seconds after which it did, and of each fold its private memory, as pairs of seconds and bytes."""

    finished: list[int] = field(default_factory=list)
    killed: dict[int, float] = field(default_factory=dict)
    num_kills: int = 0
    num_restarts: int = 0
    seconds: float = 0.0
    again_seconds: float = 0.0
    memory: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: {fold: [] for fold in FOLDS})


class Plain:
    """Plain processes, one for each fold, under a limit, with a table of what they do now."""

    def __init__(self, group: Limited, console: Console, seen: Seen) -> None:
        self.group, self.console, self.seen = group, console, seen
        self.said = dict.fromkeys(FOLDS, "")
        self.bytes = dict.fromkeys(FOLDS, 0.0)

    def run(self, folds: Sequence[int], *, is_again: bool = False) -> list[int]:
        """Start these folds at once, wait for all of them, and return those that the kernel killed."""
        started, killed = time.monotonic(), []
        running = {fold: self._start(fold) for fold in folds}
        try:
            while running:
                time.sleep(INTERVAL_SECONDS)
                now = time.monotonic() - started
                for fold, process in list(running.items()):
                    self.bytes[fold] = _private_bytes(process.pid)
                    if not is_again:
                        self.seen.memory[fold].append((now, self.bytes[fold]))
                    if process.poll() is None:
                        continue
                    del running[fold]
                    if process.returncode != 0:
                        killed.append(fold)
                        self.seen.killed.setdefault(fold, now)
                    how = "[red]was killed by the kernel[/red]" if process.returncode else "finished"
                    self._say(fold, f"{how} after {format_duration(now)}")
        finally:
            for process in running.values():
                process.kill()
                process.wait()
        return killed

    def _start(self, fold: int) -> subprocess.Popen[str]:
        command = [PYTHON, str(EXAMPLE / "plain.py"), "--fold", str(fold)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self._say(fold, "starts")
        process = self.group.start(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        threading.Thread(target=self._listen, args=(fold, process), daemon=True).start()
        return process

    def _listen(self, fold: int, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            self._say(fold, line.strip())

    def _say(self, fold: int, text: str) -> None:
        self.said[fold] = text
        if not self.console.is_terminal:
            self.console.print(f"  fold {fold} {text}")

    def __rich__(self) -> Table:
        table = Table("", "", "memory", box=None, pad_edge=False)
        for fold, text in self.said.items():
            table.add_row(f"  fold {fold}", text, format_bytes(int(self.bytes[fold])) if self.bytes[fold] else "")
        return table


def run_without(group: Limited, console: Console) -> Seen:
    """Start five processes at once under the limit; then run again what was killed, one after the other."""
    seen = Seen()
    plain, started = Plain(group, console, seen), time.monotonic()
    with Live(plain, console=console, refresh_per_second=4) if console.is_terminal else nullcontext():
        plain.run(FOLDS)
        seen.seconds = time.monotonic() - started
        seen.finished, seen.num_kills = [fold for fold in FOLDS if fold not in seen.killed], len(seen.killed)
    if seen.killed:
        folds = ", ".join(map(str, sorted(seen.killed)))
        console.print(f"\n  What was killed must run again, one after the other: folds {folds}")
    plain, started = Plain(group, console, seen), time.monotonic()
    with Live(plain, console=console, refresh_per_second=4) if console.is_terminal else nullcontext():
        for fold in sorted(seen.killed):
            plain.run([fold], is_again=True)
    seen.again_seconds = time.monotonic() - started if seen.killed else 0.0
    return seen


def _private_bytes(pid: int) -> float:
    """Return what a process holds alone; 0 after its end."""
    with suppress(psutil.Error):
        found = psutil.Process(pid).memory_info()
        return float(found.rss - found.shared)
    return 0.0


def start_memfit(group: Limited | None, words: Sequence[str]) -> subprocess.Popen[str]:
    command = [MEMFIT, "run", *words]
    return subprocess.Popen(command, text=True) if group is None else group.start(command)


def wait_for(process: subprocess.Popen[str]) -> int:
    """Wait for memfit; after Ctrl-C it has the signal too, and stops its jobs at a checkpoint."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def run_with(way: Way, group: Limited | None, limit: str) -> tuple[Seen, RunDir, int]:
    """Run the folds with one command, and read what it left."""
    started = time.monotonic()
    code = wait_for(start_memfit(group, ["--new", "--limit", limit, *way.words]))
    seen = Seen(seconds=time.monotonic() - started, num_kills=group.num_oom_kills if group else 0)
    run = RunDir.all(Path("runs"), way.experiment)[0]
    state, jobs = read(run), {fold: way.job.format(fold) for fold in FOLDS}
    series = {fold: read_series(run.job_dir(job) / "memory.jsonl") for fold, job in jobs.items()}
    start = min((samples[0].time for samples in series.values() if samples), default=0.0)
    seen.memory = {fold: [(one.time - start, one.private_bytes) for one in own] for fold, own in series.items()}
    seen.finished = [fold for fold, job in jobs.items() if state.jobs[job].state == "completed"]
    seen.num_restarts = state.num_restarts
    return seen, run, code


def digest(run: RunDir) -> str:
    """Return the SHA-256 of the killed fold's result and weights, as its manifest holds it."""
    path = run.manifest_path("fold", f"fold_{KILLED_FOLD}")
    return str(json.loads(path.read_text())["digest"]) if path.exists() else "none"


def kill_and_go_on(group: Limited | None, limit: str, whole: RunDir, console: Console) -> int:
    """Kill a fold and its memfit with SIGKILL in the middle, give the same command again, and compare the weights."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--limit", limit, "--units", str(KILLED_FOLD), "--runs-dir", folder, *WORKLOAD.words]
        process = start_memfit(group, words)
        with _killed_at_the_end(process):
            while process.poll() is None:
                events = [event for run in RunDir.all(Path(folder), "images") for event in run.events()]
                if any(event["kind"] == "epoch" for event in events):
                    break
                time.sleep(0.05)
        console.print("\n[red]SIGKILL to memfit and to the fold.[/red] The same command again:\n")
        code = wait_for(start_memfit(group, words))
        killed, unbroken = digest(RunDir.all(Path(folder), "images")[0]), digest(whole)
    verdict = "the same weights" if killed == unbroken else "[red]OTHER weights[/red]"
    console.print(f"\nSHA-256 unbroken {unbroken[:16]}, killed and continued {killed[:16]}: {verdict}", soft_wrap=True)
    return code or int(killed != unbroken)


@contextmanager
def _killed_at_the_end(process: subprocess.Popen[str]) -> Iterator[None]:
    """End the process and all that it started with SIGKILL, the supervisor first, as a lost machine would."""
    try:
        yield
    finally:
        mine = [process.pid]
        with suppress(psutil.Error):
            mine += [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
        for pid in mine:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def draw(without: Seen, with_it: Seen, limit: int) -> str:
    """Return the picture: the memory of the five folds over time, without and with memfit, on one scale."""
    series = [samples for one in (without, with_it) for samples in one.memory.values()]
    seconds = max(at for samples in series for at, _ in samples)
    stacks = [_layers(one, seconds) for one in (without, with_it)]
    titles = [
        f"Without memfit: {len(without.killed)} of 5 folds killed",
        f"With memfit: {len(with_it.finished)} of 5 folds finish",
    ]
    parts = []
    for number, (one, stack, title) in enumerate(zip((without, with_it), stacks, titles, strict=True)):
        marks = [(seconds, f"fold {fold} killed") for fold, seconds in one.killed.items()]
        size = (_WIDTH, _HEIGHT)
        chart = draw_stack(stack, seconds, title, limit=("limit", limit), marks=marks, title=title, size=size)
        place = f'x="{number * (_WIDTH + 20)}" width="{_WIDTH}" height="{_HEIGHT}"'
        parts.append(chart.replace("<svg ", f"<svg {place} ", 1))
    box = f'viewBox="0 0 {2 * _WIDTH + 20} {_HEIGHT}"'
    dark = "@media(prefers-color-scheme:dark){svg{color:#ddd}}"
    label = f"Memory of five folds, each in its colour. {titles[0]}. {titles[1]}."
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{label}">'
    head += f"<style>svg{{color:#222}}{dark}{CHART_STYLE}</style>"
    return f"{head}{''.join(parts)}</svg>\n"


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


def report(ways: Mapping[str, Seen], console: Console) -> None:
    """Print the ways side by side, the second try of what was killed included."""
    seen = ways.values()
    table = Table("", *ways, box=None, pad_edge=False)
    table.add_row("folds finished at once", *(f"{len(one.finished)} of 5" for one in seen))
    table.add_row("killed by the kernel", *(str(one.num_kills) for one in seen))
    table.add_row("restarted by memfit", *("-" if one.killed else str(one.num_restarts) for one in seen))
    table.add_row("time", *(format_duration(one.seconds) for one in seen))
    again = (format_duration(one.again_seconds) if one.again_seconds else "-" for one in seen)
    table.add_row("killed folds, run again", *again)
    table.add_row("until all five are done", *(format_duration(one.seconds + one.again_seconds) for one in seen))
    console.print(table)
    console.print(
        "As many folds of the unchanged script run at once as fit: each holds its own images. "
        "The workload makes the images once for all folds, so more of them fit.",
        soft_wrap=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit", default="900MiB", help="the memory limit of both ways (default: 900MiB)")
    parser.add_argument("--svg", type=Path, help="draw both ways into this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console, limit, parent, ways = Console(), parse_bytes(options.limit), find_parent(), dict[str, Seen]()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    def head(text: str, command: str) -> None:
        say(f"\n[bold]{text}[/bold]\n$ {escape(command)}")

    if parent is None:
        say(
            "memfit may not set a memory limit here, so nothing is killed on purpose.\n"
            f"{PICTURE} shows the same five folds under a limit, without and with memfit."
        )
    else:
        loop = f"for f in 1 2 3 4 5; do {PYTHON} {EXAMPLE}/plain.py --fold $f & done; wait"
        head(f"1. Five folds at once without memfit, limit {format_bytes(limit)}", loop)
        with Limited(parent, limit) as group:
            ways["without memfit"] = run_without(group, console)
    command = f"{MEMFIT} run --limit {options.limit}"
    titles = ("2. The same script with memfit", "3. A workload of memfit that makes the images once")
    for way, title in zip((SCRIPT, WORKLOAD), titles, strict=True):
        head(f"{title}, the same limit", f"{command} {' '.join(way.words)}")
        with Limited(parent, limit) if parent else nullcontext() as limited:
            ways[way.name], run, code = run_with(way, limited, options.limit)
        if failed := code or ways[way.name].num_kills:
            break
    console.print()
    report(ways, console)
    if failed:
        return code or 1
    if options.svg and parent:
        options.svg.write_text(draw(ways["without memfit"], ways[SCRIPT.name], limit))
        say(f"wrote {options.svg}")
    head("4. A fold, killed in the middle", f"{command} --units {KILLED_FOLD} {CONFIG}")
    with Limited(parent, limit) if parent else nullcontext() as limited:
        code = kill_and_go_on(limited, options.limit, run, console)
    subprocess.run([MEMFIT, "report", str(run.path)], capture_output=True, check=True)
    say(f"\nThe page of the run: {os.path.relpath(run.path / 'report.html')}\n\nNext:")
    for words, what in (
        ("run -- python train.py", "your script, measured and limited"),
        ("run --param lr=1e-3,1e-4 -- python train.py --lr {lr}", "several at once, as many as fit"),
        ("diagnose train.log", "why a job died"),
    ):
        say(f"  {MEMFIT} {words:<53}  # {what}")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; make demo begins anew", file=sys.stderr)
        sys.exit(130)
