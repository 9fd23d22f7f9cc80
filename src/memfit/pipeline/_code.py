"""Find the code that a stage depends on: what it uses of the target's module by name, and other modules whole.

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
#: A module, and what it imports: the module and the name in it.
_Passed = tuple[str, str, tuple[str, ...]]
_Found = tuple["_Module | None", tuple[str, ...], frozenset[_Passed]]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_ASKING = (ast.Call, ast.Attribute)
_FRESH = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
#: Tests of what an import of a module does not run.
_NOT_RUN = ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'")
#: The name for a module's statements that define nothing: an import of the module runs them.
_STATEMENTS = "(statements)"
#: Names of what stores what it is given, beside those with "register" in them.
_STORING = frozenset({"add", "append", "custom_op", "extend", "insert", "library", "setdefault", "update"})
#: What finds code by a text, so that no name leads to it.
_BY_TEXT = frozenset({"__globals__", "__import__", "__subclasses__", "f_globals", "globals", "import_module"})
#: By the target's module and another one: its definitions that count when it is imported. A file read anew empties it.
_ACTING: dict[tuple[str, str], list[str]] = {}
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def code_of(
    function: Callable[..., Any], target: str, params: type[BaseModel] | None = None
) -> tuple[dict[str, str], set[str]]:
    """Return what a function depends on, as digests by name, and the modules that were read.

    A name is that of a definition in the target's module (``module:name``), or of another module (``module``), which
    counts whole. The values that a function is bound to count, and so does a module whose import does more than define.
    Of the params the methods and constants count. Their fields count only where code makes or asks such a model: the
    key of a stage holds the values of the settings.
    """
    models = {(one.__module__, one.__qualname__): one for one in _models(params)} if params else {}
    reader = _Reader(target.partition(":")[0], models)
    values = reader.read(function, *models.values())
    if reader.makes_models():
        reader = _Reader(target.partition(":")[0], {})
        values = reader.read(function, *models.values())
    found = reader.digests()
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


def _models(params: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the models of the params, and of their sections."""
    yield from (base for base in params.__mro__ if issubclass(base, BaseModel) and base is not BaseModel)
    for info in params.model_fields.values():
        for model in _in_annotation(info.annotation):
            yield from _models(model)


def _in_annotation(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _in_annotation(one)


class _Reader:
    """Follows names from the target's module through the user's files."""

    def __init__(self, home: str, models: Mapping[tuple[str, str], type[BaseModel]]) -> None:
        self.modules: dict[str, _Module | None] = {}
        self._home, self._models = home, models
        self._counted: dict[str, list[_Statement]] = {}
        self._passed: set[_Passed] = set()
        self._used: set[_Place] = set()
        self._imported: set[str] = set()
        self._open: list[Any] = []

    def read(self, *values: Any) -> list[Any]:
        """Count what an import of the target runs, and what values use; return these as `form`."""
        self._import(self._home)
        found = [self.form(one) for one in values]
        if any(one.finds_by_text for statements in self._counted.values() for one in statements):
            for name in (seen := list(self.modules)):
                self.use(name, ())
                seen += [one for one in self.modules.keys() - set(seen) if self.modules[one] is not None]
        return found

    def digests(self) -> dict[str, str]:
        """Return a digest of each thing that counts, and of the places from which the target imports names."""
        texts = {name: "\n".join(one.text for one in statements) for name, statements in self._counted.items()}
        passed = sorted(place for module, *place in self._passed if module not in self._counted)
        texts |= {"imported names": repr(passed)} if passed else {}
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}

    def makes_models(self) -> bool:
        names = {name for _, name in self._models}
        return any(names & one.asked for statements in self._counted.values() for one in statements)

    def form(self, value: Any) -> Any:
        """Return a value as plain JSON, the same in every process; code in it becomes its name, and is followed."""
        if type(value) in _PLAIN:
            return repr(value)
        if any(value is one for one in self._open):
            return "(itself)"
        self._open.append(value)
        try:
            if isinstance(value, types.ModuleType):
                self.use(value.__name__, ())
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
            self.use(module, (top,) if own and top in own.definitions else ())  # a lambda has no name of its own
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
            self.use(module, (parts.partition(".")[0],))
            return f"{module}:{parts}"
        iterators = [[*one] if one is not None else None for one in parts[3:5]]
        return ["object", *map(self.form, [*parts[:3], *iterators])]

    def use(self, name: str, chain: tuple[str, ...]) -> None:
        """Count what a dotted name in a module stands for; without a name, all of the module and of what it imports."""
        if (name, chain) in self._used:
            return
        self._used.add((name, chain))
        for module, rest, passed in self._find(name, chain):
            self._passed |= passed
            if module is None:
                continue
            self._import(module.name)
            if rest and rest[0] in module.definitions:
                self._take(module, rest[0])
            else:  # the module itself, or what it makes when it is asked
                for one in module.definitions or [_STATEMENTS]:
                    self._take(module, one)
                for places in module.imports.values():
                    for target, names in places:
                        self.use(target, names)

    def _find(self, name: str, chain: tuple[str, ...], passed: frozenset[_Passed] = frozenset()) -> Iterator[_Found]:
        """Yield the modules that may define a dotted name (None: not the user's), what is left of it, and the way."""
        module = self._load(name)
        places = [*module.imports.get(chain[0], [])] if module is not None and chain else []
        if chain and self._load(f"{name}.{chain[0]}") is not None:
            places.append((f"{name}.{chain[0]}", ()))
        for target, inner in places:
            if (step := (name, target, inner)) not in passed:  # else two modules import it from each other
                yield from self._find(target, (*inner, *chain[1:]), passed | {step})
        if not places or (module is not None and chain[0] in module.definitions):
            yield module, chain, passed

    def _import(self, name: str) -> None:
        """Count what an import of a module runs, also of its parents and of what it imports."""
        if name in self._imported:
            return
        self._imported.add(name)
        if parent := name.rpartition(".")[0]:
            self._import(parent)
        if (module := self._load(name)) is not None:
            for key, places in module.imports.items():
                for target, inner in places:
                    self._import(".".join((target, *inner)))
                    if key.startswith("*"):
                        self.use(target, ())
            if (place := (self._home, name)) not in _ACTING:  # the same for all stages
                _ACTING[place] = [
                    one
                    for one, statements in module.definitions.items()
                    if one == _STATEMENTS or any(self._keeps(name, each) for each in statements)
                ]
            for one in _ACTING[place]:
                self._take(module, one)

    def _take(self, module: _Module, name: str) -> None:
        """Count a definition of the target's module, or the whole of another one, and all that it names."""
        is_home = module.name == self._home
        key = f"{module.name}:{name}" if is_home else module.name
        if key in self._counted:
            return
        statements = module.definitions.get(name, []) if is_home else module.statements
        self._counted[key] = statements = [self._without_fields(module.name, one) for one in statements]
        for one in statements:
            for target, inner in (place for places in one.imports.values() for place in places):
                self._import(".".join((target, *inner)))
            for chain in one.names:
                for target, inner in one.imports.get(chain[0], []):
                    self.use(target, (*inner, *chain[1:]))
                if chain[0] in module.definitions or chain[0] in module.imports:
                    self.use(module.name, chain)

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

    def _keeps(self, module: str, statement: _Statement) -> bool:
        """Return True if a definition may keep code of the user's where no name leads to it, when an import runs it."""
        for one in _run_by_import(statement.node):
            decorators = [getattr(each, "func", each) for each in getattr(one, "decorator_list", [])]
            called = [*decorators, *([one.func] if isinstance(one, ast.Call) else [])]
            word = getattr(one, "attr", getattr(one, "id", ""))
            is_put = isinstance(one, ast.Subscript | ast.Attribute) and isinstance(one.ctx, ast.Store)
            if is_put or isinstance(one, ast.AugAssign) or word in _STORING or "register" in word:
                return True
            if any(each.stores for part in called for _, each in self._defined(module, part)):
                return True
            for found, each in (each for part in decorators for each in self._defined(module, part)):
                if any(other is not each and other.is_code for _, other in self._defined(found, each.node)):
                    return True
            for found, each in (each for part in getattr(one, "bases", []) for each in self._defined(module, part)):
                if each.is_hook or any(list(self._defined(found, part)) for part in getattr(each.node, "bases", [])):
                    return True
        return False

    def _defined(self, module: str, node: ast.AST) -> Iterator[tuple[str, _Statement]]:
        """Yield the statements of the user's that define what a tree names, each with its module."""
        for found, rest, _ in (one for chain in _chains(node) for one in self._find(module, chain)):
            if found is not None and rest:
                yield from ((found.name, one) for one in found.definitions.get(rest[0], []))


