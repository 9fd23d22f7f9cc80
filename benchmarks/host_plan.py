"""Forecast and measured host memory of 24 trainings, beside each other.

    python benchmarks/host_plan.py [--row NUMBER] [--again] [--json FILE]

The rows below were fixed before anything was measured: the first 16 cover each pair of the settings (a start method
only with workers), the others are combinations where memory is copied most. Each is a training of two epochs on the
CPU, real processes of gloo where it has ranks, by a plain loop, transformers' Trainer or Lightning
(host_plan_training.py). It runs in a control group, whose anonymous and shared memory is read every 20 ms: each page
once, as in the sum of PSS, and batches that are on their way too. Pages of mapped files are added each once, as
/proc/<pid>/pagemap has them, so that other programs that map the same libraries change nothing. The plain sum of PSS
stands beside it. The forecast is made in processes of its own, from the same loaders, by memfit.data.host_footprint.
It needs root and a memory cgroup of v1. ``--again`` forecasts anew for the measurements in FILE.
Exit status: 0 if the median error is at most 10 %, the worst 20 %, and no bound (forecast with margin) was broken.
"""

from __future__ import annotations

import argparse
import itertools
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

from limited import Limited
from memfit.memory import ProcReader
from memfit.units import format_count

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
_MIB, _PAGE = 1 << 20, 4096
_LIMIT, _SECONDS, _EVERY, _SWEEP_EVERY = 12 << 30, 400, 0.02, 0.5
_SCRIPT = Path(__file__).with_name("host_plan_training.py")


def row_of(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(FACTORS, values, strict=True)) | {"train_mib": TRAIN_MIB, "valid_mib": VALID_MIB}


def pairs(values: Sequence[Any]) -> set[tuple[Any, ...]]:
    """Return the pairs of settings in a row; without workers there is no start method, and none lives on."""
    named = list(zip(FACTORS, values, strict=True))
    if not values[0]:
        named = [one for one in named if one[0] not in ("start", "persistent")]
    return set(itertools.combinations(named, 2))


def missing_pairs() -> set[tuple[Any, ...]]:
    levels = [sorted(set(column), key=str) for column in zip(*ROWS, strict=True)]
    return set().union(*map(pairs, itertools.product(*levels))) - set().union(*map(pairs, ROWS))


class Sampler(threading.Thread):
    """Reads the memory of a control group: the peaks by phase."""

    def __init__(self, group: Path, folder: Path) -> None:
        super().__init__(daemon=True)
        self.group, self.folder, self.over = group, folder, threading.Event()
        self.peaks: dict[str, int] = {}
        self.pss: dict[str, int] = {}
        self.files = self.longest_gap = 0
        self._reader = ProcReader()

    def run(self) -> None:
        last = swept = time.monotonic()
        while not self.over.wait(_EVERY):
            now = time.monotonic()
            self.longest_gap, last = max(self.longest_gap, round((now - last) * 1e3)), now
            if not (phase := self._phase()):
                continue
            text = (self.group / "memory.stat").read_text()
            sizes = {name: int(size) for name, size in map(str.split, text.splitlines())}
            taken = sizes["total_rss"] + sizes["total_shmem"] + sizes.get("total_swap", 0)
            self.peaks[phase] = max(self.peaks.get(phase, 0), taken + self.files)
            if now - swept > _SWEEP_EVERY:
                self._sweep(phase)
                swept = last = time.monotonic()

    def _phase(self) -> str:
        found = {path.read_text() for path in self.folder.glob("phase.*")}
        return "validate" if "validate" in found else "train" if "train" in found else ""

    def _sweep(self, phase: str) -> None:
        pids = [int(word) for word in (self.group / "cgroup.procs").read_text().split()]
        rollups = [self._reader.rollup(pid) for pid in pids]
        self.pss[phase] = max(self.pss.get(phase, 0), sum(one.pss for one in rollups if one))
        self.files = max(self.files, _file_bytes(pids))


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


