"""A user's own network in a system: ``model: module:Class`` in place of the system's.

Every network is made and called here, the systems' own too. Its constructor gets ``model.params`` and those of the
system's sizes that it names, its ``forward`` those of the system's inputs that it names. The pages of the systems list
both, with the shape that is returned.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from memfit import config
from memfit.errors import ConfigError, MemfitError
from memfit.jobs import load_target
from memfit.pipeline import fingerprint_files

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

Target = Annotated[str, Field(pattern=r"^\w+(\.\w+)*:\w+$", description="the class of the network, as module:Class")]
#: So many rows has a batch that a network is tried on.
ROWS = 32
#: The inputs of a network by name: the type of their values in torch, and their shape.
Inputs = Mapping[str, tuple[str, tuple[int, ...]]]


class Network(config.Settings):
    """Which network is trained. The other settings of ``model`` belong to the system's own."""

    #: Settings that count for every network.
    shared: ClassVar[tuple[str, ...]] = ()
    target: Target
    params: dict[str, Any] = Field({}, description="what the constructor of your own network gets")

    @model_validator(mode="before")
    @classmethod
    def _target_alone(cls, given: Any) -> Any:
        return {"target": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _settings_fit_the_target(self) -> Network:
        default = type(self).model_fields["target"].default
        if self.params and not self.is_own:
            raise ValueError(f"model.params belongs to a model.target of your own; {default} has settings beside it")
        for name in self.model_fields_set - {"target", "params", *self.shared} if self.is_own else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"model.{name} belongs to {default}; of {self.target} it is model.params.{name}")
        return self

    @property
    def is_own(self) -> bool:
        """True if the network is not the system's."""
        return bool(self.target != type(self).model_fields["target"].default)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the settings give to the constructor."""
        return self.params if self.is_own else self.model_dump(exclude={"target", "params", *self.shared})

    def fingerprint(self) -> str:
        """Return a digest of the files that ``params`` name, such as the weights of a backbone."""
        named = [one for one in self.params.values() if isinstance(one, str) and Path(one).is_file()]
        return fingerprint_files(*named) if named else ""


def build(network: Network, **sizes: Any) -> nn.Module:
    """Return a new network."""
    make = load_target(network.target)
    made: nn.Module = make(**{name: sizes[name] for name in _named(make) & sizes.keys()} | network.arguments)
    return made


def call(model: nn.Module, names: Sequence[str], find: Callable[[str], Any]) -> Tensor:
    """Return what a network says to those of a system's inputs that it names; if it names none, to the first."""
    kind: Any = type(getattr(model, "module", model))  # within DDP
    given = {name: find(name) for name in names if name in _named(kind.forward)}
    answer: Tensor = model(**given) if given else model(find(names[0]))
    return answer


def step_of(
    model: nn.Module, optimizer: Optimizer, loss: Callable[..., Any], max_grad_norm: float | None = None
) -> Callable[[Any], None]:
    """Return one training step on a batch, without what a trainer does around it."""
    import torch

    device = next(model.parameters()).device
    model.train()

    def step(batch: Any) -> None:
        total, weight = loss(model, [one.to(device) for one in batch] if isinstance(batch, list | tuple) else batch)
        optimizer.zero_grad()
        torch.autograd.backward(total / weight)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()

    return step


def batches(items: Any, seed: int, batch_size: int, num_workers: int, *, shuffle: bool) -> DataLoader[Any]:
    """Return a loader whose order and random numbers follow from seed and epoch, whatever was loaded before."""
    from torch.utils.data import DataLoader

    from memfit.training import KeyedDataset, KeyedSampler

    keyed = KeyedDataset(items, seed)
    context = "forkserver" if num_workers else None
    order = KeyedSampler(keyed, seed, shuffle=shuffle)
    return DataLoader(keyed, batch_size, sampler=order, num_workers=num_workers, multiprocessing_context=context)


@functools.cache
def _named(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def try_out(network: Network, make: Callable[[], nn.Module], inputs: Inputs, expected: tuple[int, ...]) -> None:
    """Refuse a network of the user's that cannot be made, or answers a batch of zeros in another shape."""
    if not network.is_own:
        return
    import torch

    names = ", ".join(f"{name} {list(shape)} {kind}" for name, (kind, shape) in inputs.items())
    rule, remedy = f"forward gets what it names of: {names}; it returns {list(expected)}.", "correct the class"
    try:
        given = {name: torch.zeros(shape, dtype=getattr(torch, kind)) for name, (kind, shape) in inputs.items()}
        with torch.no_grad():
            found = tuple(call(make().eval(), [*inputs], given.__getitem__).shape)
    except MemfitError:
        raise
    except Exception as error:  # it is the user's code
        what = f"{network.target} cannot answer zeros: {type(error).__name__}: {error}".strip().partition("\n")[0]
        remedy = f"{remedy}, or --set params.model.params.NAME=VALUE"
        raise ConfigError(what, rule=rule, remedy=remedy) from error
    if found != expected:
        what = f"{network.target} returns the shape {list(found)}, and {list(expected)} is needed."
        raise ConfigError(what, rule=rule, remedy=remedy)
