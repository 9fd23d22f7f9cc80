"""Read a batch script with the places of its directives, options and variables; nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memfit.amounts import Scope
from memfit.errors import UsageError

#: The long names of sbatch's short options that are read. Source: sbatch(1), Slurm 24.11.
_LONG = {"c": "cpus-per-task", "G": "gpus", "N": "nodes", "n": "ntasks", "p": "partition", "t": "time"}
#: The options that request memory, each with its scope. Source: sbatch(1), srun(1), Slurm 24.11.
MEMORY_OPTIONS: dict[str, Scope] = {"mem": "node", "mem-per-cpu": "cpu", "mem-per-gpu": "gpu"}
_DIRECTIVE = re.compile(
    r"(?:--(?P<long>[a-z][a-z-]*)|-(?P<short>[A-Za-z]))(?:(?:=|[ \t]+(?!-))?(?P<value>[^\s#]+))?(?!\S)"
)
_VALUE = r"(?:[\"'](?!\S*=))?(?P<value>(?!--)[^\s\\;&|\"']+)"
#: ``--key value``, ``--key=value``, ``--key``; ``key=value`` of Hydra and of the shell. Quotes are passed over.
_SETTING = re.compile(
    rf"(?<![\w./=-])(?:--(?P<option>[A-Za-z][\w.-]*)(?:(?:=|[ \t]+){_VALUE})?"
    rf"|[+~]*(?P<key>[A-Za-z_]\w*(?:[./]\w+)*)={_VALUE.replace('value', 'given')})"
)
_ASSIGNMENT = re.compile(
    r"\s*(?P<export>export\s+)?(?P<key>[A-Za-z_]\w*)=(?:\"[^\"]*\"|'[^']*'|[^\s;&|#]*)(?P<more>.*)"
)
_STARTS = r"\s*(?:\w+=\S+\s+)*"
_RUNS = re.compile(
    rf"{_STARTS}(?:srun|mpirun|python[\d.]*|torchrun|accelerate|deepspeed|apptainer|singularity|docker|podman|memfit|uv"
    r"|poetry)\b"
)
#: A word behind ``srun`` that begins the program.
_PROGRAM = re.compile(
    r"(?<=\s)(?:\S*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|apptainer|singularity|bash|sh|env|memfit|uv|poetry"
    r"|\S+\.(?:py|sh))(?!\S)"
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Setting:
    """A name and its value as written, with the columns of the value; ``begin`` is that of the option itself."""

    key: str
    value: str
    line: int
    start: int
    end: int
    begin: int = 0

    @property
    def name(self) -> str:
        """The last part of its key, with underscores: ``dataloader.params.batch-size`` is ``batch_size``."""
        return re.split(r"[./]", self.key)[-1].replace("-", "_").lower()


@dataclass(frozen=True)
class BatchScript:
    """What a batch script says, each in order."""

    lines: tuple[str, ...]
    given: tuple[Setting, ...]  # sbatch's options
    settings: tuple[Setting, ...]  # options and overrides of its commands, and its variables
    env: dict[str, Setting]  # what a command would see: exported, or set in front of it

    @property
    def directives(self) -> dict[str, Setting]:
        """sbatch's options by long name; the last of each, as sbatch takes it."""
        return {one.key: one for one in self.given}

    @property
    def memory(self) -> Setting | None:
        """The last directive that requests memory."""
        return next((one for one in reversed(self.given) if one.key in MEMORY_OPTIONS), None)

    @property
    def step_memory(self) -> tuple[Setting, ...]:
        """What its ``srun`` commands request themselves, each for its own step."""
        return tuple(one for one in self.settings if one.key in MEMORY_OPTIONS and self._is_of_srun(one))

    def _is_of_srun(self, setting: Setting) -> bool:
        first = self.command_of(setting.line)
        before = [*self.lines[first : setting.line], self.lines[setting.line][: setting.start]]
        return bool(re.match(rf"{_STARTS}srun\b", self.lines[first])) and _PROGRAM.search(" ".join(before)) is None

    def find(self, *names: str) -> Setting | None:
        """Return the last setting of one of these names; of ``--name $X``, the place where X is assigned."""
        found = next((one for one in reversed(self.settings) if one.name in names), None)
        variable = _VARIABLE.fullmatch(found.value) if found else None
        if found is None or variable is None:
            return found
        key = variable[1] or variable[2]
        values = [one for one in self.settings if one.key == key and not _VARIABLE.search(one.value)]
        return values[-1] if values else found

    @property
    def first_command(self) -> int | None:
        """The index of the first line that starts a training or a launcher."""
        return next((at for at, line in enumerate(self.lines) if _RUNS.match(line)), None)

    def command_of(self, line: int) -> int:
        """Return the index of the line on which a line's command begins, over backslashes."""
        while line > 0 and self.lines[line - 1].rstrip().endswith("\\") and not self.lines[line - 1].startswith("#"):
            line -= 1
        return line


def read_script(path: Path) -> BatchScript:
    """Return a batch script; raise a `UsageError` if it cannot be read."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.",
            rule="--script and --against take a batch script.",
            remedy="name the script that started the job; scontrol write batch_script JOBID keeps it for a while",
        ) from error
    return parse_script(text)


def parse_script(text: str) -> BatchScript:
    """Return a batch script from its text.

    >>> script = parse_script("#SBATCH -N 2\\n#SBATCH --mem=4G # each\\nB=8\\npython a.py data.batch_size=$B --bf16\\n")
    >>> script.directives["nodes"].value, script.directives["mem"].value, script.find("batch_size").line
    ('2', '4G', 2)
    >>> script.find("bf16").value
    'true'
    """
    lines = tuple(re.split(r"\r?\n", text.removesuffix("\n")))  # no others, as for the shell
    given: list[Setting] = []
    settings: list[Setting] = []
    env: dict[str, Setting] = {}
    begun = continued = False
    for at, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            given += _directives(line, at) if not begun else ()
            continue
        begun = begun or bool(line.strip())  # sbatch looks no further than the first command
        found = [_setting(match, at) for match in _SETTING.finditer(line)]
        assigned = None if continued else _ASSIGNMENT.match(line)
        if assigned and found and (assigned["export"] or assigned["more"].strip()):
            env |= {one.key: one for one in found[:1] if one.key == assigned["key"]}
        settings += found
        continued = line.rstrip().endswith("\\")
    return BatchScript(lines, tuple(given), tuple(settings), env)


def _directives(line: str, at: int) -> Iterator[Setting]:
    """The options of an ``#SBATCH`` line, which may have several."""
    head = re.match(r"#SBATCH\s+", line)
    found = _DIRECTIVE.match(line, head.end()) if head else None
    while found:
        name = found["long"] or _LONG.get(found["short"], found["short"])
        start, end = found.span("value") if found["value"] else (found.end(), found.end())
        yield Setting(name, found["value"] or "", at, start, end, found.start())
        space = re.compile(r"\s*").match(line, found.end())
        found = _DIRECTIVE.match(line, space.end() if space else found.end())


def _setting(found: re.Match[str], at: int) -> Setting:
    group = "value" if found["option"] else "given"
    key, value = found["option"] or found["key"], found[group]
    if value is None:
        return Setting(key, "true", at, found.end(), found.end(), found.start())
    return Setting(key, value, at, *found.span(group), found.start())
