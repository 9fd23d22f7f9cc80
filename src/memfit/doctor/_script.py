"""Read what a script does from its syntax: imports, loaders, forks, variables that it sets. Nothing is run.

The modules beside it that it imports are read too, one level deep.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

_LOADERS = frozenset({"DataLoader", "StatefulDataLoader"})
#: Calls with this keyword make a loader with so many workers.
_LOADER_KEYWORD = "dataloader_num_workers"
#: What starts processes, and the keyword that chooses how.
_FORKS = {"Pool": "context", "Process": "context", "ProcessPoolExecutor": "mp_context", "fork": ""}
_CONTEXTS = frozenset({"fork", "spawn", "forkserver"})
#: The position of num_workers among DataLoader's arguments. Source: torch/utils/data/dataloader.py (torch 2.13).
_NUM_WORKERS_AT = 5
_MOST_BYTES = 4 << 20
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


@dataclass(frozen=True)
class Start:
    """A call that starts processes: a loader, a pool, a fork."""

    name: str
    site: str
    method: str | None  # the start method that it names; empty if the syntax does not show it
    num_workers: int | None = None
    prefetch_factor: int | None = None
    workers_text: str = ""  # the expression of ``num_workers``


@dataclass(frozen=True)
class Site:
    """Something at a place of the code: a name, ``file:line``, and one more word where there is one."""

    name: str
    site: str
    more: str | None = None


@dataclass
class Script:
    """What was read; places are ``file:line``."""

    files: list[str] = field(default_factory=list)  # the script first
    imports: dict[str, str] = field(default_factory=dict)  # the first import of each top-level package
    loaders: list[Start] = field(default_factory=list)
    forks: list[Start] = field(default_factory=list)
    start_methods: list[Site] = field(default_factory=list)  # calls of ``set_start_method``
    sharing: list[Site] = field(default_factory=list)  # calls of ``set_sharing_strategy``
    variables: list[Site] = field(default_factory=list)  # that are set; ``more``: the library imported before
    cuda: str | None = None
    threads: list[Site] = field(default_factory=list)  # where threads are started or their number is set
    errors: list[Site] = field(default_factory=list)  # by reason; ``more`` is ``syntax`` for a syntax error
    has_guard: bool = True  # ``if __name__ == "__main__"``; the text of ``python -c`` needs none


@dataclass(frozen=True)
class Outside:
    """What a script is given: its arguments, its environment and the host's CPUs."""

    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    num_cpus: int | None = None


def read_script(path: Path | None, outside: Outside, *, text: str | None = None, cwd: Path = Path()) -> Script:
    """Return what a script, or the ``text`` of ``python -c``, does; files below ``cwd`` are named from there."""
    script = Script()
    if text is not None:
        _read_text(script, text.encode(errors="replace"), "-c", outside)
    elif path is not None:
        tree = _read_file(script, path, cwd, outside)
        script.has_guard = any(isinstance(one, ast.If) and "__main__" in ast.unparse(one.test) for one in tree.body)
        for local in _local_files(tree, [cwd, path.parent]):
            script.imports.pop(local.parent.name if local.name == "__init__.py" else local.stem, None)
            if local.resolve() != path.resolve():
                _read_file(script, local, cwd, outside)
    return script


