"""What a script says of itself: imports, loaders, forks and variables that it sets; by its syntax, never by running it.

The script is read, and the modules beside it that it imports itself: one level.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.doctor._syntax import Outside, constants_of, dotted, options_of, text_of

_LOADERS = frozenset({"DataLoader", "StatefulDataLoader"})
#: Calls whose keyword says how many workers a loader inside will have.
_LOADER_KEYWORD = "dataloader_num_workers"
#: What starts processes: its name, and the keyword that may choose how.
_FORKS = {"Pool": "context", "Process": "context", "ProcessPoolExecutor": "mp_context", "fork": ""}
_CONTEXTS = frozenset({"fork", "spawn", "forkserver"})
#: The position of num_workers among DataLoader's arguments. Source: torch/utils/data/dataloader.py (torch 2.13).
_NUM_WORKERS_AT = 5
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Number:
    """A number in the code: its value, or None when the syntax does not tell, and the text that stands there.

    ``refused`` is the option with its value on the command line, where argparse takes no such value.
    """

    value: int | None
    text: str
    refused: str = ""


@dataclass(frozen=True)
class LoaderCall:
    """A loader that is made somewhere.

    Attributes:
        site: ``file:line``.
        num_workers: How many workers it has.
        start_method: The start method that it names; None when it names none, empty when the syntax does not tell.
        prefetch_factor: Batches that each worker has ready.
    """

    site: str
    num_workers: Number
    start_method: str | None
    prefetch_factor: Number


@dataclass(frozen=True)
class Site:
    """Something at a place of the code: a name, ``file:line``, and a word more where there is one."""

    name: str
    site: str
    more: str | None = None


@dataclass(frozen=True)
class Unread:
    """A file that could not be read as Python: ``file:line``, or the file alone, and why."""

    site: str
    why: str
    is_syntax: bool = False


@dataclass
class Script:
    """What was read.

    Attributes:
        files: The files that were read, the script first.
        imports: The first import of each top-level package, by name, as ``file:line``.
        loaders: The loaders that are made.
        forks: What starts processes; ``more`` is the start method that it names, or None.
        start_methods: ``set_start_method`` and its like.
        sharing: torch's sharing strategies that are set.
        variables: Environment variables that are set; ``more`` is the library that was imported before, or None.
        cuda: Where a GPU is first used, or None.
        threads: Where threads are started or their number is set.
        errors: Files that could not be read as Python, with the reason.
        refused: Words of the command that argparse refuses; ``site`` is the option's, ``more`` its type.
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
    errors: list[Unread] = field(default_factory=list)
    refused: list[Site] = field(default_factory=list)
    has_guard: bool = True


def read_script(
    path: Path | None,
    *,
    text: str | None = None,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: Path = Path(),
    num_cpus: int | None = None,
) -> Script:
    """What a script says of itself.

    Args:
        path: The script.
        text: Its text instead, as of ``python -c``.
        arguments: The words behind it: what ``args.num_workers`` will be.
        env: Its environment: what ``os.environ["NUM_WORKERS"]`` will be.
        cwd: The folder that it starts in; files below it are named from there.
        num_cpus: What ``os.cpu_count()`` will be.

    >>> script = read_script(None, text="from torch.utils.data import DataLoader as L\\nL(d, num_workers=2 + 1)")
    >>> script.imports, script.loaders[0].site, script.loaders[0].num_workers.value
    ({'torch': '-c:1'}, '-c:2', 3)
    """
    script = Script()
    outside = Outside(arguments, env or {}, num_cpus)
    folders = [cwd, *([path.parent] if path is not None else [])]
    if text is not None:
        _read_one(script, text, "-c", outside)
    elif path is not None:
        label = _label(path, cwd)
        tree = _read_one(script, _bytes_of(path, label, script), label, outside)
        script.has_guard = any(isinstance(one, ast.If) and "__main__" in ast.unparse(one.test) for one in tree.body)
        for local in _local_files(tree, folders):
            script.imports.pop(local.parent.name if local.name == "__init__.py" else local.stem, None)
            if local.resolve() != path.resolve():
                beside = _label(local, cwd)
                _read_one(script, _bytes_of(local, beside, script), beside, outside)
    return script


