"""Files that start a training elsewhere: their figures agree with one another, and no secret stands in them."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from memfit.errors import ConfigError, DoesNotFitError
from memfit.planning import Launch, LaunchConfig, Measured
from memory.containers import NoContainersError, podman

GIB, MIB = 1 << 30, 1 << 20
EXAMPLES = Path(__file__).parents[2] / "examples/launch"
NODES = {
    "schema_version": 1, "name": "trajectory", "command": ["python", "train.py"], "num_nodes": 4, "ranks_per_node": 4,
    "gpus_per_node": 4, "num_workers": 2, "memory": {"rank": "52GiB"}, "num_epochs": 40, "epoch_seconds": 2700.0,
}  # fmt: skip
SERVICE = {
    "name": "recipes", "command": ["python", "train.py"], "gpus_per_node": 1, "num_workers": 4, "batch_bytes": "300MiB",
    "memory": {"rank": "28GiB"}, "image": "torch", "secrets": ["API_KEY"], "cuda_allocator": "expandable_segments:True",
}  # fmt: skip


def made(content=NODES, measured=None, **changes):
    return Launch.of(LaunchConfig.model_validate(content | changes), measured)


def options(text):
    """The options of a batch script."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_the_header_of_a_job_of_four_nodes_is_consistent():
    given = options(made(start_with="srun").render("sbatch"))
    assert (given["nodes"], given["ntasks-per-node"], given["ntasks"]) == ("4", "4", "16")
    assert (given["cpus-per-task"], given["gres"]) == ("3", "gpu:4")
    assert given["mem"] == "260G"  # 4 x 52 GiB, a quarter more; memfit itself does not run there
    assert made().memory_bytes == 261 * GIB
    assert given["time"] == "1-13:30:00"  # 40 epochs of 45 minutes, a quarter more
    assert given["signal"] == "TERM@120" and "requeue" in given


def test_torchrun_is_one_task_a_node_with_the_cores_of_all_its_ranks():
    text = made().render("sbatch")
    given = options(text)
    assert (given["ntasks-per-node"], given["ntasks"], given["cpus-per-task"]) == ("1", "4", "12")
    assert (
        "--nnodes=4" in text and "--nproc-per-node=4" in text and "train.py" in text and "python train.py" not in text
    )


def test_one_rank_needs_no_torchrun():
    text = made(num_nodes=1, ranks_per_node=1).render("sbatch")
    assert "torchrun" not in text and "-- python train.py'" in text


def test_words_of_the_command_reach_the_training_as_they_are():
    text = made(command=["python", "train.py", "a b; $HOME"], num_nodes=2).render("sbatch")
    words = shlex.split(shlex.split(text.partition("sh -c ")[2].partition("\n")[0])[0])
    assert words[-2:] == ["train.py", "a b; $HOME"]
    with pytest.raises(ValidationError):
        made(secrets=["A}; rm -r x; {"])


def test_memory_counts_what_is_shared_once_and_a_measured_run_stands_for_a_node():
    own = made(memory={"rank": "2GiB", "shared": "3GiB", "slack": 0.0}, ranks_per_node=4, accept_tight=True)
    assert 11 * GIB < own.memory_bytes <= 12 * GIB and "that they share" in own.memory_why
    run = Measured(6 * GIB, GIB, 60.0, "run_1")
    found = made(NODES | {"memory": {}, "epoch_seconds": None}, run)
    assert 8.5 * GIB < found.memory_bytes <= 9 * GIB and "measured in run_1" in found.memory_why
    assert found.time == "00:50:00"


def test_more_than_a_node_has_is_refused_with_the_arithmetic():
    with pytest.raises(DoesNotFitError, match=r"4 x 52\.00 GiB, 25% more"):
        made().check_node(256 * GIB, "the largest node")
    made().check_node(513 * GIB, "the largest node")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"memory": {}}, "the memory of the training is not known"),
        ({"memory": {"rank": "1GiB", "node": "2GiB"}}, "both given"),
        ({"env": {"HF_TOKEN": "abc"}}, "env.HF_TOKEN looks like a secret"),
        ({"command": ["train", "--api-key=abc"]}, "command looks like a secret"),
        ({"cuda_allocator": "expandable_segment:True"}, "expandable_segment"),
    ],
)
def test_what_cannot_be_right_is_refused(changes, what):
    with pytest.raises(ConfigError, match=what):
        made(**changes)


