"""Save and load a sharded model: each rank writes its shards into the folder of a checkpoint.

Shards are files of ``torch.distributed.checkpoint``, so another number of ranks can load them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.training._step import SafeStep


def shard_bytes(step: SafeStep) -> int:
    """Return the bytes of weights and optimizer on all ranks."""
    states = [one for state in step.optimizer.state.values() for one in state.values()]
    tensors = [one for one in (*step.parameters(), *states) if hasattr(one, "numel")]
    return sum(one.numel() * one.element_size() for one in tensors)


def save_shards(step: SafeStep, path: Path) -> None:
    """Write this rank's shards; torch waits for rank 0 before, and for all ranks after."""
    import torch.distributed.checkpoint as dcp

    assert step.ranks is not None
    with_optimizer = bool(step.optimizer.state)  # else torch would make it by a step
    dcp.save(_shards(step, with_optimizer), checkpoint_id=path, process_group=step.ranks.side)  # type: ignore[attr-defined]


def load_shards(step: SafeStep, path: Path) -> None:
    """Load this rank's shards, whatever the number of ranks was that wrote them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    assert step.ranks is not None
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    state = _shards(step, any(name.startswith("optimizer.") for name in saved))
    dcp.load(state, checkpoint_id=path, process_group=step.ranks.side)  # type: ignore[attr-defined]
    set_model_state_dict(step.model, state["model"])
    if "optimizer" in state:
        set_optimizer_state_dict(step.model, step.optimizer, state["optimizer"])


def _shards(step: SafeStep, with_optimizer: bool) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    found: dict[str, Any] = {"model": get_model_state_dict(step.model)}
    if with_optimizer:
        found["optimizer"] = get_optimizer_state_dict(step.model, step.optimizer)
    return found
