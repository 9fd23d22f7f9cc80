"""Settings as YAML: values with the line of each key, and text that reads back the same.

Only a process that reads or writes a file imports this module: loading ruamel.yaml takes longer than a verb's help.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver, implicit_resolvers
from ruamel.yaml.tag import Tag

from memfit.config._types import read_plain

_MOST_ALIASES = 100
_TEXT = "tag:yaml.org,2002:str"
_PLAIN, _QUOTED = Tag(suffix=""), Tag(suffix=_TEXT)
_YAML_1_1 = [regexp for versions, _, regexp, _ in implicit_resolvers if (1, 1) in versions]


class YamlError(ValueError):
    """Text that is no YAML, or a part of YAML that settings do not use; ``line`` and ``column`` count from 1."""

    def __init__(self, problem: str, line: int, column: int) -> None:
        super().__init__(problem)
        self.line, self.column = line, column


class _Resolver(VersionedResolver):
    """Leaves what has no tag without one: ``read_plain`` reads an unquoted text."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Tag:
        return _QUOTED if kind is ScalarNode and not implicit[0] else _PLAIN


class _Reader:
    def __init__(self) -> None:
        self.lines: dict[tuple[str, ...], int] = {}
        self._anchored: list[int] = []

    def read(self, node: Any, path: tuple[str, ...] = ()) -> Any:
        if node.anchor is not None:
            self._anchored.append(id(node))
            if len(self._anchored) - len(set(self._anchored)) > _MOST_ALIASES:
                raise _refused(node, f"it has more than {_MOST_ALIASES} aliases (*): write the values out")
        value: Any
        if isinstance(node, MappingNode):
            value = {}
            for key, inner in node.value:
                self.read(key)
                if not isinstance(key.value, str):
                    raise _refused(key, "a list or a mapping cannot be a key")
                if key.value == "<<" and not key.tag:
                    raise _refused(key, "merge keys (<<) are not read: write the keys out")
                below = (*path, key.value)
                if key.value in value:
                    raise _refused(key, f"{'.'.join(below)} is set twice, first in line {self.lines[below]}")
                self.lines[below] = key.start_mark.line + 1
                value[key.value] = self.read(inner, below)
        elif isinstance(node, SequenceNode):
            value = [self.read(item, path) for item in node.value]
        else:
            value = node.value if node.tag == _TEXT else read_plain(node.value)
        if node.tag and (node.tag != _TEXT or not isinstance(node, ScalarNode)):
            raise _refused(node, f"the tag {node.tag} is not read: write the value without it")
        return value


def _refused(node: Any, problem: str) -> ConstructorError:
    return ConstructorError(None, None, problem, node.start_mark)


def read(text: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Return the content of one YAML document, and the line of each key by its path.

    >>> read("seed: 3\\nmodel:\\n  name: x\\n")
    ({'seed': 3, 'model': {'name': 'x'}}, {('seed',): 1, ('model',): 2, ('model', 'name'): 3})
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _Resolver
    yaml.composer.warn_double_anchors = False
    reader = _Reader()
    try:
        node = yaml.compose(text)
        return None if node is None else reader.read(node), reader.lines
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise YamlError(problem, mark.line + 1, mark.column + 1) from None
    except (YAMLError, AssertionError) as error:  # ruamel.yaml asserts that %YAML is 1.1 or 1.2.
        before = text[: getattr(error, "position", 0)]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise YamlError(str(error).split("\n")[0], line, column) from None
    except RecursionError:
        raise YamlError("it is nested too deeply", 1, 1) from None


class _Representer(SafeRepresenter):
    """Writes text in quotes where YAML 1.1 or 1.2 would read something else."""

    def represent_text(self, text: str) -> ScalarNode:
        is_text = isinstance(read_plain(text), str) and not any(one.match(text) for one in _YAML_1_1)
        return self.represent_scalar(_TEXT, text, style='"' if not text.isprintable() else None if is_text else "'")

    def represent_number(self, number: float) -> ScalarNode:
        node = self.represent_float(number)
        if "." not in node.value:  # YAML 1.1 reads 1e-05 as text.
            node.value = node.value.replace("e", ".0e")
        return node


_Representer.add_representer(str, _Representer.represent_text)
_Representer.add_representer(float, _Representer.represent_number)


def write_yaml(values: Mapping[str, Any]) -> str:
    """Return values as a YAML document that YAML 1.1 and 1.2 read back to the same values."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = yaml.sort_base_mapping_type_on_output = False
    yaml.width = sys.maxsize  # ruamel.yaml 0.19 breaks long keys too, and cannot read them.
    stream = io.StringIO()
    yaml.dump(dict(values), stream)
    return stream.getvalue()
