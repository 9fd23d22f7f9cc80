"""Files that start a config elsewhere: their figures agree with one another, and no secret stands in them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from posixpath import normpath

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

import memfit
from memfit.amounts import Amount
from memfit.errors import ConfigError, DoesNotFitError, UsageError
from memfit.memory import Footprint
from memfit.pipeline import _plan_run, plan_launch
from memfit.planning import LaunchSettings, render
from memfit.rundir import RunDir
from memfit.units import write_size

GIB, MIB = 1 << 30, 1 << 20
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/launch/recipes.yaml"
#: Each control character, the line ends of Unicode, and what a shell, sbatch, YAML, Docker or Slurm's patterns read.
HOSTILE = [
    *(f"a{letter}RUN" for letter in (*map(chr, range(32)), "\x7f", "\x85", "\u2028", *"'\"\\#;:*{}!&~é")),
    *(
        "$(touch x)",
        "`touch x`",
        "$HOME ${HOME}",
        "%j %A_%a %%",
        "#SBATCH --mem=1",
        "\n#SBATCH --mem=1\n",
        "--flag",
        " a ",
    ),
]
NODES = {
    "experiment": "trajectory", "stages": {"train": {"run": ["python", "train.py"]}},
    "resources": {"ranks": 16, "memory": "52GiB"}, "memory": {"num_gpus": 16, "slack": 0.25}, "slurm": {"nodes": 4, "time": "1-13:30:00"},
    "launch": {"start_with": "srun", "cpus_per_rank": 3},
}  # fmt: skip
SERVICE = {
    "experiment": "recipes", "stages": {"train": {"run": ["python", "train.py"]}}, "resources": {"memory": "28GiB"},
    "memory": {"num_gpus": 1, "slack": 0.25, "cuda_allocator": "expandable_segments:True"},
    "launch": {"shm": "3GiB", "pass_env": ["API_KEY"]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def made(content=NODES, *overrides, form="sbatch", **changes):
    """A launch of a config in this folder, with changes of its block ``launch``."""
    config = content | {"launch": content["launch"] | changes}
    Path("job.yaml").write_text(json.dumps(config))  # YAML too
    return plan_launch(Path("job.yaml"), overrides=overrides, form=form)


def measured_run(experiment, *, shared=GIB):
    """A run whose one job took 6 GiB; another ran out of memory."""
    run = RunDir.create(Path("runs"), experiment, "0" * 64)
    status = {"schema_version": 1, "attempt": 1, "started": 1000.0, "ended": 1120.0}
    for name, state, size in (("train", "completed", 6 * GIB), ("worse", "out_of_memory", 60 * GIB)):
        run.job_dir(name).mkdir(parents=True)
        own = {"state": state, "footprint": Footprint(size, shared).to_dict()}
        (run.job_dir(name) / "status.json").write_text(json.dumps(status | own))
        (run.job_dir(name) / "job.json").write_text('{"stage": "train"}')
    return run


def options(text):
    """The options of a batch script."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


@pytest.mark.proves("S1-38", "S3-16")
def test_the_header_of_a_job_of_four_nodes_is_consistent():
    launch = made()
    given = options(render(launch, "sbatch"))
    assert (given["nodes"], given["ntasks-per-node"], given["ntasks"]) == ("4", "4", "16")
    assert (given["cpus-per-task"], given["gres"]) == ("3", "gpu:4")
    assert given["mem"] == "260G"  # 4 x 52 GiB, a quarter more; memfit itself does not run there
    assert given["time"] == "1-13:30:00"
    assert given["signal"] == "TERM@120" and "requeue" in given


def test_on_one_node_memfit_runs_the_config_with_the_settings_that_were_given():
    with pytest.raises(ConfigError, match="nodes is 4, and launch"):
        made(start_with="memfit")
    one = NODES | {"slurm": {"nodes": 1}, "backend": "slurm", "launch": {"cpus_per_rank": 3}}
    words = made(one, "seed=3", "launch.cpus_per_rank=2").command
    assert words == ("memfit", "run", "job.yaml", "--set", "seed=3", "--set", "backend=local")
    assert "exec memfit run job.yaml --set seed=3" in render(made(one, "seed=3"), "sbatch")
    with pytest.raises(UsageError, match="lies outside"):
        os.chdir(Path(tempfile.mkdtemp(dir=".")))
        plan_launch(Path("../job.yaml"), form="kubernetes")


