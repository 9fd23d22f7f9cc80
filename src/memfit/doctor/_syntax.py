"""Small readings of a syntax tree: constants, options, dotted names; and what a script is given from outside."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_TYPES: dict[str, Callable[[str], object]] = {"int": int, "float": float}
#: What a shell puts something else for: a word that holds it is not known here.
EXPANDED = frozenset("$`")


@dataclass(frozen=True)
class Option:
    """An option that argparse is told of.

    Attributes:
        flags: How it is written.
        default: The expression of its default, or None.
        type_name: Its type, as it is written; empty when it has none or takes another number of words than one.
        line: Where it is told.
    """

    flags: Sequence[str]
    default: ast.expr | None
    type_name: str
    line: int

    def refused(self, value: str | None) -> str:
        """The option with its value, when argparse takes no such value; else empty.

        >>> option = Option(["--workers"], None, "int", 3)
        >>> option.refused("abc"), option.refused("4"), option.refused("$N"), option.refused(None)
        ('--workers=abc', '', '', '')
        """
        if value is None or self.type_name not in _TYPES or EXPANDED & set(value):
            return ""
        try:
            _TYPES[self.type_name](value)
        except ValueError:
            return f"{self.flags[-1]}={value}"
        return ""


@dataclass(frozen=True)
class Outside:
    """What a script is given from outside."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    num_cpus: int | None

    def option(self, flags: Sequence[str]) -> str | None:
        """The value of an option on the command line."""
        for at, word in enumerate(self.arguments):
            name, equals, value = word.partition("=")
            if name in flags:
                return value if equals else next(iter(self.arguments[at + 1 :]), None)
        return None


def constants_of(tree: ast.Module) -> dict[str, ast.expr]:
    """What each name is set to, of those that are set once and to no other name."""
    found: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)) and isinstance(node.target, ast.Name):
            found.setdefault(node.target.id, []).append(node.value if isinstance(node, ast.AnnAssign) else None)
    single = {name: values[0] for name, values in found.items() if len(values) == 1}
    return {name: value for name, value in single.items() if value is not None and not isinstance(value, ast.Name)}


def options_of(tree: ast.Module) -> dict[str, Option]:
    """The options that argparse is told of, by the attribute's name."""
    found: dict[str, Option] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "add_argument":
            flags = [text for text in map(text_of, node.args) if text and text.startswith("-")]
            given = {one.arg: one.value for one in node.keywords if one.arg}
            long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
            dest = text_of(given["dest"]) if "dest" in given else long.lstrip("-").replace("-", "_")
            kind = dotted(given["type"]) if "type" in given and not {"nargs", "action"} & set(given) else ""
            if dest:
                twice = dest in found and found[dest].type_name != kind  # as two subcommands may have it
                found[dest] = Option(flags, given.get("default"), "" if twice else kind, node.lineno)
    return found


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute, calls within it left out; what stands before is left out where it has no name."""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return ""


def text_of(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
