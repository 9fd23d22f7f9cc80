"""Run a model's blocks through ``torch.compile`` while it trains, and count what the compiler does."""

from __future__ import annotations

import re
import time
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

    Attributes:
        num_graphs: How often a forward or a backward pass was compiled.
        num_recompiles: How often a function was compiled again because a guard of its graph did not hold.
        seconds: What that took, with the trial before.

    Source: torch/_dynamo/callback.py (PyTorch 2.13). ``torch.compiler`` has no counters of its own.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        start = time.perf_counter()
        try_compiler(device)
        self.seconds, self.num_graphs, self.num_recompiles = time.perf_counter() - start, 0, 0
        self._told = self.num_graphs, self.num_recompiles, 0.0
        self._first: dict[str, Any] | None = None
        self._began = 0.0
        from torch._dynamo import callback

        callback.on_compile_start(self._note_start)
        callback.on_compile_end(self._note_end)
        for block in blocks_of(model):
            block.compile(dynamic=True)

    def _note_start(self, _: Any) -> None:
        self._began = time.perf_counter()

    def _note_end(self, args: Any) -> None:
        self.seconds += time.perf_counter() - self._began
        self.num_graphs += 1
        again = re.search(r"/([1-9])", str(args.compile_id))
        self.num_recompiles += again is not None and args.callback_trigger.name == "DYNAMO"

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
        graphs, recompiles, seconds = self._told
        self._told = self.num_graphs, self.num_recompiles, self.seconds
        found = {"num_graphs": self.num_graphs - graphs, "num_recompiles": self.num_recompiles - recompiles,
                 "seconds": round(self.seconds - seconds, 2), "graph_breaks": graph_breaks()}  # fmt: skip
        self._first = self._first or (found if self.num_graphs else None)
        text = f"compiled {found['num_graphs']} graphs in {found['seconds']:.0f} s in epoch {epoch.epoch}"
        record("compiled", epoch=epoch.epoch, **found, **({"text": text} if found["num_graphs"] else {}))

    def summary(self) -> dict[str, Any]:
        """Return what this attempt compiled, and how long the warm-up took: all that its first epoch compiled."""
        first = self._first or {"num_graphs": 0, "seconds": 0.0}
        return {
            "num_graphs": self.num_graphs,
            "num_recompiles": self.num_recompiles,
            "num_graphs_after_warm_up": self.num_graphs - first["num_graphs"],
            "warm_up_seconds": first["seconds"],
            "graph_breaks": graph_breaks(),
        }


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the members of the outermost lists of modules: the layers of encoder and decoder."""
    lists = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.ModuleList)}
    outer = [one for name, one in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return [block for one in outer for block in one]


def graph_breaks() -> int:
    """Return how often the compiler left a function, in this process."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def try_compiler(device: torch.device) -> None:
    """Compile one line for the device.

    Raises:
        ConfigError: If that fails, as it does without a C++ compiler.
    """
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
