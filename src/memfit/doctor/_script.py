"""Read what a script does from its syntax: imports, loaders, forks, variables that it sets. Nothing is run.

The modules beside it that it imports are read too, one level deep.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from memfit.doctor._command import Command

_LOADERS = frozenset({"DataLoader", "StatefulDataLoader"})
_LOADER_KEYWORD = "dataloader_num_workers"  # calls with this keyword make a loader with so many workers
#: What starts processes, and the keyword that chooses how.
_FORKS = {"Pool": "context", "Process": "context", "ProcessPoolExecutor": "mp_context", "fork": ""}
_CONTEXTS = frozenset({"fork", "spawn", "forkserver"})
#: The position of num_workers among DataLoader's arguments. Source: torch/utils/data/dataloader.py (torch 2.13).
_NUM_WORKERS_AT = 5
_MOST_BYTES = 4 << 20
_TRAINER = re.compile(r"(?:transformers|trl)\.(?:\w+\.)*\w*Trainer")


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
    variables: list[Site] = field(default_factory=list)  # that are set; ``more``: the library imported before
    trainer: str | None = None  # the first Trainer of transformers or TRL
    cuda: str | None = None
    all_cores: list[str] = field(default_factory=list)  # calls with ``n_jobs=-1``
    errors: list[Site] = field(default_factory=list)  # why a file was not read
    has_guard: bool = True  # ``if __name__ == "__main__"``; the text of ``python -c`` needs none


def read_script(command: Command, cwd: Path) -> Script:
    """Return what a command's script, or the text of ``python -c``, does; files below ``cwd`` are named from there."""
    script, path = Script(), command.script
    if command.code is not None:
        _read_text(script, command.code.encode(errors="replace"), "-c")
    elif path is not None:
        tree = _read_file(script, path, cwd)
        script.has_guard = any(isinstance(one, ast.If) and "__main__" in ast.unparse(one.test) for one in tree.body)
        for local in _local_files(tree, [cwd, path.parent]):
            if local.resolve() != path.resolve():
                _read_file(script, local, cwd)
    return script


def _read_file(script: Script, path: Path, cwd: Path) -> ast.Module:
    label = str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)
    data = b""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise OSError(f"larger than {_MOST_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        script.errors.append(Site(str(error.strerror or error), label))
    return _read_text(script, data, label)


def _read_text(script: Script, data: bytes, label: str) -> ast.Module:
    script.files.append(label)
    try:
        tree = ast.parse(data)
        _Reader(script, label, tree).visit(tree)
        return tree
    except SyntaxError as error:
        site = label if error.lineno is None else f"{label}:{error.lineno}"
        script.errors.append(Site(error.msg, site))
    except (ValueError, RecursionError) as error:
        script.errors.append(Site(str(error), label))
    return ast.Module(body=[], type_ignores=[])


def _local_files(tree: ast.Module, folders: list[Path]) -> list[Path]:
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
    def __init__(self, script: Script, label: str, tree: ast.Module) -> None:
        self.script, self.label = script, label
        self.renamed: dict[str, str] = {}
        self.origins: dict[str, str] = {}
        self.loaded: list[str] = []
        self.constants = _constants_of(tree)

    def _site(self, node: ast.AST) -> str:
        return f"{self.label}:{getattr(node, 'lineno', 0)}"

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            self._import(one.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module:
            self._import(node.module, node)
            self.origins |= {one.asname or one.name: node.module for one in node.names}
            for one in node.names:
                self._trainer(f"{node.module}.{one.name}", node)
        self.renamed |= {one.asname: one.name for one in node.names if one.asname}

    def _import(self, name: str, node: ast.AST) -> None:
        self.loaded.append(name.partition(".")[0])
        self.script.imports.setdefault(self.loaded[-1], self._site(node))

    def _trainer(self, path: str, node: ast.AST) -> None:
        if self.script.trainer is None and _TRAINER.fullmatch(path):
            self.script.trainer = self._site(node)

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
        elif name == "set_start_method" and node.args:
            script.start_methods.append(Site(_text_of(node.args[0]) or "", site))
        elif name in ("setdefault", "putenv") and path.startswith("os.") and node.args:
            self._variable(node.args[0], node)
        elif "n_jobs" in given and ast.unparse(given["n_jobs"]) == "-1":
            script.all_cores.append(site)
        self._trainer(path, node)
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
        """The whole number that an expression is; None if it is neither a literal nor a name of one."""
        if isinstance(node, ast.Name):
            node = self.constants.get(node.id, node)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int) else None


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
