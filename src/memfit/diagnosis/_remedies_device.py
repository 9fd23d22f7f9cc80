"""Remedies for an accelerator's memory: who else holds it, what lies unused, and a training that needs less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memfit.diagnosis._job import ACCUMULATE, BATCH, Job
from memfit.diagnosis._remedy import Cost, Remedy
from memfit.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from memfit.estimation import Change, Setup

#: Memory of others, and slack of the allocator, that is worth a remedy: a share of the device.
NOTICEABLE = 0.05
#: What CUDA itself takes beside torch's allocator, at most: not taken for other processes.
_CONTEXT_BYTES = 1 * GIB
_ALLOCATOR = "expandable_segments:True"


def short_bytes(values: Mapping[str, Any]) -> int | None:
    """By how much the request missed what was free; the training may need more behind it."""
    tried, free = values.get("tried_bytes"), values.get("free_bytes")
    if not isinstance(tried, int):
        return None
    return max(tried - free, 0) if isinstance(free, int) and 0 <= free < 1 << 44 else tried


def _falls_short(room: int, short: int | None) -> bool | None:
    """False where it is less than what was missing at that moment; enough for all that follows it is not shown to be.

    >>> _falls_short(1, 2), _falls_short(3, 2)
    (False, None)
    """
    return False if short is not None and room < short else None


def foreign_bytes(values: Mapping[str, Any]) -> int | None:
    """What neither torch's allocator holds nor is free: other processes and the driver; None when not known.

    >>> foreign_bytes({"total_bytes": 24 << 30, "free_bytes": 1 << 30, "reserved_bytes": 3 << 30}) >> 30
    20
    """
    for name in ("others_bytes", "held_by_others_bytes"):
        if isinstance(values.get(name), int):
            return int(values[name])
    known = [values.get(f"{name}_bytes") for name in ("total", "free", "reserved")]
    if not all(isinstance(one, int) for one in known):
        return None
    total, free, reserved = (int(one) for one in known if one is not None)
    return max(total - free - reserved, 0)


def device_remedies(
    values: Mapping[str, Any], job: Job, *, phase: str, config: Mapping[str, Any] | None = None
) -> Iterator[Remedy]:
    """Remedies for a device that was full.

    Args:
        values: The message's figures.
        job: What is known of the job.
        phase: What it was doing.
        config: The model's ``config.json``, for remedies with their bytes.
    """
    short = short_bytes(values)
    yield from _others(values, short)
    yield from _slack(values, job, short)
    setup = find_setup(job, config) if config is not None else None
    if config is not None and setup is not None and phase in ("train", "build", "unknown"):
        yield from _estimated(config, setup, short, values.get("total_bytes"))
    else:
        yield from _by_phase(phase, job, _missing(job, config))
    yield Remedy(
        f"memory of the host ({'--memory' if job.under_memfit else '--mem'}, fewer loader workers)",
        reason="another memory: the device has its own, and none of it is the host's",
        cost="not known",
        place="device",
        saves_bytes=0,
        enough=False,
        helps=False,
    )


def _others(values: Mapping[str, Any], short: int | None) -> Iterator[Remedy]:
    held, total = foreign_bytes(values), values.get("total_bytes")
    if held is None or not isinstance(total, int):
        return
    told = isinstance(values.get("others_bytes"), int)
    if held < max(NOTICEABLE * total, 0 if told else _CONTEXT_BYTES):
        return
    pids = ", ".join(str(pid) for pid in values.get("pids", ()))
    who = f"process {pids} holds" if pids else "other processes, and the driver itself, hold"
    index = values.get("device", 0)
    yield Remedy(
        "end your own processes that still hold memory of this device, or take another device",
        f"nvidia-smi -i {index} --query-compute-apps=pid,used_memory,name --format=csv; "
        "ps -o pid,user,etime,cmd -p PID; kill PID",
        "none",
        f"{who} {format_bytes(held)} of its {format_bytes(total)}. Do not reset the device: that ends everybody's work",
        "device",
        held,
        _falls_short(held, short),
    )


def _slack(values: Mapping[str, Any], job: Job, short: int | None) -> Iterator[Remedy]:
    total, reserved, allocated = (values.get(f"{name}_bytes") for name in ("total", "reserved", "allocated"))
    if not (isinstance(reserved, int) and isinstance(allocated, int)):
        return
    slack = max(reserved - allocated, 0)
    share = slack / total if isinstance(total, int) and total else 0.0
    given = " ".join(text for name, text in job.env.items() if name.endswith("ALLOC_CONF"))
    is_on = _ALLOCATOR in given.replace(" ", "")
    if share >= NOTICEABLE and not is_on:
        yield Remedy(
            "let segments grow, so that blocks between others' are not lost",
            f"export PYTORCH_CUDA_ALLOC_CONF={_ALLOCATOR}",
            "hardly any",
            f"{format_bytes(slack)}, {share:.0%} of the device, is reserved by torch's allocator and not in tensors; "
            "set it before the interpreter starts",
            "device",
            slack,
            _falls_short(slack, short),
        )
    else:
        why = "it is on already" if is_on else f"only {format_bytes(slack)} ({share:.1%}) lies unused in its allocator"
        yield Remedy(
            "expandable_segments, max_split_size_mb or empty_cache()",
            f"PYTORCH_CUDA_ALLOC_CONF={_ALLOCATOR}",
            "none",
            f"{why}: the device is full of tensors",
            "device",
            0 if is_on else slack,
            False,
            helps=False,
        )


def find_setup(job: Job, config: Mapping[str, Any] | None) -> Setup | None:
    """How the job trains, as its script's options say; None when neither a batch nor a config is known.

    >>> options = {"per_device_train_batch_size": "8", "bf16": "True", "max_seq_length": "1024"}
    >>> setup = find_setup(Job(batch=8, options=options), {"model_type": "llama"})
    >>> setup.batch, setup.dtype, setup.seq_len
    (8, 'bf16-amp', 1024)
    """
    from memfit.estimation import Setup

    if config is None or not job.batch:
        return None
    options = job.options
    length = next((options[name] for name in _LENGTHS if options.get(name, "").isdigit()), None)
    dtype = "bf16-amp" if _is_on(options, "bf16") else "fp16-amp" if _is_on(options, "fp16") else "fp32"
    if options.get("torch_dtype", options.get("dtype", "")) in ("bfloat16", "bf16"):
        dtype = "bf16"
    elif options.get("torch_dtype", options.get("dtype", "")) in ("float16", "fp16"):
        dtype = "fp16"
    optimizer = next((known for word, known in _OPTIMIZERS.items() if word in options.get("optim", "adamw")), "adamw")
    rank = next((int(options[name]) for name in ("lora_r", "lora_rank") if options.get(name, "").isdigit()), 0)
    world = job.devices or 1
    return Setup(
        batch=job.batch,
        seq_len=int(length) if length else Setup.seq_len,
        dtype=dtype,  # type: ignore[arg-type]
        optimizer=optimizer,  # type: ignore[arg-type]
        gradient_checkpointing="full" if _is_on(options, "gradient_checkpointing") else "none",
        lora_rank=rank,
        quantization="nf4" if _is_on(options, "load_in_4bit") else "none",
        world_size=world,
        strategy="ddp" if world > 1 else "none",
        num_microbatches=job.accumulate or 1,
    )


_LENGTHS = ("max_seq_length", "max_seq_len", "seq_len", "max_length", "model_max_length", "cutoff_len", "block_size")
_OPTIMIZERS = {"8bit": "adamw8bit", "adafactor": "adafactor", "lion": "lion", "sgd": "sgd"}


def _is_on(options: Mapping[str, str], name: str) -> bool:
    return options.get(name, "").lower() in ("true", "1", "yes")


def _estimated(config: Mapping[str, Any], setup: Setup, short: int | None, total: Any) -> Iterator[Remedy]:
    """Changes of the setup with the bytes that the formula gives them."""
    from memfit.estimation import estimate_formula, list_changes

    now = estimate_formula(config, setup).device["device_bytes"].value
    for change in list_changes(setup):
        then = estimate_formula(config, change.setup).device["device_bytes"]
        saves = now - then.value
        enough = _falls_short(saves, short)
        if isinstance(total, int):
            enough = True if then.upper <= total and enough is None else False if then.value > total else enough
        if saves > 16 * MIB:
            yield Remedy(
                f"train with {' '.join(change.options)}",
                _as_written(change, setup),
                _cost_of(change),
                f"an estimated {format_bytes(now)} of the device becomes {format_bytes(then.value)}, at most "
                f"{format_bytes(then.upper)}; {change.cost}",
                "device",
                saves,
                enough,
            )


def _as_written(change: Change, setup: Setup) -> str:
    """A change as Hugging Face's options say it, where they do."""
    if change.setup.batch != setup.batch:
        return (
            f"--per_device_train_batch_size {change.setup.batch} "
            f"--gradient_accumulation_steps {change.setup.num_microbatches}"
        )
    words = {
        "--gradient-checkpointing": "--gradient_checkpointing True",
        "--no-foreach": "torch.optim.AdamW(..., fused=True)",
        "--attention sdpa": "attn_implementation='sdpa'",
        "--optimizer adamw8bit": "--optim adamw_bnb_8bit",
        "--strategy fsdp": "--fsdp full_shard",
    }
    return words.get(change.options[0], "memfit estimate " + " ".join(change.options))


