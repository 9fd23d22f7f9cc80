"""What all benchmarks share: a real memory limit, ways in turns, a table, and figures with the page that shows them.

    make bench                                   list the benchmarks
    make bench NAME=stress ARGS="--jobs 60"      run one
    python benchmarks/harness.py page            write docs/benchmarks.md from benchmarks/results.jsonl
    python benchmarks/harness.py add NAME FIGURE VALUE [--unit U] [--peer TEXT]     add a figure, with commit and host

A row of ``results.jsonl`` has the benchmark's name, the figure, its value and unit, commit (of old rows the one that
wrote them down), date, host and load, and a peer or limit. The page marks a row older than its room's last change.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")
RESULTS, PAGE = ROOT / "benchmarks" / "results.jsonl", ROOT / "docs" / "benchmarks.md"
#: The benchmarks in the order of the page: the room whose change makes a figure old, and the heading.
ROOMS = {
    "demo": ("src/memfit/jobs", "Folds"),
    "stress": ("src/memfit/jobs", "Stress"),
    "policy": ("src/memfit/jobs", "Policy"),
    "growth": ("src/memfit/memory", "Growth"),
    "makespan": ("src/memfit/jobs", "Makespan"),
    "costs": ("src/memfit/training", "Costs"),
    "loaders": ("src/memfit/data", "Loaders"),
    "host_plan": ("src/memfit/pipeline/_first_steps.py", "Host memory"),
    "ground_truth": ("src/memfit/estimation", "Estimates"),
    "estimate": ("src/memfit/estimation", "Estimating"),
    "diagnosis": ("src/memfit/diagnosis", "Diagnosis"),
    "gpu": ("src/memfit", "GPU"),
    "forecaster": ("systems/memfit_workloads/forecaster", "Forecaster"),
    "video": ("systems/memfit_workloads/video", "Video classifier"),
    "recipes": ("systems/memfit_workloads/recipes", "Recipes"),
    "trajectory": ("systems/memfit_workloads/trajectory", "Trajectory model"),
    "finance": ("systems/memfit_workloads/finance", "Statistics"),
}
_HEAD = """\
# Does it work, and how well?

This page has the figure for each claim of memfit. `python benchmarks/harness.py page` makes it from
`benchmarks/results.jsonl`. The command under a heading prints the figures again, in a clone; those with a real memory
limit need root. `make bench` lists all.

All runs: one shared machine, 2 cores, 24 GiB, cgroup v1, no GPU. *Older* means that the code of that room has changed
since that day. *Busy* means that other programs ran too. *MISSED* stands at a figure that is worse than its target.
Figures on a GPU are in [gpu.md](project/gpu.md).
"""


# --- a real memory limit


def find_parent() -> Path | None:
    """Return where this user may make a group with a memory limit, or None."""
    for path, name in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "cgroup.subtree_control"),
    ):
        controls = Path(path, name)
        if controls.exists() and os.access(path, os.W_OK) and (name[0] == "m" or "memory" in controls.read_text()):
            return Path(path)
    return None


class Limited:
    """A real memory control group with a limit; at its end what still runs there is killed, and it is removed.

    ``below`` names groups to make below it.

    Raises:
        OSError: If the kernel refuses the group.
    """

    def __init__(self, parent: Path, limit_bytes: int, below: Sequence[str] = ()) -> None:
        self.path = parent / f"memfit-bench-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        self.v1 = (self.path / "memory.limit_in_bytes").exists()
        try:
            (self.path / ("memory.limit_in_bytes" if self.v1 else "memory.max")).write_text(str(limit_bytes))
            if not self.v1:
                with suppress(OSError):
                    (self.path / "memory.swap.max").write_text("0")
            if below and not self.v1:
                (self.path / "cgroup.subtree_control").write_text("+memory")
            for name in below:
                (self.path / name).mkdir()
        except BaseException:
            self.remove()
            raise

    def start(self, command: Sequence[str], below: str = "", **options: Any) -> subprocess.Popen[str]:
        """Start a command inside of the group, or of one below it."""
        enter = ["sh", "-c", f'echo $$ > {self.path / below}/cgroup.procs && exec "$@"', "sh", *command]
        return subprocess.Popen(enter, **{"text": True, **options})

    def groups(self) -> Iterator[Path]:
        """Yield the group and every group below it, deepest first."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            yield Path(folder)

    def used(self, group: Path) -> int:
        """Return the non-reclaimable bytes of a group and all below it; 0 when it is gone."""
        try:
            stat = {name: int(size) for name, size in map(str.split, (group / "memory.stat").read_text().splitlines())}
            if self.v1:
                kernel = int((group / "memory.kmem.usage_in_bytes").read_text())
                return stat["total_rss"] + stat.get("total_shmem", 0) + kernel
        except (OSError, KeyError):
            return 0
        return stat["anon"] + stat["shmem"] + stat.get("kernel", 0) - stat.get("slab_reclaimable", 0)

    @property
    def peak_bytes(self) -> int:
        """The charged peak, page cache included; 0 where the kernel does not keep it."""
        with suppress(OSError):
            return int((self.path / ("memory.max_usage_in_bytes" if self.v1 else "memory.peak")).read_text())
        return 0

    def kills(self, group: Path) -> int:
        """Return the kernel's oom_kill counter of one group (v1: its own processes; v2: all below it too)."""
        with suppress(OSError):
            text = (group / ("memory.oom_control" if self.v1 else "memory.events")).read_text()
            return int(dict(map(str.split, text.splitlines())).get("oom_kill", 0))
        return 0

    @property
    def num_oom_kills(self) -> int:
        """How many processes the kernel killed here for want of memory."""
        return self.kills(self.path)

    def end_all(self) -> None:
        """Send SIGKILL to everything below, until nothing is left."""
        for _ in range(100):
            pids: list[str] = []
            for group in self.groups():
                with suppress(OSError):
                    pids += (group / "cgroup.procs").read_text().split()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if not pids:
                return
            time.sleep(0.1)

    def remove(self) -> None:
        """End what is left and remove the group with all below it."""
        self.end_all()
        for group in self.groups():
            for attempt in range(50):
                try:
                    group.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    if attempt == 49:
                        raise
                    time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


