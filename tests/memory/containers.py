"""A container by podman, from a base image of busybox alone and with the host's Python mounted read-only."""

import os
import shutil
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import memfit

# crun refuses hybrid layouts, and the default ulimits need a capability that test machines lack.
_CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
_BUSYBOX = Path("/bin/busybox")


def _base_image(folder: Path) -> Path:
    """A root file system of busybox and of the empty folders that the host's are mounted at, as a tar file."""
    tree = folder / "rootfs"
    for name in ("bin", "proc", "sys", "dev", "etc", "tmp", "usr"):
        (tree / name).mkdir(parents=True)
    shutil.copy2(_BUSYBOX, tree / "bin/busybox")
    for name in ("lib", "lib64"):
        host = Path("/", name)
        (tree / name).symlink_to(host.readlink()) if host.is_symlink() else (tree / name).mkdir()
    path = folder / "base.tar"
    with tarfile.open(path, "w") as archive:
        for entry in sorted(tree.iterdir()):
            archive.add(entry, arcname=entry.name)
    return path


class NoContainersError(Exception):
    """Containers cannot be run here, and why."""


@dataclass(frozen=True)
class Podman:
    """Runs commands in containers of an image that holds busybox alone.

    Attributes:
        image: Its name.
        env: The environment of podman itself.
    """

    image: str
    env: Mapping[str, str]

    def __call__(self, *options: str, command: list[str]) -> str:
        """Run ``podman run *options IMAGE *command`` and return its standard output."""
        mounts = [option for mount in self.mounts for option in ("-v", mount)]
        return self.call(
            "run", "--rm", "--network=none", "-e", self.python_path, *mounts, *options, self.image, *command
        )

    def call(self, *words: str) -> str:
        done = subprocess.run(["podman", *words], env=self.env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def python_path(self) -> str:
        return f"PYTHONPATH={Path(memfit.__file__).resolve().parents[1]}"

    @property
    def mounts(self) -> list[str]:
        """The folders of the host that its Python needs: libraries, its own prefixes, the packages and this one."""
        packages = Path(memfit.__file__).resolve().parents[1]
        system = [Path("/", name) for name in ("usr", "lib", "lib64") if not Path("/", name).is_symlink()]
        wanted = dict.fromkeys([*system, Path(sys.base_prefix), Path(sys.prefix), packages])
        outer = [path for path in wanted if not any(path.is_relative_to(other) for other in wanted if other != path)]
        return [f"{path}:{path}:ro" for path in outer if path.exists()]


@contextmanager
def podman(folder: Path) -> Iterator[Podman]:
    """Gives a `Podman`, whose image is removed at the end.

    Args:
        folder: An empty folder for the image and podman's settings.

    Raises:
        NoContainersError: If a tool or a permission is missing.
    """
    for tool in ("podman", "runc"):
        if shutil.which(tool) is None:
            raise NoContainersError(f"needs {tool}: apt-get install --no-install-recommends podman runc busybox-static")
    if os.geteuid() != 0 or not _BUSYBOX.exists():
        raise NoContainersError("needs root and /bin/busybox (busybox-static)")
    (folder / "containers.conf").write_text(_CONTAINERS_CONF)
    env = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
    found = Podman(f"memfit-test-{uuid.uuid4().hex[:8]}:1", env)
    found.call("import", str(_base_image(folder)), found.image)
    try:
        yield found
    finally:
        found.call("rmi", "--force", found.image)
