"""List what to do: rows of the table, with the figures of a diagnosis and a job."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.amounts import Amount, Layout
from memfit.diagnosis._figures import NOTICEABLE, Figures
from memfit.diagnosis._job import ACCUMULATE, BATCH, CHECKPOINTING, OPTION_OF, Job
from memfit.diagnosis._pod import POD
from memfit.diagnosis._remedy_table import BY_EMITTER, COSTS, REMEDIES, SYSTEMS, Remedy, row
from memfit.slurm import format_time
from memfit.units import GIB, format_bytes, format_count, format_duration, round_up_size, write_size

if TYPE_CHECKING:
    from memfit.diagnosis._record import Diagnosis

DEVICES = frozenset({"gpu", "gpu_fragmentation", "other_accelerator"})
#: Requested above a measured peak, and above the time that the epochs take.
RESERVE, TIME_RESERVE = 0.15, 0.2
#: CUDA itself holds up to this much beside torch's allocator.
_CONTEXT_BYTES = 1 * GIB
#: A peak above this multiple of the limit was not cut off by the limit.
_CUT = 1.02
_LIST = "nvidia-smi -i {} --query-compute-apps=pid,used_memory,name --format=csv"
_LIST_OTHER = "npu-smi info, rocm-smi --showpids or xpu-smi ps"


def list_remedies(diagnosis: Diagnosis, job: Job | None = None) -> list[Remedy]:
    """Return what to do: what helps first, then by its cost in speed. ``job`` is what was requested and measured."""
    job = job or Job()
    if job.request or job.task_peak:  # of the accounting, or of a batch script
        diagnosis = replace(diagnosis, whom=(*diagnosis.whom, "slurm"))
    rows = _list(diagnosis, with_figures(job, diagnosis))
    found = [one for one in rows if one.concerns(diagnosis.whom)]
    return sorted(found, key=lambda one: (not one.helps, COSTS.index(one.cost), one.enough is not True))


def _list(diagnosis: Diagnosis, job: Job) -> Iterable[Remedy]:
    kind = diagnosis.kind
    if "size" in diagnosis.checked.contradictions:
        return [row("wrong_size")]
    if diagnosis.cause == "walltime":
        wanted = wanted_time(job)
        more = row("no_time") if wanted is None else row("time", time=format_time(wanted[0]), why=wanted[1])
        how = "memfit resume RUN" if "memfit" in diagnosis.whom else "the same command, from any checkpoint"
        return [more, row("resume", how=how)]
    if "memfit" in diagnosis.whom and diagnosis.cause in ("preempted", "node_fail", "cancelled"):
        return [row("continue")]
    if diagnosis.cause == "growth":
        return REMEDIES["growth"]
    if kind == "none" or diagnosis.cause == "killed":
        return BY_EMITTER.get(diagnosis.emitter) or REMEDIES.get(diagnosis.cause, ())
    if kind in DEVICES:
        return _of_device(diagnosis, job)
    if kind == "shm":
        return _of_shm(job, diagnosis.whom)
    return [*REMEDIES.get(kind, ()), *(_of_host(diagnosis, job) if kind != "pinned" else ())]


def with_figures(job: Job, diagnosis: Diagnosis) -> Job:
    """Return the job with the peak and the limit of the deciding message, where nothing else tells them."""
    used, limit = diagnosis.figures.get("used") or None, diagnosis.figures.get("limit")
    if diagnosis.kind != "host_cgroup" or not limit:
        return job
    request = job.request if job.node_request is not None else Amount(limit, "node")
    return replace(job, request=request).with_known(Job(node_peak=Amount(used, "node") if used else None))


def _of_device(diagnosis: Diagnosis, job: Job) -> Iterator[Remedy]:
    figures, phase, own = diagnosis.checked, diagnosis.phase, BY_EMITTER.get(diagnosis.emitter)
    short = None if figures.tried is None else max(figures.tried - (figures.room or 0), 0)
    if "room" in figures.contradictions or figures.allowed:
        yield row("room")
    if "room" in figures.contradictions:
        return
    if figures.tried and figures.total and figures.tried > figures.total:
        yield row("one_request", tried=format_bytes(figures.tried), total=format_bytes(figures.total))
        return
    others = [*_others(diagnosis, job, figures, short), *_cache(diagnosis.emitter, figures, job, short)]
    rows = own or REMEDIES.get(phase) or [*_of_training(job, diagnosis.whom)]
    yield from (*rows, *others) if phase == "checkpoint" else (*others, *rows)  # ranks that load onto one device


def _is_enough(saves: int, short: int | None) -> bool | None:
    """False if it frees less than was missing; more may still be too little for the next request."""
    return False if short is not None and saves < short else None


def _others(diagnosis: Diagnosis, job: Job, figures: Figures, short: int | None) -> Iterator[Remedy]:
    """The memory of the device that other processes hold."""
    held, total = figures.foreign, figures.total or 0
    listed = _LIST.format(diagnosis.where.get("device") or 0) if diagnosis.kind != "other_accelerator" else _LIST_OTHER
    known = figures.tried and figures.free is None and figures.reserved is not None
    if known and (figures.tried or 0) + (figures.reserved or 0) < (1 - NOTICEABLE) * total:
        yield row("look", list=listed, why="What it holds and asks for would fit: others, or a limit, are in its way")
    elif not diagnosis.figures and not diagnosis.emitter and diagnosis.phase != "validate":
        yield row("look", list=listed, why="The message has no figures: the device may have been full before")
    if held is None or not total or held < max(NOTICEABLE * total, _CONTEXT_BYTES):
        return
    named = {pid: size for pid, size in figures.processes.items() if pid not in figures.own_pids}
    pids = ", ".join(map(str, named)) if sum(named.values()) <= (1 + NOTICEABLE) * held else ""
    is_of_ranks = diagnosis.phase == "checkpoint" or diagnosis.where.get("rank") is not None or (job.devices or 1) > 1
    who = f"Process {pids} holds" if pids else "Other processes and the driver hold"
    sizes = {"held": format_bytes(held), "total": format_bytes(total)}
    name = "ranks" if is_of_ranks else "others"
    yield row(name, held, enough=_is_enough(held, short), list=listed, who=who, **sizes)


def _cache(emitter: str, figures: Figures, job: Job, short: int | None) -> Iterator[Remedy]:
    """The memory that torch's allocator reserved and does not use."""
    unused, api = figures.slack, (emitter or "torch.cuda").removeprefix("torch.").upper()
    if unused is None or api not in ("CUDA", "HIP", "NPU", "MLU", "MUSA"):  # whose torch reads the setting
        return
    size, share = format_bytes(unused), unused / (figures.total or figures.reserved or 1)
    is_on = any("segments:True" in text for name, text in job.env.items() if name.endswith("ALLOC_CONF"))
    is_enough = figures.tried is None or unused >= figures.tried
    if share >= NOTICEABLE and is_enough and not is_on:
        yield row("segments", unused, enough=_is_enough(unused, short), api=api, unused=size, share=share)
    else:
        why = f"{size} ({share:.1%}) of its cache is unused; tensors hold {format_bytes(figures.allocated or 0)}"
        why = "It is on already" if is_on else why if is_enough else f"{why}. The request is larger"
        yield row("no_segments", 0 if is_on else unused, why=why, api=api)


