"""List what to do: rows of the table, with the figures of a diagnosis and a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit.amounts import Amount, Layout
from memfit.diagnosis._figures import NOTICEABLE, Figures
from memfit.diagnosis._job import ACCUMULATE, BATCH, OPTION_OF, Job
from memfit.diagnosis._pod import POD
from memfit.diagnosis._remedy_table import BY_EMITTER, COSTS, TABLE, UNDER_MEMFIT, Cost, Edit, Remedy, row
from memfit.slurm import format_time
from memfit.units import GIB, MIB, format_bytes, format_count, format_duration, round_up_size, write_size

if TYPE_CHECKING:
    from memfit.diagnosis._record import Diagnosis
    from memfit.estimation import Change, Setup

DEVICES = frozenset({"gpu", "gpu_fragmentation", "other_accelerator"})
#: Requested above a measured peak, and above the time that the epochs take.
RESERVE, TIME_RESERVE = 0.15, 0.2
#: CUDA itself holds up to this much beside torch's allocator.
_CONTEXT_BYTES = 1 * GIB
#: A peak above this multiple of the limit was not cut off by the limit.
_CUT = 1.02
_LEAST_SHM = 2 * GIB
_MEMORY = "--memory {0}; the budget or --limit{1} (memfit run --help, memfit run --help)"
_GROW = "expandable_segments:True"
_LIST = "nvidia-smi -i {} --query-compute-apps=pid,used_memory,name --format=csv"
_LIST_OTHER = "npu-smi info, rocm-smi --showpids or xpu-smi ps"


def list_remedies(
    diagnosis: Diagnosis, job: Job | None = None, *, config: Mapping[str, Any] | None = None
) -> list[Remedy]:
    """Return what to do: what helps first, then by its cost in speed.

    Args:
        diagnosis: What killed the job.
        job: What it requested and what was measured of it.
        config: The model's ``config.json``, for the bytes that changes of the training save.
    """
    job = with_figures(job or Job(), diagnosis)
    kind = diagnosis.kind
    table = {**TABLE, **UNDER_MEMFIT} if job.under_memfit else TABLE
    if "size" in diagnosis.checked.contradictions:
        return [row("wrong_size")]
    if kind == "none" or diagnosis.cause == "killed":
        rows = table.get(diagnosis.cause, ())
        if diagnosis.cause == "walltime":
            wanted = wanted_time(job)
            more = row("no_time") if wanted is None else row("time", time=format_time(wanted[0]), why=wanted[1])
            return [more, row("resume")]
        return list(rows)
    found: Iterable[Remedy] = table.get(kind, ())
    if kind in DEVICES:
        found = _of_device(diagnosis, job, config)
    elif kind == "shm":
        found = _of_shm(job)
    elif kind != "pinned":
        found = [*found, *_of_host(diagnosis, job)]
    return sorted(found, key=lambda one: (not one.helps, COSTS.index(one.cost), one.enough is not True))


def with_figures(job: Job, diagnosis: Diagnosis) -> Job:
    """Return the job with the peak and the limit of the deciding message, where nothing else tells them."""
    job = replace(job, under_memfit=job.under_memfit or diagnosis.under_memfit)
    if diagnosis.kind != "host_cgroup":
        return job
    used, limit = diagnosis.figures.get("used") or None, diagnosis.figures.get("limit")
    if not limit:
        return job
    request = job.request if job.node_request is not None else Amount(limit, "node")
    return replace(job, request=request).with_known(Job(node_peak=Amount(used, "node") if used else None))


def _of_device(diagnosis: Diagnosis, job: Job, config: Mapping[str, Any] | None) -> Iterator[Remedy]:
    figures, phase, own = diagnosis.checked, diagnosis.phase, BY_EMITTER.get(diagnosis.emitter)
    short = None if figures.tried is None else max(figures.tried - (figures.room or 0), 0)
    if "room" in figures.contradictions or figures.allowed:
        yield row("room")
    if "room" in figures.contradictions:
        return
    others = [*_others(diagnosis, job, figures, short), *_cache(diagnosis.emitter, figures, job, short)]
    setup = _setup(job, config) if config is not None and job.batch else None
    rows: Iterable[Remedy] = own or TABLE.get(phase, ())
    if own is None and config is not None and setup is not None and phase in ("train", "build", "unknown"):
        rows = _estimated(config, setup, short, figures.total)
    elif not rows:
        rows = _of_training(job, "--hf-config config.json" if config is None else "--script with the batch size")
    yield from (*rows, *others) if phase == "checkpoint" else (*others, *rows)  # ranks that load onto one device
    yield row("host_for_device", flag="--memory" if job.under_memfit else "--mem")


def _is_enough(saves: int, short: int | None) -> bool | None:
    """False if it frees less than was missing; more may still be too little for the next request."""
    return False if short is not None and saves < short else None


def _others(diagnosis: Diagnosis, job: Job, figures: Figures, short: int | None) -> Iterator[Remedy]:
    """The memory of the device that other processes hold."""
    held, total = figures.foreign, figures.total or 0
    if held is None or not total or held < max(NOTICEABLE * total, _CONTEXT_BYTES):
        return
    named = {pid: size for pid, size in figures.processes.items() if pid not in figures.own_pids}
    pids = ", ".join(map(str, named)) if sum(named.values()) <= (1 + NOTICEABLE) * held else ""
    is_of_ranks = diagnosis.phase == "checkpoint" or diagnosis.where.get("rank") is not None or (job.devices or 1) > 1
    yield row(
        "ranks" if is_of_ranks else "others",
        held,
        enough=_is_enough(held, short),
        list=_LIST.format(diagnosis.where.get("device") or 0) if diagnosis.kind != "other_accelerator" else _LIST_OTHER,
        who=f"Process {pids} holds" if pids else "Other processes and the driver hold",
        held=format_bytes(held),
        total=format_bytes(total),
    )


def _cache(emitter: str, figures: Figures, job: Job, short: int | None) -> Iterator[Remedy]:
    """The memory that torch's allocator reserved and does not use."""
    unused, api = figures.slack, (emitter or "torch.cuda").removeprefix("torch.").upper()
    if unused is None or api not in ("CUDA", "HIP", "NPU", "MLU", "MUSA"):  # whose torch reads the setting
        return
    size, share = format_bytes(unused), unused / (figures.total or figures.reserved or 1)
    is_on = any(_GROW in text.replace(" ", "") for name, text in job.env.items() if name.endswith("ALLOC_CONF"))
    if share >= NOTICEABLE and not is_on:
        yield row("segments", unused, enough=_is_enough(unused, short), api=api, unused=size, share=share)
    else:
        why = f"Only {size} ({share:.1%}) of its cache is unused; tensors hold {format_bytes(figures.allocated or 0)}"
        yield row("no_segments", 0 if is_on else unused, why="It is on already" if is_on else why, api=api)


