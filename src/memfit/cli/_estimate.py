"""``memfit estimate``: what device memory a training will take, before it runs and without the device."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import typer

from memfit.cli._estimate_workload import answer_for_workload, check_what_to_estimate, own_allocator
from memfit.cli._terminal import console
from memfit.errors import ConfigError, DoesNotFitError, UsageError, nearest
from memfit.estimation import (
    TIME_LIMIT,
    Attention,
    Checkpointing,
    Dtype,
    Loading,
    Optimizer,
    Quantization,
    Setup,
    Strategy,
    equation_of_batch,
    find_gpu,
    split_batch,
)
from memfit.memory import Budget
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.estimation import LengthStatistics

_ALIASES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "amp": "bf16-amp",
}


def estimate(  # noqa: PLR0913 - one each for what decides on the memory
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="A config, a YAML file.", show_default=False)] = None,
    hf_config: Annotated[
        Path | None,
        typer.Option("--hf-config", help="The model's config.json, or its folder.", metavar="FILE", show_default=False),
    ] = None,
    batch: Annotated[
        str, typer.Option(help="Samples of a microbatch on one device; auto for as many as fit.", metavar="N|auto")
    ] = "1",
    global_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples an update, over all microbatches and devices.", metavar="N"),
    ] = None,
    seq_len: Annotated[
        int, typer.Option("--seq-len", min=1, help="Tokens of a sample, padding included.", metavar="N")
    ] = 512,
    target_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a target, of a model with a decoder of its own.", metavar="N")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="The lengths of the data's samples: the longest batch counts, cut at --seq-len.", metavar="FILE"
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="fp32, bf16, fp16 (weights too), bf16-amp, fp16-amp (weights in fp32).", metavar="DTYPE")
    ] = "bf16",
    optimizer: Annotated[
        str, typer.Option(help="One of " + ", ".join(get_args(Optimizer)) + ".", metavar="NAME")
    ] = "adamw",
    state_dtype: Annotated[
        str | None,
        typer.Option(help="The dtype of the optimizer's moments; none for that of the weights.", metavar="DTYPE"),
    ] = None,
    master_weights: Annotated[bool, typer.Option(help="The optimizer holds an fp32 copy of 16-bit weights.")] = False,
    optimizer_in_backward: Annotated[bool, typer.Option(help="Update each weight within the backward pass.")] = False,
    foreach: Annotated[
        bool, typer.Option(help="Update all weights at once, as torch does on CUDA; fused=True is --no-foreach.")
    ] = True,
    gradient_checkpointing: Annotated[
        bool, typer.Option(help="Keep only the inputs of blocks for the backward pass.")
    ] = False,
    selective_checkpointing: Annotated[bool, typer.Option(help="Keep the results of expensive operations.")] = False,
    offload_activations: Annotated[bool, typer.Option(help="Kept activations wait in host memory.")] = False,
    attention: Annotated[
        str, typer.Option(help="sdpa, flash, or eager, which keeps its scores.", metavar="NAME")
    ] = "sdpa",
    loss_chunks: Annotated[int, typer.Option(min=1, help="Make the logits in so many pieces.", metavar="N")] = 1,
    compile_: Annotated[bool, typer.Option("--compile/--no-compile", help="Blocks run through torch.compile.")] = False,
    lora: Annotated[
        str | None,
        typer.Option(help="Adapters: their rank, and the modules they go beside.", metavar="RANK[:NAME,NAME]"),
    ] = None,
    quant: Annotated[str, typer.Option(help="How frozen weights are held: none, nf4, int8.", metavar="FORM")] = "none",
    world_size: Annotated[int, typer.Option(min=1, help="Devices.", metavar="N")] = 1,
    strategy: Annotated[
        str | None, typer.Option(help="What they share out: ddp, zero1, zero2, zero3, fsdp, tp.", metavar="NAME")
    ] = None,
    load: Annotated[
        str,
        typer.Option(
            help="How shared weights are loaded: shards, whole (the model on each device first), any.", metavar="HOW"
        ),
    ] = "any",
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Forward and backward passes before each update.", metavar="N")
    ] = None,
    clip: Annotated[bool, typer.Option(help="Gradients are clipped by their norm.")] = True,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="The device, such as A100-80GB, or its memory, such as 24GiB; none for any. When left out: what is "
            "free of the first GPU here.",
            metavar="NAME|SIZE",
        ),
    ] = None,
    allocator: Annotated[
        str | None,
        typer.Option(
            help="torch's allocator, as in PYTORCH_CUDA_ALLOC_CONF, which is taken when left out.",
            metavar="KEY:VALUE,...",
        ),
    ] = None,
    formula: Annotated[bool, typer.Option("--formula", help="Compute from the config; trace nothing.")] = False,
    time_limit: Annotated[
        float, typer.Option(min=0, help="Trace for so long at most; then compute.", metavar="SECONDS")
    ] = TIME_LIMIT,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of CONFIG, for example params.data.lookback=20.", metavar="KEY=VALUE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON; sizes in bytes.")] = False,
) -> None:
    """Say what device memory a training step will take, each figure with a bound that it does not pass.

    memfit estimate --hf-config config.json --batch 8 --seq-len 512 --gpu A100-80GB

    memfit estimate CONFIG takes the step of a workload on the longest batch of its data; only --gpu, --allocator,
    --time-limit, --set and --json go with it.

    The step is run twice on fake tensors, in seconds and without a GPU, and what CUDA would allocate is replayed
    through a model of torch's caching allocator. Where that fails or takes too long, or torch and transformers are not
    installed, it is computed from the config, with a wider bound. Figures: allocated (in tensors), active, reserved
    (held by torch's allocator) and device (with CUDA's context, as nvidia-smi shows it). With --gpu also whether it
    fits, and the cheapest change after which it does.

    Exit codes: 0 done, 2 bad config or input, 3 its bound is above the device: it does not fit, or only may.
    """
    from memfit.planning import Question, ask

    check_what_to_estimate(context, config, hf_config)
    if hf_config is None:
        with _tracing(time_limit):
            answer = answer_for_workload(Path(config or ""), _this_gpu(gpu), allocator, set_ or [], time_limit)
        _close(answer, as_json=as_json)
    model = read_config(hf_config)
    rank, targets = parse_lora(lora)
    samples = parse_batch(batch)
    setup = Setup(
        batch=1 if samples is None else samples,
        seq_len=seq_len,
        target_len=target_len,
        dtype=_one_of("--dtype", _ALIASES.get(dtype, dtype), get_args(Dtype)),
        state_dtype=_one_of(
            "--state-dtype", _ALIASES.get(state_dtype or "", state_dtype or ""), ("fp32", "bf16", "fp16")
        )
        if state_dtype not in (None, "none")
        else None,
        master_weights=master_weights,
        optimizer=_one_of("--optimizer", optimizer.lower(), get_args(Optimizer)),
        optimizer_in_backward=optimizer_in_backward,
        foreach=foreach,
        gradient_checkpointing=_checkpointing(full=gradient_checkpointing, selective=selective_checkpointing),
        offload_activations=offload_activations,
        attention=_one_of("--attention", attention, get_args(Attention)),
        loss_chunks=loss_chunks,
        compiled=compile_,
        lora_rank=rank,
        lora_targets=targets,
        quantization=_one_of("--quant", quant, get_args(Quantization)),
        world_size=world_size,
        strategy=_one_of("--strategy", strategy or ("ddp" if world_size > 1 else "none"), get_args(Strategy)),
        load=_one_of("--load", load, get_args(Loading)),
        num_microbatches=microbatches or 1,
        clip_grad_norm=clip,
    )
    if samples is None:
        check_auto(setup, microbatches, global_batch)
    setup = check_setup(with_microbatches(setup, microbatches, None if samples is None else global_batch))
    gpu, available, others = _this_gpu(gpu)
    found = None if lengths is None else _read_lengths(lengths, seq_len)
    if found is not None:
        setup = replace(setup, seq_len=max(1, found.longest))
    question = Question(
        model,
        setup,
        gpu,
        own_allocator(allocator),
        formula,
        available_bytes=available,
        largest_batch=samples is None,
        global_batch=global_batch,
        time_limit=time_limit,
    )
    with _tracing(time_limit):
        answer = ask(question)
    answer["data"] = None if found is None else describe_lengths(found, answer["setup"]["batch"], seq_len)
    answer["notes"] += others
    _close(answer, as_json=as_json)


def _checkpointing(*, full: bool, selective: bool) -> Checkpointing:
    if full and selective:
        raise UsageError(
            "--gradient-checkpointing and --selective-checkpointing were both given.",
            rule="blocks keep their inputs only, or the results of expensive operations too.",
            remedy="leave one of them out",
        )
    return "full" if full else "selective" if selective else "none"


def _close(answer: dict[str, Any], *, as_json: bool) -> NoReturn:
    """Print an answer, and exit with its code."""
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        from memfit.reports import print_estimate

        print_estimate(answer, console())
    refused = answer["verdict"] in ("may fit", "does not fit")
    raise typer.Exit(DoesNotFitError.exit_code if refused else 0)


def _this_gpu(gpu: str | None) -> tuple[str | None, int | None, list[str]]:
    """The device's name or size, what is free of it, and who has the rest: of the first GPU here, if none is named."""
    if gpu is not None:
        return (None if gpu.lower() == "none" else gpu), None, []
    devices = Budget.read().devices
    if not devices:
        return None, None, []
    here = devices[0]
    available = max(0, here.total_bytes - here.foreign_bytes)
    try:
        name = find_gpu(here.name).name
    except ConfigError:
        name = f"{here.total_bytes} B"
    processes = ", ".join(
        f"{one.name} ({one.pid}) {'?' if one.used_bytes is None else format_bytes(one.used_bytes)}"
        for one in here.processes
    )
    return (
        name,
        available,
        [
            f"GPU {here.index} of this machine, {here.name}: {format_bytes(available)} of "
            f"{format_bytes(here.total_bytes)} are free for this training; others: {processes or 'none'}"
        ],
    )


