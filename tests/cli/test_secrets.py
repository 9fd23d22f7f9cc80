"""Secrets in arguments and variables: no file that others may read holds them, no line shows them, and jobs get them."""

import json
import stat
import sys

import pytest

from jobs.contract import submit, wait_until
from memfit.jobs import Job, LocalBackend
from memfit.masking import mask, mask_line
from memfit.memory import Footprint
from memfit.rundir import RunDir

pytestmark = pytest.mark.slow

SECRETS = ("s3cret-a", "s3cret-b", "s3cret-c", "s3cret-d", "s3cret-e", "s3cret-f")
#: Leaves its arguments outside of the run's folder, and fails until the file "go" is there.
JOB = """
import os, sys
with open(f"seen_{os.environ['MEMFIT_JOB_ID']}", "a") as file:
    print(*sys.argv[1:], file=file)
sys.exit(not os.path.exists("go"))
"""


def readable_by_others(folder):
    for path in folder.rglob("*"):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            yield path


def leaks(folder):
    return {
        (str(path.relative_to(folder)), secret)
        for path in readable_by_others(folder)
        for secret in SECRETS
        if secret.encode() in path.read_bytes()
    }


def test_secrets_of_a_sweep_reach_the_jobs_alone_and_a_resumed_run_has_them_still(memfit, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    words = ["--param", "api_key=s3cret-a,s3cret-b", "--param", "t=s3cret-c", "--name", "sweep"]
    command = ["python", "job.py", "{api_key}", "--hub-token", "{t}", "--password=s3cret-d", "--lr=0.1"]
    command += ["https://me:s3cret-e@host/", "sh -c 'HF_TOKEN=s3cret-f run'"]  # pragma: allowlist secret
    first = memfit("run", *words, "--", *command)
    assert first.exit_code == 4
    [run] = RunDir.all(tmp_path / "runs", "sweep")
    listed = [memfit("ps", "--all"), memfit("ps", "--all", "--json"), memfit("watch", run.path)]
    (tmp_path / "go").touch()
    resumed = memfit("resume", run.path)
    assert resumed.exit_code == 0, resumed.err
    for number, key in ((1, "s3cret-a"), (2, "s3cret-b")):
        line = f"{key} --hub-token s3cret-c --password=s3cret-d --lr=0.1 https://me:s3cret-e@host/ "  # pragma: allowlist secret
        line += "sh -c 'HF_TOKEN=s3cret-f run'\n"
        assert (tmp_path / f"seen_cmd_000{number}").read_text() == 2 * line
    assert leaks(tmp_path / "runs") == set()
    told = "".join(one.out + one.err for one in (first, *listed, resumed))
    assert [secret for secret in SECRETS if secret in told] == []
    assert "cmd_0001 api_key=*** t=***" in told
    assert json.loads((run.path / "run.json").read_text())["template"][2:7] == [
        "{api_key}", "--hub-token", "***", "--password=***", "--lr=0.1",
    ]  # fmt: skip


def test_the_same_command_given_again_goes_on_with_its_run(memfit, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    words = ["run", "--name", "one", "--", "python", "job.py", "--token", "s3cret-a"]
    assert memfit(*words).exit_code == 1
    (tmp_path / "go").touch()
    assert memfit(*words).exit_code == 0
    assert len(RunDir.all(tmp_path / "runs", "one")) == 1
    assert (tmp_path / "seen_cmd_0001").read_text() == 2 * "--token s3cret-a\n"


def test_a_run_whose_secrets_are_gone_is_not_resumed_with_asterisks(memfit, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    assert memfit("run", "--name", "one", "--", "python", "job.py", "--token", "s3cret-a").exit_code == 1
    [run] = RunDir.all(tmp_path / "runs", "one")
    (run.path / "run.private.json").unlink()
    done = memfit("resume", run.path)
    assert done.exit_code == 2
    assert "run.private.json is not there" in done.err
    assert "***" not in (tmp_path / "seen_cmd_0001").read_text()


def test_a_job_without_secrets_has_no_private_file(memfit, tmp_path):
    assert memfit("run", "--name", "one", "--", "echo", "--max-tokens", "512").exit_code == 0
    assert list((tmp_path / "runs").rglob("*private*")) == []


def test_a_functions_arguments_and_a_jobs_variables_are_masked_too(tmp_path):
    run = RunDir.create(tmp_path / "runs", "bare", "0" * 64)
    backend = LocalBackend(run)
    arguments = {"args": ["sh", "-c", "sleep 1; echo $HF_TOKEN > $1", "sh", str(tmp_path / "seen")]}
    submit(backend,
        Job("call", target="subprocess:check_call", arguments=arguments | {"env": {"HF_TOKEN": "s3cret-a"}},
            env={"DB_PASSWORD": "s3cret-b"}, footprint=Footprint.declared("64MiB"))
    )  # fmt: skip
    wait_until(lambda: backend.poll()["call"].ended is not None)
    backend.close()
    assert (tmp_path / "seen").read_text() == "s3cret-a\n"
    assert leaks(tmp_path / "runs") == set()


@pytest.mark.parametrize(
    "text",
    ["--tokens=5", "--token-budget 5", "tokenizer=bert", "--lr 0.1", "--keys=a", "--password-file=/a", "a=b", "key=5"],
)
def test_what_only_resembles_a_secret_is_shown(text):
    assert mask([text, *text.split()]) == [text, *text.split()]


@pytest.mark.parametrize(
    "text",
    ["--token={}", "TOKEN={}", "--wandb_api_key={}", "params.hub-token={}", "hubToken: {}", "AWS_SECRET_ACCESS_KEY={}",
     '{{"password": "{}"}}', "Authorization: Bearer {}", "postgres://me:{}@host/db", "--secret '{}'"],
)  # fmt: skip
def test_a_secret_is_known_by_its_name_or_its_form(text):
    masked = mask(text.format("s3cret"))
    assert "s3cret" not in masked
    assert "***" in masked
    for known in ("hf_" + "a" * 30, "ghp_" + "a" * 36, "sk-" + "a" * 40, "AKIA" + "A" * 16):
        assert mask(f"x {known}") == "x ***"


def test_the_config_and_the_jobs_of_folds_are_for_their_user_where_they_hold_a_secret(memfit, config, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nimport tiny\n"
        "class Params(tiny.TinyParams):\n    hub_token: str = ''\n\n"
        "MINE = replace(tiny.TINY, params=Params)\n"
    )
    words = ["--set", "target=mine:MINE", "--set", "params.hub_token=s3cret-a"]
    done = memfit("run", config(), *words)
    assert done.exit_code == 0, done.err
    assert leaks(tmp_path / "runs") == set()
    [run] = RunDir.all(tmp_path / "runs", "tiny")
    assert memfit("resume", run.path).exit_code == 0


def test_what_a_job_repeats_of_its_secrets_and_a_part_of_a_secret_stand_nowhere(memfit, tmp_path):
    (tmp_path / "job.py").write_text("import sys\nsys.exit(f'unknown argument {sys.argv[1]}')\n")
    done = memfit("run", "--param", "t=s3cret-a", "--name", "sweep", "--", "python", "job.py", "--token=pre{t}")
    assert done.exit_code == 4
    [run] = RunDir.all(tmp_path / "runs", "sweep")
    diagnosed = memfit("diagnose", run.path / "jobs" / "cmd_0001" / "outcome.json")
    assert "s3cret-a" not in done.out + done.err + diagnosed.out
    assert "s3cret-a" in (run.path / "jobs" / "cmd_0001" / "err.log").read_text()
    assert leaks(tmp_path / "runs") == set()


def test_a_folder_with_the_name_of_a_secret_is_found_again(memfit, tmp_path, monkeypatch):
    folder = tmp_path / "s3cret-a"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "job.py").write_text(JOB)
    assert memfit("run", "--name", "one", "--", "python", "job.py", "--token=s3cret-a").exit_code == 1
    [run] = RunDir.all(folder / "runs", "one")
    (folder / "go").touch()
    assert memfit("resume", run.path).exit_code == 0


@pytest.mark.parametrize(
    "word",
    ["PGPASSWORD=abc", "--mytoken=abc", "MYSQL_PWD=abc", "--api-keys=abc", "AccountKey=abc", "https://me:a@abc@host/",
     "Authorization: Basic abc"],
)  # fmt: skip
def test_common_names_and_forms_of_secrets_are_masked(word):
    assert "abc" not in mask([word])[0]


@pytest.mark.parametrize("word", ["--max-tokens=512", "--tokenizer=t5", "--passes=2", "--keys=3", "PWD=/home/me"])
def test_what_only_sounds_like_a_secret_is_shown(word):
    assert mask([word]) == [word]


#: A key without a form of its own, an address under a telling name, and a value that JSON and a log write differently.
VARIABLES = {
    "WANDB_API_KEY": "0f1e" * 10,
    "TEAM_WEBHOOK": "https://chat.example/in/s3cret-hook",
    "SITE_PASSWORD": 's3cret "with" quotes',
}
TELLING_JOB = """
import os, sys
from memfit.rundir import record
said = " ".join(os.environ[name] for name in ("WANDB_API_KEY", "TEAM_WEBHOOK", "SITE_PASSWORD"))
record("oom", text=said, more={"deep": [said]})
print(said)
sys.exit(f"wandb: 401 for {said} {'x' * 100}")
"""


def found_values(text):
    return [name for name, value in VARIABLES.items() if value in text or json.dumps(value)[1:-1] in text]


def test_what_a_job_says_of_its_variables_stands_in_its_own_logs_alone(memfit, tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(TELLING_JOB)
    (tmp_path / "log").write_text(f"Traceback:\nRuntimeError: wandb: key {VARIABLES['WANDB_API_KEY']}\n")
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    told = [
        memfit("run", "--param", f"n={n}", "--name", "telling", "--", sys.executable, "job.py", "{n}") for n in (1, 2)
    ]
    assert [one.exit_code for one in told] == [4, 4]
    second, first = (run.path for run in RunDir.all(tmp_path / "runs", "telling"))
    told.append(memfit("report", first))
    told.append(memfit("diagnose", first, "--verbose", "--report", first / "incident.md"))
    told += [memfit("report", second), memfit("ps", "--all", "--json"), memfit("watch", first), memfit("watch", second)]
    told += [memfit("compare", first, second), memfit("diagnose", second, "--json")]
    assert "failed: exit code 1: wandb: 401 for *** *** ***" in told[0].out
    assert found_values("".join(one.out + one.err for one in told)) == []
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    logs = [path for path in files if found_values(path.read_text(errors="replace"))]
    assert {path.name for path in logs} == {"out.log", "err.log"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in logs} == {0o600}
    assert "***" in (first / "incident.md").read_text() and (second / "report.html").exists()
    for name in VARIABLES:
        monkeypatch.delenv(name)
    later = [memfit("diagnose", first, "--json").out, memfit("diagnose", tmp_path / "log").out]
    assert [VARIABLES["WANDB_API_KEY"] in text for text in later] == [False, False]  # by the name before it


def test_a_functions_error_has_no_value_of_a_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("SITE_PASSWORD", "s3cret-a")
    run = RunDir.create(tmp_path / "runs", "bare", "0" * 64)
    backend = LocalBackend(run)
    submit(
        backend,
        Job("call", target="os:listdir", arguments={"path": "/no/s3cret-a"}, footprint=Footprint.declared("64MiB")),
    )
    wait_until(lambda: backend.poll()["call"].ended is not None)
    cause = backend.poll()["call"].cause
    backend.close()
    assert "No such file or directory: '/no/***'" in cause
    assert {name for name, _ in leaks(tmp_path / "runs")} == set()


def test_what_memfit_itself_says_shows_no_token(memfit):
    done = memfit("diagnose", "logs-of-hf_" + "a" * 34)
    assert done.exit_code == 2
    assert "path 'logs-of-***' does not exist" in done.err


@pytest.mark.parametrize(
    ("kept", "secret"),
    [
        ("https://discord.com/api/webhooks/", "1234567890/aB3d-E5fG7hI9"),
        ("https://discordapp.com/api/v10/webhooks/", "1234567890/aB3d-E5fG7hI9"),
        ("https://hooks.slack.com/services/", "T00/B00/xyz"),
        ("GET /b/k?X-Amz-Signature=", "0123abcdef"),
        ("", "AIza" + "b" * 35),
        ("wandb: error 401 for key ", "0f1e" * 10),
        ("", "wandb_v1_" + "k" * 40),
        ("pip install git+https://me:", "p@ss"),
        ("Authorization: Basic ", "bWU6cGFzcw=="),
        ("", "ghp_" + "a" * 36),
        ("", "ASIA" + "A" * 16),
    ],
)
def test_known_forms_are_masked_in_texts_and_what_is_around_them_stays(kept, secret):
    around = f"step 3 {kept}{secret}{'@host' if 'git+' in kept else ''}"
    assert mask(around) == around.replace(secret, "***")
    line = json.dumps({"text": around, "step": 3}, separators=(",", ":"))
    assert json.loads(mask_line(line)) == {"text": around.replace(secret, "***"), "step": 3}
    assert json.loads(mask(line, by_name=False))["text"] == around.replace(secret, "***")


def test_the_other_half_of_a_pair_of_amazons_is_masked_too():
    pair = ["--id", "AKIA" + "Q7XJ2MZL4TPWNRVB", "--with", "kZ8mQx2vLp/sRtYw5uJn7bHc3dFg9eAi1oKqXyZw"]
    assert mask(pair) == ["--id", "***", "--with", "***"]
    assert mask(pair[2:]) == pair[2:]  # forty letters alone may be a commit


@pytest.mark.parametrize(
    "text",
    ["tokenizer.pad_token = </s>", "--eos-token x", "Basic blocks: 12 internationalization", "loss_per_token: 0.5",
     "0f1e" * 10, "task-specific-weights-of-layer", "hf_transformers_version_check_of_it", "http://host:8080/path"],
)  # fmt: skip
def test_texts_of_trainings_stay_as_they_are(text):
    assert mask(text) == text


def test_a_line_without_a_secret_is_not_taken_apart():
    line = json.dumps({"kind": "step", "tokens": 512, "tokens_per_second": 3.5, "text": "fold_1 epoch 3: loss 0.5"})
    assert mask_line(line) is line
    assert json.loads(mask_line('{"api_key": "abc", "last_token": 5, "seed_token": 7}')) == {
        "api_key": "***", "last_token": 5, "seed_token": 7,
    }  # fmt: skip


def test_a_path_under_the_name_of_a_secret_is_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    monkeypatch.setenv("LONG_TOKEN", "x9" * 4000)  # longer than a name of a file
    assert mask(f"reads {tmp_path}/key.json {'x9' * 4000}") == f"reads {tmp_path}/key.json ***"


def test_a_diagnosis_leaves_out_what_detect_secrets_finds(memfit, tmp_path):
    pytest.importorskip("detect_secrets")
    key = "sk_" + "live_" + "a1B2" * 6
    (tmp_path / "log").write_text(f"Traceback (most recent call last):\nRuntimeError: refused {key}\n")
    done = memfit("diagnose", tmp_path / "log", "--verbose", "--report", tmp_path / "incident.md")
    assert "RuntimeError: refused ***" in done.out and key not in done.out + (tmp_path / "incident.md").read_text()
