"""Stages that are commands, in a workload and in a config: one path describes both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import memfit
from memfit.errors import ConfigError
from memfit.pipeline import Choice, Output, order_of_config, plan_run

here = pytest.mark.usefixtures("here")

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


@pytest.mark.slow
@here
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


SIZED = """
from pydantic import BaseModel
from memfit.pipeline import Probe, Stage, Workload


class Params(BaseModel):
    rows: int = 3


def train(context, params):
    return {}


SIZED = Workload(Params, (Stage("train", train, probe=Probe(memory=lambda params: params.rows << 20)), Stage("end", train)))
"""


@pytest.mark.slow
@here
def test_a_stage_says_what_its_jobs_take_by_arithmetic_when_it_is_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sized.py").write_text(SIZED)
    config = {"experiment": "sized", "target": "sized:SIZED", "params": {"rows": 5}}
    found = {stage.name: stage.memory_bytes for stage in order_of_config(config, with_memory=True).stages}
    assert found == {"train": 5 << 20, "end": None}
    assert {stage.memory_bytes for stage in order_of_config(config).stages} == {None}


CHOOSING = """
from pydantic import BaseModel
from memfit.pipeline import Stage, Workload


class Params(BaseModel):
    warm: bool = False


def warm(context, params):
    return {"rate": 1}


def train(context, params):
    return {"rate": context["warm"].result["rate"] if "warm" in context.needs else 0}


CHOOSING = Workload(
    Params,
    (Stage("warm", warm, reads=()), Stage("train", train, needs=("warm",))),
    choose=lambda params: ("warm", "train") if params.warm else ("train",),
)
"""


@here
def test_a_stage_runs_without_one_that_the_workload_left_out_and_with_it_where_it_is_chosen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("choosing.py").write_text(CHOOSING)
    for warm in (False, True):
        config = {"experiment": "choosing", "target": "choosing:CHOOSING", "params": {"warm": warm}}
        run = memfit.run(config)
        assert Output(run.path / "checkpoints/stage_train.json").result == {"rate": int(warm)}
        assert (run.path / "checkpoints/stage_warm.json").exists() == warm


CHECKED = """
from pydantic import BaseModel
from memfit.errors import UsageError
from memfit.pipeline import Stage, Workload


class Params(BaseModel):
    rows: int = 3
    price: str = ""


def refuse_few(params):
    if params.rows < 2:
        raise ValueError(f"params.rows is {params.rows}, and two folds need 2 or more")


def need_price(params):
    if not params.price:
        raise UsageError("there is no price.", rule="a profit counts only on prices.", remedy="--set params.price=close")


def work(context, params):
    return {}


CHECKED = Workload(Params, check=refuse_few, stages=(
    Stage("train", work),
    Stage("judge", work, needs=("train",), check=need_price),
))
"""


@here
def test_a_workload_and_its_stages_refuse_settings_before_the_first_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("checked.py").write_text(CHECKED)
    config = {"experiment": "checked", "target": "checked:CHECKED"}
    with pytest.raises(ConfigError, match="there is no price") as caught:
        memfit.run(config)
    assert caught.value.remedy == "--set params.price=close"
    with pytest.raises(ConfigError, match=r"params\.rows is 1, and two folds need 2 or more") as caught:
        memfit.run(config | {"params": {"rows": 1}}, choice=Choice(until="train"))
    assert "--set params.NAME=VALUE" in caught.value.remedy
    with pytest.raises(ConfigError, match="there is no price"):
        plan_run(config)
    assert not Path("runs").exists()
    assert memfit.run(config, choice=Choice(until="train")).state == "completed"  # it is not asked for its price
    assert memfit.run(config | {"params": {"price": "close"}}).state == "completed"


KILLED = """
import os, signal
from pathlib import Path
from memfit.pipeline import Stage, Workload
from pydantic import BaseModel


class Params(BaseModel):
    pass


def fingerprint(params):
    with open("described", "a") as file:
        file.write("x")
    if len(Path("described").read_text()) <= int(os.environ["KILLS"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return "data"


ONE = Workload(Params, (Stage("train", lambda context, params: {"loss": 1.0}, reads=()),), fingerprint=fingerprint)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("warm", "kills", "code"), [("auto", 1, 0), ("never", 1, 0), ("never", 9, 4)])
def test_a_run_whose_description_is_killed_describes_again_and_gives_up_in_the_end(tmp_path, warm, kills, code):
    (tmp_path / "killed.py").write_text(KILLED)
    words = [sys.executable, "-m", "memfit", "run", "killed:ONE", "--set", f"warm={warm}"]
    env = {**os.environ, "KILLS": str(kills)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert (tmp_path / "described").read_text() == "xx"
