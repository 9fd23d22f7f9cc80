"""``memfit backtest`` as a user calls it: what it prints, writes and exits with."""

import csv
import json
import shutil

import pytest
from pyarrow import feather

pytestmark = pytest.mark.slow

CONFIG = """
schema_version: 1
experiment: memory
target: memoriser:MEMORISER
params:
  n_splits: 4
  backtest: {k_min: 2, cost_bps: 0}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def trained(blended, tmp_path):
    """The averages of the folds' checkpoints, somewhere else."""
    folder = tmp_path / "models"
    folder.mkdir()
    for fold in (1, 2):
        shutil.copy(blended.manifest("blend", fold).with_suffix("") / "blended.pt", folder / f"fold{fold}.pt")
    return folder


@pytest.fixture
def backtest(memfit, trained, config):
    """Runs ``memfit backtest`` on the average of the first fold, or on other checkpoints."""

    def run(*words, checkpoint=trained / "fold1.pt"):
        return memfit("backtest", "--checkpoint", checkpoint, "--config", config, *words)

    return run


@pytest.mark.proves("S0-28", "S0-32")
def test_one_fold_is_judged_and_the_gate_is_the_exit_code(backtest, tmp_path):
    done = backtest("--log-level", "INFO", "--gate", "--output", "results/one.json")
    assert done.exit_code == 10, done.err
    assert "fold 1: " in done.out and "scored" in done.out
    assert "gate: yellow" in done.out and "change  k_ratio" in done.out
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names == {"one.json", "one_days.csv", "one_days.feather", "one_scores.feather"}


def test_checkpoints_anywhere_score_only_dates_that_they_did_not_see(backtest, trained, tmp_path):
    found = json.loads(backtest("--json", "--output", tmp_path / "two.json", checkpoint=trained / "fold*.pt").out)
    assert [one["fold"] for one in found["folds"]] == [1, 2]
    days = set(feather.read_table(tmp_path / "two_scores.feather")["date"].to_pylist())
    # What each was tested on, and no date next to its training dates: less than the two blocks and what was purged.
    tested = 2 * 39
    assert tested <= sum(one["num_dates"] for one in found["folds"]) <= tested + 2 * 14
    assert len(days) <= tested + 2 * 14
    assert abs(found["metrics"]["h5_rank_ic"]["mean"]) < 0.15


def test_a_checkpoint_is_scored_with_the_settings_that_it_was_trained_with(backtest):
    mine, other = (json.loads(backtest("--json", *words).out) for words in ((), ("--set", "params.skill=0.9")))
    assert (mine["summary"], mine["metrics"]) == (other["summary"], other["metrics"])


def test_checkpoints_of_one_fold_or_of_different_settings_are_refused(backtest, stages, trained, tmp_path):
    shutil.copy(trained / "fold1.pt", trained / "fold1_again.pt")
    twice = backtest(checkpoint=trained / "fold1*.pt")
    assert twice.exit_code == 2 and "so is another checkpoint" in twice.err
    here = stages(tmp_path, skill=0.5)
    for name in ("fold", "blend"):
        here.run(name, 3)
    shutil.copy(here.manifest("blend", 3).with_suffix("") / "blended.pt", trained / "fold2.pt")
    mixed = backtest(checkpoint=trained / "fold[12].pt")
    assert mixed.exit_code == 2 and "was trained with other settings than" in mixed.err


def test_a_period_without_dates_and_a_workload_without_scores_are_refused(backtest, config):
    assert "no date from 2031-01-01 to the last can be judged" in backtest("--start-date", "2031-01-01").err
    config.write_text("schema_version: 1\nexperiment: tiny\ntarget: pipeline.tiny:TINY\n")
    done = backtest()
    assert done.exit_code == 2 and "gives no scores" in done.err


def test_the_verdict_alone_or_all_as_json(backtest):
    quiet = backtest("--log-level", "ERROR")
    assert (quiet.exit_code, quiet.out.split()) == (0, ["gate:", "yellow"])
    whole = backtest("--json")
    assert whole.exit_code == 0
    assert json.loads(whole.out)["verdict"]["colour"] == "yellow"


@pytest.mark.proves("S0-36")
def test_both_ends_of_a_period_are_judged(backtest, tmp_path):
    assert backtest("--output", tmp_path / "one.json").exit_code == 0
    with open(tmp_path / "one_days.csv") as file:
        days = [row["date"] for row in csv.DictReader(file)]
    dated = backtest("--start-date", days[5], "--end-date", days[30], "--json")
    # Positions of the last date are marked until they end.
    assert json.loads(dated.out)["summary"]["start"] == days[5]
    assert json.loads(dated.out)["folds"][0]["num_dates"] == 26


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "was given no checkpoint"),
        (("--checkpoint", "absent.pt"), "absent.pt is not there"),
        (
            ("--checkpoint", "config.yaml", "--start-date", "2020-05-01", "--end-date", "2020-01-01"),
            "--end-date must not be before start_date, 2020-05-01",
        ),
        (("--checkpoint", "config.yaml", "--start-date", "soon"), "--start-date must be a valid date"),
    ],
)
def test_what_cannot_be_judged_is_refused_with_status_2(memfit, config, words, what):
    done = memfit("backtest", "--config", config, *words)
    assert done.exit_code == 2
    assert what in done.err and "do:" in done.err
