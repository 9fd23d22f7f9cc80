"""Runs the tests in ``guest/`` under a real cgroup v2 kernel: a small virtual machine that sees this machine's files.

    python tests/vm/run.py [PYTEST ARGUMENTS]     the tests
    python tests/vm/run.py --sh 'COMMAND'         anything else, to look around

The exit status is the command's; 2 when no guest can be had here, with what to install; 124 after VM_TIMEOUT seconds
(default 900). VM_CACHE is where the kernel is kept (default: memfit-vm in the user's cache folder). See README.md.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MEMORY = "3G"
DISK_BYTES = 4 << 30  # sparse: only what the guest writes takes room

PACKAGES = "qemu-system-x86 busybox-static cpio e2fsprogs"
TOOLS = ("qemu-system-x86_64", "busybox", "cpio", "mke2fs", "unshare", "apt-get", "dpkg-deb")
DAEMONS = ("/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd", "/usr/lib/virtiofsd")
KERNEL = "linux-image-cloud-amd64"
#: In the order in which the kernel must get them.
MODULES = (
    "drivers/virtio/virtio_ring.ko",
    "drivers/virtio/virtio.ko",
    "drivers/virtio/virtio_pci_legacy_dev.ko",
    "drivers/virtio/virtio_pci_modern_dev.ko",
    "drivers/virtio/virtio_pci.ko",
    "drivers/block/virtio_blk.ko",
    "fs/fuse/fuse.ko",
    "fs/fuse/virtiofs.ko",
    "fs/overlayfs/overlay.ko",
)
_PR_SET_PDEATHSIG = 1


class CannotRun(Exception):
    """No guest can be had on this machine; the message says what is missing and what to do."""


def main(arguments: list[str]) -> int:
    """Run the tests, or the command after ``--sh``, in the guest; its exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell started this in the background
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if arguments[:1] == ["--sh"]:
        command = f"cd {shlex.quote(str(ROOT))} && {' '.join(arguments[1:])}"
    else:  # pytest.ini there says what to collect
        pytest = shlex.join([sys.executable, "-m", "pytest", *arguments])
        command = f"cd {shlex.quote(str(HERE / 'guest'))} && exec {pytest}"
    try:
        daemon = check_machine()
        kernel = find_kernel()
        index_modules(kernel)
        subprocess.run([sys.executable, "-m", "compileall", "-q", "src", "benchmarks", HERE], cwd=ROOT, check=True)
        with tempfile.TemporaryDirectory(prefix="memfit-vm-") as folder:
            return boot(daemon, kernel, Path(folder), command)
    except CannotRun as error:
        print(f"test-vm: not run: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("test-vm: interrupted; the guest is ended", file=sys.stderr)
        return 130


def check_machine() -> str:
    """The path of virtiofsd.

    Raises:
        CannotRun: If this machine lacks something.
    """
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        raise CannotRun(f"the guest is an x86_64 Linux, and this is {sys.platform} on {platform.machine()}.")
    if os.geteuid() != 0:
        raise CannotRun("virtiofsd, which shows the guest this machine's files, needs root. Run it as root.")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    daemon = next((path for path in (*DAEMONS, shutil.which("virtiofsd")) if path and Path(path).exists()), "")
    if not daemon:
        missing.append("virtiofsd")
    if missing:
        raise CannotRun(
            f"{', '.join(missing)} cannot be found. On Debian: apt-get install --no-install-recommends {PACKAGES} "
            "(and virtiofsd, from Debian 13 on)."
        )
    return daemon


def find_kernel() -> Path:
    """The folder of an unpacked kernel package; fetched on first use, and never installed.

    Raises:
        CannotRun: If it cannot be fetched.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memfit-vm"
    cache = Path(os.environ.get("VM_CACHE") or default)
    if found := sorted(cache.glob("linux-image-*/boot/vmlinuz-*")):
        return found[-1].parent.parent
    depends = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True).stdout
    names = re.findall(r"Depends: (linux-image-\S+)", depends)
    if not names:
        raise CannotRun(f"apt knows no {KERNEL} (this is Debian's). Run apt-get update, on Debian.")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as aside:
        print(f"test-vm: fetching {names[0]} into {cache}", flush=True)
        fetched = subprocess.run(["apt-get", "download", names[0]], cwd=aside, capture_output=True, text=True)
        packages = list(Path(aside).glob("*.deb"))
        if fetched.returncode or not packages:
            raise CannotRun(f"apt-get download {names[0]} failed: {fetched.stderr.strip()} Run apt-get update.")
        subprocess.run(["dpkg-deb", "-x", packages[0], f"{aside}/{names[0]}"], check=True)
        if not (cache / names[0]).exists():  # another run may have been faster
            Path(aside, names[0]).rename(cache / names[0])
    return cache / names[0]


def index_modules(kernel: Path) -> None:
    """Let modprobe find the kernel's modules in the guest, which the tests on NFS load; they are skipped without."""
    (modules,) = kernel.glob("lib/modules/*")
    if shutil.which("depmod") and not (modules / "modules.dep.bin").exists():
        subprocess.run(["depmod", "-b", kernel, modules.name], check=True)


def boot(daemon: str, kernel: Path, folder: Path, command: str) -> int:
    """Run ``command`` in a guest and show what it prints.

    Returns:
        Its exit status; 1 when the guest went without giving one, 124 when it took too long.
    """
    initrd, disk = make_initrd(kernel, folder, command), folder / "disk"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", disk], check=True)
    log = folder / "log"
    started: list[subprocess.Popen[bytes]] = []
    with socket.socket(socket.AF_UNIX) as door, log.open("wb") as errors:
        door.bind(str(folder / "share"))
        door.listen(1)
        # The daemon gets a mount namespace in which / is read-only, since the guest's command is root there.
        options = f"--fd={door.fileno()} -o source=/,cache=always,sandbox=chroot"
        share = f"mount -o remount,bind,ro / && exec {shlex.quote(daemon)} {options}"
        unshared = ["unshare", "--mount", "--propagation", "private", "sh", "-c", share]
        try:
            started.append(start(unshared, stdout=errors, stderr=errors, pass_fds=(door.fileno(),)))
            machine = qemu_command(next(kernel.glob("boot/vmlinuz-*")), initrd, disk, folder / "share")
            started.append(start(machine, stdout=subprocess.PIPE, stderr=errors))
            return watch(started[0], started[1], log)
        finally:
            for process in reversed(started):
                process.kill()
                process.wait()


def make_initrd(kernel: Path, folder: Path, command: str) -> Path:
    """The first file system of the guest: busybox, the modules that it needs, ``init``, and the command."""
    tree = folder / "initrd"
    for name in ("bin", "modules"):
        (tree / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", tree / "bin/busybox")
    shutil.copy(HERE / "init", tree / "init")
    (tree / "init").chmod(0o755)
    modules = next(kernel.glob("lib/modules/*/kernel"))
    present = [module for module in MODULES if (modules / module).exists()]  # the others are built in
    for module in present:
        shutil.copy(modules / module, tree / "modules")
    (tree / "modules/order").write_text("\n".join(Path(module).name for module in present) + "\n")
    settings = {
        "HOME": "/root", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": os.environ["PATH"], "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TERM": "dumb", "TMPDIR": "/var/tmp/vm",
        "VM_KERNEL": str(kernel),
    }  # fmt: skip
    lines = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    (tree / "command").write_text("\n".join([*lines, f"{command}\n"]))
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    archive = folder / "initrd.cpio"
    with archive.open("wb") as file:
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=tree, input=names.encode(), stdout=file, check=True)
    return archive


def qemu_command(kernel: Path, initrd: Path, disk: Path, share: Path) -> list[str]:
    """The emulator's command line: no network, the console on stdout, this machine's files through ``share``."""
    words = "console=ttyS0 quiet loglevel=3 panic=-1 psi=1 cgroup_no_v1=all mitigations=off nokaslr random.trust_cpu=on"
    return [
        *("qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"),
        *("-smp", "2", "-m", MEMORY, "-nodefaults", "-no-user-config", "-no-reboot", "-nic", "none"),
        *("-display", "none", "-monitor", "none", "-serial", "stdio"),
        *("-kernel", str(kernel), "-initrd", str(initrd), "-append", f"{words} clocksource=hpet no_timer_check"),
        *("-drive", f"file={disk},format=raw,if=virtio,cache=unsafe"),
        *("-object", f"memory-backend-memfd,id=memory,size={MEMORY},share=on", "-numa", "node,memdev=memory"),
        *("-chardev", f"socket,id=share,path={share}", "-device", "vhost-user-fs-pci,chardev=share,tag=machine"),
    ]


def start(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
    """A process that ends when this one does, even by SIGKILL."""
    libc = ctypes.CDLL(None)
    tie = functools.partial(libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    return subprocess.Popen(command, preexec_fn=tie, stdin=subprocess.DEVNULL, **how)


def watch(daemon: subprocess.Popen[bytes], guest: subprocess.Popen[bytes], log: Path) -> int:
    """Show the guest's console until it ends; see ``boot`` for what it returns."""
    seconds = float(os.environ.get("VM_TIMEOUT") or 900)
    late = threading.Event()

    def bound() -> None:
        try:
            daemon.wait(seconds)  # without the files that it shows, the guest would wait for ever
        except subprocess.TimeoutExpired:
            late.set()
        guest.kill()

    threading.Thread(target=bound, daemon=True).start()
    assert guest.stdout is not None
    for line in guest.stdout:
        shown = line.decode(errors="replace").rstrip().rpartition("\r")[2]  # what a terminal would show of it at last
        text, ended, status = shown.partition("vm: exit ")
        if text or not ended:
            print(text, flush=True)
        if ended:
            return int(status)
    if late.is_set():
        print(f"test-vm: the guest had not ended after {seconds:.0f} s; VM_TIMEOUT sets another bound", file=sys.stderr)
        return 124
    print(f"test-vm: the guest went without a word. QEMU and virtiofsd say:\n{log.read_text()}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
