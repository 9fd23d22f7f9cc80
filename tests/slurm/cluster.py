"""A Slurm cluster of a test's own, on this machine's loopback: its daemons, its jobs and its accounts.

Everything lies in one folder, on ports that were free, in control groups that bear the names of its nodes; so several
clusters can be up at once, and nothing of an installed Slurm's is read or changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

HERE = Path(__file__).resolve().parent
PACKAGES = "slurm-wlm slurmdbd munge mariadb-server"
TOOLS = ("munged", "slurmctld", "slurmd", "slurmdbd", "srun", "sacct", "mariadbd", "mariadb-install-db")
_CGROUPS = Path("/sys/fs/cgroup")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
_PR_SET_PDEATHSIG = 1
_GOES_ON = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")


def missing() -> str:
    """Why no cluster can be had here; empty when one can."""
    if os.geteuid() != 0:
        return "needs root: Slurm's daemons make control groups"
    if not (_CGROUPS / "memory/memory.limit_in_bytes").exists():
        return "needs a cgroup v1 memory hierarchy at /sys/fs/cgroup/memory"
    absent = [name for name in TOOLS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"needs {', '.join(absent)}: apt-get install --no-install-recommends {PACKAGES}"
    return ""


class Cluster:
    """A controller, nodes with GPUs that are names only, and the accounting database, between `start` and `stop`.

    Attributes:
        folder: All that it writes.
        nodes: Their names.
        env: What its commands need in their environment.
    """

    def __init__(
        self, folder: Path, *, num_nodes: int = 2, cpus: int = 4, memory_mib: int = 2048, gpus: int = 2
    ) -> None:
        self.folder = folder
        self.nodes = tuple(f"mf{os.getpid()}n{index}" for index in range(num_nodes))
        self.env = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._size = f"CPUs={cpus} RealMemory={memory_mib} Gres=gpu:{gpus}"
        self._gpus = [folder / f"gpu{number}" for number in range(gpus)]
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Bring it up and wait until all nodes are idle."""
        for name in (
            "log",
            "munge",
            "controller",
            "accounting",
            "database",
            "jobs",
            *(f"spool-{n}" for n in self.nodes),
        ):
            (self.folder / name).mkdir(parents=True)
        for path in self._gpus:  # slurmd counts device files; nothing is behind these
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        controller, accounting, database, *ports = _free_ports(3 + len(self.nodes))
        self._configure(controller, accounting, database, ports)
        self._start_munge()
        self._start_database(database)
        self._daemon("slurmdbd", "-D")
        _until(120, "slurmdbd", lambda: _answers(accounting))
        _until(20, "the accounting database", lambda: self._succeeds("sacctmgr", "-n", "list", "cluster"))
        self.call("sacctmgr", "-i", "add", "cluster", "memfit")
        self.start_controller("-c")
        for node in self.nodes:
            self.start_node(node)
        _until(120, "idle nodes", self._is_idle)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node, again after its death."""
        self._daemon("slurmd", "-N", node, "-D")

    def kill_node(self, node: str) -> None:
        """End a node with SIGKILL: its daemon, and all processes of its jobs."""
        self._kill(int((self.folder / f"spool-{node}/slurmd.pid").read_text()))
        for path in _CGROUPS.glob(f"freezer/slurm_{node}/**/cgroup.procs"):
            for pid in path.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def start_controller(self, *options: str) -> None:
        """Start the controller, again after its death without options."""
        self._daemon("slurmctld", *options, "-D")
        _until(120, "slurmctld", lambda: self._succeeds("scontrol", "ping"))

    def _kill(self, pid: int) -> None:
        daemon = next(one for one in self._daemons if one.pid == pid)
        daemon.kill()
        daemon.wait()
        self._daemons.remove(daemon)

    def _configure(self, controller: int, accounting: int, database: int, ports: Sequence[int]) -> None:
        host = socket.gethostname().partition(".")[0]
        words = {
            "cluster": "memfit",
            "host": host,
            "folder": self.folder,
            "gpus": f"{self.folder}/gpu[0-{len(self._gpus) - 1}]",
            "controller_port": controller,
            "accounting": "accounting_storage/slurmdbd",
            "accounting_port": accounting,
            "database_port": database,
            "nodes": "\n".join(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {self._size} State=UNKNOWN"
                for node, port in zip(self.nodes, ports, strict=True)
            ),
        }
        for template in HERE.glob("*.template"):
            target = self.folder / template.stem
            target.touch(mode=0o600)
            target.write_text(Template(template.read_text()).substitute(words))
        for name in ("slurm", "cgroup", "gres"):
            (self.folder / f"{name}.conf").chmod(0o644)

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        key = munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(256))
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        # The folder may lie below one that all may write to, which munge otherwise refuses.
        self._daemon("munged", "--foreground", "--force", *(f"--{name}={munge / at}" for name, at in files.items()))
        _until(10, "munged", lambda: self._succeeds("munge", "-n", "-S", str(munge / "socket")))

    def _start_database(self, port: int) -> None:
        data, at = self.folder / "database", f"--socket={self.folder}/database.socket"
        words = ("--user=root", f"--datadir={data}", "--auth-root-authentication-method=normal", "--skip-test-db")
        self.call("mariadb-install-db", "--no-defaults", *words)
        quick = (
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-buffer-pool-size=64M",
            "--innodb-lock-wait-timeout=900",
        )
        where = (f"--datadir={data}", at, f"--pid-file={self.folder}/database.pid", f"--port={port}")
        self._daemon("mariadbd", "--no-defaults", "--user=root", "--bind-address=127.0.0.1", *where, *quick)
        client = ("--no-defaults", at, "-u", "root")
        _until(120, "mariadbd", lambda: self._succeeds("mariadb-admin", *client, "ping"))
        made = ["CREATE DATABASE accounts"]
        for host in ("127.0.0.1", "localhost"):
            made += [f"CREATE USER slurm@'{host}' IDENTIFIED BY 'slurm'", f"GRANT ALL ON accounts.* TO slurm@'{host}'"]
        self.call("mariadb", *client, "-e", ";".join(made))

    def _daemon(self, *words: str) -> None:
        path = shutil.which(words[0], path=_PATH)
        assert path is not None, words[0]
        with open(self.folder / "log" / f"{words[0]}.out", "ab") as out:
            self._daemons.append(
                subprocess.Popen(
                    [path, *words[1:]],
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
            )

    def _is_idle(self) -> bool:
        return self.call("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split() == sorted(self.nodes)

    def stop(self) -> None:
        """End its jobs and daemons, and remove its control groups and its folder."""
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            jobs = self.call("squeue", "-h", "-o", "%A").split()
            if jobs:
                self.call("scancel", *jobs)
                _until(15, "the end of its jobs", lambda: not self.call("squeue", "-h").strip())
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for group in [group for node in self.nodes for group in _CGROUPS.glob(f"*/slurm_{node}")]:
            for below in sorted(group.rglob("*"), reverse=True):
                if below.is_dir():
                    _remove(below)
            _remove(group)
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *words: str, seconds: float = 120) -> str:
        """What a command prints.

        Raises:
            AssertionError: It failed; with what it said.
        """
        found = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=seconds, check=False)
        assert found.returncode == 0, f"{' '.join(words)}: {found.stdout}{found.stderr}"
        return found.stdout

    def _succeeds(self, *words: str) -> bool:
        return subprocess.run(words, env=self.env, capture_output=True, timeout=20, check=False).returncode == 0

    def describe(self) -> str:
        """What its daemons wrote last, and what it knows of its nodes and jobs."""
        found = [f"{path.name}:\n{path.read_text()[-6000:]}" for path in sorted((self.folder / "log").glob("*.log"))]
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            found += [self.call("sinfo", "-N", "-l"), self.call("scontrol", "show", "job")[-6000:]]
        return "\n".join(found)

    def submit(self, script: str, *options: str) -> str:
        """The number of a batch job that runs a shell script; `log_of` has what it writes."""
        where = ("--parsable", f"--output={self.folder}/jobs/slurm-%j.out", f"--chdir={self.folder}/jobs")
        path = self.folder / "jobs" / f"{secrets.token_hex(4)}.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        return self.call("sbatch", *where, *options, str(path)).strip()

    def log_of(self, job: str) -> Path:
        """Where a job writes."""
        return self.folder / "jobs" / f"slurm-{job}.out"

    def state(self, job: str) -> str:
        """Its state by the accounts, as ``OUT_OF_MEMORY``; empty before they have it."""
        return self.call("sacct", "-X", "-n", "-P", "-j", job, "-o", "State").strip().partition("\n")[0]

    def wait(self, *jobs: str, seconds: float = 60) -> list[str]:
        """Each job's state after its end."""

        def ended() -> bool:
            states = [self.state(job) for job in jobs]
            return all(state and not state.startswith(_GOES_ON) for state in states)

        _until(seconds, f"the end of {', '.join(jobs)}", ended, 0.4)
        return [self.state(job) for job in jobs]

    def wait_for_text(self, job: str, text: str, seconds: float = 30) -> None:
        """Wait until a job has written something."""
        log = self.log_of(job)
        _until(seconds, f"{text!r} of job {job}", lambda: log.exists() and text in log.read_text())


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _until(seconds: float, what: str, is_so: Callable[[], bool], pause: float = 0.1) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"no {what} after {seconds:g} s"
        time.sleep(pause)


def _remove(group: Path) -> None:
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)
