"""Commands: their names, what is refused, ``--param``, ``--units``, and the values in their placeholders."""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
import shlex
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from memfit.errors import ConfigError, UsageError

_MAX_COMMANDS = 100_000

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NAME_RULE = "a name begins with a letter (a to z) or _; letters, digits and _ . - follow. A value may be any text."
PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")  # a name in braces, in a command
_VALUE = re.compile(r'\s*(?:"(?P<quoted>(?:[^"]|"")*)"\s*|(?P<plain>[^",][^,]*|))(?P<end>,|$)')
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(\d{1,18}))?")
_LIKE_A_RANGE = re.compile(r"[-+]?\.?\d[\d.eE+-]*?\.\.+.*|(\d{1,9})-(\d{1,9})")
_ALIKE = 0.75  # an unknown placeholder that is as similar to a parameter as this counts as a typing error
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_INTERPRETER = re.compile(r"(?:python|pypy)[0-9.]*|(?:ba|da|z|k)?sh|torchrun|Rscript|julia|node|perl|ruby")
_PYTHON = re.compile(r"(?:.*/)?python[0-9.]*")
_SCRIPT = re.compile(r"\S+\.(?:py|sh|R|jl|js|pl|rb)")


@dataclass(frozen=True)
class Choice:
    until: str | None = None  # the last stage; None for all
    anew: str | None = None  # the stage that runs again, valid or not, with all stages that read it
    skip: tuple[str, ...] = ()  # stages that count as passed
    units: str = "all"  # which units, such as ``2-5`` or ``1,3``; ``all``
    check_files: bool = False  # read all files of the results that are kept, also those that were read before
    combinations: tuple[Mapping[str, str], ...] = ()  # of a plain function: the values of its parameters, job by job


ALL = Choice()


def expand(command: Sequence[str] | None, params: Sequence[str]) -> list[dict[str, str]]:
    """Return every combination of the parameters, the last one changing fastest; without any, one empty combination.

    Args:
        command: The command whose placeholders they fill; it must use each parameter. None for a function.
        params: Texts such as ``fold=1..5``, ``step=0..100..10`` and ``lr=1e-3,1e-4``; quotes as in CSV keep a comma or
            two dots as they are: ``name="a,b",c``.

    Raises:
        UsageError: If a parameter cannot be read, is empty or unused, or there are too many combinations.

    >>> expand(["train", "{fold}", "{lr}"], ["fold=1..2", "lr=1e-3,1e-4"])[1:3]
    [{'fold': '1', 'lr': '1e-4'}, {'fold': '2', 'lr': '1e-3'}]
    """
    axes = dict[str, list[str]]()
    for name, values in map(parse_param, params):
        if name in axes:
            raise _bad(f"the parameter {name} is given twice", f"give all values of {name} in one place")
        axes[name] = values
        [(twice, number)] = Counter(values).most_common(1)
        if number > 1:
            raise _bad(f"the value {name}={twice} is given twice", "remove the second one: each command runs once")
    if command is not None:
        check_placeholders(command, list(axes))
    if (number := math.prod(map(len, axes.values()))) > _MAX_COMMANDS:
        raise _too_many(f"{' x '.join(str(len(values)) for values in axes.values())} = {number:,}")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def fill(command: Sequence[str], words: Mapping[str, str | Sequence[str]], *, shell: bool = False) -> tuple[str, ...]:
    """Return a command with its placeholders replaced, each by a text or by several; all other braces stay.

    With ``shell`` the command is one line for the shell, and the values are quoted.

    >>> fill(["train", "--fold={fold}", '{"a": {fold}, "b": {b}}'], {"fold": "3"})
    ('train', '--fold=3', '{"a": 3, "b": {b}}')
    >>> fill(["cat {fold} > {dir}/all"], {"fold": ["a", "b c"], "dir": "d"}, shell=True)
    ('sh', '-c', "cat a 'b c' > d/all")
    """
    lists = {name: [given] if isinstance(given, str) else list(given) for name, given in words.items()}
    if shell:
        line = PLACEHOLDER.sub(lambda found: shlex.join(lists.get(found[1], [])) or found[0], command[0])
        return ("sh", "-c", line)
    filled: list[str] = []
    for word in command:
        whole = PLACEHOLDER.fullmatch(word)
        if whole and whole[1] in lists:
            filled += lists[whole[1]]
        else:
            filled.append(PLACEHOLDER.sub(lambda found: " ".join(lists.get(found[1], [found[0]])), word))
    return tuple(filled)


