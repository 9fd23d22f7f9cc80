"""``memfit diagnose`` as a command."""

import io
import json
import os
import stat

import pytest

from cli.conftest import check_refused

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks=16
#SBATCH --ntasks-per-node=4
#SBATCH --mem=256G
#SBATCH --time=24:00:00
srun python train.py dataloader.params.batch_size=22 dataloader.params.num_workers=2 trainer.params.max_epochs=40
"""
SACCT = """\
JobID|JobName|Partition|State|ExitCode|ReqMem|MaxRSS|AveRSS|NTasks|NNodes|Elapsed|Timelimit
273202|planner|l40s|OUT_OF_MEMORY|0:125|1T||||4|00:23:10|1-00:00:00
273202.0|python||OUT_OF_MEMORY|0:125||72.5G|71.4G|16|4|00:23:00|
"""
LOG = """\
Number of training samples: 85109
Epoch 0: 100%|##########| 242/242 [22:54<00:00,  0.21it/s, loss=5.19]
slurmstepd: error: Detected 4 oom_kill events in StepId=273202.0. Some of the step tasks have been OOM Killed.
"""
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of "
    "which 1.00 GiB is free. Including non-PyTorch memory, this process has 22.60 GiB memory in use. Of the allocated "
    "memory 22.00 GiB is allocated by PyTorch, and 128.00 MiB is reserved by PyTorch but unallocated.\n"
)


@pytest.fixture
def job(tmp_path):
    """The files of a dead job, in the folder that commands run in."""
    for name, text in (("train.slurm", SCRIPT), ("sacct.txt", SACCT), ("train.err", LOG)):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_it_says_what_happened_with_the_lines_that_prove_it_and_the_remedies(memfit, job):
    done = memfit("diagnose", "train.err", "--sacct", "sacct.txt", "--script", "train.slurm")
    assert done.exit_code == 0
    assert done.out.startswith("killed at a limit of host memory (proved)\n")
    assert "sacct:2" in done.out or "train.err:3" in done.out
    assert "1. request 334G per node: --mem=334G" in done.out
    done = memfit("diagnose", "train.err", "--sacct", "sacct.txt", "--script", "train.slurm", "--verbose")
    assert "1. request 334G per node (costs none, saves 78.00 GiB, enough by itself)" in done.out
    assert done.out.index("would change nothing here") > done.out.index("1. request")
    assert not (job / "train.fixed.slurm").exists()


def test_json_has_the_keys_that_other_programs_read_and_nothing_else_is_printed(memfit, job):
    done = memfit("diagnose", "train.err", "--sacct", "sacct.txt", "--json")
    found = json.loads(done.out)
    keys = {"oom", "recovered", "kind", "cause", "phase", "confidence", "device_total_gib", "allocated_gib",
            "reserved_gib", "tried_gib", "evidence", "remedies"}  # fmt: skip
    assert keys <= set(found)
    assert (found["oom"], found["kind"], done.exit_code) == (True, "host_cgroup", 0)
    assert set(found["evidence"][0]) == {"file", "line", "text"}
    assert found["remedies"][0]["setting"] == "--mem=334G"


def test_fix_writes_a_corrected_script_beside_the_old_one_and_shows_the_diff(memfit, job):
    done = memfit("diagnose", "train.err", "--sacct", "sacct.txt", "--script", "train.slurm", "--fix")
    assert "#SBATCH --mem=334G" in (job / "train.fixed.slurm").read_text()
    assert (job / "train.slurm").read_text() == SCRIPT
    assert "-#SBATCH --mem=256G" in done.out and "+#SBATCH --mem=334G" in done.out
    assert "line 5: 4 x 72.5 GiB" in done.out


def test_fix_that_changes_nothing_writes_nothing(memfit, job):
    (job / "own.err").write_text('Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: x\n')
    done = memfit("diagnose", "own.err", "--script", "train.slurm", "--fix")
    assert "no file was written" in done.out and not (job / "train.fixed.slurm").exists()


@pytest.mark.proves("S3-42")
def test_report_writes_the_incident(memfit, job):
    memfit("diagnose", "train.err", "--sacct", "sacct.txt", "--script", "train.slurm", "--report", "incident.md")
    text = (job / "incident.md").read_text()
    assert text.startswith("# Incident: killed at a limit of host memory")
    assert "4 x 72.5 GiB (MaxRSS of a task) = 290.00 GiB of each node" in text


def test_verify_says_that_the_fixed_script_was_not_in_force(memfit, job):
    fixed = SCRIPT.replace("batch_size=22", "batch_size=20").replace("--mem=256G", "--mem=400G")
    (job / "train.fixed.slurm").write_text(fixed)
    done = memfit("diagnose", "--verify", "train.err", "--against", "train.fixed.slurm", "--sacct", "sacct.txt")
    assert done.exit_code == 4
    assert (
        "242 steps an epoch, 85,109 samples on 16 devices: a batch of 22" in done.out
        and "256.00 GiB of each node in force" in done.out
    )
    found = json.loads(memfit("diagnose", "--verify", "train.err", "--against", "train.fixed.slurm", "--json").out)
    assert {one["check"]: one["verdict"] for one in found}["batch"] == "problem"


def test_verify_gives_5_when_nothing_shows_any_setting(memfit, job):
    (job / "quiet.log").write_text("hello\n")
    done = memfit("diagnose", "--verify", "quiet.log", "--against", "train.slurm")
    assert done.exit_code == 5
    assert "nothing that was read shows any of these settings\nin force: 0, not in force: 0" in done.out
    shown = memfit("diagnose", "--verify", "train.err", "--against", "train.slurm", "--sacct", "sacct.txt")
    assert shown.exit_code == 0 and "nothing that was read shows any" not in shown.out


def test_of_a_folder_of_runs_the_newest_is_read_and_named(memfit, job):
    for name, cause in (("run_20260101_000000_0000000a", "first"), ("run_20260102_000000_0000000b", "second")):
        folder = job / "runs" / "tiny" / name
        (folder / "jobs" / "fold_0").mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        ended = {"state": "failed", "cause": f"ValueError: {cause}", "exit_code": 1}
        (folder / "jobs" / "fold_0" / "outcome.json").write_text(json.dumps(ended))
    done = memfit("diagnose", "runs/tiny")
    assert "runs/tiny: the newest run of 2, run_20260102_000000_0000000b" in done.err
    assert "ValueError: second" in done.out and "ValueError: first" not in done.out


def test_nothing_known_gives_5_and_says_so(memfit, job):
    (job / "quiet.log").write_text("step 1\nstep 2\n")
    done = memfit("diagnose", "quiet.log")
    assert done.exit_code == 5 and done.out.startswith("unknown: no line proves a cause")


def test_a_device_that_was_full_has_its_figures_and_no_advice_on_host_memory(memfit, job):
    (job / "gpu.err").write_text(FULL)
    found = json.loads(memfit("diagnose", "gpu.err", "--json").out)
    assert (found["kind"], found["tried_gib"], found["allocated_gib"]) == ("gpu", 2.0, 22.0)
    assert not any(one["helps"] for one in found["remedies"] if "--mem" in one["title"] + one["setting"])


def test_a_log_comes_from_standard_input(memfit, job, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(FULL.encode())))
    done = memfit("diagnose", "-", "--json")
    assert done.exit_code == 0 and json.loads(done.out)["kind"] == "gpu"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["nowhere.log"], "path 'nowhere.log' does not exist"),
        ([], "nothing to diagnose"),
        (["train.err", "--fix"], "no file to correct"),
        (["--verify", "train.err"], "go together"),
        (["train.err", "--sacct", "no-such-file"], "neither a file nor a job's number"),
        (["train.err", "--script", "nosuch"], "value for '--script': "),
        (["train.err", "--report", "nowhere/x.md"], "--report nowhere/x.md cannot be written: No such file"),
        (["train.err", "--report", "/proc/x.md"], "--report /proc/x.md cannot be written: No such file"),
    ],
)
def test_bad_input_is_an_error_of_three_parts(memfit, job, words, what):
    check_refused(memfit("diagnose", *words), what)


def test_a_run_is_named_by_its_experiment(memfit, tmp_path):
    memfit("run", "--name", "leak", "--", "sh", "-c", "exit 7")
    done = memfit("diagnose", "leak", "--json")
    assert json.loads(done.out)["cause"] == "exit_status"


@pytest.fixture
def sacct(job, monkeypatch):
    """Puts a program named sacct first on PATH, with this text."""

    def install(text):
        folder = job / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "sacct"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")

    return install


def test_a_jobs_number_is_asked_of_sacct(memfit, job, sacct):
    check_refused(memfit("diagnose", "273202"), "path '273202' does not exist", "memfit diagnose --job 273202")
    sacct('echo "$@" > asked; cat sacct.txt')
    found = json.loads(memfit("diagnose", "--job", "273202", "--json").out)
    assert found["kind"] == "host_cgroup" and found["evidence"][0]["file"] == "sacct"
    assert "-j 273202 -P" in (job / "asked").read_text()


def test_a_sacct_that_refuses_and_one_that_is_not_there_give_the_command_to_run_elsewhere(memfit, job, sacct):
    sacct("echo 'slurm_persist_conn_open: Connection refused' >&2; exit 1")
    done = memfit("diagnose", "--sacct", "273202")
    assert done.exit_code == 2 and "Connection refused" in done.err and "sacct -j JOBID -P" in done.err
    os.environ["PATH"] = str(job)
    assert "sacct is not installed here" in memfit("diagnose", "--sacct", "273202").err
