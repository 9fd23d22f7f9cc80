"""Control groups in trees made for the purpose: each file counts, with numbers that no other file has."""

import pytest

from memfit.memory import Budget, locate, memory_group, oom_kills_above
from memfit.units import GIB, MIB

V2 = "30 25 0:27 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1 = "".join(
    f"3{number} 25 0:2{number} / /sys/fs/cgroup/{name} {how},relatime - cgroup cgroup rw,{name}\n"
    for number, (name, how) in enumerate([("memory", "ro"), ("cpu", "rw")])
)
HOST = {
    "proc/meminfo": "".join(
        f"{name}: {size << 20} kB\n"
        for name, size in [("MemTotal", 64), ("MemAvailable", 60), ("SwapTotal", 20), ("SwapFree", 19)]
    ),
    "proc/self/status": "Pid:\t77\nCpus_allowed_list:\t0-15\n",
}
UNITS = "/user.slice/user@7.service/app.scope"
#: Powers of two in KiB: of a sum it can be said what is in it.
STAT = (
    "anon", "shmem", "sock", "hugetlb", "kernel_stack", "pagetables", "sec_pagetables", "percpu", "vmalloc",
    "slab_unreclaimable", "zswap", "file", "slab_reclaimable", "slab", "inactive_anon",
)  # fmt: skip
#: The last four are freed by reclaim, or counted in others.
UNITS_USED = sum(1024 << number for number in range(len(STAT) - 4))


def pairs(**sizes):
    return "".join(f"{name} {size}\n" for name, size in sizes.items())


def made(folder, files):
    for name, text in (HOST | files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if isinstance(text, str) else f"{text}\n")
    return folder


@pytest.fixture
def units(tmp_path):
    """Version 2: a scope in a service in a slice."""
    top = "sys/fs/cgroup"
    return made(
        tmp_path,
        {
            "proc/self/cgroup": f"1:name=systemd:/\n0::{UNITS} (deleted)\n",
            "proc/self/mountinfo": V2.format(root="/"),
            f"{top}{UNITS}/memory.max": "max",
            f"{top}{UNITS}/memory.high": 3 * GIB,
            f"{top}{UNITS}/memory.stat": pairs(**{name: 1024 << number for number, name in enumerate(STAT)}),
            f"{top}{UNITS}/memory.current": 2 * GIB,
            f"{top}{UNITS}/memory.swap.max": 1 * GIB,
            f"{top}{UNITS}/memory.swap.current": 300 * MIB,
            f"{top}{UNITS}/cpu.max": "350000 100000",
            f"{top}/user.slice/user@7.service/memory.max": 8 * GIB,
            f"{top}/user.slice/user@7.service/memory.current": 1 * GIB,
            f"{top}/user.slice/user@7.service/memory.swap.max": 2 * GIB,
            f"{top}/user.slice/user@7.service/memory.events": "oom_kill 2",
            f"{top}/user.slice/user@7.service/cpu.max": "max 100000",
            f"{top}/user.slice/memory.max": 16 * GIB,
            f"{top}/user.slice/memory.stat": pairs(anon=1000, kernel=500, slab_reclaimable=200, kernel_stack=70),
            f"{top}/user.slice/cpu.max": "125000 50000",
            f"{top}/user.slice/memory.events": "oom 5\noom_kill 3",
        },
    )


def job_tree(folder, **more):
    """Version 1 beside an empty version 2: a Slurm job whose limit lies above what is mounted."""
    top = "sys/fs/cgroup/memory"
    job = f"{top}/slurm/uid_7/job_42"
    return made(
        folder,
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/\n4:memory:/slurm/uid_7/job_42\n0::/x\n",
            "proc/self/mountinfo": V1 + V2.format(root="/").replace("cgroup rw", "cgroup/unified rw"),
            "sys/fs/cgroup/unified/x/memory.max": 1 * MIB,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": 450000,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
            f"{top}/release_agent": "",
            f"{top}/memory.stat": pairs(total_shmem=3 * MIB, total_swap=60 * MIB),
            f"{job}/memory.limit_in_bytes": 4 * GIB,
            f"{job}/memory.memsw.limit_in_bytes": 5 * GIB,
            f"{job}/memory.usage_in_bytes": 3 * GIB,
            f"{job}/memory.kmem.usage_in_bytes": 10 * MIB,
            f"{job}/memory.stat": pairs(
                total_rss=200 * MIB,
                total_shmem=30 * MIB,
                total_swap=100 * MIB,
                hierarchical_memory_limit=2 * GIB,
                hierarchical_memsw_limit=3 * GIB,
            ),
            f"{top}/slurm/uid_7/memory.limit_in_bytes": 9223372036854771712,
            f"{top}/slurm/uid_7/memory.memsw.limit_in_bytes": 6 * GIB,
            f"{top}/slurm/uid_7/memory.usage_in_bytes": 700 * MIB,
            f"{top}/slurm/memory.limit_in_bytes": 8 * GIB,
            f"{top}/slurm/memory.stat": pairs(
                total_rss=2 * GIB, total_active_anon=1 * GIB, total_inactive_anon=1100 * MIB, total_swap=50 * MIB
            ),
            **more,
        },
    )


