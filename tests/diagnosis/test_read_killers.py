"""Those who kill for memory, in their own words, and kills that name nobody.

The messages are written here in the formats of the programs that print them.
"""

import pytest

from reading import look

#: Name, text, kind, recovered, phase (None: any), GiB asked for, and cause (None: any).
#: A short case has the name, text, kind and cause only.
CASES = [
    (
        "slurm 21",
        (
            "Epoch 3: 10%|█ | 100/1000\n"
            "slurmstepd: error: Detected 2 oom_kill events in StepId=998.0. Some of the step "
            "tasks have been OOM Killed.\n"
            "srun: error: gpu03: task 3: Out Of Memory"
        ),
        "host_cgroup",
        False,
        "train",
        None,
        None,
    ),
    (
        "slurm 18",
        ("slurmstepd: error: Detected 1 oom-kill event(s) in step 2750.batch cgroup."),
        "host_cgroup",
        None,
    ),
    (
        "slurm node prefix",
        (
            "slurmstepd-gpu03: error: Detected 1 oom_kill event in StepId=998.extern. Some of "
            "the step tasks have been OOM Killed."
        ),
        "host_cgroup",
        None,
    ),
    ("slurm oom task only", ("srun: error: gpu03: tasks 0-3: Out Of Memory"), "host_cgroup", False, None, None, None),
    (
        "sacct",
        (
            "JobID           JobName      State ExitCode\n"
            "998          train.sbat OUT_OF_ME+    0:125\n"
            "998.batch         batch OUT_OF_ME+    0:125\n"
            "998.extern       extern  COMPLETED      0:0"
        ),
        "host_cgroup",
        None,
    ),
    (
        "virtual mem",
        ("slurmstepd: error: Step 99.0 exceeded virtual memory limit (52917772 > 20971520), being killed"),
        "host_cgroup",
        None,
    ),
    (
        "pbs mem",
        ("=>> PBS: job killed: mem 33592304kb exceeded limit 33554432kb"),
        "host_cgroup",
        None,
    ),
    (
        "pbs vmem",
        ("=>> PBS: job killed: vmem 33592304kb exceeded limit 33554432kb"),
        "host_cgroup",
        None,
    ),
    (
        "pbs cgroup",
        (
            "Cgroup mem limit exceeded: Memory cgroup out of memory: Kill process 5 (python) "
            "score 1000 or sacrifice child"
        ),
        "host_cgroup",
        None,
    ),
    (
        "lsf mem",
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\nExited with exit code 137."),
        "host_cgroup",
        None,
    ),
    (
        "flux",
        (
            "29.475s: flux-shell[0]: ERROR: oom: Memory cgroup out of memory: killed 1 task on "
            "node7.\n"
            "29.563s: flux-shell[0]: ERROR: oom: memory.peak = 2.5G"
        ),
        "host_cgroup",
        None,
    ),
    (
        "condor",
        (
            "012 (998.000.000) 2024-03-01 10:00:00 Job was held.\n"
            "\tError from slot1_1@node3: Job has gone over cgroup memory limit of 4096 megabytes. "
            "Last measured usage: 3900 megabytes.  Consider resubmitting with a higher "
            "request_memory.\n"
            "\tCode 34 Subcode 102"
        ),
        "host_cgroup",
        None,
    ),
    (
        "condor2",
        ("Job has gone over memory limit of 2048 megabytes. Peak usage: 2090 megabytes."),
        "host_cgroup",
        None,
    ),
    (
        "yarn",
        (
            "24/03/01 10:00:00 ERROR YarnClusterScheduler: Lost executor 9 on node7: Container "
            "killed by YARN for exceeding memory limits. 7.2 GB of 4.2 GB physical memory used. "
            "Consider boosting spark.yarn.executor.memoryOverhead."
        ),
        "host_cgroup",
        None,
    ),
    (
        "yarn2",
        (
            "Container [pid=123,containerID=container_1] is running beyond physical memory "
            "limits. Current usage: 4.1 GB of 4 GB physical memory used; 5.0 GB of 8.4 GB "
            "virtual memory used. Killing container.\n"
            "Container exited with a non-zero exit code 143."
        ),
        "host_cgroup",
        None,
    ),
    (
        "kernel memcg",
        (
            "[ 7063.247407] python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, "
            "oom_score_adj=0\n"
            "[ 7063.2474] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allo"
            "wed=0,oom_memcg=/slurm/uid_1/job_9,task_memcg=/slurm/uid_1/job_9/step_0,task=python,"
            "pid=53214,uid=0\n"
            "[ 7063.247407] Memory cgroup out of memory: Killed process 53214 (python) "
            "total-vm:3149468kB, anon-rss:164992kB, file-rss:52176kB, shmem-rss:92kB"
        ),
        "host_cgroup",
        None,
    ),
    (
        "kernel global",
        (
            "2024-04-29T14:55:41,679685+02:00 "
            "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_o"
            "om,task_memcg=/user.slice/user-2.slice,task=perl,pid=14,uid=21\n"
            "2024-04-29T14:55:41,679700+02:00 Out of memory: Killed process 14 (perl) "
            "total-vm:87033376kB, anon-rss:60356340kB"
        ),
        "host_kernel",
        None,
    ),
    (
        "kernel old global",
        (
            "Mar 10 01:33:03 node62 kernel: Out of memory: Kill process 5577 (python) score 572 "
            "or sacrifice child\n"
            "Mar 10 01:33:03 node62 kernel: Killed process 5577, UID 500, (python) "
            "total-vm:8118236kB, anon-rss:8098448kB, file-rss:3264kB"
        ),
        "host_kernel",
        None,
    ),
    (
        "kernel old memcg",
        (
            "Task in /kubepods/burstable/pod1/c1 killed as a result of limit of "
            "/kubepods/burstable/pod1\n"
            "memory: usage 1048576kB, limit 1048576kB, failcnt 5\n"
            "Memory cgroup out of memory: Kill process 5577 (python) score 1572 or sacrifice "
            "child\n"
            "Killed process 5577 (python) total-vm:8118236kB"
        ),
        "host_cgroup",
        None,
    ),
    (
        "docker inspect true",
        ('"State": {\n  "Status": "exited",\n  "OOMKilled": true,\n  "ExitCode": 137,\n  "Error": ""\n}'),
        "host_cgroup",
        None,
    ),
    (
        "docker inspect false",
        ('"State": {\n  "Status": "exited",\n  "OOMKilled": false,\n  "ExitCode": 137,\n  "Error": ""\n}'),
        "none",
        "killed",
    ),
    (
        "docker inspect false1",
        ('"State": {\n  "Status": "exited",\n  "OOMKilled": false,\n  "ExitCode": 1,\n  "Error": ""\n}'),
        "none",
        None,
    ),
    (
        "docker oom event",
        (
            "2024-03-01T10:00:00.000000000Z container oom "
            "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef (image=train:1, "
            "name=job)\n"
            "2024-03-01T10:00:00.100000000Z container die 0123456789abcdef (exitCode=137, "
            "image=train:1)"
        ),
        "host_cgroup",
        None,
    ),
    (
        "k8s json",
        ('"containerStatuses":[{"lastState":{"terminated":{"exitCode":137,"reason":"OOMKilled"}},"restartCount":5}]'),
        "host_cgroup",
        None,
    ),
    (
        "k8s error137",
        (
            "    Last State:     Terminated\n"
            "      Reason:       Error\n"
            "      Exit Code:    137\n"
            "      Started:      Mon, 13 Nov 2023 03:48:52 +0100\n"
            "    Ready:          True"
        ),
        "none",
        "killed",
    ),
    (
        "k8s err1",
        (
            "    State:     Terminated\n"
            "      Reason:       Error\n"
            "      Exit Code:    1\n"
            "    Limits:\n"
            "      memory:  2Gi"
        ),
        "none",
        None,
    ),
    (
        "k8s evict",
        (
            "Status:         Failed\n"
            "Reason:         Evicted\n"
            "Message:        The node was low on resource: memory. Threshold quantity: 100Mi, "
            "available: 80Mi. Container train was using 30Gi, request is 10Gi, has larger "
            "consumption of memory."
        ),
        "host_kernel",
        None,
    ),
    (
        "k8s sysoom",
        ("Warning  SystemOOM  5m  kubelet  System OOM encountered, victim process: python, pid: 4242"),
        "host_kernel",
        None,
    ),
    (
        "systemd unit",
        (
            "Mar 01 10:00:00 host systemd[1]: train.service: A process of this unit has been "
            "killed by the OOM killer.\n"
            "Mar 01 10:00:00 host systemd[1]: train.service: Failed with result 'oom-kill'."
        ),
        "host_kernel",
        None,
    ),
    (
        "oomd",
        (
            "Dec 18 19:34:56 host7 systemd-oomd[840]: Killed /user.slice/user-1.slice/vte.scope "
            "due to memory pressure for /user.slice being 53.20% > 50.00% for > 20s with reclaim "
            "activity"
        ),
        "host_kernel",
        None,
    ),
    (
        "oomd2",
        ("Dec 18 19:34:57 host systemd[1837]: vte.scope: systemd-oomd killed 12 process(es) in this unit."),
        "host_kernel",
        None,
    ),
    (
        "oomd swap",
        (
            "systemd-oomd[840]: Killed /user.slice/app.scope due to memory used (15.1G) / total "
            "(15.5G) and swap used (7.8G) / total (8.0G) being more than 90.00%"
        ),
        "host_kernel",
        None,
    ),
    (
        "earlyoom",
        (
            "Feb 16 13:58:29 host earlyoom[1233]: low memory! at or below SIGTERM limits: mem "
            "10.00%, swap 10.00%\n"
            "Feb 16 13:58:29 host earlyoom[1233]: sending SIGTERM to process 31410 uid 1000 "
            '"python": badness 1264, VmRSS 21964 MiB'
        ),
        "host_kernel",
        None,
    ),
    (
        "earlyoom bare",
        (
            "low memory! at or below SIGTERM limits: mem 50 %, swap 10 %\n"
            'sending SIGTERM to process 13006 "python3": badness 209, VmRSS 2791 MiB'
        ),
        "host_kernel",
        None,
    ),
    (
        "earlyoom startup",
        (
            "mars 27 18:46:05 host earlyoom[1460]: earlyoom v1.6.2\n"
            "mars 27 18:46:05 host earlyoom[1460]: sending SIGTERM when mem <=  4.00% and swap "
            "<= 10.00%,\n"
            "mars 27 18:46:05 host earlyoom[1460]:         SIGKILL when mem <=  2.00% and swap "
            "<=  5.00%\n"
            "mem avail: 15342 of 15881 MiB (96.61%)"
        ),
        "none",
        None,
    ),
    (
        "ray2",
        (
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on "
            "memory.\n"
            "Memory on the node (IP: 10.1.0.7, ID: fc2) where the task (actor ID: f9, "
            "name=Env.__init__, pid=4331, memory used=2.22GB) was running was 60.12GB / 63.20GB "
            "(0.951), which exceeds the memory usage threshold of 0.95."
        ),
        "host_kernel",
        None,
    ),
    (
        "memfit's wall",
        (
            "cmd_0001 out_of_memory: it needs more than the 144.7 MiB that it had alone: ended at its wall by memfit, "
            "before the kernel would; raise that limit or make the job small"
        ),
        "host_cgroup",
        "out_of_memory",
    ),
    (
        "memfit's count of a stranger's kill",
        (
            "cmd_0001 failed: killed with SIGKILL by somebody else in phase train at a peak of 5.3 MiB: the oom_kill "
            "counter of its own group stayed at 0"
        ),
        "none",
        False,
        "train",
        None,
        "killed",
    ),
    (
        "ray 2.60",
        (
            "ray.exceptions.OutOfMemoryError: 2 worker(s) were killed due to the node running low on memory. Memory on "
            "the node (IP: 10.1.0.7, ID: fc2) was 60.12GB used / 63.20GB limit (0.951266), which exceeds"
        ),
        "host_kernel",
        "out_of_memory",
    ),
    (
        "ray summary",
        (
            "(raylet) [2025-12-07 09:57:19,206 E 400463 400463] (raylet) node_manager.cc:3277: 2 "
            "Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due "
            "to other reasons at node (ID: 8, IP: 10.2.0.9) over the last time period."
        ),
        "host_kernel",
        None,
    ),
    (
        "ray summary 0",
        (
            "(raylet) [2025-12-07 09:57:19,206 E 400463 400463] (raylet) node_manager.cc:3277: 0 "
            "Workers (tasks / actors) killed due to memory pressure (OOM), 1 Workers crashed due "
            "to other reasons at node (ID: 8) over the last time period."
        ),
        "none",
        None,
    ),
    (
        "ray1",
        (
            "ray.memory_monitor.RayOutOfMemoryError: More than 95% of the memory on node h1 is "
            "used (59.49 / 62.58 GB). The top 10 memory consumers are:"
        ),
        "host_kernel",
        None,
    ),
    (
        "dask new",
        (
            "2024-03-01 10:00:00,000 - distributed.nanny.memory - WARNING - Worker "
            "tcp://10.0.0.84:34111 (pid=958) exceeded 95% memory budget. Restarting..."
        ),
        "host_cgroup",
        None,
    ),
    (
        "dask warn",
        (
            "distributed.worker.memory - WARNING - Unmanaged memory use is high. This may "
            "indicate a memory leak or the memory may not be released to the OS; -- Unmanaged "
            "memory: 3.12 GiB -- Worker memory limit: 3.81 GiB\n"
            "distributed.worker.memory - WARNING - Worker is at 83% memory usage. Pausing "
            "worker.  Process memory: 3.17 GiB -- Worker memory limit: 3.81 GiB"
        ),
        "none",
        True,
        None,
        None,
        None,
    ),
    ("killed", ("Epoch 2 loss 0.5\nEpoch 3 loss 0.4\nKilled"), "host_kernel", False, "train", None, "killed"),
    (
        "elastic",
        (
            "W0213 torch/distributed/elastic/multiprocessing/api.py:851] Sending process 77 "
            "closing signal SIGTERM\n"
            "E0813 06:19:49.809000 161210 torch/distributed/elastic/multiprocessing/api.py:869] "
            "failed (exitcode: -9) local_rank: 2 (pid: 171717) of binary: /env/bin/python3.11\n"
            "traceback : Signal 9 (SIGKILL) received by PID 171717"
        ),
        "host_kernel",
        "killed",
    ),
    (
        "bpp",
        (
            "Traceback (most recent call last):\n"
            '  File "prep.py", line 12, in main\n'
            "    r = fut.result()\n"
            '  File "/usr/lib/python3.8/concurrent/futures/_base.py", line 12, in __get_result\n'
            "    raise self._exception\n"
            "concurrent.futures.process.BrokenProcessPool: A process in the process pool was "
            "terminated abruptly while the future was running or pending."
        ),
        "none",
        "killed",
    ),
    ("exit 137 docker compose", ("trainer-1 exited with code 137"), "none", False, None, None, "killed"),
    ("gitlab", ("ERROR: Job failed: command terminated with exit code 137"), "none", False, None, None, "killed"),
    (
        "worker killed",
        (
            "Traceback (most recent call last):\n"
            '  File "train.py", line 12, in train\n'
            "    for i, b in enumerate(loader):\n"
            '  File "/opt/env/lib/python3.10/site-packages/torch/utils/data/_utils/signal_handlin'
            'g.py", line 12, in handler\n'
            "    _error_if_any_worker_fails()\n"
            "RuntimeError: DataLoader worker (pid 1777) is killed by signal: Killed. "
        ),
        "host_kernel",
        False,
        "load",
        None,
        "killed",
    ),
]


