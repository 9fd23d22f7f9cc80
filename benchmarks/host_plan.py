"""Host memory of trainings, foretold from their first steps as one rank and as two, beside what they take.

    python benchmarks/host_plan.py [--row NUMBER] [--results FILE] [--json FILE]

Each row is a training on the CPU by a plain loop, transformers, Lightning, Accelerate or NumPy, and the ranks that it
is run with. ``memfit run --plan`` makes its first steps once, and is asked for each number of ranks before any of these
runs. Then the ranks run in a control group, whose anonymous and shared memory is read every 20 ms: each page once, also
of batches that are on their way. They have the variables that memfit gives to jobs. The last rows are 15 trainings that
others wrote. It needs root and a memory cgroup of v1. ``--results`` keeps what was measured. Exit status: 0 if the
median error is at most 10 %, the worst 20 %, and no bound is broken or above 1.35 times what was measured.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness import Limited, parser, print_table, told, write_json
from memfit.jobs import start_env, thread_env
from memfit.units import MIB

#: The words of a training, and the ranks that it is run with.
ROWS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("data=list mib=80", (4, 8)),
    ("data=array mib=150 batch=64", (4, 8)),
    ("data=mapped workers=4", (4, 8)),
    ("data=frame mib=120 workers=1", (4, 8)),
    ("loop=huggingface data=array", (4, 8)),
    ("loop=lightning data=array workers=1 validation=0", (4, 8)),
    ("loop=accelerate data=list mib=60", (4, 8)),
    ("data=share mib=400 workers=0", (4, 8)),
    ("data=array mib=60 batch=2048 workers=1 epochs=6", (4, 8)),
    ("data=array mib=12 width=3000 workers=0", (4, 8)),
    ("loop=marked data=list persistent=1 slow=100 epochs=4", (4, 8)),
    ("loop=numpy mib=200 batch=512 slow=50 epochs=5", (4, 8)),
    # Trainings of others
    ("data=list workers=0 validation=0", (1,)),
    ("data=list", (1,)),
    ("data=list workers=4 persistent=1", (1,)),
    ("data=array", (1,)),
    ("data=array workers=4 validation=0 persistent=1", (2,)),
    ("data=mapped", (1,)),
    ("data=mapped workers=4", (4,)),
    ("loop=huggingface data=list", (1,)),
    ("loop=huggingface data=array workers=0", (1,)),
    ("loop=lightning data=list", (1,)),
    ("data=list persistent=1", (4,)),
    ("data=frame", (1,)),
    ("data=strings persistent=1", (1,)),
    ("data=array width=3000", (1,)),
    ("data=array batch=4096", (1,)),
)
#: The asked errors, and how far a bound may be above what was measured.
MEDIAN, WORST, LOOSE = 0.10, 0.20, 1.35
_LIMIT, _SECONDS, _EVERY = 16 << 30, 400, 0.02
_SCRIPT = Path(__file__).with_name("_host_plan_training.py")


class Sampler(threading.Thread):
    """Reads the memory of a control group: the peak."""

    def __init__(self, group: Path) -> None:
        super().__init__(daemon=True)
        self.group, self.over, self.peak = group, threading.Event(), 0

    def run(self) -> None:
        while not self.over.wait(_EVERY):
            text = (self.group / "memory.stat").read_text()
            sizes = {name: int(size) for name, size in map(str.split, text.splitlines())}
            taken = sizes["total_rss"] + sizes["total_shmem"] + sizes.get("total_swap", 0)
            self.peak = max(self.peak, taken)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def measure(words: Sequence[str], ranks: int, folder: Path) -> int:
    """Run a training's ranks; return their peak."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    group |= {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "host_plan", "GROUP_RANK": "0"}
    common = {**os.environ, **start_env(tight_malloc=True, cuda_allocator=None), **thread_env(1)}
    with Limited(Path("/sys/fs/cgroup/memory"), _LIMIT) as limited:
        sampler = Sampler(limited.path)
        sampler.start()
        running = []
        try:
            for rank in range(ranks):
                own = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
                with open(folder / f"log.{rank}", "w") as log:
                    command = [sys.executable, str(_SCRIPT), *words]
                    running.append(limited.start(command, env=common | own, stdout=log, stderr=subprocess.STDOUT))
            codes = [one.wait(timeout=_SECONDS) for one in running]
        finally:
            sampler.over.set()
            sampler.join()
    if any(codes):
        raise SystemExit(f"{words}: {codes}\n" + (folder / "log.0").read_text()[-3000:])
    return sampler.peak


