"""The out-of-memory killer's blocks, of old kernels and new ones; the last test makes real kills and reads them back."""

import json
import re
import subprocess
import sys

import pytest

from memfit.diagnosis._kernel_log import find_kills, owner_of, read_kernel_lines

MIB = 1 << 20
GROUP = "/slurm/uid_0/job_2/step_1"
TABLE = """\
Tasks state (memory values in pages):
[  pid  ]   uid  tgid total_vm      rss rss_anon rss_file rss_shmem pgtables_bytes swapents oom_score_adj name
[  29205]     0 29205    39054     1426      226     1200         0    98304        0         -1000 slurmstepd
[  29214]     0 29214    44330    39302    38000     1302         0   266240       10             0 pt_data worker
[  29215]     0 29215    44330    39924    38462     1462         0   266240        0             0 python3
"""


def block(limit=GROUP, victim=f"{GROUP}/task_1", constraint="CONSTRAINT_MEMCG", shmem=0):
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
        f"oom-kill:constraint={constraint},nodemask=(null),cpuset=/,mems_allowed=0,{whose}task_memcg={victim},task=python3,pid=29215,uid=0"
    ]
    head = "Memory cgroup out of memory" if limit else "Out of memory"
    lines += [
        f"{head}: Killed process 29215 (python3) total-vm:177320kB, anon-rss:153848kB, file-rss:5848kB, shmem-rss:0kB, UID:0 pgtables:260kB oom_score_adj:0"
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


def only(text):
    kills = find_kills(read_kernel_lines(text, "kern.log"))
    assert len(kills) == 1
    return kills[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_block_is_read_in_whatever_form_loggers_give_it(form):
    text = form(block())
    kill = only(text)
    values = {**kill.values, "owner": kill.values["owner"]["task"]}
    assert values == {
        "who": "the kernel", "pid": 29215, "task": "python3", "scope": "ancestor", "owner": "1",
        "used_bytes": 300 * MIB, "limit_bytes": 300 * MIB,
    }  # fmt: skip
    assert "Killed process 29215" in text.splitlines()[kill.lines[0].number - 1]


def test_the_date_of_dmesg_is_the_time_of_a_kill():
    assert only(as_dated(block())).lines[0].time == "Sat Nov 21 21:21:57 2026"


@pytest.mark.parametrize(
    ("lines", "scope", "kind"),
    [
        (block(limit=GROUP, victim=GROUP), "own_group", "cgroup_kill"),
        (block(limit="/slurm", victim=GROUP), "ancestor", "cgroup_kill"),
        (block(limit="", constraint="CONSTRAINT_NONE"), "global", "global_kill"),
        (block(limit="", constraint="CONSTRAINT_CPUSET"), "cpuset", "global_kill"),
        (["Memory cgroup out of memory: Killed process 7 (a) total-vm:8kB, anon-rss:4kB"], "group", "cgroup_kill"),
        (["Out of memory: Killed process 7 (a) total-vm:8kB, anon-rss:4kB"], "global", "global_kill"),
        (["Killed process 7 (a) total-vm:8kB, anon-rss:4kB"], "unknown", "oom_kill"),
    ],
)
def test_whose_memory_ran_out_is_told_by_the_constraint_and_else_by_the_words(lines, scope, kind):
    kill = only(as_dmesg(lines))
    assert (kill.values["scope"], kill.name) == (scope, kind)


def test_a_victim_that_lives_in_a_group_is_still_killed_for_the_machine():
    """task_memcg says where it lived, and nothing of whose limit was met."""
    kill = only(as_dmesg(block(limit="", constraint="CONSTRAINT_NONE")))
    assert (kill.values["scope"], kill.values["owner"]["job"]) == ("global", "2")
    assert "limit_bytes" not in kill.values and kill.values["used_bytes"] == (153848 + 5848) << 10


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
    kill = only(text)
    assert [kill.values[name] for name in ("pid", "scope", "limit_bytes")] == [28573, "own_group", 1 << 30]
    assert kill.values["owner"] == {"who": "docker", "container": "ab" * 32}


def test_a_whole_group_that_goes_shares_its_cause_and_the_next_block_does_not():
    first = block()
    first += [f"Tasks in {GROUP} are going to be killed due to memory.oom.group set"]
    first += ["Memory cgroup out of memory: Killed process 29214 (pt_data worker) total-vm:8kB, anon-rss:4kB"]
    first.insert(-3, first.pop(-2))  # the kernel announces it before the first victim
    kills = find_kills(read_kernel_lines(as_dmesg([*first, *block(limit="", constraint="CONSTRAINT_NONE")])))
    assert [(kill.values["pid"], kill.values["scope"]) for kill in kills] == [
        (29215, "ancestor"),
        (29214, "ancestor"),
        (29215, "global"),
    ]


@pytest.mark.parametrize(
    ("group", "owner"),
    [
        ("/slurm/uid_1000/job_273202/step_batch", {"who": "slurm", "job": "273202", "step": "batch"}),
        (
            "/system.slice/slurmstepd.scope/job_7/step_0/user/task_3",
            {"who": "slurm", "job": "7", "step": "0", "task": "3"},
        ),
        ("/system.slice/docker-" + "0a" * 32 + ".scope", {"who": "docker", "container": "0a" * 32}),
        ("/libpod_parent/libpod-" + "0a" * 32, {"who": "podman", "container": "0a" * 32}),
        (
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podeded8c65_6e8e_4c6e_a889_3e427565c740.slice/cri-containerd-"
            + "0a" * 32
            + ".scope",
            {"who": "kubernetes", "pod": "eded8c65_6e8e_4c6e_a889_3e427565c740", "container": "0a" * 32},
        ),
        ("/memfit-run_1/job-fold_3", {"who": "memfit", "job": "fold_3"}),
        ("/system.slice/train.service", {"who": "systemd", "unit": "train.service"}),
        ("/user.slice", {}),
    ],
)
def test_a_groups_path_tells_whose_job_it_was(group, owner):
    assert owner_of(group) == owner


def test_words_that_only_look_like_a_kill_are_none():
    text = "Killing subprocess 7\nkilled process group\n[ 1.0] oom_reaper: reaped process 7 (a)\nbedroom-killer: 3\nOut of memory handling tests passed"
    assert find_kills(read_kernel_lines(text)) == []


def test_a_real_kill_is_read_back_from_the_kernels_own_log(memory_group):
    group = memory_group(64 * MIB)
    inner = memory_group(256 * MIB, parent=group)
    hog = f"open({str(inner / 'cgroup.procs')!r}, 'w').write('0'); b = bytearray(200 << 20); b[::4096] = bytes(len(b) // 4096)"
    done = subprocess.Popen([sys.executable, "-S", "-c", hog])
    assert done.wait(30) == -9
    shown = subprocess.run(["dmesg"], capture_output=True, text=True, check=False)
    kills = [
        kill
        for kill in find_kills(read_kernel_lines(shown.stdout))
        if kill.values["pid"] == done.pid and f"{inner.name},task=" in kill.text
    ]
    if not kills:
        pytest.skip("the kernel's log is not readable, or numbers processes of another namespace")
    assert kills[-1].values["scope"] == "ancestor"
    assert re.search(rf"oom_memcg=\S*{group.name},", kills[-1].text)
    assert (kills[-1].values["limit_bytes"], kills[-1].values["used_bytes"]) == (64 * MIB, 64 * MIB)
