"""Which code a stage depends on, by name: the user's functions, classes and constants that it uses, as syntax trees.

Files are read and never imported for this. Comments and docstrings do not count; installed packages and memfit itself
are left out.
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

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
#: The name under which a module's statements count that are no definitions: importing the module runs them.
_STATEMENTS = "(statements)"
#: What a decorator calls that keeps the function somewhere.
_KEEPERS = frozenset({"add", "append", "insert", "register", "setdefault", "update"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def code_of(
    function: Callable[..., Any],
    target: str,
    params: type[BaseModel] | None = None,
    fields: Sequence[str] | None = None,
) -> tuple[dict[str, str], set[str]]:
    """What a function depends on: a digest by ``module:name``, and the names of the modules that were looked at.

    Args:
        function: A function, or anything else that can be called. What it is bound to counts by value.
        target: The workload, as ``module:name``: what importing that module runs counts too.
        params: The model of its settings: its methods and constants count, and its fields do not.
        fields: Those of the fields whose own models count too; None for all.

    Raises:
        UsageError: If it is bound to something that has no content to compare, such as an open file.
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
    """The files that a command names, by their content."""
    named = {word: folder / word for word in words if "{" not in word}
    return {word: fingerprint_files(path) for word, path in named.items() if path.is_file()}


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between two readings, in words; empty where nothing does.

    >>> changed_code({"train:fit": "a", "train:old": "b"}, {"train:fit": "c"})
    'train:fit changed, train:old is gone'
    """
    told = [f"{name} changed" for name in now if name in before and before[name] != now[name]]
    told += [f"{name} is new" for name in now if name not in before]
    told += [f"{name} is gone" for name in before if name not in now]
    return ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")


def own_modules(package: str) -> dict[str, Path]:
    """The user's modules that are loaded now, with their files."""
    found = {}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")  # torch.ops calls itself a file that is not there
        if path.suffix == ".py" and path.is_absolute() and name != "__main__" and _is_own(name, path, package):
            found[name] = path
    return found


def _is_own(name: str, path: Path, package: str) -> bool:
    top = name.partition(".")[0]
    if top == "memfit" or top in sys.stdlib_module_names:
        return False
    return top == package or not {"site-packages", "dist-packages"} & set(path.parts)


def _models(params: type[BaseModel], fields: Sequence[str] | None) -> Iterator[type[BaseModel]]:
    """The models of settings: of the params, and of the sections in those fields."""
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
        """A value as plain JSON, the same in every process; code in it is followed, and stands there by its name."""
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
            with contextlib.suppress(ValueError):  # a name that was not given a value yet
                held.append(self.form(cell.cell_contents))
        if "<locals>" in name and isinstance(value, types.FunctionType):
            held += map(self.form, [value.__defaults__, value.__kwdefaults__])
        return [f"{module}:{name}", *held] if held else f"{module}:{name}"

    def _object(self, value: Any) -> Any:
        """An object by its class and content, as pickle takes it apart; such as a partial, a method, an array."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            parts = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception as error:  # pickle's own, or what a class of the user's raises
            raise UsageError(
                f"a stage's function is bound to a {type(value).__name__}, which has no content to compare.",
                rule="what a function is bound to (arguments, attributes, outer variables) decides if it runs again.",
                remedy=f"bind plain values, and make the {type(value).__name__} inside of the function",
            ) from error
        if isinstance(parts, str):  # it stands at the top of its module
            module = getattr(value, "__module__", None) or type(value).__module__
            self.follow(module, (parts.partition(".")[0],))
            return f"{module}:{parts}"
        iterators = [[*one] if one is not None else None for one in parts[3:5]]
        return ["object", *map(self.form, [*parts[:3], *iterators])]

    def follow(self, name: str, chain: tuple[str, ...]) -> None:
        """Count what a dotted name means at the top of a module; without a name, all of the module."""
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
            for target, inner in [*module.imports.values(), *((star, ()) for star in module.stars)]:
                self.follow(target, inner)

    def run(self, name: str) -> None:
        """Count what importing a module runs: its statements, those of what it imports, and what is registered so."""
        parts = name.split(".")
        for number in range(1, len(parts) + 1):
            module = self._load(".".join(parts[:number]))
            if module is None or module.name in self._run:
                continue
            self._run.add(module.name)
            self._take(module, _STATEMENTS)
            for target, inner in module.imports.values():
                self.run(".".join((target, *inner)))
            for star in module.stars:
                self.run(star)
            for one, nodes in module.definitions.items():
                decorators = [chain for node in nodes for each in _decorators(node) for chain in _chains(each)]
                if any(self._registers(module.name, chain) for chain in decorators):
                    self._take(module, one)

    def _registers(self, name: str, chain: tuple[str, ...]) -> bool:
        """Whether a decorator keeps what it decorates: it is a method of the user's object, or stores something."""
        module, found = self._find(name, chain) or (None, ())
        if module is None or not found:
            return False
        nodes = module.definitions[found[0]]
        if len(found) > 1 and not isinstance(nodes[0], _DEFINITIONS):
            return True
        return any(_stores(node) for top in nodes for node in ast.walk(top))

    def _load(self, name: str) -> _Module | None:
        """A module of the user's, read; None for any other."""
        if name not in self.modules:
            path = _file_of(name)
            is_own = path is not None and _is_own(name, path, self._package)
            self.modules[name] = _read(name, path, path.stat().st_mtime_ns) if path is not None and is_own else None
        return self.modules[name]

    def _find(
        self, name: str, chain: tuple[str, ...], seen: frozenset[Any] = frozenset()
    ) -> tuple[_Module, tuple[str, ...]] | None:
        """Where a dotted name is defined: the module, and the name in it with its attributes; empty for a module."""
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
        found = (self._find(star, chain, seen) for star in (module.stars if module else ()))
        return next(filter(None, found), None)

    def _take(self, module: _Module, name: str) -> None:
        """Count a definition of a module, and all that it names."""
        place, nodes = f"{module.name}:{name}", module.definitions.get(name, [])
        if not nodes or place in self.found:
            return
        if model := self._models.get((module.name, name)):
            nodes = [_without_fields(node, model) for node in nodes]
        self.found[place] = hashlib.sha256("\n".join(map(ast.dump, nodes)).encode()).hexdigest()
        inside: dict[str, tuple[str, tuple[str, ...]]] = {}
        for node in (one for top in nodes for one in ast.walk(top) if isinstance(one, _IMPORTS)):
            inside |= _imported(node, module)
        for target, inner in inside.values():
            self.run(".".join((target, *inner)))
        for chain in {chain for top in nodes for chain in _chains(top)}:
            target, inner = inside.get(chain[0], (module.name, chain[:1]))
            self.follow(target, (*inner, *chain[1:]))


