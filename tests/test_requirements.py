"""Each item of the page of requirements is there once, and each that is met has a test or a benchmark that proves it."""

import re

import ledger

LAST = {"S0": 50, "S1": 49, "S2": 54, "S3": 43, "S4": 56, "C": 60}
STATES = r"met|first form|open|dropped \(price list \d+\)"
ITEMS = [f"{group}-{number:02d}" for group, last in LAST.items() for number in range(1, last + 1)]


def test_every_item_has_exactly_one_row() -> None:
    assert [row[0] for row in ledger.rows()] == ITEMS


def test_every_row_has_four_cells_a_known_state_and_no_path() -> None:
    for row in ledger.rows():
        assert len(row) == 4 and re.fullmatch(STATES, row[2]), row
        assert 1 <= len(row[1].split()) <= 12, row
        assert row[3] or row[2] != "first form", f"{row}: what is missing?"
        assert not re.search(r"\b(src|tests|benchmarks)/|\.py\b", row[3]), f"{row}: a test says what it proves"


def test_each_row_that_is_met_has_a_proof_and_no_unknown_id_stands_anywhere() -> None:
    proofs = {**ledger.marks(), **ledger.benchmarks()}
    named = {name for ids in proofs.values() for name in ids}
    assert named - set(ITEMS) == set()
    assert [row[0] for row in ledger.rows() if row[2] == "met" and row[0] not in named] == []
    assert [row[0] for row in ledger.rows() if row[2] not in ("met", "first form") and row[0] in named] == []


def test_a_mark_stands_on_a_test_and_names_at_most_three_rows() -> None:
    marks = ledger.marks()
    assert [name for name in marks if not name.partition("::")[2].startswith("test_")] == []
    assert [name for name, ids in marks.items() if not 1 <= len(set(ids)) == len(ids) <= 3] == []


def test_the_closing_line_names_what_was_not_proved() -> None:
    met = {row[0] for row in ledger.rows() if row[2] == "met"}
    measured = {name for ids in ledger.benchmarks().values() for name in ids}
    assert ledger.summary(met - measured, set()).startswith(f"{len(met)} of {len(met)} rows proved, ")
    assert ledger.summary(met, {"S0-01"}).endswith("; not: S0-01")


def test_the_counts_in_the_summary_are_those_of_the_table() -> None:
    states = [row[2].partition(" (")[0] for row in ledger.rows()]
    stated = re.findall(r"^- (met|first form|open|dropped): (\d+)", ledger.PAGE.read_text("utf-8"), re.MULTILINE)
    assert {state: int(number) for state, number in stated} == {state: states.count(state) for state in set(states)}
