"""Make a checkpoint of a fit, and bring a fit back to one."""

from __future__ import annotations

import math
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.training._checkpoint import FORMAT, CheckpointWarning, Position
from memfit.training._process import rng_state, set_rng_state
from memfit.training._records import MEASURED, EpochRecord, StepOutcome


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
        """Return the epoch under way, counted from 1."""
        return len(self.history) + 1

    @property
    def position(self) -> Position:
        return len(self.history), self.step

    def add_step(self, outcome: StepOutcome, num_batches: int) -> None:
        """Count an optimizer step and its batches."""
        self.step += 1
        self.num_batches += num_batches
        self.num_skipped += outcome.skipped
        if not outcome.skipped:  # by the policy, or by the scaler, whose loss did not come to the weights
            self.loss_sum += outcome.loss_sum
            self.weight += outcome.weight

    def end_epoch(self, pace: Mapping[str, Any]) -> None:
        """Make the epoch under way a whole one."""
        train_loss = self.loss_sum / self.weight if self.weight else math.nan
        self.history.append(EpochRecord(self.epoch, train_loss, self.step, num_skipped=self.num_skipped, **pace))
        self.step = self.num_batches = self.num_skipped = 0
        self.loss_sum = self.weight = 0.0


def capture(parts: Mapping[str, Any], progress: Progress, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's content: the state of every part, the random state, and how far the fit has come."""
    entries = asdict(progress)
    for entry in entries["history"]:  # times are in the events: two equal fits have equal checkpoints
        for name in MEASURED:
            del entry[name]
    return {
        "memfit_checkpoint": FORMAT,
        "epoch": len(progress.history),
        **{name: entries.pop(name) for name in ("fit", "step", "history")},
        "within_epoch": entries,
        **{name: part.state_dict() for name, part in parts.items()},
        "buffers": {
            f"{prefix}.{name}".lstrip("."): module._buffers[name] for prefix, module, name in _unsaved(parts["model"])
        },
        "rng": rng_state(),
        "identity": dict(identity),
        "environment": _environment(),
    }


def restore(path: Path, state: Mapping[str, Any], parts: Mapping[str, Any], identity: Mapping[str, Any]) -> Progress:
    """Bring every part and the random state to where a checkpoint has them; refuse one of another training."""
    saved = dict(state["identity"])
    if not any(entry["metrics"] for entry in state["history"]):
        saved["best"] = identity.get("best")  # no epoch was chosen by it yet: a wrong best_metric can be put right
    differing = [name for name in sorted({*saved, *identity}) if saved.get(name) != identity.get(name)]
    if "optimizer" in differing:  # another type has other settings: they say nothing more
        differing = [name for name in differing if not name.startswith("optimizer group ")]
    if differing:
        details = "; ".join(f"{name}: {saved.get(name)} then, {identity.get(name)} now" for name in differing)
        raise UsageError(
            f"{path} was made otherwise. {details}.",
            rule="a resume goes on with what the checkpoint was made with; a change would mix two trainings.",
            remedy="set these back, or pass another checkpoint_dir to start over",
        )
    for name, part in parts.items():
        if name != "model":
            part.load_state_dict(state[name])
            continue
        try:
            part.load_state_dict(state[name])
        except RuntimeError as error:
            raise UsageError(
                f"{path} holds another model: {error}",
                rule="the names and shapes of all weights must be the checkpoint's.",
                remedy="build the model as it was, or pass another checkpoint_dir",
            ) from error
    _restore_buffers(parts["model"], state.get("buffers", {}))
    set_rng_state(state["rng"])
    if state["environment"] != _environment():
        text = f"{path} was made with {state['environment']}, this is {_environment()}: the resume is not bit-exact."
        warnings.warn(text, CheckpointWarning, stacklevel=2)
    history = [EpochRecord(**entry) for entry in state["history"]]
    return Progress(fit=state["fit"], history=history, step=state["step"], **state["within_epoch"])


def _unsaved(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str]]:
    """Return the buffers that a state dict leaves out: the module's path, the module and the buffer's name."""
    return [
        (prefix, module, name)
        for prefix, module in model.named_modules()
        for name in sorted(getattr(module, "_non_persistent_buffers_set", ()))
        if name in module._buffers
    ]


def _restore_buffers(model: torch.nn.Module, saved: Mapping[str, torch.Tensor | None]) -> None:
    """Put back the buffers that the state dict leaves out, in place where that can be."""
    for prefix, module, name in _unsaved(model):
        path = f"{prefix}.{name}".lstrip(".")
        if path not in saved:
            continue
        now, then = module._buffers[name], saved[path]
        if now is None or then is None or (now.shape, now.dtype) != (then.shape, then.dtype):
            device = next((tensor.device for tensor in model.parameters()), None) if now is None else now.device
            module._buffers[name] = None if then is None else then.to(device)
        elif not torch.equal(now.cpu(), then):
            now.copy_(then)


def optimizer_identity(optimizer: torch.optim.Optimizer, *, scheduled: bool) -> dict[str, Any]:
    """Return the optimizer's settings without those that a schedule moves."""
    identity: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    moved = {"lr", "momentum", "betas"} if scheduled else set()
    for index, group in enumerate(optimizer.state_dict()["param_groups"]):
        for name, value in group.items():
            value = len(value) if name == "params" else value
            if isinstance(value, int | float | str | bool | tuple | None) and name not in moved:
                identity[f"optimizer group {index}, {name}"] = value
    return identity


def _environment() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "none"  # type: ignore[no-untyped-call]
    return {
        "torch": str(torch.__version__),
        "num_threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": device,
    }
