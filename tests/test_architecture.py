"""ARCHITECTURE.md names every file of the library, and none that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def test_every_file_of_the_library_has_a_note():
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py") if path.read_text().strip()]
    assert [name for name in sorted(files) if f"| `{name}` |" not in TEXT] == []


def test_every_file_that_is_named_exists():
    named = set(re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.-]+)`", TEXT))
    assert len(named) > 60
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