def group_limits(tree):
    limits = Budget.read(root=tree, env={}).limits
    return [(one.name, one.source, one.limit_bytes, one.used_bytes, one.note) for one in limits if one.scope == "group"]


def test_each_group_of_version_2_shows_its_limits_and_what_reclaim_cannot_free(units):
    throttle = "above it the kernel throttles and reclaims, it does not kill"
    source = "cgroup v2 {} (systemd unit {})".format
    assert group_limits(units) == [
        ("memory.high", source(UNITS, "app.scope"), 3 * GIB, UNITS_USED, throttle),
        ("memory.max", source("/user.slice/user@7.service", "user@7.service"), 8 * GIB, 1 * GIB, ""),
        ("memory.max", source("/user.slice", "user.slice"), 16 * GIB, 1300, ""),
    ]


def test_the_smallest_quota_and_the_smallest_swap_of_version_2_count(units):
    budget = Budget.read(root=units, env={})
    assert (budget.num_cpus, budget.cpus_source) == (
        2,
        "CPU quota 2.5 of cgroup v2 /user.slice (systemd unit user.slice)",
    )
    source = f"memory.swap.max of cgroup v2 {UNITS} (systemd unit app.scope)"
    assert (budget.swap.usable_bytes, budget.swap.source) == (724 * MIB, source)
    path = units / f"sys/fs/cgroup{UNITS}/memory.swap.max"
    path.write_text("max\n")
    source = "memory.swap.max of cgroup v2 /user.slice/user@7.service (systemd unit user@7.service)"
    swap = Budget.read(root=units, env={}).swap
    assert (swap.usable_bytes, swap.source) == (2 * GIB, source)
    path.write_text("4096\n")  # less than is used
    assert Budget.read(root=units, env={}).swap.usable_bytes == 0


def test_each_group_of_version_1_shows_its_limits_and_those_hidden_above_it(tmp_path):
    job, uid, top = (f"cgroup v1 /slurm{path}" for path in ("/uid_7/job_42 (Slurm job 42)", "/uid_7", ""))
    hidden = (
        "cgroup v1, a group hidden above /",
        "set above the groups that are visible here; what others below it use is not known",
    )
    swapping = "memory and swap together"
    assert sorted(group_limits(job_tree(tmp_path))) == sorted(
        [
            ("memory.limit_in_bytes", job, 4 * GIB, 240 * MIB, ""),
            ("memory.limit_in_bytes", top, 8 * GIB, 2124 * MIB, ""),
            ("hierarchical_memory_limit", hidden[0], 2 * GIB, 3 * MIB, hidden[1]),
            ("memory.memsw.limit_in_bytes", job, 5 * GIB, 340 * MIB, swapping),
            ("memory.memsw.limit_in_bytes", uid, 6 * GIB, 700 * MIB, swapping),
            ("hierarchical_memsw_limit", hidden[0], 3 * GIB, 103 * MIB, hidden[1]),
        ]
    )


@pytest.mark.parametrize("limit", [4, 5])
def test_a_limit_of_version_1_that_a_visible_group_sets_is_not_shown_twice(tmp_path, limit):
    stat = pairs(total_rss=1, hierarchical_memory_limit=limit * GIB, hierarchical_memsw_limit=limit * GIB + GIB)
    tree = job_tree(tmp_path, **{"sys/fs/cgroup/memory/slurm/uid_7/job_42/memory.stat": stat})
    names = [name for name, *_ in group_limits(tree)]
    assert sorted(names) == ["memory.limit_in_bytes"] * 2 + ["memory.memsw.limit_in_bytes"] * 2


def test_the_swap_of_version_1_is_what_both_together_may_take_beyond_memory(tmp_path):
    uid = "sys/fs/cgroup/memory/slurm/uid_7/memory.{}limit_in_bytes".format
    for name, size, usable, group in (
        (uid(""), 2 * GIB, 924 * MIB, "/uid_7/job_42 (Slurm job 42)"),
        (uid(""), 9223372036854771712, 0, "/uid_7"),  # memory alone may take all
        (uid(""), 6 * GIB - 7, 7, "/uid_7"),
        (uid(""), 6 * GIB + 1, 0, "/uid_7"),
    ):
        swap = Budget.read(root=job_tree(tmp_path, **{name: size}), env={}).swap
        assert (swap.usable_bytes, swap.source) == (
            usable,
            f"memory.memsw.limit_in_bytes of cgroup v1 /slurm{group}",
        )


