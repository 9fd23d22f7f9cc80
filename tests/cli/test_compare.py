"""``memfit compare``: day tables of every kind, the printed verdict, and JSON."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from memfit.evaluation import Scores, evaluate_days

pytest.importorskip("arch")
pytest.importorskip("statsmodels")

METRIC = "h5_delta_p_at_k_pos"


def days(seed, effect=0.0, num=240):
    noise = np.convolve(np.random.default_rng(seed).standard_normal(num + 4), np.ones(5), "valid") / 50
    dates = np.datetime64("2024-01-01", "D") + np.arange(num)
    fold = np.repeat([1, 2], [num // 2, num - num // 2])
    return pa.table(
        {"fold": fold, "date": pa.array(dates, pa.date32()), METRIC: noise + effect, "num_assets": [50] * num}
    )


def records():
    """The records of comparisons in the user's folder."""
    return [*Path(os.environ["XDG_STATE_HOME"]).glob("memfit/comparisons/*.jsonl")]


@pytest.fixture
def tables(tmp_path):
    """A better A as a run's folder, and B as a file of each kind."""
    (tmp_path / "new/checkpoints/stage_backtest").mkdir(parents=True)
    pyarrow.feather.write_feather(days(0, 0.1), tmp_path / "new/checkpoints/stage_backtest/days.feather")
    pyarrow.feather.write_feather(days(1), tmp_path / "old.feather")
    pyarrow.csv.write_csv(days(1), tmp_path / "old.csv")
    pyarrow.parquet.write_table(days(1), tmp_path / "old.parquet")
    return tmp_path


@pytest.fixture
def run(memfit, tables):
    """Runs ``memfit compare``."""
    return lambda *words: memfit("compare", *words)


def test_the_verdict_comes_first_and_the_figures_below_it(run, tables):
    done = run("new", "old.feather", "--metric", METRIC)
    assert (done.exit_code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == f"A better: {METRIC}, A less B"
    assert lines[1].split() == ["A", lines[1].split()[1], "new"]
    text = " ".join(done.out.split())
    assert "95 % interval +0.0" in text
    assert "labels over 5 dates" in text
    assert "240 paired; dropped: none" in text
    assert "this one alone; p " in text
    assert "(fold 1, 120)" in text and "(fold 2, 120)" in text
    [record] = records()
    assert f"({record})" in done.out.replace("\n", "").replace("  ", "")


@pytest.mark.slow
def test_a_file_of_every_kind_gives_the_same_and_counts_as_one_comparison(run, tables):
    found = []
    for kind in ("feather", "csv", "parquet"):
        done = run("new", f"old.{kind}", "--metric", METRIC, "--json", "--record", "tried/here.jsonl")
        found.append(json.loads(done.out) | {"b": None})
    assert found[0] == found[1] == found[2]
    assert found[0]["num_comparisons"] == 1
    assert found[0]["verdict"] == "A better"
    assert found[0]["record"] == "tried/here.jsonl"
    assert not records()


def test_what_was_dropped_and_tried_is_said(run, tables):
    pyarrow.feather.write_feather(days(2, num=200), tables / "short.feather")
    run("new", "old.csv", "--metric", METRIC)
    done = run("short.feather", "old.csv", "--metric", METRIC)
    text = " ".join(done.out.split())
    assert text.startswith("no difference shown")
    assert "200 paired; dropped: 40 only in B" in text
    assert "2 tried; p " in text and "after Holm, against 0.05" in text


def test_a_difference_that_varies_slowly_is_warned_of(run, tables):
    slow = np.repeat(np.random.default_rng(3).standard_normal(16), 30) / 5
    table = days(0, num=480)
    varied = table.set_column(2, METRIC, [table[METRIC].to_numpy() + slow])
    pyarrow.feather.write_feather(varied, tables / "slow.feather")
    text = " ".join(run("slow.feather", "random", "--metric", METRIC).out.split())
    assert f"warning {METRIC} varies slowly, beyond the 5 dates that labels span (z +" in text
    assert "varies slowly" not in run("old.csv", "random", "--metric", METRIC).out


def test_random_is_a_baseline(run, tables):
    done = run("new", "random", "--metric", METRIC, "--level", "0.9", "--json")
    found = json.loads(done.out)
    assert (found["verdict"], found["mean_b"], found["level"]) == ("A better", 0.0, 0.9)


def test_a_metric_without_a_horizon_needs_one(run, tables):
    for seed, name in ((1, "gain.parquet"), (2, "other.parquet")):
        renamed = days(seed).rename_columns(["fold", "date", "gain", "num_assets"])
        pyarrow.parquet.write_table(renamed, tables / name)
    done = run("gain.parquet", "other.parquet", "--metric", "gain")
    assert done.exit_code == 2
    assert "--horizon 1" in done.err
    assert run("gain.parquet", "other.parquet", "--metric", "gain", "--horizon", "5").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("empty", "old.csv"), "empty holds neither days.feather nor checkpoints/stage_backtest/days.feather"),
        (("old.xlsx", "old.csv"), "not a name of a day table"),
        (("absent.feather", "old.csv"), "absent.feather is not there"),
        (("damaged.feather", "old.csv"), "damaged.feather cannot be read"),
        (("short.parquet", "old.csv"), "40 dates can be paired: A has 40, B 240, both 40"),
    ],
)
def test_what_is_no_day_table_is_refused(run, tables, words, message):
    (tables / "empty").mkdir()
    (tables / "damaged.feather").write_bytes(b"no table")
    pyarrow.parquet.write_table(days(1, num=40), tables / "short.parquet")
    done = run(*words, "--metric", METRIC)
    assert done.exit_code == 2
    assert message in done.err


def test_fewer_dates_than_the_metric_names_are_refused_as_its_labels_span(run, tables):
    done = run("new", "random", "--metric", METRIC, "--horizon", "1")
    assert done.exit_code == 2
    assert "is less than the 5 dates" in done.err
    assert not records()


def test_runs_of_other_assets_are_refused(run, tmp_path):
    rng = np.random.default_rng(0)
    dates = np.datetime64("2024-01-01", "D") + np.arange(80)
    for name, codes in (("more", "ABCDEFGH"), ("less", "CDEFGH")):
        values = {kind: rng.standard_normal((80, len(codes))) for kind in ("score_h1", "target_h1")}
        (tmp_path / name).mkdir()
        found = evaluate_days(Scores(dates, tuple(codes), values), horizons=[1], k=2)
        pyarrow.feather.write_feather(found, tmp_path / name / "days.feather")
    refused = run("more", "less", "--metric", "h1_rank_ic")
    assert refused.exit_code == 2
    assert "A was evaluated with num_codes 8, and B with 6" in refused.err
    assert "evaluate both with the same assets: evaluate_folds" in refused.err
    gone = run("more", "less", "--metric", "h1_rank_ic", "--common-assets")
    assert gone.exit_code == 2


def test_the_days_of_a_backtest_are_no_day_table(run, tables):
    columns = {name: [0.0] * 240 for name in ("net", "equity")} | {"is_rebalance": [True] * 240}
    joined = days(1)
    for name, values in columns.items():
        joined = joined.append_column(name, [values])
    pyarrow.csv.write_csv(joined, tables / "five_days.csv")
    done = run("new", "five_days.csv", "--metric", METRIC)
    assert done.exit_code == 2
    assert "five_days.csv holds what a backtest earned" in done.err and "name five_days.feather" in done.err
