"""The benchmark against published measurements: what it reads, counts, and says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
torch = pytest.importorskip("torch")

from ground_truth import (  # noqa: E402
    Outcome,
    Row,
    estimate_one,
    find_specs,
    main,
    print_ladder,
    print_summary,
)


def _outcome(name: str, measured: float, value: float, upper: float, grade: str = "A") -> Outcome:
    return Outcome(Row(name, grade, "active", measured), value, upper)


def test_a_row_over_its_bound_is_a_missed_target() -> None:
    assert print_summary([_outcome("TT-02", 60.0, 59.9, 64.0)]) == []
    assert "1 rows over their bound" in print_summary([_outcome("TT-02", 60.0, 59.9, 59.95)])


def test_a_large_error_is_missed_for_grade_a_and_only_reported_for_others() -> None:
    assert any("median |error|" in line for line in print_summary([_outcome("TT-02", 60.0, 50.0, 61.0)]))
    assert print_summary([_outcome("TT-02", 60.0, 50.0, 61.0, grade="B")]) == []


def test_a_step_of_the_ladder_is_compared_as_a_difference() -> None:
    steps = [_outcome("TT-02", 60.0, 61.5, 65.0), _outcome("TT-03", 51.0, 52.4, 56.0)]
    assert print_ladder(steps) == []
    assert len(print_ladder([steps[0], _outcome("TT-03", 51.0, 50.0, 56.0)])) == 1


def test_a_table_of_which_nothing_is_rebuilt_fails(tmp_path: Path, monkeypatch, capsys) -> None:
    table = tmp_path / "table.csv"
    table.write_text("id,peak_gib,notes\nX-1,25.5,grade=A\n")
    monkeypatch.setattr(sys, "argv", ["ground_truth.py", "--table", str(table)])
    assert main() == 1
    assert "MISSED: no row was rebuilt" in capsys.readouterr().out


def test_every_program_is_of_a_known_metric_and_says_what_it_assumes() -> None:
    specs = find_specs()
    assert len(specs) > 60
    assert {spec.metric for spec in specs.values()} <= {"allocated", "active", "reserved", "device"}
    assert specs["TT-10"].assumed == ""
    assert "512" in specs["LG-11"].assumed


def test_the_loss_of_the_gemma_classifier_takes_what_was_published() -> None:
    found = estimate_one("CE-05", with_peers=False)
    assert found["value"] == pytest.approx(1.14, abs=0.02)
    assert found["upper"] >= 1.137
