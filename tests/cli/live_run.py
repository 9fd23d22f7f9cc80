"""A run of commands in a process of its own."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

from jobs.contract import wait_until
from memfit.memory import list_entries
from memfit.rundir import RunDir, liveness

#: Marks a phase, holds some memory, and exits as one that has checkpointed when it is asked to stop.
JOB = """
import signal, sys, time
from memfit.rundir import phase
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
phase("train")
block = bytearray(20 << 20)
open(sys.argv[1] + ".started", "w").close()
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    time.sleep(0.05)
"""


def in_a_folder_of_jobs(tmp_path, monkeypatch):
    """Takes this test into a folder with the job."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)


def memfit_command(*words):
    return [sys.executable, "-m", "memfit", *map(str, words)]


@contextmanager
def running(tmp_path, *, seconds=300, folds="1..3", at_once=2, name="demo"):
    """A live run of commands, of which as many run as may; the supervisor's process and the run directory."""
    words = ["run", "--param", f"fold={folds}", "--max-parallel", at_once, "--name", name, "--force"]
    command = memfit_command(*words, "--", sys.executable, "job.py", f"{name}_{{fold}}", seconds)
    with open(tmp_path / f"{name}.log", "w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_until(lambda: len(list(tmp_path.glob(f"{name}_*.started"))) >= at_once or process.poll() is not None)
        assert process.poll() is None, (tmp_path / f"{name}.log").read_text()
        (run,) = RunDir.all(tmp_path / "runs", name)
        wait_until(lambda: any(entry.run == run.path for entry in list_entries()))
        yield process, run
    finally:
        process.kill()
        process.wait()
        for (run,) in [RunDir.all(tmp_path / "runs", name)]:
            for job in liveness(run).jobs:
                (run.job_dir(job) / "stop_requested").write_text("now")
            wait_until(lambda run=run: not liveness(run).jobs)


def die(process):
    """Kill a supervisor as the kernel would."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
