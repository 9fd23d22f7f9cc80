"""Change the library in one place at a time, and see how many of the changes `make test` notices.

    python tools/mutants.py [--modules 60] [--each 3] [--seed 1] [--jobs 2]

First the tests of `make test` run once, and each tells which functions it enters, and which lines of the changed ones,
also in the processes that it starts. Then the largest modules are changed, each in so many places that the seed draws:
another comparison, sign, number or truth, a function that returns None. For each change 120 tests run, in a copy of the
repository: first those that run its line, that are of its package and enter little else. A change that none notices is
printed; it is to be looked at: a test is missing, or the change makes no difference. What no test reaches counts as not
noticed, and so does a time limit. Tests that fail without a change are named, and take no part.

Exit status: 0 if as many are noticed as asked (``--least``), else 1.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ASKED = "core or not (slow or long)"
#: For one change so many tests run at most, and for so many seconds.
MOST_TESTS, SECONDS = 120, 120.0
#: Records what each test enters of the library, and which of the changed places: in pytest, and in what a test starts.
_RECORDER = r'''
"""PYTEST_DONT_REWRITE"""
_COPY, _PLACES = "@COPY", @PLACES
import os, re, sys, threading

_open, _write, _close, _here = os.open, os.write, os.close, os.path.dirname(__file__)
_test, _found, _kept, _codes, _SRC = "", set(), [], {}, _COPY + "src/memfit/"

def _note(*what):
    if what not in _found:
        _found.add(what)
        _kept.append("\t".join(what) + "\n")
        if os.getpid() != _own:  # a child, which may be killed
            _put()

def _put():
    try:
        to = _open(f"{_here}/{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        _write(to, "".join(_kept).encode())
        _close(to)
    except OSError:
        pass
    _kept.clear()

def _look(frame, event, arg):
    code = frame.f_code
    if not code.co_filename.startswith(_SRC):
        return None
    if id(code) not in _codes:
        name = code.co_filename[len(_COPY):]
        function = re.sub(r"(\.<locals>\.<\w+>)+$", "", code.co_qualname)  # not that of a comprehension
        _codes[id(code)] = code, name, function, function in _PLACES.get(name, ())
    _, name, function, is_changed = _codes[id(code)]
    _note(_test, name, function)
    def in_it(frame, event, arg):
        _note(_test, name, f"{function}:{frame.f_lineno}")
        return in_it
    return in_it if is_changed else None

def _begin(test, look=_look):
    global _test
    _test = test
    threading.settrace(look)
    sys.settrace(look)

def pytest_runtest_logstart(nodeid):
    if "PYTEST_XDIST_WORKER" in os.environ:
        _begin(nodeid)

def pytest_runtest_logreport(report):
    if report.failed:
        _note(report.nodeid, "", "failed")

def pytest_runtest_logfinish():
    _begin("", None)
    _found.clear()
    _put()

_own = None if "PYTEST_CURRENT_TEST" in os.environ else os.getpid()
if _own is None:
    _begin(os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0])
'''
_OTHER: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Change(NamedTuple):
    """One place of a module: the function that it is in, and what stands there before and after."""

    module: str
    function: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]


def changes_of(module: str, text: str) -> Iterator[Change]:
    """Yield every change of a module's functions."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.splitlines()

    def place(line: int, column: int) -> int:  # ast counts bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def walk(node: ast.AST, function: str, prefix: str) -> Iterator[Change]:
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", "")
            if isinstance(child, ast.ClassDef):
                yield from walk(child, "", f"{prefix}{name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                for statement in child.body:  # not its defaults and annotations
                    yield from walk(ast.Module([statement], []), f"{prefix}{name}", f"{prefix}{name}.<locals>.")
            elif not isinstance(child, ast.JoinedStr) and getattr(child, "arg", "") != "strict":
                # The parts of an f-string have no places of their own, and zip's strict makes no difference to a pass.
                other = _changed(child) if function else None
                if other is not None and isinstance(child, ast.expr | ast.stmt) and child.end_lineno:
                    start = place(child.lineno, child.col_offset)
                    end = place(child.end_lineno, child.end_col_offset or 0)
                    new = ast.unparse(ast.fix_missing_locations(other))
                    new = f"({new})" if isinstance(child, ast.BinOp | ast.Compare | ast.BoolOp) else new
                    yield Change(module, function, child.lineno, start, end, text[start:end], new)
                yield from walk(child, function, prefix)

    yield from walk(ast.parse(text), "", "")


def _changed(node: ast.AST) -> ast.AST | None:
    """Return what takes a node's place; None where it stays."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in _OTHER:
            return ast.Compare(left, [_OTHER[type(op)]()], [right])
        case ast.BinOp(left, op, right) if type(op) in _OTHER and not isinstance(left, ast.Constant | ast.JoinedStr):
            return ast.BinOp(left, _OTHER[type(op)](), right)
        case ast.BoolOp(op, values):
            return ast.BoolOp(_OTHER[type(op)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool() as value):
            return ast.Constant(not value)
        case ast.Constant(int() as value):
            return ast.Constant(value + 1)
        case ast.Return(ast.Constant(value)) if value is None or value is False:  # None is as untrue as False
            return None
        case ast.Return(ast.expr()):
            return ast.Return(ast.Constant(None))
    return None


def draw(modules: int, each: int, seed: int) -> list[Change]:
    """Return so many changes of each of the largest modules, those that the seed draws."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "src/memfit").rglob("*.py")}
    largest = sorted(sources, key=lambda name: (-sources[name].count("\n"), name))[:modules]
    found = list[Change]()
    for name in largest:  # what one module has changes no draw of another
        possible = sorted(changes_of(name, sources[name]))
        found += random.Random(f"{seed} {name}").sample(possible, min(each, len(possible)))
    return found


def reach(copy: Path, jobs: int, changes: list[Change]) -> tuple[list[list[str]], set[str]]:
    """Run the tests once; return those that enter each change's function, the best first, and which of all fail."""
    here, places = copy / "reached", defaultdict[str, set[str]](set)
    here.mkdir()
    for one in changes:
        places[one.module].add(one.function)
    (here / "sitecustomize.py").write_text(_RECORDER.replace("@COPY", f"{copy}/").replace("@PLACES", str(dict(places))))
    words = ("-n", str(2 * jobs), "--dist", "loadscope", "-p", "sitecustomize", "-m", ASKED)
    _pytest(copy, *words, env={"PYTHONPATH": f"{here}{os.pathsep}{_folders(copy)}"})
    ran, size, failed = defaultdict[tuple[str, str], dict[str, set[int]]](dict), Counter[str](), set[str]()
    for test, file, what in {
        tuple(line.split("\t")) for path in here.glob("*.txt") for line in path.read_text().splitlines()
    }:
        function, _, line = what.partition(":")
        ran[file, function].setdefault(test, set()).update({int(line)} if line else ())
        size[test] += not line
        failed |= {test} if not file else set()
    if not ran:
        sys.exit(f"no test ran; a run of its own says why: pytest -m '{ASKED}'")
    return [best(one, ran[one.module, one.function], size, failed) for one in changes], failed


def best(change: Change, ran: dict[str, set[int]], size: Counter[str], failed: set[str]) -> list[str]:
    """Return tests that run a change's function, by the lines of it that each runs and by how much else it enters.
    First those that run its line, in turn of another file or by another way through the function: one file's tests
    often look at the same. Among equals those of its package.
    """
    near, turn, rank = f"/{change.module.split('/')[2]}/", Counter[tuple[str, frozenset[int]]](), {}
    for test in sorted(ran.keys() - failed, key=lambda test: (near not in test, size[test], test)):
        way = test.partition("::")[0], frozenset(ran[test])
        rank[test] = (change.line not in way[1], turn[way])
        turn[way] += 1
    return sorted(rank, key=lambda test: rank[test])


def _folders(copy: Path) -> str:
    return os.pathsep.join(str(copy / name) for name in ("src", "systems", "tests"))


def _pytest(
    copy: Path, *words: str, seconds: float | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    own = {"PYTHONPATH": _folders(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | (env or {})
    return subprocess.run(
        command, cwd=copy, env=dict(os.environ) | own, capture_output=True, text=True, errors="replace", timeout=seconds
    )


def is_noticed(change: Change, tests: list[str], copies: SimpleQueue[Path]) -> bool:
    """Return True if one of the first tests fails with the change."""
    if not tests:
        return False
    copy = copies.get()
    path = copy / change.module
    text = path.read_text()
    path.write_text(change.applied(text))
    try:
        done = _pytest(copy, "-x", *tests[:MOST_TESTS], seconds=SECONDS)
        return done.returncode in (1, 2)  # a test failed, or its file
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(text)
        copies.put(copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=60, metavar="N", help="so many of the largest (default: 60)")
    parser.add_argument("--each", type=int, default=3, metavar="N", help="so many changes of each (default: 3)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="which changes are drawn (default: 1)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="so many at once (default: 2)")
    parser.add_argument("--least", type=float, default=0.85, metavar="SHARE", help="to be noticed (default: 0.85)")
    options = parser.parse_args()
    changes = draw(options.modules, options.each, options.seed)
    files = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    copies = SimpleQueue[Path]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.jobs):
            copy = Path(folder, str(number))
            for name in files.splitlines():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
            copies.put(copy)
        tests, failed = reach(Path(folder, "0"), options.jobs, changes)
        print(f"{len(changes)} changes; left out, for they fail without one: {', '.join(failed) or 'none'}", flush=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            seen = list(pool.map(partial(is_noticed, copies=copies), changes, tests))
    for one, noticed, own in zip(changes, seen, tests, strict=True):
        if not noticed:
            print(f"{one.module}:{one.line} {one.function} ({len(own)} tests): {one.old!r} -> {one.new!r}")
    share = sum(seen) / len(seen)
    print(f"{sum(seen)} of {len(seen)} changes noticed, {share:.0%} ({options.least:.0%} asked)")
    sys.exit(0 if share >= options.least else 1)


if __name__ == "__main__":
    main()
