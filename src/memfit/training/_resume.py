"""Make the content of a checkpoint, load the newest one, and refuse one of another training."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from memfit.errors import HalfUpdatedError, UsageError
from memfit.rundir import record
from memfit.training._beat import beat
from memfit.training._checkpoint import FORMAT, Position, position_of
from memfit.training._feed import Feed
from memfit.training._fsdp import ShardedFolder
from memfit.training._identity import check_environment, environment, optimizer_identity, refuse_changed
from memfit.training._journal import Journal
from memfit.training._oom import release
from memfit.training._process import preserved_rng, rng_state, say, seed_rank, set_rng_state
from memfit.training._records import MEASURED, EpochRecord, StepOutcome
from memfit.training._setup import Plan, Setup
from memfit.training._validation import Validation
from memfit.units import format_count

_MAX_ROLLBACKS = 3


@dataclass
class Progress:
    """How far a fit has come: whole epochs, and the steps of the one under way."""

    fit: str = field(default_factory=lambda: uuid.uuid4().hex)  # names the training in all of its files
    history: list[EpochRecord] = field(default_factory=list)
    step: int = 0
    num_batches: int = 0
    loss_sum: float = 0.0
    weight: float = 0.0
    num_skipped: int = 0

    @property
    def epoch(self) -> int:
        return len(self.history) + 1

    @property
    def position(self) -> Position:
        return len(self.history), self.step

    def add_step(self, outcome: StepOutcome, num_batches: int) -> None:
        self.step += 1
        self.num_batches += num_batches
        self.num_skipped += outcome.skipped
        if not outcome.skipped:  # by the policy, or by the scaler, whose loss did not come to the weights
            self.loss_sum += outcome.loss_sum
            self.weight += outcome.weight

    def end_epoch(self, pace: Mapping[str, Any]) -> None:
        train_loss = self.loss_sum / self.weight if self.weight else math.nan
        self.history.append(EpochRecord(self.epoch, train_loss, self.step, num_skipped=self.num_skipped, **pace))
        self.step = self.num_batches = self.num_skipped = 0
        self.loss_sum = self.weight = 0.0


class Resume:
    """Makes the content of a fit's checkpoints, and continues the fit from the newest one."""

    def __init__(
        self, setup: Setup, plan: Plan, data: Feed, validation: Validation, journal: Journal, num_steps: int
    ) -> None:
        self._setup, self._plan, self._data, self._journal = setup, plan, data, journal
        step = setup.step
        parts = {
            "model": step.model,
            "optimizer": step.optimizer,
            "schedule": setup.schedule,
            "ema": setup.ema,
            "sizes": step,
            "validation": validation,
        }
        kept = ("model", "optimizer") if step.is_sharded else ()  # in shards, by the folder
        self._parts: dict[str, Any] = {
            name: part for name, part in parts.items() if part is not None and name not in kept
        }
        self.identity = {  # what must not change between a checkpoint and its resume, read before anything is loaded
            "steps per epoch": num_steps,
            "best": f"{plan.direction} {plan.best_metric}" if plan.valid is not None else "no validation",
            **setup.identity,
            **data.identity(),
            **optimizer_identity(step.optimizer, scheduled=setup.schedule is not None),
        }
        self._rollbacks: Counter[Position] = Counter()

    def capture(self, progress: Progress, rngs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a checkpoint's content: the state of every part, the random state of each rank, and the progress."""
        entries = asdict(progress)
        for entry in entries["history"]:  # times are in the events: two equal fits have equal checkpoints
            for name in MEASURED:
                del entry[name]
        return {
            "memfit_checkpoint": FORMAT,
            "epoch": len(progress.history),
            **{name: entries.pop(name) for name in ("fit", "step", "history")},
            "within_epoch": entries,
            **{name: part.state_dict() for name, part in self._parts.items()},
            "buffers": {path: module._buffers[name] for path, module, name in _unsaved(self._setup.step.model)},
            "rng": rngs[0],
            **({"rank_rngs": list(rngs[1:])} if len(rngs) > 1 else {}),
            "identity": dict(self.identity),
            "environment": environment(),
            "data": self._data.state_dict(),
            "provenance": dict(self._setup.provenance),
        }

    def newest(self) -> Progress | None:
        """Load the newest whole checkpoint and return its progress; None if there is none."""
        folder, ranks = self._setup.folder, self._setup.step.ranks
        beat("load")
        taken = None if folder is None or (ranks and ranks.rank) else folder.newest()
        if ranks is not None and folder is not None:
            path = ranks.gather(str(taken[0]) if taken else "")[0]
            beat("load")  # no longer at the vote
            taken = taken or ((Path(path), folder.read(Path(path))) if path else None)
        return None if taken is None else self._restore(*taken)

    def go_back(self, error: HalfUpdatedError, position: Position) -> Progress:
        """Go back to the newest checkpoint after an optimizer step that an out-of-memory left half-way."""
        self._rollbacks[position] += 1
        self._data.close()
        progress = self.newest() if self._rollbacks[position] <= _MAX_ROLLBACKS else None
        if progress is None:
            raise error
        release(error)
        record("rollback", from_epoch=position[0], from_step=position[1], error=error.what)
        return progress

    def _restore(self, path: Path, state: Mapping[str, Any]) -> Progress:
        self._refuse_others(path, state)
        for name, part in self._parts.items():
            try:
                part.load_state_dict(state[name])
            except RuntimeError as error:
                if name != "model":
                    raise
                raise UsageError(
                    f"{path} holds another model: {error}",
                    rule="the names and shapes of all weights must be the checkpoint's.",
                    remedy="build the model as it was, or pass another checkpoint_dir",
                ) from error
        step = self._setup.step
        if isinstance(self._setup.folder, ShardedFolder):
            self._setup.folder.load_shards(path)
        _restore_buffers(step.model, state.get("buffers", {}))
        self._restore_rng(state)
        self._data.load_state_dict(state["data"])
        check_environment(path, state["environment"])
        history = [EpochRecord(**entry) for entry in state["history"]]
        progress = Progress(fit=state["fit"], history=history, step=state["step"], **state["within_epoch"])
        self._journal.resume(path, progress.position)
        return progress

    def _restore_rng(self, state: Mapping[str, Any]) -> None:
        """Put back the random state of this rank; say what another number of ranks means for the result."""
        rngs, ranks, seed = [state["rng"], *state.get("rank_rngs", ())], self._setup.step.ranks, self._setup.seed
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        if size != len(rngs):
            fresh = []
            for number in range(len(rngs)):
                with preserved_rng():
                    seed_rank(seed, number)
                    fresh.append(rng_state())
            draws = any(not torch.equal(one["torch"], then["torch"]) for one, then in zip(fresh, rngs, strict=True))
            how = "equal in distribution: the model draws random numbers" if draws else "gradient-exact"
            text = f"goes on with {format_count(size, 'rank')} in place of {len(rngs)}, the same global batches; {how}"
            record("ranks_changed", before=len(rngs), ranks=size, is_gradient_exact=not draws, text=text)
            if rank == 0:
                say(text)
        if rank < len(rngs):
            set_rng_state(rngs[rank])
        else:
            seed_rank(seed, rank)

    def _refuse_others(self, path: Path, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that lies beyond the plan, or is of another training."""
        if position_of(state) > (self._plan.num_epochs, 0):
            raise UsageError(
                f"{path} has {state['epoch']} whole epochs, and num_epochs is {self._plan.num_epochs}.",
                rule="a fit goes on from its newest checkpoint; it cannot go back.",
                remedy=f"pass num_epochs={state['epoch'] + bool(state['step'])} or more, or another checkpoint_dir",
            )
        saved, identity = dict(state["identity"]), self.identity
        if not any(entry["metrics"] for entry in state["history"]):
            saved["best"] = identity["best"]  # no epoch was chosen by it yet: a wrong best_metric can be put right
        refuse_changed(path, saved, identity)


def _unsaved(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str]]:
    """Return the buffers that a state dict leaves out: the buffer's path, its module and its name there."""
    return [
        (f"{prefix}.{name}".lstrip("."), module, name)
        for prefix, module in model.named_modules()
        for name in sorted(getattr(module, "_non_persistent_buffers_set", ()))
        if name in module._buffers
    ]


def _restore_buffers(model: torch.nn.Module, saved: Mapping[str, torch.Tensor | None]) -> None:
    """Put back the buffers that the state dict leaves out, in place where that can be."""
    for path, module, name in _unsaved(model):
        if path not in saved:
            continue
        now, then = module._buffers[name], saved[path]
        if now is None or then is None or (now.shape, now.dtype) != (then.shape, then.dtype):
            device = next((tensor.device for tensor in model.parameters()), None) if now is None else now.device
            module._buffers[name] = None if then is None else then.to(device)
        elif not torch.equal(now.cpu(), then):
            now.copy_(then)
