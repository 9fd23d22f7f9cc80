"""Say what must not change between a checkpoint and its resume, and what nobody can prove about it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.rundir import record
from memfit.training._checkpoint import CheckpointWarning


def optimizer_identity(optimizer: torch.optim.Optimizer, *, scheduled: bool) -> dict[str, Any]:
    """Return the optimizer's settings without those that a schedule moves."""
    identity: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    moved = {"lr", "momentum", "betas"} if scheduled else set()
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            value = len(value) if name == "params" else value
            if isinstance(value, int | float | str | bool | tuple | None) and name not in moved:
                identity[f"optimizer group {index}, {name}"] = value
    return identity


def environment() -> dict[str, Any]:
    """Return what the same bytes also need: a resume elsewhere is told, and not refused."""
    device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "none"  # type: ignore[no-untyped-call]
    return {
        "torch": str(torch.__version__),
        "num_threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": device,
    }


def check_environment(path: Path, saved: Mapping[str, Any]) -> None:
    """Warn of a checkpoint that was made where the same bytes are not proved: with another torch, or another device."""
    if saved != environment():
        text = f"{path} was made with {saved}, this is {environment()}: the resume may not be bit-exact."
        warnings.warn(text, CheckpointWarning, stacklevel=4)


def refuse_changed(
    path: Path, saved: Mapping[str, Any], now: Mapping[str, Any], allow: Collection[str] | None = None
) -> dict[str, tuple[Any, Any]]:
    """Refuse a checkpoint made with other settings; return of each allowed one what it was and is. A name in ``allow``
    before a comma allows all that begins with it. None: the caller has no such argument."""
    saved, now = ({name: _plain(value) for name, value in one.items()} for one in (saved, now))
    differing = [name for name in sorted({*saved, *now}) if saved.get(name) != now.get(name)]
    if "optimizer" in differing:  # another type has other settings: they say nothing more
        differing = [name for name in differing if not name.startswith("optimizer group ")]
    changed = {name: (saved.get(name), now.get(name)) for name in differing}
    if refused := [name for name in differing if not {name, name.split(",")[0]} & {*(allow or ())}]:
        details = "; ".join(f"{name}: {changed[name][0]} then, {changed[name][1]} now" for name in refused)
        named = f"add allow={(*refused,)!r}: the training goes on with those of now, recorded as a fork; or "
        raise UsageError(
            f"{path} was made with other settings: {details}.",
            rule="a resume goes on with what the checkpoint was made with; a change would mix two trainings.",
            remedy=f"set these back; or {named * (allow is not None)}start over in another folder",
        )
    if changed:
        text = ", ".join(f"{name} {then} -> {value}" for name, (then, value) in changed.items())
        record("fork", path=str(path), changed={name: list(pair) for name, pair in changed.items()}, text=text)
    return changed


def _plain(value: Any) -> Any:
    return list(map(_plain, value)) if isinstance(value, tuple | list) else value  # JSON knows no tuples