def own_stdin(combinations: Sequence[Mapping[str, str]]) -> str | None:
    """Return the pipe or file on standard input that a single command reads; None for a terminal or several jobs."""
    if len(combinations) != 1 or combinations[0]:
        return None
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return None
    return f"/proc/{os.getpid()}/fd/0" if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else None


def expand_range(name: str, text: str) -> Sequence[str]:
    """Return the whole numbers of a range such as ``1..3`` or ``1..9..2``; any other text stays as it is."""
    match = _RANGE.fullmatch(text)
    if match is None:
        if (like := _LIKE_A_RANGE.fullmatch(text)) and (not like[1] or int(like[1]) < int(like[2])):
            raise _bad(
                f"--param {name}={text} is no range of whole numbers",
                f"write {name}=1..5; list other values: {name}=0.1,0.2; for the text: --param '{name}=\"{text}\"'",
            )
        return [text]
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if last < first or step < 1:
        raise _bad(f"--param {name}={text} is an empty range", "a range runs upward, by steps of 1 or more: 1..9..2")
    number = (last - first) // step + 1
    if number > _MAX_COMMANDS:
        raise _too_many(f"{name}={text}: {number:,}")
    # As in a shell: 01..10 counts 01, 02, ..., 10.
    padded = any(re.match(r"-?0\d", end) for end in (match[1], match[2]))
    width = max(len(match[1]), len(match[2])) if padded else 0
    return [f"{value:0{width}d}" for value in range(first, last + 1, step)]


def parse_param(text: str, read: Callable[[str, str], Sequence[Any]] = expand_range) -> tuple[str, list[Any]]:
    """Return the name and the values of a ``--param``: ranges, ``a,b`` and ``"a,b",c``, in any mixture."""
    given, (name, equals, text) = text, text.partition("=")
    if not equals or not name:
        raise _bad(f"--param {given} is not name=values", "write for example --param fold=1..5")
    if not _NAME.fullmatch(name):
        raise _bad(f"--param {given}: {name!r} cannot name a parameter", "rename it, for example fold", _NAME_RULE)
    values: list[Any] = []
    at, more = 0, True
    while more:
        part = _VALUE.match(text, at)
        if part is None:
            raise _bad(
                f"--param {name}={text}: a quote at character {at + 1} is not closed, or stands inside a value",
                'write quotes as in CSV: name="a,b","say ""hi"""',
            )
        plain = (part["plain"] or "").strip()
        if part["quoted"] is not None:
            values.append(part["quoted"].replace('""', '"'))
        elif not plain:
            raise _bad(f"--param {name}={text} has an empty value", f'write {name}="" for an empty text')
        else:
            values += read(name, plain)
        at, more = part.end(), part["end"] == ","
    return name, values


