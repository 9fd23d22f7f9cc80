"""The closing summary, as text and as JSON."""

import io
import json

import pytest
from rich.console import Console

from memfit.reports import print_summary, summarize
from memfit.reports._numbers import format_column, format_number

GIB, MIB = 1 << 30, 1 << 20

WIDE = """
budget    7.00 GiB free of 8.00 GiB, set by memory.max (cgroup v2 /job); 1.00 GiB of it is never lent
promise   none
panel     built anew (changed: values): 2766 dates x 20 assets x 5 features, 2012-01-03 to 2022-12-28, 3.0 MiB, mapped by every fold
one fold  270.0 MiB private at its peak, in phase train (measured on fold_1); 140.0 MiB of mapped files beside it
at once   2 of 3 at once (no more fit). 2 ran at once

fold       state                time       peak   reserved  rank_ic  rank_ic_sd    icir  num_dates  train_loss
1          completed         58m 32s  270.0 MiB  300.0 MiB   0.0081      0.3260  0.0249        545      2.9307
2          out_of_memory     49m 57s  270.0 MiB  300.0 MiB        -           -       -          -           -
3          completed      1h 00m 00s  290.0 MiB  300.0 MiB   0.0333      0.2960  0.1124        544      2.9434
mean of 2                                                    0.0207      0.3110  0.0687      544.5      2.9371
sd of 2                                                      0.0178      0.0212  0.0619        0.7      0.0090

fold_2 out_of_memory: killed by the kernel for memory in phase train
  log: runs/demo/run_20261121_090000_0123abcd/jobs/fold_2/err.log

time      1h 59m 00s wall clock; the folds' own times add up to 2h 48m 29s
panel     panels/a5d5239e
run       runs/demo/run_20261121_090000_0123abcd (failed)
            checkpoints
            jobs (logs, memory)
"""

NARROW = """
fold  state                time       peak   reserved
1     completed         58m 32s  270.0 MiB  300.0 MiB
2     out_of_memory     49m 57s  270.0 MiB  300.0 MiB
3     completed      1h 00m 00s  290.0 MiB  300.0 MiB

fold       rank_ic  rank_ic_sd    icir  num_dates  train_loss
1           0.0081      0.3260  0.0249        545      2.9307
2                -           -       -          -           -
3           0.0333      0.2960  0.1124        544      2.9434
mean of 2   0.0207      0.3110  0.0687      544.5      2.9371
sd of 2     0.0178      0.0212  0.0619        0.7      0.0090
"""


def printed(run, width):
    console = Console(file=io.StringIO(), width=width)
    print_summary(run, console)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_the_summary_of_a_wide_console_is_this(finished):
    assert printed(finished.run, 120) == WIDE


def test_at_80_columns_the_metrics_have_a_table_of_their_own_and_no_name_is_cut(finished):
    text = printed(finished.run, 80)
    assert NARROW in text
    assert "…" not in text


def test_many_metrics_go_on_in_further_tables(made):
    made.job("fold_1")
    made.result("fold_1", **{f"a_metric_with_a_long_name_{number}": number / 7 for number in range(7)})
    text = printed(made.run, 80)
    assert all(f"a_metric_with_a_long_name_{number}" in text for number in range(7))
    assert "…" not in text
    assert text.count("\nfold ") == 5  # the folds, then two metrics each and one


def test_a_metric_wider_than_the_console_is_a_table_alone(made):
    made.job("fold_1")
    made.result("fold_1", **{"m" * 90: 1.5, "loss": 2.5})
    assert "1.5000" in printed(made.run, 80) and "2.5000" in printed(made.run, 80)


def test_the_total_is_the_wall_clock_and_not_the_sum_of_folds_side_by_side(made):
    made.event(0, "run", state="started")
    made.event(70, "run", state="completed")
    for fold in (1, 2, 3):
        made.job(f"fold_{fold}", at=5, seconds=60)
    assert "1m 10s wall clock; the folds' own times add up to 3m 00s" in printed(made.run, 120)
    made.event(100, "run", state="continued")
    made.event(102, "run", state="completed")
    assert "2.0s wall clock of the last command; the folds'" in printed(made.run, 120)


def test_the_json_form_says_the_same_in_bytes_and_seconds(finished):
    found = json.loads(json.dumps(summarize(finished.run), allow_nan=False))
    assert (found["state"], found["wall_seconds"], found["most_at_once"]) == ("failed", 7140, 2)
    assert found["run"] == str(finished.path)
    assert found["budget"]["binding"]["limit_bytes"] == 8 * GIB
    assert found["plan"]["measured_on"] == "fold_1"
    assert found["panel"]["num_assets"] == 20
    assert found["folds"][1] == {
        "job": "fold_2",
        "state": "out_of_memory",
        "seconds": 2997,
        "peak_bytes": 270 * MIB,
        "reservation_bytes": 300 * MIB,
        "exit_code": None,
        "cause": "killed by the kernel for memory in phase train",
        "attempt": 1,
        "log": str(finished.path / "jobs/fold_2/err.log"),
        "metrics": {},
    }
    assert found["metrics"]["num_dates"] == {"mean": 544.5, "sd": pytest.approx(0.5**0.5), "n": 2}


def test_a_metric_that_is_not_finite_is_null_in_json_and_shown_in_the_text(made):
    for fold, value in ((1, float("nan")), (2, float("inf")), (3, 1.25)):
        made.job(f"fold_{fold}")
        made.result(f"fold_{fold}", icir=value)
    found = json.loads(json.dumps(summarize(made.run), allow_nan=False))
    assert [fold["metrics"]["icir"] for fold in found["folds"]] == [None, None, 1.25]
    assert found["metrics"]["icir"] == {"mean": None, "sd": None, "n": 3}
    text = printed(made.run, 120)
    assert "nan" in text and "inf" in text and "1.2500" in text


def test_a_run_in_mid_run_is_summed_up(made):
    made.event(0, "run", state="started")
    made.admit(1, "fold_1", 1, None)
    made.job("fold_1", "running", name="status.json")
    (made.path / "jobs" / "fold_2").mkdir()
    found = summarize(made.run)
    assert [(fold["job"], fold["state"], fold["seconds"] is None) for fold in found["folds"]] == [
        ("fold_1", "running", False),
        ("fold_2", "pending", True),
    ]
    assert (found["state"], found["plan"], found["metrics"]) == ("running", None, {})
    assert "fold_1" not in printed(made.run, 80)  # no fold has failed
    assert "(running)" in printed(made.run, 80)


def test_an_empty_run_directory_is_summed_up(made):
    assert summarize(made.run)["folds"] == []
    assert printed(made.run, 80).splitlines()[-1].strip() == "jobs (logs, memory)"


@pytest.mark.parametrize(
    ("values", "statistics", "cells"),
    [
        ([545.0, 544.0], [544.5, 0.70710678], ["545", "544", "544.5", "0.7"]),
        ([545.0, None], [545.0, None], ["545", "-", "545.0", "-"]),
        ([1.0, 0.5], [0.75, 0.25], ["1.0000", "0.5000", "0.7500", "0.2500"]),
        ([3e-6, 1e-6], [], ["3.000e-06", "1.000e-06"]),
        ([float("nan"), 2.0], [], ["nan", "2.0000"]),
        ([], [], []),
    ],
)
def test_a_metrics_column_reads_as_what_it_counts(values, statistics, cells):
    assert format_column(values, statistics) == cells


def test_a_number_of_any_size_keeps_its_digits():
    assert [format_number(value) for value in (12, 1e9, float("-inf"))] == ["12", "1.000e+09", "-inf"]
