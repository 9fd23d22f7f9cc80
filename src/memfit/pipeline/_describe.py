"""Describe a workload's stages as plain records, in order, with all that their results depend on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from pydantic import BaseModel

from memfit import config
from memfit.errors import ConfigError, UsageError, nearest
from memfit.pipeline._code import code_of, code_of_command
from memfit.pipeline._command import PLACEHOLDER
from memfit.pipeline._config import RunConfig
from memfit.pipeline._contract import Probe, Stage, load_workload

SEED = "@seed"
_MOST_UNITS = 1_000_000
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_EACH = re.compile(r"([A-Za-z_]\w*) in ([A-Za-z_]\w*)((?:\.[A-Za-z_]\w*)+)")


@dataclass(frozen=True)
class StageSpec:
    """A stage as plain data."""

    name: str
    needs: Sequence[str] = ()
    after: Sequence[str] = ()
    each: str | None = None
    holds: str | None = None
    in_order: bool = False
    phases: Sequence[str] = ()
    has_probe: bool = False
    has_model: bool = False
    memory_bytes: int | None = None  # the least of one job, by its probe's arithmetic; None where nobody asked
    units: Sequence[Any] | None = None  # its units; None if it runs once, or if another stage has yet to list them
    variable: str | None = None  # the name of a unit in ``each``
    source: str | None = None  # the stage whose result lists the units; None if the settings do
    path: Sequence[str] = ()  # where the list stands in that result or in the settings
    command: Sequence[str] | None = None
    shell: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: bool = False
    code: Mapping[str, str] = field(default_factory=dict)
    modules: Sequence[str] = ()  # the modules that were read to find its code
    data: str = ""

    @property
    def reads(self) -> list[str]:
        return [*self.needs, *filter(None, [self.source])]


def describe(
    target: str, resolved: str, units: Sequence[Mapping[str, str]] = (), with_memory: bool = False
) -> dict[str, Any]:
    """Return the stages, params and origins of a resolved config, and why stages cannot run with them, by name.

    ``units`` are those of a plain function (--param). ``with_memory`` asks the probes too, which may load torch.
    """
    workload = load_workload(target)
    whole = config.Resolved.from_json(RunConfig, resolved)
    nested = config.resolve_nested(whole, "params", workload.params)
    params = nested.value.model_dump(mode="json")
    if workload.check and (refusal := _refusal(workload.check, nested.value)):
        raise refusal
    data = workload.fingerprint(nested.value) if workload.fingerprint else ""
    names = [stage.name for stage in workload.stages]
    left_out = set(names) - set(workload.choose(nested.value) if workload.choose else names)
    chosen = [stage for stage in workload.stages if stage.name not in left_out]
    chosen = [replace(one, needs=tuple(name for name in one.needs if name not in left_out)) for one in chosen]
    stages = in_order(chosen, params, target, workload.params)
    stages = [replace(one, data=data if isinstance(data, str) else data.get(one.name, "")) for one in stages]
    asked = chosen if with_memory else []
    least = {one.name: one.probe.memory(nested.value) for one in asked if one.probe and one.probe.memory}
    stages = [replace(one, memory_bytes=least.get(one.name)) for one in stages]
    if units:
        if len(stages) != 1 or stages[0].each:
            raise UsageError(
                f"{target} has stages with units of their own, and --param was given.",
                rule="--param gives the units of a plain function or a command.",
                remedy="set what they take: --set params.NAME=VALUE",
            )
        for name in dict.fromkeys(name for unit in units for name in unit if name not in params):
            if (near := nearest(name, list(params))).startswith("did"):
                raise UsageError(
                    f"{target} has no setting {name!r}.",
                    rule="--param sets an argument of the function, or names a unit that it reads from ctx.unit.",
                    remedy=near,
                )
        values_of = [{name: config.read_plain(text) for name, text in unit.items()} for unit in units]
        stages = [replace(stages[0], units=[unit if len(units) > 1 or unit else None for unit in values_of])]
    origins = {name: origin for name, origin in whole.origins.items() if name.partition(".")[0] != "params"}
    found = {"params": params, "origins": {**origins, **nested.origins}, "yaml": whole.to_yaml(nested)}
    checks = {stage.name: stage.check for stage in chosen if stage.check}
    found["refused"] = {name: vars(one) for name, check in checks.items() if (one := _refusal(check, nested.value))}
    return found | {"stages": [asdict(one) for one in stages]}


def _refusal(check: Callable[[Any], None], params: BaseModel) -> ConfigError | None:
    try:
        check(params)
    except UsageError as error:
        return ConfigError(error.what, rule=error.rule, remedy=error.remedy)
    except ValueError as error:
        remedy = "--set params.NAME=VALUE, or correct it in the config"
        return ConfigError(str(error), rule="a workload checks its settings before the first job.", remedy=remedy)
    return None


def describe_commands(whole: config.Resolved[RunConfig]) -> dict[str, Any]:
    """Return the same as `describe` for a config whose stages are commands."""
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
    return found | {"stages": [asdict(one) for one in in_order(stages, params)]}


def in_order(
    stages: Sequence[Stage], params: Mapping[str, Any], target: str = "", model: type[BaseModel] | None = None
) -> list[StageSpec]:
    """Describe the stages, each after those it waits for."""
    if not stages:
        raise ConfigError(
            "there is no stage to run.",
            rule="a config has a target (module:NAME) with a stage or more, or stages with commands.",
            remedy="write for example target: train:train",
        )
    names = [stage.name for stage in stages]
    for name in names:
        if not _NAME.fullmatch(name) or names.count(name) > 1:
            rule = "names are letters, digits and _"
            raise _bad(name, "has a bad name, or one that another stage has", rule, "rename it")
    found = {stage.name: _spec(stage, names, params, target, model) for stage in stages}
    waits = {name: [*stage.reads, *stage.after] for name, stage in found.items()}
    try:
        ordered = list(TopologicalSorter(waits).static_order())
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise ConfigError(
            f"stages wait for each other in a circle: {circle}.",
            rule="a stage runs when the stages that it waits for are done.",
            remedy="remove one of these needs",
        ) from None
    for one in found.values():
        if one.holds:
            _check_gate(one, one.holds, found, waits)
        _check_several(one, found)
    return [found[name] for name in ordered]


def _spec(
    stage: Stage, names: Sequence[str], params: Mapping[str, Any], target: str, model: type[BaseModel] | None
) -> StageSpec:
    probe = stage.probe or Probe()
    who, is_ordered = f"stage '{stage.name}'", stage.in_order
    is_ordered = setting_of(params, is_ordered, who) if isinstance(is_ordered, str) else is_ordered
    found = StageSpec(stage.name, stage.needs, stage.after, stage.each, stage.holds, bool(is_ordered), stage.phases)
    found = replace(found, has_probe=probe.step is not None, has_model=probe.model is not None)
    if callable(stage.run):
        reads = [*params, SEED] if stage.reads is None else list(stage.reads)
        for name in reads:
            if name not in (*params, SEED):
                rule = f"reads names top-level settings, and '{SEED}'"
                raise _bad(stage.name, f"reads '{name}', which is no setting", rule, nearest(name, [*params, SEED]))
        settings = {name: params[name] for name in reads if name != SEED}
        code, modules = code_of(stage.run, target, model, settings)
        found = replace(found, settings=settings, seed=SEED in reads, code=code, modules=sorted(modules))
    else:
        found = _of_command(stage, found, names, params)
    for other in [*found.needs, *found.after, *filter(None, [found.holds])]:
        if other not in names:
            rule = "a stage waits for stages of its workload"
            raise _bad(stage.name, f"names the stage '{other}', which there is not", rule, nearest(other, names))
    if stage.each is None:
        return found
    match = _EACH.fullmatch(stage.each)
    if match is None:
        rule = "units are named as 'fold in prepare.folds'"
        raise _bad(stage.name, f"has each='{stage.each}'", rule, "write each='size in params.sizes'")
    source = match[2]
    found = replace(found, variable=match[1], path=match[3][1:].split("."))
    if source == "params":
        return replace(found, units=list_units(found, params))
    if source not in names:
        rule = "each names a list in params or in a stage's result"
        raise _bad(stage.name, f"has its units in '{source}', no stage", rule, nearest(source, [*names, "params"]))
    return replace(found, source=source)


def _of_command(stage: Stage, found: StageSpec, names: Sequence[str], params: Mapping[str, Any]) -> StageSpec:
    """Add what a command depends on: the settings and stages in its placeholders, and the files it names."""
    assert not callable(stage.run)
    shell = isinstance(stage.run, str)
    words = [stage.run] if isinstance(stage.run, str) else list(stage.run)
    used = list(dict.fromkeys(one for word in words for one in PLACEHOLDER.findall(word)))
    try:
        split = shlex.split(words[0]) if shell else words
    except ValueError:  # a quote that only the shell understands
        split = words[0].split()
    return replace(
        found,
        command=words,
        shell=shell,
        needs=list(dict.fromkeys([*stage.needs, *(one for one in used if one in names and one != stage.name)])),
        settings={
            one.removeprefix("params."): setting_of(params, one, f"stage '{stage.name}'")
            for one in used
            if one.startswith("params.")
        },
        seed="seed" in used,
        code=code_of_command(split),
    )


def _check_several(stage: StageSpec, stages: Mapping[str, StageSpec]) -> None:
    """Refuse the folders of several units within a word of a command, whose rest would be that of the last alone."""
    for name in (one for one in stage.needs if stages[one].each and stages[one].each != stage.each):
        alone = rf"(?<![^\s;&|(])\{{{name}\}}(?![^\s;&|<>)])" if stage.shell else rf"\A\{{{name}\}}\Z"
        if word := next((one for one in stage.command or () if f"{{{name}}}" in re.sub(alone, "", one)), None):
            rule = f"{{{name}}} stands for the folders of all units of {name}, so it is a word of its own"
            loop = f'for one in {{{name}}}; do cat "$one"/result.json; done'
            raise _bad(
                stage.name, f"has {{{name}}} within a word of its command ({word})", rule, f"write a loop: {loop}"
            )


def setting_of(params: Mapping[str, Any], dotted: str, who: str) -> Any:
    found: Any = {"params": params}
    for name in dotted.split("."):
        if not isinstance(found, Mapping) or name not in found:
            raise ConfigError(
                f"{who} names the setting '{dotted}', which is not there.",
                rule="a setting is one of the workload, as params.NAME.",
                remedy=f"correct its name, or --set {dotted}=VALUE",
            )
        found = found[name]
    return found


def list_units(stage: StageSpec, facts: Mapping[str, Any]) -> list[Any]:
    """Return the units that settings or a result list for a stage; a whole number n stands for 1 to n."""
    found: Any = facts
    for part in stage.path:
        found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, int) and not isinstance(found, bool) and 0 < found <= _MOST_UNITS:
        return list(range(1, found + 1))
    if isinstance(found, list) and found:
        return found
    rule = f"units are a list with one item or more, or a whole number from 1 to {_MOST_UNITS}"
    raise _bad(stage.name, f"has each='{stage.each}', and that is {found!r:.60}", rule, "correct the list")


def _check_gate(
    gate: StageSpec, holds: str, stages: Mapping[str, StageSpec], waits: Mapping[str, Sequence[str]]
) -> None:
    """Refuse a gate that waits for units it holds back."""
    held = stages[holds].each
    if held is None:
        rule = "a gate lets the first unit pass"
        raise _bad(gate.name, f"holds '{holds}', which has no units", rule, f"use after=('{holds}',)")
    before = list(waits[gate.name])
    for name in before:  # it grows as it is read
        before += [one for one in waits[name] if one not in before]
        if stages[name].each != held and any(stages[one].each == held for one in waits[name]):
            what = f"holds '{holds}' and waits for '{name}', which needs all units of it"
            rule = "a gate needs nothing that waits for what it holds"
            raise _bad(gate.name, what, rule, f"let '{name}' come after the gate")


def _bad(stage: str, what: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(f"stage '{stage}' {what}.", rule=f"{rule}.", remedy=remedy)
