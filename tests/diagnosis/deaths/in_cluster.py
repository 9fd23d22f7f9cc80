"""A task that takes too much memory in Ray or Dask, and their own watch ends it: ``in_cluster.py ray|dask``."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

MIB = 1 << 20


def hog(mib: int) -> int:
    """Touch memory, slowly, and hold it a while."""
    held = []
    for _ in range(mib // 8):
        held.append(bytearray(os.urandom(1) * (8 * MIB)))
        time.sleep(0.02)
    time.sleep(5)
    return len(held)


def in_dask() -> None:
    """A worker that passes its limit: the nanny kills it."""
    from dask.distributed import Client, LocalCluster

    options: dict[str, Any] = {"allowed_failures": 0, "dashboard_address": None}
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, memory_limit="200MB", scheduler_kwargs=options) as cluster,
        Client(cluster) as client,
    ):
        print(client.submit(hog, 400).result(timeout=60))


def in_ray() -> None:
    """A node that is said to be full as soon as a little is used: its monitor kills the task."""
    import ray

    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * MIB)
    task: Any = ray.remote(max_retries=0)(hog)
    print(ray.get(task.remote(150), timeout=60))


if __name__ == "__main__":
    {"dask": in_dask, "ray": in_ray}[sys.argv[1]]()
