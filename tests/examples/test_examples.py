"""The examples give the same when they are killed, with no epoch trained twice, and run again only what changed."""

import json
import os
import shutil
import subprocess
import sys
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


@pytest.mark.proves("S1-24")
@pytest.mark.long
def test_commands_killed_in_two_epochs_give_the_same_files(example):
    settings = ("params.num_epochs=40", "params.num_rows=3000", "max_parallel=1")
    quiet = kills.run(example("commands", "quiet"), "config.yaml", *settings)
    moments = [kills.printed("fold_1", "epoch 5/"), kills.printed("fold_3", "epoch 20/")]
    killed = kills.run(example("commands"), "config.yaml", *settings, kill_at=moments)

    assert kills.left_by(killed) == kills.left_by(quiet)
    for fold in (1, 2, 3):
        lines = (killed.path / f"jobs/fold_{fold}/out.log").read_text().splitlines()
        assert max(Counter(lines).values()) == 1
        assert (lines[0], lines[-1]) == ("epoch 1/40", "epoch 40/40")


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


def test_five_folds_of_boosting_run_without_torch_and_their_scores_are_results(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    command = ["run", "--param", "fold=1..5", "--json", "--", sys.executable, str(EXAMPLES / "boosting/train.py")]
    words = [sys.executable, "-m", "memfit", *command, "--fold", "{fold}", "--rows", "2000"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    found = subprocess.run(words, cwd=tmp_path, env=env, text=True, capture_output=True)
    assert found.returncode == 0, found.stderr
    reported = [job["reported"] for job in json.loads(found.stdout)["jobs"]]
    assert len(reported) == 5 and all(own.keys() == {"rmse", "r2"} and 0.3 < own["r2"] < 1 for own in reported)


def _ran(result: memfit.pipeline.RunResult) -> list[str]:
    """The jobs that were started, in the order of their names."""
    return sorted({event["job"] for event in kills.RunDir(result.path).events() if event["kind"] == "admit"})
