"""The jobs of `stress.py` under other frameworks, each in a fresh group of the same limit, side by side with memfit.

    python benchmarks/stress_peers.py [--jobs 300] [--with memfit,ray-16,dask-16,joblib-8,joblib-16] [--python PYTHON]

The number is how many jobs the framework may run at once; memfit finds out for itself. A task of theirs runs the very
command that memfit runs, as a child. They are told what there is to tell:

- Ray: the declared size as ``memory=``, the budget as the node's memory, the smallest object store, its memory monitor
  as by default, 3 retries for a failed or killed task (and 3 for one that its monitor ended);
- Dask: two workers that share the budget (``memory_limit``) and have it as a resource of which each task takes its
  declared size, 3 retries;
- joblib: the number alone; it knows neither memory nor retries.

They run in a mount namespace in which their group stands where a container's would, for they look nowhere else. What
they use themselves counts as their use. They are not pinned in constraints.txt (ray alone brings fifty packages):
``pip install 'memfit[bench]'``, here or in an environment of their own that --python names.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

DEFAULT = "memfit,ray-16,dask-16,joblib-8,joblib-16"
MODULES = {"ray": "ray", "dask": "distributed", "joblib": "joblib"}
RETRIES = 3
#: Bytes of Ray's object store; it takes no less.
SMALLEST_STORE = 80 << 20

#: A command and the bytes that it says it needs.
Task = tuple[Sequence[str], int]


def run_task(command: Sequence[str]) -> str:
    """What every framework's task does: run the command as a child; its output.

    Raises:
        RuntimeError: If it failed or was killed.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}")
    return done.stdout


def run_quietly(command: Sequence[str]) -> str:
    """The same where a failure would end all the others."""
    try:
        return run_task(command)
    except RuntimeError as error:
        return f"error {error}\n"


def with_ray(tasks: Sequence[Task], budget_bytes: int, at_once: int) -> Iterator[str]:
    ray: Any = import_module("ray")
    ray.init(num_cpus=at_once, _memory=budget_bytes, object_store_memory=SMALLEST_STORE, include_dashboard=False)
    remote = ray.remote(max_retries=RETRIES, retry_exceptions=True, num_cpus=1)(run_task)
    left = [remote.options(memory=declared).remote(command) for command, declared in tasks]
    while left:
        (ready, *_), left = ray.wait(left)
        yield outcome(ray.get, ready)
    ray.shutdown()


