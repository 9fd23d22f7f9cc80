"""What is wrong with settings, in words: all of it at once, each with its place and its remedy."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from memfit.config._schema import keys_at, known_names
from memfit.errors import ConfigError, nearest
from memfit.successors import find_gone

Steps = tuple[str | int, ...]

PREFIX = "MEMFIT_"
OVERRIDE = "--set"
#: ``name=value`` as given with ``--set``; or, after the flag that stands for the setting, the same.
Override = str | tuple[str, str]
#: The origin of a value that was handed in from Python.
ARGUMENT = "argument"
DEFAULT = "default"
_VARIABLE = "environment "

#: What a value must be, by the type of pydantic's error; the names in braces are its context.
_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "a section with keys",
    "mapping_type": "a section with keys",
    "model_type": "a section with keys",
    "model_attributes_type": "a section with keys",
    "none_required": "null",
    "date_type": "a date such as 2024-01-31",
    "date_parsing": "a date such as 2024-01-31",
    "date_from_datetime_parsing": "a date such as 2024-01-31",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
    "too_short": "a list of at least {min_length} entries",
    "too_long": "a list of at most {max_length} entries",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; the three parts of an error."""

    what: str
    rule: str
    remedy: str


def dotted(path: Steps) -> str:
    """The name of a setting as people write it.

    >>> dotted(("model", "layers", 0, "width"))
    'model.layers[0].width'
    """
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def variable(name: str) -> str:
    """The environment variable of a setting.

    >>> variable("memory.reserve")
    'MEMFIT_MEMORY__RESERVE'
    """
    return PREFIX + name.replace(".", "__").upper()


def variable_origin(name: str) -> str:
    return _VARIABLE + name


def _is_flag(origin: str) -> bool:
    return origin.startswith("--") and origin != OVERRIDE


def place(name: str, origin: str) -> str:
    """What people call a setting that they gave there: the flag, or its name.

    >>> place("memory.limit", "--limit"), place("memory.limit", "--set")
    ('--limit', 'memory.limit')
    """
    return origin if _is_flag(origin) else name


def source(origin: str) -> str:
    """Where a value came from, in brackets, unless ``place`` says it."""
    return "" if _is_flag(origin) else f" ({origin})"


