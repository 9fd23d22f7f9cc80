"""A workload as plain data: its stages in order, and for each what its results depend on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from pydantic import BaseModel

from memfit import config
from memfit.errors import ConfigError, UsageError, nearest
from memfit.jobs import load_target
from memfit.pipeline._code import code_of
from memfit.pipeline._config import RunConfig
from memfit.pipeline._contract import Stage, Workload

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
    nested, stages = described_stages(workload, whole)
    values = nested.value.model_dump(mode="json")
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
    return {
        "params": values,
        "origins": origins | dict(nested.origins),
        "yaml": whole.to_yaml(nested),
        "stages": stages,
    }


def described_stages(
    workload: Workload[Any], whole: config.Resolved[RunConfig]
) -> tuple[config.Resolved[Any], list[dict[str, Any]]]:
    """A workload's params, resolved, and its stages as plain data, in order."""
    nested = config.resolve_nested(whole, "params", workload.params)
    values = nested.value.model_dump(mode="json")
    raw = workload.fingerprint(nested.value) if workload.fingerprint else ""
    return nested, in_order([_described(stage, workload, values, raw) for stage in workload.stages], values)


def _described(
    stage: Stage, workload: Workload[Any], params: Mapping[str, Any], raw: str | Mapping[str, str]
) -> dict[str, Any]:
    reads = [*params, SEED] if stage.reads is None else list(stage.reads)
    unknown = next((name for name in reads if name not in params and name != SEED), None)
    if unknown is not None:
        raise _bad(
            stage.name,
            f"reads '{unknown}', which is no setting",
            f"reads names top-level settings of {workload.params.__name__}, and '{SEED}'",
            nearest(unknown, [*params, SEED]),
        )
    fields = [name for name in reads if name != SEED]
    command = list(stage.run) if isinstance(stage.run, tuple) else None
    code, modules = ({}, set[str]()) if callable(stage.run) is False else _code(stage, workload.params, fields)
    return {
        "name": stage.name,
        "needs": list(stage.needs),
        "after": list(stage.after),
        "each": stage.each,
        "units": None,
        "holds": stage.holds,
        "in_order": stage.in_order if isinstance(stage.in_order, bool) else bool(_find(params, stage.in_order, stage)),
        "phases": list(stage.phases),
        "has_probe": stage.probe is not None and stage.probe.step is not None,
        "command": command,
        "settings": {name: params[name] for name in fields},
        "seed": SEED in reads,
        "code": code,
        "modules": sorted(modules),
        "data": raw if isinstance(raw, str) else raw.get(stage.name, ""),
    }