def parse_batch(text: str) -> int | None:
    """Samples of a microbatch; None for as many as fit.

    >>> parse_batch("8"), parse_batch("auto")
    (8, None)
    """
    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(
            f"--batch {text} is no number of samples.",
            rule="a microbatch has one sample or more.",
            remedy="write for example --batch 8, or --batch auto for as many as fit",
        )
    return int(text)


def with_microbatches(setup: Setup, microbatches: int | None, global_batch: int | None) -> Setup:
    """A setup with as many microbatches as make up the samples of an update, where these are given."""
    if global_batch is None:
        return setup
    found = split_batch(global_batch, setup.batch, 1 if setup.strategy == "tp" else setup.world_size)
    if microbatches not in (None, found):
        raise UsageError(
            f"--microbatches {microbatches} with --global-batch {global_batch}, which needs {found}.",
            rule=equation_of_batch(setup.batch, found, setup.world_size) + ".",
            remedy="leave one of them out",
        )
    return replace(setup, num_microbatches=found)


def check_auto(setup: Setup, microbatches: int | None, global_batch: int | None) -> None:
    """Refuses what contradicts a batch that is looked for and the samples of an update, from which microbatches follow.

    Raises:
        UsageError: The microbatches are given too, or gradients cannot be summed up over them.
    """
    if global_batch is None:
        return
    if microbatches is not None:
        raise UsageError(
            f"--microbatches {microbatches} with --batch auto and --global-batch {global_batch}.",
            rule="the batch that fits decides how many microbatches make up an update.",
            remedy="leave --microbatches or --global-batch out, or give --batch a number",
        )
    if setup.optimizer_in_backward:
        raise UsageError(
            f"--optimizer-in-backward with --batch auto and --global-batch {global_batch}.",
            rule="a gradient is dropped as soon as it is there, so none is summed up over microbatches.",
            remedy="leave one of them out",
        )


