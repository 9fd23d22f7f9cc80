"""Forecast and measured host memory of 24 trainings, beside each other.

    python benchmarks/host_plan.py [--row NUMBER] [--again] [--results FILE] [--json FILE]

The rows below were fixed before anything was measured: the first 16 cover each pair of the settings (a start method
only with workers), the others are combinations where memory is copied most. Each is a training of two epochs on the
CPU, real processes of gloo where it has ranks, by a plain loop, transformers' Trainer or Lightning. It runs in a
control group, whose anonymous and shared memory is read every 20 ms: each page once, as in the sum of PSS, and batches
that are on their way too. Pages of mapped files are added each once, as /proc/<pid>/pagemap has them, so that other
programs that map the same libraries change nothing. The forecast is made in processes of its own, from the same
loaders, by memfit.data.host_footprint. It needs root and a memory cgroup of v1. ``--results`` keeps what was measured,
and ``--again`` forecasts anew for it. Exit status: 0 if the median error is at most 10 %, the worst 20 %, and no bound
(forecast with margin) was broken.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from harness import Limited, parser, print_table, told, write_json
from memfit.units import MIB, format_count

FACTORS = ("workers", "data", "start", "validation", "ranks", "loop", "persistent")
ROWS: tuple[tuple[Any, ...], ...] = (
    (2, "packed", "forkserver", False, 4, "huggingface", True),
    (4, "list", "spawn", False, 2, "lightning", False),
    (4, "mapped", "fork", True, 1, "plain", True),
    (2, "array", "forkserver", True, 1, "lightning", False),
    (2, "list", "fork", True, 4, "huggingface", False),
    (2, "array", "spawn", True, 2, "plain", True),
    (0, "mapped", "forkserver", False, 4, "plain", False),
    (4, "packed", "spawn", False, 1, "huggingface", False),
    (4, "array", "fork", False, 4, "lightning", True),
    (2, "mapped", "forkserver", False, 2, "huggingface", True),
    (0, "packed", "fork", True, 2, "lightning", False),
    (4, "list", "forkserver", False, 1, "plain", True),
    (4, "packed", "fork", False, 2, "plain", False),
    (0, "array", "fork", False, 1, "huggingface", False),
    (2, "mapped", "spawn", False, 4, "lightning", False),
    (0, "list", "spawn", False, 1, "lightning", False),
    (4, "list", "fork", True, 1, "lightning", True),
    (2, "list", "spawn", True, 1, "plain", True),
    (2, "array", "forkserver", True, 2, "huggingface", False),
    (4, "list", "fork", True, 2, "plain", False),
    (2, "mapped", "fork", True, 4, "lightning", False),
    (4, "packed", "fork", True, 4, "plain", True),
    (0, "array", "fork", True, 4, "huggingface", False),
    (2, "array", "spawn", True, 1, "lightning", True),
)
TRAIN_MIB, VALID_MIB = 96, 64
#: The asked errors, and the margin that a node's bound has above the forecast.
MEDIAN, WORST, MARGIN = 0.10, 0.20, 0.10
_PAGE = 4096
_LIMIT, _SECONDS, _EVERY, _SWEEP_EVERY = 12 << 30, 400, 0.02, 0.5
_SCRIPT = Path(__file__).with_name("_host_plan_training.py")


def row_of(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(FACTORS, values, strict=True)) | {"train_mib": TRAIN_MIB, "valid_mib": VALID_MIB}


class Sampler(threading.Thread):
    """Reads the memory of a control group: the peaks by phase."""

    def __init__(self, group: Path, folder: Path) -> None:
        super().__init__(daemon=True)
        self.group, self.folder, self.over = group, folder, threading.Event()
        self.peaks: dict[str, int] = {}
        self.files = 0

    def run(self) -> None:
        swept = time.monotonic()
        while not self.over.wait(_EVERY):
            phases = {path.read_text() for path in self.folder.glob("phase.*")}
            if not (phase := "validate" if "validate" in phases else "train" if "train" in phases else ""):
                continue
            text = (self.group / "memory.stat").read_text()
            sizes = {name: int(size) for name, size in map(str.split, text.splitlines())}
            taken = sizes["total_rss"] + sizes["total_shmem"] + sizes.get("total_swap", 0)
            self.peaks[phase] = max(self.peaks.get(phase, 0), taken + self.files)
            if time.monotonic() - swept > _SWEEP_EVERY:
                pids = [int(word) for word in (self.group / "cgroup.procs").read_text().split()]
                self.files, swept = max(self.files, _file_bytes(pids)), time.monotonic()


def _file_bytes(pids: Sequence[int]) -> int:
    """Return the bytes of file pages that processes map, each page once."""
    pages: dict[tuple[str, str], list[np.ndarray[Any, Any]]] = {}
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/pagemap", "rb") as table:
            for line in maps:
                span, _, offset, device, inode, *name = line.split(maxsplit=5)
                if inode == "0" or not name or name[0].startswith(("/dev/", "/memfd:", "/SYSV")):
                    continue
                begin, end = (int(word, 16) // _PAGE for word in span.split("-"))
                flags = np.frombuffer(os.pread(table.fileno(), 8 * (end - begin), 8 * begin), np.uint64)
                there = np.flatnonzero((flags >> np.uint64(61) & np.uint64(5)) == 5)  # present, and of a file
                pages.setdefault((device, inode), []).append(there + int(offset, 16) // _PAGE)
    return sum(len(np.unique(np.concatenate(found))) for found in pages.values()) * _PAGE


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def environment(row: Mapping[str, Any], folder: Path) -> dict[str, str]:
    variables = {"HOST_PLAN_ROW": json.dumps(row), "HOST_PLAN_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **variables, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}


def measure(row: Mapping[str, Any], folder: Path) -> dict[str, int]:
    for path in folder.glob("phase.*"):
        path.unlink()
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(row["ranks"])}
    group |= {"LOCAL_WORLD_SIZE": str(row["ranks"]), "TORCHELASTIC_RUN_ID": "host_plan"}
    with Limited(Path("/sys/fs/cgroup/memory"), _LIMIT) as limited:
        sampler = Sampler(limited.path, folder)
        sampler.start()
        ranks = []
        try:
            for rank in range(row["ranks"]):
                own = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if row["ranks"] > 1 else {}
                with open(folder / f"log.{rank}", "w") as log:
                    command, variables = [sys.executable, str(_SCRIPT)], environment(row, folder) | own
                    ranks.append(limited.start(command, env=variables, stdout=log, stderr=subprocess.STDOUT))
            codes = [one.wait(timeout=_SECONDS) for one in ranks]
        finally:
            sampler.over.set()
            sampler.join()
    if any(codes):
        raise SystemExit(f"{row}: {codes}\n" + (folder / "log.0").read_text()[-3000:])
    return sampler.peaks


def forecasts(rows: Mapping[int, Mapping[str, Any]], folders: Mapping[int, Path]) -> Iterator[tuple[int, Any]]:
    """Yield the number and the forecast of each row, from one process for each loop."""
    for loop in sorted({row["loop"] for row in rows.values()}):
        numbers = [number for number, row in rows.items() if row["loop"] == loop]
        asked = json.dumps([[number, rows[number], str(folders[number])] for number in numbers])
        variables = environment(rows[numbers[0]], folders[numbers[0]])
        command = [sys.executable, str(_SCRIPT), "forecast", asked]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                found = json.loads(line)
                yield found.pop("row"), found


def make_files(row: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if row["data"] in ("mapped", "packed") and not list(folder.glob("train*")):
        subprocess.run([sys.executable, str(_SCRIPT), "files"], env=environment(row, folder), check=True)


def report(results: Mapping[int, Mapping[str, Any]]) -> bool:
    """Print the table; whether the errors are as asked."""
    lines: list[tuple[object, ...]] = [("row", "training", "forecast, MiB", "measured, MiB", "ratio")]
    errors, broken = {}, []
    for number, found in sorted(results.items()):
        row, phases = found["row"], found["forecast"]["phases"]
        expected = {name: (one["private_bytes"] + one["shared_bytes"]) / MIB for name, one in phases.items()}
        measured = {name: size / MIB for name, size in found["measured"].items()}
        ratio = max(expected.values()) / max(measured.values())
        errors[number] = abs(ratio - 1)
        broken += [number] if ratio * (1 + MARGIN) < 1 else []
        words = f"{row['workers']} workers, {row['data']}, {row['start']}, {format_count(row['ranks'], 'rank')}, "
        words += row["loop"] + ", persistent" * row["persistent"]
        texts = [
            " / ".join(f"{sizes[name]:,.0f}" for name in ("train", "validate") if name in sizes)
            for sizes in (expected, measured)
        ]
        lines.append((number, words, *texts, f"{ratio:.2f}"))
    print_table(lines)
    median, worst = statistics.median(errors.values()), max(errors.values())
    asked = [
        told(median <= MEDIAN, f"median error {median:.1%} of {len(errors)} ({MEDIAN:.0%})"),
        told(worst <= WORST, f"worst {worst:.1%} ({WORST:.0%})"),
        told(not broken, f"above the forecast with a margin of {MARGIN:.0%}: {broken or 'none'}"),
    ]
    return all(asked)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--row", type=int, action="append", help="only this row, from 1")
    options.add_argument("--again", action="store_true", help="forecast anew for the measurements in --results")
    options.add_argument("--results", type=Path, help="what was measured; rows that lie there are not measured again")
    args = options.parse_args()
    known = json.loads(args.results.read_text()) if args.results and args.results.exists() else {}
    results: dict[int, Any] = {int(number): found for number, found in known.items()}
    rows = {number: row_of(ROWS[number - 1]) for number in args.row or range(1, len(ROWS) + 1)}
    with tempfile.TemporaryDirectory(prefix="host-plan-", dir=os.environ.get("TMPDIR")) as root:
        folders = {number: Path(root, row["data"]) for number, row in rows.items()}
        for number, row in rows.items():
            make_files(row, folders[number])
        asked = {number: row for number, row in rows.items() if args.again or number not in results}
        for number, found in forecasts(asked, folders) if asked else ():
            results.setdefault(number, {"row": rows[number]})["forecast"] = found
        for number, row in rows.items():
            if "measured" not in results[number]:
                results[number]["measured"] = measure(row, folders[number])
                print(number, results[number]["measured"], file=sys.stderr, flush=True)
            if args.results:
                args.results.write_text(json.dumps({one: x for one, x in results.items() if "measured" in x}))
    chosen = {number: results[number] for number in rows}
    write_json(args.json, chosen)
    return 0 if report(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
