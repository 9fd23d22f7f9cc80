"""What runs in an interpreter of its own: one unit of a stage, which leaves its manifest; the tables of a run."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from memfit.config import fingerprint
from memfit.errors import DataError, UsageError
from memfit.files import parse_json, replacing
from memfit.masking import mask
from memfit.pipeline._code import check_code, code_of, own_modules
from memfit.pipeline._contract import Context, Output, Stop, load_workload
from memfit.pipeline._manifest import describe_outputs, hash_file, write_result
from memfit.rundir import RANKS_VARIABLE, phase

_VERSIONS = ("memfit", "torch", "numpy", "pyarrow")


def run_stage(order: Mapping[str, Any]) -> dict[str, Any]:
    """Run one unit of a stage, leave its outputs and its manifest, and return its result."""
    phase("load")
    started, spec = time.time(), order["stage"]
    workload = load_workload(order["target"])
    function = workload.stage(spec["name"]).run
    assert callable(function)
    code, _ = code_of(function, order["target"], workload.params, spec["settings"])
    check_code(spec["name"], spec["code"], code)
    params = only(workload.params.model_validate_json(json.dumps(order["params"])), spec)
    ended: dict[str, Any] = {}
    with _ranks() as rank:
        context = make_context(order, rank)
        try:
            result = function(context, params)
        except Stop as stop:
            result, ended = stop.result, {"status": "stopped", "why": mask(str(stop)), "exit_code": stop.exit_code}
    if rank:
        return {}
    plain, package = _plain(result, spec["name"]), order["target"].partition(":")[0].partition(".")[0]
    from importlib import metadata  # now that the job's result is known

    versions = {name: metadata.version(name) for name in _VERSIONS if name in sys.modules}
    unforeseen = {name: path for name, path in own_modules(package).items() if name not in spec["modules"]}
    write_result(
        Path(order["manifest"]),
        order["facts"],
        result=plain,
        outputs=describe_outputs(context.dir, context.saved),
        seconds=time.time() - started,
        **ended,
        versions={"python": platform.python_version()} | versions,
        host=socket.gethostname(),
        started=started,
        unforeseen={name: [str(path), hash_file(path)] for name, path in unforeseen.items()},
    )
    return plain


def _ranks() -> AbstractContextManager[int]:
    """Join the group of a job of several ranks; the rank of a job of one process is 0."""
    if RANKS_VARIABLE not in os.environ:
        return nullcontext(0)
    from memfit.training import joined_group

    return joined_group()


def make_context(order: Mapping[str, Any], rank: int = 0) -> Context:
    unit, panels_dir = order["facts"]["unit"], Path(order["panels_dir"])
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
        own_seed=partial(_seed_of, order["seed"], unit, order["variable"]) if order["stage"]["seed"] else None,
        dir=Path(order["manifest"]).with_suffix(""),
        panels_dir=panels_dir,
        key=order["facts"]["key"],
        previous=Output(Path(order["previous"])) if order["previous"] else None,
        needs={name: [Output(Path(path)) for path in paths] for name, paths in order["needs"].items()},
        meets=frozenset(order["meets"]),
        rank=rank,
    )


def _seed_of(seed: int, unit: Any, variable: str | None = None) -> int:
    """Derive a unit's seed from itself alone; from a mapping's entry ``variable`` if it has one.

    >>> _seed_of(0, 1) != _seed_of(0, 2), _seed_of(0, 3) == _seed_of(0, {"fold": 3, "rows": 9}, "fold")
    (True, True)
    """
    import numpy as np

    if isinstance(unit, Mapping) and variable in unit:
        unit = unit[variable]
    own: list[int] = []
    if isinstance(unit, int) and unit >= 0:
        own = [unit]
    elif isinstance(unit, str):
        own = list(hashlib.sha256(unit.encode()).digest())
    elif unit is not None:
        own = list(bytes.fromhex(fingerprint(unit)))
    return int(np.random.SeedSequence([seed, *own]).generate_state(1)[0])


def only(params: BaseModel, spec: Mapping[str, Any]) -> Any:
    """Return the params with the settings that a stage reads; to look at another one is an error."""
    hidden = {name for name in type(params).model_fields if name not in spec["settings"]}
    if not hidden:
        return params
    base, name = type(params), spec["name"]

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
    try:
        if not isinstance(result, Mapping | None):
            raise TypeError("it is no mapping of names")
        named = {str(name): value for name, value in (result or {}).items()}
        found: dict[str, Any] = parse_json(json.dumps(named, default=float))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"stage {stage} returned {result!r:.120}: {error}.",
            rule="a stage returns a mapping of names to numbers, texts, lists and mappings of them.",
            remedy="return for example {'rank_ic': 0.03}; save tables and arrays: context.save('scores', table)",
        ) from error
    return found


class _NoPandas:
    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name=name)


def write_tables(tables: Sequence[Mapping[str, Any]]) -> None:
    """Write a Feather file for each table: the unit, its state, seconds and peak, and a column for each number."""
    import pyarrow as pa
    from pyarrow import feather

    sys.meta_path.insert(0, _NoPandas)
    pa.array([0])  # it looks for pandas' types once; to load it takes longest here
    sys.meta_path.remove(_NoPandas)
    for table in tables:
        rows = sorted(table["rows"], key=lambda row: (len(row["unit"]) if row["unit"].isdigit() else 0, row["unit"]))
        labels = [row["unit"] for row in rows]
        are_numbers = all(label.isdigit() and len(label) < 10 for label in labels)
        columns = {table["variable"]: pa.array([int(label) for label in labels], pa.int32()) if are_numbers else labels}
        for name, kind in (("state", pa.string()), ("seconds", pa.float64()), ("peak_private_bytes", pa.int64())):
            columns[name] = pa.array([row[name] for row in rows], kind)
        numbers = [
            {name: float(one) for name, one in row["result"].items() if type(one) in (int, float)} for row in rows
        ]
        for name in dict.fromkeys(name for found in numbers for name in found):
            columns.setdefault(name, pa.array([found.get(name) for found in numbers], pa.float64()))
        with replacing(Path(table["path"]), durable=False) as aside:
            feather.write_feather(pa.table(columns), str(aside), compression="zstd")
