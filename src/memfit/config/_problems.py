"""What is wrong with settings, in words: all of it at once, each with its place and its remedy."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from memfit.errors import ConfigError
from memfit.masking import MASK
from memfit.units import suggest_size

PREFIX = "MEMFIT_"
OVERRIDE = "--set"
#: ``name=value`` as given with ``--set``; or, after the flag that stands for the setting, the same.
Override = str | tuple[str, str]
ARGUMENT = "argument"  # the origin of a value that was handed in from Python
DEFAULT = "default"
VARIABLE = "environment "

#: What people call a setting that has another name.
_MEANT = {"command": "run", "cmd": "run", "script": "run", "jobs": "max_parallel", "n_jobs": "max_parallel"}
#: The part of an address that may be shown, and its path, which may be a secret.
_ADDRESS = re.compile(r"(\w+://[^/\s\"@]*/)[^\s\"]+")
_STRICT = "the types and bounds of settings are strict, wherever a value comes from"


def dotted(path: Iterable[str | int]) -> str:
    """Return the name of a setting as people write it, such as ``model.layers[0].width``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def variable(name: str) -> str:
    """Return the environment variable of a setting: ``MEMFIT_MEMORY__RESERVE`` of ``memory.reserve``."""
    return PREFIX + name.replace(".", "__").upper()