@pytest.mark.parametrize(
    ("stages", "what"),
    [
        ({"a": {"run": "true"}, "b": {"run": "true"}}, "has several stages"),
        ({"a": {"run": "true", "each": "n in params.folds"}}, "has units"),
        ({"a": {"run": "cd src && python train.py"}}, "only a shell reads"),
        ({"a": {"run": ["train", "{dir}"]}}, "names a folder of the run"),
    ],
)
def test_what_is_no_single_command_is_not_started_on_several_nodes(stages, what):
    own = {"stages": stages, "params": {"folds": 3}, "memory": {"job": "1GiB"}, "resources": {"ranks": 4}}
    with pytest.raises(ConfigError, match=what) as caught:
        made(NODES | own | {"stages": {name: {"memory": "1GiB"} | one for name, one in stages.items()}})
    assert "--backend slurm" in caught.value.remedy


@pytest.mark.proves("S4-24")
def test_words_of_the_command_reach_the_training_as_they_are():
    stages = {"train": {"run": ["python", "train.py", "a b; $HOME", "{params.lr}", "{seed}", "{x}"]}}
    text = render(made(NODES | {"stages": stages, "params": {"lr": 0.1}, "seed": 7}), "sbatch")
    words = shlex.split(text.partition("--wait=60 ")[2].partition("\n")[0])
    assert words[-5:] == ["train.py", "a b; $HOME", "0.1", "7", "{x}"]


@pytest.mark.proves("C-25")
def test_memory_follows_from_the_plan_of_the_stage_that_takes_most():
    stages = {
        "prepare": {"run": "true"},  # not known: it does not count
        "fold": {"run": "true", "each": "n in params.folds", "memory": "2GiB"},
        "join": {"run": "true", "memory": "3GiB"},
    }
    own = {"experiment": "folds", "stages": stages, "params": {"folds": 5}, "memory": {"slack": 0.25}, "launch": {}}
    assert "3.00 GiB (declared: stages.join.memory), 25% more" in made(own).memory_why
    launch = made(own, "max_parallel=8", "memory.slack=0.05", "accept_tight=true")
    assert launch.memory_why.startswith("5 jobs x 2.00 GiB (declared: stages.fold.memory)")
    assert launch.memory == Amount(11 * GIB, "node") and launch.num_cpus == 5


def test_what_a_measured_run_shares_counts_once():
    measured_run("trajectory")
    found = made(NODES | {"resources": {"ranks": 4}})
    assert 8.5 * GIB < found.memory.bytes <= 9 * GIB and "1.00 GiB of mapped files" in found.memory_why


def test_what_a_function_of_the_same_name_took_says_nothing_of_a_command():
    job = measured_run("recipes").job_dir("train") / "job.json"
    job.write_text(json.dumps({"stage": "train", "arguments": {"order": {"target": "train:train"}}}))
    assert made(SERVICE).memory_why.startswith("28.00 GiB (declared")
    job.write_text('{"stage": "train"}')
    assert made(SERVICE).memory_why.startswith("6.00 GiB (measured on train of run_")


@pytest.mark.slow
def test_what_was_measured_with_other_settings_says_so_and_yields_to_what_is_declared():
    """A trial of a few minutes with a small batch, and then a launch of the real one."""
    command = {"run": ["python", "-c", "import time; time.sleep(1.5)", "{params.batch}"]}
    own = {"experiment": "trial", "stages": {"train": command}, "params": {"batch": 2}, "launch": {}}
    with pytest.raises(ConfigError, match="the memory of train is not known"):
        made(own)
    memfit.run(Path("job.yaml"))
    same = made(own)
    assert re.match(r"\S+ .iB \(measured on train of run_\w+\), 10%", same.memory_why)
    larger = made(own | {"params": {"batch": 64}})
    assert "with other settings: batch 2 -> 64)" in larger.memory_why
    words = [*command["run"], "--compile"]
    assert "with other settings: the command changed)" in made(own | {"stages": {"train": {"run": words}}}).memory_why
    declared = made(own | {"params": {"batch": 64}, "resources": {"memory": "3GiB"}})
    assert declared.memory_why.startswith("3.00 GiB (declared")