def test_a_service_has_equal_limits_room_for_its_batches_and_only_names_of_secrets():
    launch = Launch.of(LaunchConfig.model_validate(SERVICE), form="compose")
    service = yaml.safe_load(launch.render("compose"))["services"]["recipes"]
    assert service["mem_limit"] == service["memswap_limit"] == "35g"
    assert service["shm_size"] == "3g"  # 4 workers x 2 batches x 300 MiB, a quarter more
    assert launch.shm_bytes >= 8 * 300 * MIB * 1.25 and launch.shm_bytes < launch.memory_bytes
    assert service["environment"]["API_KEY"].startswith("${API_KEY:?")
    assert service["environment"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 1


def test_an_image_gets_the_command_as_words_and_no_secret():
    text = made(SERVICE).render("dockerfile")
    assert text.startswith("FROM torch\n") and text.endswith('CMD ["python", "train.py"]\n')
    assert "ENV API_KEY" not in text and "ARG" not in text
    with pytest.raises(ConfigError, match="image is not given"):
        made(SERVICE | {"image": ""}).render("dockerfile")


def test_an_env_file_names_the_secrets_and_leaves_them_empty():
    assert "API_KEY=\n" in made(SERVICE).render("env")


@pytest.mark.slow
def test_the_verb_prints_the_file_and_the_figures(tmp_path):
    def memfit(*words):
        command = [sys.executable, "-m", "memfit", "launch", str(EXAMPLES / "recipes.yaml"), *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    found = json.loads(memfit("--format", "compose", "--json").stdout)
    assert yaml.safe_load(found["text"])["services"]["recipes"]["mem_limit"].endswith("g")
    assert found["figures"]["memory_why"].startswith("1 x 28.00 GiB")
    assert not [*tmp_path.iterdir()]
    large = memfit("--format", "compose", "--set", "memory.rank=900TiB")
    assert large.returncode == 0 and "this host has" in large.stderr
    refused = memfit("--format", "env", "--submit")
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_request_that_leaves_less_than_a_twentieth_above_a_declared_peak_is_tight():
    memory = {"node": "100GiB", "slack": 0.02}
    with pytest.raises(DoesNotFitError, match=r"trajectory is tight: 100\.11 GiB of 103\.00 GiB leave 2\.8%") as caught:
        made(memory=memory)
    assert "--set memory.slack=0.25" in caught.value.remedy and "--accept-tight" in caught.value.remedy
    assert made(memory=memory | {"slack": 0.25}).memory_bytes == 126 * GIB  # each remedy as it was printed
    assert made(memory=memory, accept_tight=True).memory_bytes == 103 * GIB
    measured = Measured(100 * GIB, 0, None, "run_1")
    assert made(NODES | {"memory": {"slack": 0.02}}, measured).memory_bytes == 103 * GIB


@pytest.mark.slow
def test_a_launch_that_is_tight_ends_with_3_unless_that_is_accepted(tmp_path):
    (tmp_path / "job.yaml").write_text('name: a\ncommand: ["true"]\nmemory: {node: 8GiB, slack: 0}\nimage: python\n')

    def memfit(*words):
        command = [sys.executable, "-m", "memfit", "launch", "job.yaml", "--format", "compose", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    refused = memfit()
    assert (refused.returncode, refused.stdout) == (3, "") and "a is tight: 8.00 GiB of 8.00 GiB" in refused.stderr
    assert memfit("--accept-tight").returncode == memfit("--set", "memory.slack=0.25").returncode == 0


@pytest.mark.slow
def test_a_run_that_was_measured_stands_for_the_memory(tmp_path):
    (tmp_path / "job.yaml").write_text('name: trial\ncommand: ["true"]\nimage: python\n')
    code = "block = bytearray(300 << 20); import time; time.sleep(1)"

    def memfit(*words):
        command = [sys.executable, "-m", "memfit", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    assert memfit("run", "--name", "trial", "--", sys.executable, "-c", code).returncode == 0
    words = ("launch", "job.yaml", "--format", "compose", "--json", "--set", "memory.slack=0")
    found = json.loads(memfit(*words, "--measured", "trial").stdout)["figures"]
    assert 300 * MIB < found["memory_bytes"] <= 512 * MIB and "measured in run_" in found["memory_why"]
    assert "memory of the training is not known" in memfit(*words).stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("podman") is None, reason="needs podman")
def test_podman_compose_reads_the_file_and_asks_for_the_secrets(tmp_path):
    (tmp_path / "compose.yaml").write_text(
        Launch.of(LaunchConfig.model_validate(SERVICE), form="compose").render("compose")
    )

    def config(**env):
        command = [sys.executable, "-m", "podman_compose", "-f", "compose.yaml", "config"]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | env)

    service = yaml.safe_load(config(API_KEY="a").stdout)["services"]["recipes"]
    assert (service["mem_limit"], service["shm_size"]) == ("35g", "3g")
    refused = config()
    assert refused.returncode and "API_KEY is missing a value" in refused.stderr


@pytest.mark.slow
@pytest.mark.container
def test_in_a_real_container_the_limits_of_the_file_hold_and_memfit_sees_them(tmp_path):
    code = "import json; from memfit.memory import Budget; print(json.dumps(Budget.read().to_dict()))"
    small = {"memory": {"rank": "200MiB"}, "gpus_per_node": 0, "secrets": [], "batch_bytes": "16MiB"}
    launch = made(SERVICE | small, command=[sys.executable, "-c", code])
    (tmp_path / "compose.yaml").write_text(launch.render("compose"))
    try:
        with podman(Path(tempfile.mkdtemp(dir=tmp_path))) as run:
            more = {"image": run.image, "network_mode": "none", "volumes": run.mounts, "environment": [run.python_path]}
            (tmp_path / "here.yaml").write_text(yaml.safe_dump({"services": {"recipes": more}}))
            words = [sys.executable, "-m", "podman_compose", "-f", "compose.yaml", "-f", "here.yaml"]
            here = {"cwd": tmp_path, "env": run.env, "capture_output": True, "text": True}
            done = subprocess.run([*words, "run", "--rm", "-T", "recipes"], **here)
            subprocess.run([*words, "down"], **here, check=True)  # the pod
    except NoContainersError as reason:
        pytest.skip(str(reason))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])  # the first line may name the pod
    assert found["limit_bytes"] == launch.memory_bytes
    assert found["shm"]["total_bytes"] == launch.shm_bytes


