"""What the children of the tests of appending do: ``panel_child.py <verb> <JSON arguments>``."""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from memfit.data import Panel


def data_bytes() -> int:
    """What RLIMIT_DATA counts: private writable memory, touched or not."""
    return int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10


def pauses(stop_at: float | None) -> Callable[[int, int], None]:
    """Progress that says so at a share of the work, and waits for a line."""
    stopped = False

    def progress(done: int, total: int) -> None:
        nonlocal stopped
        if stop_at is not None and done >= stop_at * total and not stopped:
            stopped = True
            print("stopped", flush=True)
            sys.stdin.readline()

    return progress


def append(panel: str, source: str, stop_at: float | None = None) -> None:
    """Appends, and pauses at a share of the rows."""
    print(json.dumps(str(Panel.open(panel).append(source, progress=pauses(stop_at)).path)), flush=True)


def within(data_bytes_more: int, panel: str, source: str) -> None:
    """Appends with so much private memory more than an interpreter that has loaded what it takes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.parquet

    np.ones(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    limit = data_bytes() + data_bytes_more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Panel.open(panel).append(source)


def hold(panel: str, name: str) -> None:
    """Maps one array of a panel and stays until a line comes."""
    array = getattr(Panel.open(panel), name)
    print(json.dumps(array.nbytes), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    verbs = {"append": append, "within": within, "hold": hold}
    verbs[sys.argv[1]](**json.loads(sys.argv[2]))