def _of_training(job: Job, needed: str) -> Iterator[Remedy]:
    """A training step that needs less, without bytes."""
    hint = f" For the bytes, add {needed}."
    if job.batch != 1:
        yield row("half_batch", options=half_batch(job), hint=hint)
    yield row("checkpointing", hint=hint)
    if (job.devices or 1) > 1:
        yield row("shard", devices=job.devices)


def half_batch(job: Job) -> str:
    """Return the options for half the batch and twice the accumulation, in the script's words."""
    batch = next((name for name in BATCH if name in job.options), "per_device_train_batch_size")
    is_hf = batch.startswith("per_device")
    other = "gradient_accumulation_steps" if is_hf else "accumulate_grad_batches"
    steps = next((name for name in ACCUMULATE if name in job.options), other)
    form = "--{} {}" if is_hf else "{}={}"
    if not job.batch:
        return f"{form.format(batch, 'N/2')} {form.format(steps, 2)}"
    smaller, more = job.halved
    return f"{form.format(batch, smaller)} {form.format(steps, more)}"


_LENGTHS = ("max_seq_length", "max_seq_len", "seq_len", "max_length", "model_max_length", "cutoff_len", "block_size")
#: By a part of the name; Lion has one moment, as momentum has.
_OPTIMIZERS = {"8bit": "adamw8bit", "adafactor": "adafactor", "lion": "momentum", "sgd": "sgd"}
_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}


