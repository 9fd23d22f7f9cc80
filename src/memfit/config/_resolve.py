"""Settings from a file, the environment and overrides, checked as one and each with its origin."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from memfit.config._problems import (
    ARGUMENT,
    OVERRIDE,
    PREFIX,
    VARIABLE,
    Override,
    dotted,
    from_pydantic,
    known_fields,
    origin_of,
    place,
    report,
    show,
    subject_of,
)
from memfit.config._types import read_plain, to_plain
from memfit.errors import ConfigError, nearest

M = TypeVar("M", bound=BaseModel)
N = TypeVar("N", bound=BaseModel)
Keys = tuple[str, ...]

#: Variables that are no settings: those that memfit hands to its own jobs, the folder of a user's claims, and the
#: seconds after which a rank hangs.
INTERNAL_VARIABLES = frozenset(
    f"MEMFIT_{one}" for one in ("RUN_DIR", "JOB_ID", "CLAIMS_DIR", "RANKS", "GENERATION", "HANG_SECONDS", "CANARY")
)
_WANTS_TEXT = frozenset({"string_type", "path_type", "literal_error", "enum"})
_WANTS_KEYS = frozenset({"model_type", "dict_type", "mapping_type"})


@dataclass(frozen=True)
class Resolved(Generic[M]):
    """Checked settings, and where each came from: ``--set``, ``environment MEMFIT_SEED``, ``c.yaml:1``, ``default``."""

    value: M
    origins: Mapping[str, str]  # of every value, by its dotted name
    prefix: str  # what stands before the model's own names: empty, or for example ``params.``
    _given: dict[Keys, tuple[Any, str]] = field(repr=False, compare=False)

    def to_yaml(self, *nested: Resolved[Any]) -> str:
        """Return all settings, and those of sections resolved later, as a YAML file that resolves to the same value."""
        from memfit.config._yaml import write_yaml

        tree = self.value.model_dump(mode="json")
        tree |= {part.prefix.removesuffix("."): part.value.model_dump(mode="json") for part in nested}
        header = "# All settings as they were resolved. memfit reads this file as it reads your own.\n"
        return header + "# run.json says where each value came from.\n" + write_yaml(tree)

    def to_json(self) -> str:
        """Return what was given and where, as JSON; ``from_json`` resolves it again, in another process too."""
        return json.dumps([*self._given.items()])

    @classmethod
    def from_json(cls, model: type[N], text: str) -> Resolved[N]:
        """Return the settings that ``to_json`` wrote, resolved again without file, environment or overrides."""
        return _checked(model, {tuple(path): tuple(one) for path, one in json.loads(text)}, [], "")


def resolve(
    model: type[M],
    *,
    file: Path | None = None,
    values: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Sequence[Override] = (),
) -> Resolved[M]:
    """Return the settings of a model: overrides before environment before file before defaults, each with its origin.

    A variable is ``MEMFIT_`` and the setting's name in capitals, with two underscores for a dot:
    ``MEMFIT_MEMORY__RESERVE`` is ``memory.reserve``. An override is ``name=value``; of two for the same name the later
    one counts. The name of no setting that is a key of the given ``params`` stands for that one. Both take a number,
    ``true``, ``false``, ``null``, text, or a list or mapping in YAML's flow style such as ``[1, 2]``; a mapping is
    merged, a list replaces. Nothing behind the ``=`` is the empty text.

    A file is one YAML document with a mapping. Numbers, ``true``, ``false`` and ``null`` are as in YAML 1.2, so that
    ``1e-3`` is a number and ``no``, ``off``, ``12:30``, ``0050`` and ``2024-01-31`` are text. Types are strict: ``3.0``
    is no integer, ``1`` and ``yes`` are no booleans; but a whole number may be given where text is wanted. A file may
    have anchors and 100 aliases; tags, merge keys and a key that is there twice are refused.

    ``values`` stand for a file's content. If anything is wrong, ConfigError names all of it with its place.
    """
    layers = _Layers()
    if file is not None:
        content, lines = _read(file)
        layers.put((), content, lambda path: f"{file}:{lines[path]}")
    if values is not None:
        layers.put((), to_plain(values), lambda _: ARGUMENT)
    layers.read_environment(os.environ if env is None else env, model)
    for override in overrides:
        layers.read_override(override, model)
    return _checked(
        model, layers.given, layers.problems, "", is_file_alone=file is not None and env == {} and not overrides
    )


def resolve_nested(resolved: Resolved[Any], key: str, model: type[N]) -> Resolved[N]:
    """Return a free section's settings, checked against a model that is known only now; origins are kept.

    ``key`` names a section at the top, such as ``params``; an error has the full names, as those of ``resolve`` do.
    """
    given = {path[1:]: one for path, one in resolved._given.items() if path[0] == key and path != (key,)}
    return _checked(model, given, [], f"{key}.")


class _Layers:
    """The values given so far, each under its path with its origin, and what is wrong.

    A value is a scalar, a list, or an empty mapping; a later value replaces what is at, above and below its path.
    """

    def __init__(self) -> None:
        self.given: dict[Keys, tuple[Any, str]] = {}
        self.problems: list[ConfigError] = []

    def put(self, path: Keys, value: Any, origin: Callable[[Keys], str]) -> None:
        if bad := [part for part in path if not part or "." in part]:
            rule = "a key is text without dots, since dots lead to nested keys"
            self._refuse(f"'{bad[0]}' cannot be a key ({origin(path)})", rule, "write b: 1 below a: for a.b: 1")
        elif isinstance(value, dict) and value:
            for key, item in value.items():
                self.put((*path, key), item, origin)
        elif (text := json.dumps([path, value], ensure_ascii=False)) != text.encode(errors="replace").decode():
            name = dotted(path).encode(errors="replace").decode()
            self._refuse(f"{name} is no text ({origin(path)})", "settings are text in UTF-8", "write it anew in UTF-8")
        elif path and (value != {} or not any(one[: len(path)] == path and one != path for one in self.given)):
            for other in list(self.given):
                if other[: len(path)] == path or path[: len(other)] == other:
                    del self.given[other]
            self.given[path] = (value, origin(path))

    def read_environment(self, env: Mapping[str, str], model: type[BaseModel]) -> None:
        for name in sorted(env):
            if name.startswith(PREFIX) and name not in INTERNAL_VARIABLES:
                path = self._spelled(name.removeprefix(PREFIX).lower().split("__"), model)
                self._put_text(path, env[name], VARIABLE + name)

    def read_override(self, override: Override, model: type[BaseModel]) -> None:
        origin, override = (OVERRIDE, override) if isinstance(override, str) else override
        name, equals, text = override.partition("=")
        path = tuple(part.strip() for part in name.split("."))
        if path[0] not in model.model_fields and any(one[:2] == ("params", path[0]) for one in self.given):
            path = ("params", *path)
        if equals and all(path):
            self._put_text(path, text, origin)
        else:
            flag, rule = origin.partition(" ")[0], "an override is a dotted name, =, and a value"
            self._refuse(f"{flag} {show(override)} is not name=value", rule, f"write {flag} NAME=VALUE")

    def _spelled(self, parts: Sequence[str], model: type[BaseModel]) -> Keys:
        """Return a variable's lower-case parts in the letters of the model, or of the keys already given."""
        given = (dotted(path[:length]) for path in self.given for length in range(1, len(path) + 1))
        names = {name.lower(): name for name in (*given, *(name for name, _ in known_fields(model)))}
        for length in range(len(parts), 0, -1):
            if (name := names.get(".".join(parts[:length]))) is not None:
                return (*name.split("."), *parts[length:])
        return tuple(parts)

    def _put_text(self, path: Keys, text: str, origin: str) -> None:
        """Put the value of an override or a variable: flow-style YAML, quoted text, or an unquoted scalar."""
        stripped = text.strip()
        value: Any = read_plain(stripped) if stripped else ""
        if stripped[:1] in tuple("[{\"'"):
            from memfit.config import _yaml

            try:
                value, _ = _yaml.read(stripped)
            except _yaml.YamlError as error:
                subject, source = subject_of(dotted(path), origin)
                rule = "a value that begins with [ { \" or ' is read as YAML"
                remedy = "put quotes around a text, or close what is open"
                return self._refuse(
                    f"{subject}: it cannot be read as YAML: {error}, got {show(text)}{source}", rule, remedy
                )
        return self.put(path, value, lambda _: origin)

    def _refuse(self, what: str, rule: str, remedy: str) -> None:
        self.problems.append(ConfigError(f"{what}.", rule=rule, remedy=remedy))


