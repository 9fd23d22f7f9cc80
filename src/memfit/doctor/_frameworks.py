"""Name the framework that a script trains with, and the lines by which memfit watches, stops and resumes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.doctor._command import parse_command
from memfit.doctor._script import Script, read_script


@dataclass(frozen=True)
class Framework:
    """A framework: its name, the page about it, the module for it, and what a script adds for each of three steps."""

    name: str
    module: str
    watch: str
    stop: str
    exact: str

    @property
    def page(self) -> str:
        """The page of the documentation about it."""
        return f"docs/frameworks/{self.module}.md"

    def steps(self, site: str) -> str:
        """Return four lines: where the framework is used, and the three steps."""
        lines = [
            f"{site} uses {self.name}. Each of these works alone (memfit.integrations.{self.module}, {self.page}):"
        ]
        said = {"watch": "phases, steps and losses in memfit watch", "stop": "a stop saves, the next start goes on",
                "exact": "the same, and to the same bytes"}  # fmt: skip
        width = max(len(getattr(self, step)) for step in said)
        lines += [f"  {step:<5}  {getattr(self, step):<{width}}  {what}" for step, what in said.items()]
        return "\n".join(lines)


_HUGGINGFACE = Framework(
    "transformers", "huggingface", "Trainer(..., callbacks=[MemfitCallback()])", "stoppable(trainer)", "exact(trainer)"
)
_LIGHTNING = Framework(
    "Lightning",
    "lightning",
    "Trainer(..., callbacks=[MemfitCallback()])",
    'stop = Stop("out", every=500); Trainer(callbacks=[stop]); stop.fit(trainer, module, loader)',
    'exact = Exact("out", seed=1, every=500); Trainer(callbacks=[exact]); exact.fit(trainer, module, loader)',
)
_ACCELERATE = Framework(
    "Accelerate",
    "accelerate",
    "loop = MemfitCallback(accelerator)",
    'loop = Stop(accelerator, "out", every=500)',
    'loop = Exact(accelerator, "out", seed=1, every=500)',
)


def framework_of(script: Script) -> tuple[Framework, str] | None:
    """Return the framework that a script trains with, and where; None for no known one, or if it imports memfit."""
    imports = script.imports
    uses = (
        (_HUGGINGFACE, script.trainer),  # its models alone are used in all kinds of loops
        (_LIGHTNING, imports.get("lightning") or imports.get("pytorch_lightning")),
        (_ACCELERATE, imports.get("accelerate")),
    )
    return next(((one, site) for one, site in uses if site and "memfit" not in imports), None)


def explain_steps(words: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> str:
    """Return the lines for the framework that a command's script uses; empty if it uses none, or memfit already.

    The script is read, not run, with the modules beside it that it imports.
    """
    command = parse_command(words, cwd=cwd, env=env)
    found = framework_of(read_script(command.script, text=command.code, cwd=cwd))
    return found[0].steps(found[1]) if found else ""
