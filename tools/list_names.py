"""Print the site's page of public names: each with its first sentence, and what is promised of it.

    python tools/list_names.py > build/docs/api.md
    python tools/list_names.py --names > tests/public_names.txt

The names are each package's ``__all__``. ``--names`` prints them alone, one a line; a test compares that file.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator

INTRODUCTION = """# Public names

Import a name from the package that this page lists it under. Files and names with a leading underscore are private.
`help(memfit.plan)` shows arguments, units and errors. What each promise means between two versions:
[support.md](support.md#what-a-version-promises).
"""
#: A promise, what it says, and the modules that it holds for.
PROMISES = {
    "Kept": (
        "Start with these. From 1.0 on, only a major version changes them. Before 1.0, only a minor version may; the "
        "changelog then says under *Breaking* what to write.",
        "memfit",
    ),
    "Kept within a minor version": (
        "You write trainings, workloads and tools with these. A patch version never changes them. A minor version may, "
        "also after 1.0; the changelog then says what to write.",
        """
        memfit.training memfit.integrations.huggingface memfit.integrations.lightning memfit.integrations.accelerate
        memfit.pipeline memfit.data memfit.splits memfit.tuning memfit.memory memfit.planning memfit.estimation
        memfit.diagnosis memfit.rundir memfit.errors
        """,
    ),
    "No promise": (
        "memfit's own packages use these between each other. Any version may change them.",
        """
        memfit.jobs memfit.config memfit.reports memfit.slurm memfit.doctor memfit.integrations memfit.cli
        """,
    ),
}


def page() -> str:
    """Return the whole page."""
    lines = [INTRODUCTION]
    for title, (promise, modules) in PROMISES.items():
        lines += [f"## {title}", promise, ""]
        for name in modules.split():
            lines += [f"### `{name}`", *_rows(name, briefly=title == "No promise"), ""]
    return "\n".join(lines)


def public_names() -> list[str]:
    """Return every public name with its module: ``memfit.splits.PurgedKFold``."""
    modules = [module for _, promised in PROMISES.values() for module in promised.split()]
    return [f"{module}.{name}" for module in sorted(modules) for name in names_of(module)]


def names_of(module: str) -> list[str]:
    """Return the public names of a module: its ``__all__``, or else the classes that it defines."""
    loaded = importlib.import_module(module)
    own = [name for name, one in vars(loaded).items() if inspect.isclass(one) and one.__module__ == module]
    own = [name for name in own if not name.startswith("_")]
    return sorted(getattr(loaded, "__all__", own))


def _rows(module: str, briefly: bool) -> Iterator[str]:
    found = {name: getattr(importlib.import_module(module), name) for name in names_of(module)}
    described = {} if briefly else {name: one for name, one in found.items() if callable(one) and inspect.getdoc(one)}
    if described:
        yield "\n| name | what it is |\n| --- | --- |"
    for name, one in described.items():
        first = (inspect.getdoc(one) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        yield f"| `{name}` | {first.replace('``', '`')} |"
    if rest := [f"`{name}`" for name in found if name not in described]:
        yield ""
        yield ("Types and constants: " if described else "") + ", ".join(rest)


if __name__ == "__main__":
    print("\n".join(public_names()) if sys.argv[1:] == ["--names"] else page().rstrip())