def _setup(job: Job, config: Mapping[str, Any]) -> Setup:
    """Return how the job trains, by its script's options."""
    from memfit.estimation import Setup

    given = job.options

    def is_on(name: str) -> bool:
        return given.get(name, "").lower() in ("true", "1", "yes")

    def number(names: tuple[str, ...], default: int) -> int:
        return next((int(given[name]) for name in names if given.get(name, "").isdigit()), default)

    mixed = "bf16-amp" if is_on("bf16") else "fp16-amp" if is_on("fp16") else "fp32"
    optimizer = next((known for word, known in _OPTIMIZERS.items() if word in given.get("optim", "")), "adamw")
    rank, quantised, world = number(("lora_r", "lora_rank"), 0), is_on("load_in_4bit"), job.devices or 1
    return Setup(
        batch=job.batch or 1,
        seq_len=number(_LENGTHS, Setup.seq_len),
        dtype=_DTYPES.get(given.get("torch_dtype", given.get("dtype", "")), mixed),  # type: ignore[arg-type]
        optimizer=optimizer,  # type: ignore[arg-type]
        gradient_checkpointing="full" if is_on("gradient_checkpointing") else "none",
        lora_rank=rank or (16 if quantised else 0),  # 4-bit weights are frozen, so adapters are trained
        quantization="nf4" if quantised else "none",
        world_size=world,
        strategy="ddp" if world > 1 else "none",
        num_microbatches=job.accumulate or 1,
    )


def _estimated(config: Mapping[str, Any], setup: Setup, short: int | None, total: int | None) -> Iterator[Remedy]:
    """Changes of the training, each with its estimated bytes."""
    from memfit.estimation import estimate_formula, list_changes

    now = estimate_formula(config, setup).device["device_bytes"].value
    for change in list_changes(setup):
        then = estimate_formula(config, change.setup).device["device_bytes"]
        saves = now - then.value
        enough = _is_enough(saves, short)
        if total is not None and then.value > total:
            enough = False
        elif total is not None and then.upper <= total and enough is None:
            enough = True
        if saves > 16 * MIB:
            word = change.cost.split()[0].rstrip(":")
            found = row(
                "estimated",
                saves,
                enough=enough,
                options=" ".join(change.options),
                written=_as_written(change, setup),
                now=format_bytes(now),
                then=format_bytes(then.value),
                upper=format_bytes(then.upper),
                cost=change.cost,
            )
            cost = _COST_WORDS.get(word, "not known") if change.same_training else "another training"
            is_batch = change.setup.batch != setup.batch
            edit: Edit = "batch" if is_batch else "checkpointing" if change.options[0] == _CHECKPOINTING else ""
            yield replace(found, cost=cost, edit=edit)


#: The first word of what `memfit.estimation` says that a change costs.
_COST_WORDS: Mapping[str, Cost] = {
    "none": "none", "hardly": "hardly any", "some": "a few per cent", "5": "5 to 15 %", "25": "25 to 33 %",
}  # fmt: skip
_CHECKPOINTING = "--gradient-checkpointing"
_HF_WORDS = {
    _CHECKPOINTING: "--gradient_checkpointing True",
    "--no-foreach": "torch.optim.AdamW(..., fused=True)",
    "--attention sdpa": "attn_implementation='sdpa'",
    "--optimizer adamw8bit": "--optim adamw_bnb_8bit",
    "--strategy fsdp": "--fsdp full_shard",
}


def _as_written(change: Change, setup: Setup) -> str:
    """Return a change in Hugging Face's options, where they have it."""
    after = change.setup
    if after.batch != setup.batch:
        return f"--per_device_train_batch_size {after.batch} --gradient_accumulation_steps {after.num_microbatches}"
    return _HF_WORDS.get(change.options[0], "memfit estimate " + " ".join(change.options))


