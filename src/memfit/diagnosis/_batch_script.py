"""A batch script as text with places: its directives, the settings of its commands and its variables, nothing run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import UsageError

#: The long names of sbatch's short options. Source: sbatch(1), Slurm 24.11.
_LONG = {
    "A": "account", "a": "array", "C": "constraint", "c": "cpus-per-task", "D": "chdir", "e": "error", "G": "gpus",
    "J": "job-name", "L": "licenses", "N": "nodes", "n": "ntasks", "o": "output", "p": "partition", "q": "qos",
    "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_DIRECTIVE = re.compile(
    r"(?:--(?P<long>[a-z][a-z-]*)|-(?P<short>[A-Za-z]))(?:(?:=|[ \t]+(?!-))?(?P<value>[^\s#]+))?(?!\S)"
)
_OPTION = re.compile(r"(?<!\S)--(?P<key>[A-Za-z][\w.-]*)(?:(?:=|[ \t]+)(?P<value>(?!--)[^\s\\;&|]+))?")
_OVERRIDE = re.compile(r"(?<!\S)[+~]*(?P<key>[A-Za-z_]\w*(?:[./]\w+)*)=(?P<value>[^\s\\;&|]+)")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?(?P<key>[A-Za-z_]\w*)=(?P<value>\"[^\"]*\"|'[^']*'|[^\s;&|#]*)")
_RUNS = re.compile(
    r"^\s*(?:\w+=\S+\s+)*(?:srun|mpirun|python[\d.]*|torchrun|accelerate|deepspeed|apptainer|singularity|docker|podman"
    r"|memfit|uv|poetry)\b"
)
_STEP = re.compile(r"^\s*(?:\w+=\S+\s+)*srun\b")
#: A word that is no option of srun's: a program, a file, a path.
_PROGRAM = re.compile(
    r"(?<=\s)(?:\S*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|apptainer|singularity|bash|sh|env|memfit|uv|poetry"
    r"|\S+\.(?:py|sh))(?!\S)"
)
#: The options that say how much memory is asked for. Source: sbatch(1), srun(1), Slurm 24.11.
MEMORY = ("mem", "mem-per-cpu")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Setting:
    """A name and its value, with where the value stands.

    Attributes:
        key: As written, without dashes.
        value: As written, without quotes; ``true`` for an option without one.
        line: The index of its line.
        start, end: The value's place in that line; equal for an option without one.
        begin: Where the option itself begins in that line.
    """

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
    """What a batch script says.

    Attributes:
        path: The file.
        lines: Its text, without line ends.
        directives: sbatch's options by long name; of one given twice the last, as sbatch takes it.
        given: All of sbatch's options, in order.
        settings: The options and overrides of its commands, in order.
        variables: What it assigns, the last of each name.
        env: The names among them that a command would see: exported, or set before a command on its line.
    """

    path: Path
    lines: tuple[str, ...]
    directives: dict[str, Setting]
    settings: tuple[Setting, ...]
    variables: dict[str, Setting]
    env: dict[str, Setting]
    given: tuple[Setting, ...] = ()

    @property
    def memory(self) -> Setting | None:
        """The directive that says how much memory is asked for: of several the last."""
        return next((one for one in reversed(self.given) if one.key in MEMORY), None)

    @property
    def step_memory(self) -> tuple[Setting, ...]:
        """What its ``srun`` commands ask for themselves, each for its own step."""
        return tuple(one for one in self.settings if one.key in MEMORY and self._is_of_srun(one))

    def _is_of_srun(self, setting: Setting) -> bool:
        first = self.command_of(setting.line)
        if not _STEP.match(self.lines[first]):
            return False
        before = [*self.lines[first : setting.line], self.lines[setting.line][: setting.start]]
        return _PROGRAM.search(" ".join(before)) is None

    def find(self, *names: str) -> Setting | None:
        """The last setting of one of these names; one that is a variable leads to where that is assigned."""
        for setting in reversed(self.settings):
            if setting.name in names:
                return self._resolved(setting)
        return None

    def _resolved(self, setting: Setting) -> Setting:
        found = _VARIABLE.fullmatch(setting.value)
        target = self.variables.get(found[1] or found[2]) if found else None
        return target if target is not None and not _VARIABLE.search(target.value) else setting

    @property
    def first_command(self) -> int | None:
        """The index of the line of the first command that starts a training, or a launcher of one."""
        return next((at for at, line in enumerate(self.lines) if _RUNS.match(line)), None)

    def command_of(self, line: int) -> int:
        """The index of the line on which the command of a line begins, over backslashes."""
        while line > 0 and self.lines[line - 1].rstrip().endswith("\\") and not self.lines[line - 1].startswith("#"):
            line -= 1
        return line


def read_script(path: Path) -> BatchScript:
    """A batch script.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.",
            rule="--script and --against take the text of a batch script or of a compose file.",
            remedy="name the script that the job was started with; scontrol write batch_script JOBID keeps it a while",
        ) from error
    return parse_script(text, path)


