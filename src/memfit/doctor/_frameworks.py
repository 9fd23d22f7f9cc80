"""Name the framework that a script trains with and what makes it save at a stop, and calls that take all cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from memfit.doctor._command import parse_command
from memfit.doctor._script import read_script


class _Framework(NamedTuple):
    name: str
    module: str  # of memfit's, which is also its page
    stop: str  # what saves at a stop


_HUGGINGFACE = _Framework("transformers", "huggingface", "stoppable(trainer)")
_LIGHTNING = _Framework("Lightning", "lightning", 'Stop("out", every=500).fit(trainer, ...)')
_ACCELERATE = _Framework("Accelerate", "accelerate", 'Stop(accelerator, "out", every=500)')
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
    uses = (
        (_HUGGINGFACE, script.trainer),  # its models alone are used in all kinds of loops
        (_LIGHTNING, imports.get("lightning") or imports.get("pytorch_lightning")),
        (_ACCELERATE, imports.get("accelerate")),
    )
    for one, site in uses:
        if site and "memfit" not in imports:
            page = f"docs/frameworks/{one.module}.md"
            return f"{site} uses {one.name}: {one.stop} saves at a stop (memfit.integrations.{one.module}, {page})"
    return "docs/your-script.md shows the lines that save at a stop"
