"""Threads of numerical libraries: fixed by variables that the libraries read once, when they are loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, MutableMapping

from memfit.errors import UsageError

_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "POLARS_MAX_THREADS",
    "RAYON_NUM_THREADS",
)
_READERS = ("torch", "numpy", "polars", "numexpr")


def thread_env(threads: int) -> dict[str, str]:
    """Return the variables that give each numerical library this number of threads."""
    return dict.fromkeys(_VARIABLES, str(threads))


def limit_threads(
    threads: int, *, env: MutableMapping[str, str] = os.environ, modules: Container[str] = sys.modules
) -> None:
    """Give the numerical libraries of this process so many threads. Call it before any of them is imported.

    Jobs need not call it: memfit sets the same in their environment.

    Args:
        threads: Threads for each library, at least 1.
        env: The environment to change.
        modules: The modules that are loaded.

    Raises:
        UsageError: If one of them is imported already, or if there is no thread.

    Example:
        >>> env = {}
        >>> limit_threads(1, env=env, modules=[])
        >>> env["POLARS_MAX_THREADS"]
        '1'
    """
    loaded = [name for name in _READERS if name in modules]
    if loaded or threads < 1:
        raise UsageError(
            f"{threads} threads were asked for, and {' and '.join(loaded) or 'nothing'} is imported already.",
            rule="a library reads its number of threads once, when it is imported; there is at least 1.",
            remedy="call limit_threads(1) before the first import of torch, numpy or polars, or start by memfit run",
        )
    env.update(thread_env(threads))
