"""Run tests at an end of the support matrix, in an environment of its own.

    python tools/ends.py oldest|newest|both [--light] [--folder FOLDER] [PYTEST ARGUMENTS]

*oldest* is Python 3.11 with the lowest version that pyproject.toml allows of torch, the frameworks and memfit's own
dependencies; *newest* is Python 3.13 with the newest that pip finds. The first call installs PyTorch for CUDA, several
GB, into FOLDER (build/ends), and the fast tests run.

With --light, as in CI, no PyTorch is installed, and the tests listed below run. *oldest* borrows torch and all else
without a lowest version from the environment that runs this tool; *newest* is `pip install memfit`, without torch. A
Python that is missing is named and fails nothing.

docs/support.md has what both ends showed. Exit status: pytest's own, of the first end that failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = {"oldest": "3.11", "newest": "3.13"}
EXTRAS = ("torch", "estimate", "huggingface", "lightning", "accelerate", "hpo")
TEST_TOOLS = ("pytest>=8.2", "pytest-timeout", "pytest-xdist", "hypothesis")
#: What needs packages of other extras, or looks at the repository's own environment.
LEFT_OUT = ("benchmarks", "conformance", "examples", "gpus", "slurm", "vm")
#: What CI runs: what meets the packages or changes from Python to Python, in half a minute of one core.
LIGHT = {
    "oldest": """
        config/test_problems.py config/test_types.py config/test_yaml.py cli/test_flags_of_typer.py
        data/test_arrow.py::test_numbers_are_those_of_pyarrow_also_of_a_slice data/test_source.py
        estimation/test_huggingface.py::test_a_config_becomes_a_step_in_the_dtype_of_the_setup
        estimation/test_huggingface.py::test_experts_run_in_fp32_too
        integrations/test_accelerate.py::test_safe_step_recovers_stops_and_resumes integrations/test_canary.py
        integrations/test_huggingface_recovery.py::test_a_resume_goes_on_with_the_size_that_fits
        memory/test_budget_devices.py memory/test_process.py reports/test_summary.py test_claims.py
        training/test_contract.py::test_several_stops_in_one_training_change_nothing_and_then_nothing_is_left
        training/test_contract.py::test_watching_changes_nothing
    """,
    "newest": """
        config/test_problems.py config/test_types.py config/test_yaml.py cli/test_budget.py cli/test_completion.py
        cli/test_diagnose.py cli/test_flags_of_typer.py cli/test_launch.py cli/test_run_command.py
        data/test_arrow.py::test_numbers_are_those_of_pyarrow_also_of_a_slice diagnosis/test_fix.py
        diagnosis/test_kernel_log.py diagnosis/test_runs.py doctor/test_checks.py jobs/test_child.py
        jobs/test_death.py memory/test_budget.py memory/test_cgroup.py memory/test_process.py memory/test_walls.py
        planning/test_plan.py reports/test_runs.py reports/test_summary.py test_claims.py test_main.py
    """,
}


def floors() -> dict[str, str]:
    """Return the lowest allowed version of each requirement by its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]
    lowest: dict[str, str] = {}
    for name, version in re.findall(r"^([\w.-]+)>=([\d.]+)(?:,<[\d.]+)?$", "\n".join(wanted), re.MULTILINE):
        lowest[name] = max(lowest.get(name, version), version, key=lambda text: [int(part) for part in text.split(".")])
    return dict(sorted(lowest.items()))


def requirements(end: str, light: bool) -> list[str]:
    """Return what pip is to install at that end."""
    pins = [f"{name}=={version}" for name, version in floors().items() if not (light and name == "torch")]
    if light:
        return pins if end == "oldest" else ["--upgrade", "--editable", str(ROOT), *TEST_TOOLS]
    more = pins if end == "oldest" else ["--upgrade", "--upgrade-strategy=eager"]
    return ["--editable", f"{ROOT}[{','.join(EXTRAS)}]", *more, *TEST_TOOLS, "scipy"]


def make_environment(end: str, light: bool, folder: Path) -> Path | None:
    """Install that end, and return its Python; None if this machine has no such Python."""
    # pyenv's own programs look at the variable; without pyenv it says nothing.
    env = {**os.environ, "PYENV_VERSION": PYTHONS[end]}
    is_own = sysconfig.get_python_version() == PYTHONS[end]
    start = [sys.executable if is_own else f"python{PYTHONS[end]}", "-m", "venv", "--without-pip", str(folder)]
    python = folder / "bin/python"
    try:
        if not python.exists():
            subprocess.run(start, check=True, env=env, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        if light:
            return None
        raise SystemExit(f"this end needs Python {PYTHONS[end]}, which is not here: {error}") from error
    if light and end == "oldest":
        borrowed = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (folder / f"lib/python{PYTHONS[end]}/site-packages/borrowed.pth").write_text(borrowed)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-compile", *requirements(end, light)], check=True, stderr=subprocess.STDOUT)
    return python


def run_end(end: str, light: bool, folder: Path, more: list[str]) -> int:
    """Make the environment of that end, run its tests, and return pytest's exit status."""
    since = monotonic()
    python = make_environment(end, light, folder / (end + "-light" * light))
    if python is None:
        print(f"{end}: not run: there is no Python {PYTHONS[end]} here", flush=True)
        return 0
    installed = monotonic() - since
    tests = [path for path in sorted((ROOT / "tests").iterdir()) if path.name not in LEFT_OUT]
    fast = [str(path) for path in tests if path.is_dir() or path.name.startswith("test_")]
    chosen = [str(ROOT / "tests" / name) for name in LIGHT[end].split()]
    what = ["-m", "not long", *chosen] if light else ["-n", "2", "-m", "not (slow or core or long)", *fast]
    if end == "oldest":
        what += ["-W", "ignore::DeprecationWarning"]  # old packages with newer ones that have no lowest version
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *what, *more],
        cwd=ROOT,
        env={**env, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE if light else None,  # two ends run at once
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    took = f"{installed:.0f} s to install, {monotonic() - since - installed:.0f} s for the tests"
    print(f"{done.stdout or ''}{end}: Python {PYTHONS[end]}: exit status {done.returncode}, {took}", flush=True)
    return done.returncode


def main() -> int:
    """Run the ends that are asked for: the light ones side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("end", choices=[*PYTHONS, "both"])
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/ends")
    given, more = parser.parse_known_args()
    run = partial(run_end, light=given.light, folder=given.folder, more=more)
    with ThreadPoolExecutor(2 if given.light else 1) as pool:
        codes = list(pool.map(run, PYTHONS if given.end == "both" else [given.end]))
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
