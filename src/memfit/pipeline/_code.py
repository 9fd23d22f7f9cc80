"""Which code a stage depends on, by name: the user's functions, classes and constants that it uses, as syntax trees.

Files are read and never imported for this. Comments, docstrings and what lies beside do not count; installed packages
and memfit itself are left out.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from memfit.pipeline._manifest import SAMPLED_BYTES, canonical, hash_file, sample_path

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
#: The name under which a module's statements count that are no definitions.
_EFFECTS = "(statements)"


@dataclass
class _Module:
    """A module's source by its top-level names."""

    name: str
    path: Path
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)


def code_of(
    function: Callable[..., Any], params: type[BaseModel] | None = None, fields: Sequence[str] | None = None
) -> tuple[dict[str, str], set[str]]:
    """What a function depends on: a digest by ``module:name``, and the names of the modules that were looked at.

    Args:
        function: The function, or a partial of it.
        params: The model of its settings: its methods count, and its fields do not.
        fields: Those of the fields whose own models count too; None for all.
    """
    models = dict(_models(params, fields)) if params else {}
    reader = _Reader({_place(model) for model in models.values()})
    for root in (function, *models.values()):
        reader.add(root)
    return dict(sorted(reader.found.items())), set(reader.modules)


def code_of_command(words: Sequence[str], folder: Path) -> dict[str, str]:
    """The files that a command names, by their content."""
    found = {}
    for word in words:
        path = folder / word
        if "{" not in word and path.is_file():
            found[word] = sample_path(path) if path.stat().st_size > SAMPLED_BYTES else hash_file(path)
    return found


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


def _place(value: Any) -> tuple[str, str]:
    return value.__module__, value.__qualname__.partition(".")[0]


