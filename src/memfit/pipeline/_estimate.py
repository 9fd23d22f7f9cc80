"""What ``memfit estimate`` says of a config: its workload's own step, on the longest batch of its own data."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from memfit import config
from memfit.errors import MissingExtraError, UntraceableError, UsageError
from memfit.pipeline._config import RunConfig
from memfit.pipeline._probe import call_alone, data_text, mapped_bytes, probed
from memfit.units import format_bytes

#: Batches of a loader that does not name its longest, of which the largest counts.
_LOOKED_AT = 64


def estimate_workload(
    source: Path | str,
    *,
    gpu: str | None = None,
    available_bytes: int | None = None,
    allocator: str | None = None,
    overrides: Sequence[config.Override] = (),
    env: Mapping[str, str] | None = None,
    time_limit: float = math.inf,
) -> dict[str, Any]:
    """Estimate the training step of a config's workload, on its first fold, in an interpreter of its own.

    Args:
        source: The config.
        gpu: The device's name or size; None for any.
        available_bytes: What others leave of the device; None for all of it.
        allocator: As in ``PYTORCH_CUDA_ALLOC_CONF``; None for the config's ``memory.cuda_allocator``.
        overrides: Further settings of the config.
        env: The environment; this process's when None.
        time_limit: Seconds for the trace.

    Returns:
        What ``memfit.planning.ask`` gives, without a ``setup``, for the step is the workload's own: ``data`` says what
        the batch is; ``host`` what the host's memory holds beside it, which is never added to the device's: ``panel``
        (mapped, and shared by all jobs), ``batch_bytes``, and ``loader`` (see ``memfit.data.loader_footprint``; None
        for a loader of another kind).

    Raises:
        UsageError: If the config is bad, its workload names no loader or no step, or the step cannot be traced.
    """
    from memfit.estimation import check_allocator, find_gpu

    if gpu is not None:
        find_gpu(gpu)
    if allocator is not None:
        check_allocator(allocator, name="--allocator")
    arguments = {"gpu": gpu, "available_bytes": available_bytes, "allocator": allocator, "time_limit": time_limit}
    return call_alone(f"{__name__}:estimate_in_child", source, arguments, overrides=overrides, env=env)


def estimate_in_child(
    target: str, resolved: str, gpu: str | None, available_bytes: int | None, allocator: str | None, time_limit: float
) -> dict[str, Any]:
    """Prepare the workload's data as a run does, take its longest batch, and trace its step."""
    from memfit.estimation import check_allocator, limit_time

    with probed(target, resolved, "loader", "step") as (context, params, probe):
        text = allocator or config.Resolved.from_json(RunConfig, resolved).value.memory.cuda_allocator
        warned = [] if text is None else check_allocator(text)
        assert probe.loader is not None and probe.step is not None
        loader, make_step = probe.loader(context, params, 0), probe.step
        batch, num_seen = find_longest(loader)

        def make() -> Any:
            step = make_step(context, params)
            return lambda: step(batch)

        with limit_time(time_limit):
            found = _trace(make, target, gpu, available_bytes, text)
        host, read = _host(loader, batch, mapped_bytes(context)), data_text(context)
    size = format_bytes(host["batch_bytes"])
    which = f"the largest of the first {num_seen} batches: {size}; a later one may be larger"
    if num_seen is None:
        which = f"the longest batch, as its loader says it: {size}"
    data = {
        "batch_bytes": host["batch_bytes"],
        "is_longest": num_seen is None,
        "num_batches_seen": num_seen or 1,
        "text": f"{read}; {which}\n{host['text']}",
    }
    beside = {"setup": None, "largest_batch": None, "change": None, "smaller_model": None}
    return found | beside | {"notes": [*found["notes"], *warned], "data": data, "host": host}


def _trace(
    make: Any, target: str, gpu: str | None, available_bytes: int | None, allocator: str | None
) -> dict[str, Any]:
    from memfit.estimation import AllocatorSettings, estimate_step, find_gpu

    device = None if gpu is None else find_gpu(gpu)
    if device is not None and available_bytes is not None:
        device = replace(device, total_bytes=min(device.total_bytes, available_bytes))
    settings = None if allocator is None else AllocatorSettings.parse(allocator)
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError.of("torch", "torch", "an estimate of a workload's step")
    try:
        return estimate_step(make, gpu=device, allocator=settings).to_dict()
    except UntraceableError as error:
        where = f", in {error.module}" if error.module else ""
        raise UsageError(
            f"the step of '{target}' cannot be traced: {error.what}{where}.",
            rule="it is run twice on fake tensors, which have shapes and no values.",
            remedy="take values out of tensors of the batch alone (.item(), .numpy()), allow it more time with "
            "--time-limit, or measure a run on the device",
        ) from error


def find_longest(loader: Iterable[Any]) -> tuple[Any, int | None]:
    """The loader's ``longest()``, where it has one, and None; else the largest of its first batches, and their number.

    Raises:
        UsageError: If the loader has no batch.

    >>> find_longest([[1], [1, 2, 3], [1, 2]])
    ([1, 2, 3], 3)
    """
    if hasattr(loader, "longest"):
        return loader.longest(), None
    seen = list(itertools.islice(loader, _LOOKED_AT))
    if not seen:
        raise UsageError(
            "the loader of the first fold gives no batch.",
            rule="a step is estimated on a batch of its own data.",
            remedy="see that the fold has dates to train on",
        )
    return max(seen, key=lambda batch: (bytes_of(batch), len(batch) if hasattr(batch, "__len__") else 0)), len(seen)


def bytes_of(batch: Any) -> int:
    """Bytes of the arrays and tensors of a batch, however deep they lie in it."""
    if hasattr(batch, "nbytes"):
        return int(batch.nbytes)
    if is_dataclass(batch):
        return sum(bytes_of(getattr(batch, one.name)) for one in fields(batch))
    if isinstance(batch, Mapping):
        return sum(map(bytes_of, batch.values()))
    return sum(map(bytes_of, batch)) if isinstance(batch, list | tuple) else 0


def _host(loader: Any, batch: Any, panel_bytes: int) -> dict[str, Any]:
    """The host's side; the device's figures hold nothing of it."""
    from memfit.data import loader_footprint

    batch_bytes = bytes_of(batch)
    batches = f"a batch {format_bytes(batch_bytes)} for each that is ready"
    footprint = None
    with suppress(UsageError):  # a loader of another kind
        footprint = loader_footprint(loader).to_dict()
        batches = f"the loader {format_bytes(footprint['private_bytes'])} in the training's process"
    text = f"host, beside the device: panel {format_bytes(panel_bytes)}, mapped once for all jobs; {batches}"
    return {"panel": {"mapped_bytes": panel_bytes}, "batch_bytes": batch_bytes, "loader": footprint, "text": text}
