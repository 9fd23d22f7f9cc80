"""YAML text to trees of values and back, with the line of every key and the text of every unquoted scalar.

A *tree* is nested ``dict``s with ``str`` keys; its leaves are ``Plain`` (an unquoted scalar that is more than text),
``str``, lists of these, or a Python ``None``, ``bool``, ``int`` or ``float``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

Tree = dict[str, Any]

_TEXT_TAG = "tag:yaml.org,2002:str"
_LIST_TAG = "tag:yaml.org,2002:seq"
_MAPPING_TAG = "tag:yaml.org,2002:map"
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_NAN = frozenset({".nan", ".NaN", ".NAN"})
_LONGEST_NUMBER = 400  # digits; a longer run of digits is an identifier, and Python refuses to read thousands
_LINE_BREAKS = re.compile("[\n\r\x85\u2028\u2029]")


def read_plain(text: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar by the core schema of YAML 1.2, in which ``on``, ``no`` and dates are text.

    >>> [read_plain(text) for text in ("1e-3", "0050", "0x10", "true", "no", "2024-01-31", "12:30", "~")]
    [0.001, 50, 16, True, 'no', '2024-01-31', '12:30', None]
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if text in _NAN:
        return math.nan
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INT.fullmatch(text):
        return int(text) if text[:2] not in ("0x", "0o") else int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _INFINITE.fullmatch(text):
        return -math.inf if match.group(1) == "-" else math.inf
    return text


@dataclass(frozen=True)
class Plain:
    """An unquoted scalar that reads as null, a boolean or a number; a setting that holds text takes its text."""

    text: str

    @property
    def value(self) -> bool | int | float | None:
        value = read_plain(self.text)
        assert not isinstance(value, str)
        return value


def is_null(value: Any) -> bool:
    return value is None or (isinstance(value, Plain) and value.value is None)


def from_text(text: str) -> Plain | str:
    """An unquoted scalar: text that reads as nothing else stays a ``str``."""
    return text if isinstance(read_plain(text), str) else Plain(text)


@dataclass(frozen=True)
class Fault:
    """Something in a document that is YAML and yet refused."""

    line: int
    what: str
    remedy: str


@dataclass
class Document:
    """A YAML document: its content, the line of each key (by dotted name) and what is refused in it."""

    content: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


class YamlError(ValueError):
    """Text that is no YAML, or uses a part of YAML that is refused; ``line`` counts from 1."""

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(problem)
        self.line = line


class _Loader(yaml.SafeLoader):
    """Composes nodes without any implicit type; anchors and tags are refused, so that every value has one line."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the name and form that PyYAML reads

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            raise YamlError("anchors (&) and aliases (*) are not read: write the value out", event.start_mark.line + 1)
        if getattr(event, "tag", None) is not None:
            raise YamlError(f"tags ({event.tag}) are not read: write the value alone", event.start_mark.line + 1)
        return super().compose_node(parent, index)


def read_document(text: str) -> Document:
    """A document's content with lines and faults; an empty one holds an empty mapping.

    Raises:
        YamlError: If the text is not one YAML document.

    >>> document = read_document("seed: 3\\nmodel:\\n  width: 64\\n")
    >>> document.content
    {'seed': Plain(text='3'), 'model': {'width': Plain(text='64')}}
    >>> document.lines
    {'seed': 1, 'model': 2, 'model.width': 3}
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        document = Document()
        content = None if node is None else _content(node, "", document)
        document.content = {} if is_null(content) else content
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise YamlError(problem, mark.line + 1 if mark else 1) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"the character {chr(error.character)!a} is not allowed", line) from None
    except RecursionError:
        raise YamlError("it is nested too deeply", 1) from None
    return document


def read_value(text: str) -> Document:
    """The value of an override or a variable: a list, mapping or quoted text in YAML's flow style, or a plain scalar.

    An empty text is the empty text; ``null`` is no value.

    >>> [read_value(text).content for text in ("3", "a: b # c", "", '"3"', "[1, x]")]
    [Plain(text='3'), 'a: b # c', '', '3', [Plain(text='1'), 'x']]
    """
    stripped = text.strip()
    if stripped[:1] in tuple("[{\"'"):
        return read_document(stripped)
    return Document(from_text(stripped) if stripped else "")


def _content(node: yaml.Node, path: str, document: Document) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return from_text(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_content(item, f"{path}[{index}]", document) for index, item in enumerate(node.value)]
    tree: Tree = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        dotted = f"{path}.{key}" if path else f"{key}"
        if key is None or key_fault(key):
            shown = "a list or a mapping" if key is None else f"'{key}'"
            remedy = "nest it: 'a.b: 1' is written as b: 1 below a:" if key else "write a name"
            document.faults.append(Fault(line, f"{shown} cannot be a key", remedy))
        elif key in tree:
            remedy = "keep one of the two"
            document.faults.append(
                Fault(line, f"{dotted} is set twice, first in line {document.lines[dotted]}", remedy)
            )
        else:
            document.lines[dotted] = line
            tree[key] = _content(value_node, dotted, document)
    return tree


def key_fault(key: object) -> bool:
    """Whether this cannot be a key: keys are text without dots, since dotted names address nested keys."""
    return not isinstance(key, str) or not key or "." in key


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the name and form that PyYAML reads


def write_document(tree: Mapping[str, Any], comments: Mapping[str, str], header: str) -> str:
    """A tree as YAML that ``read_document`` reads back to the same values, one line per leaf.

    Args:
        tree: What to write.
        comments: By dotted name, the comment to put behind a leaf.
        header: Text that goes before it as comment lines.

    >>> print(write_document({"seed": 3, "model": {"name": "no", "lr": 1e-5}}, {"seed": "--set"}, "Settings."), end="")
    # Settings.
    seed: 3  # --set
    model:
      name: no
      lr: 1e-05
    """
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    _write(tree, "", "", comments, lines)
    return "\n".join(lines) + "\n"


def _write(tree: Mapping[str, Any], path: str, indent: str, comments: Mapping[str, str], lines: list[str]) -> None:
    if not tree and not path:
        lines.append("{}")
    for key, value in tree.items():
        dotted = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            lines += [indent + line for line in _entry(key, Plain("null")).removesuffix(" null").splitlines()]
            _write(value, dotted, indent + "  ", comments, lines)
            continue
        written = _entry(key, value).splitlines()
        if dotted in comments and len(written) == 1:
            comment = "".join(char if char.isprintable() else "?" for char in comments[dotted])
            written[0] += f"  # {comment}"
        lines += [indent + line for line in written]


def _entry(key: str, value: Any) -> str:
    node = yaml.MappingNode(_MAPPING_TAG, [(_node(key), _node(value))], flow_style=False)
    return yaml.serialize(node, Dumper=_Dumper, allow_unicode=True, width=math.inf).rstrip("\n")


def _node(value: Any) -> yaml.Node:
    if isinstance(value, dict):
        pairs = [(_node(key), _node(item)) for key, item in value.items()]
        return yaml.MappingNode(_MAPPING_TAG, pairs, flow_style=True)
    if isinstance(value, list):
        return yaml.SequenceNode(_LIST_TAG, [_node(item) for item in value], flow_style=True)
    if isinstance(value, str):
        quotes = '"' if _LINE_BREAKS.search(value) else "'" if not isinstance(read_plain(value), str) else None
        return yaml.ScalarNode(_TEXT_TAG, value, style=quotes)
    return yaml.ScalarNode(_TEXT_TAG, _scalar_text(value))


def _scalar_text(value: Any) -> str:
    if is_null(value):
        return "null"
    if isinstance(value, Plain):
        return value.text
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return repr(value)