def _code(stage: Stage, params: type[BaseModel], fields: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    assert callable(stage.run)
    return code_of(stage.run, params, fields)


def _find(params: Mapping[str, Any], dotted: str, stage: Stage) -> Any:
    """A setting by its dotted name below ``params``."""
    found: Any = {"params": params}
    for name in dotted.split("."):
        if not isinstance(found, Mapping) or name not in found:
            raise _bad(
                stage.name,
                f"names the setting '{dotted}', which is not there",
                "a setting is params.NAME",
                "correct it",
            )
        found = found[name]
    return found


def in_order(stages: Sequence[dict[str, Any]], params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The stages in an order in which each comes after what it waits for, their units filled in where they are known.

    Raises:
        ConfigError: If a stage names another that there is not, or they wait for each other in a circle.
    """
    if not stages:
        raise ConfigError(
            "the workload has no stage.",
            rule="a workload has one stage or more.",
            remedy="give it: stages=(Stage(...),)",
        )
    names = [stage["name"] for stage in stages]
    for stage in stages:
        name = stage["name"]
        if not _NAME.fullmatch(name) or names.count(name) > 1:
            raise _bad(
                name, "has a bad name, or one that another stage has", "names are letters, digits and _", "rename it"
            )
        for other in [*stage["needs"], *stage["after"], *filter(None, [stage["holds"]])]:
            if other not in names:
                raise _bad(
                    name, f"names the stage '{other}', which there is not", "a stage waits for stages of its workload",
                    nearest(other, names),
                )  # fmt: skip
        stage["source"] = _source(stage, names, params) if stage["each"] else None
    by_name = {stage["name"]: stage for stage in stages}
    waits = {name: _waits_for(stage) for name, stage in by_name.items()}
    try:
        ordered = list(TopologicalSorter(waits).static_order())
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise ConfigError(
            f"stages wait for each other in a circle: {circle}.",
            rule="a stage runs when what it needs is there.",
            remedy="leave one of these needs out",
        ) from None
    for stage in stages:
        if stage["holds"]:
            _check_gate(stage, by_name, waits)
    return [by_name[name] for name in ordered]


def _waits_for(stage: Mapping[str, Any]) -> list[str]:
    """The stages that come before one, those of which it has its units among them."""
    return [*stage["needs"], *stage["after"], *filter(None, [(stage["source"] or {}).get("stage")])]


def _source(stage: dict[str, Any], names: Sequence[str], params: Mapping[str, Any]) -> dict[str, Any]:
    """Where a stage's units come from: the variable's name, and a stage and the place in its result, or a list."""
    match = _EACH.fullmatch(stage["each"])
    if match is None:
        raise _bad(
            stage["name"], f"has each='{stage['each']}'", "units are named as 'fold in prepare.folds'",
            "write each='size in params.sizes'",
        )  # fmt: skip
    variable, first, path = match[1], match[2], match[3][1:].split(".")
    if first == "params":
        found: Any = params
        for name in path:
            if not isinstance(found, Mapping) or name not in found:
                raise _bad(stage["name"], f"has its units in params.{'.'.join(path)}, which is not there",
                           "each names a list in the settings or in a stage's result", "correct the name")  # fmt: skip
            found = found[name]
        stage["units"] = units_of(found, stage["name"], stage["each"])
        return {"variable": variable, "stage": None, "path": path}
    if first not in names:
        rule = "each names a list in params or in a stage's result"
        raise _bad(stage["name"], f"has its units in '{first}', no stage", rule, nearest(first, [*names, "params"]))
    return {"variable": variable, "stage": first, "path": path}


def units_of(found: Any, stage: str, each: str) -> list[Any]:
    """The units that a list names; a whole number n stands for 1 to n.

    >>> units_of(3, "fold", "fold in params.num_folds")
    [1, 2, 3]
    """
    if isinstance(found, int) and not isinstance(found, bool) and found > 0:
        return list(range(1, found + 1))
    if isinstance(found, list) and found:
        return found
    raise _bad(
        stage,
        f"has each='{each}', and that is {found!r:.60}",
        "units are a list with one item or more, or a whole number above 0",
        "correct the list",
    )


def _check_gate(
    gate: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]], waits: Mapping[str, list[str]]
) -> None:
    """Refuse a gate that waits for what it holds."""
    held = stages[gate["holds"]]["each"]
    if held is None:
        raise _bad(gate["name"], f"holds '{gate['holds']}', which has no units", "a gate lets the first unit pass",
                   f"use after=('{gate['holds']}',)")  # fmt: skip
    before, left = set[str](), list(waits[gate["name"]])
    while left:
        name = left.pop()
        if name not in before:
            before.add(name)
            left += waits[name]
    for name in sorted(before):
        if stages[name]["each"] != held and any(stages[one]["each"] == held for one in waits[name]):
            raise _bad(
                gate["name"], f"holds '{gate['holds']}' and waits for '{name}', which needs all units of it",
                "a gate needs nothing that waits for what it holds", f"let '{name}' come after the gate",
            )  # fmt: skip


def _bad(stage: str, what: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(f"stage '{stage}' {what}.", rule=f"{rule}.", remedy=remedy)