def known_fields(annotation: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all settings of a model, or of the models that a field's annotation names: dotted names, with each."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield prefix + name, field
            yield from known_fields(field.annotation, f"{prefix}{name}.")
    else:
        for part in get_args(annotation):
            yield from known_fields(part, prefix)


def report(problems: Sequence[ConfigError]) -> ConfigError:
    if len(problems) == 1:
        return problems[0]
    by_remedy: dict[str, list[str]] = {}
    for problem in problems:
        by_remedy.setdefault(problem.remedy, []).append(problem.what.removesuffix("."))
    lines = [f"  - {'; '.join(whats)}: {remedy}" for remedy, whats in by_remedy.items()]
    return ConfigError(
        "\n".join((f"{len(problems)} settings cannot be used:", *lines)),
        rule=f"all settings are checked at once; {OVERRIDE} counts before the environment, that before the file.",
        remedy="correct each at the place named in brackets",
    )


def from_pydantic(
    error: ValidationError,
    model: type[BaseModel],
    tree: Any,
    origins: Mapping[str, str],
    prefix: str,
    is_file_alone: bool = False,
) -> list[ConfigError]:
    """Return the problems in pydantic's error: one for each place, whatever alternatives its type has."""
    grouped: dict[tuple[tuple[str | int, ...], str], list[Any]] = {}
    for details in error.errors(include_url=False):
        kind = details["type"] if details["type"] in ("extra_forbidden", "missing") else "bad"
        path = place(details["loc"], tree) + ((details["loc"][-1],) if kind == "missing" else ())
        grouped.setdefault((path, kind), []).append(details)
    problems = []
    for (path, kind), group in grouped.items():
        name = prefix + dotted(path)
        if kind == "missing":
            whole = name.partition("[")[0]  # a part of a list has no variable
            remedy = f"write {whole if '[' in name else path[-1]}: in the file"
            remedy += "" if is_file_alone else f", or give {OVERRIDE} {whole}=..., or {variable(whole)}=..."
            problems.append(ConfigError(f"{name} is missing.", rule="this setting has no default", remedy=remedy))
        elif kind == "extra_forbidden":
            problems.append(_unknown(name, model, origin_of(name, origins), prefix))
        else:
            fields = dict(known_fields(model, prefix))
            problems.append(_bad_value(name or "the settings", group, origin_of(name or prefix, origins), fields))
    return problems


def place(loc: Sequence[Any], tree: Any) -> tuple[str | int, ...]:
    """Return an error's path in the tree: pydantic also names the alternatives of a union on its way."""
    path: list[str | int] = []
    for part in loc:
        if (isinstance(tree, dict) and part in tree) or (isinstance(tree, list) and part in range(len(tree))):
            path.append(part)
            tree = tree[part]
    return tuple(path)


def origin_of(name: str, origins: Mapping[str, str]) -> str:
    """Return where a value came from; for a section, where its values came from."""
    under = (f"{name}.", f"{name}[")
    below = [origin for key, origin in origins.items() if not name or key == name or key.startswith(under)]
    above = [origin for key, origin in origins.items() if name.startswith((f"{key}.", f"{key}["))]
    return ", ".join(list(dict.fromkeys(below or above[-1:]))[:3]) or DEFAULT


def _unknown(name: str, model: type[BaseModel], origin: str, prefix: str) -> ConfigError:
    what, rest = f"{name} is no setting ({origin}).", ""
    write: Callable[[str], str] = str
    if origin.startswith(VARIABLE):
        given, write = origin.removeprefix(VARIABLE), variable
        what, rest = f"{given} in the environment names no setting.", given[len(variable(name)) :]
    above, _, last = re.sub(r"\[\d+\]", "", name).rpartition(".")
    known = {one: one.rpartition(".") for one, _ in known_fields(model, prefix)}
    beside = {tail: one for one, (parent, _, tail) in known.items() if parent == above}
    if not beside and (outer := above.rpartition(".")[0]):  # below a name of the user's own, such as that of a stage
        beside = {tail: f"{above}.{tail}" for parent, _, tail in known.values() if parent == outer}
    anywhere = {tail: one for one, (_, _, tail) in reversed(known.items())} | beside
    near = [_MEANT[last]] if _MEANT.get(last) in beside else difflib.get_close_matches(last, beside, n=1)
    near += difflib.get_close_matches(last, anywhere, n=1)
    remedy = f"known: {', '.join(sorted(map(write, beside.values())))}" if beside else "take it away"
    if near:
        remedy = f"did you mean '{write(anywhere[near[0]])}{rest}'?"
    rule = "an unknown name is refused, so that no setting is silently off"
    return ConfigError(what, rule=rule, remedy=remedy)


def _bad_value(name: str, group: list[Any], origin: str, fields: Mapping[str, Any]) -> ConfigError:
    """Return the error for a value, in pydantic's words: ``Input should be a valid integer`` is ``must be ...``."""
    subject, source = subject_of(name, origin)
    messages = dict.fromkeys(details["msg"].removeprefix("Value error, ") for details in group)
    text = " or ".join(messages).replace("Input should ", "must ").replace("be an object", "have names below it")
    text = f" {text}" if text.startswith("must ") else f": {text[:1].lower()}{text[1:]}"
    given = group[0]["input"]
    got = "" if isinstance(given, dict) else f", got {show(given)}"
    below = {one: example_of(field, given) for one, field in fields.items() if one.startswith(f"{name}.")}
    if below and not isinstance(given, dict):  # a section
        name = next((one for one, example in below.items() if example), name)
    example = below.get(name) or example_of(fields.get(name), given)
    return ConfigError(f"{subject}{text}{got}{source}.", rule=_STRICT, remedy=_correction(name, origin, example))


def example_of(field: Any, given: object) -> str:
    """Return a value that a setting can have; empty if none is known: a size, or its default."""
    annotation = getattr(field, "annotation", None), getattr(field, "metadata", None)
    if "_parse_size" in repr(annotation):  # also within a union
        return suggest_size(given)
    default = getattr(field, "default", None)
    return json.dumps(default).strip('"') if isinstance(default, int | float | str) else ""


def subject_of(name: str, origin: str) -> tuple[str, str]:
    """Return what an error calls a setting, and the origin behind it in brackets unless that says it already."""
    is_flag = origin.startswith("--") and origin != OVERRIDE
    return (origin, "") if is_flag else (name, f" ({origin})")


def _correction(name: str, origin: str, example: str) -> str:
    value, give = example or "...", "give for example" if example else "give"
    if origin.startswith("--"):
        sign = f" {name}=" if origin == OVERRIDE else " ="[" " in origin]  # --set seed=0, --seed 0, --train seed=0
        return f"{give} {origin}{sign}{value}"
    if origin.startswith(VARIABLE):
        found = origin.removeprefix(VARIABLE)
        return f"{give} {variable(name)}={value}, or take it away: unset {found}"
    if origin in (ARGUMENT, DEFAULT):
        return f"set {name} to another value"
    return f"correct {name} in {origin}" + (f", for example to {value}" if example else "")


def show(value: Any) -> str:
    """Return a value as an error quotes it: one line, at most 60 characters; of an address, where it leads."""
    text = _ADDRESS.sub(rf"\1{MASK}", json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 60 else f"{text[:57]}..."