def _models(params: type[BaseModel], fields: Sequence[str] | None) -> Iterator[tuple[str, type[BaseModel]]]:
    """The models of settings: of the params, and of the sections in those fields."""
    yield params.__qualname__, params
    for base in params.__mro__[1:]:
        if issubclass(base, BaseModel) and base is not BaseModel:
            yield base.__qualname__, base
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

    def __init__(self, models: set[tuple[str, str]]) -> None:
        self.models = models
        self.found: dict[str, str] = {}
        self.modules: dict[str, _Module | None] = {}
        self._package = ""
        self._seen: set[tuple[str, str]] = set()

    def add(self, value: Any) -> None:
        """Take in a function, a partial, a class, or a plain value that one of them holds."""
        if isinstance(value, functools.partial):
            for one in (value.func, *value.args, *value.keywords.values()):
                self.add(one)
            self._plain("partial", [one for one in (*value.args, *value.keywords.items()) if not callable(one)])
            return
        value = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, types.FunctionType | type):
            module, name = _place(value)
            self._package = self._package or ("" if module.startswith("memfit.") else module.partition(".")[0])
            self._visit(module, name)
            for held in [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]:
                if callable(held):
                    self.add(held)
                else:
                    self._plain(name, repr(held))
        elif isinstance(value, types.MethodType):
            self.add(value.__func__)

    def _plain(self, name: str, value: Any) -> None:
        text = canonical(value)
        if value:
            self.found[f"{name} {len(self.found)}"] = hashlib.sha256(text.encode()).hexdigest()

    def _load(self, name: str) -> _Module | None:
        """A module of the user's, read; None for any other."""
        if name not in self.modules:
            path = _file_of(name)
            is_own = path is not None and _is_own(name, path, self._package)
            self.modules[name] = _read(name, path) if path is not None and is_own else None
        return self.modules[name]

    def _visit(self, module_name: str, name: str) -> None:
        if (module_name, name) in self._seen:
            return
        self._seen.add((module_name, name))
        module = self._load(module_name)
        if module is None:
            return
        if name != _EFFECTS:
            self._visit(module_name, _EFFECTS)
        if nodes := module.definitions.get(name):
            if (module_name, name) in self.models:
                nodes = [_without_fields(node) for node in nodes]
            text = "\n".join(ast.dump(_plain(node)) for node in nodes)
            self.found[f"{module_name}:{name}"] = hashlib.sha256(text.encode()).hexdigest()
            self._uses(module, nodes)
        elif name in module.imports:
            self._follow(*module.imports[name])
        elif name != _EFFECTS and self._load(f"{module_name}.{name}") is not None:
            self._whole(f"{module_name}.{name}")
        else:
            for star in module.stars:
                self._visit(star, name)

    def _whole(self, module_name: str) -> None:
        module = self._load(module_name)
        for name in list(module.definitions) if module else ():
            self._visit(module_name, name)

    def _follow(self, module_name: str, name: str) -> None:
        """An imported name: of a module, or (with an empty name) the module itself as a value."""
        if name:
            self._visit(module_name, name)
        else:
            self._whole(module_name)

    def _uses(self, module: _Module, nodes: Iterable[ast.AST]) -> None:
        imports = module.imports | self._imports_inside(module, nodes)
        chains = {chain for top in nodes for chain in _chains(top)}
        for first, *rest in chains:
            target, name = imports.get(first, ("", "x"))
            if rest and not name:  # an attribute of a module, or of a module in it
                while len(rest) > 1 and self._load(f"{target}.{rest[0]}") is not None:
                    target = f"{target}.{rest.pop(0)}"
                self._visit(target, rest[0])
            elif first in module.definitions:
                self._visit(module.name, first)
            elif first in imports:
                self._follow(target, name)
            else:
                for star in module.stars:
                    self._visit(star, first)

    def _imports_inside(self, module: _Module, nodes: Iterable[ast.AST]) -> dict[str, tuple[str, str]]:
        """What functions import when they are called; all of it counts as used."""
        found: dict[str, tuple[str, str]] = {}
        for node in (one for top in nodes for one in ast.walk(top)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= _imports(node, module.name, module.path)
        for target, name in found.values():
            if name:
                self._visit(target, name)
        return found


def _chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """The names that a tree reads, each with the attributes that are taken of it."""
    if isinstance(node, ast.Attribute):
        names, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            yield (inner.id, *reversed(names))
        else:
            yield from _chains(inner)
        return
    if isinstance(node, ast.Name):
        yield (node.id,)
    for child in ast.iter_child_nodes(node):
        yield from _chains(child)


@functools.cache
def _file_of(name: str) -> Path | None:
    """Where a module's source lies, without importing it."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return Path(file) if file and file.endswith(".py") else None
    places: Any = None
    spec = None
    parts = name.split(".")
    for number in range(len(parts)):
        try:
            spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: number + 1]), places)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        places = spec.submodule_search_locations
    origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _read(name: str, path: Path) -> _Module:
    module = _Module(name, path)
    tree = ast.parse(path.read_bytes(), str(path))
    for node in _statements(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module.imports |= _imports(node, name, path)
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                module.stars.append(_base(node, name, path))
            continue
        for target in _targets(node):
            module.definitions.setdefault(target, []).append(node)
    return module


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, those of a branch of an import's ``try`` and ``if`` among them."""
    for number, node in enumerate(body):
        if number == 0 and _is_docstring(node):
            continue
        if isinstance(node, ast.If) and _is_skipped(node.test):
            yield from _statements(node.orelse)
        else:
            if isinstance(node, ast.If | ast.Try):
                inner = [one for one in ast.walk(node) if isinstance(one, ast.Import | ast.ImportFrom)]
                yield from inner
            yield node


def _is_skipped(test: ast.expr) -> bool:
    """Whether a branch is for type checkers, or for a module that is run as a program."""
    names = {one.id for one in ast.walk(test) if isinstance(one, ast.Name)}
    names |= {one.attr for one in ast.walk(test) if isinstance(one, ast.Attribute)}
    return bool(names & {"TYPE_CHECKING", "__name__"})


def _targets(node: ast.stmt) -> list[str]:
    """The names that a statement defines; `_EFFECTS` for one that does something else."""
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    given = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign | ast.AugAssign)
        else []
    )
    names = [one for target in given for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    if names and all(isinstance(one, ast.Name) for one in names):
        return [one.id for one in names if isinstance(one, ast.Name)]
    return [] if isinstance(node, ast.Pass) else [_EFFECTS]


def _imports(node: ast.Import | ast.ImportFrom, module: str, path: Path) -> dict[str, tuple[str, str]]:
    """The names that an import gives, each as a module and a name in it; an empty name for the module itself."""
    if isinstance(node, ast.ImportFrom):
        base = _base(node, module, path)
        return {one.asname or one.name: (base, one.name) for one in node.names if one.name != "*"}
    return {one.asname or one.name.partition(".")[0]: (one.name if one.asname else one.name.partition(".")[0], "")
            for one in node.names}  # fmt: skip


def _base(node: ast.ImportFrom, module: str, path: Path) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *filter(None, [node.module])])


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _plain(node: ast.AST) -> ast.AST:
    """A copy of a tree without docstrings."""
    return _Undocumented().visit(ast.parse(ast.unparse(node)))  # type: ignore[no-any-return]


class _Undocumented(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, _DEFINITIONS) and node.body and _is_docstring(node.body[0]):
            node.body = node.body[1:] or [ast.Pass()]
        return super().generic_visit(node)


def _without_fields(node: ast.stmt) -> ast.stmt:
    """A model of settings without its fields: their values are in the key."""
    if not isinstance(node, ast.ClassDef):
        return node
    kept = [one for one in node.body if not isinstance(one, ast.AnnAssign) and not _is_docstring(one)]
    return ast.ClassDef(**{**{name: getattr(node, name) for name in node._fields}, "body": kept or [ast.Pass()]})


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between two readings, in words; empty where nothing does.

    >>> changed_code({"train:fit": "a", "train:old": "b"}, {"train:fit": "c"})
    'train:fit changed, train:old is gone'
    """
    told = [f"{name} changed" for name in now if name in before and before[name] != now[name]]
    told += [f"{name} is new" for name in now if name not in before]
    told += [f"{name} is gone" for name in before if name not in now]
    return ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")
