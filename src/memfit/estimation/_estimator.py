"""From a model to an estimate: trace its step on fake tensors, replay the allocator, add what lies beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from memfit.errors import ConfigError, MissingExtraError, UntraceableError
from memfit.estimation._allocator import replay
from memfit.estimation._allocator_settings import AllocatorSettings
from memfit.estimation._bounds import bound_device, bound_load
from memfit.estimation._estimate import VERDICTS, Estimate, Metric, Verdict, judge
from memfit.estimation._events import find_peaks
from memfit.estimation._formula import RULES_OF, estimate_by_formula
from memfit.estimation._gpus import Gpu, find_gpu
from memfit.estimation._interval import Interval
from memfit.estimation._setup import COMPUTED, Setup, list_assumptions

if TYPE_CHECKING:
    import torch

    from memfit.estimation._program import Program

#: A device of which nothing is known, with memory without end.
_ANY = "1024TiB"
#: The architecture by compute capability, from the newest down; 8.6 has the shared memory of 8.9, and its kernels.
_ARCHITECTURES = ((10.0, "blackwell"), (9.0, "hopper"), (8.1, "ada"), (8.0, "ampere"), (7.5, "turing"), (0.0, "volta"))
_RETRIES = (
    "torch's allocator has to give back what it has cached {} times in two iterations, which costs time; try "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
Loss = Callable[["torch.nn.Module", Any], "torch.Tensor"]


def _architecture(gpu: Gpu) -> str:
    if gpu.compute_capability is None:
        return "ampere"
    capability = float(gpu.compute_capability)
    return next(name for least, name in _ARCHITECTURES if capability >= least)


def estimate_step(
    make: Callable[[], Program | Callable[[], object]],
    *,
    gpu: Gpu | None = None,
    world_size: int = 1,
    allocator: AllocatorSettings | None = None,
    real_data: bool = True,
) -> Estimate:
    """What a training step takes of a device, by tracing two runs of it.

    Args:
        make: Makes the step, with its model and optimizer; called within a fake tensor mode. What it gives runs the
            step once, or is a program of one.
        gpu: The device; None for any.
        world_size: Devices that exchange data.
        allocator: The settings of torch's allocator; its defaults if None.
        real_data: Whether the step's data come as real tensors.

    Raises:
        UntraceableError: The step does what fake tensors cannot follow.
    """
    from memfit.estimation._trace import trace

    device = gpu or find_gpu(_ANY)
    found = trace(make, architecture=_architecture(device), real_data=real_data)
    peaks = find_peaks(found)
    at_will = replay(found, allocator)
    figures, by_phase, parts = bound_device(peaks, at_will, device, found, world_size=world_size)
    beside = device.context_bytes + device.nccl_bytes(world_size)
    verdict = None if gpu is None else judge(figures["device_bytes"], gpu.total_bytes)
    notes = found.notes
    allowed = int(device.total_bytes * (allocator.per_process_memory_fraction if allocator else 1.0))
    is_above = figures["device_bytes"].upper > device.total_bytes or figures["reserved_bytes"].upper > allowed
    if gpu is not None and is_above:  # the allocator gives back what it cached
        above = figures["allocated_bytes"].upper - figures["allocated_bytes"].value
        capacities = (min(allowed, gpu.total_bytes - rest) for rest in (beside.value, beside.upper + above))
        tight, tightest = (replay(found, allocator, capacity_bytes=max(0, one)) for one in capacities)
        if not tight.fits:
            verdict = "does not fit"
        else:
            verdict = "fits with a thin margin" if tightest.fits else "may fit"
            figures, by_phase, parts = bound_device(peaks, tight, device, found, world_size=world_size)
            if tight.num_retries:
                notes = (*notes, _RETRIES.format(tight.num_retries))
    traced = Estimate(figures, parts, by_phase, "traced", gpu, verdict, notes, _installed())
    return traced if found.load is None else _with_load(traced, found.load, beside)


def _installed() -> dict[str, str]:
    """Return the versions of the libraries in whose code a step was traced."""
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", "transformers")}
    return {name: version for name, version in loaded.items() if version}


def _with_load(step: Estimate, load: Interval, beside: Interval) -> Estimate:
    """Add the loading of the weights to the estimate of a step."""
    need = {**dict.fromkeys(step.device, load), "device_bytes": load + beside}
    figures = {name: Interval.highest([one, need[name]]) for name, one in step.device.items()}
    highest = max(one.value for one in step.by_phase.values())
    return replace(
        step,
        device=figures,
        by_phase={"load": load, **step.by_phase},
        parts={"weights": load} if load.value > highest else step.parts,
        verdict=_worse(step.verdict, judge(need["device_bytes"], step.gpu.total_bytes)) if step.gpu else None,
    )


def _worse(*verdicts: Verdict | None) -> Verdict:
    return max((one for one in verdicts if one is not None), key=VERDICTS.index)


def estimate_config(
    config: Mapping[str, Any],
    setup: Setup,
    *,
    gpu: Gpu | None = None,
    allocator: AllocatorSettings | None = None,
) -> Estimate:
    """What training the model of a ``config.json`` takes: traced where that works, else by the formula.

    Raises:
        ConfigError: The config or the setup makes no model.
    """
    if setup.strategy in COMPUTED:
        reason = f"what {setup.strategy} shares out follows from counts and the defaults of its library"
        return estimate_formula(config, setup, gpu=gpu, reason=reason)
    try:
        return _estimate_setup(lambda one: _program_of(config, one), setup, gpu, allocator)
    except ImportError as error:
        reason = f"{error.name or error} is not installed"
    except (MissingExtraError, UntraceableError) as error:
        reason = error.what
    return estimate_formula(config, setup, gpu=gpu, reason=reason)


def _estimate_setup(
    make: Callable[[Setup], Program], setup: Setup, gpu: Gpu | None, allocator: AllocatorSettings | None
) -> Estimate:
    """Estimate a setup. A compiled one has the bound of no fusion: each version of torch fuses otherwise."""

    def trace(one: Setup) -> Estimate:
        return estimate_step(
            partial(make, one), gpu=gpu, world_size=one.world_size, allocator=allocator, real_data=False
        )

    found = trace(setup)
    found = replace(found, notes=(*found.notes, *list_assumptions(setup)))
    if not setup.compiled:
        return found
    plain = trace(replace(setup, compiled=False))

    def widen(fused: Mapping[Any, Interval], others: Mapping[Any, Interval]) -> dict[Any, Interval]:
        return {name: Interval(one.value, max(one.upper, others[name].upper)) for name, one in fused.items()}

    return replace(
        found,
        device=widen(found.device, plain.device),
        by_phase=widen(found.by_phase, plain.by_phase),
        verdict=_worse(found.verdict, min(plain.verdict or "fits", "may fit", key=VERDICTS.index)) if gpu else None,
        notes=(*found.notes, "the bound is that of the same step without torch.compile"),
    )


def _program_of(config: Mapping[str, Any], setup: Setup) -> Program:
    from memfit.estimation._huggingface import build_program

    return transform(build_program(config, replace(setup, gradient_checkpointing="none")), setup)


def transform(program: Program, setup: Setup) -> Program:
    """A program whose blocks are compiled, checkpointed and shared out as a setup says; within a fake tensor mode."""
    from memfit.estimation._blocks import checkpoint_blocks
    from memfit.estimation._compile import compile_blocks
    from memfit.estimation._parallel import shard
    from memfit.estimation._program import find_blocks

    blocks = find_blocks(program.model)
    load, cast_slack = _find_load(program, setup, blocks)
    program = replace(program, load=load, cast_slack=cast_slack)
    if setup.compiled:
        program = compile_blocks(program, blocks)
    checkpoint_blocks(blocks, setup.gradient_checkpointing)
    return shard(program, setup)


def _find_load(program: Program, setup: Setup, blocks: Sequence[torch.nn.Module]) -> tuple[Interval | None, int]:
    """Return what loading takes, and what PEFT's ``prepare_model_for_kbit_training`` adds by casting to fp32."""
    from memfit.estimation._quantization import QuantizedLinear

    def count(parameters: Iterable[torch.nn.Parameter]) -> int:
        return sum(one.numel() * one.element_size() for one in parameters)

    whole = count(program.model.parameters())
    in_blocks = [count(block.parameters()) for block in blocks]
    largest = slack = 0
    if setup.quantization != "none":
        quantised = [module for module in program.model.modules() if isinstance(module, QuantizedLinear)]
        sizes = [one.in_features * one.out_features * one.compute_dtype.itemsize for one in quantised]
        largest = max(sizes, default=0)
        slack = count(one for one in program.model.parameters() if one.is_floating_point() and one.itemsize == 2)
        slack //= setup.world_size if setup.is_sharded else 1
    return bound_load(setup, Interval(whole), max([whole - sum(in_blocks), *in_blocks]), largest), slack


