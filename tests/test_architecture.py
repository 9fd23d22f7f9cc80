"""ARCHITECTURE.md names every package of the library, and no file that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def test_every_package_of_the_library_has_a_line():
    packages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src/memfit").iterdir() if path.is_dir()]
    assert [name for name in sorted(packages) if "__" not in name and f"| `{name}` |" not in TEXT] == []


def test_every_file_that_is_named_exists():
    named = set(re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.-]+)`", TEXT))
    assert len(named) > 40
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
