"""Names of a package that load their modules when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def load_lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__``, which imports a name from its module at its first use, and its ``__dir__``.

    Args:
        package: The package, whose ``__name__`` it is.
        homes: The names in each module of the package, with spaces between them.

    Raises:
        ImportError: From the first function, if a name is gone; the error says what takes its place.
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in modules:
            from memfit.successors import missing_name

            raise missing_name(package, name)
        found = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return find, lambda: sorted({*vars(sys.modules[package]), *modules})