def show(value: Any) -> str:
    """A value as an error quotes it: one line, at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def correction(name: str, origin: str, example: str = "...") -> str:
    """Where and how to give a setting another value."""
    if _is_flag(origin):
        return f"give {origin} {example}"
    if origin == OVERRIDE:
        return f"give {OVERRIDE} {name}={example}"
    if origin.startswith(_VARIABLE):
        found = origin.removeprefix(_VARIABLE)
        return f"give {found}={example}, or take it away: unset {found}"
    return f"set {name} to another value" if origin in (ARGUMENT, DEFAULT) else f"correct {name} in {origin}"


def report(problems: Sequence[Problem]) -> ConfigError:
    """One error for all problems."""
    if len(problems) == 1:
        return ConfigError(f"{problems[0].what}.", rule=problems[0].rule, remedy=problems[0].remedy)
    lines = [f"  - {problem.what}: {problem.remedy}" for problem in problems]
    return ConfigError(
        "\n".join((f"{len(problems)} settings cannot be used:", *lines)),
        rule=f"all settings are checked at once; {OVERRIDE} counts before the environment, that before the file.",
        remedy="correct each at the place named in brackets",
    )


def unknown(model: type[BaseModel], path: Steps, origin: str, prefix: str) -> Problem:
    """A key that the model does not know, with the nearest name that it knows."""
    name = prefix + dotted(path)
    siblings = [prefix + dotted((*path[:-1], key)) for key in keys_at(model, path[:-1])]
    every = list(known_names(model, prefix))
    same = [known for known in every if known.rpartition(".")[2] == name.rpartition(".")[2]]
    gone = find_gone("key", name)
    hit = _closest(name, same) or _closest(name, siblings) or _closest(name, every)
    rule = f"an unknown name is refused, so that no setting is silently off (known to {model.__name__})"
    if gone:
        rule = f"{name} is gone since memfit {gone.since}"
        return Problem(f"{name} is no setting ({origin})", rule, f"use '{gone.new}'")
    if not origin.startswith(_VARIABLE):
        remedy = f"did you mean '{hit}'?" if hit else _known(siblings)
        return Problem(f"{name} is no setting ({origin})", rule, remedy)
    given = origin.removeprefix(_VARIABLE)
    rest = given[len(variable(name)) :] if given.upper().startswith(variable(name)) else ""
    remedy = f"did you mean '{variable(hit)}{rest.upper()}'?" if hit else _known(variable(key) for key in siblings)
    return Problem(f"{given} in the environment names no setting", rule, remedy)


def _known(names: Iterable[str]) -> str:
    listed = ", ".join(sorted(names))
    return f"known: {listed}" if listed else "take it away: no key is known there"


def _closest(name: str, known: Sequence[str]) -> str | None:
    """The known name with the nearest last part; the whole names decide between equals."""
    tails: dict[str, list[str]] = {}
    for candidate in known:
        tails.setdefault(candidate.rpartition(".")[2].lower(), []).append(candidate)
    tail = name.rpartition(".")[2].lower()
    match = difflib.get_close_matches(tail, tails, n=1, cutoff=0.6)
    whole = difflib.get_close_matches(name, tails[match[0]], n=1, cutoff=0.0) if match else []
    return whole[0] if whole else None


def below_single(name: str, key: str, origin: str, held: str = "") -> Problem:
    """A key that was given below a setting that holds one value."""
    return Problem(
        f"{name} is a single value{held} and has no key '{key}' ({origin})",
        "a dotted name goes down through sections only",
        correction(name, origin),
    )


def from_pydantic(
    error: ValidationError, model: type[BaseModel], tree: Any, origins: Mapping[str, str], prefix: str
) -> list[tuple[Steps, Problem]]:
    """The problems in pydantic's error, one for each path, however many alternatives its type has."""
    grouped: dict[tuple[Steps, bool], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        path = _place(details, tree)
        grouped.setdefault((path, details["type"] == "extra_forbidden"), []).append(details)
    problems: list[tuple[Steps, Problem]] = []
    for (path, is_unknown), group in grouped.items():
        origin = origin_of(path, origins, prefix)
        if is_unknown:
            problem = unknown(model, path, origin, prefix)
        elif group[0]["type"] == "missing":
            problem = _missing(path, model, prefix)
        else:
            problem = _bad_value(path, group, model, origin, prefix)
        problems.append((path, problem))
    return problems


def _place(details: ErrorDetails, tree: Any) -> Steps:
    """The error's path in the tree: pydantic also names the alternatives of unions and the validators on its way."""
    path: Steps = ()
    for part in details["loc"]:
        if (isinstance(tree, dict) and part in tree) or (isinstance(tree, list) and part in range(len(tree))):
            path = (*path, part)
            tree = tree[part]  # type: ignore[index]
    return (*path, details["loc"][-1]) if details["type"] == "missing" else path


def origin_of(path: Steps, origins: Mapping[str, str], prefix: str) -> str:
    """Where the value at a path came from; for a section, where what is in it came from."""
    names = [prefix + dotted(path[:length]) for length in range(len(path), 0, -1)]
    found = next((origins[name] for name in names if name in origins), DEFAULT)
    below = [o for name, o in origins.items() if name.startswith(f"{names[0]}." if names else prefix)]
    return ", ".join(list(dict.fromkeys(below))[:3]) if below else found


def _missing(path: Steps, model: type[BaseModel], prefix: str) -> Problem:
    name = prefix + dotted(path)
    if isinstance(path[-1], int):
        what = f"{prefix}{dotted(path[:-1])} has {path[-1]} entries, too few"
        return Problem(what, f"its length is fixed in {model.__name__}", "add what is missing")
    return Problem(
        f"{name} is missing",
        f"it has no default in {model.__name__}",
        f"write {name.rpartition('.')[2]}: in the file, or give {OVERRIDE} {name}=..., or {variable(name)}=...",
    )


def _bad_value(path: Steps, group: list[ErrorDetails], model: type[BaseModel], origin: str, prefix: str) -> Problem:
    name = prefix + dotted(path) or model.__name__
    stated, at = place(name, origin), source(origin)
    rule = "the types and bounds of settings are strict, wherever a value comes from"
    custom = next((d for d in group if d["type"] in ("value_error", "assertion_error")), None)
    if custom is not None:
        text = str(custom.get("ctx", {}).get("error", custom["msg"]))
        stated += f" {text}" if text.startswith("must ") else f": {text}"
        got = "" if isinstance(custom["input"], dict) else f", got {show(custom['input'])}"
        return Problem(f"{stated}{got}{at}", rule, correction(name, origin))
    got = show(group[0]["input"])
    known = all(details["type"] in _EXPECTED for details in group)
    if not known:
        text = group[0]["msg"]
        return Problem(f"{stated}: {text[:1].lower()}{text[1:]}, got {got}{at}", rule, correction(name, origin))
    expected = " or ".join(
        dict.fromkeys(_EXPECTED[details["type"]].format_map(details.get("ctx", {})) for details in group)
    )
    return Problem(f"{stated} must be {expected}, got {got}{at}", rule, _remedy(name, expected, group, origin))


def _remedy(name: str, expected: str, group: list[ErrorDetails], origin: str) -> str:
    stated = " ".join(str(details.get("ctx", {}).get("expected", "")) for details in group)
    choices = re.findall(r"'([^']*)'", stated)
    if choices and isinstance(group[0]["input"], str):
        hint = nearest(group[0]["input"], choices)
        return hint if hint.startswith("did") else correction(name, origin, choices[0])
    if group[0]["type"] == "string_type" and not isinstance(group[0]["input"], dict | list):
        return f"{correction(name, origin, 'text')}, in quotes where it looks like something else"
    return correction(name, origin, f"<{expected}>")
