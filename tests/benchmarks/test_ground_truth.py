"""The benchmark against published measurements: what it reads, counts, and says."""

import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")


@pytest.fixture
def truth(benchmark):
    return benchmark("ground_truth")


@pytest.fixture
def outcome(truth):
    return lambda name, measured, value, upper, grade="A": truth.Outcome(
        truth.Row(name, grade, "active", measured), value, upper
    )


def test_a_row_over_its_bound_is_a_missed_target(truth, outcome):
    assert truth.print_summary([outcome("TT-02", 60.0, 59.9, 64.0)]) == []
    assert "1 rows over their bound" in truth.print_summary([outcome("TT-02", 60.0, 59.9, 59.95)])


def test_a_large_error_is_missed_for_grade_a_and_only_reported_for_others(truth, outcome):
    assert any("median |error|" in line for line in truth.print_summary([outcome("TT-02", 60.0, 50.0, 61.0)]))
    assert truth.print_summary([outcome("TT-02", 60.0, 50.0, 61.0, grade="B")]) == []


def test_of_a_compiled_row_only_the_bound_is_a_target(truth, outcome):
    assert truth.find_specs()["TT-03"].compiled and not truth.find_specs()["TT-02"].compiled
    assert truth.print_summary([replace(outcome("TT-03", 51.0, 60.0, 70.0), compiled=True)]) == []
    over = truth.print_summary([replace(outcome("TT-03", 71.0, 60.0, 70.0), compiled=True)])
    assert "1 rows over their bound" in over


def test_a_table_of_which_nothing_is_rebuilt_fails(truth, tmp_path, monkeypatch, capsys):
    table = tmp_path / "table.csv"
    table.write_text("id,peak_gib,notes\nX-1,25.5,grade=A\n")
    monkeypatch.setattr(sys, "argv", ["ground_truth.py", "--table", str(table)])
    assert truth.main() == 1
    assert "MISSED no row was rebuilt" in capsys.readouterr().out


def test_every_program_is_of_a_known_metric_and_says_what_it_assumes(truth):
    specs = truth.find_specs()
    assert len(specs) > 60
    assert {spec.metric for spec in specs.values()} <= {"allocated", "active", "reserved", "device"}
    assert specs["TT-10"].assumed == ""
    assert "512" in specs["LG-11"].assumed


def test_the_loss_of_the_gemma_classifier_takes_what_was_published(truth):
    found = truth.estimate_one("CE-05")
    assert found["value"] == pytest.approx(1.14, abs=0.02)
    assert found["upper"] >= 1.137
