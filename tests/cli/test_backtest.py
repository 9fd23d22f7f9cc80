"""``memfit workflow`` and ``memfit backtest`` as a user calls them: what they print, write and exit with."""

import csv
import json
import shutil
from pathlib import Path

import pytest

MEMORISER = Path(__file__).parents[1] / "pipeline" / "memoriser.py"
CONFIG = """
schema_version: 1
experiment: memory
target: memoriser:MEMORISER
workflow:
  on_yellow: stop
  backtest: {k_min: 2}
params: {n_splits: 3}
"""


@pytest.fixture
def config(tmp_path):
    shutil.copy(MEMORISER, tmp_path / "memoriser.py")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def test_a_health_check_and_the_smoke_backtest_of_its_blend(memfit, config, tmp_path):
    done = memfit("workflow", config, "--until", "health", "--quiet")
    assert done.exit_code == 10
    assert "health: fold 1, the mean of ema_epoch_1.pt, ema_epoch_2.pt" in done.out
    assert "gate: yellow" in done.out and "turn    k_ratio" in done.out

    (blended,) = tmp_path.glob("runs/memory/*/checkpoints/fold_1/blended.pt")
    shutil.copy(blended, tmp_path / "fold1_blended.pt")
    asked = ("--checkpoint", "fold1_blended.pt", "--config", config, "--log-level", "INFO")
    smoke = memfit("backtest", *asked, "--gate")
    assert smoke.exit_code == 10
    assert "fold 1: " in smoke.out and "scored" in smoke.out
    quiet = memfit("backtest", "--checkpoint", "fold1_blended.pt", "--config", config, "--log-level", "ERROR")
    assert (quiet.exit_code, quiet.out.split()) == (0, ["gate:", "yellow"])

    whole = memfit("backtest", *asked, "--output", "results/one.json", "--json")
    assert whole.exit_code == 0
    assert json.loads(whole.out)["verdict"]["colour"] == "yellow"
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names == {"one.json", "one.png", "one_days.csv", "one_trades.csv", "one_days.feather", "one_scores.feather"}
    with open(tmp_path / "results/one_days.csv") as file:
        days = [row["date"] for row in csv.DictReader(file)]
    dated = memfit("backtest", *asked, "--start-date", days[5], "--end-date", days[30], "--json")
    # Both ends are included; positions of the last date are marked until they end.
    assert json.loads(dated.out)["summary"]["start"] == days[5]
    assert json.loads(dated.out)["folds"][0]["num_dates"] == 26


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "was given no checkpoint"),
        (("--checkpoint", "absent.pt"), "absent.pt is not there"),
        (
            ("--checkpoint", "memoriser.py", "--start-date", "2020-05-01", "--end-date", "2020-01-01"),
            "is after end_date",
        ),
        (("--checkpoint", "memoriser.py", "--start-date", "soon"), "workflow.start_date"),
        (("--checkpoint", "memoriser.py", "--output", "out/dir"), "is no JSON file"),
    ],
)
def test_what_cannot_be_judged_is_refused_with_status_2(memfit, config, words, what):
    done = memfit("backtest", "--config", config, *words)
    assert done.exit_code == 2
    assert what in done.err and "do:" in done.err


def test_a_typo_below_workflow_names_the_nearest_setting(memfit, config):
    config.write_text(CONFIG.replace("k_min", "k_mim"))
    done = memfit("workflow", config)
    assert done.exit_code == 2
    assert "workflow.backtest.k_mim" in done.err and "k_min" in done.err
