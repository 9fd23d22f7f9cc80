"""The video classifier as a run: its tree, its leaks, its kills and its out-of-memories."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("av")

import kills  # noqa: E402
from memfit import run  # noqa: E402
from memfit.errors import ConfigError, DataError  # noqa: E402
from memfit.pipeline import Output  # noqa: E402
from memfit.rundir import RunDir  # noqa: E402
from memfit.training import StepOutcome, load_checkpoint  # noqa: E402
from memfit_workloads.benches import contents, differing  # noqa: E402
from memfit_workloads.video import data, scores, stages, training  # noqa: E402
from memfit_workloads.video.params import CleanupParams, VideoParams  # noqa: E402
from stages_here import StagesHere  # noqa: E402

CONFIG = Path(data.__file__).with_name("config.yaml")
SMALL = {
    "data": {"num_clips": 24, "bad_share": 0.1, "seconds": 0.5},
    "clip": {"num_frames": 4, "size": 16},
    "splits": {"n_splits": 2, "test_share": 0.25},
    "loader": {"batch_size": 8},
    "train": {"num_epochs": 2},
    "model": {"width": 4},
}
STAGES = (
    "load_data", "create_kfold_splits", "generate_augmentations", "create_datasets", "create_loaders",
    "initialize_model", "evaluate",
)  # fmt: skip


def config(folder, **params):
    content = {"schema_version": 1, "experiment": "video", "target": "memfit_workloads.video.stages:VIDEO", "seed": 1}
    path = folder / "config.yaml"
    path.write_text(json.dumps(content | {"params": SMALL | params}))
    return path


def run_here(folder, *folds, **params):
    """Run all stages that come before the folds, and these folds."""
    here = StagesHere(
        folder, stages.VIDEO, VideoParams.model_validate(SMALL | params), seed=1, folds_of="create_kfold_splits"
    )
    for name in STAGES[:-1]:
        here.run(name)
    for fold in folds:
        here.run("fold", fold)
    return here


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All stages, each run once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a job
    here = run_here(tmp_path_factory.mktemp("video"), 1, 2)
    here.run("evaluate")
    torch.set_num_threads(threads)
    return here


@pytest.mark.proves("S1-21", "S1-22", "S1-23")
def test_the_tree_is_that_of_the_report_and_what_was_decided_is_stored(whole):
    checkpoints = whole.run_dir / "checkpoints"
    for stage in STAGES:
        assert (checkpoints / f"stage_{stage}.json").is_file(), stage
    for fold in (1, 2):
        folder = checkpoints / f"fold_{fold}"
        assert {"best", "latest"} < {one.name for one in folder.iterdir()}
        assert load_checkpoint(folder / "latest")["epoch"] == 2
        found = Output(whole.manifest("fold", fold)).result
        assert {"auc", "accuracy", "train_accuracy", "gap", "majority", "file_statistics"} <= {*found}
        assert found["microbatch_size"] == found["batch_size"] == 8
    model = Output(checkpoints / "stage_initialize_model.json").result
    assert model["architecture"] == "ClipNet(width=4)" and model["num_parameters"] > 1000
    assert len(model["first_weights"]) == 64 and isinstance(model["seed"], int)
    loaders = Output(checkpoints / "stage_create_loaders.json").result
    assert (loaders["batch_size"], loaders["num_workers"], loaders["batch_bytes"]) == (8, 0, 8 * 4 * 3 * 16 * 16)
    load = Output(checkpoints / "stage_load_data.json")
    assert load.result["num_skipped"] == len(load.json("skipped")) > 0 and load.json("skipped")[0]["why"]
    told = "\n".join(Output(whole.manifest("evaluate")).result["report"])
    assert "out of fold: accuracy" in told and "without a look at a frame" in told


@pytest.mark.proves("S1-18", "S1-19", "S1-20")
def test_no_group_is_in_two_folds_and_no_changed_copy_of_a_validated_video_is_trained_on(whole):
    checkpoints = whole.run_dir / "checkpoints"
    videos = Output(checkpoints / "stage_load_data.json").table("videos")
    splits = Output(checkpoints / "stage_create_kfold_splits.json").table("splits")
    assert splits["group"].to_pylist() == videos["group"].to_pylist()
    parts = splits.group_by(["group", "fold"]).aggregate([])  # no group is in two folds
    assert sorted(parts["group"].to_pylist()) == sorted({*videos["group"].to_pylist()})
    assert {*parts["fold"].to_pylist()} == {0, 1, 2}
    changes = Output(checkpoints / "stage_generate_augmentations.json").table("augmentations")
    rows = np.flatnonzero(splits["fold"].to_numpy() == 1)
    own = data.changes_by_row(changes, videos, rows.tolist())
    items = {videos["item"][row].as_py() for row in rows}
    assert {one["item"] for versions in own.values() for one in versions} == items
    assert all(len(versions) == 2 and not versions[0]["flip"] for versions in own.values())


@pytest.mark.proves("S1-40", "S1-48")
@pytest.mark.long
def test_a_run_that_is_killed_within_a_fold_ends_as_its_stages_do_here(whole, tmp_path):
    config(tmp_path)
    killed = kills.run(tmp_path, "config.yaml", kill_at=[kills.epoch("fold_2", 1)])
    assert differing(contents(whole.run_dir), contents(killed.path)) == []


@pytest.mark.proves("S1-02", "S1-05", "S1-42")
def test_collections_happen_when_they_were_asked_for_and_never_else(whole, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(training, "clean_up", lambda: done.append("step"))
    monkeypatch.setattr("memfit.training.clean_up", lambda: done.append("stage"))
    for cleanup, expected in (
        ({}, []),
        ({"every_batches": 3}, ["step"]),  # of two batches in each of two epochs
        ({"after_epoch": True}, ["step", "step"]),
        ({"after_fold": True}, ["step"]),
        ({"before_stage": True, "after_stage": True}, ["stage", "stage"]),
    ):
        done.clear()
        context = whole.context("fold", 1, folder=tmp_path / "_".join(["fold", *cleanup]))
        whole.workload.stage("fold").run(context, VideoParams.model_validate(SMALL | {"cleanup": cleanup}))
        assert done == expected, cleanup
    after_step = training.collections(CleanupParams(after_out_of_memory=True))["on_step"]
    for num_ooms in (0, 1):
        after_step(StepOutcome(1.0, 1.0, 1.0, 1, 1, num_ooms, skipped=False))
    assert done == ["stage", "stage", "step"]


@pytest.mark.proves("S1-39")
@pytest.mark.long
def test_another_entry_runs_the_notebook_alone_and_keeps_it_with_its_outputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(config(tmp_path, entry="notebook"))
    assert (result.exit_code, list(result.statuses)) == (0, ["notebook"])
    output = Output(result.path / "checkpoints/stage_notebook.json")
    book = json.loads(output.path("notebook").read_text())
    printed = "".join(str(cell.get("outputs")) for cell in book["cells"])
    assert "skipped clips/" in printed and f"{output.result['accuracy']}" in printed
    assert 0 <= output.result["auc"] <= 1
    epochs = [event for event in RunDir(result.path).events() if event["kind"] == "epoch"]
    assert [event["epoch"] for event in epochs] == [1, 2]


@pytest.mark.proves("S1-45")
@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"train": {"use_amp": "yes"}}, "use_amp"),
        ({"entry": False}, "entry"),
        ({"data": {"source": "files"}}, "path belongs to source: files"),
        ({"loader": {"batch": 4}}, "batch_size"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(tmp_path, params, told, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=told):
        run(config(tmp_path, **params))
    assert not (tmp_path / "runs").exists()


def test_videos_of_ones_own_come_from_folders_or_a_list(whole, tmp_path):
    loaded = Output(whole.manifest("load_data"))
    clips, rows = loaded.dir / "clips", loaded.table("videos").to_pylist()
    for number, row in enumerate(rows):
        target = tmp_path / "videos" / ("cats" if row["label"] == "real" else "dogs") / Path(row["path"]).name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(clips / target.name, target)
        if number == 0:
            (target.parent / "notes.txt").write_text("no video")

    def load(path):
        params = VideoParams(**SMALL | {"data": {"source": "files", "path": path}})
        return StagesHere(tmp_path, stages.VIDEO, params).run("load_data").result

    found = load(tmp_path / "videos")
    assert (found["classes"], found["num_videos"]) == (["cats", "dogs"], len(rows))
    there = sorted(path for path in (tmp_path / "videos").glob("*/*") if path.suffix != ".txt")
    listed = "path,label\n" + "".join(f"{path.relative_to(tmp_path)},{path.parent.name}\n" for path in there)
    (tmp_path / "list.csv").write_text(f"{listed}videos/none.mp4,cats\n")
    assert load(tmp_path / "list.csv") == found | {"num_skipped": 1}
    (tmp_path / "list.csv").write_text("file,label\nvideos/none.mp4,cats\n")
    with pytest.raises(DataError, match="cannot be read as a list"):
        load(tmp_path / "list.csv")


@pytest.mark.proves("S1-29", "S1-47")
def test_intervals_are_over_groups_and_metrics_are_those_of_scikit_learn():
    from sklearn.metrics import log_loss, roc_auc_score

    rng = np.random.default_rng(1)
    classes, logits = rng.integers(0, 2, 200), rng.normal(size=200)
    found = scores.metrics(classes, logits[:, None])
    assert found["auc"] == pytest.approx(roc_auc_score(classes, logits))
    assert found["loss"] == pytest.approx(log_loss(classes, 1 / (1 + np.exp(-logits))))
    few = scores._judged(classes, logits[:, None], np.arange(200) // 20, np.random.default_rng(0))["accuracy"]
    many = scores._judged(classes, logits[:, None], np.arange(200), np.random.default_rng(0))["accuracy"]
    assert few["low"] < few["value"] < few["high"] and many["low"] < many["value"] < many["high"]