def check_placeholders(command: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a parameter that the command does not use, and a placeholder that nearly names one."""
    found = dict.fromkeys(name for word in command for name in PLACEHOLDER.findall(word))
    by_lower = {name.lower(): name for name in names}
    for placeholder in found:
        near = difflib.get_close_matches(placeholder.lower(), by_lower, n=1, cutoff=_ALIKE)
        if placeholder not in names and near:
            raise _bad(f"no parameter is named {{{placeholder}}}", f"did you mean {{{by_lower[near[0]]}}}?")
    if unused := next((name for name in names if name not in found), None):
        raise UsageError(
            f"the parameter {unused} is not used by the command.",
            rule="a command names each of its parameters in braces, or all their values would run the same command.",
            remedy=f"write {{{unused}}} where it belongs, for example --{unused} {{{unused}}}, or leave it out",
        )


def config_of_command(command: Sequence[str], stage: str = "cmd") -> dict[str, Any]:
    return {"experiment": _name_of(command), "stages": {stage: {"run": list(command)}}}


def check_command(command: Sequence[str], combinations: Sequence[Mapping[str, str]]) -> None:
    for (program,) in dict.fromkeys(fill(command[:1], combination) for combination in combinations):
        if shutil.which(program) is None:
            path = Path(program)
            what = f"'{program}' is a folder" if path.is_dir() else f"'{program}' is not executable"
            raise UsageError(
                f"{what if path.exists() else f'there is no program {program!r}'}.",
                rule="a command begins with a program: one on the PATH, or the path of an executable file.",
                remedy="correct the name, make the file executable (chmod +x), or name what runs it: python, sh",
            )
    script = command[1] if len(command) > 1 and _PYTHON.fullmatch(command[0]) else ""
    if script.endswith(".py") and not PLACEHOLDER.search(script) and not Path(script).exists():
        raise UsageError(
            f"there is no script {script!r} in {Path.cwd()}.",
            rule="what python is given as a script is a file.",
            remedy="correct its name, or go to its folder first",
        )


def _name_of(command: Sequence[str]) -> str:
    """Name a command by its script or module, else by its program.

    >>> _name_of(["python3", "-u", "jobs/train.py", "--fold", "3"]), _name_of(["python", "-m", "a.b"])
    ('train', 'a.b')
    >>> [_name_of(words) for words in (["python", "-c", "x"], ["bash", "go.sh", "1"], ["python", "train_{fold}.py"])]
    ['python', 'go', 'train_-fold']
    >>> _name_of(["programs/my tool!"]), _name_of(["programs/..."])
    ('my-tool', 'command')
    """
    name = Path(command[0]).name
    if _INTERPRETER.fullmatch(name):
        module = dict(pairwise(command)).get("-m")
        name = module or next((Path(word).name for word in command if _SCRIPT.fullmatch(word)), name)
    name = Path(name).stem if _SCRIPT.fullmatch(name) else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:80] or "command"


def label_of(value: Any, number: int, variable: str | None) -> str:
    """Name a unit by its number or text, or by the one under the variable's name.

    >>> label_of({"fold": 3, "first": "2020"}, 1, "fold"), label_of("small", 1, "size"), label_of([1], 4, "pair")
    ('3', 'small', '4')
    """
    if isinstance(value, Mapping):
        if variable is None:
            return f"{number:04d}"
        value = value.get(variable)
    text = str(value) if isinstance(value, int | str) else ""
    return text if _LABEL.fullmatch(text) else str(number)


def chosen_units(text: str, labels: Sequence[str] | None) -> list[int]:
    """Return the places of the chosen units: by number from 1, by range, by name; without labels check the form."""
    if text == "all":
        return list(range(len(labels or ())))
    chosen: set[int] = set()
    for part in map(str.strip, text.split(",")):
        numbers = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part)
        first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, 0)
        if labels is not None and part in labels:
            chosen.add(labels.index(part))
        elif numbers and 1 <= first <= last <= (last if labels is None else len(labels)):
            chosen |= set(range(first - 1, last))
        elif numbers or labels is not None or not _LABEL.fullmatch(part):
            known = "units are named or numbered from 1, and a range runs upward"
            if labels is not None:
                known = f"there are {len(labels)} units: {', '.join(labels[:8])}{', ...' if len(labels) > 8 else ''}"
            raise ConfigError(
                f"'{part}' names no unit.", rule=f"{known}.", remedy="write for example --units 1, 2-5 or all"
            )
    return sorted(chosen)


def _bad(what: str, remedy: str, rule: str = "memfit reads all parameters before it starts a command.") -> UsageError:
    return UsageError(f"{what}.", rule=rule, remedy=remedy)


def _too_many(what: str) -> UsageError:
    return UsageError(
        f"{what} commands are too many.",
        rule=f"one run holds at most {_MAX_COMMANDS:,} commands.",
        remedy="give fewer values, or split them over several commands",
    )