def full(case):
    """A case's text, kind, whether it was survived, phase, size and cause; a short one has only text, kind, cause."""
    return case[1:] if len(case) == 7 else (*case[1:3], False, None, None, case[3])


@pytest.mark.parametrize(
    ("text", "kind", "recovered", "phase", "tried", "cause"), [full(case) for case in CASES], ids=[c[0] for c in CASES]
)
def test_the_text_gives_kind_phase_figure_and_cause(text, kind, recovered, phase, tried, cause):
    found = look(text)
    assert (found.kind, found.recovered) == (kind, recovered)
    assert found.oom == (kind != "none")
    assert phase is None or found.phase == phase
    assert cause is None or found.cause == cause
    if tried is None:
        assert "tried" not in found.figures
    else:
        assert found.figures["tried"] / 2**30 == pytest.approx(tried, rel=1e-3)


HYDRA = "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 4822 RUNNING AT n1\n=   {}\n=   CLEANING UP"


@pytest.mark.parametrize(
    "text",
    [
        HYDRA.format("KILLED BY SIGNAL: 9 (Killed)"),
        HYDRA.format("EXIT CODE: 9"),
        HYDRA.format("EXIT CODE: 137"),
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
        "mpirun noticed that process rank 3 with PID 4822 on node n1 exited on signal 9 (Killed).",
        "INFO - Task exited with return code Negsignal.SIGKILL",
        "Container killed on request. Exit code is 137",
    ],
)
def test_launchers_name_the_signal_and_nobody_who_sent_it(text):
    found = look(f"epoch 1 step 4/10 loss 0.2\n{text}")
    assert (found.cause, found.phase, found.recovered) == ("killed", "train", False)
    assert found.confidence <= 0.5