def with_dask(tasks: Sequence[Task], budget_bytes: int, at_once: int) -> Iterator[str]:
    dask: Any = import_module("distributed")
    half = budget_bytes // 2
    options = {"memory_limit": half, "resources": {"memory": half}, "dashboard_address": None}
    with (
        dask.LocalCluster(n_workers=2, threads_per_worker=at_once // 2, **options) as cluster,
        dask.Client(cluster) as client,
    ):
        futures = [
            client.submit(run_task, command, pure=False, retries=RETRIES, resources={"memory": min(declared, half)})
            for command, declared in tasks
        ]
        for future in dask.as_completed(futures):
            yield outcome(future.result)


def with_joblib(tasks: Sequence[Task], budget_bytes: int, at_once: int) -> Iterator[str]:
    joblib: Any = import_module("joblib")
    parallel = joblib.Parallel(n_jobs=at_once, return_as="generator_unordered")
    yield from parallel(joblib.delayed(run_quietly)(command) for command, _ in tasks)


def outcome(get: Callable[..., str], *arguments: object) -> str:
    """What a task brought, or why it failed in the end."""
    try:
        return get(*arguments)
    except Exception as error:
        return f"error {type(error).__name__}: {str(error)[:200]}".partition("\n")[0] + "\n"


WITH = {"ray": with_ray, "dask": with_dask, "joblib": with_joblib}


def inside(name: str, at_once: int, work: Path) -> None:
    """In the group: hand the jobs to one framework, and print what they print as it comes."""
    order = json.loads((work / "order.json").read_text())
    tasks = [(command, declared) for command, declared in order["tasks"]]
    for text in WITH[name](tasks, order["budget_bytes"], at_once):
        sys.stdout.write(text)
        sys.stdout.flush()


def run_peer(setting: Any, peer: str, python: str, work: Path) -> dict[str, Any]:
    """The jobs under one framework, as ``ray-16``; the figures."""
    import stress

    name, _, number = peer.partition("-")
    tag = uuid.uuid4().hex[:8]
    stress.write_jobs(setting.jobs, work)
    words = [sys.executable, *stress.template(work, tag)]
    tasks = [
        ([word.format(**job.row()) for word in words], job.declared_mib << 20)
        for job in setting.jobs
    ]  # fmt: skip
    (work / "order.json").write_text(json.dumps({"tasks": tasks, "budget_bytes": setting.budget_bytes}))
    command = [python, __file__, "--inside", name, number, str(work)]
    env = {**os.environ, "HOME": str(work), "DASK_TEMPORARY_DIRECTORY": str(work)}
    env |= {"RAY_task_oom_retries": str(RETRIES), "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    # The paths of Ray's sockets must be short, so its folder does not lie in the working folder.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        trial = setting.try_out(command, work, tag, env | {"RAY_TMPDIR": folder}, as_container=True)
    return stress.figures_of(trial, setting.jobs, stress.results_of([work / "out.log"]), setting.budget_bytes)


def is_installed(name: str, python: str) -> bool:
    return subprocess.run([python, "-c", f"import {MODULES[name]}"], capture_output=True).returncode == 0


def print_table(table: Mapping[str, Mapping[str, Any]]) -> None:
    """One line for each framework, as wide as its longest cell."""
    rows: list[tuple[str, ...]] = [
        ("", "kernel kills", "right", "wrong", "missing", "lost attempts", "lost run time", "use", "makespan", "ended")
    ]
    for peer, figures in table.items():
        right = figures["num_jobs"] - figures["num_wrong"] - figures["num_missing"]
        ended = "timeout" if figures["exit_code"] is None else f"exit {figures['exit_code']}"
        lost = figures["lost_by_end"]
        rows.append((
            peer,
            str(figures["kills"]["total"]) + (" and the neighbour" if figures["neighbour_killed"] else ""),
            f"{right} of {figures['num_jobs']}",
            str(figures["num_wrong"]),
            str(figures["num_missing"]),
            f"{figures['num_lost_attempts']} ({lost['fail']} failed, {lost['killed']} killed)",
            f"{figures['lost_seconds']:.0f} s, {figures['restarts']:.1%}",
            f"{figures['use_all']:.1%}",
            f"{figures['makespan']:.0f} s",
            ended,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> int:
    import stress

    parser = stress.parser(__doc__ or "")
    parser.add_argument("--with", dest="peers", default=DEFAULT, help=f"which, and how many at once ({DEFAULT})")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the frameworks")
    options = parser.parse_args()
    setting = stress.setting_of(options)
    for peer in options.peers.split(","):
        if not re.fullmatch(rf"memfit|(?:{'|'.join(WITH)})-[0-9]+", peer):
            parser.error(f"'{peer}' is none of memfit, ray-N, dask-N and joblib-N")
    table: dict[str, dict[str, Any]] = {}
    with stress.working_folder(options.work) as work:
        for peer in options.peers.split(","):
            name = peer.partition("-")[0]
            if name != "memfit" and not is_installed(name, options.python):
                print(f"skipped: {name} is not there; pip install 'memfit[bench]', or name another --python")
                continue
            print(f"{peer} ...", flush=True)
            folder = work / peer
            folder.mkdir()
            is_own = name == "memfit"
            table[peer] = (
                stress.run_memfit(setting, folder) if is_own else run_peer(setting, peer, options.python, folder)
            )
            if not table[peer]["makespan"]:
                print((folder / "err.log").read_text()[-2000:], file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n")
    print_table(table)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        try:
            inside(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
        except Exception:
            traceback.print_exc()
            os._exit(1)  # a framework that failed must not wait for its helpers at the interpreter's end
        sys.exit(0)
    sys.exit(main())