def _read_lengths(path: Path, seq_len: int) -> LengthStatistics:
    from memfit.estimation import read_lengths

    return read_lengths(path, max_length=seq_len)


def describe_lengths(lengths: LengthStatistics, batch: int, seq_len: int) -> dict[str, Any]:
    """What data are like whose lengths were cut at ``seq_len``, in numbers and in words."""
    from memfit.estimation import simulate_batches

    batches = simulate_batches(lengths, batch=batch, max_length=seq_len)
    text = (
        f"{lengths.count:,} samples of {lengths.mean:.0f} tokens on average, {lengths.longest} at most "
        f"({lengths.truncated_share * 100:.1f} % cut at {seq_len}): the peak is set by the longest batch, "
        f"{batch} x {lengths.longest} tokens. Filling up to the batch's longest in place of {seq_len} saves "
        f"{batches.saving * 100:.0f} % of the tokens, and nothing of the peak; {batches.pad_share * 100:.0f} % still "
        f"fill up. A batch has {batches.mean_tokens:.0f} tokens, give or take {batches.deviation_tokens:.0f}."
    )
    return {
        "num_samples": lengths.count,
        "mean_tokens": lengths.mean,
        "longest_tokens": lengths.longest,
        "truncated_share": lengths.truncated_share,
        "mean_batch_tokens": batches.mean_tokens,
        "deviation_batch_tokens": batches.deviation_tokens,
        "largest_batch_tokens": batches.largest_tokens,
        "worst_batch_tokens": batches.worst_tokens,
        "pad_share": batches.pad_share,
        "saving": batches.saving,
        "text": text,
    }


