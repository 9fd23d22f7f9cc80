"""Read the statements of the user's files: what each defines, names, imports, and does when it is imported."""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Place = tuple[str, tuple[str, ...]]  # a module, and a name in it with its attributes; no names for the module itself
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_ASKING = (ast.Call, ast.Attribute)
_FRESH = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
#: Tests of what an import of a module does not run.
_NOT_RUN = ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'")
STATEMENTS = "(statements)"  # the name for a module's statements that define nothing: an import of the module runs them
#: Names of what stores what it is given, beside those with "register" in them.
STORING = frozenset({"add", "append", "custom_op", "extend", "insert", "library", "setdefault", "update"})
_MAKING = ("__init__", "__new__", "__post_init__")
#: What finds code by a text, so that no name leads to it.
_BY_TEXT = frozenset({"__globals__", "__import__", "__subclasses__", "f_globals", "globals", "import_module"})
#: By the target's module and another one: its definitions that count when it is imported. A file read anew empties it.
ACTING: dict[tuple[str, str], list[str]] = {}


class Statement:
    """A statement at the top of a module, and what can be read in it."""

    def __init__(self, node: ast.stmt, package: Sequence[str]) -> None:
        self.node, self.package, self.is_code = node, package, isinstance(node, DEFINITIONS)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.node))

    @functools.cached_property
    def text(self) -> str:
        return ast.dump(self.node)

    @functools.cached_property
    def names(self) -> frozenset[tuple[str, ...]]:
        return frozenset(chains(self.node))

    @functools.cached_property
    def imports(self) -> dict[str, list[Place]]:
        """The places of each name that an import in it defines; a module of a star is named ``*module``."""
        found: dict[str, list[Place]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for one in node.names:  # a dotted name is no name, and is loaded too
                    for name in [one.asname] if one.asname else {one.name, one.name.partition(".")[0]}:
                        found.setdefault(name, []).append((one.name if one.asname else name, ()))
            elif isinstance(node, ast.ImportFrom):
                above = self.package[: len(self.package) + 1 - node.level] if node.level else ()
                base = ".".join([*above, *filter(None, [node.module])])
                for one in node.names:
                    name, inner = (f"*{base}", ()) if one.name == "*" else (one.asname or one.name, (one.name,))
                    found.setdefault(name, []).append((base, inner))
        return found

    @functools.cached_property
    def asked(self) -> set[str]:
        """The names that are called or have attributes read, and those that are imported under another name."""
        owners = [getattr(one, "func", getattr(one, "value", None)) for one in self.nodes if isinstance(one, _ASKING)]
        renamed = {one.name for one in self.nodes if isinstance(one, ast.alias) and one.asname not in (None, one.name)}
        return {getattr(one, "id", getattr(one, "attr", "")) for one in owners} | renamed

    @functools.cached_property
    def finds_by_text(self) -> bool:
        """True for a definition that finds code by a text when it is used."""
        words = {one.attr for one in self.nodes if isinstance(one, ast.Attribute)}
        words |= {chain[0] for chain in self.names}
        is_text = words & _BY_TEXT or {chain[:2] for chain in self.names} & {("eval",), ("exec",), ("sys", "modules")}
        return bool(is_text) and STATEMENTS not in _targets(self.node)

    @functools.cached_property
    def is_hook(self) -> bool:
        """True for a class of which code runs when another is derived from it."""
        names = {getattr(one, "name", "") for one in getattr(self.node, "body", [])}
        return not self.is_code or "__init_subclass__" in names or bool(getattr(self.node, "keywords", []))

    @functools.cached_property
    def calls(self) -> list[ast.expr]:
        """What it calls; of a class what its making calls."""
        is_class = isinstance(self.node, ast.ClassDef)
        parts = (
            [one for one in ast.iter_child_nodes(self.node) if getattr(one, "name", "") in _MAKING] if is_class else []
        )
        nodes = [one for part in parts for one in ast.walk(part)] if is_class else self.nodes
        return [one.func for one in nodes if isinstance(one, ast.Call)]

    @functools.cached_property
    def stores(self) -> bool:
        """True for code that puts something into what it did not make itself."""
        made = {
            each.id
            for one in self.nodes
            if isinstance(one, ast.Assign | ast.AnnAssign) and isinstance(one.value, _FRESH)
            for each in ast.walk(one)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
        for one in self.nodes:
            if isinstance(one, ast.Subscript | ast.Attribute) and (owner := getattr(one.value, "id", "")) not in made:
                is_stored = isinstance(one.ctx, ast.Store) and (owner != "self" or isinstance(one, ast.Subscript))
                if is_stored or getattr(one, "attr", "") in STORING:
                    return True
        return any(isinstance(one, ast.Global) for one in self.nodes)


def run_by_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement that an import runs: not what stands in functions."""
    yield node
    inside = node.body if isinstance(node, _FUNCTIONS) else [node.body] if isinstance(node, ast.Lambda) else []
    for child in ast.iter_child_nodes(node):
        if child not in inside:
            yield from run_by_import(child)


@dataclass
class Module:
    """A module's source: its statements, those that define each name, and the places of each imported name."""

    name: str
    statements: list[Statement]
    definitions: dict[str, list[Statement]] = field(default_factory=dict)
    imports: dict[str, list[Place]] = field(default_factory=dict)


@functools.cache
def read_module(name: str, path: Path, changed: int) -> Module:
    """Read a module's source, as of its last change."""
    ACTING.clear()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = _Undocumented().visit(ast.parse(path.read_bytes(), str(path)))
    module = Module(name, [Statement(node, package) for node in _statements(tree.body)])
    for one in module.statements:
        for target in _targets(one.node):
            module.definitions.setdefault(target, []).append(one)
        for imported, places in one.imports.items() if not one.is_code else ():
            module.imports.setdefault(imported, []).extend(places)
    return module


class _Undocumented(ast.NodeTransformer):
    """Takes docstrings out of a tree."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if is_text else self.generic_visit(node)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module that an import runs."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) in _NOT_RUN:
            yield from _statements(node.orelse)
        elif not isinstance(node, ast.Pass):
            yield node


def _targets(node: ast.stmt, is_inside: bool = False) -> set[str]:
    """Return the names that a statement defines; `STATEMENTS` for one that does something else."""
    if isinstance(node, DEFINITIONS):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {one.asname or one.name for one in node.names} if is_inside else set()
    if isinstance(node, ast.If | ast.Try | ast.With):
        inside = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt)]
        inside += [one for handler in getattr(node, "handlers", []) for one in handler.body]
        return set().union(*(_targets(one, True) for one in inside if not isinstance(one, ast.Pass)))
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        stored = [one for one in ast.walk(node) if isinstance(getattr(one, "ctx", None), ast.Store)]
        if not any(isinstance(one, ast.Subscript | ast.Attribute) for one in stored):
            return {one.id for one in stored if isinstance(one, ast.Name)}
    return {STATEMENTS}


def chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield the names that a tree reads, each with its attributes."""
    names, inner = [], node
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield (inner.id, *reversed(names))
    elif inner is not node:
        yield from chains(inner)
    else:
        for child in ast.iter_child_nodes(node):
            yield from chains(child)


@functools.cache
def file_of(name: str) -> Path | None:
    """Return the source file of a module, without importing it."""
    loaded = sys.modules.get(name)
    file = getattr(loaded, "__file__", None) if loaded else getattr(_spec_of(name), "origin", None)
    return Path(file) if file and file.endswith(".py") else None


@functools.cache
def _spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    parent, places = name.rpartition(".")[0], None
    if parent and (places := getattr(_spec_of(parent), "submodule_search_locations", None)) is None:
        return None
    try:
        return importlib.machinery.PathFinder.find_spec(name, places)
    except (ImportError, ValueError):
        return None
