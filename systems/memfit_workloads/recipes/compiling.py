"""Run a model's blocks through ``torch.compile`` while it trains, and count what the compiler does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfit.errors import ConfigError
from memfit.rundir import record
from memfit.training import EpochRecord

Loss = Callable[[Any, Any], tuple[torch.Tensor, int]]


class CompiledBlocks:
    """The blocks of a model, compiled for training; after each epoch an event says what was compiled in it.

    Lengths are dynamic, so that a batch of another length compiles nothing. Validation runs without the compiler: it
    would need graphs of its own.

    Source: the counters of torch/_dynamo/utils.py (PyTorch 2.13). ``torch.compiler`` has none of its own.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        try_compiler(device)
        self._told = _compiled()
        self._epochs: list[dict[str, Any]] = []
        for block in blocks_of(model):
            block.compile(dynamic=True)

    def loss(self, loss: Loss) -> Loss:
        """Return the loss that is compiled in training mode alone."""

        def chosen(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
            if model.training:
                return loss(model, batch)
            with torch.compiler.set_stance("force_eager"):
                return loss(model, batch)

        return chosen

    def __call__(self, epoch: EpochRecord) -> None:
        """Record what was compiled since the epoch before; the first time that is the warm-up."""
        before, self._told = self._told, _compiled()
        found = {name: round(value - before[name], 2) for name, value in self._told.items()}
        self._epochs.append(found)
        text = f"compiled {found['num_graphs']} graphs in {found['seconds']:.0f} s in epoch {epoch.epoch}"
        record("compiled", epoch=epoch.epoch, **found, **({"text": text} if found["num_graphs"] else {}))

    def summary(self) -> dict[str, Any]:
        """Return how many graphs this attempt compiled, how many after its first epoch, and how long that one took."""
        counts = [one["num_graphs"] for one in self._epochs]
        first = self._epochs[0]["seconds"] if counts else 0.0
        return {"num_graphs": sum(counts), "num_graphs_after_warm_up": sum(counts[1:]), "warm_up_seconds": first}


def _compiled() -> dict[str, Any]:
    from torch._dynamo import utils

    return {
        "num_graphs": utils.counters["stats"]["unique_graphs"],
        "seconds": utils.calculate_time_spent()["total_wall_time"],
        "graph_breaks": sum(utils.counters["graph_break"].values()),
    }


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the members of the outermost lists of modules: the layers of encoder and decoder."""
    lists = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.ModuleList)}
    outer = [one for name, one in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return [block for one in outer for block in one]


def try_compiler(device: torch.device) -> None:
    """Compile one line for the device."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except (RuntimeError, OSError) as error:
        cause = getattr(error, "inner_exception", error)
        line = next((one for one in str(cause).splitlines() if one.strip()), type(cause).__name__)
        raise ConfigError(
            f"torch.compile fails on {device.type}: {line}",
            rule="params.compile needs a C++ compiler, and Triton on a GPU.",
            remedy="install one (apt-get install g++), name yours in CXX, or --set params.compile=false",
        ) from None