@dataclass
class _Module:
    """A module's source by its top-level names.

    Attributes:
        name: Its dotted name.
        is_package: Whether its file is an ``__init__.py``.
        definitions: The statements that define each name.
        imports: Each imported name's module, and the name in that; none for a module itself.
        stars: The modules of which it imports all names.
    """

    name: str
    is_package: bool
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)


@functools.cache
def _read(name: str, path: Path, changed: int) -> _Module:
    """Read a module's source, as it was changed last."""
    module = _Module(name, path.name == "__init__.py")
    for node in _statements(_Undocumented().visit(ast.parse(path.read_bytes(), str(path))).body):
        if isinstance(node, _IMPORTS):
            found = _imported(node, module)
            if star := found.pop("*", None):
                module.stars.append(star[0])
            module.imports |= found
            continue
        for target in _targets(node):
            module.definitions.setdefault(target, []).append(node)
    return module


def _imported(node: ast.Import | ast.ImportFrom, module: _Module) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The names that an import in a module gives, as in ``_Module.imports``."""
    if isinstance(node, ast.Import):
        names = {one.asname or one.name: one.name for one in node.names}  # a dotted name is no name, and is loaded too
        names |= {one.name.partition(".")[0]: one.name.partition(".")[0] for one in node.names if not one.asname}
        return {name: (target, ()) for name, target in names.items()}
    parts = module.name.split(".") if node.level else []
    parts = parts[: len(parts) - node.level + module.is_package]
    base = ".".join([*parts, *filter(None, [node.module])])
    return {one.asname or one.name: (base, (one.name,)) for one in node.names}


class _Undocumented(ast.NodeTransformer):
    """Takes docstrings out of a tree."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if is_text else self.generic_visit(node)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, the imports in others among them."""
    for node in body:
        names = {name for chain in _chains(node.test) for name in chain} if isinstance(node, ast.If) else set()
        if isinstance(node, ast.If) and names & {"TYPE_CHECKING", "__name__"}:  # no part of the module that is imported
            yield from _statements(node.orelse)
        elif not isinstance(node, ast.Pass):
            if not isinstance(node, _DEFINITIONS):
                yield from (one for one in ast.walk(node) if isinstance(one, _IMPORTS) and one is not node)
            yield node


def _targets(node: ast.stmt) -> list[str]:
    """The names that a statement defines; `_STATEMENTS` for one that does something else."""
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        stored = [one for one in ast.walk(node) if isinstance(getattr(one, "ctx", None), ast.Store)]
        if not any(isinstance(one, ast.Subscript | ast.Attribute) for one in stored):
            return [one.id for one in stored if isinstance(one, ast.Name)]
    return [_STATEMENTS]


def _decorators(node: ast.stmt) -> list[ast.expr]:
    return node.decorator_list if isinstance(node, _DEFINITIONS) else []


def _stores(node: ast.AST) -> bool:
    """Whether a part of a function puts something into a mapping or list, or into an object that does."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in _KEEPERS
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)


def _without_fields(node: ast.stmt, model: type[BaseModel]) -> ast.stmt:
    """A model of settings without its fields: their values are in the key."""
    if not isinstance(node, ast.ClassDef):
        return node
    kept = [
        one
        for one in node.body
        if not (isinstance(one, ast.AnnAssign) and getattr(one.target, "id", "") in model.model_fields)
    ]
    parts = {name: getattr(node, name) for name in node._fields} | {"body": kept}
    return ast.ClassDef(**parts)


def _chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """The names that a tree reads, each with the attributes that are taken of it."""
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
    """Where a module's source lies, without importing it."""
    loaded, spec = sys.modules.get(name), None
    if loaded is None:
        spec = _spec_of(name)
    file = spec.origin if spec else getattr(loaded, "__file__", None)
    return Path(file) if file and file.endswith(".py") else None


@functools.cache
def _spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    parent, places = name.rpartition(".")[0], None
    if parent:
        above = _spec_of(parent)
        places = above.submodule_search_locations if above else None
        if places is None:  # no package
            return None
    try:
        return importlib.machinery.PathFinder.find_spec(name, places)
    except (ImportError, ValueError):
        return None
