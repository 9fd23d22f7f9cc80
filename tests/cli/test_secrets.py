"""Secrets in arguments and variables: no file that others may read holds them, no line shows them, and jobs get them."""

import json
import shlex
import stat
import sys

import pytest

from cli.conftest import check_refused
from jobs.contract import submit, wait_until
from memfit.jobs import Job, LocalBackend
from memfit.memory import Footprint
from memfit.rundir import RunDir

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


@pytest.mark.core
def test_secrets_of_a_sweep_reach_the_jobs_alone_and_a_resumed_run_has_them_still(memfit, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    words = ["--param", "api_key=s3cret-a,s3cret-b", "--param", "t=s3cret-c", "--name", "sweep"]
    command = ["python", "job.py", "{api_key}", "--hub-token", "{t}", "--password=s3cret-d", "--lr=0.1"]
    command += ["https://me:s3cret-e@host/", "sh -c 'HF_TOKEN=s3cret-f run'"]
    first = memfit("run", *words, "--", *command)
    assert first.exit_code == 4
    [run] = RunDir.all(tmp_path / "runs", "sweep")
    listed = [memfit("ps", "--all"), memfit("ps", "--all", "--json"), memfit("watch", run.path)]
    (tmp_path / "go").touch()
    resumed = memfit("resume", run.path)
    assert resumed.exit_code == 0, resumed.err
    for number, key in ((1, "s3cret-a"), (2, "s3cret-b")):
        line = f"{key} --hub-token s3cret-c --password=s3cret-d --lr=0.1 https://me:s3cret-e@host/ "
        line += "sh -c 'HF_TOKEN=s3cret-f run'\n"
        assert (tmp_path / f"seen_cmd_000{number}").read_text() == 2 * line
    assert leaks(tmp_path / "runs") == set()
    told = "".join(one.out + one.err for one in (first, *listed, resumed))
    assert [secret for secret in SECRETS if secret in told] == []
    assert "cmd_0001 api_key=*** t=***" in told
    assert json.loads((run.path / "run.json").read_text())["template"][2:7] == [
        "{api_key}", "--hub-token", "***", "--password=***", "--lr=0.1",
    ]  # fmt: skip


#: Secrets that end with their word or are known by their form, given in a config as a line for the shell and as words.
TAILS = ["--password=correct s3cret-a", "--key", "s3cret-b", "--env=MY_PASSWORD=s3cret-c", "--token=a's3cret-d", "a&b"]
TAILS += ["--sas-token=sv=1&sig=s3cret-e", "https://a.blob.core.windows.net/c?sv=1&sig=s3cret-f"]
REPEATING = """
import sys
from memfit.rundir import record
record("oom", text=" ".join(sys.argv[1:]))
sys.exit("bad arguments: " + " ".join(sys.argv[1:]))
"""


@pytest.mark.slow
def test_no_file_and_no_line_has_the_tail_of_a_secret_that_a_job_repeats(memfit, tmp_path):
    (tmp_path / "job.py").write_text(REPEATING)
    words = ["python", "job.py", *TAILS]
    stages = {"line": {"run": shlex.join(words)}, "words": {"run": words}}
    (tmp_path / "config.yaml").write_text(json.dumps({"experiment": "tails", "stages": stages}))
    told = [memfit("run", "config.yaml"), memfit("run", "--name", "sweep", "--param", "n=1", "--", *words, "{n}")]
    assert [one.exit_code for one in told] == [4, 4]
    plan = ["run", "--name", "sweep", "--param", "n=1", "--plan", "--no-steps"]
    told += [memfit(*plan, "--", *words, "{n}"), memfit(*plan, "--json", "--out", "plan.json", "--", *words, "{n}")]
    for name in ("tails", "sweep"):
        told += [memfit("report", name), memfit("watch", name), memfit("diagnose", f"runs/{name}", "--verbose")]
        told.append(memfit("resume", name))
    told += [memfit("ps", "--all"), memfit("ps", "--all", "--json")]
    (tmp_path / "config.yaml").unlink()
    assert leaks(tmp_path) == set()
    modes = {run.path.parent.name: (run.path / "config.yaml").stat().st_mode & 0o077 for run in
             (RunDir.all(tmp_path / "runs", "tails")[0], RunDir.all(tmp_path / "runs", "sweep")[0])}  # fmt: skip
    assert modes["tails"] == 0 and modes["sweep"]  # a command's words are masked there
    text = "".join(one.out + one.err for one in told)
    assert [secret for secret in SECRETS if secret in text] == [] and "--password=***" in told[2].out


@pytest.mark.slow
def test_the_same_command_given_again_goes_on_with_its_run(memfit, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    words = ["run", "--name", "one", "--", "python", "job.py", "--token", "s3cret-a"]
    assert memfit(*words).exit_code == 1
    (tmp_path / "go").touch()
    assert memfit(*words).exit_code == 0
    assert len(RunDir.all(tmp_path / "runs", "one")) == 1
    assert (tmp_path / "seen_cmd_0001").read_text() == 2 * "--token s3cret-a\n"


def test_secrets_lie_in_one_file_that_is_for_its_owner_alone_and_readers_see_it_masked(memfit, tmp_path):
    for name, words in (("with", ["--token", "s3cret-a"]), ("without", ["--max-tokens", "512"])):
        assert memfit("run", "--name", name, "--", "echo", *words).exit_code == 0
        [run] = RunDir.all(tmp_path / "runs", name)
        files = [run.path / "run.json", run.path / "jobs" / "cmd_0001" / "job.json"]
        assert [path.stat().st_mode & 0o077 != 0 for path in files] == [name == "without"] * 2
        assert ["secrets" in json.loads(path.read_text()) for path in files] == [name == "with"] * 2
        shown = words if name == "without" else ["--token", "***"]
        assert run.header["template"] == ["echo", *shown] and "secrets" not in run.header
        assert list(run.path.rglob("*private*")) == []


@pytest.mark.slow
@pytest.mark.proves("S4-23")
def test_a_functions_arguments_its_error_and_a_jobs_variables_are_masked_too(tmp_path, monkeypatch):
    monkeypatch.setenv("SITE_PASSWORD", "s3cret-c")
    run = RunDir.create(tmp_path / "runs", "bare", "0" * 64)
    backend = LocalBackend(run)
    arguments = {"args": ["sh", "-c", "sleep 1; echo $HF_TOKEN > $1", "sh", str(tmp_path / "seen")]}
    submit(backend,
        Job("call", target="subprocess:check_call", arguments=arguments | {"env": {"HF_TOKEN": "s3cret-a"}},
            env={"DB_PASSWORD": "s3cret-b"}, footprint=Footprint.declared("64MiB"))
    )  # fmt: skip
    error = Job("list", target="os:listdir", arguments={"path": "/no/s3cret-c"}, footprint=Footprint.declared("64MiB"))
    submit(backend, error)
    wait_until(lambda: all(backend.poll()[name].ended is not None for name in ("call", "list")))
    assert "No such file or directory: '/no/***'" in backend.poll()["list"].cause
    backend.close()
    assert (tmp_path / "seen").read_text() == "s3cret-a\n"
    assert leaks(tmp_path / "runs") == set()


@pytest.mark.slow
def test_the_config_and_the_jobs_of_a_function_are_for_their_user_where_they_hold_a_secret(memfit, tmp_path):
    (tmp_path / "mine.py").write_text("def train(ctx, hub_token: str = ''):\n    return {'fold': ctx.unit['fold']}\n")
    words = ["--param", "fold=1..2", "--set", "params.hub_token=s3cret-a"]
    done = memfit("run", "mine:train", *words)
    assert done.exit_code == 0, done.err
    assert leaks(tmp_path / "runs") == set()
    [run] = RunDir.all(tmp_path / "runs", "train")
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


@pytest.mark.slow
def test_a_folder_with_the_name_of_a_secret_is_found_again(memfit, tmp_path, monkeypatch):
    folder = tmp_path / "s3cret-a"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "job.py").write_text(JOB)
    assert memfit("run", "--name", "one", "--", "python", "job.py", "--token=s3cret-a").exit_code == 1
    [run] = RunDir.all(folder / "runs", "one")
    (folder / "go").touch()
    assert memfit("resume", run.path).exit_code == 0


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


@pytest.mark.slow
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


def test_a_diagnosis_has_no_secret_and_all_of_its_words(memfit, tmp_path):
    check_refused(memfit("diagnose", "logs-of-hf_" + "a" * 34), "path 'logs-of-***' does not exist")
    key = "sk_" + "live_" + "a1B2" * 6
    (tmp_path / "log").write_text(f"Traceback (most recent call last):\nRuntimeError: refused {key}\n")
    done = memfit("diagnose", tmp_path / "log", "--verbose", "--report", tmp_path / "incident.md")
    assert "RuntimeError: refused ***" in done.out and key not in done.out + (tmp_path / "incident.md").read_text()
    metal = "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"  # no token of Telegram's
    (tmp_path / "log").write_text(f"Traceback (most recent call last):\nRuntimeError: {metal}\n")
    assert metal in memfit("diagnose", tmp_path / "log", "--verbose", "--report", tmp_path / "incident.md").out
    assert metal in (tmp_path / "incident.md").read_text()
