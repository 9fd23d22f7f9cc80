"""Note by name what the user's own objects, modules and frames hold: it names what a resume has lost."""

from __future__ import annotations

import gc
import inspect
import sys
import sysconfig
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from memfit.training._replay import digest_of, leaves_of

#: How the name of a second set of the weights ends.
WEIGHTS = " (weights)"
_DEPTH, _MOST_LEAVES = 4, 5000
_CLOCK = 1.5e9  # seconds since 1970, which differ in each process
_PLACES = tuple({*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(torch.__file__).parents[1])})


def note_of(models: Iterable[torch.nn.Module]) -> dict[str, int]:
    """Return checksums by name of what comes from the user's own files and is plain, or a model: attributes of objects
    and classes, globals, and locals of the frames under way; and the place of each schedule. The name of a second set
    of the trained weights says so. Names that begin with ``_`` are a framework's and left out."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    users = {name for name in list(sys.modules) if _is_user(name)}
    objects = gc.get_objects()
    types_of = list(map(type, objects))  # the one look at all of them: there are a million
    kinds = {kind for kind in set(types_of) if getattr(kind, "__module__", None) in users}
    schedules = {kind for kind in set(types_of) if issubclass(kind, torch.optim.lr_scheduler.LRScheduler)}
    chosen = [objects[number] for number, kind in enumerate(types_of) if kind in kinds or kind in schedules]
    del objects
    own = {id(part) for model in models for part in model.modules()}
    shapes = Counter(one.shape for model in models for one in model.parameters() if one.requires_grad)
    for name, value in chain(_of_objects(chosen, kinds), _of_modules(users, kinds), _of_frames(users)):
        if id(value) in own or (isinstance(value, float) and _CLOCK < value < 2 * _CLOCK):
            continue
        with suppress(Exception):  # whatever a user's object raises when it is looked at
            value = value.state_dict() if isinstance(value, torch.nn.Module) else value
            if leaves := list(islice(leaves_of(value, _DEPTH, sampled=True), _MOST_LEAVES)):
                parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
                has = Counter(one.shape for one in parts if isinstance(one, torch.Tensor))
                found[name + WEIGHTS * (has >= shapes)].append(digest_of([int(one) for one in leaves]))
    return {name: digest_of(sorted(values)) for name, values in found.items()}


def _of_objects(chosen: Iterable[Any], kinds: set[type]) -> Iterator[tuple[str, Any]]:
    for one in chosen:
        kind, own = type(one), []
        if kind in kinds:
            with suppress(AttributeError):  # with slots; and its own __getattr__ may do anything
                own = list(object.__getattribute__(one, "__dict__").items())
            own = [pair for pair in own if not pair[0].startswith("_") and pair[0] != "training"]
            yield from ((f"{kind.__qualname__}.{name}", value) for name, value in own)
        elif issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
            yield f"{kind.__qualname__}.last_epoch", one.last_epoch


def _of_modules(users: set[str], kinds: set[type]) -> Iterator[tuple[str, Any]]:
    for module in [sys.modules[name] for name in users if name in sys.modules]:
        own = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        kinds |= {one for one in own.values() if isinstance(one, type) and one.__module__ in users}
        yield from ((f"{name} of {module.__name__} (global)", value) for name, value in own.items())
    for kind in kinds:
        own = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
        yield from ((f"{kind.__qualname__}.{name}", value) for name, value in own.items())


def _of_frames(users: set[str]) -> Iterator[tuple[str, Any]]:
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if frame.f_globals.get("__name__") in users and code.co_flags & inspect.CO_OPTIMIZED:
            own = frame.f_locals
            yield from ((f"{name} of {code.co_name} (local)", value) for name, value in own.items())
            if isinstance(own, dict):  # before Python 3.13 the frame keeps this copy, and with it what it names
                own.clear()
        frame = frame.f_back


@cache
def _is_user(name: str) -> bool:
    """Return whether a module lies outside of memfit and of what is installed."""
    top, file = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None)
    if not file or top in ("memfit", "torch") or str(file).startswith(_PLACES):
        return False
    return not _has_packages(Path(str(file)).parents[name.count(".") + (Path(str(file)).stem == "__init__")])


@cache
def _has_packages(folder: Path) -> bool:
    return next(folder.glob("*.dist-info"), None) is not None