@pytest.mark.proves("S3-08")
def test_more_than_a_node_has_is_refused_with_the_arithmetic():
    with pytest.raises(DoesNotFitError, match=r"4 x 52\.00 GiB, resources.memory\), 25% more") as caught:
        made().check_node(Amount(256 * GIB, "node"), "the largest node")
    assert caught.value.remedy.startswith("3 tasks a node: 156.00 GiB of each node (cost: 6 nodes for 16 ranks, of 4")
    assert caught.value.remedy.endswith("or --mem=260G on nodes that have it")
    made().check_node(Amount(513 * GIB, "node"), "the largest node")
    with pytest.raises(TypeError, match="different scopes"):
        made().check_node(Amount(513 * GIB, "task"), "the largest node")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"resources": {}}, "the memory of train is not known"),
        ({"launch": {"start_with": "srun", "env": {"HF_TOKEN": "abc"}}}, "launch.env.HF_TOKEN looks like a secret"),
        ({"stages": {"a": {"run": ["train", "--api-key=abc"]}}}, "the command looks like a secret"),
        ({"launch": {"data": ["a\nb"]}}, "launch.data"),
        ({"launch": {"claim": "a-"}}, "launch.claim"),
        ({"launch": {"claim": "a..b"}}, "launch.claim"),
    ],
)
def test_what_cannot_be_right_is_refused(changes, what):
    with pytest.raises(ConfigError, match=what):
        made(NODES | {"launch": {"start_with": "srun"}} | changes)


def test_loaders_without_a_model_make_no_request(monkeypatch):
    facts = {"settings": {"workers": 2}, "workers": 2, "samples": 9, "valid": None, "batch": 3, "drops": False}
    monkeypatch.setattr(_plan_run, "ask_of_loaders", lambda *words: facts)  # makes none
    config = NODES | {"stages": {"train": {"run": "true", "loaders": "train:loaders"}}, "resources": {"ranks": 16}}
    with pytest.raises(ConfigError, match="the memory of train is not known"):
        made(config)
    config["stages"]["train"]["memory"] = "24GiB"
    assert made(config, cpus_per_rank=None).num_cpus == 12  # 4 ranks with two workers of a loader each


def test_a_kubernetes_job_requests_the_planned_peak_and_a_stop_does_not_count_as_a_failure():
    launch = made(SERVICE, form="kubernetes", data=["data", "/mnt/images"], image="r.example/x:1", env={"A": "$(B)"})
    job = YAML(typ="safe", pure=True).load(render(launch, "kubernetes"))
    pod, (container,) = job["spec"]["template"]["spec"], job["spec"]["template"]["spec"]["containers"]
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("batch/v1", "Job", "recipes")
    assert container["resources"]["limits"] == {"memory": "36Gi", "nvidia.com/gpu": 1}
    assert container["resources"]["requests"] == {"memory": "36Gi", "nvidia.com/gpu": 1, "cpu": 1}
    assert pod["terminationGracePeriodSeconds"] == 70 and pod["restartPolicy"] == "Never"  # the policy needs Never
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: one["action"] for one in rules for code in one.get("onExitCodes", {}).get("values", ())}
    assert by_code == {75: "Ignore", 2: "FailJob", 3: "FailJob"}
    assert {one["onExitCodes"]["containerName"] for one in rules if "onExitCodes" in one} == {container["name"]}
    shm, files = pod["volumes"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "3Gi"}
    assert files["persistentVolumeClaim"] == {"claimName": "recipes"}
    assert [(one["mountPath"], one.get("subPath"), one.get("readOnly")) for one in container["volumeMounts"]] == [
        ("/dev/shm", None, None),
        ("/app/runs", "runs", None),
        ("/app/data", "data", True),
        ("/mnt/images", "mnt/images", True),
    ]
    env = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    assert env["A"] == "$$(B)" and env["API_KEY"] == {"secretKeyRef": {"name": "recipes", "key": "API_KEY"}}
    for one in ("../shared", "./", "/dev/shm"):
        with pytest.raises(UsageError, match=rf"{normpath(one)} cannot be a part of a claim"):
            render(made(SERVICE, data=[one]), "kubernetes")
    with pytest.raises(UsageError, match="has ranks that srun starts"):
        render(made(), "kubernetes")