def _cost_of(change: Change) -> Cost:
    """The words of a change as one of the costs."""
    if not change.same_training:
        return "another training"
    words: dict[str, Cost] = {"none": "none", "hardly": "hardly any", "some": "a few per cent"}
    first = change.cost.split()[0].rstrip(":")
    shares: tuple[Cost, ...] = ("5 to 15 %", "25 to 33 %")
    unknown: Cost = "not known"
    return words.get(first, next((cost for cost in shares if change.cost.startswith(cost)), unknown))


_HALVE = "the same samples an update: the same training, up to batch norm and rounding; activations halve"


def _missing(job: Job, config: Mapping[str, Any] | None) -> str:
    """What would have to be known for bytes."""
    if config is None:
        return "; how much that is needs the model's configuration: --hf-config config.json"
    if job.options:
        return f"; how much that is needs the batch size, and the script names no {BATCH[1]}, {BATCH[0]} or the like"
    return "; how much that is needs the batch size too: --script with the file that names it"


#: Where no training step is what filled it: what, its setting, its cost, why.
_WAYS: Mapping[str, tuple[tuple[str, str, Cost, str], ...]] = {
    "validate": (
        (
            "keep no graph in validation",
            "with torch.inference_mode():",
            "none",
            "without it every activation waits for a backward pass that never comes",
        ),
        (
            "keep predictions in host memory, batch by batch",
            "outputs.append(prediction.cpu())",
            "hardly any",
            "what is appended on the device grows with the validation set",
        ),
        ("a smaller batch in validation", "--per_device_eval_batch_size 1", "a few per cent", "it changes no result"),
    ),
    "checkpoint": (
        (
            "read checkpoints into host memory",
            "torch.load(path, map_location='cpu', mmap=True)",
            "none",
            "without it the file's tensors come beside the model's on the device that saved them",
        ),
        (
            "copy to the host piece by piece when saving",
            "{name: tensor.cpu() for name, tensor in model.state_dict().items()}",
            "hardly any",
            "a gathered or cloned state needs the model a second time",
        ),
    ),
    "build": (
        (
            "hold the weights in 16 bits",
            "torch_dtype=torch.bfloat16",
            "none",
            "half the bytes of fp32; it is the weights that did not fit",
        ),
        (
            "share the model out among devices",
            "fully_shard(model), or device_map='auto' for inference",
            "not known",
            "each holds its part",
        ),
    ),
}


