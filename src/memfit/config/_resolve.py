"""Settings from a file, the environment and overrides, checked as one and each with its origin."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from memfit.config import _yaml
from memfit.config._layers import Keys, Layers
from memfit.config._problems import DEFAULT, Override, dotted, from_pydantic, place, report
from memfit.config._yaml import Plain

M = TypeVar("M", bound=BaseModel)
N = TypeVar("N", bound=BaseModel)

_WANTS_TEXT = frozenset({"string_type", "path_type", "literal_error", "enum"})
_WANTS_KEYS = frozenset({"model_type", "dict_type", "mapping_type"})


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
    _given: dict[Keys, tuple[Any, str]] = field(repr=False, compare=False)

    def to_yaml(self, *nested: Resolved[Any]) -> str:
        """Return all settings as a YAML file that resolves to the same value.

        Args:
            nested: Sections that were resolved later; their defaults are filled in too.
        """
        tree = self.value.model_dump(mode="json")
        for part in nested:
            *above, last = part.prefix.removeprefix(self.prefix).split(".")[:-1]
            below = tree
            for name in above:
                below = below.setdefault(name, {})
            below[last] = part.value.model_dump(mode="json")
        name = type(self.value).__name__
        header = f"# The resolved settings of {name}. memfit reads this file as it reads your own.\n"
        return header + "# run.json says where each value came from.\n" + _yaml.write(tree)

    def to_json(self) -> str:
        """Return what was given and where, as JSON; ``from_json`` resolves it again, in another process too."""
        given = [[path, value, origin] for path, (value, origin) in self._given.items()]
        return json.dumps({"given": given, "prefix": self.prefix}, default=lambda plain: {"plain.": plain.text})

    @classmethod
    def from_json(cls, model: type[N], text: str) -> Resolved[N]:
        """Return the settings that ``to_json`` wrote, resolved again without file, environment or overrides."""
        record = json.loads(text, object_hook=lambda item: Plain(item["plain."]) if "plain." in item else item)
        return _checked(model, Layers({tuple(path): (value, origin) for path, value, origin in record["given"]}),
                        record["prefix"])  # fmt: skip


def resolve(
    model: type[M],
    *,
    file: Path | None = None,
    values: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Sequence[Override] = (),
) -> Resolved[M]:
    """Return the settings of a model: overrides before environment before file before defaults, each with its origin.

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
    layers = Layers()
    if file is not None:
        layers.read_file(file)
    if values is not None:
        layers.read_values(values)
    layers.read_environment(os.environ if env is None else env, model)
    for override in overrides:
        layers.read_override(override)
    return _checked(model, layers, "")


def resolve_nested(resolved: Resolved[Any], key: str, model: type[N]) -> Resolved[N]:
    """Return a free section's settings, checked against a model that is known only now; origins are kept.

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
    steps = tuple(key.split("."))
    below = {path[len(steps) :]: given for path, given in resolved._given.items()
             if path[: len(steps)] == steps and path != steps}  # fmt: skip
    return _checked(model, Layers(below), f"{resolved.prefix}{key}.")


def _checked(model: type[M], layers: Layers, prefix: str) -> Resolved[M]:
    tree: dict[str, Any] = {}
    for path, (value, _) in layers.values.items():
        below = tree
        for part in path[:-1]:
            below = below.setdefault(part, {})
        below[path[-1]] = value
    origins = {prefix + dotted(path): origin for path, (_, origin) in layers.values.items()}
    try:
        value = _validated(model, tree)
    except ValidationError as error:
        raise report(layers.problems + from_pydantic(error, model, tree, origins, prefix)) from None
    if layers.problems:
        raise report(layers.problems)
    return Resolved(value, {name: _origin(name, origins) for name in _leaves(value, prefix)}, prefix, layers.values)


def _validated(model: type[M], tree: dict[str, Any]) -> M:
    """Check a tree; where text is wanted an unquoted scalar is its text, and an empty section is a section.

    Raises:
        ValidationError: What is wrong with the tree as it was given.
    """
    extra: Any = None if model.model_config.get("extra") == "allow" else "forbid"

    def validate(values: Any) -> M:
        return model.model_validate_json(json.dumps(values), strict=True, extra=extra)

    read = _mended(tree, {}, ())
    try:
        return validate(read)
    except ValidationError as error:
        wanted = {place(details["loc"], tree): details["type"] for details in error.errors(include_url=False)}
        mended = _mended(tree, wanted, ())
        if mended == read:
            raise
        return validate(mended)


def _mended(value: Any, wanted: Mapping[tuple[str | int, ...], str], path: tuple[str | int, ...]) -> Any:
    """Return a tree of plain values; ``wanted`` holds pydantic's error for each place that is to be read otherwise."""
    if isinstance(value, dict):
        return {key: _mended(item, wanted, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_mended(item, wanted, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, Plain):
        return value
    if wanted.get(path) in _WANTS_TEXT:
        return value.text
    found = _yaml.read_plain(value.text)
    return {} if found is None and wanted.get(path) in _WANTS_KEYS else found


def _leaves(value: Any, name: str) -> Iterator[str]:
    """Yield the dotted name of every single value; ``name`` ends with a dot."""
    if isinstance(value, BaseModel):
        value = {key: getattr(value, key) for key in type(value).model_fields}
    if isinstance(value, dict):
        for key, item in value.items():
            is_section = isinstance(item, BaseModel) or (isinstance(item, dict) and item)
            yield from _leaves(item, f"{name}{key}.") if is_section else (f"{name}{key}",)


def _origin(name: str, origins: Mapping[str, str]) -> str:
    """Return the origin of a value, or of the single value that it was made from."""
    while name and name not in origins:
        name = name.rpartition(".")[0]
    return origins.get(name, DEFAULT)