def read_file(file: Path, text: str | None = None) -> dict[str, Any]:
    """Return what a settings file holds, or its text where that was read already; it is checked against no model."""
    return _read(file, text)[0]


def _read(file: Path, text: str | None = None) -> tuple[dict[str, Any], dict[Keys, int]]:
    """Return what a settings file holds, and the line of each key by its path."""
    from memfit.config import _yaml

    try:
        content, lines = _yaml.read(_text(file) if text is None else text)
    except _yaml.YamlError as error:
        raise ConfigError(
            f"{file}:{error.line}:{error.column} cannot be read: {error}.",
            rule="a settings file is one YAML 1.2 document.",
            remedy=f"correct line {error.line} of {file}",
        ) from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(
            f"{file} holds {'a list' if isinstance(content, list) else 'a single value'} at its top level.",
            rule="a settings file is a mapping of names to values.",
            remedy="write name: value lines, for example seed: 0",
        )
    return content or {}, lines


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except FileNotFoundError:
        beside = sorted(path.name for path in file.parent.glob("*.y*ml"))
        remedy = nearest(file.name, beside) if beside else "name a YAML file that is there"
        raise ConfigError(f"{file} is not there.", rule="the settings file must exist.", remedy=remedy) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror if isinstance(error, OSError) else error}.",
            rule="a settings file is a readable file of UTF-8 text.",
            remedy="name such a YAML file; iconv -t UTF-8 converts a text",
        ) from None


