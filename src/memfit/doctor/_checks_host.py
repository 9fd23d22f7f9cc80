"""Checks of the host and its groups: budget, walls, overcommit, swap, huge pages, limits of a process, folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from memfit.checks import Check, Verdict
from memfit.doctor._case import Case
from memfit.memory import systemd_scope_command
from memfit.units import GIB, format_bytes

#: Threads that a process has beside its pools: Python's own, a queue's feeder, pin_memory, NCCL's.
_OTHER_THREADS = 8
_NETWORK = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "fuse.sshfs", "9p", "afs"})
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_DEFAULT_MAPS = 65530


def check_budget(case: Case) -> Iterator[Check]:
    """Which limit holds, and whether anything is left of it."""
    budget = case.place.budget
    lend, binding = budget.lendable_bytes, budget.binding
    finding = (
        f"{format_bytes(lend)} can be lent of {format_bytes(binding.limit_bytes)}: {binding.name} binds; "
        f"{format_bytes(budget.reserve_bytes)} is kept back"
    )
    finding = "; ".join((finding, *budget.notes))
    verdict: Verdict = "problem" if lend == 0 else "warning" if lend < binding.limit_bytes // 10 else "ok"
    remedy = "memfit budget shows every limit; memfit ps what runs here" if verdict != "ok" else ""
    reason = "the smallest limit kills, not the host's total, and what others use counts"
    yield Check("budget", verdict, finding, reason, remedy, binding.source)


def check_walls(case: Case) -> Iterator[Check]:
    """Whether memfit can give each job a group of its own, and what a kill in this group takes along."""
    budget = case.place.budget
    none = budget.permission == "none"
    scope = systemd_scope_command(env=case.env, root=case.place.root)
    remedy = " ".join((*scope, "memfit run -- ...")) if scope else "run as root, or ask for a delegated group"
    reason = (
        "a group of its own holds a job back at its wall; without one a burst between two samples hits its neighbours"
    )
    where = budget.cgroup or "no control group"
    finding = budget.promise if none else budget.promise.partition(";")[0]
    yield Check("walls", "warning" if none else "ok", finding, reason, remedy if none else "", where)
    for path, text in case.place.group_files("memory.oom.group"):
        if text == "1":
            yield Check(
                "walls",
                "warning",
                f"memory.oom.group is 1 in {Path(path).parent}",
                "when memory runs out there the kernel kills every process of that group, memfit's supervisor too; "
                "Kubernetes sets it since 1.28",
                "keep jobs away from that limit: memfit run --reserve 1GiB -- ...",
                path,
            )


def check_overcommit(case: Case) -> Iterator[Check]:
    """How the kernel promises memory."""
    mode = case.place.number("proc/sys/vm/overcommit_memory")
    if mode is None:
        return
    commit = next((one for one in case.place.budget.limits if one.name == "CommitLimit"), None)
    reason = "in mode 2 address space counts, touched or not: a fork and a CUDA context need much more than they use"
    if mode != 2 or commit is None:
        yield Check("overcommit", "ok", f"vm.overcommit_memory={mode}", reason, source="/proc/sys/vm/overcommit_memory")
        return
    left = commit.headroom_bytes
    finding = f"vm.overcommit_memory=2: {format_bytes(left)} left of CommitLimit {format_bytes(commit.limit_bytes)}"
    verdict: Verdict = "problem" if left < 2 * GIB else "warning"
    remedy = "sysctl vm.overcommit_memory=0 (root), or fewer workers; spawned ones promise less than forked ones"
    yield Check("overcommit", verdict, finding, reason, remedy, commit.source)


def check_swap(case: Case) -> Iterator[Check]:
    """Swap, and whether it lies in memory itself."""
    swap = case.place.budget.swap
    devices = [line.split()[0] for line in (case.place.text("proc/swaps") or "").splitlines()[1:] if line.split()]
    zram = [name for name in devices if "zram" in name]
    finding = (
        f"{format_bytes(swap.usable_bytes)} usable of {format_bytes(swap.total_bytes)}" if swap.total_bytes else ""
    )
    finding = finding or "no swap: nothing takes an excess up, so the reserve is doubled"
    if zram:
        finding += f", on {', '.join(zram)}: compressed, in memory"
    reason = "memfit never lends swap: a job that swaps has stopped to work"
    yield Check("swap", "ok", finding, reason, source=swap.source)


def check_huge_pages(case: Case) -> Iterator[Check]:
    """Whether small allocations may take huge pages."""
    path = "sys/kernel/mm/transparent_hugepage"
    text = case.place.text(f"{path}/enabled")
    if text is None:
        return
    mode = text.partition("[")[2].partition("]")[0]
    none = case.place.number(f"{path}/khugepaged/max_ptes_none")
    finding = f"transparent huge pages: {mode}"
    finding += "" if none is None else f"; khugepaged fills up to {none} of 512 untouched pages"
    loose = mode == "always" and none != 0
    reason = "with always, a 2 MiB page can stand where 4 KiB were touched: resident memory grows past what is live"
    remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (root); measure, for dense tensors gain by it"
    source = f"/{path}/enabled"
    yield Check("huge pages", "warning" if loose else "ok", finding, reason, remedy if loose else "", source)


def check_processes(case: Case) -> Iterator[Check]:
    """Whether the kernel allows the threads and processes that are asked for."""
    ranks, workers, threads = case.command.num_processes, case.num_workers, case.threads
    wanted = ranks * (1 + workers) * (threads + _OTHER_THREADS)
    bounds: list[tuple[int, str]] = []
    soft = case.place.limits.get("processes", (None, None))[0]
    if soft is not None:
        bounds.append((soft, "RLIMIT_NPROC (ulimit -u)"))
    for name in ("kernel/threads-max", "kernel/pid_max"):
        if (value := case.place.number(f"proc/sys/{name}")) is not None:
            bounds.append((value, f"/proc/sys/{name}"))
    for path, text in _pids_max(case):
        if text.isdigit():
            bounds.append((int(text), path))
    if not bounds:
        return
    least, source = min(bounds)
    finding = f"about {wanted} threads at most, {least} allowed"
    verdict: Verdict = "problem" if wanted > least else "warning" if 2 * wanted > least else "ok"
    reason = "beyond it no thread starts: RuntimeError: can't start new thread, or a BlockingIOError at fork"
    remedy = "memfit run --threads 1 -- ..., fewer workers, or docker run --pids-limit=-1"
    yield Check("processes", verdict, finding, reason, "" if verdict == "ok" else remedy, source)


def _pids_max(case: Case) -> Iterator[tuple[str, str]]:
    """The limits on processes of this group and of those above it, under v2 and v1."""
    yield from case.place.group_files("pids.max")
    own = next((line for line in (case.place.text("proc/self/cgroup") or "").splitlines() if ":pids:" in line), "")
    folder = Path("sys/fs/cgroup/pids", own.rpartition(":")[2].lstrip("/"))
    while own and folder.name not in ("", "cgroup"):
        if text := case.place.text(str(folder / "pids.max")):
            yield f"/{folder}/pids.max", text.strip()
        folder = folder.parent


def check_maps(case: Case) -> Iterator[Check]:
    """How many mappings of a process the kernel allows."""
    most = case.place.number("proc/sys/vm/max_map_count")
    if most is not None:
        reason = (
            "a mapped file, a shared tensor, a thread's stack is one each; with the tight malloc a block of 64 KiB too"
        )
        few = most < _DEFAULT_MAPS
        remedy = f"sysctl vm.max_map_count={4 * _DEFAULT_MAPS} (root)" if few else ""
        finding = f"vm.max_map_count={most} mappings a process"
        yield Check("maps", "warning" if few else "ok", finding, reason, remedy, "/proc/sys/vm/max_map_count")


def check_address_space(case: Case) -> Iterator[Check]:
    """ulimits on address space, data and locked memory."""
    limits, source = case.place.limits, "/proc/self/limits"
    if not limits:
        return
    reason = "it counts what may be touched, not what is: CUDA maps more than the device and the host hold"
    rows = {"address space": "RLIMIT_AS (ulimit -v)", "data size": "RLIMIT_DATA (ulimit -d)"}
    tight = [(row, *limits[row]) for row in rows if limits.get(row, (None, None))[0] is not None]
    for row, soft, hard in tight:
        is_problem = (row == "address space" and bool(case.place.budget.devices)) or (soft or 0) < GIB
        remedy = f"ulimit -{rows[row][-2]} {'unlimited' if hard is None else hard // 1024}"
        finding = f"{rows[row]} is {format_bytes(soft or 0)}"
        yield Check("address space", "problem" if is_problem else "warning", finding, reason, remedy, source)
    if not tight:
        yield Check("address space", "ok", "no limit on address space or data", reason, source=source)
    soft = limits.get("locked memory", (None, None))[0]
    rdma = (case.place.root / "sys/class/infiniband").is_dir()
    short = rdma and soft is not None
    room = "unlimited" if soft is None else format_bytes(soft)
    finding = f"ulimit -l is {room}; {'RDMA devices are here' if rdma else 'no RDMA device'}"
    reason = "RDMA (NCCL over InfiniBand) locks its buffers and fails beyond it"
    remedy = "ulimit -l unlimited, or docker run --ulimit memlock=-1" if short else ""
    yield Check("locked memory", "warning" if short else "ok", finding, reason, remedy, source)


def check_folders(case: Case) -> Iterator[Check]:
    """What the folders for temporary files and for runs lie on, and what is free there."""
    temp = case.cwd / (case.env.get("TMPDIR") or "/tmp")
    yield _folder(case, "temp folder", temp, "set TMPDIR to a folder on a disk: export TMPDIR=/var/tmp")
    runs = case.cwd / case.setup.runs_dir
    while not (case.place.root / str(runs).lstrip("/")).exists() and runs != runs.parent:
        runs = runs.parent
    yield _folder(case, "run folder", runs, "memfit run --runs-dir FOLDER -- ...")


def _folder(case: Case, name: str, path: Path, remedy: str) -> Check:
    kind, free = case.place.kind_of(path), case.place.free_bytes(path)
    finding = f"{path} is on {kind or 'an unknown file system'}"
    finding += "" if free is None else f", {format_bytes(free)} free"
    reason = "checkpoints and intermediate files go there; a full disk ends a run as surely as full memory"
    source = "/proc/self/mountinfo, statvfs"
    if case.place.is_real and not os.access(path, os.W_OK):
        return Check(name, "problem", f"{finding}; it cannot be written to", reason, remedy, source)
    if free is not None and free < GIB:
        return Check(name, "problem" if free == 0 else "warning", finding, reason, remedy, source)
    if kind in _IN_MEMORY:
        return Check(
            name, "warning", finding, "what lies there is memory, charged to the group that wrote it", remedy, source
        )
    if kind in _NETWORK and name == "temp folder":
        return Check(
            name, "warning", finding, "sockets and locks of workers go there, and a network is slow", remedy, source
        )
    if kind == "overlay":
        finding += "; it goes with the container"
    return Check(name, "ok", finding, reason, source=source)