def _bytes_of(path: Path, label: str, script: Script) -> bytes:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise OSError(f"larger than {_MOST_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        script.errors.append(Unread(label, str(error.strerror or error)))
        return b""


def _label(path: Path, cwd: Path) -> str:
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def _read_one(script: Script, text: str | bytes, label: str, outside: Outside) -> ast.Module:
    script.files.append(label)
    tree = ast.Module(body=[], type_ignores=[])
    data = text.encode(errors="replace") if isinstance(text, str) else text
    try:
        if b"\0" in data:
            why = "source code cannot contain null bytes"
            raise SyntaxError(why, (label, data[: data.index(b"\0")].count(b"\n") + 1, None, None))
        tree = ast.parse(data)
        _Reader(script, label, tree, outside).visit(tree)
    except SyntaxError as error:
        site = label if error.lineno is None else f"{label}:{error.lineno}"
        script.errors.append(Unread(site, error.msg, is_syntax=True))
    except (ValueError, RecursionError) as error:
        script.errors.append(Unread(label, str(error)))
        return ast.Module(body=[], type_ignores=[])
    return tree


def _local_files(tree: ast.Module, folders: list[Path]) -> Iterator[Path]:
    """The files beside the script that it imports itself, each once."""
    seen = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [base, *(f"{base}.{one.name}".strip(".") for one in node.names)]
        for name in filter(None, names):
            for folder in folders:
                base_path = folder.joinpath(*name.split("."))
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
        self.constants = constants_of(tree)
        self.options = options_of(tree)
        for option in self.options.values():
            if word := option.refused(outside.option(option.flags)):
                script.refused.append(Site(word, f"{label}:{option.line}", option.type_name))

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
        path = dotted(node.func)
        last = path.rpartition(".")[2]
        name = self.renamed.get(last, last)
        given = {one.arg: one.value for one in node.keywords if one.arg}
        if name in _LOADERS or _LOADER_KEYWORD in given:
            self._loader(node, given)
        elif name in _FORKS and _is_fork(path, name, self.origins.get(path, "")):
            context = given.get(_FORKS[name])
            method = self._context_of(path, node.func) if context is None else self._context(context)
            self.script.forks.append(Site(path, self._site(node), method))
        elif name in ("set_start_method", "set_sharing_strategy") and node.args:
            chosen = text_of(node.args[0]) or ""
            where = self.script.start_methods if name == "set_start_method" else self.script.sharing
            where.append(Site(chosen, self._site(node)))
        elif name in ("setdefault", "putenv") and path.startswith("os.") and node.args:
            self._variable(node.args[0], node)
        elif path in ("threading.Thread", "Thread", "ThreadPoolExecutor", "torch.set_num_threads"):
            self.script.threads.append(Site(path, self._site(node)))
        if self.script.cuda is None and _uses_cuda(path, node):
            self.script.cuda = self._site(node)
        self.generic_visit(node)

    def _variable(self, name: ast.expr, node: ast.AST) -> None:
        if text := text_of(name):
            loaded = next((one for one in ("torch", "numpy", "polars") if one in self.loaded), None)
            self.script.variables.append(Site(text, self._site(node), loaded))

    def _loader(self, node: ast.Call, given: Mapping[str, ast.expr]) -> None:
        def number(name: str, default: int, at: int | None = None) -> Number:
            value = given.get(name)
            if value is None and at is not None and len(node.args) > at:
                value = node.args[at]
            if value is None:
                unknown = any(one.arg is None for one in node.keywords)
                return Number(None, "**") if unknown else Number(default, str(default))
            option = self.options.get(value.attr) if isinstance(value, ast.Attribute) else None
            refused = "" if option is None else option.refused(self.outside.option(option.flags))
            return Number(self._value(value), ast.unparse(value), refused)

        if _LOADER_KEYWORD in given:
            workers, prefetch = number(_LOADER_KEYWORD, 0), number("dataloader_prefetch_factor", 2)
        else:
            workers, prefetch = number("num_workers", 0, _NUM_WORKERS_AT), number("prefetch_factor", 2)
        context = given.get("multiprocessing_context")
        method = None if context is None else self._context(context)
        self.script.loaders.append(LoaderCall(self._site(node), workers, method, prefetch))

    def _context(self, node: ast.expr) -> str:
        """The start method of a context: a literal or ``get_context("spawn")``; empty when the syntax does not tell."""
        if isinstance(node, ast.Name):
            node = self.constants.get(node.id, node)
        if isinstance(node, ast.Call) and node.args:
            node = node.args[0]
        return text_of(node) or ""

    def _context_of(self, path: str, func: ast.expr) -> str | None:
        """The start method of ``get_context("spawn").Pool`` and of ``ctx.Pool``; None when nothing names one."""
        value = func.value if isinstance(func, ast.Attribute) else None
        if isinstance(value, ast.Name) and value.id in self.constants:
            value = self.constants[value.id]
        if isinstance(value, ast.Call) and dotted(value).endswith("get_context"):
            return self._context(value)
        return next((one for one in _CONTEXTS if one in path.split(".")[:-1]), None)

    def _value(self, node: ast.expr) -> int | None:
        """The whole number that an expression will be, or None when the syntax does not tell."""
        found = self._known(node)
        try:
            return int(found)
        except (TypeError, ValueError):
            return None

    def _known(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                value = self.constants.pop(node.id, None)  # out while it is worked out: it may name itself
                found = None if value is None else self._known(value)
                self.constants |= {} if value is None else {node.id: value}
                return found
            case ast.Attribute() if node.attr in self.options:
                option = self.options[node.attr]
                return self.outside.option(option.flags) or (option.default and self._known(option.default))
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv()):
                left, right = self._value(node.left), self._value(node.right)
                return None if left is None or right is None else _arithmetic(node.op, left, right)
            case ast.Call():
                return self._known_call(node)
            case ast.Subscript() if ast.unparse(node.value) in ("os.environ", "environ"):
                return self.outside.env.get(text_of(node.slice) or "")
        return None

    def _known_call(self, node: ast.Call) -> Any:
        path = dotted(node.func)
        if path == "int" and len(node.args) == 1:
            return self._known(node.args[0])
        if path in ("os.getenv", "getenv", "os.environ.get", "environ.get") and node.args:
            default = self._known(node.args[1]) if len(node.args) > 1 else None
            return self.outside.env.get(text_of(node.args[0]) or "", default)
        if path in ("os.cpu_count", "cpu_count", "multiprocessing.cpu_count", "mp.cpu_count"):
            return self.outside.num_cpus
        return None


def _arithmetic(op: ast.operator, left: int, right: int) -> int | None:
    if isinstance(op, ast.FloorDiv):
        return left // right if right else None
    if isinstance(op, ast.Mult):
        return left * right
    return left + right if isinstance(op, ast.Add) else left - right


def _is_fork(path: str, name: str, origin: str) -> bool:
    """Whether a name that others have too belongs to processes here; ``origin`` is the module of a bare name."""
    before = path.rpartition(".")[0]
    if name == "fork":
        return before == "os" or origin == "os"
    if name == "ProcessPoolExecutor" or "multiprocessing" in origin:
        return True
    return before.rpartition(".")[2] in {"multiprocessing", "mp", "ctx", "context", "get_context", *_CONTEXTS}


def _uses_cuda(path: str, node: ast.Call) -> bool:
    if path.endswith(".cuda") or path in ("torch.cuda.init", "torch.cuda.set_device"):
        return True
    texts = [text_of(one) for one in (*node.args, *(one.value for one in node.keywords))]
    return path.rpartition(".")[2] in ("to", "device") and any(one and one.startswith("cuda") for one in texts)
