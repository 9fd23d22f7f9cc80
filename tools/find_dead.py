"""Names that nothing uses: private ones without a caller, public ones that neither source, docs nor examples use.

    python tools/find_dead.py

vulture reads the source; exports of a package do not count as a use. Words of the documentation, the examples and the
workloads do, and so do entry points that are written as text (``"package.module:function"``). Fields of records are
left out: many are written for people and machines that read a JSON file. Exit status 1 if a name is dead, or if an
exception below is not needed any more.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).parents[1]
#: Names that are used from outside of this repository, or by name at run time: each with who uses it.
EXCEPTIONS: dict[str, str] = {"get_n_splits": "scikit-learn asks a splitter for it"}
KINDS = ("function", "method", "property", "class")
#: Decorators that register what they decorate.
REGISTERED = ["@*.command*", "@*.callback*", "@model_validator*", "@field_validator*", "@*_validator*"]
#: Names that a base class calls.
CALLED = ["visit_*", "get_lr", "format_commands", "reducer_override", "find_class", "on_*"]
_ENTRY = re.compile(r"[\w.}]:(\w+)")


def _without_exports(text: str) -> str:
    """A module's source without ``__all__`` and ``from module import Name as Name``, on the same lines."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign):
            is_export = getattr(node.targets[0], "id", "") == "__all__"
        else:
            is_export = isinstance(node, ast.ImportFrom) and all(one.asname == one.name for one in node.names)
        if is_export and isinstance(node, ast.stmt):
            first, last = node.lineno, node.end_lineno or node.lineno
            lines[first - 1 : last] = [" " * node.col_offset + "pass"] + [""] * (last - first)
    return "\n".join(lines)


def _documents() -> Iterator[Path]:
    yield ROOT / "README.md"
    # Pages that name what was measured or tried use nothing: this one, and those of docs/project.
    yield from (path for path in ROOT.glob("docs/*.md") if path.name != "benchmarks.md")
    yield from ROOT.glob("docs/frameworks/*.md")
    yield from ROOT.glob("examples/**/*.py")
    yield from ROOT.glob("systems/memfit_workloads/**/*.md")


def find_dead() -> list[str]:
    """Return one line for each dead name, as ``path:line name``."""
    finder = Vulture(ignore_decorators=REGISTERED, ignore_names=CALLED)
    for path in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("systems/memfit_workloads/**/*.py")]):
        text = path.read_text()
        finder.scan(_without_exports(text), filename=path.relative_to(ROOT))
        finder.used_names |= set(_ENTRY.findall(text))
    for path in _documents():
        finder.used_names |= set(re.findall(r"\w+", path.read_text()))
    found = [
        one
        for one in finder.get_unused_code()
        if one.typ in KINDS and not (one.name.startswith("__") and one.name.endswith("__"))
    ]
    dead = [f"{one.filename}:{one.first_lineno} {one.name}" for one in found if one.name not in EXCEPTIONS]
    names = {one.name for one in found}
    return dead + [f"{name}: an exception that is not needed" for name in EXCEPTIONS if name not in names]


if __name__ == "__main__":
    dead = find_dead()
    for line in dead:
        print(line)
    print(f"{len(dead)} dead names" if dead else "no dead names")
    sys.exit(1 if dead else 0)
