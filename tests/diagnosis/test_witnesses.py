"""All witnesses together: which of them speak of this job, and what they say."""

import json

from memfit.diagnosis import diagnose
from memfit.rundir import RunDir
from reading import look, proof

LOG = """\
Epoch 0: 100%|####| 242/242 [22:54<00:00,  0.21it/s]
/var/spool/slurmd/job273202/slurm_script: line 28:  4260 Killed   python train.py
slurmstepd: error: Detected 4 oom_kill events in StepId=273202.0. Some of the step tasks have been OOM Killed.
"""
SACCT = """\
JobID|State|ExitCode|ReqMem|MaxRSS|AveRSS|NTasks|NNodes
111|COMPLETED|0:0|1Gn||||1
273202|OUT_OF_MEMORY|0:125|256Gn||||4
273202.0|OUT_OF_MEMORY|0:125||72.50G|71.40G|16|4

PARTITION MEMORY
public 525312
"""
KERNEL = """\
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/slurm/uid_0/job_{job},task_memcg=/slurm/uid_0/job_{job}/step_0/task_1,task=python,pid={pid},uid=0
Memory cgroup out of memory: Killed process {pid} (python) total-vm:8kB, anon-rss:4kB
"""
KILLED = "run.sh: line 28:  4260 Killed   python train.py\n"


def test_the_accounting_speaks_of_this_job_alone_and_its_arithmetic_is_told():
    found = look(LOG, sacct=SACCT)
    assert (found.kind, found.confidence) == ("host_cgroup", "proved")
    assert any("4 tasks x 71.40 GiB = 285.60 GiB" in text for text in found.arithmetic)
    assert {line for file, line in proof(found) if file == "sacct"} <= {3, 4}


def test_an_accounting_of_other_jobs_explains_nothing():
    ended = "JobID|State\n{}|TIMEOUT\n998|COMPLETED\n"
    assert look(KILLED + "StepId=7.0\n", sacct=ended.format(999)).cause == "killed"
    assert look(KILLED + "StepId=999.0\n", sacct=ended.format(999)).cause == "walltime"


def test_a_kernels_kill_is_linked_by_the_job_of_its_group_or_by_the_process():
    def confidence(job, pid, log=KILLED + "StepId=273202.0\n"):
        found = look(log, kernel_log=KERNEL.format(job=job, pid=pid))
        return found.cause, found.confidence

    assert confidence(273202, 9) == ("out_of_memory", "proved")
    assert confidence(7, 4260) == ("out_of_memory", "proved")
    assert confidence(7, 9) == ("killed", "not shown")
    assert confidence(7, 9, "Killed\n") == ("out_of_memory", "likely")


def test_beside_a_kill_of_this_job_those_of_others_are_others():
    unknown = "Memory cgroup out of memory: Killed process 5 (java) total-vm:8kB, anon-rss:4kB\n"
    found = look("Killed\nStepId=273202.0\n", kernel_log=unknown + KERNEL.format(job=273202, pid=9))
    assert (found.where["pid"], found.confidence) == (9, "proved")
    assert look("Killed\n", kernel_log=unknown).confidence == "likely"


def test_one_kill_that_nothing_links_may_be_the_jobs_and_of_several_none_is_told():
    one = KERNEL.format(job=7, pid=9)
    assert look("Killed\n", kernel_log=one).kind == "host_cgroup"
    assert look("Killed\n", kernel_log=one + KERNEL.format(job=8, pid=10)).cause == "killed"
    assert look("Killed\n", sacct="JobID|State\n7|TIMEOUT\n").cause == "walltime"
    assert look("Killed\n", sacct="JobID|State\n7|TIMEOUT\n8|OUT_OF_MEMORY\n").cause == "killed"


def test_a_run_directory_speaks_of_the_job_that_was_named(tmp_path):
    run = RunDir.create(tmp_path, "made", "0123abcd" * 8)
    for job, state in (("fold_1", "timeout"), ("fold_2", "completed")):
        run.job_dir(job).mkdir(parents=True)
        (run.job_dir(job) / "out.log").write_text("hello\n")
        (run.job_dir(job) / "outcome.json").write_text(json.dumps({"state": state, "exit_code": 0, "attempt": 1}))
    assert diagnose(run.path).cause == "walltime"
    assert diagnose(run.job_dir("fold_2") / "out.log").cause == "completed"
    assert diagnose(run.job_dir("fold_1")).cause == "walltime"
