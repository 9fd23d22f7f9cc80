"""Budgets: in every recorded tree, and for real in a nested group and in a container."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from memfit.errors import UsageError
from memfit.memory import Budget

RECORDED = Path(__file__).parents[1] / "recorded"
#: Per tree the binding limit, as ``tests/recorded/README.md`` says.
EXPECTED = json.loads((RECORDED / "expected.json").read_text())
GIB, MIB = 1 << 30, 1 << 20


def read(tree, **options):
    return Budget.read(root=RECORDED / tree, **{"env": {}, **options})


@pytest.mark.proves("S0-02")
@pytest.mark.parametrize("tree", EXPECTED)
def test_in_each_recorded_tree_the_limit_that_leaves_least_binds(tree):
    budget, fields = read(tree), ("name", "source", "limit_bytes", "headroom_bytes")
    assert {name: getattr(budget.binding, name) for name in fields} == EXPECTED[tree]
    assert (budget.limit_bytes, budget.headroom_bytes) == (budget.binding.limit_bytes, budget.binding.headroom_bytes)
    assert budget.headroom_bytes == min(one.headroom_bytes for one in budget.limits if one.binds)


def test_every_recorded_tree_has_its_line_in_the_table():
    trees = {path.name for path in RECORDED.iterdir() if (path / "proc/meminfo").exists()}
    assert trees == set(EXPECTED)


def test_a_limit_in_an_ancestor_is_seen_where_the_host_total_misleads():
    budget = read("hybrid_v1_nested")
    [host] = [one for one in budget.limits if one.scope == "host"]
    assert budget.limit_bytes == GIB < host.limit_bytes
    # The group of the process itself has no limit, a group between has a larger one: all of them are shown.
    assert [(one.source, one.limit_bytes) for one in budget.limits if one.scope == "group"] == [
        ("cgroup v1 /memfit-recorded", GIB),
        ("cgroup v1 /memfit-recorded/folds", 3 * GIB),
    ]


def test_a_limit_larger_than_the_host_is_shown_and_never_binds():
    last = read("v2_limit_above_host").limits[-1]
    assert (last.name, last.limit_bytes, last.binds) == ("memory.max", 64 * GIB, False)
    assert "larger than the host's memory" in last.note


def test_a_limit_larger_than_the_host_does_not_bind_even_where_its_group_counts_more_than_the_host_does(tmp_path):
    tree = shutil.copytree(RECORDED / "v2_limit_above_host", tmp_path / "tree")
    group = tree / "sys/fs/cgroup/big"
    (group / "memory.max").write_text(f"{3060563968 + 4096}\n")
    (group / "memory.stat").write_text(f"anon {2 * GIB}\n")
    budget = Budget.read(root=tree, env={})
    assert budget.limits[-1].headroom_bytes < budget.headroom_bytes
    assert budget.binding.name == "MemAvailable"


def test_clean_page_cache_does_not_count_as_used():
    usage = int((RECORDED / "docker_v2/sys/fs/cgroup/memory.current").read_text())
    assert usage - read("docker_v2").binding.used_bytes > 40_000_000  # The recorded process had read 40 MiB of a file.


def test_all_limits_of_every_level_are_shown_in_a_pod():
    limits = [one.limit_bytes // MIB for one in read("kubernetes_v2").limits if one.scope == "group"]
    assert limits == [768, 1024, 2500]


@pytest.mark.parametrize("sentinel", ["9223372036854771712", "9223372036854710272", "18446744073709551615"])
def test_the_page_rounded_forms_of_unlimited_are_no_limit(sentinel, tmp_path):
    tree = shutil.copytree(RECORDED / "hybrid_v1_nested", tmp_path / "tree")
    for path in (tree / "sys/fs/cgroup/memory").rglob("memory.*limit_in_bytes"):
        path.write_text(f"{sentinel}\n")
    for path in (tree / "sys/fs/cgroup/memory").rglob("memory.stat"):
        path.write_text(path.read_text().replace("limit 1073741824", f"limit {sentinel}"))
    assert [one.name for one in Budget.read(root=tree, env={}).limits] == ["MemAvailable"]


def test_memory_and_swap_together_bind_once_swap_is_used(tmp_path):
    tree = shutil.copytree(RECORDED / "docker_v1", tmp_path / "tree")
    stat = tree / "sys/fs/cgroup/memory/memory.stat"
    stat.write_text(stat.read_text().replace("total_swap 0", f"total_swap {300 * MIB}"))
    binding = Budget.read(root=tree, env={}).binding
    assert (binding.name, binding.limit_bytes) == ("memory.memsw.limit_in_bytes", 600 * MIB)


@pytest.mark.proves("S0-08")
def test_swap_is_what_the_groups_allow_and_is_never_part_of_the_headroom():
    scope, container = read("systemd_user_scope_v2"), read("docker_v2")
    assert (scope.swap.total_bytes, scope.swap.usable_bytes) == (536866816, 64 * MIB)
    assert container.swap.usable_bytes == 0
    assert container.swap.source == "memory.swap.max of cgroup v2 /"


def test_the_size_of_shared_memory_is_the_mounts():
    assert read("docker_v1").shm.total_bytes == 64 * MIB
    assert read("docker_v2").shm.total_bytes == 3060563968 // 2  # No size= option: half of the memory.


def test_a_cpu_quota_and_slurm_bound_the_cores():
    assert (read("docker_v2").num_cpus, read("bare_host_v2").num_cpus) == (1, 2)
    assert read("docker_v2").cpus_source == "CPU quota 1.5 of cgroup v2 /"
    budget = read("bare_host_v2", env={"SLURM_CPUS_ON_NODE": "1"})
    assert (budget.num_cpus, budget.cpus_source) == (1, "Slurm")


def test_slurms_variable_is_shown_beside_the_group_that_enforces_it():
    env = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": "500", "SLURM_CPUS_ON_NODE": "2", "SLURMD_NODENAME": "n1"}
    budget = read("slurm_v1", env=env)
    [slurm] = [one for one in budget.limits if one.name == "SLURM_MEM_PER_NODE"]
    assert (slurm.limit_bytes, slurm.headroom_bytes, slurm.note) == (500 * MIB, budget.headroom_bytes, "")


def test_slurm_binds_where_no_group_enforces_it():
    env = {"SLURM_JOB_ID": "9", "SLURM_MEM_PER_CPU": "100", "SLURM_JOB_CPUS_PER_NODE": "6(x3),4"}
    binding = read("bare_host_v2", env=env).binding
    assert (binding.name, binding.source, binding.limit_bytes) == ("SLURM_MEM_PER_CPU", "Slurm job 9", 400 * MIB)
    assert binding.note.startswith("100 MiB x 4 CPUs on this node; used counts this process only")
    assert binding.used_bytes == 27624 * 1024


def test_memory_per_gpu_counts_the_gpus_of_this_node_and_zero_stands_for_the_whole_node():
    env = {"SLURM_MEM_PER_GPU": "300", "SLURM_GPUS_ON_NODE": "4", "SLURM_MEM_PER_NODE": "0"}
    assert [one.limit_bytes for one in read("bare_host_v2", env=env).limits if one.scope == "job"] == [1200 * MIB]


def test_an_rlimit_is_shown_as_bounding_one_process(tmp_path):
    tree = shutil.copytree(RECORDED / "bare_host_v2", tmp_path / "tree")
    path = tree / "proc/self/limits"
    unlimited = "Max address space         unlimited "
    assert unlimited in path.read_text()
    path.write_text(path.read_text().replace(unlimited, "Max address space         536870912 "))
    binding = Budget.read(root=tree, env={}).binding
    assert (binding.name, binding.scope, binding.limit_bytes) == ("RLIMIT_AS", "process", 512 * MIB)
    assert binding.headroom_bytes == 512 * MIB - 37320 * 1024  # VmSize
    assert "bounds each process by itself" in binding.note


def test_strict_overcommit_is_a_limit_of_the_host(tmp_path):
    tree = shutil.copytree(RECORDED / "bare_host_v2", tmp_path / "tree")
    (tree / "proc/sys/vm/overcommit_memory").write_text("2\n")
    names = {one.name for one in Budget.read(root=tree, env={}).limits}
    assert names == {"MemAvailable", "CommitLimit"}


def test_a_users_cap_binds_when_it_is_the_smallest():
    budget = read("bare_host_v2", cap_bytes=GIB)
    assert (budget.binding.source, budget.limit_bytes, budget.headroom_bytes) == ("the user", GIB, GIB)
    assert budget.lendable_bytes == GIB - budget.reserve_bytes


@pytest.mark.parametrize("sizes", [{"cap_bytes": 0}, {"reserve_bytes": -1}])
def test_an_impossible_size_is_refused(sizes):
    with pytest.raises(UsageError, match="bytes"):
        read("bare_host_v2", **sizes)


def test_a_folder_without_meminfo_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no proc/meminfo"):
        Budget.read(root=tmp_path, env={})


@pytest.mark.proves("S0-08")
@pytest.mark.parametrize(
    ("limit_bytes", "swap_bytes", "reserve_bytes"),
    [
        (16 * GIB, GIB, 16 * GIB * 2 // 100),
        (16 * GIB, 0, 16 * GIB * 4 // 100),
        (4 * GIB, GIB, 256 * MIB),
        (2048 * GIB, 0, 4 * GIB),
        (200 * MIB, 0, 25 * MIB),
    ],
)
def test_the_default_reserve_is_a_share_within_bounds_and_leaves_small_limits_usable(
    tmp_path, limit_bytes, swap_bytes, reserve_bytes
):
    (tmp_path / "proc").mkdir()
    sizes = {"MemTotal": limit_bytes, "MemAvailable": limit_bytes, "SwapTotal": GIB, "SwapFree": swap_bytes}
    (tmp_path / "proc/meminfo").write_text("".join(f"{name}: {size >> 10} kB\n" for name, size in sizes.items()))
    budget = Budget.read(root=tmp_path, env={})
    assert budget.reserve_bytes == reserve_bytes >> 10 << 10 or abs(budget.reserve_bytes - reserve_bytes) < 1024
    assert budget.reserve_note.startswith("2 %" if swap_bytes else "4 %")


def test_the_promise_names_the_permission_that_holds():
    by_tree = {tree: read(tree) for tree in ("hybrid_v1_nested", "slurm_v2", "docker_v1", "docker_v2")}
    permissions = {tree: budget.permission for tree, budget in by_tree.items()}
    assert permissions == {
        "hybrid_v1_nested": "cgroup v1",
        "slurm_v2": "cgroup v2",
        "docker_v1": "none",
        "docker_v2": "none",
    }
    assert (
        "in a cgroup v1 group below /memfit-recorded/folds/fold_3; at that limit" in by_tree["hybrid_v1_nested"].promise
    )
    assert "does not kill it" in by_tree["slurm_v2"].promise
    assert "no job can have a cgroup limit here" in by_tree["docker_v2"].promise
    assert "mounted read-only" in by_tree["docker_v2"].promise


def test_an_ordinary_user_is_promised_no_groups(tmp_path):
    tree = shutil.copytree(RECORDED / "slurm_v2", tmp_path / "tree")
    status = tree / "proc/self/status"
    status.write_text(status.read_text().replace("Uid:\t0\t0\t0\t0", "Uid:\t1000\t1000\t1000\t1000"))
    assert Budget.read(root=tree, env={}).permission == "none"


def test_groups_that_a_namespace_hides_are_said_to_be_hidden():
    assert "hidden here" in read("docker_v2").notes[0]
    assert read("slurm_v2").notes == ()
    assert read("docker_v1_hidden_ancestor").notes == ()  # Version 1 shows what they enforce.


def test_the_json_form_holds_every_limit_and_the_binding_one():
    found = json.loads(json.dumps(read("kubernetes_v2").to_dict()))
    assert found["binding"] == found["limits"][0]
    assert found["headroom_bytes"] == found["binding"]["headroom_bytes"] == 776719976
    assert len(found["limits"]) == 4


def test_on_this_machine_the_headroom_is_no_more_than_the_host_has():
    budget = Budget.read()
    assert 0 < budget.headroom_bytes <= psutil.virtual_memory().total
    assert 1 <= budget.num_cpus <= os.cpu_count()


@pytest.mark.root
def test_a_child_without_a_limit_sees_the_limit_of_its_real_parent_group(memory_group):
    parent = memory_group(700 * MIB)
    child = memory_group(-1, parent)
    code = (
        "import json, time; from memfit.memory import Budget; kept = bytearray(b'x') * (50 << 20)\n"
        "for _ in range(60):\n"  # the kernel sums up its counters of each core every other second
        "    found = Budget.read().to_dict()\n"
        "    if found['headroom_bytes'] < 650 << 20: break\n"
        "    time.sleep(0.1)\n"
        "print(json.dumps(found))"
    )
    enter = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs; exec "$@"', str(child), sys.executable, "-c", code]
    done = subprocess.run(enter, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    relative = parent.relative_to("/sys/fs/cgroup/memory")
    assert found["binding"]["name"] == "memory.limit_in_bytes"
    assert found["binding"]["source"] == f"cgroup v1 /{relative}"
    assert found["limit_bytes"] == 700 * MIB
    assert 550 * MIB < found["headroom_bytes"] < 650 * MIB  # 50 MiB of its own and an interpreter.
    assert found["permission"] == "cgroup v1"


@pytest.mark.slow
@pytest.mark.container
def test_a_real_container_sees_its_own_limit(podman):
    code = "import json; from memfit.memory import Budget; print(json.dumps(Budget.read().to_dict()))"
    found = json.loads(podman("--memory=200m", "--shm-size=32m", command=[sys.executable, "-c", code]))
    assert found["limit_bytes"] == 200 * MIB
    assert found["binding"]["scope"] == "group"
    assert 100 * MIB < found["headroom_bytes"] < 200 * MIB
    assert found["shm"]["total_bytes"] == 32 * MIB
    assert found["permission"] == "none"


def test_a_later_reading_takes_over_what_a_process_keeps_and_reads_the_limits_anew():
    first = read("docker_v2")
    earlier = replace(first, num_cpus=77, cpus_source="the earlier one", permission="none", promise="", limits=())
    later = read("docker_v2", last=earlier)
    assert (later.num_cpus, later.cpus_source, later.permission) == (77, "the earlier one", "none")
    assert later.limits == first.limits and later.swap == first.swap
