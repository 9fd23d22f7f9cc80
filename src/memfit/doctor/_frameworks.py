"""Name the framework that a script trains with and what makes it save at a stop, and calls that take all cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from memfit.doctor._command import parse_command
from memfit.doctor._script import read_script

#: The frameworks by memfit's module for each, which is also its page: the name, and what saves at a stop.
_FRAMEWORKS = {
    "huggingface": ("transformers", "stoppable(trainer)"),
    "lightning": ("Lightning", 'Stop("out").fit(trainer, ...)'),
    "accelerate": ("Accelerate", 'Stop(accelerator, "out")'),
}
_ALL_CORES = (
    "{}: n_jobs=-1 asks for all cores in each of {} jobs. joblib and scikit-learn keep to LOKY_MAX_CPU_COUNT, which "
    "memfit sets; other libraries do not: write n_jobs=int(os.environ['OMP_NUM_THREADS'])"
)


def explain_cores(words: Sequence[str], num_jobs: int, *, cwd: Path, env: Mapping[str, str]) -> str:
    """Return a warning if the script of a command of several jobs asks for all cores in each; else empty."""
    script = read_script(parse_command(words, cwd=cwd, env=env), cwd)
    return _ALL_CORES.format(", ".join(script.all_cores[:3]), num_jobs) if script.all_cores else ""


def explain_stop(words: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> str:
    """Return what makes a stop save in the framework that a command's script trains with, and which page says so."""
    script = read_script(parse_command(words, cwd=cwd, env=env), cwd)
    imports = script.imports
    uses = {
        "huggingface": script.trainer,  # its models alone are used in all kinds of loops
        "lightning": imports.get("lightning") or imports.get("pytorch_lightning"),
        "accelerate": imports.get("accelerate"),
    }
    for module, site in uses.items():
        if site and "memfit" not in imports:
            name, stop = _FRAMEWORKS[module]
            where = f"memfit.integrations.{module}, docs/frameworks/{module}.md"
            return f"{site} uses {name}: {stop} saves at a stop ({where})"
    return "docs/your-script.md shows the lines that save at a stop"
