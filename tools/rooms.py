"""Print what each room of the library weighs, and refuse what is above its number in ``tools/rooms.toml``.

    python tools/rooms.py [--since COMMIT] | --check | --write

``--check`` compares the files with the numbers, and the numbers with every earlier version of ``rooms.toml`` in git.
``--write`` lowers each number to today's size, and fills in those that are missing. It never raises one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = "tools/rooms.toml"
#: The kinds of files that count as lines: all that a room reads.
KINDS = (".py", ".json", ".jsonl", ".toml", ".html")
ROOTS = ("src", "systems", "tests", "benchmarks", "conformance", "tools", "docs", "examples")
#: So far a room may lie below its number, and the tokens of a line above theirs.
SLACK = 0.03
#: What is counted in a table of the file, and its sections.
KEYS, SECTIONS = ("lines", "tokens", "tests", "words"), ("rooms", "others", "words")
#: Folders of the five systems and of finance, below ``src`` and ``tests``.
SYSTEMS = ("memfit_workloads", "finance", "forecaster", "workloads")
MOVE = re.compile(r"([a-z_ ]+) -> ([a-z_ ]+) (\d+)")
WRITE = "run make lines ARGS=--write"


def number_of(path: str, pages: Mapping[str, list[str]]) -> str | None:
    """Return the name of the number that a file counts for, or None.

    >>> number_of("src/memfit/jobs/_local.py", {}), number_of("src/memfit/units.py", {})
    ('jobs lines', 'top lines')
    >>> number_of("tests/jobs/test_local.py", {}), number_of("tests/test_words.py", {})
    ('jobs tests', 'repository tests')
    >>> number_of("docs/log.md", {"project_pages": ["docs/log.md"]}), number_of("README.md", {"user_pages": ["*"]})
    ('project_pages words', 'user_pages words')
    """
    first, *others = path.split("/")
    if path.endswith(".md"):
        chosen = (name for name, patterns in pages.items() if any(fnmatch(path, one) for one in patterns))
        return None if first == "tests" else f"{next(chosen, 'other')} words"
    if not path.endswith(KINDS) or path == FILE or not others:
        return None
    if first == "systems" or others[0] in SYSTEMS:
        return "systems tests" if "tests" in path.split("/") else "systems lines"
    if first == "src":
        return f"{others[1]} lines" if len(others) > 2 else "top lines"
    if first == "tests":
        name = others[0].removeprefix("test_").removesuffix(".py")
        is_room, is_top = (ROOT / "src/memfit" / name).is_dir(), (ROOT / f"src/memfit/{name}.py").is_file()
        return f"{name if is_room else 'top' if is_top else 'repository'} tests"
    return f"{first} lines" if first in ("benchmarks", "conformance", "tools") else None


def weigh(texts: Iterable[tuple[str, str]], pages: Mapping[str, list[str]]) -> Counter[str]:
    """Return the size of each number; a token is a word, a number or a single sign, in code and comments alike."""
    sizes: Counter[str] = Counter()
    for path, text in texts:
        if name := number_of(path, pages):
            sizes[name] += len(text.split()) if name.endswith(" words") else text.count("\n")
            if path.startswith("src/memfit/"):
                sizes[name.replace(" lines", " tokens")] += len(re.findall(r"\w+|[^\w\s]", text))
    return sizes


def numbers(file: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of a version of the file, by the names that ``number_of`` gives."""
    tables = {name: table for section in SECTIONS for name, table in file.get(section, {}).items()}
    return {f"{name} {key}": table[key] for name, table in tables.items() for key in KEYS if key in table}


def library(sizes: Mapping[str, int], file: Mapping[str, Any], key: str = "lines") -> int:
    """Return the sum of all rooms."""
    return sum(sizes.get(f"{room} {key}", 0) for room in file["rooms"])


def above_or_below(sizes: Mapping[str, int], file: Mapping[str, Any]) -> list[str]:
    """Return what of today's files does not agree with the numbers."""
    allowed, found = numbers(file), []
    for name in sorted({*sizes, *allowed}):
        size, number = sizes.get(name, 0), allowed.get(name)
        if number is None:
            found.append(f"{name}: {size:,}, without a number in {FILE}: {WRITE}")
        elif size > number:
            found.append(f"{name}: {size:,}, {size - number:,} above their number {number:,}")
        elif size < number * (1 - SLACK):
            found.append(f"{name}: {size:,}, more than 3 % below their number {number:,}: {WRITE}")
    today = library(sizes, file, "tokens") / max(library(sizes, file), 1)
    if today > (most := file.get("tokens_a_line", today) * (1 + SLACK)):
        found.append(f"the library: {today:.2f} tokens a line, at most {most:.2f} are allowed: write shorter lines")
    return found


