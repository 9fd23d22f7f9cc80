"""Find the code that a stage depends on.

These are the names that its function reaches in the target's file, and other own modules whole. A file that does
something when it is imported counts whole, for all stages; so does the target's file for a stage that is no plain
function. Files are parsed and not imported. Comments, docstrings, annotations of arguments, installed packages and
memfit itself do not count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from memfit.errors import UsageError
from memfit.pipeline._contract import call_with_settings
from memfit.pipeline._manifest import fingerprint_files
from memfit.units import list_some

_Place = tuple[str, tuple[str, ...]]  # a module, and a name in it with its attributes; no names for the module itself
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_NAMING = (*_IMPORTS, ast.Pass, getattr(ast, "TypeAlias", ast.Pass))
_BLOCKS = (ast.stmt, ast.ExceptHandler)
#: Tests of what no import runs.
_NOT_RUN = ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'")


def code_of(
    function: Callable[..., Any], target: str, params: type | None = None, settings: Any = None
) -> tuple[dict[str, str], set[str]]:
    """Return what a function depends on, as digests by name, and the modules that were read.

    A setting written as module:name counts an own module whole.
    A name is that of a definition (``module:name``), or of a module that counts whole (``module``). Of the classes of
    the params the fields do not count, since the key of a stage holds their values, unless its code names the class.
    """
    reader = _Reader(target.partition(":")[0], list(_classes(params)) if params else [])
    if isinstance(function, functools.partial) and function.func is call_with_settings:
        function = function.args[0]
    reader.read(function)
    for module in re.findall(r'"([\w.]+):\w+"', json.dumps(settings)):
        reader.count(module)
    found = {
        name: hashlib.sha256("\n".join(map(_text, nodes)).encode()).hexdigest()
        for name, nodes in reader.counted.items()
        if ":" not in name or name.partition(":")[0] not in reader.counted  # else it is a part of what counts whole
    }
    return dict(sorted(found.items())), {name for name, one in reader.modules.items() if one is not None}


def code_of_command(words: Iterable[str]) -> dict[str, str]:
    return {word: fingerprint_files(word) for word in words if "{" not in word and Path(word).is_file()}


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say what differs between two readings.

    >>> changed_code({"train:fit": "a", "train:old": "b"}, {"train:fit": "c"})
    'train:fit changed, train:old is gone'
    """
    changes = [f"{name} {'changed' if name in before else 'is new'}" for name in now if now[name] != before.get(name)]
    changes += [f"{name} is gone" for name in before if name not in now]
    return list_some(changes, 3)


