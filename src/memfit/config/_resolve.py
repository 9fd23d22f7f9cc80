"""Settings from a file, the environment and overrides, checked as one and each with its origin."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from memfit.config._given import Given
from memfit.config._problems import DEFAULT, Override, below_single, from_pydantic, report, unknown
from memfit.config._schema import shape, strangers
from memfit.config._yaml import is_null, read_document, write_document

M = TypeVar("M", bound=BaseModel)
N = TypeVar("N", bound=BaseModel)


_ABSENT = object()
_HEADER = """\
The resolved settings of {name}. This is a valid input file: the same settings come out of it.
Behind each value stands where it came from."""


@dataclass(frozen=True)
class Resolved(Generic[M]):
    """Checked settings, and where each came from.

    Attributes:
        value: The settings.
        origins: By dotted name, the origin of every value: ``--set``, ``environment MEMFIT_SEED``, ``config.yaml:12``,
            ``argument`` or ``default``.
        prefix: What stands before the model's own names: empty, or for example ``params.``.
    """

    value: M
    origins: Mapping[str, str]
    prefix: str
    _given: Given = field(repr=False, compare=False)

    def to_yaml(self, *nested: Resolved[Any]) -> str:
        """All effective settings as a YAML file that resolves to the same value, each with its origin as a comment.

        Args:
            nested: Sections that were resolved later; their defaults are filled in too.
        """
        tree = _effective(self)
        comments = dict(self.origins)
        for part in nested:
            names = part.prefix.removeprefix(self.prefix).split(".")[:-1]
            below = tree
            for name in names[:-1]:
                below = below.setdefault(name, {})
            below[names[-1]] = _effective(part)
            comments |= part.origins
        own = {name.removeprefix(self.prefix): origin for name, origin in comments.items()}
        return write_document(tree, own, _HEADER.format(name=type(self.value).__name__))

    def to_json(self) -> str:
        """What was given and where, as JSON; ``from_json`` resolves it again, in another process too."""
        given = {"tree": write_document(self._given.tree, {}, ""), "origins": self._given.origins}
        return json.dumps({**given, "prefix": self.prefix})

    @classmethod
    def from_json(cls, model: type[N], text: str) -> Resolved[N]:
        """The settings that ``to_json`` wrote, resolved again without file, environment or overrides."""
        record = json.loads(text)
        given = Given(read_document(record["tree"]).content, dict(record["origins"]))
        return _checked(model, given, record["prefix"])


def resolve(
    model: type[M],
    *,
    file: Path | None = None,
    values: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Sequence[Override] = (),
) -> Resolved[M]:
    """The settings of a model: overrides before environment before file before defaults, each with its origin.

    A variable is ``MEMFIT_`` and the setting's name in any case, with two underscores for a dot:
    ``MEMFIT_MEMORY__RESERVE`` is ``memory.reserve``. An override is ``name=value``; of two for the same name the later
    one counts. Both take a number, ``true``, ``false``, ``null``, text, or a list or mapping in YAML's flow style such
    as ``[1, 2]``; a mapping is merged, a list replaces. Nothing behind the ``=`` is the empty text.

    A file is one YAML document with a mapping. Numbers, ``true``, ``false`` and ``null`` are as in YAML 1.2, so that
    ``1e-3`` is a number and ``no``, ``off``, ``12:30`` and ``2024-01-31`` are text; where a setting holds text, a
    number counts as the text it is written as (``0050`` stays ``0050``). Types are strict: ``3.0`` is no integer, ``1``
    and ``yes`` are no booleans.

    Args:
        model: The settings' pydantic model, usually derived from ``Settings``.
        file: A YAML file.
        values: Instead of a file, its content from Python.
        env: The environment; by default this process's.
        overrides: What was given with ``--set``; or, as a pair, after the flag that an error is to name.

    Raises:
        ConfigError: If anything is wrong: all of it is named at once, each with its place and the nearest known name.

    >>> from memfit.config import Settings
    >>> class Model(Settings):
    ...     seed: int = 0
    ...     rate: float = 0.1
    ...     epochs: int = 12
    >>> resolved = resolve(Model, values={"seed": 1, "rate": 0.5}, env={"MEMFIT_SEED": "2"}, overrides=["rate=1e-3"])
    >>> resolved.value
    Model(seed=2, rate=0.001, epochs=12)
    >>> resolved.origins
    {'seed': 'environment MEMFIT_SEED', 'rate': '--set', 'epochs': 'default'}
    """
    if file is not None and values is not None:
        raise TypeError("give a file or values, not both")
    given = Given()
    if file is not None:
        given.read_file(file)
    if values is not None:
        given.take(values)
    given.read_environment(os.environ if env is None else env, model)
    for override in overrides:
        given.read_override(override)
    return _checked(model, given, "")


def resolve_nested(resolved: Resolved[Any], key: str, model: type[N]) -> Resolved[N]:
    """A free section's settings, checked against a model that is known only now; origins are kept.

    Args:
        resolved: The settings that hold the section, a ``dict[str, Any]``.
        key: The section's dotted name, for example ``params``.
        model: The section's own model.

    Raises:
        ConfigError: As ``resolve`` does, with the full names.

    >>> from typing import Any
    >>> from memfit.config import Settings
    >>> class Run(Settings):
    ...     params: dict[str, Any] = {}
    >>> class Params(Settings):
    ...     rate: float = 0.1
    >>> run = resolve(Run, env={"MEMFIT_PARAMS__RATE": "1e-3"})
    >>> resolve_nested(run, "params", Params).value
    Params(rate=0.001)
    """
    prefix = f"{resolved.prefix}{key}."
    tree = resolved._given.tree
    for name in key.split("."):
        below = tree.get(name)
        tree = below if isinstance(below, dict) else {}
    origins = {name: origin for name, origin in resolved._given.origins.items() if name.startswith(prefix)}
    return _checked(model, Given(tree, origins), prefix)


def _checked(model: type[M], given: Given, prefix: str) -> Resolved[M]:
    problems = list(given.problems)
    content = shape(given.tree, model)
    faulty: set[tuple[str | int, ...]] = set()
    for path, below in strangers(model, given.tree):
        origin = given.origins[prefix + ".".join(path)]
        parent = path[:-1] if below else path
        faulty.add(parent)
        _remove(content, parent)
        name = prefix + ".".join(parent)
        problems.append(below_single(name, path[-1], origin) if below else unknown(model, path, origin, prefix))
    try:
        value = model.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        found = from_pydantic(error, model, content, given.origins, prefix)
        raise report(problems + [problem for path, problem in found if path not in faulty]) from None
    if problems:
        raise report(problems)
    origins = {prefix + name: _origin(name, given, prefix) for name in _leaves(value, "")}
    return Resolved(value, origins, prefix, given)


def _remove(content: Any, path: tuple[str, ...]) -> None:
    for part in path[:-1]:
        content = content[part]
    content.pop(path[-1], None)


def _leaves(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        value = {key: getattr(value, key) for key in type(value).model_fields}
    if isinstance(value, dict) and (value or not name):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    else:
        yield name


def _origin(name: str, given: Given, prefix: str) -> str:
    """The origin of a value, or of the single value that it was made from."""
    node: Any = given.tree
    passed = prefix
    for part in name.split("."):
        if not isinstance(node, dict) or part not in node:
            return DEFAULT
        passed += part
        node = node[part]
        if not isinstance(node, dict):
            break
        passed += "."
    return given.origins[passed.removesuffix(".")]


def _effective(resolved: Resolved[Any]) -> dict[str, Any]:
    """The tree of all settings: what was given as it was given, the rest as the model dumps it."""
    tree = _filled(resolved._given.tree, resolved.value, resolved.value.model_dump(mode="json"))
    assert isinstance(tree, dict)
    return tree


def _filled(given: Any, value: Any, dumped: Any) -> Any:
    if isinstance(value, BaseModel) and isinstance(dumped, dict):
        below = given if isinstance(given, dict) else {}
        names = [name for name in type(value).model_fields if name in dumped]
        return {name: _filled(below.get(name, _ABSENT), getattr(value, name), dumped[name]) for name in names}
    if given is not _ABSENT and not (is_null(given) and isinstance(dumped, dict)):
        return copy.deepcopy(given)
    if isinstance(value, list | tuple) and isinstance(dumped, list):
        return [_filled(_ABSENT, item, part) for item, part in zip(value, dumped, strict=True)]
    return dumped
