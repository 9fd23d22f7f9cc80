"""Budgets read from a real unified tree: every limit up to the root, and who may make groups."""

import subprocess
import sys

from memfit.memory import Budget
from vm.guest.groups import MIB, NOBODY, call_in, made_group


def read():
    return Budget.read(env={})


def named(budget, name):
    """The limits of that name: size and source, the binding one first."""
    return [(limit.limit_bytes, limit.source) for limit in budget.limits if limit.name == name]


def test_the_limits_of_all_groups_up_to_the_root_are_read_and_the_smallest_binds():
    with made_group(memory_max=900 * MIB) as outer:
        (outer / "cgroup.subtree_control").write_text("+memory")
        with made_group("inner", parent=outer, memory_high=400 * MIB, memory_max=500 * MIB) as inner:
            budget = call_in(inner, read)
    own = f"cgroup v2 /{outer.name}/inner"
    assert budget.cgroup == own
    assert (budget.binding.name, budget.binding.source, budget.limit_bytes) == ("memory.high", own, 400 * MIB)
    assert named(budget, "memory.max") == [(500 * MIB, own), (900 * MIB, f"cgroup v2 /{outer.name}")]
    assert 0 < budget.binding.used_bytes < 200 * MIB
    assert budget.permission == "cgroup v2"


def test_used_is_what_all_processes_below_a_limit_take():
    def read_beside(held):
        block = bytearray(b"x") * held
        found = read().binding.used_bytes
        del block
        return found

    with made_group(memory_max=500 * MIB) as group:
        little, much = (call_in(group, read_beside, held) for held in (1, 64 * MIB))
    assert 60 * MIB < much - little < 68 * MIB


def test_an_ordinary_user_may_make_groups_where_they_are_delegated_and_nowhere_else():
    with made_group(owner=NOBODY) as delegated, made_group() as other:
        assert call_in(delegated, read, uid=NOBODY).permission == "cgroup v2"
        budget = call_in(other, read, uid=NOBODY)
        assert budget.permission == "none"
        assert f"cgroup v2 /{other.name} cannot be written by this user" in budget.promise


def test_in_a_cgroup_namespace_the_own_group_is_found_and_its_limit_read():
    code = (
        "from memfit.memory import Budget; b = Budget.read(env={}); "
        "print(b.binding.name, b.limit_bytes, b.cgroup, sep='|')"
    )

    def unshare(*mount):
        command = ["unshare", "--cgroup", "--mount", "sh", "-c", f'{" ".join(mount) or ":"} && exec "$@"', "sh"]
        return subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    with made_group(memory_max=300 * MIB) as group:
        as_before = call_in(group, unshare)
        mounted_anew = call_in(group, unshare, "umount /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup")
    assert as_before.startswith(f"memory.max|{300 * MIB}|")
    assert mounted_anew == f"memory.max|{300 * MIB}|cgroup v2 /\n"
