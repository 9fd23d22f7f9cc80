"""The setting for torch's allocator: there before a job's interpreter starts, recorded, and yours where you set it."""

import json
import sys

import pytest

from memfit.config import read_file
from memfit.errors import ConfigError
from memfit.pipeline import run, run_commands
from memfit.rundir import RunDir

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
GROWS = "expandable_segments:True"
#: What the kernel handed to the program, whatever it changed since.
AT_START = """
import json, pathlib
given = dict(one.split("=", 1) for one in pathlib.Path("/proc/self/environ").read_text().split("\\0") if "=" in one)
print(json.dumps({name: text for name, text in given.items() if name.startswith("PYTORCH") and "ALLOC" in name}))
"""
FUNCTION = f"""
def train(context):
    exec({AT_START!r})
    return {{"done": 1.0}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def run_command(*settings, env=None):
    """What a job's interpreter got, the run's record, and the sentences of its plan."""
    result = run_commands([sys.executable, "-c", AT_START], overrides=settings, env=env or {})
    run_dir = RunDir(result.path)
    seen = json.loads((run_dir.job_dir("cmd_0001") / "out.log").read_text())
    told = [event["text"] for event in run_dir.events() if event["kind"] == "plan" and "allocator" in event["text"]]
    return seen, run_dir, told


@pytest.mark.usefixtures("here")
@pytest.mark.proves("S4-28", "C-06")
def test_a_jobs_interpreter_starts_with_it_and_the_record_of_the_run_and_of_the_job_shows_it():
    flag = ("--cuda-allocator", f'memory.cuda_allocator="{GROWS}"')
    seen, run_dir, told = run_command(flag)
    assert seen == dict.fromkeys(NAMES, GROWS) and told == []
    assert read_file(run_dir.path / "config.yaml")["memory"]["cuda_allocator"] == GROWS
    assert run_dir.header["origins"]["memory.cuda_allocator"] == "--cuda-allocator"
    job = json.loads((run_dir.job_dir("cmd_0001") / "job.json").read_text())
    assert job["cuda_allocator"] == job["env"]["PYTORCH_ALLOC_CONF"] == GROWS


@pytest.mark.usefixtures("here")
def test_without_the_setting_a_job_gets_nothing_but_what_the_environment_says(monkeypatch):
    assert run_command()[0] == {}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert run_command()[0] == {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", NAMES)
def test_a_variable_of_your_own_wins_over_the_setting_and_that_is_told(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    seen, run_dir, [told] = run_command(f"memory.cuda_allocator={GROWS}", env={name: "max_split_size_mb:64"})
    assert seen == dict.fromkeys(NAMES, "max_split_size_mb:64")
    assert f"max_split_size_mb:64, from environment {name}, over --set {GROWS}" in told
    assert read_file(run_dir.path / "config.yaml")["memory"]["cuda_allocator"] == "max_split_size_mb:64"
    assert run_dir.header["origins"]["memory.cuda_allocator"] == f"environment {name}, over --set {GROWS}"


def test_a_contradiction_is_refused_before_anything_runs_with_the_flag_and_the_source(tmp_path):
    flag = ("--cuda-allocator", f'memory.cuda_allocator="{GROWS},max_split_size_mb:64"')
    with pytest.raises(ConfigError) as caught:
        run_command(flag)
    text = str(caught.value)
    assert "--cuda-allocator" in text and "together with max_split_size_mb:64" in text and "issue 119452" in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_function_starts_with_what_its_config_says_and_the_effective_config_keeps_it(tmp_path):
    (tmp_path / "job.py").write_text(FUNCTION)
    path = tmp_path / "config.yaml"
    path.write_text(f"experiment: sees\ntarget: job:train\nmemory:\n  cuda_allocator: '{GROWS}'\n")
    result = run(path)
    assert result.state == "completed"
    assert json.loads((result.path / "jobs/train/out.log").read_text()) == dict.fromkeys(NAMES, GROWS)
    assert f"cuda_allocator: {GROWS}" in (result.path / "config.yaml").read_text()
    assert RunDir(result.path).header["origins"]["memory.cuda_allocator"] == f"{path}:4"
