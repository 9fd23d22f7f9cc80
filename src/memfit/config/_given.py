"""What was given, layer over layer: a file or values, the environment, overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from memfit.config._problems import (
    ARGUMENT,
    OVERRIDE,
    PREFIX,
    Override,
    Problem,
    below_single,
    dotted,
    origin_of,
    place,
    show,
    source,
    variable_origin,
)
from memfit.config._schema import canonical, shape
from memfit.config._types import to_plain
from memfit.config._yaml import Document, Fault, Tree, YamlError, is_null, key_fault, read_document, read_value
from memfit.errors import ConfigError, nearest

#: Variables that are no settings: those that memfit hands to its own jobs, and the folder of a user's claims.
INTERNAL_VARIABLES = frozenset({"MEMFIT_RUN_DIR", "MEMFIT_JOB_ID", "MEMFIT_CLAIMS_DIR"})


@dataclass
class Given:
    """What was given so far: the merged tree, the origin of each section and value in it, and what is wrong."""

    tree: Tree = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def read_file(self, file: Path) -> None:
        try:
            document = read_document(_text(file))
        except YamlError as error:
            raise ConfigError(
                f"{file}:{error.line} cannot be read: {error}.",
                rule="a settings file is one YAML document without anchors and tags.",
                remedy=f"correct line {error.line} of {file}",
            ) from None
        if not isinstance(document.content, dict):
            kind = "a list" if isinstance(document.content, list) else "a single value"
            raise ConfigError(
                f"{file} holds {kind} at its top level.",
                rule="a settings file is a mapping of names to values.",
                remedy="write name: value lines, for example seed: 0",
            )
        for fault in document.faults:
            where = f"{file}:{fault.line}"
            self.problems.append(Problem(f"{fault.what} ({where})", "a key is a name, given once", fault.remedy))
        self.tree = document.content
        self.origins = {name: f"{file}:{line}" for name, line in document.lines.items()}

    def take(self, values: Mapping[str, Any]) -> None:
        try:
            content = to_plain(values)
            bad = next((key for key in _keys(content) if key_fault(key)), None)
            if bad is not None:
                raise TypeError(f"'{bad}' cannot be a key")
        except TypeError as error:
            raise ConfigError(
                f"the values given cannot be settings: {error}.",
                rule="settings are what a YAML file can hold; a key is text without dots.",
                remedy="pass numbers, text, paths, dates, booleans, lists and nested dicts",
            ) from None
        self.tree = content
        self.origins = dict.fromkeys(_names(content, ""), ARGUMENT)

    def read_environment(self, env: Mapping[str, str], model: type[BaseModel]) -> None:
        seen: dict[tuple[str, ...], str] = {}
        for name in sorted(env):
            if not name.upper().startswith(PREFIX) or name.upper() in INTERNAL_VARIABLES:
                continue
            path = canonical(model, self.tree, tuple(name[len(PREFIX) :].lower().split("__")))
            if path in seen:
                what = f"{seen[path]} and {name} both set {dotted(path)} (environment)"
                self.problems.append(Problem(what, "letters' case does not tell variables apart", f"unset {name}"))
                continue
            seen[path] = name
            self._put_text(path, env[name], variable_origin(name))

    def read_override(self, override: Override) -> None:
        origin, override = (OVERRIDE, override) if isinstance(override, str) else override
        name, equals, text = override.partition("=")
        path = tuple(part.strip() for part in name.split("."))
        if not equals or not all(path):
            what = f"{OVERRIDE} {show(override)} is not name=value"
            rule = "an override is a dotted name, =, and a value"
            self.problems.append(Problem(what, rule, f"write for example {OVERRIDE} seed=1"))
            return
        self._put_text(path, text, origin)

    def _put_text(self, path: tuple[str, ...], text: str, origin: str) -> None:
        name = dotted(path)
        try:
            document = read_value(text)
        except YamlError as error:
            document = Document()
            problem = f"it cannot be read as YAML: {error}"
            document.faults.append(Fault(1, problem, "put quotes around a text, or close what is open"))
        for fault in document.faults:
            what = f"{place(name, origin)}: {fault.what}, got {show(text)}{source(origin)}"
            rule = "a value that begins with [ { \" or ' is read as YAML"
            self.problems.append(Problem(what, rule, fault.remedy))
        if not document.faults:
            self._put(path, document.content, origin)

    def _put(self, path: tuple[str, ...], value: Any, origin: str) -> None:
        node = self.tree
        for depth, part in enumerate(path[:-1], start=1):
            name = dotted(path[:depth])
            below = node.get(part)
            if below is None or is_null(below):
                below = node[part] = {}
                self.origins[name] = origin
            elif not isinstance(below, dict):
                held = f", {show(shape(below, Any))} ({origin_of(path[:depth], self.origins, '')}),"
                self.problems.append(below_single(name, path[depth], origin, held))
                return
            node = below
        self._store(node, path, value, origin)

    def _store(self, node: Tree, path: tuple[str, ...], value: Any, origin: str) -> None:
        name = dotted(path)
        if not (isinstance(value, dict) and isinstance(node.get(path[-1]), dict)):
            self.origins = {key: old for key, old in self.origins.items() if not f"{key}.".startswith(f"{name}.")}
            self.origins[name] = origin
            node[path[-1]] = {} if isinstance(value, dict) else value
        if isinstance(value, dict):
            for key, item in value.items():
                self._store(node[path[-1]], (*path, key), item, origin)


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        beside = sorted(path.name for path in file.parent.glob("*.y*ml"))
        raise ConfigError(
            f"{file} is not there.",
            rule="the settings file must exist.",
            remedy=nearest(file.name, beside) if beside else "name a YAML file that is there",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}.",
            rule="a settings file is a readable file.",
            remedy="name a YAML file that this user can read",
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}.",
            rule="a settings file is UTF-8 text.",
            remedy=f"convert it: iconv -t UTF-8 {file}",
        ) from None


def _keys(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        yield from content
    for item in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _keys(item)


def _names(tree: Tree, prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{key}.")