def _of_training(job: Job, whom: Collection[str]) -> Iterator[Remedy]:
    """A training step that needs less, in the script's words."""
    known = next((name for name in BATCH if name in job.options), "")
    batch = known or ("per_device_train_batch_size" if "transformers" in whom else "")
    smaller, more = job.halved
    form = "--{} {} --{} {}" if batch.startswith("per_device") else "{}={} {}={}"
    other = "gradient_accumulation_steps" if batch.startswith("per_device") else "accumulate_grad_batches"
    steps = next((name for name in ACCUMULATE if name in job.options), other)
    options = form.format(batch, smaller if job.batch else "N/2", steps, more)
    if not batch:
        times = f"{more} batches" if job.batch else "twice as many batches"
        options = f"batch_size {smaller if job.batch else 'N/2'}, gradients accumulated over {times}"
    if job.batch != 1:
        yield row("half_batch", options=options)
    by_flag = "transformers" in whom or CHECKPOINTING in job.options
    yield row(
        "checkpointing", how=f"--{CHECKPOINTING} True" if by_flag else "torch.utils.checkpoint.checkpoint(block, x)"
    )
    if (job.devices or 1) > 1:
        yield row("shard", devices=job.devices)


def wanted_request(job: Job) -> tuple[Amount, str] | None:
    """Return what to request, in the limit's own scope, and the arithmetic; None if no figure is known, or which."""
    if job.no_single_limit:
        return None
    limit = job.limit
    measured = job.peak(limit.per if limit else "node")
    if measured is not None and (limit is None or limit.scaled(_CUT) < measured[0]):
        size = replace(measured[0], bytes=round_up_size(measured[0].scaled(1 + RESERVE).bytes))
        return size, f"{measured[1]} = {measured[0]}; + {RESERVE:.0%} = {format_bytes(size.bytes)}"
    if limit is None:
        return None
    # Where the layout is not known, its largest task is the least that a node or the job held.
    alone = job.task_peak and Layout(nodes=1, tasks_per_node=1).to(job.task_peak, limit.per)
    seen, base, said = measured[0] if measured else alone, limit, ""
    if seen:
        base = max(limit, seen)
        missed = "is where the limit cut it off" if limit.scaled(0.9) < seen else "missed its peak"
        said = f"; the largest sample, {format_bytes(seen.bytes)}, {missed}"
    size = replace(base, bytes=round_up_size(1.5 * base.bytes))
    return size, f"{base} + 50%: the peak was not measured{said}"


