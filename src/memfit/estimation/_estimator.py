"""Estimate a training step: trace it on fake tensors, replay torch's allocator, add what lies outside of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from memfit.errors import ConfigError, MissingExtraError, UntraceableError
from memfit.estimation._allocator import replay
from memfit.estimation._allocator_settings import AllocatorSettings
from memfit.estimation._assumptions import list_assumptions
from memfit.estimation._bounds import bound_device
from memfit.estimation._estimate import Estimate, judge
from memfit.estimation._events import find_peaks
from memfit.estimation._formula import estimate_formula
from memfit.estimation._gpus import ANY_GPU, Gpu, find_gpu
from memfit.estimation._setup import Setup
from memfit.estimation._time_limit import TIME_LIMIT, limit_time
from memfit.units import format_count

if TYPE_CHECKING:
    import torch

    from memfit.estimation._program import Program

#: The architecture by compute capability, from the newest down; 8.6 has the shared memory of 8.9, and its kernels.
_ARCHITECTURES = ((10.0, "blackwell"), (9.0, "hopper"), (8.1, "ada"), (8.0, "ampere"), (7.5, "turing"), (0.0, "volta"))
Loss = Callable[["torch.nn.Module", Any], "torch.Tensor"]
Make = Callable[[], "Program | Callable[[], object]"]


def estimate_step(
    make: Make,
    *,
    gpu: Gpu | None = None,
    world_size: int = 1,
    allocator: AllocatorSettings | None = None,
    real_data: bool = True,
) -> Estimate:
    """Estimate a training step by tracing two runs of it.

    ``make`` makes the step, with its model and optimizer, within a fake tensor mode: a function that runs it once.
    ``gpu`` None stands for any. ``real_data``: the step's data are real tensors. Raises
    `UntraceableError` where fake tensors cannot follow, or take longer than `limit_time` allows."""
    from memfit.estimation._trace import trace

    device = gpu or ANY_GPU
    capability = float(device.compute_capability or 8.0)
    architecture = next(name for least, name in _ARCHITECTURES if capability >= least)

    found = trace(make, architecture=architecture, real_data=real_data)
    peaks, replayed = find_peaks(found), replay(found, allocator)
    figures, by_phase, parts = bound_device(peaks, replayed, device, found, world_size=world_size)
    beside = device.outside_bytes(world_size)
    verdict, notes = None if gpu is None else judge(figures["device_bytes"], gpu.total_bytes), found.notes
    allowed = int(device.total_bytes * (allocator.per_process_memory_fraction if allocator else 1.0))
    is_above = figures["device_bytes"].upper > device.total_bytes or figures["reserved_bytes"].upper > allowed
    if gpu is not None and is_above:  # the allocator gives back its cache
        above = figures["allocated_bytes"].upper - figures["allocated_bytes"].value
        capacities = (min(allowed, gpu.total_bytes - rest) for rest in (beside.value, beside.upper + above))
        tight, tightest = (replay(found, allocator, capacity_bytes=max(0, one)) for one in capacities)
        verdict = "does not fit"
        if tight.fits:
            verdict = "tight" if tightest.fits else "may fit"
            figures, by_phase, parts = bound_device(peaks, tight, device, found, world_size=world_size)
        if tight.fits and tight.num_retries:
            times = format_count(tight.num_retries, "time")
            note = f"torch's allocator empties its cache {times} in two iterations, which costs time"
            notes = (*notes, f"{note}; try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    loaded = {name: getattr(sys.modules.get(name), "__version__", "") for name in ("torch", "transformers")}
    versions = {name: version for name, version in loaded.items() if version}
    return Estimate(figures, parts, by_phase, "traced", gpu, verdict, notes, versions)


def estimate_config(
    config: Mapping[str, Any],
    setup: Setup,
    *,
    gpu: Gpu | None = None,
    allocator: AllocatorSettings | None = None,
) -> Estimate:
    """Estimate the training of a ``config.json``'s model: traced where that works, else by the formula."""
    try:
        make = partial(build_program, config, setup)
        return _estimate_setup(make, setup, gpu, allocator)
    except ImportError as error:
        reason = f"{error.name or error} is not installed"
    except (MissingExtraError, UntraceableError) as error:
        reason = error.what
    try:
        return estimate_formula(config, setup, gpu=gpu, reason=reason)
    except ConfigError as error:
        error.what = f"{reason}, so memfit gave up the trace. The formula does not read the config: {error.what}"
        raise


def build_program(config: Mapping[str, Any], setup: Setup) -> Program:
    """Return the step of a ``config.json``'s model; call it in a fake tensor mode."""
    from memfit.estimation._huggingface import build_step

    return _assemble(*build_step(config, setup), setup)


