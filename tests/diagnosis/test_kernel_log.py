"""The out-of-memory killer's blocks, of old kernels and new ones; the last test makes real kills and reads them back."""

import json
import re
import subprocess
import sys

import pytest

from reading import look, proof

MIB = 1 << 20
GROUP = "/slurm/uid_0/job_2/step_1"
TABLE = """\
Tasks state (memory values in pages):
[  pid  ]   uid  tgid total_vm      rss rss_anon rss_file rss_shmem pgtables_bytes swapents oom_score_adj name
[  29205]     0 29205    39054     1426      226     1200         0    98304        0         -1000 slurmstepd
[  29214]     0 29214    44330    39302    38000     1302         0   266240       10             0 pt_data worker
[  29215]     0 29215    44330    39924    38462     1462         0   266240        0             0 python3
"""


def block(limit=GROUP, victim=f"{GROUP}/task_1", constraint="CONSTRAINT_MEMCG", shmem=0, pid=29215):
    """A block of a kernel since 4.19; of the machine's memory when no limit is named."""
    lines = ["kworker/3:1 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0"]
    lines += ["CPU: 0 UID: 0 PID: 1 Comm: kworker Not tainted", "Call Trace:", " dump_header+0x43/0x1c0"]
    if limit:
        lines += [" mem_cgroup_out_of_memory+0xc0/0x110", "memory: usage 307200kB, limit 307200kB, failcnt 85"]
        lines += [f"Memory cgroup stats for {limit}:", "anon 104546304", f"shmem {shmem}"]
    else:
        lines += ["Mem-Info:", "active_anon:1 inactive_anon:5961734 isolated_anon:0"]
    lines += TABLE.splitlines()
    whose = f"oom_memcg={limit}," if limit else "global_oom,"
    lines += [
        f"oom-kill:constraint={constraint},nodemask=(null),cpuset=/,mems_allowed=0,{whose}task_memcg={victim},task=python3,pid={pid},uid=0"
    ]
    head = "Memory cgroup out of memory" if limit else "Out of memory"
    lines += [
        f"{head}: Killed process {pid} (python3) total-vm:177320kB, anon-rss:153848kB, file-rss:5848kB, shmem-rss:0kB, UID:0 pgtables:260kB oom_score_adj:0"
    ]
    return lines


def as_dmesg(lines):
    return "\n".join(f"[{63596 + place / 1000:12.6f}] {line}" for place, line in enumerate(lines))


def as_dated(lines):
    return "\n".join(f"[Sat Nov 21 21:21:57 2026] {line}" for line in lines)


def as_syslog(lines):
    return "\n".join(
        f"Nov 21 21:21:57 node1 kernel: [{63596 + place / 1000:.6f}] {line}" for place, line in enumerate(lines)
    )


def as_iso_journal(lines):
    return "\n".join(f"2026-11-21T21:21:57+0000 node1 kernel: {line}" for line in lines)


def as_json_journal(lines):
    return "\n".join(
        json.dumps({"MESSAGE": line, "__REALTIME_TIMESTAMP": "1795296117000000", "_TRANSPORT": "kernel"})
        for line in lines
    )


def as_dmesg_json(lines):
    return json.dumps({"dmesg": [{"pri": 4, "time": 63596.3, "msg": line} for line in lines]}, indent=3)


def as_cloud_list(lines):
    return json.dumps([{"textPayload": f"[63596.304381] {line}\r\n", "severity": "INFO"} for line in lines], indent=2)


def as_kmsg(lines):
    return "\n".join(f"4,{place},63596304381,-;{line}" for place, line in enumerate(lines))


FORMS = [
    as_dmesg,
    as_dated,
    as_syslog,
    as_iso_journal,
    as_json_journal,
    as_dmesg_json,
    as_cloud_list,
    as_kmsg,
    "\n".join,
]


def told(text):
    """What a diagnosis says of a job that was killed, by this kernel's log."""
    return look("Killed\n", kernel_log=text)


def scope(found):
    """Whose memory ran out, by the arithmetic."""
    return re.search(r"\(per (.*?)\)|one process", found.arithmetic[0])[1]


@pytest.mark.parametrize("form", FORMS)
def test_a_block_is_read_in_whatever_form_loggers_give_it(form):
    text = form(block())
    found = told(text)
    assert (found.kind, found.where["pid"], scope(found)) == ("host_cgroup", 29215, "group above it")
    assert found.figures == {"used": 300 * MIB, "limit": 300 * MIB}
    line = next(line for file, line in proof(found) if file == "kernel")
    assert "Killed process 29215" in text.splitlines()[line - 1]


def test_the_date_of_dmesg_is_the_time_of_a_kill():
    assert "Sat Nov 21 21:21:57 2026" in [one.time for one in told(as_dated(block())).timeline]


@pytest.mark.parametrize(
    ("lines", "words", "kind"),
    [
        (block(limit=GROUP, victim=GROUP), "group", "host_cgroup"),
        (block(limit="/slurm", victim=GROUP), "group above it", "host_cgroup"),
        (block(limit="", constraint="CONSTRAINT_NONE"), None, "host_kernel"),
        (block(limit="", constraint="CONSTRAINT_CPUSET"), None, "host_kernel"),
        (["Memory cgroup out of memory: Killed process 7 (a) total-vm:8kB, anon-rss:4kB"], None, "host_cgroup"),
        (["Out of memory: Killed process 7 (a) total-vm:8kB, anon-rss:4kB"], None, "host_kernel"),
        (["Killed process 7 (a) total-vm:8kB, anon-rss:4kB"], None, "host_kernel"),
    ],
)
def test_whose_memory_ran_out_is_told_by_the_constraint_and_else_by_the_words(lines, words, kind):
    found = told(as_dmesg(lines))
    assert (found.kind, scope(found)) == (kind, words)


