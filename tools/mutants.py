"""Change core modules in one place at a time, and see how many of the changes their own tests notice.

    python tools/mutants.py [MODULE ...] [--all] [--jobs N] [--quiet]

MODULE is one of the table below, like memory/_admission; without one all are run. Every fifth change is tried, always
the same ones; ``--all`` tries each, which takes hours. mutmut makes the changes (another comparison, sign, constant, a
call without an argument) and runs, for each, those tests of the named files that reach the changed function. A change
that they do not notice is printed with its difference: it is to be looked at, and either a test is missing, or the
change makes no difference.

Everything happens in a copy under a temporary folder. Exit status: 0 as many are noticed as the table asks, 1 fewer, 2
bad usage or tests that fail without any change.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What a module's own tests should notice, as a share.
LEAST = 0.85
#: Each core module under src/memfit, and the tests that mirror it.
MODULES: dict[str, tuple[str, ...]] = {
    "amounts": ("tests/test_amounts.py",),
    "data/_order": ("tests/data/test_sequences.py", "tests/data/test_batches.py"),
    "diagnosis/_figures": ("tests/diagnosis/test_figures.py",),
    "jobs/_enforce": ("tests/jobs/test_scheduler.py",),
    "jobs/_retry": ("tests/jobs/test_retry.py",),
    "jobs/policy": ("tests/jobs/test_policy.py",),
    "jobs/_scheduler": ("tests/jobs/test_scheduler.py",),
    "memory/_admission": ("tests/memory/test_admission.py",),
    "memory/_cgroup": ("tests/memory/test_cgroup.py", "tests/memory/test_budget.py"),
    "splits/_purged": ("tests/splits/test_purged.py", "tests/splits/test_walk_forward.py"),
    "training/_sizes": ("tests/training/test_sizes.py",),
}
_SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = ["src/memfit/{module}.py"]
pytest_add_cli_args_test_selection = [{tests}]
pytest_add_cli_args = ["-p", "no:cacheprovider", "-q", "-x", "-m", "not long and not container"]
also_copy = ["src", "docs", "README.md", "benchmarks", "examples"]
use_git_change_detection = false
track_dependencies = false
"""


def run(module: str, folder: Path, jobs: int, ends: str) -> tuple[int, list[str]]:
    """Return how many changes of a module were tried, and the differences of those that no test noticed.

    Changes are numbered within each function; those are tried whose number ends with one of ``ends``.

    Raises:
        RuntimeError: The tests fail without a change, or mutmut made none.
    """
    copy = folder / module.replace("/", "-")
    copy.mkdir()
    for name in ("src", "tests", "docs", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "README.md", copy)
    tests = ", ".join(f'"{test}"' for test in (*MODULES[module], f"src/memfit/{module}.py"))
    settings = (ROOT / "pyproject.toml").read_text() + _SETTINGS.format(module=module, tests=tests)
    (copy / "pyproject.toml").write_text(settings)
    mutmut = [str(Path(sys.executable).with_name("mutmut"))]
    done = subprocess.run(
        [*mutmut, "run", "--max-children", str(jobs), f"*[{ends}]"],
        cwd=copy,
        capture_output=True,
        text=True,
        errors="replace",
    )
    told = subprocess.run([*mutmut, "results", "--all", "true"], cwd=copy, capture_output=True, text=True, check=True)
    states = dict(line.strip().split(": ", 1) for line in told.stdout.splitlines() if "__mutmut_" in line)
    states = {name: state for name, state in states.items() if name[-1] in ends}
    if done.returncode or not states or "not checked" in states.values():
        raise RuntimeError(f"{module}: mutmut exited with {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    left = [name for name, state in states.items() if state in ("survived", "no tests", "suspicious")]
    shown = [subprocess.run([*mutmut, "show", name], cwd=copy, capture_output=True, text=True).stdout for name in left]
    return len(states), shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"one of {', '.join(MODULES)}")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="so many at once (default: 2)")
    parser.add_argument("--all", action="store_true", help="try every change, not each fifth")
    parser.add_argument("--quiet", action="store_true", help="print no differences")
    args = parser.parse_args()
    if unknown := [name for name in args.modules if name not in MODULES]:
        parser.error(f"{', '.join(unknown)}: not in the table of tools/mutants.py")
    made_in_all, left_in_all = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for module in args.modules or MODULES:
            try:
                made, left = run(module, Path(folder), args.jobs, "0123456789" if args.all else "05")
            except RuntimeError as error:
                print(error, file=sys.stderr)
                sys.exit(2)
            if not args.quiet:
                print("\n".join(left))
            made_in_all, left_in_all = made_in_all + made, left_in_all + len(left)
            print(f"{module}: {made - len(left)} of {made} changes noticed, {1 - len(left) / made:.0%}", flush=True)
    share = 1 - left_in_all / made_in_all
    print(f"all: {made_in_all - left_in_all} of {made_in_all}, {share:.0%} ({LEAST:.0%} at least)")
    sys.exit(0 if share >= LEAST else 1)


if __name__ == "__main__":
    main()
