"""Two hosts on NFS, each with a mount, caches and names of its own: what one of them does is not done again by the other."""

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOLS = ("modprobe", "exportfs", "rpc.mountd", "rpc.nfsd", "mount.nfs4")
EXPORT = Path("/srv/nfs")
MEMFIT = [sys.executable, "-m", "memfit"]
RUN = ["run", "--quiet", "--name", "once", "--", "sh", "job.sh"]
#: The job's notes and its sign to end lie outside NFS, so that the test sees them at once.
JOB = """
echo begin $(hostname) >> {0}/hits
trap 'echo saved $(hostname) >> {0}/hits; exit 75' TERM
until [ -e {0}/go ]; do sleep 0.1; done
echo end $(hostname) >> {0}/hits
"""


@pytest.fixture(scope="module")
def server():
    """An NFS 4.2 server of this guest, whose folder is ``EXPORT``."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(
            f"no {', '.join(missing)}: apt-get install --no-install-recommends nfs-kernel-server nfs-common kmod"
        )
    for module in ("nfsd", "nfsv4", "nfs"):
        call("modprobe", "-d", os.environ["VM_KERNEL"], module)
    for folder in (EXPORT, Path("/var/lib/nfs")):
        folder.mkdir(parents=True, exist_ok=True)
        call("mount", "-t", "tmpfs", "tmpfs", folder)  # an overlay cannot be exported
    for name in ("v4recovery", "sm", "sm.bak"):
        Path("/var/lib/nfs", name).mkdir()
    for name in ("etab", "rmtab", "state", "xtab"):
        Path("/var/lib/nfs", name).touch()
    Path("/run/rpc_pipefs").mkdir(exist_ok=True)
    if not os.path.ismount("/proc/fs/nfsd"):
        call("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
    call("exportfs", "-o", "rw,no_root_squash,fsid=0,insecure,no_subtree_check,sync", f"127.0.0.1:{EXPORT}")
    for knob in ("nfsv4leasetime", "nfsv4gracetime"):
        Path("/proc/fs/nfsd", knob).write_text("10")  # else the first lock waits for 90 s
    daemon = subprocess.Popen(["rpc.mountd", "--foreground", "--no-nfs-version", "3"])
    serve(threads=4)
    yield
    daemon.kill()
    daemon.wait()


def serve(*, threads):
    """Start the server, or end it with 0 threads. One that starts again here has forgotten every lock."""
    call("rpc.nfsd", "-N", "3", threads)


def call(*words):
    subprocess.run([str(word) for word in words], check=True, timeout=120)


class Hosts:
    """Two hosts that see one folder at one path: this one, and another with names, processes and a mount of its own."""

    def __init__(self, folder, options):
        self.own, self.foreign, self.notes = folder / "nfs", folder / "other", folder / "notes"
        for path in (self.own, self.foreign):
            path.mkdir()
            how = ",".join(filter(None, ("nosharecache", "vers=4.2", options)))
            call("mount", "-t", "nfs4", "-o", how, "127.0.0.1:/", path)
        other = f'hostname other && mount --bind "{self.foreign}" "{self.own}" && cd "{self.own}" && exec "$@"'
        #: What a command begins with that runs on the other host.
        own = ["unshare", "-m", "-u", "-p", "--fork", "--kill-child", "--mount-proc"]
        self.elsewhere = shlex.join([*own, "sh", "-c", other, "sh"])
        self.notes.mkdir()
        (self.own / "job.sh").write_text(JOB.format(self.notes))
        self.started = []

    def start(self, *words, elsewhere):
        """Start memfit on one of the hosts."""
        claims, log = self.notes / f"claims-{elsewhere}", self.notes / f"log-{elsewhere}"
        claims.mkdir(mode=0o700, exist_ok=True)
        prefix = shlex.split(self.elsewhere) * elsewhere
        with log.open("wb") as file:
            env = {**os.environ, "MEMFIT_CLAIMS_DIR": str(claims)}
            process = subprocess.Popen(
                [*prefix, *MEMFIT, *(words or RUN)], cwd=self.own, env=env, stdout=file, stderr=file
            )
        self.started.append(process)
        return process

    def said(self):
        """What the supervisors said in their events, as the server has them."""
        lines = [line for path in EXPORT.glob("runs/*/*/events/*.jsonl") for line in path.read_text().splitlines()]
        return [str(event.get("text")) for event in map(json.loads, lines)]

    def hits(self):
        path = self.notes / "hits"
        return path.read_text().splitlines() if path.exists() else []

    def close(self):
        for process in self.started:
            process.kill()
            process.wait()
        for path in (self.own, self.foreign):
            call("umount", "-l", path)
        for path in EXPORT.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def wait_until(condition, log):
    until = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < until, log.read_text() if log.exists() else "no log"
        time.sleep(0.2)


@pytest.fixture
def hosts(server, tmp_path, request):
    made = Hosts(tmp_path, request.param)
    yield made
    (made.notes / "go").touch()
    made.close()


# With nocto, reading a folder anew shows nothing new: only time does.
@pytest.mark.parametrize("hosts", ["actimeo=60", "actimeo=8,nocto"], indirect=True)
def test_a_job_that_another_host_takes_over_runs_once(hosts):
    first = hosts.start(elsewhere=False)
    wait_until(hosts.hits, hosts.notes / "log-False")
    first.kill()
    first.wait()
    second = hosts.start(elsewhere=True)
    wait_until(lambda: any("taken over" in text for text in hosts.said()), hosts.notes / "log-True")
    (hosts.notes / "go").touch()
    assert second.wait(200) == 0, (hosts.notes / "log-True").read_text()
    assert hosts.hits() == ["begin guest", "end guest"]


@pytest.mark.parametrize("hosts", [""], indirect=True)
def test_a_job_whose_end_another_host_has_not_seen_yet_does_not_run_again(hosts):
    first = hosts.start(elsewhere=False)
    wait_until(hosts.hits, hosts.notes / "log-False")
    (job,) = hosts.foreign.glob("runs/*/*/jobs/*")
    assert not (job / "outcome.json").exists()  # which the other host remembers from now on
    first.kill()
    first.wait()
    (hosts.notes / "go").touch()
    wait_until(lambda: list(EXPORT.glob("runs/*/*/jobs/*/outcome.json")), hosts.notes / "log-False")
    if (job / "outcome.json").exists():  # by default it remembers for half a minute
        pytest.skip("this machine is too slow: the other host sees the end already")
    second = hosts.start(elsewhere=True)
    assert second.wait(200) == 0, (hosts.notes / "log-True").read_text()
    assert hosts.hits() == ["begin guest", "end guest"]


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["actimeo=60"], indirect=True)
def test_a_job_that_another_host_stops_saves_and_does_not_run_again(hosts):
    first = hosts.start(elsewhere=False)
    wait_until(hosts.hits, hosts.notes / "log-False")
    (run,) = EXPORT.glob("runs/*/*")
    (job,) = run.glob("jobs/*")
    second = hosts.start("stop", f"{hosts.own / run.relative_to(EXPORT)}/{job.name}", elsewhere=True)
    assert second.wait(200) == 0, (hosts.notes / "log-True").read_text()
    assert first.wait(200) == 75, (hosts.notes / "log-False").read_text()
    assert hosts.hits() == ["begin guest", "saved guest"]


AWAY = "soft,timeo=20,retrans=2,actimeo=60"


@pytest.mark.long
@pytest.mark.parametrize("hosts", [AWAY], indirect=True)
def test_a_run_goes_on_after_its_server_was_away_for_20_s_and_has_forgotten_its_locks(hosts):
    many = (*RUN[:-3], "--param", "n=1..2", "--max-parallel", "1", *RUN[-3:], "{n}")
    first = hosts.start(*many, elsewhere=False)
    wait_until(hosts.hits, hosts.notes / "log-False")
    serve(threads=0)
    time.sleep(5)
    (hosts.notes / "go").touch()
    wait_until(lambda: len(hosts.hits()) == 2, hosts.notes / "log-False")
    (hosts.notes / "go").unlink()
    time.sleep(15)
    serve(threads=4)
    wait_until(lambda: len(hosts.hits()) == 3, hosts.notes / "log-False")  # the first job's end was not lost
    wait_until(lambda: is_held(hosts.foreign), hosts.notes / "log-False")
    second = hosts.start(*many, elsewhere=True)
    assert second.wait(200) == 2 and "is being run by another process" in (hosts.notes / "log-True").read_text()
    (hosts.notes / "go").touch()
    assert first.wait(200) == 0, (hosts.notes / "log-False").read_text()
    assert hosts.hits() == ["begin guest", "end guest"] * 2


def is_held(folder):
    """Return whether another host holds the lock of the run there."""
    (lock,) = folder.glob("runs/*/*/supervisor.lock")
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.long
@pytest.mark.parametrize("hosts", [AWAY], indirect=True)
def test_a_job_is_taken_over_after_its_server_was_away_for_20_s_and_has_forgotten_its_lock(hosts):
    first = hosts.start(elsewhere=False)
    wait_until(hosts.hits, hosts.notes / "log-False")
    serve(threads=0)
    first.kill()
    first.wait()
    time.sleep(20)
    serve(threads=4)
    second = hosts.start(elsewhere=True)
    wait_until(lambda: any("taken over" in text for text in hosts.said()), hosts.notes / "log-True")
    (hosts.notes / "go").touch()
    assert second.wait(200) == 0, (hosts.notes / "log-True").read_text()
    assert hosts.hits() == ["begin guest", "end guest"]


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["actimeo=60"], indirect=True)
def test_a_checkpoint_that_another_host_has_sealed_is_taken_and_not_cleared_away(hosts):
    from memfit.training import SealedFolder  # loads torch

    own, foreign = SealedFolder(hosts.own / "kept"), SealedFolder(hosts.foreign / "kept")
    (own.begin(10) / "weights").write_bytes(b"whole")
    assert [path.name for path in foreign.folder_of(10).glob(".unsealed")] == [".unsealed"]
    assert not (foreign.folder_of(10) / "SEAL.json").exists()  # both of which the other host remembers from now on
    own.seal(10, {})
    assert foreign.newest().step == 10


#: Starts what follows its options on both hosts, as Slurm does on two nodes.
SRUN = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
SLURM_NODEID=0 "$@" & here=$!
SLURM_NODEID=1 {} "$@" & there=$!
wait $here; code=$?
wait $there || code=$?
exit $code
"""
#: A rank that gives a beat. In the first generation rank 1 fails, and rank 0 notices that.
RANK = """
import os, socket, sys
from pathlib import Path
from memfit.rundir import Beat, open_beats
rank, generation = int(os.environ["RANK"]), int(os.environ["MEMFIT_GENERATION"])
beat = Beat(rank, os.getpid(), socket.gethostname(), "", "microbatch", step=3, count=1)
os.pwrite(open_beats(Path(os.environ["MEMFIT_RANKS"]), rank), beat.to_line(), 0)
with open({!r}, "a") as file:
    file.write(f"{{socket.gethostname()}} {{rank}} in {{generation}}\\n")
sys.exit(0 if generation else 5 if rank else 79)
"""


