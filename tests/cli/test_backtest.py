"""``memfit workflow`` and ``memfit backtest`` as a user calls them: what they print, write and exit with."""

import csv
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from judging import command, judged_here

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


@pytest.fixture(scope="module")
def health(tmp_path_factory):
    """What ``memfit workflow --until health`` said, in the folder of its config."""
    folder = tmp_path_factory.mktemp("health")
    shutil.copy(MEMORISER, folder / "memoriser.py")
    (folder / "config.yaml").write_text(CONFIG)
    return command(folder, "workflow", "config.yaml", "--until", "health", "--quiet", module="memoriser"), folder


@pytest.fixture(scope="module")
def trained(health):
    """The average of its fold's checkpoints."""
    (blended,) = health[1].glob("runs/memory/*/checkpoints/fold_1/blended.pt")
    return Path(shutil.copy(blended, health[1] / "fold1_blended.pt"))


@pytest.fixture
def backtest(memfit, trained, config):
    """Runs ``memfit backtest`` in this process, on that average or on another checkpoint."""

    def run(*words, checkpoint=trained):
        with judged_here(trained.parent, module="memoriser"):
            return memfit("backtest", "--checkpoint", checkpoint, "--config", config, *words)

    return run


def test_a_health_check_and_the_smoke_backtest_of_its_blend(health, trained, memfit, config, tmp_path):
    done, _ = health
    assert done.exit_code == 10, done.err
    assert "health: fold 1, the mean of ema_epoch_1.pt, ema_epoch_2.pt" in done.out
    assert "gate: yellow" in done.out and "turn    k_ratio" in done.out

    asked = ("--checkpoint", trained, "--config", config, "--log-level", "INFO")
    smoke = memfit("backtest", *asked, "--gate", "--output", "results/one.json")
    assert smoke.exit_code == 10
    assert "fold 1: " in smoke.out and "scored" in smoke.out
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names == {"one.json", "one.png", "one_days.csv", "one_trades.csv", "one_days.feather", "one_scores.feather"}


def test_the_verdict_alone_or_all_as_json(backtest):
    quiet = backtest("--log-level", "ERROR")
    assert (quiet.exit_code, quiet.out.split()) == (0, ["gate:", "yellow"])
    whole = backtest("--json")
    assert whole.exit_code == 0
    assert json.loads(whole.out)["verdict"]["colour"] == "yellow"


def test_both_ends_of_a_period_are_judged(backtest, tmp_path):
    assert backtest("--output", tmp_path / "one.json").exit_code == 0
    with open(tmp_path / "one_days.csv") as file:
        days = [row["date"] for row in csv.DictReader(file)]
    dated = backtest("--start-date", days[5], "--end-date", days[30], "--json")
    # Positions of the last date are marked until they end.
    assert json.loads(dated.out)["summary"]["start"] == days[5]
    assert json.loads(dated.out)["folds"][0]["num_dates"] == 26


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a folder that holds so many bytes."""
    mounted = []

    def mount(num_bytes):
        folder = tmp_path / f"disk_{len(mounted)}"
        folder.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode:
            pytest.skip("needs root and leave to mount a tmpfs")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_earlier_results_and_nothing_half_written(backtest, small_disk):
    disk = small_disk(512 << 10)
    assert backtest("--output", disk / "one.json").exit_code == 0
    before = {path.name: path.read_bytes() for path in disk.iterdir()}
    left = shutil.disk_usage(disk).free
    for share in (0.0, 0.3, 0.9):  # full at once, and within a later file
        (disk / "ballast").write_bytes(bytes(left - int(share * sum(map(len, before.values())))))
        done = backtest("--output", disk / "one.json", "--set", "workflow.backtest.cost_bps=50")
        assert done.exit_code == 2
        text = " ".join(done.err.split())
        assert "could not be written: No space left on device" in text
        assert "rule:" in text and "do: free space there" in text and "Traceback" not in text
        (disk / "ballast").unlink()
        assert {path.name: path.read_bytes() for path in disk.iterdir()} == before


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_scored(backtest, small_disk):
    disk = small_disk(64 << 10)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    done = backtest("--output", disk / "one.json")
    assert done.exit_code == 2
    assert f"no file can be made in {disk}" in " ".join(done.err.split()) and "do:" in done.err


def test_a_damaged_checkpoint_is_refused_with_what_a_backtest_can_do(backtest, trained, tmp_path):
    content = bytearray(trained.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.pt").write_bytes(content)
    done = backtest(checkpoint=tmp_path / "damaged.pt")
    assert done.exit_code == 2
    assert "damaged.pt" in done.err and "is damaged" in done.err
    assert "name another checkpoint of this fold" in done.err and "checkpoint_dir" not in done.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "was given no checkpoint"),
        (("--checkpoint", "absent.pt"), "absent.pt is not there"),
        (
            ("--checkpoint", "memoriser.py", "--start-date", "2020-05-01", "--end-date", "2020-01-01"),
            "--end-date must not be before start_date, 2020-05-01",
        ),
        (("--checkpoint", "memoriser.py", "--start-date", "soon"), "--start-date must be a date"),
        (("--checkpoint", "memoriser.py", "--output", "out/dir"), "is no JSON file"),
    ],
)
def test_what_cannot_be_judged_is_refused_with_status_2(memfit, config, words, what):
    done = memfit("backtest", "--config", config, *words)
    assert done.exit_code == 2
    assert what in done.err and "do:" in done.err
    assert "config.yaml" not in done.err  # none of these is the config's fault


def test_a_typo_below_workflow_names_the_nearest_setting(memfit, config):
    config.write_text(CONFIG.replace("k_min", "k_mim"))
    done = memfit("workflow", config)
    assert done.exit_code == 2
    assert "workflow.backtest.k_mim" in done.err and "k_min" in done.err
