"""Activation checkpointing: a block's activations are dropped and computed again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from memfit.errors import UsageError

_LAYER = "GradientCheckpointingLayer"  # what Transformers, since 4.52, derives its checkpointed blocks from


@dataclass(frozen=True)
class CheckpointedBlocks:
    """The blocks that are checkpointed now.

    Attributes:
        names: Their names in the model.
        by: ``memfit``, or ``transformers`` where the model's own method did it.
        caches_off: The modules whose ``use_cache`` was switched off.
    """

    names: tuple[str, ...]
    by: str
    caches_off: tuple[str, ...] = ()


def checkpoint_activations(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module] | type[torch.nn.Module] | None = None
) -> CheckpointedBlocks:
    """Keep only the inputs of some blocks for the backward pass; gradients stay the same bit for bit.

    Each block's forward pass runs again in the backward pass, with the same dropout: a step takes about a third longer.
    Names and shapes in ``state_dict`` stay. A cache for generation is switched off.

    Args:
        model: Changed in place, once.
        blocks: Some of the model's modules, or their class; by default what a Transformers model checkpoints itself,
            else the modules in the longest ``ModuleList``.

    Raises:
        UsageError: If there is no such block, or one is checkpointed already or changes its buffers, as BatchNorm does.

    Source: torch/utils/checkpoint.py (PyTorch 2.13), the variant that is not reentrant.

    Example:
        >>> import torch
        >>> model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))})
        >>> checkpoint_activations(model).names
        ('layers.0', 'layers.1', 'layers.2')
    """
    older = getattr(model, "gradient_checkpointing_enable", None)  # the name before transformers 5.23
    enable = getattr(model, "activation_checkpointing_enable", older)
    if blocks is None and enable is not None and getattr(model, "supports_gradient_checkpointing", True):
        _refuse_batch_norm("", model)
        enable({"use_reentrant": False, "preserve_rng_state": True})
        flagged = {name: one for name, one in model.named_modules() if getattr(one, "gradient_checkpointing", False)}
        layers = [name for name, one in flagged.items() if _LAYER in (base.__name__ for base in type(one).__mro__)]
        return CheckpointedBlocks(tuple(layers or flagged), "transformers", _switch_caches_off(model))
    chosen = _choose(model, blocks)
    for name, block in chosen.items():
        if isinstance(block, _Checkpointed):
            raise UsageError(
                f"'{name}' is checkpointed already.",
                rule="a block is computed again once.",
                remedy="call checkpoint_activations once for each model",
            )
        _refuse_batch_norm(name, block)
    for block in chosen.values():
        block.__class__ = _checkpointed(type(block))  # type: ignore[arg-type]
    return CheckpointedBlocks(tuple(chosen), "memfit", _switch_caches_off(model))


class _Checkpointed(torch.nn.Module):
    """Comes before a block's own class, which leaves names, ``isinstance`` and copies as they are."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        _refuse_batch_norm(type(self).__name__, self)  # it may have been in eval() mode before
        versions = [(name, one, one._version) for name, one in self.named_buffers()]
        output = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
        changed = [name for name, one, version in versions if one._version != version]
        if changed:
            raise _changes_buffers(f"{type(self).__name__} changes its buffer '{changed[0]}'")
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self).__mro__[2],), vars(self).copy()


@functools.cache
def _checkpointed(base: type) -> Any:
    return type(base.__name__, (_Checkpointed, base), {"__module__": base.__module__})


def _rebuild(base: type) -> Any:
    """Return an empty block for ``pickle`` and ``copy``, which do not find a class that was made on the way."""
    return object.__new__(_checkpointed(base))


def _choose(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module] | type[torch.nn.Module] | None
) -> dict[str, torch.nn.Module]:
    """Return the blocks by name, none inside another."""
    if isinstance(blocks, type):
        wanted: Iterable[torch.nn.Module] = [one for one in model.modules() if isinstance(one, blocks)]
    elif blocks is None:
        lists = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
        longest = max(map(len, lists), default=0)
        wanted = [block for one in lists if len(one) == longest for block in one]
    else:
        wanted = blocks
    addresses = {id(block) for block in wanted}
    found = {name: one for name, one in model.named_modules() if id(one) in addresses}
    if not found or len(found) != len(addresses):
        raise UsageError(
            f"{len(found)} of {len(addresses)} blocks were found in {type(model).__name__}.",
            rule="blocks are modules of the model; without blocks=, those in its longest torch.nn.ModuleList.",
            remedy="pass blocks=[model.first, model.second], or their class",
        )
    return {name: one for name, one in found.items() if not any(_is_inside(name, outer) for outer in found)}


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (outer == "" or name.startswith(f"{outer}."))


def _refuse_batch_norm(name: str, block: torch.nn.Module) -> None:
    for inner, module in block.named_modules(prefix=name):
        if isinstance(module, _NormBase) and module.track_running_stats and module.training:
            raise _changes_buffers(f"'{inner}' ({type(module).__name__}) updates its running statistics")


def _changes_buffers(what: str) -> UsageError:
    return UsageError(
        f"{what} in each forward pass, and is to be computed again in the backward pass.",
        rule="a block that is checkpointed must leave its buffers alone: its second pass would change them twice.",
        remedy="put it into eval() mode, use GroupNorm or LayerNorm, or pass blocks= without it",
    )


def _switch_caches_off(model: torch.nn.Module) -> tuple[str, ...]:
    switched = []
    for name, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", False):
            config.use_cache = False
            switched.append(name or type(module).__name__)
    return tuple(switched)