def test_a_victim_that_lives_in_a_group_is_still_killed_for_the_machine():
    """task_memcg says where it lived, and nothing of whose limit was met."""
    found = look("Killed\nStepId=2.0\n", kernel_log=as_dmesg(block(limit="", constraint="CONSTRAINT_NONE")))
    assert (found.kind, found.confidence) == ("host_kernel", "proved")
    assert found.figures == {"used": (153848 + 5848) << 10}


def test_two_lines_of_an_old_kernel_are_one_kill_with_its_own_victim():
    text = as_syslog(
        [
            "java invoked oom-killer: gfp_mask=0xd0, order=0, oom_score_adj=0",
            "java cpuset=1e47 mems_allowed=0",
            "Task in /docker/" + "ab" * 32 + " killed as a result of limit of /docker/" + "ab" * 32,
            "memory: usage 1048576kB, limit 1048576kB, failcnt 34667727",
            "Memory cgroup stats for /docker/"
            + "ab" * 32
            + ": cache:760KB rss:964552KB rss_huge:0KB shmem:512KB mapped_file:0KB",
            "[ pid ]   uid  tgid total_vm      rss nr_ptes nr_pmds swapents oom_score_adj name",
            "[28573]     0 28573    28100    26296      66       3        0             0 java",
            "Memory cgroup out of memory: Kill process 24572 (java) score 968 or sacrifice child",
            "Killed process 28573 (java), UID 0, total-vm:112400kB, anon-rss:45563kB, file-rss:0kB, shmem-rss:0kB",
        ]
    )
    found = told(text)
    assert (found.where["pid"], scope(found), found.figures["limit"]) == (28573, "group", 1 << 30)
    inside = look("run.sh: line 2:  17 Killed   java\n", kernel_log=text)  # a container numbers its processes itself
    assert (inside.kind, inside.confidence) == ("host_cgroup", "likely")


def test_a_whole_group_that_goes_shares_its_cause_and_the_next_block_does_not():
    first = block()
    first += [f"Tasks in {GROUP} are going to be killed due to memory.oom.group set"]
    first += ["Memory cgroup out of memory: Killed process 29214 (pt_data worker) total-vm:8kB, anon-rss:4kB"]
    first.insert(-3, first.pop(-2))  # the kernel announces it before the first victim
    log = as_dmesg([*first, *block(limit="", constraint="CONSTRAINT_NONE", pid=31)])
    for pid, kind in ((29215, "host_cgroup"), (29214, "host_cgroup"), (31, "host_kernel")):
        found = look(f"run.sh: line 2:  {pid} Killed   python\n", kernel_log=log)
        assert (found.kind, found.where["pid"], found.confidence) == (kind, pid, "proved")


@pytest.mark.parametrize(
    "group",
    ["/slurm/uid_1000/job_273202/step_batch", "/system.slice/slurmstepd.scope/job_273202/step_0/user/task_3"],
)
def test_a_groups_path_tells_whose_job_it_was(group):
    lines = as_dmesg(block(limit=group, victim=group))
    assert look("Killed\nStepId=273202.0\n", kernel_log=lines).confidence == "proved"
    assert look("Killed\nStepId=8.0\n", kernel_log=lines).cause == "killed"


@pytest.mark.parametrize(
    ("group", "cause"),
    [
        ("/system.slice/docker-" + "0a" * 32 + ".scope", "out_of_memory"),
        ("/libpod_parent/libpod-" + "0a" * 32, "out_of_memory"),
        ("/kubepods.slice/kubepods-podeded8c65_6e8e_4c6e_a889_3e427565c740.slice", "out_of_memory"),
        ("/memfit-run_1/job-fold_3", "killed"),
        ("/system.slice/train.service", "killed"),
    ],
)
def test_outside_of_a_container_the_process_must_be_the_one_that_died(group, cause):
    lines = as_dmesg(block(limit=group, victim=group))
    assert look("run.sh: line 2:  17 Killed   python\n", kernel_log=lines).cause == cause


def test_words_that_only_look_like_a_kill_are_none():
    text = "Killing subprocess 7\nkilled process group\n[ 1.0] oom_reaper: reaped process 7 (a)\nbedroom-killer: 3\nOut of memory handling tests passed"
    assert told(text).cause == "killed"


def test_a_real_kill_is_read_back_from_the_kernels_own_log(memory_group):
    group = memory_group(64 * MIB)
    inner = memory_group(256 * MIB, parent=group)
    hog = f"open({str(inner / 'cgroup.procs')!r}, 'w').write('0'); b = bytearray(200 << 20); b[::4096] = bytes(len(b) // 4096)"
    done = subprocess.Popen([sys.executable, "-S", "-c", hog])
    assert done.wait(30) == -9
    shown = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
    if f"{inner.name},task=" not in shown or f"Killed process {done.pid} " not in shown:
        pytest.skip("the kernel's log is not readable, or numbers processes of another namespace")
    found = look(f"run.sh: line 2:  {done.pid} Killed   python\n", kernel_log=shown)
    assert (found.where["pid"], scope(found)) == (done.pid, "group above it")
    assert re.search(rf"oom_memcg=\S*{group.name},", " ".join(one.text for one in found.evidence))
    assert found.figures == {"used": 64 * MIB, "limit": 64 * MIB}
