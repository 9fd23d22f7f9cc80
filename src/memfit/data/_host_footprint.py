"""Forecast the host memory of a training on one machine: its processes with their imports, their state and loaders."""

from __future__ import annotations

from typing import Any

from memfit.data._loader_footprint import LoaderUse, loader_footprint, measure_empty_training, with_imports
from memfit.memory import Footprint, PhasePeak


def host_footprint(
    train: Any, valid: Any = None, use: LoaderUse | None = None, *, training_bytes: int = 0
) -> Footprint:
    """Forecast the host memory of a training on one machine, before it starts.

    To what `loader_footprint` forecasts it adds, for each rank:

    - ``interpreter``: a process with its imports that trains one small layer in the same loop, with batches of the
      same size (8 MiB at most), measured on one: its anonymous memory. The libraries that it maps are in
      ``shared_bytes``, once for the machine.
    - ``training``: ``training_bytes``.

    Args:
        train, valid, use: As for `loader_footprint`.
        training_bytes: Host memory of a rank for weights, gradients, optimizer, buckets of DistributedDataParallel and
            activations. On a CPU, AdamW and DDP take five times the weights, and the activations. It is not measured.

    Returns:
        As from `loader_footprint`, with the parts above.

    Raises:
        UsageError: As `loader_footprint`.
        JobFailedError: If the small training failed, such as with a loop that is not installed.
    """
    use = use or LoaderUse()
    found = loader_footprint(train, valid, use)
    with_workers = next((one for one in (train, valid) if getattr(one, "num_workers", 0)), train)
    empty = measure_empty_training(with_workers, with_imports(use, train, valid))
    added = {"interpreter": use.num_ranks * empty.process, "training": use.num_ranks * training_bytes}
    more, shared = sum(added.values()), found.shared_bytes + empty.files
    return Footprint(
        private_bytes=found.private_bytes + more,
        shared_bytes=shared,
        parts={**added, **found.parts},
        phases={name: PhasePeak(peak.private_bytes + more, shared) for name, peak in found.phases.items()},
        method="declared",
    )
