"""The rows of docs/project/requirements.md, and what is said to prove them: marks of tests, ``PROVES`` of benchmarks."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "project" / "requirements.md"


def rows() -> list[list[str]]:
    """Return the cells of each row: id, promise, state, note."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line[2:-1].split("|")] for line in lines if re.match(r"\| (S\d|C)-\d", line)]


@functools.cache
def marks() -> dict[str, tuple[str, ...]]:
    """Return the ids that each test names, by ``file::function``; a mark on anything else stands under its own name."""
    files = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "systems/tests").rglob("*.py")])
    files = [path for path in files if "mark.proves(" in path.read_text()]
    return {name: ids for path in files for name, ids in _marks_of(path)}


def _marks_of(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    for node in ast.walk(ast.parse(path.read_text())):
        for one in getattr(node, "decorator_list", []):
            if ast.unparse(one).startswith("pytest.mark.proves("):
                yield f"{path.relative_to(ROOT)}::{node.name}", tuple(ast.literal_eval(word) for word in one.args)


def benchmarks() -> dict[str, tuple[str, ...]]:
    """Return the ids that each benchmark names."""
    texts = {path.name: path.read_text() for path in sorted((ROOT / "benchmarks").rglob("*.py"))}
    found = {name: re.search(r"^PROVES = (\(.*\))$", text, re.MULTILINE) for name, text in texts.items()}
    return {name: ast.literal_eval(match[1]) for name, match in found.items() if match}


def summary(passed: set[str], failed: set[str]) -> str:
    """Return the closing line of ``pytest -m proves``: how many rows that are met were proved, and which were not.

    Args:
        passed: The ids of the tests that passed.
        failed: Those of the tests that failed.
    """
    met = [row[0] for row in rows() if row[2] == "met"]
    measured = {name for ids in benchmarks().values() for name in ids}
    left = [name for name in met if name in failed or name not in passed | measured]
    text = f"{len(met) - len(left)} of {len(met)} rows proved, {len(measured - passed)} of them by a benchmark"
    return f"{text}; not: {', '.join(left)}" if left else text