def estimate_formula(config: Mapping[str, Any], setup: Setup, *, gpu: Gpu | None = None, reason: str = "") -> Estimate:
    """What training the model of a ``config.json`` takes by arithmetic alone, on a machine without torch too."""
    found = estimate_by_formula(config, setup)
    device = gpu or find_gpu(_ANY)
    peak = found.peak
    fragments = Interval(peak.value // 50, peak.upper // 10)
    reserved = peak + fragments
    beside = device.context_bytes + device.nccl_bytes(setup.world_size)
    figures: dict[Metric, Interval] = {
        "allocated_bytes": peak,
        "active_bytes": peak,
        "reserved_bytes": reserved,
        "device_bytes": reserved + beside,
    }
    notes = (*((f"computed, not traced: {reason}",) if reason else ()), *found.notes, *list_assumptions(setup))
    verdict = judge(figures["device_bytes"], gpu.total_bytes) if gpu else None
    return Estimate(figures, found.parts, found.by_phase, "formula", gpu, verdict, notes, RULES_OF)


def estimate(
    build_model: Callable[[], torch.nn.Module],
    example_batch: Any,
    *,
    loss: Loss | None = None,
    setup: Setup | None = None,
    gpu: Gpu | str | None = None,
    allocator: str | None = None,
) -> Estimate:
    """What training a model takes of a device, before it runs and without the device.

    Nothing of it is allocated: model and batch are made of fake tensors, a training step is run on them twice, and what
    it would do with a GPU's memory is replayed through a model of torch's allocator.

    Args:
        build_model: Makes the model. It is called here, among fake tensors.
        example_batch: A tree of tensors, of which only shapes and dtypes count: the largest batch of the training. Any
            mapping is given to the model by its names, a tuple or list by place, and everything else as it is.
        loss: ``loss(model, batch)`` gives the scalar to differentiate; by default the model's own ``.loss``, or the sum
            of what it gives. Real tensors that it brings along count as if they were on the device.
        setup: Everything else: dtype, optimizer, checkpointing, sharding. Its ``batch`` and lengths do not count here.
        gpu: A name such as ``A100-80GB``, or a size such as ``24GiB``.
        allocator: As in ``PYTORCH_CUDA_ALLOC_CONF``.

    Raises:
        UntraceableError: The step does what fake tensors cannot follow.
        ConfigError: There is no such GPU or setting of the allocator, or the strategy is computed from a config alone.

    Example:
        >>> import torch
        >>> found = estimate(lambda: torch.nn.Linear(1024, 1024), torch.zeros(8, 1024), setup=Setup(dtype="fp32"))
        >>> found.parts["weights"].value, found.method
        (4198400, 'traced')
    """
    setup = setup or Setup(dtype="fp32")
    if setup.strategy in COMPUTED:
        raise ConfigError(
            f"strategy {setup.strategy} with a model of your own.",
            rule="ddp and fsdp are traced; zero1, zero2, zero3 and tp are computed from a config.json.",
            remedy="strategy='fsdp', or memfit estimate --hf-config config.json --strategy " + setup.strategy,
        )
    return _estimate_setup(
        lambda one: _program_from(build_model, example_batch, loss, one),
        setup,
        find_gpu(gpu) if isinstance(gpu, str) else gpu,
        None if allocator is None else AllocatorSettings.parse(allocator),
    )


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _program_from(
    build_model: Callable[[], torch.nn.Module], example_batch: Any, loss: Loss | None, setup: Setup
) -> Program:
    import torch

    from memfit.estimation._lora import add_lora
    from memfit.estimation._optimizers import build_optimizer
    from memfit.estimation._program import Program, map_tensors

    amp = setup.dtype.endswith("-amp")
    dtype = getattr(torch, _DTYPES["fp32" if amp else setup.dtype])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = build_model()
    finally:
        torch.set_default_dtype(before)

    def fake(leaf: torch.Tensor) -> torch.Tensor:
        wanted = dtype if leaf.is_floating_point() and leaf.dtype == torch.float32 else leaf.dtype
        return torch.empty(leaf.shape, dtype=wanted)

    batch = map_tensors(fake, example_batch)
    if setup.lora_rank:
        add_lora(model, setup.lora_rank, setup.lora_targets or ("all-linear",))
    optimizer, notes = build_optimizer(model, setup)
    program = Program(
        model=model,
        batch=batch,
        loss=loss or _own_loss,
        optimizer=optimizer,
        autocast_dtype=getattr(torch, _DTYPES[setup.dtype.removesuffix("-amp")]) if amp else None,
        num_microbatches=setup.num_microbatches,
        clip_grad_norm=setup.clip_grad_norm and not setup.optimizer_in_backward,
        notes=notes,
    )
    return transform(program, setup)


def _own_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The model's own loss, or the sum of what it gives."""
    import torch

    from memfit.estimation._program import find_tensors

    output = (
        model(**batch)
        if isinstance(batch, Mapping)
        else model(*batch)
        if isinstance(batch, tuple | list)
        else model(batch)
    )
    found = getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    tensors = [one for one in find_tensors(output) if one.requires_grad]
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum() if tensors else torch.zeros(())