# --- ways in turns, and what is said of them


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: int, *, warm: int = 0) -> dict[str, list[T]]:
    """Call each way once in each round, in an order that turns round; what came of the first ``warm`` is left out.

    On a machine whose speed drifts only neighbours can be compared.
    """
    found: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(rounds + warm):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            made = ways[name]()
            if number >= warm:
                found[name].append(made)
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % interval of the median: the order statistics 1.96 standard deviations of a coin's heads apart.

    >>> interval([1.0, 2.0, 3.0])
    (1.0, 3.0)
    """
    ordered, number = sorted(values), len(values)
    reach = 0.98 * number**0.5
    return ordered[max(0, math.floor(number / 2 - reach))], ordered[min(number - 1, math.ceil(number / 2 + reach))]


def ratio(own: Sequence[float], peer: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the rounds' ratios, and its interval."""
    each = [one / other for one, other in zip(own, peer, strict=True)]
    return (statistics.median(each), *interval(each))


def told(is_met: bool, text: str) -> bool:
    print(f"{'met   ' if is_met else 'MISSED'} {text}", flush=True)
    return is_met


def print_table(lines: Sequence[Sequence[object]]) -> None:
    """Print lines of cells, each column as wide as its longest cell."""
    texts = [[str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for line in texts:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a benchmark's docstring, with ``--json``."""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, with commit, host and load")
    return found


def here() -> dict[str, Any]:
    """Return what a figure of this moment carries: commit, date, host and load."""
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "commit": done.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
        "host": f"{os.cpu_count()} cores, {memory:.0f} GiB",
        "load": round(os.getloadavg()[0], 1),
    }


def write_json(path: Path | None, figures: Any) -> None:
    """Write figures with what `here` says of them; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(here() | {"figures": figures}, indent=1) + "\n")


# --- the page


def read_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def last_changes(names: Sequence[str]) -> dict[str, str]:
    """Return the day of the last change of each benchmark's room by git; empty texts where git does not know it."""
    found = {}
    for name in names:
        words = ["git", "-C", str(ROOT), "log", "-1", "--format=%cs", "--", ROOMS[name][0]]
        found[name] = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return found


def make_page(rows: Sequence[Mapping[str, Any]], changed: Mapping[str, str]) -> str:
    """Return the page of some rows; a row older than the day in ``changed`` of its benchmark is marked."""
    parts = [_HEAD]
    for name, (_, title) in ROOMS.items():
        own = [row for row in rows if row["name"] == name]
        if not own:
            continue
        head = f"## {title}\n{summary(file_of(name))} `make bench NAME={name}`.\n"
        parts += [head, "| figure | value | peer or limit | date |\n|---|---|---|---|"]
        for row in own:
            marks = [",&nbsp;busy"] * bool(row.get("busy")) + [",&nbsp;older"] * (row["date"] < changed.get(name, ""))
            value = f"{row['value']} {row['unit']}".strip() + " MISSED" * bool(row.get("missed"))
            cells = (row["figure"], value, row.get("peer", ""), row["date"] + "".join(marks))
            parts.append(f"| {' | '.join(map(str, cells))} |")
        parts.append("")
    return "\n".join(parts)


def file_of(name: str) -> Path:
    """Return the file of a benchmark: one of this folder, or of a workload."""
    path = ROOT / "benchmarks" / f"{name}.py"
    return path if path.exists() else ROOT / "systems" / "memfit_workloads" / name / "bench.py"


def summary(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def main() -> int:
    parsed = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parsed.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="a line for each benchmark")
    verbs.add_parser("page", help=f"write {PAGE.relative_to(ROOT)}")
    one = verbs.add_parser("run", help="run one, with its own options behind", add_help=False)
    new = verbs.add_parser("add", help="add a figure of this commit, host and moment")
    for verb in (one, new):
        verb.add_argument("name", choices=ROOMS)
    for argument in ("figure", "value"):
        new.add_argument(argument)
    for option in ("--unit", "--peer"):
        new.add_argument(option, default="")
    for option in ("--missed", "--busy"):
        new.add_argument(option, action="store_true")
    options, rest = parsed.parse_known_args()
    if rest and options.verb != "run":
        parsed.error(f"unknown: {rest}")
    if options.verb == "list":
        print_table([(name, summary(file_of(name))) for name in ROOMS])
    elif options.verb == "run":
        path, folders = file_of(options.name), [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        words = [str(path)] if path.name != "bench.py" else ["-m", f"memfit_workloads.{options.name}.bench"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
        os.execve(sys.executable, [sys.executable, *words, *rest], environment)
    elif options.verb == "add":
        row = {name: value for name, value in vars(options).items() if name != "verb" and value not in ("", False)}
        with open(RESULTS, "a") as file:
            file.write(json.dumps({"unit": "", **row, **here()}, ensure_ascii=False) + "\n")
    else:
        PAGE.write_text(make_page(read_rows(), last_changes(list(ROOMS))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
