"""What a checkpoint of a ``Trainer`` holds, beside the position that its session keeps."""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from memfit.rundir import record
from memfit.training._checkpoint import PARTS, load_checkpoint, save_checkpoint
from memfit.training._fsdp import load_shards, save_shards
from memfit.training._loop_parts import LoopParts
from memfit.training._process import preserved_rng, rng_state, say, seed_rank
from memfit.training._ranks import Ranks
from memfit.training._records import MEASURED, EpochRecord, StepOutcome
from memfit.training._session import Position, Resumed
from memfit.training._setup import Setup
from memfit.units import format_count


@dataclass
class Progress:
    """The epochs of a fit so far, and the sums of the one under way."""

    fit: str = field(default_factory=lambda: uuid.uuid4().hex)  # names the training in all of its files
    history: list[EpochRecord] = field(default_factory=list)
    loss_sum: float = 0.0
    weight: float = 0.0
    num_skipped: int = 0

    @property
    def ends(self) -> list[int]:
        """The optimizer steps at the end of each epoch so far, from epoch 0 on."""
        return list(itertools.accumulate((entry.num_steps for entry in self.history), initial=0))

    def add_step(self, outcome: StepOutcome) -> None:
        self.num_skipped += outcome.skipped
        if not outcome.skipped:  # by the policy, or by the scaler, whose loss did not come to the weights
            self.loss_sum += outcome.loss_sum
            self.weight += outcome.weight

    def end_epoch(self, num_steps: int, pace: Mapping[str, Any]) -> None:
        train_loss, epoch = self.loss_sum / self.weight if self.weight else math.nan, len(self.history) + 1
        self.history.append(EpochRecord(epoch, train_loss, num_steps, num_skipped=self.num_skipped, **pace))
        self.loss_sum, self.weight, self.num_skipped = 0.0, 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        entries = asdict(self)
        for entry in entries["history"]:  # times are in the events: two equal fits have equal checkpoints
            for name in MEASURED:
                del entry[name]
        return entries

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, history=[EpochRecord(**entry) for entry in state["history"]])


class Buffers:
    """The buffers of a model that its state dict leaves out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def _unsaved(self) -> dict[str, tuple[torch.nn.Module, str]]:
        """Return the module of each, and its name there, by its path."""
        return {
            f"{prefix}.{name}".lstrip("."): (module, name)
            for prefix, module in self._model.named_modules()
            for name in sorted(getattr(module, "_non_persistent_buffers_set", ()))
            if name in module._buffers
        }

    def state_dict(self) -> dict[str, Any]:
        return {path: module._buffers[name] for path, (module, name) in self._unsaved().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor | None]) -> None:
        """Put them back, in place where that can be."""
        for path, (module, name) in self._unsaved().items():
            if path not in state:
                continue
            now, then = module._buffers[name], state[path]
            if now is None or then is None or (now.shape, now.dtype) != (then.shape, then.dtype):
                device = next((one.device for one in self._model.parameters()), None) if now is None else now.device
                module._buffers[name] = None if then is None else then.to(device)
            elif not torch.equal(now.cpu(), then):
                now.copy_(then)


class FitParts(LoopParts):
    """The parts of a fit. Those of a sharded model are in shards, which all ranks write; the rest is written by rank 0.
    The identity was read before the fit: some schedules change what they are made of."""

    def __init__(self, setup: Setup, progress: Progress, **parts: Any) -> None:
        step = setup.step
        self.setup, self.progress, self.is_proved = setup, progress, False
        of_model = {} if step.is_sharded else {"model": step.model, "optimizer": step.optimizer}
        named = {"schedule": setup.schedule, "ema": setup.ema, **parts}
        named |= {"sizes": step, "buffers": Buffers(step.model)}
        super().__init__(of_model | {name: part for name, part in named.items() if part is not None})

    def identity(self) -> dict[str, Any]:
        return {}

    def told(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Return what tells people and other programs which training a file is of."""
        epoch, provenance = len(self.progress.history), dict(self.setup.provenance)
        return {"epoch": epoch, "fit": self.progress.fit, "identity": dict(identity), "provenance": provenance}

    def content(self, position: Position, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Return what rank 0 writes."""
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return {**self.told(identity), "step": position.epoch_step, **self.progress.state_dict(), **states}

    def write(self, path: Path, content: Mapping[str, Any]) -> None:
        save_checkpoint(path / PARTS, dict(content), prove=not self.is_proved)
        self.is_proved = content["epoch"] + content["step"] > 0  # before that an optimizer's state may be empty

    def load(self, path: Path) -> None:
        state = load_checkpoint(path / PARTS)
        self.progress.load_state_dict({name: state[name] for name in vars(self.progress)})
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        if self.setup.step.is_sharded:
            load_shards(self.setup.step, path)

    def save_shards(self, path: Path) -> None:
        if self.setup.step.is_sharded:
            save_shards(self.setup.step, path)


def tell_other_ranks(resumed: Resumed, before: int, ranks: Ranks | None, seed: int) -> None:
    """Say what another number of ranks than at the checkpoint means for the result."""
    size = 1 if ranks is None else ranks.size
    if size == before:
        return
    with preserved_rng():
        seed_rank(seed, 0)
        fresh = rng_state()["torch"]
    draws = not torch.equal(fresh, resumed.drawn["now"]["torch"])
    how = "equal in distribution: the model draws random numbers" if draws else "gradient-exact"
    text = f"goes on with {format_count(size, 'rank')} in place of {before}, the same global batches; {how}"
    record("ranks_changed", before=before, ranks=size, is_gradient_exact=not draws, text=text)
    say(text)
