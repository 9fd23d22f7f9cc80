"""A config whose stages are commands: what their placeholders stand for."""

from pathlib import Path

import pytest

import memfit
from memfit.errors import ConfigError
from memfit.pipeline import plan_run


def test_units_come_from_a_result_and_meet_and_a_join_gets_all_of_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folds = '{"folds": [{"fold": "a", "rows": 1}, {"fold": "b", "rows": 2}]}'
    stages = {
        "prepare": {"run": f"echo '{folds}' > {{dir}}/result.json"},
        "fold": {"each": "fold in prepare.folds", "run": "echo {unit} {fold} {rows} > {dir}/own"},
        "score": {"each": "fold in prepare.folds", "run": ["cp", "{fold}/own", "{dir}/copy"]},
        "double": {"each": "n in params.sizes", "run": "echo '{\"twice\": '$(({n} * 2))'}' > {dir}/result.json"},
        "join": {"needs": ["score"], "run": "for one in {score}; do cat $one/copy; done > {dir}/all"},
    }
    result = memfit.run({"experiment": "commands", "params": {"sizes": [3, 5]}, "stages": stages})
    assert result.state == "completed"
    assert (result.path / "checkpoints/stage_join/all").read_text() == "a a 1\nb b 2\n"
    assert [result.metrics[job]["twice"] for job in ("double_3", "double_5")] == [6, 10]


WORKLOAD = """
from pydantic import BaseModel
from memfit.pipeline import Stage, Workload


class Params(BaseModel):
    sizes: list[int] = [2, 3]
    word: str = "a b"
    unused: int = 0


def prepare(context, params):
    context.save("rows", ["one"])
    return {}


MIXED = Workload(Params, (
    Stage("prepare", prepare, reads=()),
    Stage("own", ("cp", "script.sh", "{dir}/{params.word}"), each="size in params.sizes"),
    Stage("line", "sh script.sh {prepare}/rows.json {size} > {dir}/{params.word}", each="size in params.sizes"),
    Stage("join", ("sh", "script.sh", "{own}", "{seed}"), after=("line",)),
))
"""


def test_a_stage_of_a_workload_that_is_a_command_works_as_one_of_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mixed.py").write_text(WORKLOAD)
    Path("script.sh").write_text("echo $#\n")
    config = {"experiment": "mixed", "target": "mixed:MIXED"}
    result = memfit.run(config)
    assert result.state == "completed"
    assert (result.path / "checkpoints/line_2/a b").read_text() == "2\n"
    assert (result.path / "jobs/join/out.log").read_text() == "3\n"

    def reruns(**params):
        return {stage.name for stage in plan_run(config | {"params": params}).stages if stage.num_runs}

    assert reruns(unused=1) == set()
    assert reruns(word="c") == {"own", "line", "join"}  # the join may get other results
    Path("script.sh").write_text("echo $1\n")
    assert reruns() == {"own", "line", "join"}


def test_a_command_that_names_no_setting_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stages = {"one": {"run": "echo {params.rate}"}}
    with pytest.raises(ConfigError, match=r"stage 'one' names the setting 'params\.rate', which is not there"):
        memfit.run({"experiment": "commands", "stages": stages})
    with pytest.raises(ConfigError, match=r"stages\.one has no command"):
        memfit.run({"experiment": "commands", "stages": {"one": {"each": "n in params.sizes"}}})
