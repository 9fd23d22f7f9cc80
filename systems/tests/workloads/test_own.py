"""A user's own network in each system: it trains from a config, killed too; a wrong shape ends before the first job."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import kills
from memfit_workloads.forecaster.params import ForecasterParams
from memfit_workloads.ranker.params import RankerParams
from memfit_workloads.ranker.stages import RANKER
from stages_here import runs_here

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from memfit_workloads.own.bench import SYSTEMS, write

MEMFIT = "import runpy; runpy.run_module('memfit', run_name='__main__')"
#: What a wrong network returns.
SHAPES = {"ranker": [32, 2, 1], "forecaster": [32, 2, 1], "video": [2, 3, 1], "trajectory": [2, 5, 16, 1]}
systems = pytest.mark.parametrize("system", SYSTEMS)


@pytest.mark.parametrize(
    ("params", "given", "why"),
    [
        (
            RankerParams,
            {"model": {"target": "nets:Net", "width": 8}},
            "model.width belongs to .*PatchRanker; of nets:Net",
        ),
        (RankerParams, {"model": {"params": {"width": 8}}}, "model.params belongs to a model.target of your own"),
        (RankerParams, {"model": "nets"}, "model.target"),
        (ForecasterParams, {"model": "nets:Net", "pretrain": {"num_epochs": 1}}, "it trains that network's encoder"),
    ],
)
def test_settings_of_another_network_are_refused(params, given, why):
    with pytest.raises(ValidationError, match=why):
        params.model_validate(given)


def test_a_function_may_make_the_network_and_its_file_of_weights_is_data(tmp_path, monkeypatch):
    (tmp_path / "nets_of_own.py").write_text(
        "from torch import nn\n\ndef make(num_features, lookback, num_horizons, weights):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(num_features * lookback, num_horizons))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    weights = tmp_path / "weights.pt"
    given = {"model": {"target": "nets_of_own:make", "params": {"weights": str(weights)}}}
    params = RankerParams.model_validate(given)
    RANKER.check(params)  # it takes the first input
    assert params.model.fingerprint() == ""
    weights.write_bytes(b"1")
    first = params.model.fingerprint()
    weights.write_bytes(b"2")
    assert "" != first != RANKER.fingerprint(params)["fold"] == params.model.fingerprint()


@pytest.mark.slow
@systems
def test_a_wrong_shape_is_refused_with_both_before_the_first_job(system, memfit, tmp_path):
    write(tmp_path, system)
    name, shape = SYSTEMS[system][0], SHAPES[system]
    with open(tmp_path / f"{system}.py", "a") as file:
        file.write(f"import functools\nright = {name}.forward\n{name}.forward = ")
        file.write("functools.wraps(right)(lambda *given, **more: right(*given, **more)[..., None])\n")
    with runs_here():
        refused = memfit("run", f"{system}.yaml")
    assert refused.exit_code == 2
    assert f"returns the shape {shape}, and {shape[:-1]} is needed" in refused.err
    assert "forward gets what it names of" in refused.err and not Path("runs").exists()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
@systems
def test_a_network_is_planned_and_trained_killed_and_resumed_to_the_same_bytes(system, memfit, tmp_path, one_thread):
    write(tmp_path, system)
    stage = SYSTEMS[system][1]
    words = ("run", f"{system}.yaml", "--until", stage, "--units", "1")
    with runs_here():
        assert re.search(r"weights +[0-9.]+ KiB", memfit("estimate", f"{system}.yaml").out)
        quiet = Path(json.loads(memfit(*words, "--json").out)["run"])
    again = shutil.copytree(tmp_path, tmp_path / "killed", ignore=shutil.ignore_patterns("runs", "panels"))
    killed = kills.run(again, *words, kill_at=[kills.epoch(f"{stage}_1", 1)], program=MEMFIT)
    expected, found = (kills.numbers_in(one) for one in (quiet, killed.path))
    assert {f"{stage}_1/best", f"{stage}_1"} <= found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
