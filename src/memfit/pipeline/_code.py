"""Find the code that a stage depends on.

These are the names that its function reaches in the target's file, and other own modules whole, with those that they
import. A file that does something when it is imported counts whole, for all stages. Files are parsed and not imported.
Comments, docstrings, installed packages and memfit itself do not count.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from memfit.errors import UsageError
from memfit.pipeline._manifest import digest, fingerprint_files
from memfit.units import list_some

_Place = tuple[str, tuple[str, ...]]  # a module, and a name in it with its attributes; no names for the module itself
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_NAMING = (*_IMPORTS, ast.Pass, getattr(ast, "TypeAlias", ast.Pass))
_BLOCKS = (ast.stmt, ast.ExceptHandler)
#: Tests of what an import of a module does not run.
_NOT_RUN = ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'")


def code_of(
    function: Callable[..., Any], target: str, params: type[BaseModel] | None = None
) -> tuple[dict[str, str], set[str]]:
    """Return what a function depends on, as digests by name, and the modules that were read.

    A name is that of a definition in the target's module (``module:name``), or of a module that counts whole
    (``module``). The values that a function is bound to count. Of the params only methods and constants count: the key
    of a stage holds the values of the settings.
    """
    models = {(one.__module__, one.__qualname__): one for one in _models(params)} if params else {}
    reader = _Reader(target.partition(":")[0], models)
    values = reader.read(function, *models.values())
    asked = set[str]().union(*(one.asked for statements in reader.counted.values() for one in statements))
    if any(name in asked for _, name in models):  # code makes them itself, with defaults that no setting holds
        reader = _Reader(target.partition(":")[0], {})
        values = reader.read(function, *models.values())
    texts = {
        name: "\n".join(one.text for one in statements)
        for name, statements in reader.counted.items()
        if ":" not in name or name.partition(":")[0] not in reader.counted  # else it is a part of what counts whole
    }
    passed = sorted(place for module, *place in reader.passed if module not in texts)
    texts |= {"imported names": repr(passed)} if passed else {}
    found = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    if any(not isinstance(one, str) for one in values):
        found["bound values"] = digest(values)
    return dict(sorted(found.items())), {name for name, one in reader.modules.items() if one is not None}


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
    return list_some(changes, 3)


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


def _models(params: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the models of the params, and of their sections."""
    kinds: list[Any] = [params]
    for place, one in enumerate(kinds):  # it grows as it is read
        if isinstance(one, type) and issubclass(one, BaseModel) and one not in kinds[:place]:  # a model may hold itself
            yield from (base for base in one.__mro__ if issubclass(base, BaseModel) and base is not BaseModel)
            kinds += [info.annotation for info in one.model_fields.values()]
        kinds += get_args(one)


