"""What it takes to start: a run that does nothing, and a job until its first own line, forked and in a new interpreter.

Run ``python benchmarks/starts.py``. A stage with two folds runs in turns with ``warm: auto`` and ``warm: never``; once
the folds do nothing, once they make a step of a small model with torch. Each figure is the median of five turns.
``begins`` is the time from the start of a job's process to the first line of its function, and ``private`` what that
process holds alone there, by ``smaps_rollup``. Before these, commands are handed to the backend one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memfit.jobs import ENDED, Job, LocalBackend, Submission
from memfit.rundir import RunDir

TARGET = '''
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


def nothing(ctx, params):
    seconds, held = begin()
    return {"seconds": seconds, "kib": held}


def step(ctx, params):
    seconds, held = begin()
    import torch

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    stepped, held = begin()
    return {"seconds": seconds, "kib": held, "stepped": stepped}


class Params(BaseModel):
    folds: int = 2


NOTHING = Workload(Params, stages=(Stage("fold", nothing, each="fold in params.folds"),))
STEP = Workload(Params, stages=(Stage("fold", step, each="fold in params.folds"),))
'''


def timed(words: list[str], folder: Path) -> float:
    """Return the seconds of a command."""
    begin = time.perf_counter()
    subprocess.run(words, cwd=folder, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(folder)})
    return time.perf_counter() - begin


def show_admissions(turns: int) -> None:
    """Print the time from handing a command to the backend to its first line, and until its end is known."""
    with tempfile.TemporaryDirectory() as name:
        run = RunDir.create(Path(name), "starts", "0" * 64)
        backend, rows = LocalBackend(run), []
        for number in range(turns):
            job = Job(f"job_{number}", command=("date", "+%s.%N"))
            begin = time.time()
            backend.submit([Submission(job)])
            while (status := backend.poll()[job.id]).state not in ENDED:
                backend.wait(1)
            first = float((run.job_dir(job.id) / "out.log").read_text())
            rows.append((first - begin, (status.ended or 0.0) - begin, time.time() - begin))
        backend.close()
    for what, column in zip(
        ("its first line", "its outcome", "the end is known"), zip(*rows, strict=True), strict=True
    ):
        print(f"a command to {what}: best {min(column):.3f} s, median {statistics.median(column):.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="how often each is run (default: 5)")
    turns = parser.parse_args().turns
    show_admissions(6 * turns + 1)
    memfit = [str(Path(sys.executable).with_name("memfit"))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "starts.py").write_text(TARGET)
        # Each in a folder of its own: in one folder, a run waits for a second of its own for its name.
        bare = [timed([*memfit, "run", "-q", "--runs-dir", f"bare_{n}", "--", "true"], folder) for n in range(turns)]
        print(f"memfit run -- true: {statistics.median(bare):.2f} s")
        for target in ("NOTHING", "STEP"):
            found: dict[str, list[tuple[float, ...]]] = {"auto": [], "never": []}
            for _ in range(turns):
                for warm, rows in found.items():
                    words = [*memfit, "run", f"starts:{target}", "--new", "--quiet", "--set", f"warm={warm}"]
                    seconds = timed(words, folder)
                    run = max((folder / "runs").glob("*/run_*"), key=lambda path: path.stat().st_mtime)
                    results = [json.loads(one.read_text())["result"] for one in run.glob("checkpoints/fold_*.json")]
                    began = statistics.median(one["seconds"] for one in results)
                    stepped = statistics.median(one.get("stepped", one["seconds"]) for one in results)
                    rows.append((seconds, began, stepped, statistics.median(one["kib"] for one in results) / 1024))
            print(f"\ntwo folds, {'a step with torch' if target == 'STEP' else 'nothing'}")
            for warm, rows in found.items():
                whole, began, stepped, held = (statistics.median(column) for column in zip(*rows, strict=True))
                print(
                    f"  warm: {warm:6} the run {whole:5.2f} s, begins {began:6.3f} s, "
                    f"done {stepped:6.3f} s, private {held:5.0f} MiB"
                )


if __name__ == "__main__":
    main()
