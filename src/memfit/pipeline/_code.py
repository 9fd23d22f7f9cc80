"""Find the code that a stage depends on, by name: the user's functions, classes and constants that it uses.

Files are parsed and not imported. Comments, docstrings, installed packages and memfit itself do not count.
"""

from __future__ import annotations

import ast
import contextlib
import copyreg
import functools
import hashlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from memfit.errors import UsageError
from memfit.pipeline._manifest import digest, fingerprint_files

#: A module, and a name in it with its attributes; no names for the module itself.
_Place = tuple[str, tuple[str, ...]]
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
#: The name for a module's statements that define nothing: an import of the module runs them.
_STATEMENTS = "(statements)"
#: The methods by which a decorator stores a function.
_STORING = frozenset({"add", "append", "insert", "register", "setdefault", "update"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def code_of(
    function: Callable[..., Any],
    target: str,
    params: type[BaseModel] | None = None,
    fields: Sequence[str] | None = None,
) -> tuple[dict[str, str], set[str]]:
    """Return what a function depends on: a digest by ``module:name``, and the modules that were read.

    The values that a function is bound to count, and so does what an import of the target's module runs. Of the params
    the methods and constants count, but no fields; of nested models only those in ``fields`` (None for all).
    """
    module = target.partition(":")[0]
    models = list(_models(params, fields)) if params else []
    reader = _Reader(module.partition(".")[0], {(one.__module__, one.__qualname__): one for one in models})
    reader.run(module)
    values = [reader.form(one) for one in (function, *models)]
    if any(not isinstance(one, str) for one in values):
        reader.found["bound values"] = digest(values)
    return dict(sorted(reader.found.items())), {name for name, one in reader.modules.items() if one is not None}


def code_of_command(words: Sequence[str], folder: Path) -> dict[str, str]:
    """Return digests of the files that a command names."""
    named = {word: folder / word for word in words if "{" not in word}
    return {word: fingerprint_files(path) for word, path in named.items() if path.is_file()}


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say what differs between two readings; empty if nothing does.

    >>> changed_code({"train:fit": "a", "train:old": "b"}, {"train:fit": "c"})
    'train:fit changed, train:old is gone'
    """
    changes = [f"{name} changed" for name in now if name in before and before[name] != now[name]]
    changes += [f"{name} is new" for name in now if name not in before]
    changes += [f"{name} is gone" for name in before if name not in now]
    return ", ".join(changes[:3]) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")


def own_modules(package: str) -> dict[str, Path]:
    """Return the user's modules that are loaded now, with their files."""
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


def _models(params: type[BaseModel], fields: Sequence[str] | None) -> Iterator[type[BaseModel]]:
    """Yield the models of the params, and of the sections in some of their fields."""
    yield from (base for base in params.__mro__ if issubclass(base, BaseModel) and base is not BaseModel)
    for name, info in params.model_fields.items():
        if fields is None or name in fields:
            for model in _in_annotation(info.annotation):
                yield from _models(model, None)


def _in_annotation(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _in_annotation(one)


class _Reader:
    """Follows names from definition to definition through the user's files."""

    def __init__(self, package: str, models: Mapping[tuple[str, str], type[BaseModel]]) -> None:
        self.found: dict[str, str] = {}
        self.modules: dict[str, _Module | None] = {}
        self._package, self._models = package, models
        self._run: set[str] = set()
        self._whole: set[str] = set()
        self._open: list[Any] = []

    def form(self, value: Any) -> Any:
        """Return a value as plain JSON, the same in every process; code in it becomes its name, and is followed."""
        if type(value) in _PLAIN:
            return repr(value)
        if any(value is one for one in self._open):
            return "(itself)"
        self._open.append(value)
        try:
            if isinstance(value, types.ModuleType):
                self.follow(value.__name__, ())
                return value.__name__
            if isinstance(value, types.FunctionType | type):
                return self._code(value)
            if type(value) in (list, tuple):
                return [type(value).__name__, *map(self.form, value)]
            if type(value) is dict:
                return ["dict", *([self.form(name), self.form(one)] for name, one in value.items())]
            if type(value) in (set, frozenset):
                return [type(value).__name__, *sorted(map(self.form, value), key=digest)]
            return self._object(value)
        finally:
            self._open.pop()

    def _code(self, value: Any) -> Any:
        module, name = value.__module__, value.__qualname__
        top = name.partition(".")[0]
        is_known = self._find(module, (top,)) is not None  # a lambda has no name of its own
        self.follow(module, (top,) if is_known else ())
        held = []
        for cell in getattr(value, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a name without a value yet
                held.append(self.form(cell.cell_contents))
        if "<locals>" in name and isinstance(value, types.FunctionType):
            held += map(self.form, [value.__defaults__, value.__kwdefaults__])
        return [f"{module}:{name}", *held] if held else f"{module}:{name}"

    def _object(self, value: Any) -> Any:
        """Return an object's class and content, as pickle reads them: of a partial, a method, an array."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            parts = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception as error:  # pickle's own, or what a class of the user's raises
            raise UsageError(
                f"a stage's function is bound to a {type(value).__name__}, which has no content to compare.",
                rule="what a function is bound to (arguments, attributes, outer variables) decides if it runs again.",
                remedy=f"bind plain values, and make the {type(value).__name__} inside of the function",
            ) from error
        if isinstance(parts, str):  # the name of a global
            module = getattr(value, "__module__", None) or type(value).__module__
            self.follow(module, (parts.partition(".")[0],))
            return f"{module}:{parts}"
        iterators = [[*one] if one is not None else None for one in parts[3:5]]
        return ["object", *map(self.form, [*parts[:3], *iterators])]

    def follow(self, name: str, chain: tuple[str, ...]) -> None:
        """Count the definition of a dotted name in a module; without a name, the whole module."""
        found = self._find(name, chain)
        if found is None:
            return
        module, chain = found
        self.run(module.name)
        if chain:
            self._take(module, chain[0])
        elif module.name not in self._whole:
            self._whole.add(module.name)
            for one in module.definitions:
                self._take(module, one)
            for target, inner in module.imports.values():
                self.follow(target, inner)

    def run(self, name: str) -> None:
        """Count what an import of a module runs: its statements, its imports, and what decorators register."""
        parts = name.split(".")
        for number in range(1, len(parts) + 1):
            module = self._load(".".join(parts[:number]))
            if module is None or module.name in self._run:
                continue
            self._run.add(module.name)
            self._take(module, _STATEMENTS)
            for target, inner in module.imports.values():
                self.run(".".join((target, *inner)))
            for one, nodes in module.definitions.items():
                decorators = [each for node in nodes if isinstance(node, _DEFINITIONS) for each in node.decorator_list]
                if any(self._registers(module.name, chain) for each in decorators for chain in _chains(each)):
                    self._take(module, one)

    def _registers(self, name: str, chain: tuple[str, ...]) -> bool:
        """Return whether a decorator stores what it decorates: a method of the user's object, or code that stores."""
        module, found = self._find(name, chain) or (None, ())
        if module is None or not found:
            return False
        nodes = module.definitions[found[0]]
        if len(found) > 1 and not isinstance(nodes[0], _DEFINITIONS):
            return True
        return any(
            (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
            or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _STORING)
            for top in nodes
            for node in ast.walk(top)
        )

    def _load(self, name: str) -> _Module | None:
        """Read a module of the user's; None for any other."""
        if name not in self.modules:
            path = _file_of(name)
            is_own = path is not None and _is_own(name, path, self._package)
            self.modules[name] = _read(name, path, path.stat().st_mtime_ns) if path is not None and is_own else None
        return self.modules[name]

    def _find(
        self, name: str, chain: tuple[str, ...], seen: frozenset[_Place] = frozenset()
    ) -> tuple[_Module, tuple[str, ...]] | None:
        """Return the module that defines a dotted name, and the name in it with its attributes."""
        module = self._load(name)
        if (name, chain) in seen:  # two modules import it from each other
            return None
        if module is not None and (not chain or chain[0] in module.definitions):
            return module, chain
        seen |= {(name, chain)}
        if module is not None and chain[0] in module.imports:
            target, inner = module.imports[chain[0]]
            return self._find(target, (*inner, *chain[1:]), seen)
        if chain and self._load(f"{name}.{chain[0]}") is not None:
            return self._find(f"{name}.{chain[0]}", chain[1:], seen)
        stars = [target for key, (target, _) in module.imports.items() if key.startswith("*")] if module else []
        return next(filter(None, (self._find(star, chain, seen) for star in stars)), None)

    def _take(self, module: _Module, name: str) -> None:
        """Count a definition of a module, and all that it names."""
        place, nodes = f"{module.name}:{name}", module.definitions.get(name, [])
        if not nodes or place in self.found:
            return
        if model := self._models.get((module.name, name)):
            nodes = [_without_fields(node, model) if isinstance(node, ast.ClassDef) else node for node in nodes]
        self.found[place] = hashlib.sha256("\n".join(map(ast.dump, nodes)).encode()).hexdigest()
        inside: dict[str, _Place] = {}
        for node in (one for top in nodes for one in ast.walk(top) if isinstance(one, _IMPORTS)):
            inside |= _imported(node, module)
        for target, inner in inside.values():
            self.run(".".join((target, *inner)))
        for chain in {chain for top in nodes for chain in _chains(top)}:
            target, inner = inside.get(chain[0], (module.name, chain[:1]))
            self.follow(target, (*inner, *chain[1:]))


@dataclass
class _Module:
    """A module's source: the statements that define each name, and the place of each imported name."""

    name: str
    is_package: bool
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, _Place] = field(default_factory=dict)


@functools.cache
def _read(name: str, path: Path, changed: int) -> _Module:
    """Read a module's source, as of its last change."""
    module = _Module(name, path.name == "__init__.py")
    for node in _statements(_Undocumented().visit(ast.parse(path.read_bytes(), str(path))).body):
        if isinstance(node, _IMPORTS):
            module.imports |= _imported(node, module)
        else:
            for target in _targets(node):
                module.definitions.setdefault(target, []).append(node)
    return module


def _imported(node: ast.Import | ast.ImportFrom, module: _Module) -> dict[str, _Place]:
    """Return the place of each name that an import defines; a module of a star import is named ``*module``."""
    if isinstance(node, ast.Import):
        names = {one.asname or one.name: one.name for one in node.names}  # a dotted name is no name, and is loaded too
        names |= {one.name.partition(".")[0]: one.name.partition(".")[0] for one in node.names if not one.asname}
        return {name: (target, ()) for name, target in names.items()}
    parts = module.name.split(".") if node.level else []
    parts = parts[: len(parts) - node.level + module.is_package]
    base = ".".join([*parts, *filter(None, [node.module])])
    if node.names[0].name == "*":
        return {f"*{base}": (base, ())}
    return {one.asname or one.name: (base, (one.name,)) for one in node.names}


class _Undocumented(ast.NodeTransformer):
    """Takes docstrings out of a tree."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if is_text else self.generic_visit(node)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, and the imports inside of them."""
    for node in body:
        names = {name for chain in _chains(node.test) for name in chain} if isinstance(node, ast.If) else set()
        if isinstance(node, ast.If) and names & {"TYPE_CHECKING", "__name__"}:  # an import does not run its body
            yield from _statements(node.orelse)
        elif not isinstance(node, ast.Pass):
            if not isinstance(node, _DEFINITIONS):
                yield from (one for one in ast.walk(node) if isinstance(one, _IMPORTS) and one is not node)
            yield node


def _targets(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines; `_STATEMENTS` for one that does something else."""
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        stored = [one for one in ast.walk(node) if isinstance(getattr(one, "ctx", None), ast.Store)]
        if not any(isinstance(one, ast.Subscript | ast.Attribute) for one in stored):
            return [one.id for one in stored if isinstance(one, ast.Name)]
    return [_STATEMENTS]


def _without_fields(node: ast.ClassDef, model: type[BaseModel]) -> ast.ClassDef:
    """Return a model of settings without its fields: the key holds their values."""
    parts = {name: getattr(node, name) for name in node._fields}
    parts["body"] = [
        one
        for one in node.body
        if not (isinstance(one, ast.AnnAssign) and getattr(one.target, "id", "") in model.model_fields)
    ]
    return ast.ClassDef(**parts)


def _chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield the names that a tree reads, each with its attributes."""
    names, inner = [], node
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield (inner.id, *reversed(names))
    elif inner is not node:
        yield from _chains(inner)
    else:
        for child in ast.iter_child_nodes(node):
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