def risen(file: Mapping[str, Any], earlier: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return which numbers are above those of an earlier version, by more than what moved there since."""
    now, moves, found = numbers(file), Counter(file.get("moved", [])), {}
    if odd := [one for one in moves if not MOVE.fullmatch(one)]:
        return [f"moved: {one!r} is not of the form 'pipeline -> reports 40'" for one in odd]
    for version in filter(numbers, earlier):
        allowed = Counter(numbers(version))
        for one, times in (moves - Counter(version.get("moved", []))).items():
            *sides, size = MOVE.fullmatch(one).groups()  # type: ignore[union-attr]
            source, target = (side if " " in side else f"{side} lines" for side in sides)
            allowed[source] -= int(size) * times
            allowed[target] += int(size) * times
        for name, number in now.items():  # a move names lines, so a room's tokens are free: their sum is not
            if number > allowed[name] and not name.endswith(" tokens"):
                found[name] = f"{name}: their number is {number:,}, an earlier one allows {allowed[name]:,}"
        for key in ("lines", "tokens"):
            if (rise := library(now, file, key) - library(numbers(version), version, key)) > 0:
                found[key] = f"the library: the sum of its {key} rose by {rise:,}"
        if file.get("tokens_a_line", 0) > version.get("tokens_a_line", 0):
            found["tokens_a_line"] = "tokens_a_line rose"
    return list(found.values())


def lowered(text: str, sizes: Mapping[str, int]) -> str:
    """Return the text of the file with each number at today's size where that is less, and with the missing ones."""
    file, blocks = tomllib.loads(text), re.split(r"^(?=\[)", text, flags=re.M)
    tables = {f"[{section}.{name}]": name for section in SECTIONS for name in file.get(section, {})}
    if strange := [name for name in sizes if name.split()[0] not in tables.values()]:
        raise SystemExit(f"{FILE} has no table for {', '.join(strange)}")
    for at, block in enumerate(blocks):
        head, _, body = block.partition("\n")
        for key in reversed(KEYS) if head.strip() in tables else ():
            name, line = f"{tables[head.strip()]} {key}", re.compile(rf"^{key} = (\d+)", re.M)
            if match := line.search(body):
                body = line.sub(f"{key} = {min(int(match[1]), sizes.get(name, 0))}", body)
            elif name in sizes:
                body = f"{key} = {sizes[name]}\n{body}"
        blocks[at] = f"{head}\n{body}"
    if "tokens_a_line" not in file:
        ratio = library(sizes, file, "tokens") / max(library(sizes, file), 1)
        blocks[0] = f"{blocks[0].rstrip()}\ntokens_a_line = {ratio:.2f}\n\n"
    return "".join(blocks)


def git(*arguments: str, given: str = "") -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], input=given.encode(), capture_output=True, check=True)
    return done.stdout


def texts_now() -> Iterable[tuple[str, str]]:
    for path in (*ROOT.glob("*.md"), *(path for root in ROOTS for path in (ROOT / root).rglob("*"))):
        if path.suffix in (*KINDS, ".md") and path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def texts_at(names: list[str]) -> list[str]:
    """Return the files ``COMMIT:PATH``, read in one go; one that is not there is empty."""
    out, texts = git("cat-file", "--batch", given="".join(f"{name}\n" for name in names)), []
    for _ in names:
        head, _, out = out.partition(b"\n")
        size = -1 if head.endswith(b" missing") else int(head.split()[-1])
        texts.append(out[: max(size, 0)].decode())
        out = out[size + 1 :]
    return texts


def earlier_versions() -> tuple[list[dict[str, Any]], str]:
    """Return each version of the file in git, and a word on how far back that goes."""
    try:
        commits = git("log", "--full-history", "--format=%H", "--", FILE).decode().split()
        is_shallow = git("rev-parse", "--is-shallow-repository").strip() == b"true"
    except (OSError, subprocess.CalledProcessError):
        return [], "no git repository here: compared with no earlier version"
    versions = [tomllib.loads(text) for text in texts_at([f"{commit}:{FILE}" for commit in commits])]
    return versions, f"compared with {len(versions)} versions in git" + (", all of this shallow clone" * is_shallow)


def show(columns: Mapping[str, Mapping[str, int]], file: Mapping[str, Any]) -> None:
    """Print a line for each room: its lines in each column, its number and the wanted one, its tests and tokens."""
    allowed, sizes = numbers(file), columns["now"]
    heads = (*columns, "number", "wanted", "tests", "tokens")

    def line(name: str, *cells: int | None) -> None:
        print(f"{name:18}" + "".join(f"{'' if cell is None else f'{cell:,}':>12}" for cell in cells))

    print(f"{'':18}" + "".join(f"{head:>12}" for head in heads))
    for section in SECTIONS:
        for name, table in file.get(section, {}).items():
            key = "words" if section == "words" else "lines"
            row = [*(one.get(f"{name} {key}") for one in columns.values()), allowed.get(f"{name} {key}")]
            line(name, *row, table.get("wanted"), sizes.get(f"{name} tests"), sizes.get(f"{name} tokens"))
        if section == "rooms":
            row = [*(library(one, file) for one in columns.values()), library(allowed, file)]
            wanted = sum(table.get("wanted", 0) for table in file["rooms"].values())
            line("the library", *row, wanted, library(sizes, file, "tests"), library(sizes, file, "tokens"))
            print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="COMMIT", help="print the sizes of this commit too")
    parser.add_argument("--check", action="store_true", help="refuse what is above its number, or far below it")
    parser.add_argument("--write", action="store_true", help="lower the numbers to today's sizes")
    args = parser.parse_args()
    text = (ROOT / FILE).read_text()
    file = tomllib.loads(text)
    pages = {name: table.get("pages", []) for name, table in file["words"].items()}
    sizes = weigh(texts_now(), pages)
    if args.write:
        (ROOT / FILE).write_text(lowered(text, sizes))
    elif args.check:
        versions, compared = earlier_versions()
        problems = above_or_below(sizes, file) + risen(file, versions)
        print("\n".join(problems) or f"{len(numbers(file))} numbers hold, {compared}")
        sys.exit(1 if problems else 0)
    else:
        columns = {"now": sizes}
        if args.since:
            listed = git("ls-tree", "-r", "--name-only", args.since).decode().splitlines()
            paths = [path for path in listed if path.endswith((*KINDS, ".md"))]
            texts = texts_at([f"{args.since}:{path}" for path in paths])
            columns = {args.since: weigh(zip(paths, texts, strict=True), pages), "now": sizes}
        show(columns, file)


if __name__ == "__main__":
    main()