class _Reader:
    """Follows names from the target's module through the user's files."""

    def __init__(self, home: str, models: Mapping[tuple[str, str], type[BaseModel]]) -> None:
        self.modules: dict[str, _Module | None] = {}
        self.counted: dict[str, list[_Statement]] = {}
        self.passed: set[tuple[str, str, tuple[str, ...]]] = set()  # a module, and the places that it imports and uses
        self._home, self._models = home, models
        self._imported: set[str] = set()
        self._seen: set[_Place] = set()
        self._open: list[Any] = []

    def read(self, *values: Any) -> list[Any]:
        """Count what an import of the target does, and what values use; return these as `form`."""
        self._import(self._home)
        return [self.form(one) for one in values]

    def form(self, value: Any) -> Any:
        """Return a value as plain JSON, the same in every process; code in it becomes its name, and is followed."""
        if type(value) in _PLAIN:
            return repr(value)
        if any(value is one for one in self._open):
            return "(itself)"
        self._open.append(value)
        try:
            if isinstance(value, types.ModuleType):
                self._count(value.__name__)
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
        places = {(str(value.__module__), value.__qualname__)}
        if isinstance(value, types.FunctionType):  # a wrapper bears the name of what it wraps
            places.add((str(value.__globals__.get("__name__")), value.__code__.co_qualname))
        for module, name in places:
            top, own = name.partition(".")[0], self._load(module)
            self._count(module, (top,) if own and top in own.definitions else ())  # a lambda has no name of its own
        held = []
        for cell in getattr(value, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a name without a value yet
                held.append(self.form(cell.cell_contents))
        if "<locals>" in value.__qualname__ and isinstance(value, types.FunctionType):
            held += map(self.form, [value.__defaults__, value.__kwdefaults__])
        name = f"{value.__module__}:{value.__qualname__}"
        return [name, *held] if held else name

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
            self._count(module, (parts.partition(".")[0],))
            return f"{module}:{parts}"
        iterators = [[*one] if one is not None else None for one in parts[3:5]]
        return ["object", *map(self.form, [*parts[:3], *iterators])]

    def _count(self, name: str, chain: tuple[str, ...] = ()) -> None:
        """Count what a dotted name in a module stands for: a definition of the target's, or another module whole."""
        module, chain = self._found(name, chain)
        if module is None or (module.name, chain) in self._seen:
            return
        self._seen.add((module.name, chain))
        self._import(module.name)
        for bound in chain[:1] if chain else module.imports:
            for target, inner in module.imports.get(bound, []):
                self.passed.add((module.name, target, inner))
                self._count(target, (*inner, *chain[1:]))
        if not chain or chain[0] in module.definitions or chain[0] not in module.imports:
            self._take(module, chain[0] if chain and module.name == self._home else "")

    def _take(self, module: _Module, name: str) -> None:
        """Count a definition of a module, or the whole of it, and all that it names."""
        is_part = name in module.definitions and module.name not in self.counted
        if (key := f"{module.name}:{name}" if is_part else module.name) in self.counted:
            return
        statements = module.definitions[name] if is_part else module.statements
        self.counted[key] = [self._without_fields(module.name, one) for one in statements]
        for one in self.counted[key]:
            for target, inner in (place for places in one.imports.values() for place in places):
                self._import(".".join((target, *inner)))
            for used in one.names:
                for target, inner in one.imports.get(used[0], []):
                    self._count(target, (*inner, *used[1:]))
                if used[0] in module.definitions or used[0] in module.imports:
                    self._count(module.name, used)

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
                    if bound.startswith("*"):  # names that nobody lists
                        self._count(target)
            if any(self._acts(module, one.node) for one in module.statements):
                self._count(name)

    def _acts(self, module: _Module, node: ast.AST) -> bool:
        """Return True if an import that runs a statement does something: more than import, define or name a value."""
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            return any(self._acts(module, one) for one in ast.iter_child_nodes(node) if isinstance(one, _BLOCKS))
        if isinstance(node, _DEFINITIONS):
            if any(self._defined(module, one) for one in node.decorator_list):
                return True
            if not isinstance(node, ast.ClassDef):
                return False
            return self._is_hooked(module, node) or any(self._acts(module, one) for one in node.body)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return any(isinstance(one, ast.Subscript | ast.Attribute) for each in targets for one in ast.walk(each))
        return not isinstance(node, _NAMING)

    def _is_hooked(self, module: _Module, node: ast.ClassDef, seen: tuple[ast.ClassDef, ...] = ()) -> bool:
        """Return True if code of the user's runs when a class is made: that of its metaclass, or of a base."""
        if any(one.arg == "metaclass" and self._defined(module, one.value) for one in node.keywords):
            return True
        bases = [(owner, one) for base in node.bases for owner, one in self._defined(module, base)]
        return any(
            "__init_subclass__" in [getattr(part, "name", "") for part in one.body]
            or self._is_hooked(owner, one, (*seen, node))
            for owner, one in bases
            if isinstance(one, ast.ClassDef) and one not in seen
        )

    def _defined(self, module: _Module, node: ast.expr) -> list[tuple[_Module, ast.stmt]]:
        """Return the user's statements that define the name with which an expression begins, each with its module."""
        places, found = [(module.name, next(_chains(node), ()))], list[tuple[_Module, ast.stmt]]()
        for place in places:  # it grows as it is read
            owner, chain = self._found(*place)
            if owner is not None and chain:
                found += [(owner, one.node) for one in owner.definitions.get(chain[0], [])]
                for bound in [one for one in owner.imports if one == chain[0] or one.startswith("*")]:
                    rest = chain[1:] if bound == chain[0] else chain
                    inner = [(target, (*names, *rest)) for target, names in owner.imports[bound]]
                    places += [one for one in inner if one not in places]
        return found

    def _found(self, name: str, chain: tuple[str, ...]) -> tuple[_Module | None, tuple[str, ...]]:
        """Return the module that a dotted name in a module leads to, and what is left of the name."""
        while chain and self._load(f"{name}.{chain[0]}") is not None:
            name, chain = f"{name}.{chain[0]}", chain[1:]
        return self._load(name), chain

    def _without_fields(self, module: str, statement: _Statement) -> _Statement:
        """Return a model of settings without the fields whose values the key holds."""
        node = statement.node
        if not isinstance(node, ast.ClassDef) or (model := self._models.get((module, node.name))) is None:
            return statement
        known = {name for name, one in model.model_fields.items() if not one.exclude}
        body = [one for one in node.body if getattr(getattr(one, "target", None), "id", "") not in known]
        parts = {name: getattr(node, name) for name in node._fields} | {"body": body}
        return _Statement(ast.ClassDef(**parts), statement.package)

    def _load(self, name: str) -> _Module | None:
        """Read a module of the user's; None for any other."""
        if name not in self.modules:
            path = _file_of(name)
            is_own = path is not None and _is_own(name, path, self._home.partition(".")[0])
            self.modules[name] = _read(name, path, path.stat().st_mtime_ns) if path is not None and is_own else None
        return self.modules[name]


class _Statement:
    """A statement at the top of a module of a package, and what can be read in it."""

    def __init__(self, node: ast.stmt, package: Sequence[str]) -> None:
        self.node, self.package = node, package

    @functools.cached_property
    def text(self) -> str:
        return ast.dump(self.node)

    @functools.cached_property
    def names(self) -> frozenset[tuple[str, ...]]:
        return frozenset(_chains(self.node))

    @functools.cached_property
    def asked(self) -> set[str]:
        """The names that are called or have attributes read, and those that are imported under another name."""
        found = set()
        for one in ast.walk(self.node):
            if isinstance(one, ast.Call | ast.Attribute):
                owner = one.func if isinstance(one, ast.Call) else one.value
                found.add(getattr(owner, "id", getattr(owner, "attr", "")))
            elif isinstance(one, ast.alias) and one.asname:
                found.add(one.name)
        return found

    @functools.cached_property
    def imports(self) -> dict[str, list[_Place]]:
        """The places of each name that an import in it defines; a module of a star is named ``*module``."""
        found: dict[str, list[_Place]] = {}
        for node in ast.walk(self.node):
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


@dataclass
class _Module:
    """A module's source: its statements, those that define each name, and the places of each imported name."""

    name: str
    statements: list[_Statement]
    definitions: dict[str, list[_Statement]]
    imports: dict[str, list[_Place]]


@functools.cache
def _read(name: str, path: Path, changed: int) -> _Module:
    """Read a module's source, as of its last change."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = _Undocumented().visit(ast.parse(path.read_bytes(), str(path)))
    module = _Module(name, [_Statement(node, package) for node in _statements(tree.body)], {}, {})
    for one in module.statements:
        for target in _targets(one.node):
            module.definitions.setdefault(target, []).append(one)
        for bound, places in one.imports.items() if not isinstance(one.node, _DEFINITIONS) else ():
            module.imports.setdefault(bound, []).extend(places)
    return module


class _Undocumented(ast.NodeTransformer):
    """Takes docstrings and other lone constants out of a tree."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return ast.Pass() if isinstance(node.value, ast.Constant) else self.generic_visit(node)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module that an import runs."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) in _NOT_RUN:
            yield from _statements(node.orelse)
        elif not isinstance(node, ast.Pass):
            yield node


def _targets(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines; of a lone import none, and those of one in a block."""
    if isinstance(node, (*_DEFINITIONS, *_IMPORTS)):
        return {node.name} if isinstance(node, _DEFINITIONS) else set()
    found = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
        elif isinstance(one, _DEFINITIONS):
            found.add(one.name)
        elif isinstance(one, ast.alias):
            found.add(one.asname or one.name.partition(".")[0])
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
