"""Record what `Budget.read` looks at, for the process that runs this: ``python record.py FOLDER``.

It keeps the files of the kernel's that memfit reads and no others: of mountinfo the lines of cgroups, /dev/shm and
lxcfs, of status the fields that are read. Look through the result before you share it: it holds names of groups.
"""

import os
import sys
from pathlib import Path

MEMORY_FILES = (
    *("memory.stat", "memory.max", "memory.high", "memory.swap.max", "memory.swap.current", "memory.current"),
    *("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.kmem.usage_in_bytes", "memory.usage_in_bytes"),
    *("memory.use_hierarchy", "cgroup.controllers", "cgroup.type", "release_agent", "cpu.max"),
    *("cpu.cfs_quota_us", "cpu.cfs_period_us"),
)
STATUS_FIELDS = ("Name", "Pid", "PPid", "Uid", "VmSize", "VmData", "RssAnon", "RssShmem", "Cpus_allowed_list")


def keep(path: Path, text: str, folder: Path) -> None:
    """Write one file of the tree."""
    target = folder / str(path).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def is_listed(members: Path) -> bool:
    """Whether this process is in the group of this list."""
    try:
        return str(os.getpid()) in members.read_text().split()
    except OSError:
        return False


def groups(lines: list[str], memberships: list[str]) -> list[Path]:
    """The directories from each mount of the memory and cpu hierarchies down to this process's group."""
    found = []
    for line in lines:
        left, _, right = line.partition(" - ")
        root, point = left.split(" ")[3:5]
        kind, _, options = right.split(" ", 2)
        for membership in memberships:
            _, controllers, path = membership.split(":", 2)
            same = kind == "cgroup" and {"memory", "cpu"} & set(controllers.split(",")) & set(options.split(","))
            if same or (kind == "cgroup2" and not controllers):
                inner = path[len(root) :] if root != "/" and path.startswith(root) else path
                below = Path(point, inner.strip("/"))
                if "/.." in root:  # The names between the mount and this namespace are hidden: by the list of members.
                    mine = (one.parent for one in Path(point).rglob("cgroup.procs") if is_listed(one))
                    below = next(mine, below)
                found += [below, *(parent for parent in below.parents if parent.is_relative_to(point))]
    return found


def main(folder: Path) -> None:
    """Record this process's tree."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    lines = [one for one in mounts if " - cgroup" in one or " /dev/shm " in one or "lxcfs" in one]
    keep(Path("/proc/self/mountinfo"), "\n".join(lines) + "\n", folder)
    cgroup = Path("/proc/self/cgroup").read_text()
    status = Path("/proc/self/status").read_text().splitlines()
    fields = [line for line in status if line.partition(":")[0] in STATUS_FIELDS]
    keep(Path("/proc/self/status"), "\n".join(fields) + "\n", folder)
    keep(Path("/proc/self/cgroup"), cgroup, folder)
    for name in ("/proc/self/limits", "/proc/meminfo", "/proc/sys/vm/overcommit_memory"):
        keep(Path(name), Path(name).read_text(), folder)
    for group in groups(lines, cgroup.splitlines()):
        for name in MEMORY_FILES:
            if os.access(group / name, os.R_OK):
                keep(group / name, (group / name).read_text(), folder)
        # Other processes of these groups are nobody's business: only this one stays listed.
        if is_listed(group / "cgroup.procs"):
            keep(group / "cgroup.procs", f"{os.getpid()}\n", folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