def check_code(stage: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    if changed := changed_code(before, now):
        raise UsageError(
            f"the code of stage {stage} is not what it was when this run started: {changed}.",
            rule="all stages of a run use the code that it began with.",
            remedy="give the same command again: it runs the stages that use this code",
        )


def own_modules(package: str) -> dict[str, Path]:
    """Return the user's loaded modules, with their files."""
    found = {}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")  # torch.ops names a file that does not exist
        if path.suffix == ".py" and path.is_absolute() and name != "__main__" and _is_own(name, path, package):
            found[name] = path
    return found


def _is_own(name: str, path: Path, package: str) -> bool:
    top = name.partition(".")[0]
    if top == "memfit" or top in sys.stdlib_module_names:
        return False
    return top == package or not {"site-packages", "dist-packages"} & set(path.parts)


def _classes(params: type) -> Iterator[type]:
    """Yield the class of the params, those of its fields and theirs, and all that they derive from."""
    kinds: list[Any] = [params]
    for place, one in enumerate(kinds):  # it grows as it is read
        if isinstance(one, type) and one not in kinds[:place]:  # a model may hold itself
            yield from one.__mro__
            kinds += [info.annotation for info in getattr(one, "model_fields", {}).values()]
        kinds += get_args(one)


class _Module(NamedTuple):
    """A module's source: its statements, those that define each name, and the places of each imported name."""

    name: str
    statements: list[ast.stmt]
    definitions: dict[str, list[ast.stmt]]
    imports: dict[str, list[_Place]]


class _Reader:
    """Follows names from the target's module through the user's files."""

    def __init__(self, home: str, classes: Sequence[type]) -> None:
        self.modules: dict[str, _Module | None] = {}
        self.counted: dict[str, list[ast.stmt]] = {}
        self._home, self._classes = home, classes
        self._in_parts = {home, *(one.__module__ for one in classes)}  # modules whose names count alone
        self._imported: set[str] = set()
        self._seen: set[_Place] = set()

    def read(self, function: Any) -> None:
        """Count what an import of the target does, a stage's function, and the params without their fields."""
        self._import(self._home)
        places = [(self._home, ""), (type(function).__module__, "")]  # of a partial, an object, a method
        if isinstance(function, types.FunctionType):
            made = str(function.__globals__.get("__name__")), function.__code__.co_qualname
            # A wrapper has the name of what it wraps.
            places = [(str(function.__module__), function.__qualname__), made]
            if "<locals>" in made[1] and self._load(made[0]) is not None:  # what another function made
                places.append((self._home, ""))
        for name, defined in places:
            module, top = self._load(name), defined.partition(".")[0]
            self.count(name, (top,) if module is not None and top in module.definitions else ())
        for one in self._classes:
            if (module := self._load(one.__module__)) is not None:
                for node in module.definitions.get(one.__qualname__, []):
                    if isinstance(node, ast.ClassDef):
                        self._take(module, f"{module.name}:{one.__name__} without fields", [_without_fields(node, one)])

    def count(self, name: str, chain: tuple[str, ...] = ()) -> None:
        """Count what a dotted name in a module stands for: a definition of the target's, or another module whole."""
        module, chain = self._found(name, chain)
        if module is None or (module.name, chain) in self._seen:
            return
        self._seen.add((module.name, chain))
        self._import(module.name)
        for bound in chain[:1] if chain else module.imports:
            for target, inner in module.imports.get(bound, []):
                self.count(target, (*inner, *chain[1:]))
        if chain and module.name in self._in_parts and chain[0] in module.definitions:
            self._take(module, f"{module.name}:{chain[0]}", module.definitions[chain[0]])
        else:
            self._take(module, module.name, module.statements)

    def _take(self, module: _Module, key: str, statements: list[ast.stmt]) -> None:
        """Count statements of a module, and all that they name."""
        if key in self.counted or module.name in self.counted:
            return
        self.counted[key] = statements
        for node in statements:
            own = _imports_in(node)
            for target, inner in (place for places in own.values() for place in places):
                self._import(".".join((target, *inner)))
            for used in _names_in(node):
                for target, inner in own.get(used[0], []):
                    self.count(target, (*inner, *used[1:]))
                if used[0] in module.definitions:
                    self.count(module.name, used)

    def _import(self, name: str) -> None:
        """Count the modules whole of which an import does something; also its parents and what it imports."""
        if name in self._imported:
            return
        self._imported.add(name)
        if parent := name.rpartition(".")[0]:
            self._import(parent)
        if (module := self._load(name)) is not None:
            for bound, places in module.imports.items():
                for target, inner in places:
                    self._import(".".join((target, *inner)))
                    if bound == "*":  # names that nobody lists
                        self.count(target)
            if any(self._acts(module, one) for one in module.statements):
                self.count(name)

    def _acts(self, module: _Module, node: ast.AST) -> bool:
        """Return True if an import that runs a statement does something: more than import, define or name a value."""
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            return any(self._acts(module, one) for one in ast.iter_child_nodes(node) if isinstance(one, _BLOCKS))
        if isinstance(node, _DEFINITIONS):
            makers = [*node.decorator_list, *(one.value for one in getattr(node, "keywords", ()))]  # a metaclass
            if any(self._defined(module, one) for one in makers):
                return True
            bases = [found for base in getattr(node, "bases", ()) for found in self._defined(module, base)]
            return (isinstance(node, ast.ClassDef) and any(self._acts(module, one) for one in node.body)) or any(
                "__init_subclass__" in _text(one) or self._acts(owner, one)
                for owner, one in bases
                if owner is not module or one.lineno < node.lineno  # a class may take the name of its base
            )
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return any(isinstance(one, ast.Subscript | ast.Attribute) for each in targets for one in ast.walk(each))
        return not isinstance(node, _NAMING)

    def _defined(self, module: _Module, node: ast.expr) -> list[tuple[_Module, ast.stmt]]:
        """Return the user's statements that define the name with which an expression begins, each with its module."""
        places, found = [(module.name, next(_chains(node), ()))], list[tuple[_Module, ast.stmt]]()
        for place in places:  # it grows as it is read
            owner, chain = self._found(*place)
            if owner is not None and chain:
                nodes = owner.definitions.get(chain[0], [])
                found += [(owner, one) for one in nodes if not isinstance(one, _IMPORTS)]
                inner = [(target, (*names, *chain[1:])) for target, names in owner.imports.get(chain[0], [])]
                inner += [(target, chain) for target, _ in owner.imports.get("*", [])]
                places += [one for one in inner if one not in places]
        return found

    def _found(self, name: str, chain: tuple[str, ...]) -> tuple[_Module | None, tuple[str, ...]]:
        """Return the module that a dotted name in a module leads to, and what is left of the name."""
        while chain and self._load(f"{name}.{chain[0]}") is not None:
            name, chain = f"{name}.{chain[0]}", chain[1:]
        return self._load(name), chain

    def _load(self, name: str) -> _Module | None:
        if name not in self.modules:
            path = _file_of(name)
            is_own = path is not None and _is_own(name, path, self._home.partition(".")[0])
            self.modules[name] = _read(name, path, path.stat().st_mtime_ns) if path is not None and is_own else None
        return self.modules[name]


def _without_fields(node: ast.ClassDef, model: type) -> ast.ClassDef:
    """Return a class of the params without fields whose values the key holds, and without bases: they count too."""
    known = {name for name, one in getattr(model, "model_fields", {}).items() if not one.exclude}
    body = [one for one in node.body if getattr(getattr(one, "target", None), "id", "") not in known]
    return ast.ClassDef(**{name: getattr(node, name) for name in node._fields} | {"body": body, "bases": []})


@functools.cache
def _read(name: str, path: Path, changed: int) -> _Module:
    """Read a module's source, as of its last change."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = _Plain(package).visit(ast.parse(path.read_bytes(), str(path)))
    module = _Module(name, list(_statements(tree.body)), {}, {})
    for node in module.statements:
        for target in _targets(node):
            module.definitions.setdefault(target, []).append(node)
        for bound, places in _imports_in(node).items() if not isinstance(node, _DEFINITIONS) else ():
            module.imports.setdefault(bound, []).extend(places)
    return module


class _Plain(ast.NodeTransformer):
    """Takes out what no call runs, docstrings and annotations of arguments; names the modules of imports whole."""

    def __init__(self, package: Sequence[str]) -> None:
        self._package = package

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return ast.Pass() if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if not node.decorator_list:  # which may read them
            node.returns = None
            for one in ast.walk(node.args):
                if isinstance(one, ast.arg):
                    one.annotation = None
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        above = self._package[: len(self._package) + 1 - node.level] if node.level else ()
        return ast.ImportFrom(".".join([*above, *filter(None, [node.module])]), node.names, 0)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module that an import runs; each import names one thing."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) in _NOT_RUN:
            yield from _statements(node.orelse)
        elif isinstance(node, ast.Import):
            yield from (ast.Import([one]) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (ast.ImportFrom(node.module, [one], 0) for one in node.names)
        elif not isinstance(node, ast.Pass):
            yield node


def _targets(node: ast.stmt) -> set[str]:
    if isinstance(node, _DEFINITIONS):
        return {node.name}
    stored = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return stored | {one.name for one in ast.walk(node) if isinstance(one, _DEFINITIONS)} | _imports_in(node).keys()


_text = functools.cache(ast.dump)
_names_in = functools.cache(lambda node: frozenset(_chains(node)))


@functools.cache
def _imports_in(node: ast.stmt) -> dict[str, list[_Place]]:
    found: dict[str, list[_Place]] = {}
    for one in ast.walk(node):
        if isinstance(one, ast.Import):
            for alias in one.names:  # a dotted name is no name, and is loaded too
                for name in [alias.asname] if alias.asname else {alias.name, alias.name.partition(".")[0]}:
                    found.setdefault(name, []).append((alias.name if alias.asname else name, ()))
        elif isinstance(one, ast.ImportFrom):
            for alias in one.names:
                inner = () if alias.name == "*" else (alias.name,)
                found.setdefault(alias.asname or alias.name, []).append((str(one.module), inner))
    return found


def _chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield the names that a tree reads, each with its attributes."""
    names, inner = [], node
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield (inner.id, *reversed(names))
    for child in ast.iter_child_nodes(inner):
        yield from _chains(child)


@functools.cache
def _file_of(name: str) -> Path | None:
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
