"""A workload as plain data: its stages in order, and for each what its results depend on."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from memfit import config
from memfit.errors import ConfigError, UsageError, nearest
from memfit.jobs import load_target
from memfit.pipeline._code import code_of, code_of_command
from memfit.pipeline._config import RunConfig
from memfit.pipeline._contract import Stage, Workload
from memfit.pipeline._grid import PLACEHOLDER

SEED = "@seed"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_EACH = re.compile(r"([A-Za-z_]\w*) in ([A-Za-z_]\w*)((?:\.[A-Za-z_]\w*)+)")


def load_workload(target: str) -> Workload[Any]:
    """The workload that a config's target names; of a plain function, the one of that single stage.

    Raises:
        UsageError: If it names neither.
    """
    found = load_target(target)
    if isinstance(found, Workload):
        return found
    if inspect.isfunction(found):
        return Workload.of(found)
    raise UsageError(
        f"target '{target}' is a {type(found).__name__}.",
        rule="a run's target is a function, or a memfit.pipeline.Workload.",
        remedy="name the variable that holds it, for example memfit_workloads.ranker.stages:RANKER",
    )


def describe(target: str, resolved: str, units: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
    """A workload's stages as plain data, its params checked, with digests of code and data.

    Args:
        target: The workload.
        resolved: The config.
        units: For a plain function: the values of its parameters, one mapping for each job.

    Raises:
        ConfigError: If params or stages are bad.
    """
    workload = load_workload(target)
    whole = config.Resolved.from_json(RunConfig, resolved)
    nested = config.resolve_nested(whole, "params", workload.params)
    params = nested.value.model_dump(mode="json")
    raw = workload.fingerprint(nested.value) if workload.fingerprint else ""
    stages = in_order(workload.stages, params, target, workload.params)
    for stage in stages:
        stage["data"] = raw if isinstance(raw, str) else raw.get(stage["name"], "")
    if units:
        if len(stages) != 1 or stages[0]["each"]:
            raise UsageError(
                f"{target} has stages with units of their own, and --param was given.",
                rule="--param gives the units of a plain function or a command.",
                remedy="set what they take: --set params.NAME=VALUE",
            )
        values_of = [{name: config.read_plain(text) for name, text in unit.items()} for unit in units]
        stages[0]["units"] = [unit if len(units) > 1 or unit else None for unit in values_of]
    origins = {name: origin for name, origin in whole.origins.items() if name.partition(".")[0] != "params"}
    origins |= nested.origins
    return {"params": params, "origins": origins, "yaml": whole.to_yaml(nested), "stages": stages}


def describe_commands(whole: config.Resolved[RunConfig]) -> dict[str, Any]:
    """The same of a config whose stages are commands.

    Raises:
        ConfigError: If a stage is bad, or has no command.
    """
    given = whole.value.stages
    if name := next((name for name, own in given.items() if own.run is None), None):
        raise ConfigError(
            f"stages.{name} has no command.",
            rule="a config without a target gives each stage a command: run.",
            remedy=f"write it: stages: {{{name}: {{run: python {name}.py --out {{dir}}}}}}",
        )
    stages = [
        Stage(name, one.run if isinstance(one.run, str) else tuple(one.run or ()), tuple(one.needs), tuple(one.after),
              one.each, holds=one.holds, in_order=one.in_order)
        for name, one in given.items()
    ]  # fmt: skip
    params = dict(whole.value.params)
    found = {"params": params, "origins": dict(whole.origins), "yaml": whole.to_yaml()}
    return found | {"stages": in_order(stages, params)}


def in_order(
    stages: Sequence[Stage], params: Mapping[str, Any], target: str = "", model: type[BaseModel] | None = None
) -> list[dict[str, Any]]:
    """The stages as plain data, each after what it waits for, their units filled in where they are known.

    Raises:
        ConfigError: If a stage names another that there is not, or they wait for each other in a circle.
    """
    if not stages:
        raise ConfigError(
            "there is no stage to run.",
            rule="a config has a target (module:NAME) with a stage or more, or stages with commands.",
            remedy="write for example target: train:train",
        )
    names = [stage.name for stage in stages]
    found = {}
    for stage in stages:
        name = stage.name
        if not _NAME.fullmatch(name) or names.count(name) > 1:
            rule = "names are letters, digits and _"
            raise _bad(name, "has a bad name, or one that another stage has", rule, "rename it")
        reads = _of_function(stage, params, target, model) if callable(stage.run) else _of_command(stage, params, names)
        own = as_data(stage, params) | reads
        for other in [*own["needs"], *own["after"], *filter(None, [own["holds"]])]:
            if other not in names:
                rule = "a stage waits for stages of its workload"
                raise _bad(name, f"names the stage '{other}', which there is not", rule, nearest(other, names))
        if stage.each:
            own["source"], own["units"] = _source(stage, names, params)
        found[name] = own
    waits = {name: _waits_for(stage) for name, stage in found.items()}
    try:
        ordered = list(TopologicalSorter(waits).static_order())
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise ConfigError(
            f"stages wait for each other in a circle: {circle}.",
            rule="a stage runs when what it needs is there.",
            remedy="leave one of these needs out",
        ) from None
    for gate in found.values():
        if gate["holds"]:
            _check_gate(gate, found, waits)
    return [found[name] for name in ordered]


def as_data(stage: Stage, params: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage says of itself, before its code and its data are looked at."""
    in_order = _setting(params, stage.in_order, stage) if isinstance(stage.in_order, str) else stage.in_order
    return {
        "name": stage.name,
        "needs": list(stage.needs),
        "after": list(stage.after),
        "each": stage.each,
        "units": None,
        "source": None,
        "holds": stage.holds,
        "in_order": bool(in_order),
        "phases": list(stage.phases),
        "has_probe": stage.probe is not None and stage.probe.step is not None,
        "command": None,
        "shell": False,
        "data": "",
        "keyed": True,
    }