def _read_file(script: Script, path: Path, cwd: Path, outside: Outside) -> ast.Module:
    label = str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
    data = b""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise OSError(f"larger than {_MOST_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        script.errors.append(Site(str(error.strerror or error), label))
    return _read_text(script, data, label, outside)


def _read_text(script: Script, data: bytes, label: str, outside: Outside) -> ast.Module:
    script.files.append(label)
    try:
        if b"\0" in data:
            line = data[: data.index(b"\0")].count(b"\n") + 1
            raise SyntaxError("source code cannot contain null bytes", (label, line, None, None))
        tree = ast.parse(data)
        _Reader(script, label, tree, outside).visit(tree)
        return tree
    except SyntaxError as error:
        site = label if error.lineno is None else f"{label}:{error.lineno}"
        script.errors.append(Site(error.msg, site, "syntax"))
    except (ValueError, RecursionError) as error:
        script.errors.append(Site(str(error), label))
    return ast.Module(body=[], type_ignores=[])


def _local_files(tree: ast.Module, folders: list[Path]) -> list[Path]:
    """The files beside the script that it imports itself, each once."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names += [base, *(f"{base}.{one.name}".strip(".") for one in node.names)]
    bases = [folder.joinpath(*name.split(".")) for name in names if name for folder in folders]
    files = (one for base in bases for one in (base.with_suffix(".py"), base / "__init__.py"))
    return [one for one in dict.fromkeys(files) if one.is_file()]


class _Reader(ast.NodeVisitor):
    """Fills a ``Script`` from one file."""

    def __init__(self, script: Script, label: str, tree: ast.Module, outside: Outside) -> None:
        self.script, self.label, self.outside = script, label, outside
        self.renamed: dict[str, str] = {}
        self.origins: dict[str, str] = {}
        self.loaded: list[str] = []
        self.constants = _constants_of(tree)
        self.options = dict(_options_of(tree))

    def _site(self, node: ast.AST) -> str:
        return f"{self.label}:{getattr(node, 'lineno', 0)}"

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            self._import(one.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module:
            self._import(node.module, node)
            self.origins |= {one.asname or one.name: node.module for one in node.names}
        self.renamed |= {one.asname: one.name for one in node.names if one.asname}

    def _import(self, name: str, node: ast.AST) -> None:
        self.loaded.append(name.partition(".")[0])
        self.script.imports.setdefault(self.loaded[-1], self._site(node))

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) in ("os.environ", "environ"):
                self._variable(target.slice, node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        path, script, site = _dotted(node.func), self.script, self._site(node)
        last = path.rpartition(".")[2]
        name = self.renamed.get(last, last)
        given = {one.arg: one.value for one in node.keywords if one.arg}
        if name in _LOADERS or _LOADER_KEYWORD in given:
            self._loader(node, given)
        elif name in _FORKS and _is_fork(path, name, self.origins.get(path, "")):
            context = given.get(_FORKS[name]) or (node.func.value if isinstance(node.func, ast.Attribute) else None)
            method = "fork" if name == "fork" else self._context(context, is_named=_FORKS[name] in given)
            script.forks.append(Start(path, site, method))
        elif name in ("set_start_method", "set_sharing_strategy") and node.args:
            where = script.start_methods if name == "set_start_method" else script.sharing
            where.append(Site(_text_of(node.args[0]) or "", site))
        elif name in ("setdefault", "putenv") and path.startswith("os.") and node.args:
            self._variable(node.args[0], node)
        elif path in ("threading.Thread", "Thread", "ThreadPoolExecutor", "torch.set_num_threads"):
            script.threads.append(Site(path, site))
        if script.cuda is None and _uses_cuda(path, node):
            script.cuda = site
        self.generic_visit(node)

    def _variable(self, name: ast.expr, node: ast.AST) -> None:
        if text := _text_of(name):
            loaded = next((one for one in ("torch", "numpy", "polars") if one in self.loaded), None)
            self.script.variables.append(Site(text, self._site(node), loaded))

    def _loader(self, node: ast.Call, given: Mapping[str, ast.expr]) -> None:
        """Add a loader; an argument that is absent has its default, unless ``**`` may give it."""
        prefix = "dataloader_" if _LOADER_KEYWORD in given else ""
        workers = given.get(f"{prefix}num_workers")
        if workers is None and len(node.args) > _NUM_WORKERS_AT:
            workers = node.args[_NUM_WORKERS_AT]
        absent = None if any(one.arg is None for one in node.keywords) else 0
        prefetch, context = given.get(f"{prefix}prefetch_factor"), given.get("multiprocessing_context")
        self.script.loaders.append(
            Start(
                "DataLoader",
                self._site(node),
                self._context(context, is_named=context is not None),
                absent if workers is None else self._value(workers),
                2 if prefetch is None else self._value(prefetch),
                "**" if workers is None else ast.unparse(workers),
            )
        )

    def _context(self, node: ast.expr | None, *, is_named: bool) -> str | None:
        """The start method of ``"spawn"``, ``get_context("spawn")`` and names of them; empty if it is not shown."""
        if isinstance(node, ast.Name):
            node = self.constants.get(node.id, node)
        if isinstance(node, ast.Call) and node.args and (is_named or _dotted(node).endswith("get_context")):
            return _text_of(node.args[0]) or ""
        method = None if node is None else _text_of(node) or _dotted(node).rpartition(".")[2]
        return method if method in _CONTEXTS else "" if is_named else None

    def _value(self, node: ast.expr) -> int | None:
        """The whole number that an expression will be; None if the syntax does not show it."""
        try:
            return int(self._known(node))
        except (TypeError, ValueError, ZeroDivisionError):
            return None

    def _known(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in self.constants:
                value = self.constants.pop(node.id)  # it may name itself
                found = self._value(value)
                self.constants[node.id] = value
                return found
            case ast.Attribute() if node.attr in self.options:
                flags, default = self.options[node.attr]
                return self._option(flags) or (default and self._known(default))
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](self._value(node.left), self._value(node.right))
            case ast.Subscript() if ast.unparse(node.value) in ("os.environ", "environ"):
                return self.outside.env.get(_text_of(node.slice) or "")
            case ast.Call(args=[first, *more]):
                path = _dotted(node.func)
                if path == "int" and not more:
                    return self._known(first)
                if path in ("os.getenv", "getenv", "os.environ.get", "environ.get"):
                    return self.outside.env.get(_text_of(first) or "", self._known(more[0]) if more else None)
            case ast.Call() if _dotted(node).endswith("cpu_count"):
                return self.outside.num_cpus
        return None

    def _option(self, flags: Sequence[str]) -> str | None:
        """The value of an option on the command line."""
        words = [*self.outside.arguments, ""]
        for word, behind in pairwise(words):
            name, equals, value = word.partition("=")
            if name in flags:
                return value if equals else behind
        return None


def _is_fork(path: str, name: str, origin: str) -> bool:
    """Whether a common name is the one that starts processes; ``origin`` is the module of a bare name."""
    before = path.rpartition(".")[0]
    if name == "fork":
        return before == "os" or origin == "os"
    if name == "ProcessPoolExecutor" or "multiprocessing" in origin:
        return True
    return before.rpartition(".")[2] in {"multiprocessing", "mp", "ctx", "context", "get_context", *_CONTEXTS}


def _uses_cuda(path: str, node: ast.Call) -> bool:
    if path.endswith(".cuda") or path in ("torch.cuda.init", "torch.cuda.set_device"):
        return True
    texts = [_text_of(one) for one in (*node.args, *(one.value for one in node.keywords))]
    return path.rpartition(".")[2] in ("to", "device") and any(one and one.startswith("cuda") for one in texts)


def _constants_of(tree: ast.Module) -> dict[str, ast.expr]:
    """The value of each name that is set once, and not to another name."""
    found: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For)):
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(value)
    single = {name: values[0] for name, values in found.items() if len(values) == 1}
    return {name: value for name, value in single.items() if value is not None and not isinstance(value, ast.Name)}


def _options_of(tree: ast.Module) -> Iterator[tuple[str, tuple[Sequence[str], ast.expr | None]]]:
    """The flags and the default of each argparse option, with the attribute's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node).rpartition(".")[2] == "add_argument":
            flags = [text for text in map(_text_of, node.args) if text and text.startswith("-")]
            given = {one.arg: one.value for one in node.keywords if one.arg}
            long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
            dest = _text_of(given["dest"]) if "dest" in given else long.lstrip("-").replace("-", "_")
            if dest:
                yield dest, (flags, given.get("default"))


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute, without the calls in it."""
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _text_of(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