@pytest.mark.parametrize(("code", "cause"), [(139, "unknown"), (1, "unknown"), (99, "unknown")])
def test_another_exit_code_of_hydra_is_no_kill(code, cause):
    assert look(HYDRA.format(f"EXIT CODE: {code}")).cause == cause


@pytest.mark.parametrize(
    ("text", "used", "limit"),
    [
        (
            'job 48.1 exceeds job hard limit "h_vmem" of queue "all.q@n1" (17245302784.00000 > limit:17179869184.00000)'
            " - sending SIGKILL",
            17245302784,
            17179869184,
        ),
        ("Job has gone over memory limit of 4096 megabytes. Peak usage: 4128 megabytes.", 4128 << 20, 4096 << 20),
        (
            "Job has gone over cgroup memory limit of 64 megabytes. Last measured usage: 65 megabytes.",
            65 << 20,
            64 << 20,
        ),
        ("Job was held: memory usage exceeded request_memory", None, None),
        (
            "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: Container killed by YARN "
            "for exceeding memory limits. 5.5 GB of 5.0 GB physical memory used.",
            int(5.5 * 2**30),
            5 << 30,
        ),
        (
            "Essential container exited. OutOfMemoryError: Container killed due to memory usage. Exit Code 137",
            None,
            None,
        ),
        ("Container 'train' was OOM killed", None, None),
        ("Cgroup memory limit exceeded: Killed process 4822, UID 1001, (python) total-vm:8kB", None, None),
    ],
)
def test_schedulers_kill_at_their_limit_with_their_figures(text, used, limit):
    found = look(text)
    assert (found.oom, found.kind, found.cause) == (True, "host_cgroup", "out_of_memory")
    values = found.findings[0].values
    assert (values.get("used_bytes"), values.get("limit_bytes")) == (used, limit)


def test_a_node_under_pressure_evicts():
    assert look("Warning  Evicted  pod/a  The node had condition: [MemoryPressure].").kind == "host_kernel"
