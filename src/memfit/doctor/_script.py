"""What a script does: imports, loaders, forks, variables that it sets; read from its syntax, never run.

The script is read, and the modules beside it that it imports: one level deep.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class LoaderCall:
    """A loader that is made somewhere.

    Attributes:
        site: ``file:line``.
        num_workers, prefetch_factor: Its workers and the batches that each keeps ready; None if the syntax does not
            tell.
        text: The expression of ``num_workers``.
        start_method: The start method that it names; None if it names none, empty if the syntax does not tell.
    """

    site: str
    num_workers: int | None
    prefetch_factor: int | None
    text: str
    start_method: str | None


@dataclass(frozen=True)
class Site:
    """Something at a place of the code: a name, ``file:line``, and one more word where there is one."""

    name: str
    site: str
    more: str | None = None


@dataclass
class Script:
    """What was read.

    Attributes:
        files: The files that were read, the script first.
        imports: The first import of each top-level package, by name, as ``file:line``.
        loaders: The loaders that are made.
        forks: What starts processes; ``more`` is the start method that it names, or None.
        start_methods, sharing: Calls of ``set_start_method`` and ``set_sharing_strategy``.
        variables: Environment variables that are set; ``more`` is the library that was imported before, or None.
        cuda: Where a GPU is first used, or None.
        threads: Where threads are started or their number is set.
        errors: Files that could not be read; ``name`` is the reason, ``more`` is ``syntax`` for a syntax error.
        has_guard: The script has ``if __name__ == "__main__"``, or needs none, as the text of ``python -c``.
    """

    files: list[str] = field(default_factory=list)
    imports: dict[str, str] = field(default_factory=dict)
    loaders: list[LoaderCall] = field(default_factory=list)
    forks: list[Site] = field(default_factory=list)
    start_methods: list[Site] = field(default_factory=list)
    sharing: list[Site] = field(default_factory=list)
    variables: list[Site] = field(default_factory=list)
    cuda: str | None = None
    threads: list[Site] = field(default_factory=list)
    errors: list[Site] = field(default_factory=list)
    has_guard: bool = True


@dataclass(frozen=True)
class Outside:
    """What a script is given: its arguments, its environment and the host's CPUs."""

    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    num_cpus: int | None = None

    def option(self, flags: Sequence[str]) -> str | None:
        """Return the value of an option on the command line."""
        for at, word in enumerate(self.arguments):
            name, equals, value = word.partition("=")
            if name in flags:
                return value if equals else next(iter(self.arguments[at + 1 :]), None)
        return None


def read_script(
    path: Path | None, outside: Outside | None = None, *, text: str | None = None, cwd: Path = Path()
) -> Script:
    """Return what a script does, or the ``text`` of ``python -c``.

    Args:
        path: The script.
        outside: What it is given.
        text: Its text instead.
        cwd: The folder that it starts in; files below it are named from there.
    """
    script, outside = Script(), outside or Outside()
    if text is not None:
        _read_one(script, text.encode(errors="replace"), "-c", outside)
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
    return _read_one(script, data, label, outside)


def _read_one(script: Script, data: bytes, label: str, outside: Outside) -> ast.Module:
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


