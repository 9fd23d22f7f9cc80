"""Forecast the host memory of a training on one machine: its processes with their imports, their state and loaders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from memfit.data._loader_footprint import Asked, Loop, imports_of, loader_footprint, measure_empty_training
from memfit.errors import UsageError
from memfit.memory import Footprint, PhasePeak


def host_footprint(
    train: Any,
    valid: Any = None,
    *,
    num_ranks: int = 1,
    loop: Loop = "plain",
    training_bytes: int = 0,
    modules: Sequence[str] = (),
    **settings: Any,
) -> Footprint:
    """Forecast the host memory of a training on one machine, before it starts.

    To what `loader_footprint` forecasts it adds, for each rank:

    - ``interpreter``: a process with its imports that trains one small layer in the same loop, with batches of the
      same size (8 MiB at most), measured on one: its anonymous memory. The libraries that it maps are in
      ``shared_bytes``, once for the machine.
    - ``training``: ``training_bytes``.

    Args:
        train, valid: The loaders, as for `loader_footprint`.
        num_ranks: Processes of the training on this machine.
        loop: Who runs the training: ``plain``, ``huggingface`` (transformers' Trainer) or ``lightning``.
        training_bytes: Host memory of a rank for weights, gradients, optimizer, buckets of DistributedDataParallel and
            activations. On a CPU, AdamW and DDP take five times the weights, and the activations. It is not measured.
        modules: Further modules that a rank imports.
        settings: Others of `loader_footprint`. ``within`` is True for Lightning, whose validation begins before the
            iteration of the training ends.

    Returns:
        As from `loader_footprint`, with the parts above.

    Raises:
        UsageError: As `loader_footprint`, or for another loop.
        JobFailedError: If the small training failed, such as with a loop that is not installed.
    """
    if loop not in get_args(Loop):
        raise UsageError(
            f"a loop named {loop} is not known.",
            rule=f"loop is one of {', '.join(get_args(Loop))}.",
            remedy="use plain for a loop of your own",
        )
    how = {"within": loop == "lightning", **settings, "num_ranks": num_ranks, "loop": loop, "modules": modules}
    found = loader_footprint(train, valid, **how)
    with_workers = next((one for one in (train, valid) if getattr(one, "num_workers", 0)), train)
    asked = Asked(num_ranks, None, loop, imports_of(train, valid, modules))
    empty = measure_empty_training(with_workers, asked)
    added = {"interpreter": num_ranks * empty.process, "training": num_ranks * training_bytes}
    more, shared = sum(added.values()), found.shared_bytes + empty.files
    return Footprint(
        private_bytes=found.private_bytes + more,
        shared_bytes=shared,
        parts={**added, **found.parts},
        phases={name: PhasePeak(peak.private_bytes + more, shared) for name, peak in found.phases.items()},
        method="declared",
    )