@pytest.mark.parametrize("hosts", ["actimeo=60"], indirect=True)
def test_ranks_on_two_hosts_begin_again_when_one_is_lost(hosts, monkeypatch):
    from memfit.files import read_json
    from memfit.jobs import Job, SlurmBackend, SlurmOptions, Submission
    from memfit.rundir import RunDir

    (hosts.notes / "bin").mkdir()
    for name, text in {"srun": SRUN.format(hosts.elsewhere), "sbatch": "#!/bin/sh\necho 7\n"}.items():
        (hosts.notes / "bin" / name).write_text(text)
        (hosts.notes / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{hosts.notes}/bin:{os.environ['PATH']}")
    run = RunDir.create(hosts.own / "runs", "nodes", "0" * 64)
    (hosts.own / "rank.py").write_text(RANK.format(f"{hosts.notes}/hits"))
    job = Job("job", command=(sys.executable, "rank.py"), cwd=str(hosts.own), ranks=2, threads=2)
    SlurmBackend(run, SlurmOptions(nodes=2)).submit([Submission(job)])
    env = {**os.environ, "SLURM_JOB_ID": "7"}
    words = [sys.executable, "-m", "memfit.jobs", "shim", str(run.path), "--job", "job"]
    done = subprocess.run(words, cwd=hosts.own, env=env, timeout=600, capture_output=True, text=True)
    found = read_json(run.job_dir("job") / "outcome.json")
    assert (done.returncode, found and found["state"]) == (0, "completed"), (found, done.stderr)
    assert sorted(hosts.hits()) == ["guest 0 in 0", "guest 0 in 1", "other 1 in 0", "other 1 in 1"]
    (again,) = [event for event in run.events() if event["kind"] == "ranks_again"]
    assert "rank 1 ended with exit code 5" in again["text"]
