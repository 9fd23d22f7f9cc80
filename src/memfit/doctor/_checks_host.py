"""Checks of the host and its groups: budget, /dev/shm, overcommit, swap, huge pages, limits of a process, folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from memfit.checks import Check
from memfit.doctor._case import Case, judge
from memfit.memory import systemd_scope_command
from memfit.units import GIB, MIB, format_bytes

#: Threads that a process has beside its pools: Python's own, a queue's feeder, pin_memory, NCCL's.
_OTHER_THREADS = 8
_NETWORK = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "fuse.sshfs", "9p", "afs"})
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
#: What Docker gives a container that is not told otherwise. Source: docker run reference, --shm-size.
_DOCKER_BYTES = 64 * MIB
#: Less than this in dead segments is not worth a word.
_LEAST_LOST_BYTES = 16 * MIB


def check_budget(case: Case) -> Iterator[Check]:
    """Which limit holds, and whether anything is left of it."""
    budget = case.place.budget
    lend, binding = budget.lendable_bytes, budget.binding
    finding = (
        f"{format_bytes(lend)} can be lent of {format_bytes(binding.limit_bytes)}: {binding.name} binds; "
        f"{format_bytes(budget.reserve_bytes)} is kept back"
    )
    yield judge(
        "budget",
        "; ".join((finding, *budget.notes)),
        "the smallest limit kills, not the host's total, and what others use counts",
        "memfit budget shows every limit; memfit ps what runs here",
        binding.source,
        problem=lend == 0,
        warning=lend < binding.limit_bytes // 10,
    )


def check_walls(case: Case) -> Iterator[Check]:
    """Whether memfit can give each job a group of its own, and what a kill in this group takes along."""
    budget = case.place.budget
    none = budget.permission == "none"
    scope = systemd_scope_command(env=case.env, root=case.place.root)
    yield judge(
        "walls",
        budget.promise if none else budget.promise.partition(";")[0],
        "a group of its own holds a job back at its wall; without one a burst between two samples hits its neighbours",
        " ".join((*scope, "memfit run -- ...")) if scope else "run as root, or ask for a delegated group",
        budget.cgroup or "no control group",
        warning=none,
    )
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


def check_kernel(case: Case) -> Iterator[Check]:
    """How the kernel promises memory: overcommit, swap, and huge pages."""
    place = case.place
    mode = place.number("proc/sys/vm/overcommit_memory")
    commit = next((one for one in place.budget.limits if one.name == "CommitLimit"), None) if mode == 2 else None
    left = "" if commit is None else f": {format_bytes(commit.headroom_bytes)} left of CommitLimit "
    if mode is not None:
        yield judge(
            "overcommit",
            f"vm.overcommit_memory={mode}{left}{format_bytes(commit.limit_bytes) if commit else ''}",
            "in mode 2 address space counts, touched or not: a fork and a CUDA context need much more than they use",
            "sysctl vm.overcommit_memory=0 (root), or fewer workers; spawned ones promise less than forked ones",
            commit.source if commit else "/proc/sys/vm/overcommit_memory",
            problem=commit is not None and commit.headroom_bytes < 2 * GIB,
            warning=commit is not None,
        )
    swap, lines = place.budget.swap, place.text("proc/swaps").splitlines()[1:]
    zram = ", ".join(line.split()[0] for line in lines if "zram" in line)
    usable = f"{format_bytes(swap.usable_bytes)} usable of {format_bytes(swap.total_bytes)}"
    finding = usable if swap.total_bytes else "no swap: nothing takes an excess up, so the reserve is doubled"
    finding += f", on {zram}: compressed, in memory" if zram else ""
    yield judge("swap", finding, "memfit never lends swap: a job that swaps has stopped to work", "", swap.source)
    path = "sys/kernel/mm/transparent_hugepage"
    if text := place.text(f"{path}/enabled"):
        pages = text.partition("[")[2].partition("]")[0]
        none = place.number(f"{path}/khugepaged/max_ptes_none")
        filled = "" if none is None else f"; khugepaged fills up to {none} of 512 untouched pages"
        yield judge(
            "huge pages",
            f"transparent huge pages: {pages}{filled}",
            "with always, a 2 MiB page can stand where 4 KiB were touched: resident memory grows past what is live",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (root); measure, for dense tensors gain by it",
            f"/{path}/enabled",
            warning=pages == "always" and none != 0,
        )


def check_limits(case: Case) -> Iterator[Check]:
    """The limits of a process: how many there may be, address space, locked memory, open files."""
    place, limits, source = case.place, case.place.limits, "/proc/self/limits"
    wanted = case.command.num_processes * (1 + case.num_workers) * (case.threads + _OTHER_THREADS)
    bounds = [(limits.get("processes", (None, None))[0], "RLIMIT_NPROC (ulimit -u)")]
    bounds += [
        (place.number(f"proc/sys/kernel/{name}"), f"/proc/sys/kernel/{name}") for name in ("threads-max", "pid_max")
    ]
    bounds += [(int(text), path) for path, text in _pids_max(case) if text.isdigit()]
    if known := [(most, named) for most, named in bounds if most is not None]:
        least, named = min(known)
        yield judge(
            "processes",
            f"about {wanted} threads at most, {least} allowed",
            "beyond it no thread starts: RuntimeError: can't start new thread, or a BlockingIOError at fork",
            "memfit run --threads 1 -- ..., fewer workers, or docker run --pids-limit=-1",
            named,
            problem=wanted > least,
            warning=2 * wanted > least,
        )
    if limits:
        yield from _address_space(case, source)
        soft, rdma = limits.get("locked memory", (None, None))[0], (place.root / "sys/class/infiniband").is_dir()
        room = "unlimited" if soft is None else format_bytes(soft)
        yield judge(
            "locked memory",
            f"ulimit -l is {room}; {'RDMA devices are here' if rdma else 'no RDMA device'}",
            "RDMA (NCCL over InfiniBand) locks its buffers and fails beyond it",
            "ulimit -l unlimited, or docker run --ulimit memlock=-1",
            source,
            warning=rdma and soft is not None,
        )
    soft, hard = limits.get("open files", (None, None))
    call = next((one for one in case.script.sharing if one.name), None)
    strategy = call.name if call else "file_descriptor"
    is_leaky = strategy == "file_system"
    yield judge(
        "open files",
        f"{'unlimited' if soft is None else soft} open files a process; torch shares by {strategy}",
        "file_system needs no open files, and leaves its segments in /dev/shm when a process is killed"
        if is_leaky
        else "by file_descriptor each tensor that came from a worker keeps one file open as long as it lives: a list "
        "of 400 batches of 3 tensors holds 1,200",
        'set_sharing_strategy("file_descriptor")'
        if is_leaky
        else f"ulimit -n {hard or 65536}; keep copies (tensor.clone()) and not the batches themselves",
        f"{source}; {call.site if call else 'the default of torch on Linux'}",
        warning=is_leaky or (soft is not None and soft < 4096 and case.num_workers > 0),
    )


def _pids_max(case: Case) -> Iterator[tuple[str, str]]:
    """The limits on processes of this group and of those above it, under v2 and v1."""
    yield from case.place.group_files("pids.max")
    own = next((line for line in case.place.text("proc/self/cgroup").splitlines() if ":pids:" in line), "")
    folder = Path("sys/fs/cgroup/pids", own.rpartition(":")[2].lstrip("/"))
    while own and folder.name not in ("", "cgroup"):
        if text := case.place.text(str(folder / "pids.max")):
            yield f"/{folder}/pids.max", text.strip()
        folder = folder.parent


def _address_space(case: Case, source: str) -> Iterator[Check]:
    reason = "it counts what may be touched, not what is: CUDA maps more than the device and the host hold"
    rows = {"address space": "RLIMIT_AS (ulimit -v)", "data size": "RLIMIT_DATA (ulimit -d)"}
    tight = [
        (row, soft, hard)
        for row in rows
        for soft, hard in [case.place.limits.get(row, (None, None))]
        if soft is not None
    ]
    for row, soft, hard in tight:
        has_device = row == "address space" and bool(case.place.budget.devices)
        remedy = f"ulimit -{rows[row][-2]} {'unlimited' if hard is None else hard // 1024}"
        finding = f"{rows[row]} is {format_bytes(soft)}"
        yield judge("address space", finding, reason, remedy, source, problem=has_device or soft < GIB, warning=True)
    if not tight:
        yield judge("address space", "no limit on address space or data", reason, "", source)


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
    is_closed = case.place.is_real and not os.access(path, os.W_OK)
    is_short = free is not None and free < GIB
    is_slow = kind in _NETWORK and name == "temp folder"
    finding = f"{path} is on {kind or 'an unknown file system'}"
    finding += "" if free is None else f", {format_bytes(free)} free"
    finding += "; it cannot be written to" if is_closed else "; it goes with the container" if kind == "overlay" else ""
    reason = "checkpoints and intermediate files go there; a full disk ends a run as surely as full memory"
    if not (is_closed or is_short) and kind in _IN_MEMORY:
        reason = "what lies there is memory, charged to the group that wrote it"
    elif not (is_closed or is_short) and is_slow:
        reason = "sockets and locks of workers go there, and a network is slow"
    warning = is_short or kind in _IN_MEMORY or is_slow
    source = "/proc/self/mountinfo, statvfs"
    return judge(name, finding, reason, remedy, source, problem=is_closed or free == 0, warning=warning)


def check_shm(case: Case) -> Iterator[Check]:
    """Whether /dev/shm holds what the workers have ready."""
    shm, lend, workers = case.place.budget.shm, case.place.budget.lendable_bytes, case.num_workers
    reason = (
        "workers hand batches over through /dev/shm: when it is full they die of a bus error; what lies there is "
        "charged to the group as memory, until it is unlinked"
    )
    if shm is None:
        remedy = "mount it: docker run --shm-size=1g, or mount -t tmpfs tmpfs /dev/shm"
        yield judge("/dev/shm", "there is no /dev/shm", reason, remedy, "/proc/self/mountinfo", problem=workers > 0)
        return
    free = shm.total_bytes if shm.free_bytes is None else shm.free_bytes
    room = f"{format_bytes(free)} free of {format_bytes(shm.total_bytes)}"
    batch = case.setup.batch_bytes
    if batch is None or not workers:
        small = shm.total_bytes <= _DOCKER_BYTES or free < _DOCKER_BYTES
        finding = f"{room}; {workers} workers ({case.workers[1]})"
        remedy = "docker run --shm-size=1g (or --ipc=host); tell the size of a batch: memfit doctor --batch 64MiB"
        yield judge("/dev/shm", finding, reason, remedy, shm.source, problem=small and workers > 0, warning=small)
        return
    ranks = case.command.num_processes
    needed, least = ranks * workers * case.prefetch * batch, min(free, lend)
    parts = f"{ranks} processes x " if ranks > 1 else ""
    parts += f"{workers} workers x {case.prefetch} batches x {format_bytes(batch)} = {format_bytes(needed)}"
    remedy = f"num_workers={min(least // max(1, ranks * case.prefetch * batch), workers)} fits, or prefetch_factor=1"
    if needed > free:
        remedy += f"; docker run --shm-size={max(1, -(-2 * needed // GIB))}g makes it larger"
    finding = f"{parts}; {room}, {format_bytes(lend)} can be lent"
    yield judge("/dev/shm", finding, reason, remedy, shm.source, problem=needed > least, warning=needed > least // 2)


def check_leftovers(case: Case) -> Iterator[Check]:
    """Segments of /dev/shm whose owners are dead."""
    segments = case.place.segments
    dead = [one for one in segments if not one.in_use]
    lost = sum(one.size_bytes for one in dead)
    names = ", ".join(f"{one.name} ({format_bytes(one.size_bytes)})" for one in dead[:3])
    more = f" and {len(dead) - 3} more" if len(dead) > 3 else ""
    finding = f"{len(segments)} segments of libraries, all in use" if segments else "no segment of a library"
    if dead:
        finding = f"{format_bytes(lost)} in {len(dead)} segments that no process seen here uses: {names}{more}"
    files = " ".join(f"/dev/shm/{one.name}" for one in dead[:3])
    yield judge(
        "leftovers",
        finding,
        "they stay charged as memory after their writer's death, until somebody unlinks them",
        f"rm {files}{' ...' if more else ''} (first make sure that no other container shares this /dev/shm)",
        "/dev/shm, /proc/*/maps",
        warning=lost >= _LEAST_LOST_BYTES,
    )
