"""YAML 1.2 on top of PyYAML: values with the line of each key, and text that reads back the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,400})|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?((\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)")


def read_plain(text: str) -> bool | int | float | str | None:
    """Return the value of an unquoted scalar in YAML 1.2, where ``on``, ``no`` and dates are text.

    Digits behind a leading zero are text too: ``0050`` is a code.

    >>> [read_plain(text) for text in ("1e-3", "0050", "0x10", "true", "no", "2024-01-31", "12:30", "~")]
    [0.001, '0050', 16, True, 'no', '2024-01-31', '12:30', None]
    """
    word = text.lower() if text in (text.lower(), text.upper(), text.capitalize()) else text
    if word in _WORDS:
        return _WORDS[word]
    if _INT.fullmatch(text):
        return int(text, 0)
    is_float = len(text) < 400 and _FLOAT.fullmatch(text)
    return float(re.sub(r"\.(?=[iInN])", "", text)) if is_float else text


class YamlError(ValueError):
    """Text that is no YAML, or a part of YAML that settings do not use; ``line`` counts from 1."""

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(problem)
        self.line = line


def read(text: str) -> tuple[Any, dict[str, int], list[tuple[str, int]]]:
    """Return the content of one YAML document, the line of each key by dotted name, and faults with their lines.

    A fault is a key that is no text or is there twice; it is left out.

    Raises:
        YamlError: If the text is not one YAML document.

    >>> read("seed: 3\\nmodel:\\n  name: x\\n")
    ({'seed': 3, 'model': {'name': 'x'}}, {'seed': 1, 'model': 2, 'model.name': 3}, [])
    """
    lines: dict[str, int] = {}
    faults: list[tuple[str, int]] = []

    def content(node: yaml.Node, name: str) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return read_plain(node.value) if node.style is None else node.value
        if isinstance(node, yaml.SequenceNode):
            return [content(item, f"{name}[{index}]") for index, item in enumerate(node.value)]
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            below = f"{name}.{key}" if name else f"{key}"
            if not isinstance(key, str):
                faults.append(("a list or a mapping cannot be a key", line))
            elif key in values:
                faults.append((f"{below} is set twice, first in line {lines[below]}", line))
            else:
                lines[below] = line
                values[key] = content(value_node, below)
        return values

    try:
        for token in yaml.scan(text, Loader=yaml.BaseLoader):
            if isinstance(token, yaml.AnchorToken | yaml.AliasToken | yaml.TagToken):
                problem = "anchors (&), aliases (*) and tags (!) are not read: write the value out"
                raise YamlError(problem, token.start_mark.line + 1)
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return None if node is None else content(node, ""), lines, faults
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(", ".join(filter(None, (error.context, error.problem))), mark.line + 1 if mark else 1) from None
    except yaml.YAMLError as error:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise YamlError(str(error).split("\n")[0], line) from None
    except RecursionError:
        raise YamlError("it is nested too deeply", 1) from None


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes where YAML 1.1 or 1.2 would read something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        quotes = '"' if not text.isprintable() else None if isinstance(read_plain(text), str) else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=quotes)


_Dumper.add_representer(str, _Dumper.represent_text)


def write(values: Mapping[str, Any]) -> str:
    """Return values as a YAML document that ``read`` reads back to the same values.

    >>> print(write({"seed": 3, "model": {"name": "no", "lr": 1e-5}}), end="")
    seed: 3
    model:
      name: 'no'
      lr: 1.0e-05
    """
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