def _of_function(stage: Stage, params: Mapping[str, Any], target: str, model: type[BaseModel] | None) -> dict[str, Any]:
    """What the results of a function depend on: the settings that it says it reads, and its code."""
    assert callable(stage.run)
    reads = [*params, SEED] if stage.reads is None else list(stage.reads)
    for name in reads:
        if name not in (*params, SEED):
            rule = f"reads names top-level settings, and '{SEED}'"
            raise _bad(stage.name, f"reads '{name}', which is no setting", rule, nearest(name, [*params, SEED]))
    settings = {name: params[name] for name in reads if name != SEED}
    code, modules = code_of(stage.run, target, model, list(settings))
    return {"settings": settings, "seed": SEED in reads, "code": code, "modules": sorted(modules)}


def _of_command(stage: Stage, params: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """What the results of a command depend on: the settings and stages in its placeholders, and the files it names."""
    assert not callable(stage.run)
    shell = isinstance(stage.run, str)
    words = [stage.run] if isinstance(stage.run, str) else list(stage.run)
    used = list(dict.fromkeys(found for word in words for found in PLACEHOLDER.findall(word)))
    stages = [one for one in used if one in names and one != stage.name]
    settings = [one for one in used if one.startswith("params.")]
    try:
        split = shlex.split(words[0]) if shell else words
    except ValueError:  # a quote that only the shell understands
        split = words[0].split()
    return {
        "command": words,
        "shell": shell,
        "needs": list(dict.fromkeys([*stage.needs, *stages])),
        "settings": {one.removeprefix("params."): _setting(params, one, stage) for one in settings},
        "seed": "seed" in used,
        "code": code_of_command(split, Path.cwd()),
        "modules": [],
    }


def _setting(params: Mapping[str, Any], dotted: str, stage: Stage) -> Any:
    """A setting by its dotted name, which begins with ``params.``."""
    found: Any = {"params": params}
    for name in dotted.split("."):
        if not isinstance(found, Mapping) or name not in found:
            what, remedy = f"names the setting '{dotted}', which is not there", f"correct it, or --set {dotted}=VALUE"
            raise _bad(stage.name, what, "a setting is params.NAME", remedy)
        found = found[name]
    return found


def _waits_for(stage: Mapping[str, Any]) -> list[str]:
    """The stages that come before one, those of which it has its units among them."""
    return [*stage["needs"], *stage["after"], *filter(None, [(stage["source"] or {}).get("stage")])]


def _source(stage: Stage, names: Sequence[str], params: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any] | None]:
    """Where a stage's units come from: the variable's name, and a stage and the place in its result, or the units."""
    match = _EACH.fullmatch(stage.each or "")
    if match is None:
        rule = "units are named as 'fold in prepare.folds'"
        raise _bad(stage.name, f"has each='{stage.each}'", rule, "write each='size in params.sizes'")
    variable, first, path = match[1], match[2], match[3][1:].split(".")
    if first == "params":
        found = _setting(params, ".".join(["params", *path]), stage)
        return {"variable": variable, "stage": None, "path": path}, units_of(found, stage.name, stage.each or "")
    if first not in names:
        rule = "each names a list in params or in a stage's result"
        raise _bad(stage.name, f"has its units in '{first}', no stage", rule, nearest(first, [*names, "params"]))
    return {"variable": variable, "stage": first, "path": path}, None


def units_of(found: Any, stage: str, each: str) -> list[Any]:
    """The units that a list names; a whole number n stands for 1 to n.

    >>> units_of(3, "fold", "fold in params.num_folds")
    [1, 2, 3]
    """
    if isinstance(found, int) and not isinstance(found, bool) and found > 0:
        return list(range(1, found + 1))
    if isinstance(found, list) and found:
        return found
    rule = "units are a list with one item or more, or a whole number above 0"
    raise _bad(stage, f"has each='{each}', and that is {found!r:.60}", rule, "correct the list")


def _check_gate(
    gate: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]], waits: Mapping[str, list[str]]
) -> None:
    """Refuse a gate that waits for what it holds."""
    held = stages[gate["holds"]]["each"]
    if held is None:
        rule, remedy = "a gate lets the first unit pass", f"use after=('{gate['holds']}',)"
        raise _bad(gate["name"], f"holds '{gate['holds']}', which has no units", rule, remedy)
    before = list(waits[gate["name"]])
    for name in before:  # it grows as it is read
        before += [one for one in waits[name] if one not in before]
        if stages[name]["each"] != held and any(stages[one]["each"] == held for one in waits[name]):
            raise _bad(
                gate["name"],
                f"holds '{gate['holds']}' and waits for '{name}', which needs all units of it",
                "a gate needs nothing that waits for what it holds",
                f"let '{name}' come after the gate",
            )


def _bad(stage: str, what: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(f"stage '{stage}' {what}.", rule=f"{rule}.", remedy=remedy)