def raise_request(job: Job, old: Amount, wanted: Amount) -> Amount:
    """Return a request of the script raised to what is wanted, in its own unit; never less than it was."""
    new = job.layout.to(wanted, old.per)
    if new is None:  # whatever the layout is, more of each CPU by this factor is more of each node by it
        limit = job.limit and job.layout.to(job.limit, wanted.per)
        new = old.scaled(wanted.bytes / limit.bytes if limit else 1.5)
    return max(old, new)


def _of_host(diagnosis: Diagnosis, job: Job) -> Iterator[Remedy]:
    is_limit, tasks, workers = diagnosis.kind == "host_cgroup", job.tasks_per_node or 1, job.workers
    if is_limit:
        yield _larger_request(job, diagnosis)
    in_worker = "DataLoader worker" in " ".join(one.text for one in diagnosis.evidence)
    if tasks > 1 or (workers or 0) > 1 or in_worker:
        yield row("share_data", readers=f"{tasks} tasks of a node" if tasks > 1 else "loader workers")
    if (workers or 0) > 1 or (workers is None and "loader" in diagnosis.whom):
        yield _fewer_workers("fewer_workers", workers)
    if is_limit:
        yield from _fewer_tasks(job)
    if job.batch or "batch" in job.mentioned:  # what people try next
        yield row("host_batch")


def _fewer_workers(name: str, workers: int | None) -> Remedy:
    target = workers // 2 if workers else None
    return row(name, workers="fewer" if target is None else target, target="N" if target is None else target)


#: How each system is asked for memory, and its units of GiB and MiB.
_ASK: Mapping[str, tuple[str, tuple[str, str]]] = {
    "memfit": ("--memory {0}; the budget or --limit above {0} (memfit run --help)", ("GiB", "MiB")),
    "slurm": ("--mem={0}", ("G", "M")),
    "pbs": ("-l mem={0}, and -l vmem={0} if vmem was over (qsub)", ("gb", "mb")),
    "lsf": ("#BSUB -M {0} -R 'rusage[mem={0}]'", ("GB", "MB")),
    "sge": ("-l h_vmem={0} (qsub)", ("G", "M")),
    "condor": ("request_memory = {0}", ("GB", "MB")),
    "kubernetes": ("resources.limits.memory: {0}", ("Gi", "Mi")),
    "docker": ("docker run --memory {0}, mem_limit: {0} of Compose", ("g", "m")),
    "dask": ("memory_limit='{0}' of the worker (dask worker --memory-limit {0}), or fewer workers", ("GiB", "MiB")),
    "yarn": ("spark.executor.memoryOverhead={0}; for virtual memory yarn.nodemanager.vmem-check-enabled=false",
             ("g", "m")),
    "": ("--mem={0} (Slurm), docker run --memory {0}, MemoryMax={0} (systemd): whoever set the limit", ("G", "M")),
}  # fmt: skip


