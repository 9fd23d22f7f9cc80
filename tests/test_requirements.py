"""The page of requirements is true to the tree: every item once, in a known state, with files that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "requirements.md"
LAST = {"S0": 50, "S1": 49, "S2": 54, "S3": 43, "S4": 56, "C": 60}
STATES = {"met", "first form", "open"}
ITEMS = [f"{group}-{number:02d}" for group, last in LAST.items() for number in range(1, last + 1)]


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| (S\d|C)-\d", line)]


def paths(cell: str) -> list[str]:
    """The files that a cell names in backticks; what stands behind ``::`` is a name inside one."""
    return [name.partition("::")[0] for name in re.findall(r"`([^`\s]+)`", cell)]


def test_every_item_has_exactly_one_row() -> None:
    assert [row[0] for row in rows()] == ITEMS


def test_every_row_has_five_cells_and_a_known_state() -> None:
    for row in rows():
        assert len(row) == 5, row
        assert row[2] in STATES, row
        assert 1 <= len(row[1].split()) <= 12, row


def test_an_item_names_its_place_and_proof_unless_it_is_open() -> None:
    for item, _, state, where, proof in rows():
        if state == "open":
            assert (where, proof) == ("-", "-"), item
        else:
            assert paths(where), item
            assert any(path.startswith(("tests/", "benchmarks/")) for path in paths(proof)), item


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([^`\s]+/[^`\s]*|[^`\s]+\.\w+)`", PAGE.read_text("utf-8")))))
def test_every_file_named_is_there(path: str) -> None:
    file, _, name = path.partition("::")
    assert (ROOT / file).exists()
    assert not name or name in (ROOT / file).read_text(encoding="utf-8")


def test_the_counts_in_the_summary_are_those_of_the_table() -> None:
    counted = {state: sum(row[2] == state for row in rows()) for state in STATES}
    stated = dict(re.findall(r"^- (met|first form|open): (\d+)", PAGE.read_text("utf-8"), re.MULTILINE))
    assert {state: int(number) for state, number in stated.items()} == counted
