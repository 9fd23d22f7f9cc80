"""Runs on a real Slurm cluster, started by the command line as a user does."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest

from memfit.files import read_json
from memfit.memory import read_series
from memfit.rundir import RunDir
from memfit.tuning import Study

pytestmark = [pytest.mark.root, pytest.mark.slurm, pytest.mark.slow]

#: Notes each start, holds some memory, saves at SIGTERM, and goes on from what it saved.
JOB = """
import os, signal, sys, time
from pathlib import Path
number, mib, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
done = Path(f"done_{number}")
def save(*_):
    done.write_text("half")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
with open("starts", "a") as file:
    file.write(f"{number}\\n")
block = bytearray(mib << 20)
time.sleep(0.2 if done.exists() else seconds)
Path(f"result_{number}").write_text(str(number**2))
"""


@pytest.fixture
def start(cluster, tmp_path):
    """Start ``memfit`` in a folder of its own, with Slurm's tools."""
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    env = {**cluster.env, "MEMFIT_RUNS_DIR": str(tmp_path / "runs")}

    with contextlib.ExitStack() as started:

        def call(*words):
            command = [sys.executable, "-m", "memfit", *words]
            process = subprocess.Popen(
                command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield call


def finish(process, seconds=120):
    out, _ = process.communicate(timeout=seconds)
    return process.returncode, out


def starts(folder):
    path = folder / "starts"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def wait_until(is_true, seconds=60):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def run_of(folder, name):
    return RunDir.all(folder / "runs", name)[0]


@pytest.mark.proves("C-17")
def test_commands_are_one_array_and_each_runs_once_although_the_supervisor_is_killed(start, tmp_path):
    command = ("--", sys.executable, "job.py", "{n}", "10", "3")
    first = start("run", "--backend", "slurm", "--memory", "60MiB", "--name", "once", "--param", "n=1..10", *command)
    wait_until(lambda: len(starts(tmp_path)) >= 3)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    code, out = finish(start("resume", "once"))
    assert code == 0, out
    assert starts(tmp_path) == Counter(map(str, range(1, 11)))
    assert [(tmp_path / f"result_{n}").read_text() for n in range(1, 11)] == [str(n**2) for n in range(1, 11)]
    run = run_of(tmp_path, "once")
    assert len(list((run.path / "slurm").glob("*.sh"))) == 1
    for n in range(1, 11):  # each element of the array measures its own memory
        assert max(one.peak_bytes for one in read_series(run.job_dir(f"cmd_{n:04d}") / "memory.jsonl")) >= 10 << 20


@pytest.mark.proves("S3-43")
@pytest.mark.long
def test_a_job_that_asked_for_too_little_is_submitted_again_with_what_it_needs(start, tmp_path):
    command = ("--", sys.executable, "job.py", "1", "100", "1")
    code, out = finish(start("run", "--backend", "slurm", "--memory", "60MiB", "--name", "small", *command))
    assert code == 0, out
    run = run_of(tmp_path, "small")
    first = read_json(run.job_dir("cmd_0001") / "outcome_1.json")
    assert first["state"] == "out_of_memory" and "oom_kill counter of Slurm's job_" in first["cause"]
    scripts = [path.read_text() for path in (run.path / "slurm").glob("*.sh")]
    sizes = sorted(int(line.split("=")[1][:-1]) for text in scripts for line in text.splitlines() if "--mem=" in line)
    assert sizes[0] == 76 and sizes[-1] >= 116


@pytest.mark.long
@pytest.mark.parametrize("answer", [75, 0])
def test_a_preempted_job_saves_and_goes_on(cluster, start, tmp_path, answer):
    (tmp_path / "job.py").write_text(JOB.replace("exit(75)", f"exit({answer})"))
    command = ("--", sys.executable, "job.py", "{n}", "10", "60")
    options = ("--backend", "slurm", "--set", "slurm.partition=low", "--memory", "60MiB", "--name", "low")
    run = start("run", *options, "--param", "n=1..2", *command)
    wait_until(lambda: len(starts(tmp_path)) == 2)
    number = cluster.submit("sleep 3", "-N2", "--exclusive", "--mem=1500M", "-p", "main")
    code, out = finish(run)
    assert code == 0, out
    assert cluster.wait(number) == ["COMPLETED"]
    assert starts(tmp_path) == {"1": 2, "2": 2}
    first = read_json(run_of(tmp_path, "low").job_dir("cmd_0001") / "outcome_1.json")
    assert (first["state"], first["ended_by"], first["exit_code"]) == ("preempted", "platform", answer)


@pytest.mark.long
def test_a_command_on_two_nodes_is_one_job_that_restarts_as_one_with_more(start, tmp_path):
    code = """
import os, sys, time
from pathlib import Path
rank, again = os.environ["SLURM_NODEID"], Path("again")
Path(f"endpoint_{rank}").write_text(os.environ["PET_RDZV_ENDPOINT"])
if rank == "1" and not again.exists():
    again.write_text("")
    block = bytearray(300 << 20)
time.sleep(1)
print("rank", rank, "is done")
"""
    (tmp_path / "rank.py").write_text(code)
    options = ("--backend", "slurm", "--set", "slurm.nodes=2", "--memory", "60MiB", "--name", "pair")
    code, out = finish(start("run", *options, "--", sys.executable, "rank.py"))
    assert code == 0, out
    job = run_of(tmp_path, "pair").job_dir("cmd_0001")
    first = read_json(job / "outcome_1.json")
    assert first["state"] == "out_of_memory" and "n1: " in first["cause"]
    assert sorted((job / "out.log").read_text().splitlines())[-2:] == ["rank 0 is done", "rank 1 is done"]
    assert len({path.read_text() for path in tmp_path.glob("endpoint_*")}) == 1
    assert read_json(job / "outcome.json")["peak_bytes"] < 60 << 20


#: A group that seals every fifth step; one of its ranks is killed in its first generation.
RANKS = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from memfit.training import beat, leave, peers_lost
for name, own in (("RANK", "PROCID"), ("WORLD_SIZE", "NTASKS"), ("LOCAL_RANK", "LOCALID")):
    os.environ.setdefault(name, os.environ[f"SLURM_{own}"])  # where srun alone starts it
rank, generation, sealed = int(os.environ["RANK"]), os.environ["MEMFIT_GENERATION"], Path("sealed")
is_last = rank == int(os.environ["WORLD_SIZE"]) - 1
names = ("MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURMD_NODENAME", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
Path(f"begin_{generation}_{rank}").write_text(" ".join(os.environ.get(name, "-") for name in names))
first = int(sealed.read_text()) if sealed.exists() else 0
beat("begin")
if sys.argv[1] == "meeting" and is_last and generation == "0":
    os.kill(os.getpid(), signal.SIGKILL)
dist.init_process_group("gloo")
try:
    for step in range(first, 20):
        beat("microbatch", step)
        if step == 12 and is_last and (sys.argv[1] == "always" or sys.argv[1] == "once" and generation == "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 12 and is_last and sys.argv[1] == "hang" and generation == "0":
            time.sleep(1000)
        if step == 12 and is_last and sys.argv[1] == "memory" and not Path("again").exists():
            Path("again").touch()
            block = bytearray(600 << 20)
        if step == 12 and sys.argv[1] == "node" and not Path("again").exists():
            Path(f"waits_{rank}").touch()
            time.sleep(1000 if is_last else 0)
        x = torch.full((1,), float(rank))
        beat("reduce", step)
        dist.all_reduce(x)
        if rank == 0 and step % 5 == 0 and step > first:
            sealed.write_text(str(step))
            beat("sealed", step)
except RuntimeError as error:
    if not peers_lost(error):
        raise
    leave(str(error))
beat("end")
Path(f"end_{rank}").write_text(f"from {first} to {step}: {x.item()}")
dist.destroy_process_group()
"""


@pytest.mark.long
def test_ranks_on_two_nodes_begin_again_inside_their_allocation_when_one_is_lost(start, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    options = ("--backend", "slurm", "--set", "slurm.nodes=2", "--memory", "700MiB", "--name", "group")
    shape = ("--nproc", "4", "--num-gpus", "4")
    code, out = finish(start("run", *options, *shape, "--", sys.executable, "ranks.py", "once"))
    assert code == 0, out
    assert [(tmp_path / f"end_{rank}").read_text() for rank in range(4)] == ["from 10 to 19: 6.0"] * 4
    first, second = (
        [(tmp_path / f"begin_{generation}_{rank}").read_text().split() for rank in range(4)] for generation in (0, 1)
    )
    assert len({one[0] for one in first}) == len({one[0] for one in second}) == 1 and first[0][0] != second[0][0]
    assert {one[1] for one in first} == {one[1] for one in second}  # the same job of Slurm
    assert ({one[2] for one in first}, {one[2] for one in second}) == ({"0"}, {"1"})
    assert [one[3:] for one in second] == [one[3:] for one in first]
    assert [one[4:] for one in first] == [["0", "0,1"], ["1", "0,1"]] * 2
    run = run_of(tmp_path, "group")
    script = "".join(path.read_text() for path in (run.path / "slurm").glob("*.sh"))
    assert "--ntasks-per-node=2\n" in script and "--gres=gpu:2\n" in script and script.count("#!/bin/sh") == 1
    ranks = read_json(run.job_dir("cmd_0001") / "outcome.json")["ranks"]
    nodes = [one[3] for one in second]  # the two share a host name here, so that either may have seen a rank last
    assert [one["rank"] for one in ranks] == [0, 1, 2, 3] and {one["node"] for one in ranks} == {*nodes}
    assert all(one["peak_bytes"] > 50 << 20 for one in ranks)
    (again,) = [event["text"] for event in run.events() if event["kind"] == "ranks_again"]
    assert "rank 3 was ended by SIGKILL in microbatch of step 12" in again


#: Reaches every phase and goes on for ever, or dies in its validation on the last rank.
PHASES = """
import os, signal, sys, time
from memfit import phase
phase("train")
time.sleep(1)
phase("validate")
if sys.argv[1] == "breaks" and os.environ["RANK"] == "3":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(2)
phase("checkpoint")
time.sleep(600)
"""


@pytest.mark.long
def test_a_canary_on_two_nodes_stops_by_itself_or_names_the_rank_that_was_killed(start, tmp_path):
    (tmp_path / "phases.py").write_text(PHASES)
    options = ("--backend", "slurm", "--set", "slurm.nodes=2", "--memory", "300MiB", "--nproc", "4", "--name", "long")
    words = ("run", "--canary", *options, "--", sys.executable, "phases.py")
    code, out = finish(start(*words, "passes"))
    assert code == 0 and "canary: passed (train on 4 ranks, validate on 4 ranks, checkpoint on 4 ranks)" in out, out
    code, out = finish(start(*words, "breaks"))
    assert code == 3 and "canary: broke in phase validate (rank 3; failed): " in out, out
    assert "begin again" not in out


@pytest.mark.long
def test_a_rank_that_dies_before_the_group_has_met_or_dies_again_and_again(start, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    options = ("--backend", "slurm", "--set", "slurm.nodes=2", "--memory", "700MiB", "--nproc", "2")
    words = ("--", sys.executable, "ranks.py")
    code, out = finish(start("run", *options, "--name", "meeting", *words, "meeting"))
    assert code == 0, out
    assert [(tmp_path / f"end_{rank}").read_text() for rank in range(2)] == ["from 0 to 19: 1.0"] * 2
    for path in (tmp_path / "sealed", *tmp_path.glob("begin_*")):
        path.unlink()
    code, out = finish(start("run", *options, "--name", "always", *words, "always"))
    assert code == 137 and "rank 1 was ended by SIGKILL in microbatch of step 12" in out
    # The first seals step 10; the second and the third end without a new checkpoint.
    assert len([*tmp_path.glob("begin_*_0")]) == 3


@pytest.mark.long
def test_a_rank_that_hangs_on_one_node_is_left_by_those_of_the_other(start, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    options = ("--backend", "slurm", "--set", "slurm.nodes=2", "--memory", "700MiB", "--nproc", "2", "--name", "hang")
    words = ("--", "env", "MEMFIT_HANG_SECONDS=4", sys.executable, "ranks.py", "hang")
    code, out = finish(start("run", *options, *words))
    assert code == 0, out
    assert [(tmp_path / f"end_{rank}").read_text() for rank in range(2)] == ["from 10 to 19: 1.0"] * 2
    (again,) = [event for event in run_of(tmp_path, "hang").events() if event["kind"] == "ranks_again"]
    assert "rank 1 hung in microbatch of step 12" in again["text"]


@pytest.mark.long
@pytest.mark.parametrize(("index", "cause"), [(1, "{node} failed: its ranks"), (0, "Slurm says NODE_FAIL")])
def test_a_group_whose_node_dies_is_submitted_again_and_goes_on(cluster, start, tmp_path, index, cause):
    (tmp_path / "ranks.py").write_text(RANKS)
    options = ("--backend", "slurm", "--set", "slurm.nodes=2", "--memory", "700MiB", "--nproc", "2", "--name", "node")
    process = start("run", *options, "--", sys.executable, "ranks.py", "node")
    wait_until(lambda: len([*tmp_path.glob("waits_*")]) == 2)
    _, first, _, node, *_ = (tmp_path / f"begin_0_{index}").read_text().split()
    (tmp_path / "again").touch()
    cluster.kill_node(node)
    job = run_of(tmp_path, "node").job_dir("cmd_0001")
    if index:
        wait_until((job / "nodes_1/jobs/node_0/outcome.json").exists)
    cluster.call("scontrol", "update", f"nodename={node}", "state=down", "reason=dead")
    cluster.start_node(node)
    code, out = finish(process, 240)
    assert code == 0, out
    assert [(tmp_path / f"end_{rank}").read_text() for rank in range(2)] == ["from 10 to 19: 1.0"] * 2
    assert not [*tmp_path.glob("begin_1_*")] and (tmp_path / "begin_0_0").read_text().split()[1] != first
    assert read_json(job / "outcome_1.json")["state"] == "node_fail"
    assert f"cmd_0001 restarts as attempt 2: {cause.format(node=node)}" in out


@pytest.mark.long
def test_a_rank_that_runs_out_of_memory_has_its_group_submitted_again_with_more(start, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    options = ("--backend", "slurm", "--set", "slurm.nodes=2", "--memory", "500MiB", "--nproc", "2", "--name", "more")
    code, out = finish(start("run", *options, "--", sys.executable, "ranks.py", "memory"))
    assert code == 0, out
    assert [(tmp_path / f"end_{rank}").read_text() for rank in range(2)] == ["from 10 to 19: 1.0"] * 2
    assert len([*tmp_path.glob("begin_*_0")]) == 1  # the second attempt is a group of its own, from generation 0
    first = read_json(run_of(tmp_path, "more").job_dir("cmd_0001") / "outcome_1.json")
    assert first["state"] == "out_of_memory" and "n1: rank 1 was ended by SIGKILL" in first["cause"]


@pytest.mark.long
def test_ranks_that_srun_alone_starts_leave_together_and_go_on_when_started_again(cluster, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    step = f"srun --ntasks=2 {sys.executable} ranks.py once; echo step $?"
    script = f"cd {tmp_path}; export MASTER_ADDR=127.0.0.1 MASTER_PORT={port} MEMFIT_GENERATION=0\n{step}\n"
    number = cluster.submit(f"{script}MEMFIT_GENERATION=1 {step}", "-N2", "--ntasks-per-node=1", "--mem=700M")
    assert cluster.wait(number, seconds=120) == ["COMPLETED"]
    said = cluster.log_of(number).read_text()
    assert "Exited with exit code 79" in said and said.splitlines()[-1] == "step 0", said
    assert [(tmp_path / f"end_{rank}").read_text() for rank in range(2)] == ["from 10 to 19: 1.0"] * 2


@pytest.mark.long
def test_a_function_runs_on_the_ranks_of_two_nodes_and_rank_0_reports(start, tmp_path):
    code = """
import torch, torch.distributed as dist

def train(n: int = 1):
    x = torch.full((1,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return {"sum": x.item(), "rank": dist.get_rank()}
"""
    (tmp_path / "work.py").write_text(code)
    options = ("--backend", "slurm", "--set", "slurm.nodes=2", "--set", "slurm.memory=700MiB", "--nproc", "2")
    code, out = finish(start("run", "work:train", *options, "--name", "function"))
    assert code == 0, out
    (manifest,) = run_of(tmp_path, "function").path.glob("checkpoints/*.json")
    assert read_json(manifest)["result"] == {"sum": 3.0, "rank": 0}


@pytest.mark.long
def test_ctrl_c_cancels_what_waits_and_resume_runs_it(start, tmp_path):
    command = ("--", sys.executable, "job.py", "{n}", "10", "8")
    options = ("--backend", "slurm", "--memory", "60MiB", "--name", "stopped", "--param", "n=1..12")
    run = start("run", *options, *command)
    wait_until(lambda: len(starts(tmp_path)) >= 6)
    run.send_signal(signal.SIGINT)
    code, out = finish(run)
    assert code == 75, out
    assert 6 <= len(starts(tmp_path)) < 12  # the cluster has eight cores
    code, out = finish(start("resume", "stopped", "--quiet"))
    assert code == 0 or "completed" in out, out
    assert len(list(tmp_path.glob("result_*"))) == 12


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "answer"), [((), 75), (("--nproc", "2"), 0)])
def test_ctrl_c_lets_both_nodes_save_and_resume_goes_on(start, tmp_path, ranks, answer):
    (tmp_path / "rank.py").write_text(
        JOB.replace("exit(75)", f"exit({answer})")
        .replace("sys.argv[1]", "os.environ['SLURM_NODEID']")
        .replace("sys.argv", "[0, 0, 10, 20]")
    )
    options = ("--backend", "slurm", "--set", "slurm.nodes=2", "--memory", "60MiB", "--name", "two")
    run = start("run", *options, *ranks, "--", sys.executable, "rank.py")
    wait_until(lambda: starts(tmp_path) == {"0": 1, "1": 1})
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    code, out = finish(run)
    assert code == 75, out
    assert sorted(path.name for path in tmp_path.glob("done_*")) == ["done_0", "done_1"]
    code, out = finish(start("resume", "two"))
    assert code == 0, out
    assert starts(tmp_path) == {"0": 2, "1": 2} and len(list(tmp_path.glob("result_*"))) == 2


@pytest.mark.long
def test_a_study_is_stopped_by_ctrl_c_goes_on_and_is_the_same_as_unbroken(start, tmp_path):
    pytest.importorskip("optuna")
    code = """
import sys, time
print("start", sys.argv[1], file=open("starts", "a"))
time.sleep(3)
print("loss", (float(sys.argv[1]) - 0.3) ** 2)
"""
    (tmp_path / "trial.py").write_text(code)
    options = ("--set", "backend=slurm", "--set", "slurm.memory=60MiB", "--n-trials", "6", "--set", "tune.num_slots=3")
    searched = ("--param", "x=0.0..1.0", "--objective", "loss", "--minimize")
    command = (*options, *searched, "--", sys.executable, "trial.py", "{x}")
    first = start("tune", "--study-name", "broken", *command)
    wait_until(lambda: (tmp_path / "starts").exists() and len((tmp_path / "starts").read_text().splitlines()) >= 4)
    first.send_signal(signal.SIGINT)
    code, out = finish(first)
    assert code == 75, out
    for name in ("broken", "whole"):
        code, out = finish(start("tune", "--study-name", name, *command))
        assert code == 0, out
    broken, whole = (
        [(one.state, one.params, one.value) for one in Study.open(run_of(tmp_path, name)).trials]
        for name in ("broken", "whole")
    )
    assert broken == whole and {state for state, *_ in whole} == {"completed"} and len(whole) == 6


@pytest.mark.proves("S1-38")
@pytest.mark.long
def test_a_launched_job_that_saves_at_sigterm_is_queued_again(cluster, tmp_path):
    (tmp_path / "job.py").write_text(JOB.replace("def save(*_):", "def save(*_):\n    time.sleep(3)"))
    command = [sys.executable, "job.py", "1", "10", "30"]
    config = {"experiment": "again", "stages": {"train": {"run": command}}, "resources": {"memory": "60MiB"}}
    (tmp_path / "job.yaml").write_text(json.dumps(config))
    env = cluster.env | {"PATH": f"{Path(sys.executable).parent}:{cluster.env['PATH']}"}
    told = subprocess.check_output("memfit launch job.yaml | sbatch", shell=True, text=True, cwd=tmp_path, env=env)
    number = told.rpartition("job ")[2].strip()
    wait_until(lambda: starts(tmp_path) == {"1": 1})
    time.sleep(1)
    for _ in range(2):  # as Slurm does if a node answered late
        cluster.call("scancel", "--signal=TERM", number)
        time.sleep(1)
    log = tmp_path / f"again_{number}.log"
    wait_until((tmp_path / "result_1").exists)
    assert starts(tmp_path) == {"1": 2}, log.read_text()
    assert (tmp_path / "done_1").read_text() == "half"
    assert cluster.wait(number) == ["COMPLETED"]


@pytest.mark.long
def test_a_run_in_a_folder_with_quotes_and_patterns_completes_and_a_line_break_is_refused(start, tmp_path):
    folder = tmp_path / "q 'x\" %j #1 $(touch planted) é"
    words = ("run", "--backend", "slurm", "--memory", "60MiB", "--name", "odd", "--runs-dir")
    code, out = finish(start(*words, str(folder), "--", "true"))
    assert code == 0, out
    (run,) = RunDir.all(folder, "odd")
    assert len([*(run.path / "slurm").glob("*_0.log")]) == 1
    code, out = finish(start(*words, str(tmp_path / "a\ntouch${IFS}planted\n"), "--", "true"))
    assert code == 2 and "cannot be an option of sbatch" in out
    assert not [*tmp_path.rglob("planted")]


@pytest.mark.long
def test_a_function_is_not_given_several_nodes(start, tmp_path):
    (tmp_path / "work.py").write_text("def train(n: int = 1):\n    return {'n': n}\n")
    code, out = finish(start("run", "work:train", "--backend", "slurm", "--set", "slurm.nodes=2"))
    assert code == 2 and "on several nodes a command starts once on each" in out


@pytest.mark.long
def test_what_slurm_refuses_is_said_and_starts_nothing(start, tmp_path):
    code, out = finish(start("run", "--backend", "slurm", "--set", "slurm.partition=nowhere", "--", "true"))
    assert code == 2 and "no partition nowhere" in out
    code, out = finish(start("run", "--backend", "slurm", "--memory", "64GiB", "--", "true"))
    assert code == 3 and "largest node" in out
    code, out = finish(start("run", "--backend", "slurm", "--gpu-memory", "1GiB", "--", "true"))
    assert code == 2 and "slurm.extra" in out
    code, out = finish(start("run", "--backend", "slurm", "--num-gpus", "3", "--", "true"))
    assert code == 3 and "3 on each, and no node of partition main has more than 2" in out
    code, out = finish(start("run", "--backend", "slurm", "--num-gpus", "3", "--set", "slurm.nodes=2", "--", "true"))
    assert code == 2 and "3 GPUs on 2 nodes" in out
    assert not [*tmp_path.rglob("slurm/*.sh")]


@pytest.mark.long
def test_each_job_sees_the_gpus_that_it_asked_for_and_nobody_else_does(start, tmp_path):
    code = """
import os, sys, time
node, gpus = os.environ["SLURMD_NODENAME"], os.environ["CUDA_VISIBLE_DEVICES"]
print(node, gpus, file=open(f"gpus_{sys.argv[1]}_{node}", "w"))
time.sleep(3 * (sys.argv[1] != "first"))
"""
    (tmp_path / "show.py").write_text(code)
    show = (sys.executable, "show.py", "{name}")
    options = ("run", "--backend", "slurm", "--memory", "60MiB", "--num-gpus")
    names = ("--param", "name=first,a,b,c,d")
    out = finish(start(*options, "1", "--name", "one", *names, "--", *show))
    assert out[0] == 0, out[1]
    held = [path.read_text() for path in tmp_path.glob("gpus_[abcd]_*")]
    assert len(set(held)) == len(held) == 4  # four jobs at once, on the four GPUs
    pair = ("--set", "slurm.nodes=2", "--name", "pair", "--param", "name=both")
    out = finish(start(*options, "4", *pair, "--", *show))
    assert out[0] == 0, out[1]
    assert sorted(path.read_text().split()[1] for path in tmp_path.glob("gpus_both_*")) == ["0,1", "0,1"]
    status = read_json(run_of(tmp_path, "pair").job_dir("cmd_0001") / "outcome.json")
    assert status["device_used_bytes"] == {"0": 0, "1": 0}  # without a driver a GPU has its number for a name


@pytest.mark.proves("S3-16")
@pytest.mark.long
def test_slurm_takes_the_script_and_two_nodes_train_as_one(cluster, tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "rank = int(os.environ['SLURM_PROCID'])\n"
        "dist.init_process_group('gloo', f'file://{os.getcwd()}/meet', rank=rank, world_size=4)\n"
        "x = torch.ones(1) * rank\n"
        "dist.all_reduce(x)\n"
        "open(f'sum_{rank}', 'w').write(f'{x.item()} of {dist.get_world_size()}')\n"
        "dist.destroy_process_group()\n"
    )
    config = {
        "experiment": "pair",
        "stages": {"train": {"run": ["python", "train.py"]}},
        "resources": {"ranks": 4, "memory": "400MiB"},
        "slurm": {"nodes": 2},
        "launch": {"start_with": "srun"},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(config))

    def launch(words):
        env = cluster.env | {"PATH": f"{Path(sys.executable).parent}:{cluster.env['PATH']}"}
        words = f"memfit launch job.yaml {words}"
        return subprocess.run(words, shell=True, capture_output=True, text=True, cwd=tmp_path, env=env)

    assert "to start at" in launch("| sbatch --test-only").stderr
    assert launch("--set resources.memory=4GiB").returncode == 3
    told = launch("| sbatch").stdout
    number = told.rpartition("job ")[2].strip()
    log = tmp_path / f"pair_{number}.log"
    assert cluster.wait(number, seconds=90) == ["COMPLETED"], log.read_text()
    assert [(tmp_path / f"sum_{rank}").read_text() for rank in range(4)] == ["6.0 of 4"] * 4