def _larger_request(job: Job, diagnosis: Diagnosis) -> Remedy:
    wanted, limit, is_pod = wanted_request(job), job.limit, diagnosis.emitter == POD
    is_own, names = "memfit" in diagnosis.whom, [name for name in SYSTEMS if name in diagnosis.whom]
    asks = [_ASK[name] for name in (["memfit"] if is_own else [POD] if is_pod else names or [""])]
    if wanted is None:
        setting = "; ".join(form.format("SIZE") for form, _ in asks)
        why = "It hit its limit. Neither the limit nor a node's peak is known"
        why = why if is_own else job.no_single_limit or f"{why}: add --sacct or --script"
        return row("request", title="request more memory", setting=setting, why=f"{why}.")
    (size, why), asked = wanted, job.script_request
    gain, measured = (size - limit).bytes if limit else None, job.peak(size.per)
    enough = True if measured is not None and (limit is None or limit.scaled(_CUT) < measured[0]) else None
    if is_own or is_pod or "slurm" not in names:
        verb = "give the job" if is_own else "give the container" if is_pod else "request"
        title = f"{verb} {write_size(size.bytes, asks[0][1])}"
        setting = "; ".join(form.format(write_size(size.bytes, units)) for form, units in asks)
        why = why.replace("each node", "the container") if is_pod else why
        return row("request", gain, enough=enough, title=title, setting=setting, why=why)
    own = raise_request(job, asked, size) if asked else size
    written, option = write_size(own.bytes), OPTION_OF.get(own.per)
    setting = f"--{option}={written}" if option else f"--mem of each node, {written} over all of them"
    title = f"request {written} per {own.per}"
    return row("request", gain, enough=enough, title=title, setting=setting, why=why)


def _fewer_tasks(job: Job) -> Iterator[Remedy]:
    tasks, task = job.tasks_per_node, job.task_peak or job.task_mean
    asked = job.script_request or job.request
    limit = job.node_request if asked and asked.per in ("node", "job") else None  # of a CPU it shrinks with the tasks
    if not tasks or task is None or limit is None:
        return
    shares = {count: Layout(tasks_per_node=count).to(limit, "task") for count in range(tasks, 0, -1)}
    fit = next((count for count, one in shares.items() if one and task.scaled(1 + RESERVE) <= one), tasks)
    if fit < tasks:
        why = f"{fit} x {format_bytes(task.bytes)} + {RESERVE:.0%} fit in {format_bytes(limit.bytes)}"
        saves = task.scaled(tasks - fit).bytes
        yield row("fewer_tasks", saves, fit=fit, few=format_count(fit, "task"), tasks=tasks, why=why, times=tasks / fit)


def _of_shm(job: Job, whom: Collection[str]) -> Iterator[Remedy]:
    yield from (row("shm"), row("host_shm"), row("maps"))
    if job.workers or (job.workers is None and "loader" in whom):
        yield _fewer_workers("shm_workers", job.workers)
    yield row("shm_files")


def wanted_time(job: Job) -> tuple[int, str] | None:
    """Return the seconds to request, in whole half hours, and the arithmetic; None if the pace is not known."""
    needed = job.needed_seconds
    if needed is None or not job.epochs or not job.epoch_seconds:
        return None
    size = int(-(-needed * (1 + TIME_RESERVE) // 1800) * 1800)
    whole, more = (format_duration(seconds, short=True) for seconds in (needed, size))
    epochs = f"{format_count(job.epochs, 'epoch')} x {format_duration(job.epoch_seconds)}"
    return size, f"{epochs} = {whole}; + {TIME_RESERVE:.0%} = {more}"