def measure(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run a training; return the peaks by phase."""
    for path in folder.glob("phase.*"):
        path.unlink()
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(row["ranks"])}
    group |= {"LOCAL_WORLD_SIZE": str(row["ranks"]), "TORCHELASTIC_RUN_ID": "host_plan"}
    with Limited(Path("/sys/fs/cgroup/memory"), _LIMIT) as limited:
        sampler = Sampler(limited.path, folder)
        sampler.start()
        began, ranks = time.monotonic(), []
        try:
            for rank in range(row["ranks"]):
                own = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if row["ranks"] > 1 else {}
                variables = environment(row, folder) | own
                with open(folder / f"log.{rank}", "w") as log:
                    command = [sys.executable, str(_SCRIPT)]
                    ranks.append(limited.start(command, env=variables, stdout=log, stderr=subprocess.STDOUT))
            codes = [one.wait(timeout=_SECONDS) for one in ranks]
        finally:
            for one in ranks:
                one.kill()
            sampler.over.set()
            sampler.join()
            for word in (limited.path / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    os.kill(int(word), 9)
    if any(codes):
        raise SystemExit(f"{row}: {codes}\n" + (folder / "log.0").read_text()[-3000:])
    return {
        "peaks": sampler.peaks, "pss": sampler.pss, "files": sampler.files, "gap_ms": sampler.longest_gap,
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip


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


def report(results: Mapping[int, Mapping[str, Any]]) -> int:
    print("| row | training | forecast | measured | ratio | sum of PSS |\n|---|---|---|---|---|---|")
    errors, broken = {}, []
    for number, found in sorted(results.items()):
        row, told = found["row"], found["forecast"]
        expected = {name: (p["private_bytes"] + p["shared_bytes"]) / _MIB for name, p in told["phases"].items()}
        measured = {name: size / _MIB for name, size in found["measured"]["peaks"].items()}
        whole = max(measured.values())
        ratio = max(expected.values()) / whole
        errors[number] = abs(ratio - 1)
        broken += [number] if max(expected.values()) * (1 + MARGIN) < whole else []
        words = f"{row['workers']} workers, {row['data']}, {row['start']}, {format_count(row['ranks'], 'rank')}, "
        words += row["loop"] + ", persistent" * row["persistent"]

        def by_phase(sizes: Mapping[str, float]) -> str:
            return " / ".join(f"{sizes[name]:,.0f}" for name in ("train", "validate") if name in sizes)

        pss = max(found["measured"]["pss"].values(), default=0) / _MIB
        print(f"| {number} | {words} | {by_phase(expected)} | {by_phase(measured)} | {ratio:.2f} | {pss:,.0f} |")
    median, worst = statistics.median(errors.values()), max(errors.values())
    gap = max(found["measured"]["gap_ms"] for found in results.values())
    print(f"\nMiB, training / validation. {len(results)} trainings; the longest time between two samples: {gap} ms.")
    print(f"Median error {median:.1%} (asked {MEDIAN:.0%}), worst {worst:.1%} (asked {WORST:.0%}).")
    print(f"Above the forecast with a margin of {MARGIN:.0%}: {len(broken)} {broken or ''}")
    print(f"Off by more than {WORST:.0%}: {[number for number, error in errors.items() if error > WORST]}")
    return int(median > MEDIAN or worst > WORST or bool(broken))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--row", type=int, action="append", help="only this row, from 1")
    parser.add_argument("--again", action="store_true", help="forecast anew for the measurements in --json")
    parser.add_argument("--json", type=Path, help="where the results go; rows that lie there are not measured again")
    args = parser.parse_args()
    if left := missing_pairs():
        raise SystemExit(f"the rows do not cover {sorted(map(str, left))}")
    known = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    results: dict[int, Any] = {int(number): found for number, found in known.items()}
    numbers = args.row or range(1, len(ROWS) + 1)
    rows = {number: row_of(ROWS[number - 1]) for number in numbers}
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
            if args.json:
                done = {one: found for one, found in results.items() if "measured" in found}
                args.json.write_text(json.dumps(done))
    return report({number: results[number] for number in rows})


if __name__ == "__main__":
    sys.exit(main())