def _by_phase(phase: str, job: Job, missing: str) -> Iterator[Remedy]:
    """Remedies without bytes, for what the job was doing."""
    if phase in _WAYS:
        for title, setting, cost, reason in _WAYS[phase]:
            yield Remedy(title, setting, cost, reason, "device")
        return
    batch, accumulate = job.batch, job.accumulate or 1
    if batch != 1:
        half = (
            f"batch {batch} to {batch // 2}, accumulated {accumulate} to {accumulate * -(-batch // (batch // 2))}"
            if batch
            else "half the batch, twice the accumulation"
        )
        yield Remedy(half, half_batch(job), "a few per cent", _HALVE + missing, "device")
    yield Remedy(
        "use activation checkpointing",
        "--gradient_checkpointing True, or torch.utils.checkpoint",
        "25 to 33 %",
        "the backward pass computes the activations of each block again" + missing,
        "device",
    )
    if job.devices and job.devices > 1:
        yield Remedy(
            "share gradients and optimizer states out",
            "fully_shard(model), or ZeRO stage 2",
            "not known",
            f"each of {job.devices} devices holds a part in place of all",
            "device",
        )


def half_batch(job: Job) -> str:
    """The options for half a batch and twice the accumulation, in the script's words, else in Hugging Face's.

    >>> half_batch(Job(batch=8))
    '--per_device_train_batch_size 4 --gradient_accumulation_steps 2'
    >>> half_batch(Job(batch=22, options={"batch_size": "22"}))
    'batch_size=11 accumulate_grad_batches=2'
    """
    batch = next((name for name in BATCH if name in job.options), "per_device_train_batch_size")
    other = "gradient_accumulation_steps" if batch.startswith("per_device") else "accumulate_grad_batches"
    steps = next((name for name in ACCUMULATE if name in job.options), other)
    form = "--{} {}" if batch.startswith("per_device") else "{}={}"
    if not job.batch:
        return f"{form.format(batch, 'N/2')} {form.format(steps, 2)}"
    smaller = max(1, job.batch // 2)
    return f"{form.format(batch, smaller)} {form.format(steps, (job.accumulate or 1) * -(-job.batch // smaller))}"