def test_a_quota_of_version_1_is_its_quota_by_its_period(tmp_path):
    budget = Budget.read(root=job_tree(tmp_path), env={})
    assert (budget.num_cpus, budget.cpus_source) == (4, "CPU quota 4.5 of cgroup v1 /")
    for name, text in (("quota", "-1"), ("period", "")):
        tree = job_tree(tmp_path, **{f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us": text})
        assert Budget.read(root=tree, env={}).num_cpus == 16


def place(tree, controller="memory", pid=None):
    found = locate(tree, controller, pid)
    groups = [(one.path, one.directory.relative_to(tree / "sys/fs/cgroup").as_posix()) for one in found.groups]
    return found.version, groups, found.hidden, found.read_only, found.pid


def test_version_1_has_a_controller_where_it_is_mounted_and_the_process_is_in_it(tmp_path):
    tree = job_tree(tmp_path)
    groups = [(f"/{path}", f"memory/{path}".rstrip("/")) for path in ("slurm/uid_7/job_42", "slurm/uid_7", "slurm", "")]
    assert place(tree) == (1, groups, False, True, 77)
    assert place(tree, "cpu") == (1, [("/", "cpu")], True, False, 77)  # no release_agent: it is not the root
    assert place(tree, "pids") == (2, [("/x", "unified/x"), ("/", "unified")], False, False, 77)
    assert memory_group(root=tree) == tree / "sys/fs/cgroup/memory/slurm/uid_7/job_42"
    made(tree, {"proc/self/cgroup": "4:memory:/slurm\n"})
    assert locate(tree, "cpu") is None
    made(tree, {"proc/self/cgroup": "0::/x\n", "proc/self/mountinfo": ""})
    assert locate(tree, "memory") is None and memory_group(root=tree) is None


@pytest.mark.parametrize(
    ("path", "mounts", "procs", "groups"),
    [
        # The path as the host names it, in a container that sees its own part.
        ("/docker/abc/in", ["/docker/abc"], {}, [("/docker/abc/in", "in"), ("/docker/abc", ".")]),
        # A path of another namespace: where the members are.
        ("/other", ["/"], {"a/b": "12 77"}, [("/a/b", "a/b"), ("/a", "a"), ("/", ".")]),
        ("/../../in", ["/.."], {"in": "177", "a": "77"}, [("/../a", "a"), ("/..", ".")]),
        # Of two mounts the one that shows more, unless the process is not below it.
        ("/docker/in", ["/docker", "/"], {}, [("/docker/in", "docker/in"), ("/docker", "docker"), ("/", ".")]),
        ("/docker/in", ["/docker", "/elsewhere"], {}, [("/docker/in", "in"), ("/docker", ".")]),
        # Nowhere: the top is all that is known.
        ("/other", ["/"], {"a": "78"}, [("/", ".")]),
    ],
)
def test_the_group_is_found_by_its_path_or_by_its_members(tmp_path, path, mounts, procs, groups):
    points = ["/sys/fs/cgroup", "/sys/fs/cgroup/second"]
    lines = [V2.format(root=root).replace("/sys/fs/cgroup", point) for root, point in zip(mounts, points, strict=False)]
    tree = made(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}",
            "proc/self/mountinfo": "".join(lines),
            "sys/fs/cgroup/cgroup.type": "domain",
            "sys/fs/cgroup/second/cgroup.type": "domain",
            "sys/fs/cgroup/in/memory.max": "max",
            "sys/fs/cgroup/second/docker/in/memory.max": "max",
            **{f"sys/fs/cgroup/{folder}/cgroup.procs": text for folder, text in procs.items()},
        },
    )
    second = len(mounts) > 1 and mounts[1] == "/"
    there = [
        (name, f"second/{folder}" if folder != "." else "second") if second else (name, folder)
        for name, folder in groups
    ]
    assert place(tree) == (2, there, True, False, 77)


def test_another_process_is_looked_up_by_its_own_files(units):
    made(units, {"proc/12/cgroup": "0::/user.slice\n", "proc/12/status": "Name:\tx\n"})
    assert place(units, pid=12) == (2, [("/user.slice", "user.slice"), ("/", ".")], False, False, 0)


def test_kills_are_counted_up_to_the_last_group_that_counts(units):
    scope = units / f"sys/fs/cgroup{UNITS}"
    service, slice_ = scope.parent, scope.parent.parent
    assert oom_kills_above(scope) == {service: 2, slice_: 3}
    made(units, {"memory.events": "oom_kill 9", f"sys/fs/cgroup{UNITS}/memory.oom_control": "under_oom 0\noom_kill 4"})
    assert oom_kills_above(scope) == {scope: 4, service: 2, slice_: 3}  # nothing above the top is a group