def _tracing(time_limit: float) -> AbstractContextManager[object]:
    """Say on a terminal what takes the seconds, how many it took, and how many it may take."""
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    log = console(stderr=True)
    if not log.is_terminal:
        return nullcontext()
    text = f"tracing two training steps on fake tensors, for at most {time_limit:.0f} s"
    progress = Progress(SpinnerColumn(), text, TimeElapsedColumn(), console=log, transient=True)
    progress.add_task("", total=None)
    return progress


def read_config(path: Path) -> dict[str, Any]:
    """The content of a model's config.json."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}.",
            rule="--hf-config takes a model's config.json, or the folder that holds it.",
            remedy="download it from the model's page, or save it: model.config.save_pretrained(folder)",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{file} is no JSON: {error}.",
            rule="--hf-config takes a model's config.json.",
            remedy="check that the whole file was downloaded",
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{file} holds a {type(found).__name__}.",
            rule="a config.json is an object with the model's widths and layers.",
            remedy="name the model's config.json",
        )
    return found


def parse_lora(text: str | None) -> tuple[int, tuple[str, ...]]:
    """A rank and the names behind it.

    >>> parse_lora("16:q_proj,v_proj"), parse_lora("8"), parse_lora(None)
    ((16, ('q_proj', 'v_proj')), (8, ()), (0, ()))
    """
    if text is None:
        return 0, ()
    rank, _, names = text.partition(":")
    if not (rank.isascii() and rank.isdigit() and int(rank) > 0):
        raise UsageError(
            f"--lora {text} names no rank.",
            rule="it is a whole number from 1, and the names of modules behind a colon.",
            remedy="write for example --lora 16 or --lora 16:q_proj,v_proj",
        )
    return int(rank), tuple(name.strip() for name in names.split(",") if name.strip())


def check_setup(setup: Setup) -> Setup:
    """The setup, unless it contradicts itself."""
    faults = (
        (
            setup.strategy != "none" and setup.world_size == 1,
            f"--strategy {setup.strategy} on one device.",
            "a strategy shares out among devices.",
            "--world-size 8, or leave --strategy out",
        ),
        (
            setup.master_weights and setup.dtype not in ("bf16", "fp16"),
            f"--master-weights with --dtype {setup.dtype}.",
            "an fp32 copy is held of 16-bit weights; with -amp the weights are in fp32 already.",
            "--dtype bf16, or leave --master-weights out",
        ),
        (
            setup.quantization != "none" and not setup.lora_rank and setup.optimizer != "none",
            f"--quant {setup.quantization} without --lora.",
            "quantised weights are frozen: what is trained are adapters beside them.",
            "--lora 16, or --optimizer none for inference",
        ),
        (
            setup.optimizer_in_backward and setup.num_microbatches > 1,
            f"--optimizer-in-backward with --microbatches {setup.num_microbatches}.",
            "a gradient is dropped as soon as it is there, so none is summed up.",
            "leave one of them out",
        ),
    )
    for bad, what, rule, remedy in faults:
        if bad:
            raise UsageError(what, rule=rule, remedy=remedy)
    return setup


def _one_of(option: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise UsageError(
            f"{option} {value} is not known.",
            rule=f"it is one of {', '.join(known)}.",
            remedy=nearest(value, known),
        )
    return value