def test_a_folder_is_mounted_once_and_a_variable_is_set_once_as_the_api_requires():
    env = {"A": "1", "MEMFIT_RUNS_DIR": "elsewhere"}
    launch = made(SERVICE, data=["runs", "data/", "./data"], outputs=["data"], pass_env=["A", "A"], env=env)
    job = YAML(typ="safe", pure=True).load(render(launch, "kubernetes"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    mounts = {one["mountPath"]: one.get("readOnly", False) for one in container["volumeMounts"]}
    assert mounts == {"/dev/shm": False, "/app/runs": False, "/app/data": False}
    assert len(container["volumeMounts"]) == 3
    names = [one["name"] for one in container["env"]]
    assert len(names) == len({*names}) and container["env"][-1] == {"name": "MEMFIT_RUNS_DIR", "value": "/app/runs"}
    assert {"name": "A", "valueFrom": {"secretKeyRef": {"name": "recipes", "key": "A"}}} in container["env"]


def sample(kind):
    """The first block of a kind in the page."""
    return (ROOT / "docs/launch.md").read_text().partition(f"```{kind}\n")[2].partition("```")[0]


@pytest.mark.proves("S4-26", "S4-27", "S4-30")
def test_the_compose_file_of_the_page_has_the_sizes_of_the_job_and_only_names_of_secrets():
    service, launch = YAML(typ="safe", pure=True).load(sample("yaml"))["services"]["recipes"], plan_launch(EXAMPLE)
    assert service["mem_limit"] == service["memswap_limit"] == write_size(launch.memory.bytes, ("g", "m"))
    assert service["shm_size"] == write_size(launch.shm.bytes, ("g", "m"))
    assert service["environment"]["WANDB_API_KEY"].startswith("${WANDB_API_KEY:?")
    assert ".env" in (ROOT / ".gitignore").read_text().split()


@pytest.mark.proves("S4-31")
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("podman") is None, reason="needs podman")
def test_podman_compose_reads_the_file_of_the_page_and_asks_for_the_secrets(tmp_path):
    (tmp_path / "compose.yaml").write_text(sample("yaml"))

    def config(**env):
        command = [sys.executable, "-m", "podman_compose", "-f", "compose.yaml", "config"]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | env)

    assert "mem_limit: 36g" in config(WANDB_API_KEY="a").stdout
    refused = config()
    assert refused.returncode and "WANDB_API_KEY is missing a value" in refused.stderr


def test_the_samples_of_the_page_install_memfit_and_keep_secrets_out_of_the_image():
    dockerfile, ignored = sample("dockerfile"), sample("dockerignore")
    steps = [line.partition(" ")[::2] for line in dockerfile.splitlines() if line[:1] != "#"]
    assert [name for name, _ in steps] == ["FROM", "WORKDIR", "COPY", "RUN", "RUN", "COPY", "CMD"]
    assert (
        dict(steps)["WORKDIR"] == "/app" and ("RUN", "memfit --version") in steps and "requirements.txt" in steps[3][1]
    )
    assert json.loads(steps[-1][1])[:2] == ["memfit", "run"]
    own = LaunchSettings.model_validate(YAML(typ="safe").load(EXAMPLE)["launch"])
    assert {"**/.env", "**/.env.*", "**/.git", "runs", *own.data, *own.outputs} <= {*ignored.split()}


def _settings(name, of=lambda text: text):
    return lambda text, launch: replace(launch, settings=LaunchSettings.model_validate({name: of(text)}))