def foretell(words: Sequence[str], ranks: int, folder: Path) -> dict[str, Any]:
    """Ask for the plan of a job of so many ranks; its first steps are made the first time alone."""
    memfit = [sys.executable, "-m", "memfit", "run", "--plan", "--json", "--name", "host-plan", "--nproc", str(ranks)]
    command = [*memfit, "--set", "threads_per_job=1", "--", sys.executable, str(_SCRIPT), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        raise SystemExit(done.stderr[-3000:])
    [stage] = json.loads(done.stdout)["stages"]
    if stage["forecast"] is None or stage["forecast"]["uncounted"]:
        raise SystemExit(f"{words}: {stage['origin']}\n{done.stderr[-1000:]}")
    return {"value": max(stage["forecast"]["phases"].values()), "bound": stage["forecast"]["modes"][0]["peak"]["bytes"]}


def make_files(words: str) -> None:
    given = dict(word.split("=") for word in words.split())
    place = {"shm": "/dev/shm", "mapped": tempfile.gettempdir()}.get(given.get("data", ""))
    whole = int(given.get("mib", 100))
    for mib in (whole, whole // 2) if place else ():
        np.zeros(mib * MIB // 4, np.float32).tofile(f"{place}/host_plan_{mib}.bin")


def report(results: Mapping[str, Mapping[str, Any]]) -> bool:
    """Print the table; whether the errors are as asked."""
    lines: list[tuple[object, ...]] = [("training", "ranks", "foretold, MiB", "at most", "measured", "error")]
    errors, broken, loose = [], [], []
    for name, found in results.items():
        words, ranks = name.rsplit(" x", 1)
        error = found["value"] / found["measured"] - 1
        errors.append(abs(error))
        broken += [name] if found["bound"] < found["measured"] else []
        loose += [name] if found["bound"] > LOOSE * found["measured"] else []
        sizes = (f"{found[one] / MIB:,.0f}" for one in ("value", "bound", "measured"))
        lines.append((words, ranks, *sizes, f"{error:+.1%}"))
    print_table(lines)
    median, worst = statistics.median(errors), max(errors)
    asked = [
        told(median <= MEDIAN, f"median error {median:.1%} of {len(errors)} ({MEDIAN:.0%})"),
        told(worst <= WORST, f"worst {worst:.1%} ({WORST:.0%})"),
        told(not broken, f"broken bounds: {broken or 'none'}"),
        told(not loose, f"bounds above {LOOSE} x measured: {loose or 'none'}"),
    ]
    return all(asked)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--row", type=int, action="append", help="only this row, from 1")
    options.add_argument("--results", type=Path, help="what was measured; what lies there is not measured again")
    args = options.parse_args()
    results: dict[str, Any] = json.loads(args.results.read_text()) if args.results and args.results.exists() else {}
    asked = []
    for number in args.row or range(1, len(ROWS) + 1):
        words, counts = ROWS[number - 1]
        make_files(words)
        asked += [f"{words} x{ranks}" for ranks in counts]
        with tempfile.TemporaryDirectory(prefix="host-plan-") as folder:
            new = {
                ranks: f"{words} x{ranks}" for ranks in counts if "value" not in results.get(f"{words} x{ranks}", {})
            }
            found = {ranks: foretell(words.split(), ranks, Path(folder)) for ranks in new}
            for ranks, name in new.items():
                known = results.get(name) or {"measured": measure(words.split(), ranks, Path(folder))}
                results[name] = known | found[ranks]
                print(name, results[name], file=sys.stderr, flush=True)
                if args.results:
                    args.results.write_text(json.dumps(results))
    chosen = {name: results[name] for name in asked}
    write_json(args.json, chosen)
    return 0 if report(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
