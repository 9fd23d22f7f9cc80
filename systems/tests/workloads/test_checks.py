"""What the configs of the video classifier and of the recipes show, refused before the first job."""

import json

import pytest

pytest.importorskip("av")
pytest.importorskip("transformers")

from memfit.errors import UsageError
from memfit_workloads.recipes.params import RecipesParams
from memfit_workloads.recipes.stages import RECIPES
from memfit_workloads.video.params import VideoParams
from memfit_workloads.video.stages import VIDEO


def refused(workload, why, **params):
    with pytest.raises(UsageError, match=why) as caught:
        workload.check(workload.params.model_validate(params))
    assert "--set params." in caught.value.remedy
    return caught.value.remedy


@pytest.mark.slow
def test_videos_of_one_class_or_too_few_for_the_folds_start_no_job(tmp_path):
    VIDEO.check(VideoParams())
    refused(VIDEO, "n_splits makes 200 parts", splits={"n_splits": 200})
    refused(VIDEO, "cannot be read as a list of videos", data={"source": "files", "path": tmp_path / "absent"})
    (tmp_path / "real").mkdir()
    for number in range(9):
        (tmp_path / "real" / f"{number}.mp4").touch()
    refused(VIDEO, "have one class: real", data={"source": "files", "path": tmp_path})
    (tmp_path / "false").mkdir()
    (tmp_path / "false" / "a.mp4").touch()
    refused(VIDEO, "the class false lies in 1 groups", data={"source": "files", "path": tmp_path})


def test_a_model_that_cannot_be_loaded_starts_no_job(tmp_path):
    RECIPES.check(RecipesParams())
    refused(RECIPES, "absent.jsonl is not there", data={"source": "files", "path": tmp_path / "absent.jsonl"})
    refused(RECIPES, "is a folder", data={"source": "files", "path": tmp_path})
    refused(RECIPES, "cannot be loaded", pretrained_model=str(tmp_path / "t5"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    RECIPES.check(RecipesParams(pretrained_model=str(tmp_path)))  # to plan its memory
    (tmp_path / "model.safetensors").touch()
    refused(RECIPES, "has no tokenizer.json", pretrained_model=str(tmp_path))


def test_a_device_that_torch_does_not_know_is_no_setting():
    with pytest.raises(ValueError, match="device"):
        VIDEO.params.model_validate({"train": {"device": "gpu"}})