def wanted_request(job: Job) -> tuple[Amount, str] | None:
    """Return what to request, in the limit's own scope, and the arithmetic; None if no figure is known."""
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
    is_limit = diagnosis.kind == "host_cgroup"
    tasks, workers = job.tasks_per_node or 1, job.workers
    if is_limit:
        yield _larger_request(job, diagnosis.emitter)
    in_worker = "DataLoader worker" in " ".join(one.text for one in diagnosis.evidence)
    if tasks > 1 or (workers or 0) > 1 or in_worker:
        yield row("share_data", readers=f"{tasks} tasks of a node" if tasks > 1 else "loader workers")
    if workers is None or workers > 1:
        yield _fewer_workers("fewer_workers", workers)
    if is_limit:
        yield from _fewer_tasks(job)
    if diagnosis.phase == "validate":
        yield row("validation_workers")
    # What the script, the config or the log mentions and people try next.
    if job.batch or "batch" in job.mentioned:
        yield row("host_batch", setting=f"batch_size={max(1, job.batch // 2)}" if job.batch else "batch_size")
    if job.persistent_workers:
        yield row("end_workers")
    elif job.persistent_workers is False or "persistent_workers" in job.mentioned:
        yield row("workers_end")


def _fewer_workers(name: str, workers: int | None) -> Remedy:
    target = workers // 2 if workers else None
    return row(name, workers="fewer" if target is None else target, target="N" if target is None else target)


def _larger_request(job: Job, emitter: str) -> Remedy:
    wanted = wanted_request(job)
    if wanted is None:
        title, why = "request more memory", "It hit its limit. Neither the limit nor a node's peak is known"
        if job.under_memfit:
            return row("request", title=title, setting=_MEMORY.format("SIZE", ""), why=f"{why}.")
        setting = "--mem (Slurm), mem_limit (Compose), resources.limits.memory (Kubernetes)"
        return row("request", title=title, setting=setting, why=f"{why}: add --sacct or --script.")
    (size, why), limit = wanted, job.limit
    gain, measured = (size - limit).bytes if limit else None, job.peak(size.per)
    enough = True if measured is not None and (limit is None or limit.scaled(_CUT) < measured[0]) else None
    if job.under_memfit:
        written = write_size(size.bytes, ("GiB", "MiB"))
        setting = _MEMORY.format(written, f" above {written}")
        return row("request", gain, enough=enough, title=f"give the job {written}", setting=setting, why=why)
    if emitter == POD:
        written = write_size(size.bytes, ("Gi", "Mi"))
        title, why = f"give the container {written}", why.replace("each node", "the container")
        return row("request", gain, enough=enough, title=title, setting=f"resources.limits.memory: {written}", why=why)
    asked = job.step_request or job.script_request
    own = raise_request(job, asked, size) if asked else size
    written, option = write_size(own.bytes), OPTION_OF.get(own.per)
    setting = f"--{option}={written}" if option else f"--mem of each node, {written} over all of them"
    title = f"request {written} per {own.per}"
    if job.node_memory and size.per == "node" and job.node_memory < size:
        title += " of a partition with larger nodes"
        why += f"; a node of {job.partition or 'this partition'} has {format_bytes(job.node_memory.bytes)}"
        enough = True
    elif job.step_request is not None:
        title += " for the step"
        setting += " of srun, and as much or more of #SBATCH"
    return row("request", gain, enough=enough, title=title, setting=setting, why=why)


def _fewer_tasks(job: Job) -> Iterator[Remedy]:
    tasks, task = job.tasks_per_node, job.task_peak or job.task_mean
    asked = job.step_request or job.script_request or job.request
    # A request of each CPU or GPU shrinks with the tasks.
    limit = job.node_memory or (job.node_request if asked and asked.per in ("node", "job") else None)
    if not tasks or task is None or limit is None:
        return
    shares = {count: Layout(tasks_per_node=count).to(limit, "task") for count in range(tasks, 0, -1)}
    fit = next((count for count, one in shares.items() if one and task.scaled(1 + RESERVE) <= one), tasks)
    if fit < tasks:
        why = f"{fit} x {format_bytes(task.bytes)} + {RESERVE:.0%} fit in {format_bytes(limit.bytes)}"
        saves = task.scaled(tasks - fit).bytes
        yield row("fewer_tasks", saves, fit=fit, few=format_count(fit, "task"), tasks=tasks, why=why, times=tasks / fit)


def _of_shm(job: Job) -> Iterator[Remedy]:
    size = max(_LEAST_SHM, 2 * (job.shm_bytes or 0))
    rule = "twice what it had" if size > _LEAST_SHM else "a start"
    yield row("shm", size - (job.shm_bytes or 64 * MIB), size=f"{size // MIB}m", rule=rule)
    yield row("host_shm")
    if job.workers != 0:
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
