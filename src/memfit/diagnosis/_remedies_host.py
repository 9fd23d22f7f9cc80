"""Remedies for host memory and for /dev/shm, reckoned by node from what was measured of tasks."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.diagnosis._job import Job
from memfit.diagnosis._remedy import Remedy
from memfit.units import GIB, MIB, format_bytes

#: Asked for above a measured peak.
RESERVE = 0.15
#: A peak of no more than so much of the limit is one that the limit cut off.
_CUT = 1.02
_TORCH_PREFETCH = 2
#: The /dev/shm to begin with where the size of a batch is not known.
_LEAST_SHM = 2 * GIB


def slurm_size(count: int) -> str:
    """A size as Slurm's ``--mem`` takes it: a whole number with K, M, G or T, counted in 1024s; rounded up.

    >>> slurm_size(334 << 30), slurm_size(1536 << 20), slurm_size((4 << 30) + 1)
    ('334G', '1536M', '4097M')
    """
    if count >= GIB and (count % GIB == 0 or count >= 64 * GIB):
        return f"{-(-count // GIB)}G"
    return f"{-(-count // MIB)}M"


def round_up(count: float) -> int:
    """A request that people would write: whole GiB from 4 GiB on, else whole 256 MiB.

    >>> round_up(333.5 * (1 << 30)) >> 30, round_up(300 << 20) >> 20
    (334, 512)
    """
    step = GIB if count >= 4 * GIB else 256 * MIB
    return -(-int(count) // step) * step


def wanted_request(job: Job) -> tuple[int, str] | None:
    """The bytes to ask for on each node, and the arithmetic; None when neither a peak nor a limit is known."""
    measured, limit = job.node_bytes, job.limit_bytes
    if measured is not None and (limit is None or measured[0] > _CUT * limit):
        size = round_up(measured[0] * (1 + RESERVE))
        why = f"{measured[1]} = {format_bytes(measured[0])} on each node; + {RESERVE:.0%} = {format_bytes(size)}"
        return size, why
    if limit is not None:
        seen = ""
        if measured is not None:
            missed = "is where the limit cut it off" if measured[0] > 0.9 * limit else "missed its peak"
            seen = f"; what was seen, {format_bytes(measured[0])}, {missed}"
        return round_up(1.5 * limit), (f"{format_bytes(limit)} + 50%: the peak was not measured{seen}")
    return None


def host_remedies(job: Job, *, is_limit: bool, in_worker: bool, phase: str) -> Iterator[Remedy]:
    """Remedies for a job that met a limit of host memory, or emptied the machine."""
    if is_limit:
        yield from _larger_request(job)
    yield from _fewer_copies(job, in_worker)
    yield from _fewer_workers(job)
    if is_limit:
        yield from _fewer_tasks(job)
    if phase == "validate":
        yield Remedy(
            "start validation's loader once, before training, and with few workers",
            "num_workers=1 of the validation's DataLoader",
            "hardly any",
            "the workers of both loaders are alive at once; what validation adds decides only how early the limit "
            "is met where training alone is over it",
            "host",
        )
    yield from _changes_nothing(job)


def _larger_request(job: Job) -> Iterator[Remedy]:
    wanted = wanted_request(job)
    if wanted is None:
        yield Remedy(
            "ask for more memory than was measured",
            _MEMFIT.format("SIZE", "")
            if job.under_memfit
            else "--mem of Slurm, mem_limit of Compose, resources.limits.memory of Kubernetes",
            "none",
            "it met its limit; neither the limit nor a peak is in what was read"
            + ("" if job.under_memfit else ", so give --sacct or --script"),
            "host",
        )
        return
    size, why = wanted
    gain = size - job.limit_bytes if job.limit_bytes else None
    known = True if job.node_bytes is not None and job.node_bytes[0] > _CUT * (job.limit_bytes or 0) else None
    if job.under_memfit:
        written = memfit_size(size)
        setting = _MEMFIT.format(written, f" above {written}")
        yield Remedy(f"give the job {written}", setting, "none", why, "host", gain, known)
        return
    if job.most_bytes is not None and size > job.most_bytes:
        yield Remedy(
            f"ask for {slurm_size(size)} of each node of a partition with larger nodes",
            f"--mem={slurm_size(size)}",
            "none",
            f"{why}; a node of {job.partition or 'this partition'} has {format_bytes(job.most_bytes)}",
            "host",
            gain,
            True,
        )
        return
    of_step = job.step_bytes is not None
    more = f" in the script's srun, and no less in #SBATCH --mem={slurm_size(max(size, job.request_bytes or 0))}"
    yield Remedy(
        f"ask for {slurm_size(size)} of each node{' for the step' if of_step else ''}",
        f"--mem={slurm_size(size)}{more if of_step else ''}",
        "none",
        why,
        "host",
        gain,
        known,
    )


#: What memfit's own runs go by: the hint for a job, and what all of them may take.
_MEMFIT = "--memory {0}; the budget or --limit{1} (memfit run --help, memfit map --help)"


def memfit_size(count: int) -> str:
    """A size as memfit's options take it, rounded up.

    >>> memfit_size(6 << 30), memfit_size((1 << 20) + 1)
    ('6GiB', '2MiB')
    """
    return f"{count // GIB}GiB" if count % GIB == 0 else f"{-(-count // MIB)}MiB"


def _fewer_copies(job: Job, in_worker: bool) -> Iterator[Remedy]:
    tasks = job.tasks_per_node or 1
    if tasks > 1 or (job.workers or 0) > 1 or in_worker:
        many = f"{tasks} tasks of a node" if tasks > 1 else "the loader's workers"
        yield Remedy(
            f"hold the data once for {many}",
            "one mapped file (np.memmap, Arrow, memfit panel build) in place of lists of Python objects in each",
            "none",
            "a page of a mapped file exists once however many read it; objects are copied page by page as soon as a "
            "worker counts a reference to them. How much of it is data was not measured",
            "host",
        )


def _fewer_workers(job: Job) -> Iterator[Remedy]:
    if job.workers == 0:
        return
    now = job.workers
    if now is not None and now <= 1:
        return
    target = max(1, now // 2) if now else None
    total = (now or 0) * (job.tasks_per_node or 1)
    saves = None
    if job.worker_bytes and now and target:
        saves = (now - target) * (job.tasks_per_node or 1) * job.worker_bytes
    held = (
        f"{format_bytes(job.worker_bytes)} of its own in each of {total}"
        if job.worker_bytes
        else "it saves only the memory of the workers, which was not measured"
    )
    change = f"{now} to {target}" if now else "fewer"
    yield Remedy(
        f"loader workers: {change}",
        f"num_workers={target if target is not None else 'N'}",
        "not known",
        f"{held}. Costs speed only where the loader cannot keep up",
        "host",
        saves,
    )


def _fewer_tasks(job: Job) -> Iterator[Remedy]:
    tasks, task = job.tasks_per_node, job.task_peak_bytes or job.task_mean_bytes
    limit = job.most_bytes or job.request_bytes
    if not tasks or tasks < 2 or not task or not limit:
        return
    fit = int(limit // (task * (1 + RESERVE)))
    if 1 <= fit < tasks:
        yield Remedy(
            f"{fit} tasks on a node in place of {tasks}",
            f"--ntasks-per-node={fit}",
            "fewer devices at once",
            f"{fit} x {format_bytes(task)} and {RESERVE:.0%} above fit in {format_bytes(limit)}; the same "
            f"number of tasks needs {tasks / fit:.3g} times the nodes",
            "host",
            (tasks - fit) * task,
            True,
        )


def _changes_nothing(job: Job) -> Iterator[Remedy]:
    """What its script, its config or its log names and a person may think of next, though it would not help here."""
    ready = ""
    if job.batch_bytes and job.workers:
        held = job.workers * (job.prefetch or _TORCH_PREFETCH) * job.batch_bytes * (job.tasks_per_node or 1)
        ready = f". All batches that wait hold {format_bytes(held)} of a node"
    batch = job.batch or 2
    if job.batch or "batch" in job.mentioned:
        yield Remedy(
            "a smaller batch, or gradients accumulated over smaller ones",
            f"batch_size={max(1, batch // 2)}" if job.batch else "batch_size",
            "a few per cent",
            _BATCH_TEXT + ready,
            "host",
            helps=False,
        )
    if job.persistent_workers is None and "persistent_workers" not in job.mentioned:
        return
    if not job.persistent_workers:
        yield Remedy(
            "persistent_workers=False",
            "persistent_workers=False",
            "none",
            "no change: persistent_workers=False is its default, or what it was",
            "host",
            0,
            False,
            helps=False,
        )
        return
    held_bytes = (job.workers or 0) * (job.tasks_per_node or 1) * job.worker_bytes if job.worker_bytes else None
    yield Remedy(
        "let the workers end with each epoch",
        "persistent_workers=False",
        "hardly any",
        "training's workers are then gone while validation's run; they start anew in each epoch",
        "host",
        held_bytes,
    )


_BATCH_TEXT = (
    "activations are the device's memory; on the host a batch takes what the workers hold ready, num_workers x "
    "prefetch_factor + 1 of them for each task"
)


def shm_remedies(job: Job) -> Iterator[Remedy]:
    """Remedies for a full /dev/shm."""
    need, ready = None, job.prefetch or _TORCH_PREFETCH
    if job.workers and job.batch_bytes:
        need = round_up(1.2 * job.workers * ready * job.batch_bytes)
    size = need or max(_LEAST_SHM, 2 * (job.shm_bytes or 0))
    written = f"{size // MIB}m"
    why = (
        f"{job.workers} workers x {ready} batches x {format_bytes(job.batch_bytes)}, and a fifth above"
        if need and job.batch_bytes
        else "each worker keeps prefetch_factor batches there (2 by default); a container has 64 MiB by default. How "
        f"large a batch is was not measured: it is {'twice what it had' if size > _LEAST_SHM else 'where to begin'}"
    )
    yield Remedy(
        "a larger /dev/shm",
        f"docker run --shm-size={written}, shm_size: {written} of Compose, an emptyDir of medium Memory of Kubernetes",
        "none",
        f"{why}. It counts as host memory of the same container",
        "shm",
        size - (job.shm_bytes or 64 * MIB),
        True if need else None,
    )
    yield Remedy(
        "the host's /dev/shm, where the container may share it",
        "docker run --ipc=host",
        "none",
        "the host's is half of its memory by default",
        "shm",
    )
    yield Remedy(
        "files in place of descriptors between the workers",
        "torch.multiprocessing.set_sharing_strategy('file_system')",
        "hardly any",
        "it helps where open files ran out; what is in /dev/shm stays the same, and is left behind after a kill",
        "shm",
        0,
    )
    if job.workers != 0:
        now = job.workers
        yield Remedy(
            f"loader workers: {now} to {now // 2}" if now and now > 1 else "no loader workers",
            f"num_workers={now // 2 if now and now > 1 else 0}",
            "not known",
            "each has its own batches there; 0 uses none of it",
            "shm",
            (now - now // 2) * ready * job.batch_bytes if now and job.batch_bytes else None,
        )
