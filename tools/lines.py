"""Print the lines of Python by package: now, and at an earlier commit.

Example: ``python tools/lines.py --since v0.1``. Only what lies under ``src`` counts. Tests have a line of their own.
"""

import argparse
import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="COMMIT", help="print the lines of this commit too")
    since = parser.parse_args().since
    now = count({path: (ROOT / path).read_text() for path in listed("ls-files") if (ROOT / path).exists()})
    before = count(texts_at(since)) if since else Counter()
    columns = {since: before, "now": now} if since else {"now": now}
    print(f"{'':20}" + "".join(f"{name:>12}" for name in columns))
    for package in sorted(set(now) | set(before)):
        print(f"{package:20}" + "".join(f"{lines[package]:12,}" for lines in columns.values()))
    sums = [sum(n for name, n in lines.items() if name.startswith("memfit/")) for lines in columns.values()]
    print(f"{'memfit, all':20}" + "".join(f"{n:12,}" for n in sums))


def count(texts: dict[str, str]) -> Counter[str]:
    """Return the lines of each package, for example ``{"memfit/jobs": 2800, "tests": 30000}``."""
    lines: Counter[str] = Counter()
    for path, text in texts.items():
        parts = PurePosixPath(path).parts
        if parts[0] == "tests":
            name = "tests"
        elif parts[0] == "src":
            name = "/".join(parts[1:3]) if len(parts) > 3 else f"{parts[1]}/*.py"
            name = parts[1] if parts[1] != "memfit" else name
        else:
            continue
        lines[name] += text.count("\n")
    return lines


def listed(*arguments: str) -> list[str]:
    """Return the Python files that a git command lists."""
    out = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout
    return [path for path in out.splitlines() if path.endswith(".py")]


def texts_at(commit: str) -> dict[str, str]:
    """Return the Python files of a commit, read in one go."""
    paths = [path for path in listed("ls-tree", "-r", "--name-only", commit) if path.startswith(("src/", "tests/"))]
    asked = "".join(f"{commit}:{path}\n" for path in paths)
    out = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "--batch"], input=asked.encode(), capture_output=True, check=True
    ).stdout
    texts = {}
    for path in paths:
        head, _, out = out.partition(b"\n")
        size = int(head.split()[-1])
        texts[path], out = out[:size].decode(), out[size + 1 :]
    return texts


if __name__ == "__main__":
    main()
