"""The Slurm backend where the controller does not answer, by stand-ins of Slurm's tools; tests/slurm has a real one."""

import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise

import pytest

from memfit.errors import UsageError
from memfit.jobs import Job, SlurmBackend, SlurmOptions, Submission, read_status, run_element, stop
from memfit.memory import Footprint, PhasePeak
from memfit.rundir import RunDir

NO_ANSWER = "echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


@pytest.fixture(autouse=True)
def tools(tmp_path, monkeypatch):
    """Make stand-ins of Slurm's tools; each call is noted. From the start, jobs are taken and nothing is known."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(**scripts):
        for name, script in scripts.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/calls\n{script}\n")
            path.chmod(0o755)
        return lambda: (tmp_path / "calls").read_text().split()

    make(sbatch="echo 7", squeue="true", sacct="true", scancel="true", scontrol="true")
    return make


@pytest.fixture
def run_dir(tmp_path):
    return RunDir.create(tmp_path, "queue", "0" * 64)


class Clock:
    now = 0.0

    def __call__(self):
        self.now += 100.0
        return self.now


def submit(backend, *names, limit_bytes=None):
    backend.submit([Submission(Job(name, command=("true",)), limit_bytes) for name in names])


def test_a_controller_that_does_not_answer_is_asked_again_and_gets_each_array_once(tools, run_dir):
    calls = tools(sbatch=NO_ANSWER, squeue=NO_ANSWER, sacct=NO_ANSWER, scancel=NO_ANSWER)
    backend = SlurmBackend(run_dir, now=Clock())
    submit(backend, "a", "b")
    assert {status.pending_reason for status in backend.poll().values()} == {"Slurm's controller does not answer"}
    assert calls().count("sbatch") == 1  # it may have got through: its name is looked for first
    tools(squeue="echo '7_0|RUNNING|None|n1'")
    assert backend.poll()["a"].state == "pending"
    assert calls().count("sbatch") == 1  # found by its name
    later = SlurmBackend(run_dir, now=Clock())
    assert later.adopt(["a", "b"]) == {"a", "b"}


def test_an_array_that_slurm_never_got_is_sent_again(tools, run_dir):
    calls = tools(sbatch=NO_ANSWER)
    backend = SlurmBackend(run_dir, now=Clock())
    submit(backend, "a")
    tools(sbatch="echo 7")
    backend.poll()
    assert calls().count("sbatch") == 2


@pytest.mark.slow
def test_thousands_of_jobs_cost_the_controller_a_few_calls_a_minute(tools, run_dir, tmp_path):
    lines = [f"7_{index}|PENDING|Priority|" for index in range(1000)]
    (tmp_path / "listed").write_text("\n".join(lines))
    calls = tools(squeue=f"cat {tmp_path}/listed")
    now = [0.0]
    backend = SlurmBackend(run_dir, now=lambda: now[0])
    submit(backend, *(f"job_{number}" for number in range(1_001)))
    assert calls().count("sbatch") == 2
    seen = []
    for _ in range(30):
        backend.poll()
        seen.append(len(calls()))
        now[0] += 60.0
    assert max(later - before for before, later in pairwise(seen)) <= 2


def test_what_slurm_refuses_fails_with_its_words(tools, run_dir):
    tools(sbatch="echo 'sbatch: error: invalid partition specified: nowhere' >&2; exit 1")
    backend = SlurmBackend(run_dir, now=Clock())
    submit(backend, "a")
    status = backend.poll()["a"]
    assert status.state == "failed" and "invalid partition specified: nowhere" in status.cause


def test_an_end_without_an_outcome_is_what_slurm_says(tools, run_dir):
    tools(squeue="echo '7_0|NODE_FAIL|None|n1'; echo '7_1|OUT_OF_MEMORY|None|n1'")
    backend = SlurmBackend(run_dir, now=Clock())
    submit(backend, "a", "b")
    for _ in range(3):
        found = backend.poll()
    assert (found["a"].state, found["b"].state) == ("node_fail", "out_of_memory")
    assert "Slurm says NODE_FAIL" in found["a"].cause


def test_a_waiting_element_that_slurm_forgets_once_it_is_cancelled_has_ended(tools, run_dir):
    tools(squeue="echo '7_0|PENDING|Priority|'; echo '7_1|PENDING|Priority|'")
    tools(sacct="echo 'sacct: error: Slurm accounting storage is disabled' >&2; exit 1")
    now = [1.0]
    backend = SlurmBackend(run_dir, now=lambda: now[0])
    submit(backend, "a", "b", "c")
    backend.poll()
    backend.cancel("a")
    tools(squeue="echo '7_1|RUNNING|None|n1'")
    backend.poll()
    now[0] += 3.0
    found = backend.poll()
    assert (found["a"].state, found["a"].ended_by) == ("cancelled", "user")
    assert (found["b"].state, found["c"].state) == ("pending", "pending")  # nobody asked: it may come back
    now[0] += 61.0
    found = backend.poll()
    assert found["c"].cause.startswith("Slurm says nothing of it any more")


def test_a_job_that_slurm_takes_for_running_but_that_never_began_is_given_up(tools, run_dir):
    calls = tools(squeue="echo '7_0|RUNNING|None|n1'; echo '7_1|RUNNING|None|n1'")
    backend = SlurmBackend(run_dir, now=Clock())
    submit(backend, "a", "b")
    folder = run_dir.job_dir("b")
    (folder / "status.json").write_text('{"schema_version": 1, "state": "running", "attempt": 1, "started": 1.0}')
    for _ in range(3):
        found = backend.poll()
    assert (found["a"].state, found["b"].state) == ("node_fail", "running")
    assert "left no file" in found["a"].cause and "scancel" in calls()


def test_an_element_that_a_crash_left_in_the_queue_is_released_or_removed_and_no_other(tools, run_dir, tmp_path):
    reasons = ["launch failed requeued held"] * 2 + ["JobHeldUser"]
    lines = "; ".join(f"echo '7_{index}|PENDING|{reason}|'" for index, reason in enumerate(reasons))
    calls = tools(squeue=lines, scontrol=f'echo "$2" >> {tmp_path}/released')
    backend = SlurmBackend(run_dir, now=Clock())
    submit(backend, "a", "b", "c")
    outcome = '{"schema_version": 1, "state": "completed", "attempt": 1, "exit_code": 0}'
    (run_dir.job_dir("b") / "outcome.json").write_text(outcome)
    backend.poll()
    backend.poll()
    released = (tmp_path / "released").read_text().split()
    assert ("7_0" in released, "7_2" in released, calls().count("scancel")) == (True, False, 1)


def test_queued_jobs_are_cancelled_without_a_supervisor_and_a_dead_controller_is_said(tools, run_dir, monkeypatch):
    calls = tools(squeue="echo '7_0|PENDING|Priority|'")
    submit(SlurmBackend(run_dir), "a")
    monkeypatch.setattr("memfit.jobs._slurm._LATEST_SECONDS", 0.2)
    with pytest.raises(UsageError, match=r"its queue still has 1 job of"):
        stop(run_dir)
    assert "scancel" in calls()
    monkeypatch.setattr("memfit.jobs._slurm._LATE_SECONDS", 0.0)
    tools(squeue="echo '7_0|CANCELLED|None|'")
    assert [status.state for status in stop(run_dir)] == []  # it is gone already
    assert read_status(run_dir, "a").cause == "stopped before it started"


def test_jobs_of_one_request_are_one_array_with_the_text_that_sbatch_reads(run_dir):
    options = SlurmOptions(partition="gpu", time="01:00:00", extra=("--constraint=a100",))
    backend = SlurmBackend(run_dir, options, grace_seconds=30, max_parallel=4)
    submit(backend, *(f"fold_{number}" for number in range(1, 6)), limit_bytes=100 << 20)
    (script,) = (run_dir.path / "slurm").glob("*.sh")
    token = script.stem
    lines = script.read_text().splitlines()
    assert lines[:-1] == [
        "#!/bin/sh",
        f"#SBATCH --job-name=mf-00000000.{token}",
        "#SBATCH --array=0-4%4",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=01:00:00",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=1",
        "#SBATCH --mem=116M",
        "#SBATCH --signal=B:TERM@90",
        "#SBATCH --no-requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={run_dir.path}/slurm/%A_%a.log",
        "#SBATCH --constraint=a100",
    ]
    assert lines[-1].startswith("exec ") and lines[-1].endswith(f"--array {run_dir.path}/slurm/{token}.json")


@pytest.mark.parametrize(
    "name", ["q ' x", 'q " x', "$(touch x)", "`touch x`", "$HOME", "%j", "%%A", "#x", "a;b", "a&b", "é\u2028"]
)
def test_a_run_in_any_folder_is_named_as_it_is_in_the_script(tmp_path, name):
    run = RunDir.create(tmp_path / name, "queue", "0" * 64)
    submit(SlurmBackend(run), "a")
    (script,) = (run.path / "slurm").glob("*.sh")
    *lines, command = script.read_text().removesuffix("\n").split("\n")
    assert lines[0] == "#!/bin/sh" and all(line.startswith("#SBATCH --") for line in lines[1:])
    (output,) = [line.partition("=")[2] for line in lines if "--output=" in line]
    (output,) = shlex.split(output)  # sbatch knows no escapes but those of a quote
    assert output.removesuffix("/%A_%a.log").replace("%%", "%") == f"{run.path}/slurm"
    assert shlex.split(command)[-3:] == [str(run.path), "--array", f"{run.path}/slurm/{script.stem}.json"]


@pytest.mark.parametrize("letter", [*map(chr, range(1, 32)), "\x7f", "\\", "\udcff"])
def test_what_no_batch_script_can_name_is_refused_before_any_job(run_dir, tmp_path, letter):
    text = f"a{letter}touch${{IFS}}x"
    for place in ("partition", "account", "qos", "time"):
        with pytest.raises(UsageError, match="cannot be an option of sbatch"):
            SlurmBackend(run_dir, SlurmOptions(**{place: text}))
    with pytest.raises(UsageError, match="cannot be an option of sbatch"):
        SlurmBackend(run_dir, by_stage={"fold": SlurmOptions(extra=(f"--comment={text}",))})
    run = RunDir.create(tmp_path / text, "queue", "0" * 64)
    with pytest.raises(UsageError, match="--runs-dir"):
        SlurmBackend(run)
    assert not (tmp_path / "calls").exists()


def test_the_jobs_of_a_stage_may_ask_for_something_else(run_dir):
    options = {"train": SlurmOptions(partition="gpu", nodes=2, extra=("--gpus-per-node=4",))}
    backend = SlurmBackend(run_dir, SlurmOptions(partition="cpu"), by_stage=options)
    jobs = [Job(name, command=("true",), stage=stage) for name, stage in (("a", "prepare"), ("b", "train"))]
    backend.submit([Submission(job, 100 << 20) for job in jobs])
    scripts = {text.partition("partition=")[2].split()[0]: text for text in _scripts(run_dir)}
    assert "--nodes=1" in scripts["cpu"] and "--mem=116M" in scripts["cpu"] and "gpus" not in scripts["cpu"]
    assert "--nodes=2" in scripts["gpu"] and "--mem=164M" in scripts["gpu"] and "--gpus-per-node=4" in scripts["gpu"]


def test_the_gpus_of_a_job_are_spread_over_its_nodes(run_dir):
    backend = SlurmBackend(run_dir, by_stage={"pair": SlurmOptions(nodes=2)})
    jobs = [Job(f"{stage}_{num}", command=("true",), stage=stage, num_devices=num) for stage, num in NUM_GPUS]
    backend.submit([Submission(job, 100 << 20) for job in jobs])
    found = {text.partition("--nodes=")[2][0] + text.partition("--gres=")[2][:5] for text in _scripts(run_dir)}
    assert found == {"1", "1gpu:1", "2gpu:2"}
    step = json.loads((run_dir.job_dir("pair_4") / "job.json").read_text())["step"]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--gres=gpu:2"} < set(step)


def test_a_function_of_one_process_gets_one_node_of_a_run_on_several(run_dir):
    backend = SlurmBackend(run_dir, SlurmOptions(nodes=2))
    jobs = [Job("prepare", target="math:sqrt", arguments={"x": 9}), Job("train", target="math:sqrt", ranks=4)]
    backend.submit([Submission(job, 100 << 20) for job in jobs])
    found = {
        text.partition("--ntasks-per-node=")[2][0] + text.partition("--nodes=")[2][0] for text in _scripts(run_dir)
    }
    assert found == {"11", "22"}


NUM_GPUS = (("none", 0), ("one", 1), ("pair", 4))


def _scripts(run_dir):
    return [path.read_text() for path in (run_dir.path / "slurm").glob("*.sh")]


def _run_array(run_dir):
    """Start the one element that was submitted, as Slurm does."""
    (array,) = (run_dir.path / "slurm").glob("*.json")
    words = [sys.executable, "-P", "-m", "memfit.jobs", "shim", str(run_dir.path), "--array", str(array)]
    subprocess.run(words, env={**os.environ, "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "7"}, check=False)


LOSES = 'echo \'{"state": "failed", "exit_code": 79, "cause": "rank 1 left", "attempt": 1}\' > $node/outcome.json'


@pytest.mark.parametrize(
    ("srun", "state"),
    [
        (f"{LOSES}; kill -TERM $PPID; exit 79", "node_fail"),
        (f"{LOSES}; kill -TERM $PPID; sleep 0.5; exit 79", "node_fail"),
        (f"kill -TERM $PPID; sleep 0.5; {LOSES}; exit 79", "preempted"),
    ],
    ids=["ends with the stop", "ends after the stop", "lost after the stop"],
)
def test_a_group_is_one_whose_node_failed_however_soon_slurm_ends_it_for_that(tools, run_dir, srun, state):
    tools(
        srun=f'for node in "{run_dir.path}"/jobs/*/*/jobs/node_0; do :; done; {srun}',
    )
    backend = SlurmBackend(run_dir, SlurmOptions(nodes=2))
    backend.submit([Submission(Job("group", command=("true",), ranks=4), 100 << 20)])
    _run_array(run_dir)
    outcome = json.loads((run_dir.job_dir("group") / "outcome.json").read_text())
    assert (outcome["state"], outcome["ended_by"]) == (state, "platform")
    assert ("node_1 failed: its ranks left no outcome" in outcome["cause"]) == (state == "node_fail")


def test_a_job_of_several_nodes_has_in_each_phase_the_peak_of_the_node_that_takes_most_there(tools, run_dir, tmp_path):
    sizes = [{"train": 100, "validate": 30}, {"train": 70, "validate": 80, "checkpoint": 90}]
    for node, phases in enumerate(sizes):
        own = Footprint(max(phases.values()), phases={name: PhasePeak(size) for name, size in phases.items()})
        end = {"state": "completed", "exit_code": 0, "peak_bytes": own.private_bytes, "attempt": 1}
        (tmp_path / f"end_{node}").write_text(json.dumps(end | {"footprint": own.to_dict()}))
    copies = f'for node in "{run_dir.path}"/jobs/*/*/jobs/node_?; do cp {tmp_path}/end_"${{node##*_}}" $node/outcome.json; done'
    tools(srun=copies)
    backend = SlurmBackend(run_dir, SlurmOptions(nodes=2))
    backend.submit([Submission(Job("group", command=("true",), ranks=4), 100 << 20)])
    _run_array(run_dir)
    outcome = json.loads((run_dir.job_dir("group") / "outcome.json").read_text())
    peaks = {name: peak["private_bytes"] for name, peak in outcome["footprint"]["phases"].items()}
    assert (outcome["state"], outcome["peak_bytes"]) == ("completed", 100)
    assert peaks == {"train": 100, "validate": 80, "checkpoint": 90}


def test_an_element_whose_job_has_a_later_attempt_does_nothing(run_dir, monkeypatch):
    backend = SlurmBackend(run_dir)
    submit(backend, "a")
    (first,) = (run_dir.path / "slurm").glob("*.json")
    backend.cancel("a")
    submit(SlurmBackend(RunDir(run_dir.path)), "b")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    order = run_dir.job_dir("a") / "job.json"
    order.write_text(order.read_text().replace('"attempt": 1', '"attempt": 2'))
    assert run_element(run_dir.path, first) == 0
    assert not (run_dir.job_dir("a") / "outcome.json").exists()