def parse_script(text: str, path: Path | str = "-") -> BatchScript:
    """A batch script from its text.

    >>> script = parse_script("#SBATCH -N 2\\n#SBATCH --mem=4G # each\\nB=8\\npython a.py data.batch_size=$B --bf16\\n")
    >>> script.directives["nodes"].value, script.directives["mem"].value, script.find("batch_size").line
    ('2', '4G', 2)
    >>> script.find("bf16").value
    'true'
    """
    lines = tuple(text.splitlines())
    given: list[Setting] = []
    variables: dict[str, Setting] = {}
    env: dict[str, Setting] = {}
    settings: list[Setting] = []
    begun = continued = False
    for at, line in enumerate(lines):
        if line.startswith("#"):
            if not begun:
                given += _directives(line, at)
            continue
        begun = begun or bool(line.strip())  # sbatch looks no further than the first command
        code = line if line.lstrip()[:1] != "#" else ""
        if not continued and (assigned := _ASSIGNMENT.match(code)):
            one = _setting(assigned, at)
            variables[one.key] = one
            if "export" in code[: assigned.start("key")] or code[assigned.end() :].strip():
                env[one.key] = one
            code = _behind(code, assigned)
        settings += sorted(_settings(code, at), key=lambda one: one.start)
        continued = line.rstrip().endswith("\\")
    directives = {one.key: one for one in given}
    return BatchScript(Path(path), lines, directives, tuple(settings), variables, env, tuple(given))


def _directives(line: str, at: int) -> Iterator[Setting]:
    """The options of an ``#SBATCH`` line, of which it may have several.

    >>> [(one.key, one.value) for one in _directives("#SBATCH -N 2 --mem 64G  # each", 0)]
    [('nodes', '2'), ('mem', '64G')]
    """
    head = re.match(r"#SBATCH\s", line)
    place = head.end() if head else len(line)
    while place < len(line):
        if line[place].isspace():
            place += 1
            continue
        found = _DIRECTIVE.match(line, place)
        if found is None:
            return
        name = found["long"] or _LONG.get(found["short"], found["short"])
        start, end = found.span("value") if found["value"] else (found.end(), found.end())
        yield Setting(name, found["value"] or "", at, start, end, place)
        place = found.end()


def _behind(code: str, assigned: re.Match[str]) -> str:
    """A line of which an assignment is taken off, but for what stands in its quotes: these may be options too."""
    value, start, end = assigned["value"], *assigned.span("value")
    if value[:1] not in ("'", '"'):
        return " " * end + code[end:]
    closed = len(value) > 1 and value[-1] == value[0]
    return " " * (start + 1) + code[start + 1 : end - closed] + " " * closed + code[end:]


def _settings(code: str, at: int) -> Iterator[Setting]:
    for found in _OPTION.finditer(code):
        yield _setting(found, at)
    for found in _OVERRIDE.finditer(code):
        yield _setting(found, at)


def _setting(found: re.Match[str], at: int) -> Setting:
    value = found["value"]
    if value is None:
        return Setting(found["key"], "true", at, found.end(), found.end())
    start, end = found.span("value")
    if value[:1] in "\"'" and value[:1] == value[-1:] and len(value) > 1:
        value, start, end = value[1:-1], start + 1, end - 1
    elif value[-1:] in "\"'" and value and value.count(value[-1]) % 2:  # it closes a text that begins before
        value, end = value[:-1], end - 1
    elif value[:1] in "\"'" and value and value.count(value[0]) % 2:  # a text that ends later
        value, start = value[1:], start + 1
    return Setting(found["key"], value, at, start, end, found.start())