def _estimate_setup(make: Make, setup: Setup, gpu: Gpu | None, allocator: AllocatorSettings | None) -> Estimate:
    how: dict[str, Any] = {"gpu": gpu, "world_size": setup.world_size, "allocator": allocator, "real_data": False}
    found = estimate_step(make, **how)
    return replace(found, notes=tuple(dict.fromkeys((*found.notes, *list_assumptions(setup)))))


def _assemble(model: Any, batch: Any, loss: Loss, notes: Iterable[str], setup: Setup) -> Program:
    """Make a step of a model as the setup trains it: checkpointed, sharded; in a fake tensor mode."""
    from memfit.estimation._blocks import checkpoint_blocks
    from memfit.estimation._optimizers import build_optimizer
    from memfit.estimation._parallel import shard
    from memfit.estimation._program import Program, find_blocks, find_dtypes

    optimizer, assumed = build_optimizer(model, setup)
    clips = setup.clip_grad_norm and optimizer is not None
    if clips and setup.optimizer_in_backward:
        clips, assumed = False, (*assumed, "gradients are not clipped: the backward pass drops each of them")
    program = Program(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        autocast_dtype=find_dtypes(setup)[1],
        num_microbatches=setup.num_microbatches,
        clip_grad_norm=clips,
        notes=(*notes, *assumed),
    )
    checkpoint_blocks(find_blocks(model), setup.gradient_checkpointing)
    return shard(program, setup)


def estimate(
    build_model: Callable[[], torch.nn.Module],
    example_batch: Any,
    *,
    loss: Loss | None = None,
    setup: Setup | None = None,
    gpu: Gpu | str | None = None,
    allocator: str | None = None,
    time_limit: float = TIME_LIMIT,
) -> Estimate:
    """Estimate the device memory of training a model, without the device and without allocating the model.

    Model and batch are fake tensors. A training step runs on them twice, and a model of torch's allocator replays what
    it would do with a GPU's memory.

    Args:
        build_model: Makes the model. It is called here, among fake tensors.
        example_batch: A tree of tensors, of which only shapes and dtypes count: the largest batch of the training. The
            model gets a mapping by its names, a tuple or list by place, and everything else as one argument.
        loss: ``loss(model, batch)`` gives the scalar to differentiate; by default the model's own ``.loss``, or the sum
            of its outputs. Real tensors that it uses count as if they were on the device.
        setup: Everything else: dtype, optimizer, checkpointing, sharding. Its ``batch`` and lengths do not count here.
        gpu: A name such as ``A100-80GB``, or a size such as ``24GiB``.
        allocator: As in ``PYTORCH_CUDA_ALLOC_CONF``.
        time_limit: Seconds of CPU for the trace.

    Raises:
        UntraceableError: Fake tensors cannot follow the step, or take longer than ``time_limit``.
        ConfigError: The GPU or the allocator's setting is unknown.

    Example:
        >>> import torch
        >>> found = estimate(lambda: torch.nn.Linear(1024, 1024), torch.zeros(8, 1024), setup=Setup(dtype="fp32"))
        >>> found.parts["weights"].value, found.method
        (4198400, 'traced')
    """
    setup = setup or Setup(dtype="fp32")

    with limit_time(time_limit):
        return _estimate_setup(
            lambda: _program_of(build_model, example_batch, loss, setup),
            setup,
            find_gpu(gpu) if isinstance(gpu, str) else gpu,
            None if allocator is None else AllocatorSettings.parse(allocator),
        )


def _program_of(
    build_model: Callable[[], torch.nn.Module], example_batch: Any, loss: Loss | None, setup: Setup
) -> Program:
    import torch

    from memfit.estimation._lora import add_lora
    from memfit.estimation._program import find_dtypes, map_tensors

    dtype = find_dtypes(setup)[0]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = build_model()
    finally:
        torch.set_default_dtype(before)

    def fake(leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty(leaf.shape, dtype=dtype if leaf.dtype == torch.float32 else leaf.dtype)

    batch = map_tensors(fake, example_batch)
    if setup.lora_rank:
        add_lora(model, setup.lora_rank, setup.lora_targets or ("all-linear",), dropout=setup.lora_dropout)
    return _assemble(model, batch, loss or _own_loss, (), setup)


def _own_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    import torch

    from memfit.estimation._program import find_tensors

    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    found = getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    tensors = [one for one in find_tensors(output) if one.requires_grad]
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum() if tensors else torch.zeros(())
