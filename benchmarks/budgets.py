"""Who knows the memory limit: memfit's Budget beside psutil and sysconf, where the truth is known.

    python benchmarks/budgets.py [--recorded-only] [--expected FILE]

One line for each recorded tree of ``tests/recorded`` (Docker, Kubernetes, Slurm, LXC, systemd, bare hosts) and, as
root, for two real places: a process two levels below a real limit of cgroup v1, and a real podman container. Each says
the limit that binds there, what ``Budget.read`` makes of it and by which file, and what
``psutil.virtual_memory().total`` and ``os.sysconf`` say from inside. In a recorded tree that is its MemTotal, which
psutil reads; the C library asks the kernel, so what sysconf said there is not known. Exit status: 0 memfit is right
everywhere, 1 it is wrong somewhere.

It makes two small control groups and one container image, and removes them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.memory import Budget
from memfit.units import MIB, format_bytes

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "recorded"
OTHERS = ("psutil", "sysconf")
V1_MEMORY = Path("/sys/fs/cgroup/memory")

#: Run inside a real place: what each of them says there, as JSON.
INSIDE = """
import json, os, psutil
from memfit.memory import Budget
pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
print(json.dumps({"budget": Budget.read().to_dict(), "psutil": psutil.virtual_memory().total, "sysconf": pages}))
"""


class SkippedError(Exception):
    """A real place that cannot be made here, and why."""


@dataclass(frozen=True)
class Place:
    """One line of the table.

    Attributes:
        name: The recorded tree, or what was made.
        truth: What is known of the binding limit; all of it must hold.
        binding: What memfit says of it.
        totals: What others take for the limit, in bytes, by name.
    """

    name: str
    truth: Mapping[str, Any]
    binding: Mapping[str, Any]
    totals: Mapping[str, int]

    @property
    def is_right(self) -> bool:
        return all(self.binding[name] == value for name, value in self.truth.items())

    def is_total_right(self, name: str) -> bool:
        return self.totals.get(name) == int(self.truth["limit_bytes"])


def recorded_places(expected: Path) -> Iterator[Place]:
    """The recorded trees, against what the tests hold memfit to."""
    for tree, truth in json.loads(expected.read_text()).items():
        total = re.search(r"^MemTotal:\s+(\d+) kB$", (RECORDED / tree / "proc/meminfo").read_text(), re.MULTILINE)
        assert total
        binding = Budget.read(root=RECORDED / tree, env={}).to_dict()["binding"]
        yield Place(tree, truth, binding, {"psutil": int(total[1]) * 1024})


def real_group() -> Place:
    """A child without a limit of its own, below a parent with 700 MiB."""
    if os.geteuid() != 0 or not (V1_MEMORY / "memory.limit_in_bytes").exists():
        raise SkippedError("needs root and a cgroup v1 memory hierarchy at /sys/fs/cgroup/memory")
    parent = V1_MEMORY / f"memfit-bench-{uuid.uuid4().hex[:8]}"
    child = parent / "child"
    with group(parent), group(child):
        (parent / "memory.limit_in_bytes").write_text(str(700 * MIB))
        enter = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs; exec "$@"', str(child), sys.executable, "-c", INSIDE]
        done = subprocess.run(enter, capture_output=True, text=True, timeout=60, check=True)
    truth = {"limit_bytes": 700 * MIB, "name": "memory.limit_in_bytes", "source": f"cgroup v1 /{parent.name}"}
    return real_place("real group, limit in its parent", truth, done.stdout)


@contextmanager
def group(path: Path) -> Iterator[None]:
    """A control group that is removed at the end, as soon as the last process has left it."""
    path.mkdir()
    try:
        yield
    finally:
        for attempt in range(100):
            try:
                path.rmdir()
                break
            except OSError:
                if attempt == 99:
                    raise
                time.sleep(0.05)


def real_container() -> Place:
    """A container of podman's with 200 MiB."""
    containers = runpy.run_path(str(ROOT / "tests" / "memory" / "containers.py"))
    try:
        with tempfile.TemporaryDirectory() as folder, containers["podman"](Path(folder)) as run:
            written = run("--memory=200m", command=[sys.executable, "-c", INSIDE])
    except containers["NoContainersError"] as reason:
        raise SkippedError(str(reason)) from None
    return real_place("real podman container", {"limit_bytes": 200 * MIB, "scope": "group"}, written)


def real_place(name: str, truth: Mapping[str, Any], written: str) -> Place:
    found = json.loads(written)
    return Place(name, truth, found["budget"]["binding"], {name: found[name] for name in OTHERS})


def print_table(places: list[Place]) -> None:
    """One line for each place, as wide as its longest cell."""
    rows: list[tuple[str, ...]] = [("place", "limit", "memfit", *OTHERS, "set by")]
    for place in places:
        said = [format_bytes(place.binding["limit_bytes"]) + mark(place.is_right)]
        said += [
            format_bytes(place.totals[name]) + mark(place.is_total_right(name)) if name in place.totals else "-"
            for name in OTHERS
        ]
        source = re.sub(r"([0-9a-f]{12})[0-9a-f]{20,}", r"\1…", place.binding["source"])
        limit = format_bytes(place.truth["limit_bytes"])
        rows.append((place.name, limit, *said, f"{place.binding['name']}, {source}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def mark(is_right: bool) -> str:
    return " right" if is_right else " WRONG"


def main() -> int:
    """Compare, print, count."""
    parser = argparse.ArgumentParser(description="Who knows the memory limit: memfit, psutil and sysconf compared.")
    parser.add_argument("--recorded-only", action="store_true", help="leave the two real places out")
    parser.add_argument("--expected", type=Path, default=RECORDED / "expected.json", help="what is true of the trees")
    options = parser.parse_args()
    places = list(recorded_places(options.expected))
    real: tuple[Callable[[], Place], ...] = () if options.recorded_only else (real_group, real_container)
    skipped = []
    for make in real:
        try:
            places.append(make())
        except SkippedError as reason:
            skipped.append(f"skipped: {make.__name__.replace('_', ' ')}: {reason}")
    print_table(places)
    print(*skipped, sep="\n", end="\n" if skipped else "")
    num_right = sum(place.is_right for place in places)
    text = [f"memfit is right in {num_right} of {len(places)} places"]
    for name in OTHERS:
        asked = [place for place in places if name in place.totals]
        text.append(f"{name} in {sum(place.is_total_right(name) for place in asked)} of {len(asked)}")
    print(", ".join(text))
    for place in places:
        if not place.is_right:
            print(f"{place.name}: known {dict(place.truth)}, found {dict(place.binding)}")
    return 0 if num_right == len(places) else 1


if __name__ == "__main__":
    sys.exit(main())
