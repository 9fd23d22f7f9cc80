"""What runs in a stage's own interpreter: its context is made, its code is checked, its manifest is written last."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from memfit.errors import DataError, UsageError
from memfit.pipeline._code import changed_code, code_of, own_modules
from memfit.pipeline._contract import Context, Output, Stage, Stop
from memfit.pipeline._describe import load_workload
from memfit.pipeline._manifest import canonical, describe_outputs, hash_file, open_folder, write_result
from memfit.rundir import mark_phase

_VERSIONS = ("memfit", "torch", "numpy", "pyarrow")


def run_stage(order: Mapping[str, Any]) -> dict[str, Any]:
    """Run one unit of a stage, and leave its outputs and its manifest.

    Args:
        order: ``target``, ``params`` (of the whole config), the described ``stage``, ``facts`` (of its manifest),
            ``variable``, ``seed``, ``manifest``, ``panels_dir``, ``needs`` (manifests by stage), ``meets`` and
            ``previous``.

    Raises:
        UsageError: If the code is not what it was when the run started, or the result is no plain JSON.
    """
    mark_phase("load")
    started = time.time()
    workload, described = load_workload(order["target"]), order["stage"]
    stage, package = workload.stage(described["name"]), order["target"].partition(".")[0].partition(":")[0]
    _check_code(stage, order["target"], workload.params, described)
    context = make_context(order)
    params = only(workload.params.model_validate_json(json.dumps(order["params"])), described)
    status, why, exit_code = "completed", "", 0
    assert callable(stage.run)
    try:
        result = stage.run(context, params)
    except Stop as stop:
        status, why, exit_code, result = "stopped", str(stop), stop.exit_code, stop.result
    plain = _plain(result, described["name"])
    unforeseen = {name: path for name, path in own_modules(package).items() if name not in described["modules"]}
    write_result(
        Path(order["manifest"]),
        order["facts"],
        result=plain,
        outputs=describe_outputs(context.dir, context.saved),
        seconds=time.time() - started,
        status=status,
        why=why,
        exit_code=exit_code,
        versions={"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _VERSIONS if name in sys.modules},
        host=socket.gethostname(),
        started=started,
        unforeseen={name: [str(path), hash_file(path)] for name, path in unforeseen.items()},
    )
    return plain


def _check_code(stage: Stage, target: str, params: type[BaseModel], described: Mapping[str, Any]) -> None:
    assert callable(stage.run)
    now, _ = code_of(stage.run, target, params, list(described["settings"]))
    if changed := changed_code(described["code"], now):
        raise UsageError(
            f"the code of stage {stage.name} is not what it was when this run started: {changed}.",
            rule="all stages of a run work with the code that it began with.",
            remedy="run the same command again: what depends on that code runs anew",
        )


def make_context(order: Mapping[str, Any]) -> Context:
    """The context of one unit, its folder cleared of what another key left there."""
    unit, key, panels_dir = order["facts"]["unit"], order["facts"]["key"], Path(order["panels_dir"])
    folder = open_folder(Path(order["manifest"]), key)
    try:
        panels_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"panels cannot be kept in {error.filename}: {error.strerror}.",
            rule=f"panels are built below panels_dir ({panels_dir}), which must be a folder.",
            remedy="name another: --set panels_dir=<folder>",
        ) from error
    return Context(
        unit=unit,
        own_seed=seed_of(order["seed"], unit, order["variable"]) if order["stage"]["seed"] else None,
        dir=folder,
        panels_dir=panels_dir,
        key=key,
        previous=Output(Path(order["previous"])) if order["previous"] else None,
        needs={name: [Output(Path(path)) for path in paths] for name, paths in order["needs"].items()},
        meets=frozenset(order["meets"]),
    )


def seed_of(seed: int, unit: Any, variable: str | None = None) -> int:
    """A unit's seed, which depends on no other unit and on no order; of a mapping, on what ``variable`` names in it.

    >>> seed_of(0, 1) != seed_of(0, 2), seed_of(0, 3) == seed_of(0, {"fold": 3, "rows": 9}, "fold")
    (True, True)
    """
    import numpy as np

    if isinstance(unit, Mapping) and variable in unit:
        unit = unit[variable]
    own: list[int] = []
    if isinstance(unit, int) and unit >= 0:
        own = [unit]
    elif unit is not None:
        own = list(hashlib.sha256((unit if isinstance(unit, str) else canonical(unit)).encode()).digest())
    return int(np.random.SeedSequence([seed, *own]).generate_state(1)[0])


def only(params: BaseModel, described: Mapping[str, Any]) -> Any:
    """The params with those settings alone that a stage reads; another one is refused when it is looked at."""
    hidden = {name for name in type(params).model_fields if name not in described["settings"]}
    if not hidden:
        return params
    base, name = type(params), described["name"]

    def look(self: BaseModel, setting: str) -> Any:
        if setting in hidden:
            raise UsageError(
                f"stage {name} reads the setting '{setting}', and does not say so.",
                rule="a stage gets the settings that it reads, so that it runs again when they change.",
                remedy=f"add it: Stage({name!r}, ..., reads=(..., {setting!r}))",
            )
        return base.__getattr__(self, setting)  # type: ignore[attr-defined]

    seen = params.model_copy()
    for setting in hidden:
        seen.__dict__.pop(setting, None)
    object.__setattr__(seen, "__class__", type(base.__name__, (base,), {"__getattr__": look, "__module__": __name__}))
    return seen


def _plain(result: Any, stage: str) -> dict[str, Any]:
    """A stage's result as plain JSON."""
    if result is None:
        return {}
    try:
        if not isinstance(result, Mapping):
            raise TypeError("it is no mapping of names")
        named = {str(name): value for name, value in result.items()}
        found: dict[str, Any] = json.loads(json.dumps(named, default=float))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"stage {stage} returned {result!r:.120}: {error}.",
            rule="a stage returns a mapping of names to numbers, texts, lists and mappings of them.",
            remedy="return for example {'rank_ic': 0.03}; save tables and arrays: context.save('scores', table)",
        ) from error
    return found
