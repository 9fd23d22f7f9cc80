"""What was given, layer over layer: a file or values, the environment, overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from memfit.config import _yaml
from memfit.config._problems import (
    ARGUMENT,
    OVERRIDE,
    PREFIX,
    VARIABLE,
    Override,
    dotted,
    known_names,
    show,
    subject_of,
)
from memfit.config._types import to_plain
from memfit.errors import ConfigError, nearest

#: Variables that are no settings: those that memfit hands to its own jobs, and the folder of a user's claims.
INTERNAL_VARIABLES = frozenset({"MEMFIT_RUN_DIR", "MEMFIT_JOB_ID", "MEMFIT_CLAIMS_DIR"})

Keys = tuple[str, ...]


@dataclass
class Layers:
    """The values given so far, each under its path with its origin, and what is wrong.

    A value is a scalar, a list, or an empty mapping; a later value replaces what is at, above and below its path.
    """

    values: dict[Keys, tuple[Any, str]] = field(default_factory=dict)
    problems: list[ConfigError] = field(default_factory=list)

    def put(self, path: Keys, value: Any, origin: str | Callable[[Keys], str]) -> None:
        if bad := [part for part in path if not part or "." in part]:
            where = origin if isinstance(origin, str) else origin(path)
            rule = "a key is text without dots, since dots lead to nested keys"
            self._refuse(f"'{bad[0]}' cannot be a key ({where})", rule, "write b: 1 below a: for a.b: 1")
            return
        if isinstance(value, dict) and value:
            for key, item in value.items():
                self.put((*path, key), item, origin)
            return
        below = [other for other in self.values if other[: len(path)] == path]
        if value == {} and any(len(other) > len(path) for other in below):
            return
        for other in [*below, *(path[:length] for length in range(len(path)))]:
            self.values.pop(other, None)
        self.values[path] = (value, origin if isinstance(origin, str) else origin(path))

    def read_file(self, file: Path) -> None:
        try:
            content, lines, faults = _yaml.read(_text(file))
        except _yaml.YamlError as error:
            raise ConfigError(
                f"{file}:{error.line} cannot be read: {error}.",
                rule="a settings file is one YAML document without anchors and tags.",
                remedy=f"correct line {error.line} of {file}",
            ) from None
        if content is not None and not isinstance(content, dict):
            raise ConfigError(
                f"{file} holds {'a list' if isinstance(content, list) else 'a single value'} at its top level.",
                rule="a settings file is a mapping of names to values.",
                remedy="write name: value lines, for example seed: 0",
            )
        for what, line in faults:
            self._refuse(f"{what} ({file}:{line})", "a key is a name, given once", f"correct line {line} of {file}")
        if content:
            self.put((), content, lambda path: f"{file}:{lines[dotted(path)]}")

    def read_values(self, values: Mapping[str, Any]) -> None:
        try:
            content = to_plain(values)
        except TypeError as error:
            raise ConfigError(
                f"the values given cannot be settings: {error}.",
                rule="settings are what a YAML file can hold.",
                remedy="pass numbers, text, paths, dates, booleans, lists and nested dicts",
            ) from None
        if content:
            self.put((), content, ARGUMENT)

    def read_environment(self, env: Mapping[str, str], model: type[BaseModel]) -> None:
        seen: dict[Keys, str] = {}
        for name in sorted(env):
            if not name.upper().startswith(PREFIX) or name.upper() in INTERNAL_VARIABLES:
                continue
            path = self._spelled(name[len(PREFIX) :].lower().split("__"), model)
            if path in seen:
                what = f"{seen[path]} and {name} both set {dotted(path)} (environment)"
                self._refuse(what, "letters' case does not tell variables apart", f"unset {name}")
            else:
                seen[path] = name
                self._put_text(path, env[name], VARIABLE + name)

    def read_override(self, override: Override) -> None:
        origin, override = (OVERRIDE, override) if isinstance(override, str) else override
        name, equals, text = override.partition("=")
        path = tuple(part.strip() for part in name.split("."))
        if equals and all(path):
            self._put_text(path, text, origin)
        else:
            rule = "an override is a dotted name, =, and a value"
            self._refuse(f"{OVERRIDE} {show(override)} is not name=value", rule, f"write for example {OVERRIDE} seed=1")

    def _spelled(self, parts: list[str], model: type[BaseModel]) -> Keys:
        """Return a variable's lower-case parts in the letters of the model, or of the keys already given."""
        given = (dotted(path[:length]) for path in self.values for length in range(1, len(path) + 1))
        names = {name.lower(): name for name in (*given, *known_names(model))}
        for length in range(len(parts), 0, -1):
            if (name := names.get(".".join(parts[:length]))) is not None:
                return (*name.split("."), *parts[length:])
        return tuple(parts)

    def _put_text(self, path: Keys, text: str, origin: str) -> None:
        """Put the value of an override or a variable: flow-style YAML, quoted text, or an unquoted scalar."""
        stripped = text.strip()
        faults: list[str] = []
        value: Any = _yaml.plain(stripped) if stripped else ""
        if stripped[:1] in tuple("[{\"'"):
            try:
                value, _, found = _yaml.read(stripped)
                faults += [what for what, _ in found]
            except _yaml.YamlError as error:
                faults.append(f"it cannot be read as YAML: {error}")
        subject, source = subject_of(dotted(path), origin)
        for fault in faults:
            rule = "a value that begins with [ { \" or ' is read as YAML"
            remedy = "put quotes around a text, or close what is open"
            self._refuse(f"{subject}: {fault}, got {show(text)}{source}", rule, remedy)
        if not faults:
            self.put(path, value, origin)

    def _refuse(self, what: str, rule: str, remedy: str) -> None:
        self.problems.append(ConfigError(f"{what}.", rule=rule, remedy=remedy))


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
