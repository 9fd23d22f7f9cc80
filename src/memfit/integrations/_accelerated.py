"""Say which ranks of Accelerate cannot be stopped and resumed; the Trainer of transformers runs on it too."""

from __future__ import annotations

from typing import Any


def refused_ranks(accelerator: Any) -> list[tuple[str, bool, str]]:
    """Return by name what several ranks may have that no checkpoint keeps: whether it is so, and what to do."""
    size, kind = accelerator.num_processes, str(accelerator.distributed_type.value)
    data, handler = accelerator.dataloader_config, accelerator.ddp_handler
    hook = "" if handler is None else str(handler.comm_hook.value)
    has_mesh = getattr(accelerator, "torch_device_mesh", None) is not None
    is_plain = kind == "NO" or kind.startswith("MULTI_")
    return [
        (
            "parallelism_config" if has_mesh else kind.lower(),
            has_mesh or not is_plain,
            "train in one process, or on ranks in DistributedDataParallel; or keep to the framework's own checkpoints",
        ),
        ("dispatch_batches", size > 1 and bool(data.dispatch_batches), "leave it off: each rank reads its own data"),
        ("even_batches", size > 1 and not data.even_batches, "leave it on: its peers would wait for a rank's batch"),
        ("comm_hook", size > 1 and "power" in hook, "take another: no checkpoint holds its state"),
    ]
