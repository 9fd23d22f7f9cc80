"""Run the fast tests at one end of the support matrix, in an environment of its own.

    python tools/ends.py oldest|newest [--folder FOLDER] [PYTEST ARGUMENTS]

*oldest* is Python 3.11 with the lowest version that pyproject.toml allows of torch, the frameworks and memfit's own
dependencies; *newest* is Python 3.13 with the newest that pip finds. The first call installs PyTorch for CUDA, several
GB, into FOLDER (build/ends). docs/support.md has what both ends showed. Exit status: pytest's own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = {"oldest": "3.11", "newest": "3.13"}
EXTRAS = ("torch", "estimate", "huggingface", "lightning", "accelerate", "hpo")
TEST_TOOLS = ("pytest>=8.2", "pytest-timeout", "pytest-xdist", "hypothesis", "scipy")
#: What needs packages of other extras, or looks at the repository's own environment.
LEFT_OUT = ("benchmarks", "conformance", "examples", "finance", "forecaster", "workloads", "gpus", "slurm", "vm")


def floors() -> list[str]:
    """Return the lowest allowed version of each requirement, as pip's pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]
    lowest: dict[str, str] = {}
    for name, version in re.findall(r"^([\w.-]+)>=([\d.]+)$", "\n".join(wanted), re.MULTILINE):
        lowest[name] = max(lowest.get(name, version), version, key=lambda text: [int(part) for part in text.split(".")])
    return [f"{name}=={version}" for name, version in sorted(lowest.items())]


def main() -> int:
    """Make the environment if it is not there, and run the tests in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("end", choices=PYTHONS)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/ends")
    given, more = parser.parse_known_args()
    python = given.folder / given.end / "bin/python"
    if not python.exists():
        subprocess.run([f"python{PYTHONS[given.end]}", "-m", "venv", python.parent.parent], check=True)
    pins = floors() if given.end == "oldest" else []
    upgrade = ["--upgrade", "--upgrade-strategy=eager"] if given.end == "newest" else []
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *upgrade]
    subprocess.run([*pip, "-e", f"{ROOT}[{','.join(EXTRAS)}]", *pins, *TEST_TOOLS], check=True)
    tests = [path for path in sorted((ROOT / "tests").iterdir()) if path.name not in LEFT_OUT]
    rooms = [str(path) for path in tests if path.is_dir() or path.name.startswith("test_")]
    command = [python, "-m", "pytest", "-q", "-n", "2", "-m", "not slow and not long", *rooms, *more]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(command, cwd=ROOT, env={**env, "OMP_NUM_THREADS": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
