"""The examples give the same when they are killed, with no epoch trained twice, and run again only what changed."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

import kills
import memfit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(tmp_path):
    """Copies an example to a folder of its own."""
    return lambda name, to="killed": Path(shutil.copytree(EXAMPLES / name, tmp_path / to))


@pytest.mark.long
def test_digits_killed_in_two_epochs_gives_the_same_tensors_and_tables(example):
    settings = ("params.num_folds=2", "params.num_epochs=12")
    quiet = kills.run(example("digits", "quiet"), "config.yaml", *settings)
    moments = [kills.epoch("fold_1", 2), kills.epoch("fold_2", 3)]
    killed = kills.run(example("digits"), "config.yaml", *settings, kill_at=moments)

    assert kills.left_by(killed) == kills.left_by(quiet)
    assert {"fold_1/latest_checkpoint.pt", "fold_2/best_model.pt", "kfold_results.feather"} < set(kills.left_by(quiet))
    assert kills.left_by(quiet)["stage_join"]["result"]["accuracy"] > 0.8
    assert kills.epochs(quiet) == Counter((f"fold_{fold}", epoch) for fold in (1, 2) for epoch in range(1, 13))
    assert max(kills.epochs(killed).values()) == 1


@pytest.mark.long
def test_commands_killed_after_stages_and_in_three_epochs_give_the_same_files(example):
    settings = ("params.num_epochs=60", "params.num_rows=3000", "max_parallel=1")
    quiet = kills.run(example("commands", "quiet"), "config.yaml", *settings)
    moments = [
        kills.completed("prepare"),
        kills.printed("fold_1", "epoch 5/"),
        kills.completed("fold_1"),
        kills.printed("fold_2", "epoch 7/"),
        kills.printed("fold_3", "epoch 40/"),
    ]
    killed = kills.run(example("commands"), "config.yaml", *settings, kill_at=moments)

    assert kills.left_by(killed) == kills.left_by(quiet)
    for fold in (1, 2, 3):
        lines = (killed.path / f"jobs/fold_{fold}/out.log").read_text().splitlines()
        assert max(Counter(lines).values()) == 1
        assert (lines[0], lines[-1]) == ("epoch 1/60", "epoch 60/60")


def test_commands_run_again_where_a_setting_or_a_script_changed(example, monkeypatch):
    monkeypatch.chdir(example("commands"))
    first = memfit.run("config.yaml", overrides=["params.num_epochs=2"])
    more = memfit.run("config.yaml", overrides=["params.num_epochs=3"])
    assert _ran(first) == ["fold_1", "fold_2", "fold_3", "join", "prepare"]
    assert _ran(more) == ["fold_1", "fold_2", "fold_3", "join"]
    Path("join.sh").write_text(Path("join.sh").read_text() + "# the same, with a comment\n")
    assert _ran(memfit.run("config.yaml", overrides=["params.num_epochs=3"])) == ["join"]


def test_a_plain_function_has_its_arguments_as_settings(example, monkeypatch):
    folder = example("plain")
    monkeypatch.chdir(folder)
    result = memfit.run("train:train", overrides=["params.num_epochs=2"])
    assert result.state == "completed"
    assert result.metrics["train"]["valid_loss"] < 0.2
    manifest = json.loads((result.path / "checkpoints/stage_train.json").read_text())
    assert manifest["settings"] == {"learning_rate": 0.01, "num_epochs": 2, "fold": 1}


def _ran(result: memfit.pipeline.RunResult) -> list[str]:
    """The jobs that were started, in the order of their names."""
    return sorted({event["job"] for event in kills.RunDir(result.path).events() if event["kind"] == "admit"})
