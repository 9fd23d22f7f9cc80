"""All witnesses together: which of them speak of this job, and what they say."""

import json

from memfit.diagnosis._text import Line
from memfit.diagnosis._witnesses import hear, hear_run
from memfit.rundir import RunDir

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


def lines_of(text, file="-"):
    return [Line(file, number, line) for number, line in enumerate(text.split("\n"), 1)]


def log(name="train.err"):
    return lines_of(LOG, name)


def test_the_accounting_speaks_of_this_job_alone_and_its_arithmetic_is_told():
    heard = hear(log(), sacct=SACCT)
    assert {(sign.name, sign.values["step"], sign.values["linked"]) for sign in heard.signs} == {
        ("cgroup_kill", "273202", True),
        ("cgroup_kill", "273202.0", True),
    }
    assert "4 tasks x 71.40 GiB = 285.60 GiB" in heard.arithmetic[0]


def test_an_accounting_of_other_jobs_is_said_to_be_of_others():
    other = SACCT.replace("273202", "999")
    assert {sign.values["linked"] for sign in hear(log(), sacct=other).signs} == {False}
    assert {sign.values["linked"] for sign in hear(lines_of("no number here"), sacct=other).signs} == {None}


def test_a_kernels_kill_is_linked_by_the_job_of_its_group_or_by_the_process():
    def linked(job, pid):
        return hear(log(), kernel_log=KERNEL.format(job=job, pid=pid)).signs[0].values["linked"]

    assert linked(273202, 9) is True
    assert linked(7, 4260) is True
    assert linked(7, 9) is False
    assert hear(lines_of("Killed"), kernel_log=KERNEL.format(job=7, pid=9)).signs[0].values["linked"] is None


def test_beside_a_kill_of_this_job_those_of_others_are_others():
    unknown = "Memory cgroup out of memory: Killed process 5 (java) total-vm:8kB, anon-rss:4kB\n"
    heard = hear(log(), kernel_log=unknown + KERNEL.format(job=273202, pid=9))
    assert [sign.values["linked"] for sign in heard.signs] == [False, True]
    assert hear(log(), kernel_log=unknown).signs[0].values["linked"] is None


def test_facts_get_a_stream_of_their_own_without_those_of_others():
    heard = hear(log(), sacct=SACCT, kernel_log=KERNEL.format(job=7, pid=9))
    stream, signs = heard.placed(3)
    assert [(sign.stream, sign.values["step"]) for sign in signs] == [(3, "273202"), (3, "273202.0")]
    assert all(stream.lines[sign.place] == sign.lines[0] for sign in signs)
    assert signs[1].place - signs[0].place > 50


def test_one_kill_that_nothing_links_may_be_the_jobs_and_of_several_none_is_told():
    bare = lines_of("Killed")
    one = KERNEL.format(job=7, pid=9)
    assert len(hear(bare, kernel_log=one).placed(0)[1]) == 1
    assert hear(bare, kernel_log=one + KERNEL.format(job=8, pid=10)).placed(0)[1] == []
    assert len(hear(bare, sacct="JobID|State\n7|TIMEOUT\n").placed(0)[1]) == 1
    assert hear(bare, sacct="JobID|State\n7|TIMEOUT\n8|OUT_OF_MEMORY\n").placed(0)[1] == []


def test_a_run_directory_speaks_of_the_job_that_was_named(tmp_path):
    run = RunDir.create(tmp_path, "made", "0123abcd" * 8)
    for job, state in (("fold_1", "timeout"), ("fold_2", "completed")):
        run.job_dir(job).mkdir(parents=True)
        (run.job_dir(job) / "outcome.json").write_text(json.dumps({"state": state, "exit_code": 0, "attempt": 1}))
    assert [sign.name for sign in hear_run(run.path).signs] == ["walltime", "success"]
    assert [sign.name for sign in hear_run(run.job_dir("fold_2") / "out.log").signs] == ["success"]
    assert hear_run(tmp_path / "elsewhere").signs == ()


def test_nothing_heard_is_nothing_said():
    assert hear([]).signs == hear(lines_of("all is well")).signs == ()
