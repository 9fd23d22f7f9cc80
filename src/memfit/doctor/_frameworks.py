"""Name the framework that a script trains with and what makes it save at a stop, and calls that take all cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from memfit.doctor._command import parse_command
from memfit.doctor._script import Script, read_script


class Framework(NamedTuple):
    """A framework: its name, the module for it, which is also its page, and what saves at a stop."""

    name: str
    module: str
    stop: str


_HUGGINGFACE = Framework("transformers", "huggingface", "stoppable(trainer)")
_LIGHTNING = Framework("Lightning", "lightning", 'Stop("out", every=500).fit(trainer, ...)')
_ACCELERATE = Framework("Accelerate", "accelerate", 'Stop(accelerator, "out", every=500)')


def _framework_of(script: Script) -> tuple[Framework, str] | None:
    """Return the framework that a script trains with, and where; None for no known one, or if it imports memfit."""
    imports = script.imports
    uses = (
        (_HUGGINGFACE, script.trainer),  # its models alone are used in all kinds of loops
        (_LIGHTNING, imports.get("lightning") or imports.get("pytorch_lightning")),
        (_ACCELERATE, imports.get("accelerate")),
    )
    return next(((one, site) for one, site in uses if site and "memfit" not in imports), None)


_ALL_CORES = (
    "{}: n_jobs=-1 asks for all cores in each of {} jobs. joblib and scikit-learn keep to LOKY_MAX_CPU_COUNT, which "
    "memfit sets; other libraries do not: write n_jobs=int(os.environ['OMP_NUM_THREADS'])"
)


def explain_cores(words: Sequence[str], num_jobs: int, *, cwd: Path, env: Mapping[str, str]) -> str:
    """Return a warning if the script of a command of several jobs asks for all cores in each; else empty."""
    command = parse_command(words, cwd=cwd, env=env)
    script = read_script(command.script, text=command.code, cwd=cwd)
    return _ALL_CORES.format(", ".join(script.all_cores[:3]), num_jobs) if script.all_cores else ""


def explain_stop(words: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> str:
    """Return what makes a stop save in the framework that a command's script trains with, and which page says so."""
    command = parse_command(words, cwd=cwd, env=env)
    found = _framework_of(read_script(command.script, text=command.code, cwd=cwd))
    if found is None:
        return "docs/your-script.md shows the lines that save at a stop"
    one, site = found
    page = f"docs/frameworks/{one.module}.md"
    return f"{site} uses {one.name}: {one.stop} saves at a stop (memfit.integrations.{one.module}, {page})"
