"""Print where the tests' seconds went, by file or by test, longest first.

    python tools/times.py build/test.xml [build/test-long.xml] [--tests] [--most N]

The files are what pytest writes with ``--junitxml``; a test's seconds hold its set-up and tear-down. Of tests that ran
side by side on several workers the seconds add up to more than the run took.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree


def seconds_of(paths: Sequence[Path], by_test: bool) -> Counter[str]:
    """Return the seconds of each file (``tests.jobs.test_local``) or each test in reports of pytest."""
    found: Counter[str] = Counter()
    for case in chain.from_iterable(ElementTree.parse(path).iter("testcase") for path in paths):
        place = case.get("classname") or ""
        name = f"{place}::{case.get('name')}" if by_test else place.split("[")[0]
        found[name] += float(case.get("time") or 0)  # type: ignore[assignment]  # a Counter of floats
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="+", metavar="report", help="what pytest wrote with --junitxml")
    parser.add_argument("--tests", action="store_true", help="a line for each test instead of each file")
    parser.add_argument("--most", type=int, default=30, metavar="N", help="so many lines (default: 30)")
    args = parser.parse_args()
    found = seconds_of(args.reports, args.tests)
    print(f"{sum(found.values()):8.1f} s in all, {len(found)} {'tests' if args.tests else 'files'}")
    for name, seconds in found.most_common(args.most):
        print(f"{seconds:8.1f} s  {name}")


if __name__ == "__main__":
    main()