class _Statement:
    """A statement at the top of a module, and what can be read in it."""

    def __init__(self, node: ast.stmt, package: Sequence[str]) -> None:
        self.node, self.package, self.is_code = node, package, isinstance(node, _DEFINITIONS)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.node))

    @functools.cached_property
    def text(self) -> str:
        return ast.dump(self.node)

    @functools.cached_property
    def names(self) -> frozenset[tuple[str, ...]]:
        return frozenset(_chains(self.node))

    @functools.cached_property
    def imports(self) -> dict[str, list[_Place]]:
        """The places of each name that an import in it defines; a module of a star is named ``*module``."""
        found: dict[str, list[_Place]] = {}
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
        return bool(is_text) and _STATEMENTS not in _targets(self.node)

    @functools.cached_property
    def is_hook(self) -> bool:
        """True for a class of which code runs when another is derived from it."""
        names = {getattr(one, "name", "") for one in getattr(self.node, "body", [])}
        return not self.is_code or "__init_subclass__" in names or bool(getattr(self.node, "keywords", []))

    @functools.cached_property
    def stores(self) -> bool:
        """True for code that puts something into what it did not make itself, and for an object."""
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
                if is_stored or getattr(one, "attr", "") in _STORING:
                    return True
        return not self.is_code or any(isinstance(one, ast.Global) for one in self.nodes)


def _run_by_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement that an import runs: not what stands in functions."""
    yield node
    inside = node.body if isinstance(node, _FUNCTIONS) else [node.body] if isinstance(node, ast.Lambda) else []
    for child in ast.iter_child_nodes(node):
        if child not in inside:
            yield from _run_by_import(child)


@dataclass
class _Module:
    """A module's source: its statements, those that define each name, and the places of each imported name."""

    name: str
    statements: list[_Statement]
    definitions: dict[str, list[_Statement]] = field(default_factory=dict)
    imports: dict[str, list[_Place]] = field(default_factory=dict)


@functools.cache
def _read(name: str, path: Path, changed: int) -> _Module:
    """Read a module's source, as of its last change."""
    _ACTING.clear()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = _Undocumented().visit(ast.parse(path.read_bytes(), str(path)))
    module = _Module(name, [_Statement(node, package) for node in _statements(tree.body)])
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
    """Return the names that a statement defines; `_STATEMENTS` for one that does something else."""
    if isinstance(node, _DEFINITIONS):
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
    return {_STATEMENTS}


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
