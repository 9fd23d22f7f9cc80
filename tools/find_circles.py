"""Circles of imports between files, also of those in functions and under ``TYPE_CHECKING``.

    python tools/find_circles.py

The contracts of import-linter look at packages; this looks at each file, and at packages that their own files import.
Exit status 1 if there is one.
"""

from __future__ import annotations

import sys

import grimp


def find_circles() -> set[tuple[str, ...]]:
    """Return the modules of each circle."""
    graph = grimp.build_graph("memfit", "memfit_workloads", cache_dir=None)
    both = {one: graph.find_upstream_modules(one) & graph.find_downstream_modules(one) for one in graph.modules}
    return {tuple(sorted({one, *others})) for one, others in both.items() if others}


if __name__ == "__main__":
    circles = find_circles()
    for circle in sorted(circles):
        print(" <-> ".join(circle))
    print(f"{len(circles)} circles between files" if circles else "no circles between files")
    sys.exit(1 if circles else 0)