def _local_files(tree: ast.Module, folders: list[Path]) -> Iterator[Path]:
    """The files beside the script that it imports itself, each once."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names += [base, *(f"{base}.{one.name}".strip(".") for one in node.names)]
    seen = set()
    for base_path in (folder.joinpath(*name.split(".")) for name in names if name for folder in folders):
        for path in (base_path.with_suffix(".py"), base_path / "__init__.py"):
            if path.is_file() and path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


class _Reader(ast.NodeVisitor):
    """Fills a ``Script`` from one file."""

    def __init__(self, script: Script, label: str, tree: ast.Module, outside: Outside) -> None:
        self.script, self.label, self.outside = script, label, outside
        self.renamed: dict[str, str] = {}
        self.origins: dict[str, str] = {}
        self.loaded: list[str] = []
        self.constants = _constants_of(tree)
        self.options = _options_of(tree)

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
        path, script = _dotted(node.func), self.script
        last = path.rpartition(".")[2]
        name = self.renamed.get(last, last)
        given = {one.arg: one.value for one in node.keywords if one.arg}
        if name in _LOADERS or _LOADER_KEYWORD in given:
            self._loader(node, given)
        elif name in _FORKS and _is_fork(path, name, self.origins.get(path, "")):
            context = given.get(_FORKS[name])
            method = self._context_of(path, node.func) if context is None else self._context(context)
            script.forks.append(Site(path, self._site(node), method))
        elif name in ("set_start_method", "set_sharing_strategy") and node.args:
            where = script.start_methods if name == "set_start_method" else script.sharing
            where.append(Site(_text_of(node.args[0]) or "", self._site(node)))
        elif name in ("setdefault", "putenv") and path.startswith("os.") and node.args:
            self._variable(node.args[0], node)
        elif path in ("threading.Thread", "Thread", "ThreadPoolExecutor", "torch.set_num_threads"):
            script.threads.append(Site(path, self._site(node)))
        if script.cuda is None and _uses_cuda(path, node):
            script.cuda = self._site(node)
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
            LoaderCall(
                self._site(node),
                absent if workers is None else self._value(workers),
                2 if prefetch is None else self._value(prefetch),
                "**" if workers is None else ast.unparse(workers),
                None if context is None else self._context(context),
            )
        )

    def _context(self, node: ast.expr) -> str:
        """The start method of a context: a literal or ``get_context("spawn")``; empty if the syntax does not tell."""
        if isinstance(node, ast.Name):
            node = self.constants.get(node.id, node)
        if isinstance(node, ast.Call) and node.args:
            node = node.args[0]
        return _text_of(node) or ""

    def _context_of(self, path: str, func: ast.expr) -> str | None:
        """The start method of ``get_context("spawn").Pool`` and of ``ctx.Pool``; None if nothing names one."""
        value = func.value if isinstance(func, ast.Attribute) else None
        if isinstance(value, ast.Name) and value.id in self.constants:
            value = self.constants[value.id]
        if isinstance(value, ast.Call) and _dotted(value).endswith("get_context"):
            return self._context(value)
        return next((one for one in _CONTEXTS if one in path.split(".")[:-1]), None)

    def _value(self, node: ast.expr) -> int | None:
        """The whole number that an expression will be; None if the syntax does not tell."""
        try:
            return int(self._known(node))
        except (TypeError, ValueError):
            return None

    def _known(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in self.constants:
                value = self.constants.pop(node.id)  # it may name itself
                found = self._known(value)
                self.constants[node.id] = value
                return found
            case ast.Attribute() if node.attr in self.options:
                flags, default = self.options[node.attr]
                return self.outside.option(flags) or (default and self._known(default))
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv()):
                left, right = self._value(node.left), self._value(node.right)
                return None if left is None or right is None else _arithmetic(node.op, left, right)
            case ast.Call():
                return self._known_call(node)
            case ast.Subscript() if ast.unparse(node.value) in ("os.environ", "environ"):
                return self.outside.env.get(_text_of(node.slice) or "")
        return None

    def _known_call(self, node: ast.Call) -> Any:
        path = _dotted(node.func)
        if path == "int" and len(node.args) == 1:
            return self._known(node.args[0])
        if path in ("os.getenv", "getenv", "os.environ.get", "environ.get") and node.args:
            default = self._known(node.args[1]) if len(node.args) > 1 else None
            return self.outside.env.get(_text_of(node.args[0]) or "", default)
        return self.outside.num_cpus if path.rpartition(".")[2] == "cpu_count" else None


def _arithmetic(op: ast.operator, left: int, right: int) -> int | None:
    if isinstance(op, ast.FloorDiv):
        return left // right if right else None
    if isinstance(op, ast.Mult):
        return left * right
    return left + right if isinstance(op, ast.Add) else left - right


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
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)) and isinstance(node.target, ast.Name):
            found.setdefault(node.target.id, []).append(node.value if isinstance(node, ast.AnnAssign) else None)
    single = {name: values[0] for name, values in found.items() if len(values) == 1}
    return {name: value for name, value in single.items() if value is not None and not isinstance(value, ast.Name)}


def _options_of(tree: ast.Module) -> dict[str, tuple[Sequence[str], ast.expr | None]]:
    """The flags and the default of each argparse option, by the attribute's name."""
    found: dict[str, tuple[Sequence[str], ast.expr | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[2] == "add_argument":
            flags = [text for text in map(_text_of, node.args) if text and text.startswith("-")]
            given = {one.arg: one.value for one in node.keywords if one.arg}
            long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
            dest = _text_of(given["dest"]) if "dest" in given else long.lstrip("-").replace("-", "_")
            found |= {dest: (flags, given.get("default"))} if dest else {}
    return found


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