@pytest.mark.slow
@pytest.mark.container
def test_no_layer_of_the_image_holds_a_key_that_lies_in_the_folder(tmp_path):
    key, folder = "planted-" + "key-7f3a", tmp_path / "project"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git/packed").write_text(key)
    (folder / "deep").mkdir()
    for name in (".env", "deep/.env", "train.py"):
        (folder / name).write_text(f"API_KEY={key}\n" if name.endswith(".env") else "print(1)\n")

    def layers(run, tag):
        run.call("build", "-q", "-t", tag, str(folder))
        run.call("save", "--uncompressed", "-o", str(tmp_path / f"{tag}.tar"), tag)
        run.call("rmi", "--force", tag)
        return (tmp_path / f"{tag}.tar").read_bytes()

    try:
        with podman(Path(tempfile.mkdtemp(dir=tmp_path))) as run:
            launch = made(SERVICE | {"image": run.image, "requirements": ""})
            (folder / "Dockerfile").write_text(launch.render("dockerfile"))
            without = layers(run, "memfit-test-without")
            (folder / ".dockerignore").write_text(launch.render("dockerignore"))
            image = layers(run, "memfit-test-with")
    except NoContainersError as reason:
        pytest.skip(str(reason))
    assert without.count(key.encode()) == 3
    assert key.encode() not in image and b"print(1)" in image