def _checked(
    model: type[M],
    given: dict[Keys, tuple[Any, str]],
    problems: list[ConfigError],
    prefix: str,
    is_file_alone: bool = False,
) -> Resolved[M]:
    tree: dict[str, Any] = {}
    for path, (value, _) in given.items():
        reduce(lambda above, part: above.setdefault(part, {}), path[:-1], tree)[path[-1]] = value
    origins = {prefix + dotted(path): origin for path, (_, origin) in given.items()}
    try:
        checked = _validated(model, tree)
    except ValidationError as error:
        raise report(problems + from_pydantic(error, model, tree, origins, prefix, is_file_alone)) from None
    if problems:
        raise report(problems)
    return Resolved(checked, {name: origin_of(name, origins) for name in _leaves(checked, prefix)}, prefix, given)


def _validated(model: type[M], tree: dict[str, Any]) -> M:
    """Check a tree; where text is wanted a whole number is its text, and an empty section is a section."""
    extra: Any = None if model.model_config.get("extra") == "allow" else "forbid"
    try:
        return model.model_validate_json(json.dumps(tree), strict=True, extra=extra)
    except ValidationError as error:
        mended: Any = json.loads(json.dumps(tree))
        found = {place(details["loc"], tree): details for details in error.errors(include_url=False)}
        for path, details in found.items():
            is_text = details["type"] in _WANTS_TEXT and type(details["input"]) is int
            if path and (is_text or (details["type"] in _WANTS_KEYS and details["input"] is None)):
                reduce(getitem, path[:-1], mended)[path[-1]] = str(details["input"]) if is_text else {}
        if mended == tree:
            raise
        return model.model_validate_json(json.dumps(mended), strict=True, extra=extra)


def _leaves(value: Any, name: str) -> Iterator[str]:
    """Yield the dotted name of every single value; ``name`` ends with a dot."""
    if isinstance(value, BaseModel):
        value = {key: getattr(value, key) for key in type(value).model_fields}
    if isinstance(value, dict):
        for key, item in value.items():
            is_section = isinstance(item, BaseModel) or (isinstance(item, dict) and item)
            yield from _leaves(item, f"{name}{key}.") if is_section else (f"{name}{key}",)