FIELDS = {
    "why": lambda text, launch: replace(launch, memory_why=repr(text), shm_why=repr(text)),
    "command": lambda text, launch: replace(launch, command=("python", "train.py", text)),
    "ranks": lambda text, launch: replace(
        launch, command=("train.py", text), settings=LaunchSettings(start_with="srun")
    ),
    "env": lambda text, launch: replace(launch, env=LaunchSettings.model_validate({"env": {"A": text}}).env),
    **{
        name: (lambda text, launch, name=name: replace(launch, slurm={name: text}))
        for name in ("partition", "account", "qos")
    },
    "extra": lambda text, launch: replace(launch, slurm_extra=(f"--comment={text}",)),
    "time": lambda text, launch: replace(launch, time=text),
    **{name: _settings(name, lambda text: [text]) for name in ("data", "outputs", "pass_env")},
    **{name: _settings(name) for name in ("image", "claim")},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A launch without GPUs and secrets, of which one field at a time is replaced."""
    path = tmp_path_factory.mktemp("plain") / "job.yaml"
    path.write_text(json.dumps(SERVICE | {"memory": {}, "launch": {}}))
    return plan_launch(path)


def rendered(plain, form, field, text):
    """The file with this text in one field; None where it is refused."""
    try:
        return render(FIELDS[field](text, plain), form)
    except (ValidationError, UsageError):
        return None


def shape(form, text):
    """What a text must not change: the number of lines, and in YAML, which folds long lines, that of values."""

    def of(value):
        if isinstance(value, dict):
            return {name: of(one) for name, one in value.items()}
        return [of(one) for one in value] if isinstance(value, list) else ""

    if form == "sbatch":
        return len(text.split("\n"))
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 1)
    return of(reader.load(text)), [line[:9] for line in text.splitlines() if line[:1] == "#"]


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("form", ["sbatch", "kubernetes"])
def test_no_text_of_a_setting_becomes_a_line_of_its_own(plain, form, field):
    if field == "ranks" and form != "sbatch":
        return
    usual = shape(form, rendered(plain, form, field, "A" if field == "pass_env" else "a"))
    found = [(text, made) for text in HOSTILE if (made := rendered(plain, form, field, text)) is not None]
    assert found or field in ("image", "claim", "pass_env", "data", "outputs")
    if form != "sbatch" or field not in ("command", "ranks"):  # a shell reads several lines in quotes as one word
        assert [text for text, made in found if shape(form, made) != usual] == []


@pytest.mark.slow
def test_values_and_words_arrive_as_they_were_given_or_are_refused(plain):
    def texts(form, field):
        found = {text: rendered(plain, form, field, text) for text in HOSTILE}
        refused = {text for text, file in found.items() if file is None}
        assert refused == {text for text in HOSTILE if field == "env" and re.search(r"[\x00-\x1f\x7f]", text)}
        return [(text, file) for text, file in found.items() if file is not None]

    for text, file in texts("sbatch", "env"):
        assert shlex.split(file.partition("export A=")[2].partition("\nsrun")[0]) == [text]
    for text, file in texts("sbatch", "command"):
        (command,) = shlex.split(file.partition("sh -c ")[2].partition("\ncode=")[0])
        assert shlex.split(command)[-1] == text
    for text, file in texts("kubernetes", "command"):
        (container,) = YAML(typ="safe", pure=True).load(file)["spec"]["template"]["spec"]["containers"]
        assert container["command"][-1] == text.replace("$", "$$")


def test_a_request_that_leaves_less_than_a_twentieth_above_a_declared_peak_is_tight():
    tight = SERVICE | {"resources": {"memory": "100GiB"}, "memory": {"slack": 0.02}}
    with pytest.raises(DoesNotFitError, match=r"recipes is tight: 100\.11 GiB of 103\.00 GiB leave 2\.8%") as caught:
        made(tight)
    assert "--set memory.slack=0.25" in caught.value.remedy and "--accept-tight" in caught.value.remedy
    assert made(tight, "memory.slack=0.25").memory == Amount(126 * GIB, "node")  # each remedy as it was printed
    assert made(tight, "accept_tight=true").memory == Amount(103 * GIB, "node")
    measured_run("recipes", shared=0)
    assert made(tight).memory == Amount(7 * GIB, "node")
