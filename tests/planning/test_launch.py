"""Files that start a training elsewhere: their figures agree with one another, and no secret stands in them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

from memfit.errors import ConfigError, DoesNotFitError, UsageError
from memfit.planning import Launch, LaunchConfig, Measured
from memory.containers import NoContainersError, podman

GIB, MIB = 1 << 30, 1 << 20
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


def services(text):
    """The services of a Compose file, as podman-compose reads it: by YAML 1.1."""
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 1)
    return reader.load(text)["services"]


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
    assert 8.5 * GIB < found.memory_bytes <= 9 * GIB and "measured in 'run_1'" in found.memory_why
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
    service = services(launch.render("compose"))["recipes"]
    assert service["mem_limit"] == service["memswap_limit"] == "36g"  # memfit itself runs there
    assert service["shm_size"] == "3g"  # 4 workers x 2 batches x 300 MiB, a quarter more
    assert launch.shm_bytes >= 8 * 300 * MIB * 1.25 and launch.shm_bytes < launch.memory_bytes
    assert service["environment"]["API_KEY"].startswith("${API_KEY:?")
    assert service["environment"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 1


def test_an_image_gets_the_command_as_words_and_no_secret():
    text = made(SERVICE).render("dockerfile")
    assert text.startswith("FROM torch\n") and text.endswith(', "--", "python", "train.py"]\n')
    assert "ENV API_KEY" not in text and "ARG" not in text
    with pytest.raises(ConfigError, match="image is not given"):
        made(SERVICE | {"image": ""}).render("dockerfile")


def test_an_env_file_names_the_secrets_and_leaves_them_empty():
    assert "API_KEY=\n" in made(SERVICE).render("env")


FIELDS = {
    "measured": lambda _: {"memory": {}},
    "command": lambda text: {"command": ["python", "train.py", text]},
    "env": lambda text: {"env": {"A": text}},
    **{name: (lambda text, name=name: {"slurm": {name: text}}) for name in ("partition", "account", "qos")},
    "extra": lambda text: {"slurm": {"extra": [f"--comment={text}"]}},
    **{name: (lambda text, name=name: {name: [text]}) for name in ("data", "outputs", "secrets")},
    **{name: (lambda text, name=name: {name: text}) for name in ("name", "time", "image", "requirements")},
    "cuda_allocator": lambda text: {"cuda_allocator": text},
}


def rendered(form, field, text):
    """The file with this text in one field; None where it is refused."""
    content = SERVICE | {"gpus_per_node": 0, "secrets": []} | FIELDS[field](text)
    try:
        return Launch.of(LaunchConfig.model_validate(content), Measured(GIB, 0, 60.0, text), form).render(form)
    except (ValidationError, UsageError):
        return None


def shape(form, text):
    """What a text must not change: the number of lines, and in YAML, which folds long lines, that of values."""

    def of(value):
        if isinstance(value, dict):
            return {name: of(one) for name, one in value.items()}
        return [of(one) for one in value] if isinstance(value, list) else ""

    if form != "compose":
        return len(text.split("\n"))
    return of([*services(text).values()]), [line[:9] for line in text.splitlines() if line[:1] == "#"]


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("form", ["sbatch", "compose", "dockerfile", "dockerignore", "env"])
def test_no_text_of_a_setting_becomes_a_line_of_its_own(form, field):
    plain = {"cuda_allocator": "expandable_segments:True", "secrets": "A"}.get(field, "a")
    usual = shape(form, rendered(form, field, plain))
    found = [(text, made) for text in HOSTILE if (made := rendered(form, field, text)) is not None]
    assert found or field in ("name", "image", "requirements", "secrets", "cuda_allocator")
    if (form, field) != ("sbatch", "command"):  # a shell reads several lines in quotes as one word: see below
        assert [text for text, made in found if shape(form, made) != usual] == []


@pytest.mark.slow
def test_values_and_words_arrive_as_they_were_given_or_are_refused():
    def texts(form, field):
        found = {text: rendered(form, field, text) for text in HOSTILE}
        refused = {text for text, file in found.items() if file is None}
        assert refused == {text for text in HOSTILE if re.search(r"[\x00-\x1f\x7f]" if field == "env" else "\0", text)}
        return [(text, file) for text, file in found.items() if file is not None]

    for text, file in texts("sbatch", "env"):
        assert shlex.split(file.partition("export A=")[2].partition("\nexport")[0]) == [text]
    for text, file in texts("sbatch", "command"):
        (command,) = shlex.split(file.partition("sh -c ")[2].partition("\ncode=")[0])
        assert shlex.split(command)[-1] == text
    for text, file in texts("compose", "env"):
        assert services(file)["recipes"]["environment"]["A"] == text.replace("$", "$$")
    for text, file in texts("compose", "command"):
        assert services(file)["recipes"]["command"][-1] == text.replace("$", "$$")
    for text, file in texts("dockerfile", "env"):
        quoted = file.partition("ENV A=")[2].partition("\nENV")[0]  # Docker knows \\, \" and \$ in double quotes
        assert re.sub(r'\\([\\"$])', r"\1", quoted[1:-1]) == text and not re.search(r'[^\\](\\\\)*["$]', quoted[1:-1])
    for text, file in texts("dockerfile", "command"):
        assert json.loads(file.rpartition("\nCMD ")[2])[-1] == text


def test_a_container_has_its_folders_from_the_host_and_starts_again_a_few_times():
    folders = {"data": ["data", "/mnt/images", "../shared"], "outputs": ["checkpoints"]}
    launch = made(SERVICE | folders, checkpoint_seconds=90)
    service = services(launch.render("compose"))["recipes"]
    assert service["volumes"] == [
        "./runs:/app/runs",
        "./checkpoints:/app/checkpoints",
        "./data:/app/data:ro",
        "/mnt/images:/mnt/images:ro",
        "./../shared:/shared:ro",
    ]
    assert service["environment"]["MEMFIT_RUNS_DIR"] == "/app/runs"
    assert service["restart"] == "on-failure:5" and service["stop_grace_period"] == "100s"
    assert {"data", "checkpoints", "runs"} <= {*launch.render("dockerignore").split()}


@pytest.mark.parametrize(
    "own", [["memfit", "run", "c.yaml"], ["/venv/bin/memfit", "tune", "c.yaml"], ["python", "-m", "memfit"]]
)
def test_a_command_of_memfit_runs_as_it_is_and_another_under_memfit(own):
    config = SERVICE | {"checkpoint_seconds": 90}
    assert json.loads(made(config, command=own).render("dockerfile").rpartition("CMD ")[2]) == own
    assert f"sh -c 'exec {shlex.join(own)}'" in made(config, command=own).render("sbatch")
    head = ["memfit", "run", "--grace", "90", "--name", "recipes", "--"]
    found = json.loads(made(config, ranks_per_node=2).render("dockerfile").rpartition("CMD ")[2])
    assert found == [*head, "torchrun", "--standalone", "--nproc-per-node=2", "train.py"]
    assert "memfit run --retries 0 --grace 90 --name recipes-" in made(config).render("sbatch")


def test_a_size_and_a_command_may_be_written_plainly():
    plain = LaunchConfig.model_validate(NODES | {"memory": "4GiB", "command": "python train.py --note 'a b'"})
    assert plain.memory.rank == 4 * GIB and plain.command == ["python", "train.py", "--note", "a b"]
    with pytest.raises(ValidationError, match=r"give a list of words, such as \[sh, -c, 'a && b'\]"):
        made(command="python a.py && python b.py")


def test_a_container_needs_the_memory_of_memfit_too():
    launch = Launch.of(LaunchConfig.model_validate(SERVICE | {"memory": "100MiB", "batch_bytes": 0}), form="compose")
    assert "112.0 MiB for memfit" in launch.memory_why and launch.memory_bytes == 256 * MIB


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
@pytest.mark.skipif(shutil.which("podman") is None, reason="needs podman")
def test_podman_compose_reads_the_file_and_asks_for_the_secrets(tmp_path):
    (tmp_path / "compose.yaml").write_text(
        Launch.of(LaunchConfig.model_validate(SERVICE), form="compose").render("compose")
    )

    def config(**env):
        command = [sys.executable, "-m", "podman_compose", "-f", "compose.yaml", "config"]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | env)

    service = services(config(API_KEY="a").stdout)["recipes"]
    assert (service["mem_limit"], service["shm_size"]) == ("36g", "3g")
    assert (service["restart"], len(service["volumes"])) == ("on-failure:5", 1)
    refused = config()
    assert refused.returncode and "API_KEY is missing a value" in refused.stderr


@pytest.mark.slow
@pytest.mark.container
def test_in_a_real_container_the_limits_of_the_file_hold_and_memfit_sees_them(tmp_path):
    code = "import json; from memfit.memory import Budget; print(json.dumps(Budget.read().to_dict()))"
    small = {"memory": {"rank": "200MiB"}, "gpus_per_node": 0, "secrets": [], "batch_bytes": "16MiB"}
    launch = made(SERVICE | small)
    (tmp_path / "compose.yaml").write_text(launch.render("compose"))
    try:
        with podman(Path(tempfile.mkdtemp(dir=tmp_path))) as run:
            more = {"image": run.image, "network_mode": "none", "volumes": run.mounts, "environment": [run.python_path]}
            more["command"] = [sys.executable, "-c", code]
            (tmp_path / "here.yaml").write_text(json.dumps({"services": {"recipes": more}}))
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
def test_a_container_that_was_stopped_starts_again_and_goes_on_from_its_folders(tmp_path):
    (tmp_path / "job.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "state = pathlib.Path('saved/state')\n"
        "if state.exists():\n"
        "    state.write_text('went on with ' + pathlib.Path('given/data').read_text())\n"
        "    sys.exit(3)\n"  # an error: it is started again, but not for ever
        "signal.signal(signal.SIGTERM, lambda *_: (state.write_text('saved'), sys.exit(75)))\n"
        "os.kill(1, signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    for name in ("given", "saved", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "given/data").write_text("data")
    config = {"name": "recipes", "command": f"{sys.executable} job.py", "memory": "200MiB"}
    launch = Launch.of(LaunchConfig.model_validate(config | {"data": ["given"], "outputs": ["saved"]}), form="compose")
    (tmp_path / "compose.yaml").write_text(launch.render("compose"))
    try:
        with podman(Path(tempfile.mkdtemp(dir=tmp_path))) as run:
            mounts = [*run.mounts, f"{tmp_path}/job.py:/app/job.py:ro"]
            env = [run.python_path, f"PATH={Path(sys.executable).parent}:/bin"]
            more = {"image": run.image, "network_mode": "none", "volumes": mounts, "environment": env}
            more["working_dir"] = "/app"
            (tmp_path / "here.yaml").write_text(json.dumps({"services": {"recipes": more}}))
            words = [
                sys.executable,
                "-m",
                "podman_compose",
                "-p",
                tmp_path.name,
                "-f",
                "compose.yaml",
                "-f",
                "here.yaml",
            ]
            here = {"cwd": tmp_path, "env": run.env, "capture_output": True, "text": True}
            subprocess.run([*words, "up", "-d"], **here, check=True)
            try:
                told = wait_for_restarts(f"{tmp_path.name}_recipes_1", here)
            finally:
                subprocess.run([*words, "down"], **here, check=True)
    except NoContainersError as reason:
        pytest.skip(str(reason))
    assert told == "5 exited 3"
    assert (tmp_path / "saved/state").read_text() == "went on with data"
    (outcome,) = (tmp_path / "runs").glob("recipes/run_*/outcome.json")  # one run, continued by each start
    assert json.loads(outcome.read_text())["state"] == "failed"


def wait_for_restarts(name, here):
    """How often a container was started again, its state and its exit code, once it is started no more."""
    end, words = time.monotonic() + 60, "{{.RestartCount}} {{.State.Status}} {{.State.ExitCode}}"
    while time.monotonic() < end:
        told = subprocess.run(["podman", "inspect", name, "--format", words], **here).stdout.strip()
        if told.startswith("5 exited"):
            break
        time.sleep(0.2)
    return told


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
            text = re.sub(r"RUN .*\n", "", launch.render("dockerfile"))  # the image has no programs
            (folder / "Dockerfile").write_text(text)
            without = layers(run, "memfit-test-without")
            (folder / ".dockerignore").write_text(launch.render("dockerignore"))
            image = layers(run, "memfit-test-with")
    except NoContainersError as reason:
        pytest.skip(str(reason))
    assert without.count(key.encode()) == 3
    assert key.encode() not in image and b"print(1)" in image
