"""Find the code that a stage depends on: what it uses of the target's module by name, and other modules whole.

Files are parsed and not imported. Comments, docstrings, installed packages and memfit itself do not count.
"""

from __future__ import annotations

import ast
import contextlib
import copyreg
import hashlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from memfit.errors import UsageError
from memfit.pipeline._manifest import digest, fingerprint_files
from memfit.pipeline._statements import (
    ACTING,
    STATEMENTS,
    STORING,
    Module,
    Place,
    Statement,
    chains,
    file_of,
    read_module,
    run_by_import,
)
from memfit.units import list_some

_Passed = tuple[str, str, tuple[str, ...]]  # a module, and what it imports: the module and the name in it
_Found = tuple["Module | None", tuple[str, ...], frozenset[_Passed]]
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def code_of(
    function: Callable[..., Any], target: str, params: type[BaseModel] | None = None
) -> tuple[dict[str, str], set[str]]:
    """Return what a function depends on, as digests by name, and the modules that were read.

    A name is that of a definition in the target's module (``module:name``), or of another module (``module``), which
    counts whole. The values that a function is bound to count, and so does a module whose import does more than define.
    Of the params only methods and constants count: the key of a stage holds the values of the settings.
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
        self.modules: dict[str, Module | None] = {}
        self._home, self._models = home, models
        self._counted: dict[str, list[Statement]] = {}
        self._passed: set[_Passed] = set()
        self._used: set[Place] = set()
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
                for one in module.definitions or [STATEMENTS]:
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
            if (place := (self._home, name)) not in ACTING:  # the same for all stages
                ACTING[place] = [
                    one
                    for one, statements in module.definitions.items()
                    if one == STATEMENTS or any(self._keeps(name, each) for each in statements)
                ]
            for one in ACTING[place]:
                self._take(module, one)

    def _take(self, module: Module, name: str) -> None:
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

    def _without_fields(self, module: str, statement: Statement) -> Statement:
        """Return a model of settings without the fields whose values the key holds."""
        node = statement.node
        if not isinstance(node, ast.ClassDef) or (model := self._models.get((module, node.name))) is None:
            return statement
        known = {name for name, one in model.model_fields.items() if not one.exclude}
        body = [one for one in node.body if getattr(getattr(one, "target", None), "id", "") not in known]
        parts = {name: getattr(node, name) for name in node._fields} | {"body": body}
        return Statement(ast.ClassDef(**parts), statement.package)

    def _load(self, name: str) -> Module | None:
        """Read a module of the user's; None for any other."""
        if name not in self.modules:
            path = file_of(name)
            is_own = path is not None and _is_own(name, path, self._home.partition(".")[0])
            self.modules[name] = (
                read_module(name, path, path.stat().st_mtime_ns) if path is not None and is_own else None
            )
        return self.modules[name]

    def _keeps(self, module: str, statement: Statement) -> bool:
        """Return True if a definition may keep code of the user's where no name leads to it, when an import runs it."""
        for one in run_by_import(statement.node):
            decorators = [getattr(each, "func", each) for each in getattr(one, "decorator_list", [])]
            called = [*decorators, *([one.func] if isinstance(one, ast.Call) else [])]
            word = getattr(one, "attr", getattr(one, "id", ""))
            is_put = isinstance(one, ast.Subscript | ast.Attribute) and isinstance(one.ctx, ast.Store)
            if is_put or isinstance(one, ast.AugAssign) or word in STORING or "register" in word:
                return True
            if any(self._stores(module, part, set()) for part in called):
                return True
            for found, each in (each for part in decorators for each in self._defined(module, part)):
                if any(other is not each and other.is_code for _, other in self._defined(found, each.node)):
                    return True
            for found, each in (each for part in getattr(one, "bases", []) for each in self._defined(module, part)):
                if each.is_hook or any(list(self._defined(found, part)) for part in getattr(each.node, "bases", [])):
                    return True
        return False

    def _stores(self, module: str, called: ast.AST, seen: set[Statement]) -> bool:
        """Return True if a call stores something: what is called, or what that calls. Of an object nobody knows."""
        for found, one in self._defined(module, called):
            if one.stores if one.is_code else not seen:
                return True
            if one not in seen:
                seen.add(one)
                if any(self._stores(found, each, seen) for each in one.calls):
                    return True
        return False

    def _defined(self, module: str, node: ast.AST) -> Iterator[tuple[str, Statement]]:
        """Yield the statements of the user's that define what a tree names, each with its module."""
        for found, rest, _ in (one for chain in chains(node) for one in self._find(module, chain)):
            if found is not None and rest:
                yield from ((found.name, one) for one in found.definitions.get(rest[0], []))
