"""Names of a package that load their modules when they are first used."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

_EXPORT = re.compile(r"^ *from ([\w.]+) import (\w+) as \2$", re.MULTILINE)


def load_lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__``, which imports a name from its module at its first use, and its ``__dir__``.

    A package exports what it imports as itself, ``from package.module import Name as Name``, at its top or below
    ``if TYPE_CHECKING``. A package whose ``__all__`` names fewer promises these alone.
    """

    @cache
    def modules() -> dict[str, str]:
        source = vars(sys.modules[package])["__loader__"].get_source(package)
        return {name: module for module, name in _EXPORT.findall(source)}

    def find(name: str) -> Any:
        if name == "__all__":
            return sorted(modules())
        if name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(modules()[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return find, lambda: sorted({*vars(sys.modules[package]), *modules()})
