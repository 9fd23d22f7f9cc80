"""Note by name what the user's own objects, modules and frames hold: it names what a resume has lost."""

from __future__ import annotations

import gc
import sys
import sysconfig
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from memfit.training._replay import digest_of, leaves_of

#: What a note calls a copy of the weights that nobody saves.
AVERAGE = "a second set of the weights"
_AVERAGE_SHARE = 0.5  # of the trained weights has such a set
_CLOCK = 1e9  # seconds since 1970 are more: they differ in each process
_PLACES = tuple({*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(torch.__file__).parents[1])})
_OURS = ("memfit", "torch")


def note_of(models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
    """Return checksums by name of the plain values in what comes from the user's own files: attributes of objects and
    classes, globals, and locals of the frames under way; the place of each schedule; and whether a second set
    of the weights is kept. Names that begin with ``_`` are a framework's; a value that no checksum knows is left out."""
    found: defaultdict[str, list[int]] = defaultdict(list)

    def note(name: str, value: Any) -> None:
        if isinstance(value, float) and value > _CLOCK:
            return
        if leaves := list(leaves_of(value, 4, sampled=True)):
            found[name].append(digest_of([int(one) for one in leaves]))

    users = {name for name in list(sys.modules) if _is_user(name)}
    objects = gc.get_objects()
    types_of = list(map(type, objects))  # the one look at all of them: there are a million
    kinds = {kind for kind in set(types_of) if getattr(kind, "__module__", None) in users}
    schedules = {kind for kind in set(types_of) if issubclass(kind, torch.optim.lr_scheduler.LRScheduler)}
    wanted = {*kinds, *schedules, torch.Tensor, torch.nn.Parameter}
    chosen = [objects[number] for number, kind in enumerate(types_of) if kind in wanted]
    objects.clear()  # it is in a cell that it holds itself, and would keep all of them until the collector comes
    for one in chosen:
        kind = type(one)
        if kind in kinds:
            for name, value in list(getattr(one, "__dict__", {}).items()):
                if not name.startswith("_"):
                    note(f"{kind.__qualname__}.{name}", value)
        elif kind in schedules:
            note(f"{kind.__qualname__}.last_epoch", one.last_epoch)
    for module in [sys.modules[name] for name in users if name in sys.modules]:
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ in users:
                kinds.add(value)
            elif not name.startswith("__"):
                note(f"{name} of {module.__name__} (global)", value)
    for kind in kinds:
        for name, value in list(vars(kind).items()):
            if not name.startswith("_"):
                note(f"{kind.__qualname__}.{name}", value)
    for frame in _frames(users):
        for name, value in frame.f_locals.items():
            note(f"{name} of {frame.f_code.co_name} (local)", value)
    tensors = [one for one in chosen if type(one) in (torch.Tensor, torch.nn.Parameter)]
    found |= _average(tensors, list(models), list(optimizers))
    return {name: digest_of(sorted(values)) for name, values in found.items()}


def _average(tensors: list[Any], models: list[torch.nn.Module], optimizers: list[Any]) -> dict[str, list[int]]:
    """Return the checksums of tensors that are shaped like most of the trained weights and are neither these, nor
    saved, nor of an optimizer; nothing if there are none."""
    weights = [one for model in models for one in model.parameters() if one.requires_grad and one.ndim > 1]
    kept = [one for model in models for one in model.state_dict(keep_vars=True).values()]
    kept += [one.grad for model in models for one in model.parameters()]
    kept += [one for made in optimizers for state in made.state.values() for one in state.values()]
    held = {one.untyped_storage().data_ptr() for one in kept if isinstance(one, torch.Tensor)}
    shapes = Counter(one.shape for one in weights)
    tensors = [one for one in tensors if one.shape in shapes and one.layout is torch.strided]
    tensors = [one for one in tensors if one.untyped_storage().data_ptr() not in held]
    has = Counter(one.shape for one in tensors)
    covered = sum(shape.numel() * min(number, has[shape]) for shape, number in shapes.items())
    if covered <= _AVERAGE_SHARE * sum(one.numel() for one in weights):
        return {}
    return {AVERAGE: [int(leaf) for one in tensors for leaf in leaves_of(one, sampled=True)]}


def _frames(users: set[str]) -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") in users and frame.f_code.co_name != "<module>":
            yield frame
        frame = frame.f_back


@cache
def _is_user(name: str) -> bool:
    """Return whether a module lies outside of memfit and of what is installed."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return bool(file) and name.partition(".")[0] not in _OURS and not str(file).startswith(_PLACES)
