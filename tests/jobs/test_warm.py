"""Jobs that are forked from a process which has imported their code: the same as in new interpreters, or not at all."""

import os
import signal
import textwrap
from pathlib import Path

import pytest

from jobs.contract import is_alive, submit, wait_for_end, wait_until
from memfit.errors import JobFailedError, UsageError
from memfit.files import read_json
from memfit.jobs import Job, LocalBackend, Parent, read_status, spawn, start_env
from memfit.memory import Walls
from memfit.rundir import RunDir

MIB = 1 << 20
#: The user's module: what differs between a fork and a new interpreter if anything does.
CODE = """
    import os, random, signal, sys, threading, time
    import numpy as np

    ballast = np.ones(64 << 17)  # 64 MiB that all forks share
    handlers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE]


    def look():
        print("to out")
        print("to err", file=sys.stderr)
        return {
            "environ": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
            "cwd": os.getcwd(),
            "handlers": [str(signal.getsignal(one)) for one in handlers],
            "descriptors": sorted(os.listdir("/proc/self/fd"))[:-1],
            "tasks": len(os.listdir("/proc/self/task")),
            "session": os.getsid(0) == os.getpid(),
            "score": open("/proc/self/oom_score_adj").read(),
            "name": open("/proc/self/comm").read(),
        }


    def die_once(mark, whose):
        if not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(getattr(os, whose)(), signal.SIGKILL)
            time.sleep(60)
        return "done"


    def draw():
        import torch

        return {"draws": [random.random(), np.random.rand(), torch.rand(1).item()]}


    def threads():
        import threadpoolctl, torch

        np.ones((50, 50)) @ np.ones((50, 50))
        return {"torch": torch.get_num_threads(), "pools": [one["num_threads"] for one in threadpoolctl.threadpool_info()]}


    def train():
        import torch

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.1))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(32, 8)).square().sum().backward()
            optimizer.step()
        return {"weights": [one.tolist() for one in model.state_dict().values()]}


    def hold(mib, write=0, seconds=1.0):
        held = np.ones(mib << 17)
        ballast[: write << 17] = 2  # no longer shared
        time.sleep(seconds)


    def crash(warm_only=True):
        if not warm_only or b"jobs\\0warm" in open("/proc/self/cmdline", "rb").read():
            os.kill(os.getpid(), signal.SIGSEGV)


    def crash_in_training():
        import memfit

        memfit.phase("train")
        time.sleep(1)
        crash()


    def refuse():
        raise ValueError("not with 7")


    def leave():
        import atexit

        atexit.register(lambda: open("left", "w").write("yes"))
"""
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=[600], daemon=True).start()"
SOCKET = "import socket; kept = socket.socketpair()"
HDF5 = "kept = open('rows.h5', 'wb')"


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    (tmp_path / "user_code.py").write_text(textwrap.dedent(CODE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return RunDir.create(tmp_path / "runs", "warm", "0" * 64)


@pytest.fixture
def parent_of():
    """Starts a parent for a module."""
    started = []

    def start(module="user_code", **more):
        early = start_env(tight_malloc=True, cuda_allocator=None)
        started.append(Parent.start(f"{module}:look", {**os.environ, **early, **more}))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def parent(run_dir, parent_of):
    return parent_of()


def function(name, job_id=None, **more):
    arguments = more.pop("arguments", {})
    return Job(job_id or name, target=f"user_code:{name}", arguments=arguments, uses=(f"user_code:{name}",), **more)


def ended(backend, job, wall_bytes=None):
    """A job's last status, and what it returned."""
    submit(backend, job, wall_bytes)
    status = wait_for_end(backend, job.id)
    return status, (read_json(backend.run.job_dir(job.id) / "result.json") or {}).get("result")


def is_warm(status):
    return status.evidence.get("start") == "warm"


@pytest.mark.core
def test_a_forked_job_finds_what_a_new_interpreter_finds(run_dir, parent):
    job = function("look", env={"OWN": "1"}, cwd=str(run_dir.path))
    (status, warm), (_, fresh) = ended(LocalBackend(run_dir, parent=parent), job), ended(LocalBackend(run_dir), job)
    assert is_warm(status) and status.state == "completed"
    assert warm.pop("name") == "look\n" and fresh.pop("name").startswith("python")
    assert warm["environ"].pop("JE_ARROW_MALLOC_CONF") == "background_thread:false"
    assert warm == fresh
    assert (run_dir.job_dir("look") / "out.log").read_text() == 2 * "to out\n"
    assert (run_dir.job_dir("look") / "err.log").read_text() == 2 * "to err\n"


@pytest.mark.core
def test_a_training_in_a_fork_ends_in_the_same_bytes(run_dir, parent):
    before = parent.used_bytes
    warm = ended(LocalBackend(run_dir, parent=parent), function("train"))
    assert parent.used_bytes > before + 50 * MIB  # it has imported torch, which the function does
    assert warm[0].peak_bytes < 80 * MIB
    fresh = ended(LocalBackend(run_dir), function("train"))
    assert (is_warm(warm[0]), is_warm(fresh[0])) == (True, False)
    assert warm[1] == fresh[1] and warm[1]["weights"]


@pytest.mark.slow
def test_jobs_that_seed_nothing_draw_different_numbers(run_dir, parent):
    backend = LocalBackend(run_dir, parent=parent)
    draws = [ended(backend, function("draw", f"job_{number}"))[1]["draws"] for number in (1, 2)]
    assert all(a != b for a, b in zip(*draws, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_fork_has_as_many_threads_as_it_is_given(run_dir, parent, threads):
    status, found = ended(LocalBackend(run_dir, parent=parent), function("threads", threads=threads))
    assert is_warm(status)
    assert found["torch"] == threads and set(found["pools"]) == {threads}


@pytest.mark.slow
@pytest.mark.parametrize("with_walls", [pytest.param(True, marks=pytest.mark.root), False])
def test_only_what_a_fork_writes_itself_is_its_memory(run_dir, parent, memory_group, with_walls):
    walls = Walls.build(f"warm-{os.getpid()}", 1024 * MIB) if with_walls else None
    try:
        backend = LocalBackend(run_dir, parent=parent, walls=walls)
        plain, _ = ended(backend, function("hold", arguments={"mib": 40, "write": 0}), 512 * MIB)
        writes, _ = ended(backend, function("hold", "writer", arguments={"mib": 40, "write": 48}), 512 * MIB)
    finally:
        if walls is not None:
            walls.close()
    assert is_warm(plain) and is_warm(writes)
    assert parent.used_bytes > 64 * MIB
    assert 40 * MIB < plain.peak_bytes < 60 * MIB
    assert 88 * MIB < writes.peak_bytes < 110 * MIB


#: A torch for CUDA maps the driver when it is imported, and does not use it.
MAPPED = """
import mmap, pathlib
pathlib.Path("libcuda.so.1").write_bytes(b"x" * 4096)
with open("libcuda.so.1", "rb") as file:
    driver = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
import os
for one in os.listdir("/proc/self/fd"):
    if "libcuda" in os.path.realpath("/proc/self/fd/" + one):
        os.close(int(one))
"""
IN_USE = "import torch\ntorch.cuda.is_initialized = lambda: True"


def test_a_driver_that_is_mapped_and_not_used_bears_a_fork(run_dir, parent_of):
    Path("mapped.py").write_text(f"{MAPPED}\nfrom user_code import *\n")
    parent = parent_of("mapped")
    assert not parent.refused
    status, _ = ended(LocalBackend(run_dir, parent=parent), Job("look", target="mapped:look"))
    assert (status.state, is_warm(status)) == ("completed", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "why"),
    [
        (THREAD, "it has 2 threads"),
        (SOCKET, "it holds socket:"),
        (HDF5, "rows.h5 open"),
        (IN_USE, "it has begun to use CUDA"),
    ],
)
def test_what_does_not_bear_a_fork_is_refused_and_runs_in_new_interpreters(run_dir, parent_of, code, why):
    Path("unsafe.py").write_text(f"{code}\nfrom user_code import *\n")
    parent = parent_of("unsafe")
    assert why in parent.refused
    backend, said = LocalBackend(run_dir, parent=parent), []
    backend.say = said.append
    status, found = ended(backend, Job("look", target="unsafe:look"))
    assert (status.state, is_warm(status)) == ("completed", False) and found["session"]


@pytest.mark.slow
def test_a_library_that_a_stage_uses_may_refuse_too(run_dir, parent, monkeypatch):
    Path("starts.py").write_text(f"import scipy.sparse\n{THREAD}\n")
    parent.load("starts")
    backend, said = LocalBackend(run_dir, parent=parent), []
    backend.say = said.append
    for job in ("one", "two"):
        status, _ = ended(backend, function("look", job))
        assert (status.state, is_warm(status)) == ("completed", False)
    assert "threads after the imports" in parent.refused


@pytest.mark.slow
def test_a_job_with_another_environment_at_its_start_gets_a_new_interpreter(run_dir, parent):
    backend = LocalBackend(run_dir, parent=parent)
    for name, more in (("malloc", {"tight_malloc": False}), ("hash", {"env": {"PYTHONHASHSEED": "7"}})):
        status, _ = ended(backend, function("look", name, **more))
        assert (status.state, is_warm(status)) == ("completed", False)
    assert is_warm(ended(backend, function("look"))[0])


@pytest.mark.core
def test_a_dead_parent_costs_no_job(run_dir, parent):
    backend, said = LocalBackend(run_dir, parent=parent), []
    backend.say = said.append
    submit(backend, function("hold", arguments={"mib": 1, "seconds": 3}))
    wait_until(lambda: read_status(run_dir, "hold").pid is not None)
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(parent.pid))
    status, _ = ended(backend, function("look"))
    assert (status.state, is_warm(status)) == ("completed", False)
    assert ["has ended" in one for one in said] == [True]
    status = wait_for_end(backend, "hold")
    assert (status.state, is_warm(status)) == ("completed", True)


def test_who_ends_one_twice_does_not_wait_for_what_has_ended(parent, monkeypatch):
    parent.close()
    waits = []
    monkeypatch.setattr("memfit.jobs._fork.wait_for_any", lambda *arguments: waits.append(arguments))
    parent.close()
    assert waits == []


@pytest.mark.slow
def test_a_fork_that_crashes_before_its_first_step_is_tried_once_in_a_new_interpreter(run_dir, parent):
    backend = LocalBackend(run_dir, parent=parent)
    status, _ = ended(backend, function("crash"))
    assert (status.state, status.attempt, is_warm(status)) == ("completed", 1, False)
    assert "signal 11 before its first step" in (run_dir.job_dir("crash") / "shim.log").read_text()
    status, _ = ended(backend, function("crash", "always", arguments={"warm_only": False}))
    assert (status.state, status.exit_code) == ("failed", -11)
    status, _ = ended(backend, function("crash_in_training"))
    assert (status.state, status.exit_code, is_warm(status)) == ("failed", -11, True)


def test_a_job_that_needs_its_memory_gets_it(run_dir, parent):
    backend, said = LocalBackend(run_dir, parent=parent), []
    backend.say = said.append
    assert backend.make_room() and not backend.make_room()
    assert not is_alive(parent.pid) and "a job needs" in said[0]
    status, _ = ended(backend, function("look"))
    assert (status.state, is_warm(status)) == ("completed", False)


def test_what_a_fork_registers_for_its_end_runs(run_dir, parent):
    ended(LocalBackend(run_dir, parent=parent), function("leave", cwd=str(run_dir.path)))
    assert (run_dir.path / "left").read_text() == "yes"


def test_a_call_returns_or_raises_as_in_a_new_interpreter(run_dir, parent):
    assert parent.call("user_code:look", {})["cwd"] == str(Path.cwd())
    with pytest.raises(UsageError, match=r"user_code.py:\d+ failed: ValueError: not with 7"):
        parent.call("user_code:refuse", {})
    with pytest.raises(JobFailedError, match="ended by signal 11"):
        parent.call("user_code:crash", {"warm_only": False})


@pytest.mark.parametrize("whose", ["getpid", "getppid"])
def test_a_call_whose_fork_or_whose_process_is_killed_is_made_again_in_a_new_interpreter(run_dir, parent, whose):
    mark = run_dir.path / "killed"
    assert parent.call("user_code:die_once", {"mark": str(mark), "whose": whose}) == "done"
    assert mark.exists() and is_alive(parent.pid) == (whose == "getpid")


@pytest.mark.slow
def test_it_ends_with_its_run_and_what_it_forked_goes_on(run_dir, parent):
    backend = LocalBackend(run_dir, parent=parent)
    submit(backend, function("hold", arguments={"mib": 1, "seconds": 2}))
    wait_until(lambda: read_status(run_dir, "hold").pid is not None)
    parent.close()
    assert not is_alive(parent.pid)
    assert wait_for_end(backend, "hold").state == "completed"


def test_any_number_of_definitions_may_be_named(run_dir, parent):
    parent.load(uses=[f"user_code:a_definition_with_a_long_name_{number}" for number in range(5000)])
    assert parent.refused == ""
    parent.load(uses=["no_such_module:fit"])
    assert parent.call("user_code:look", {})["session"]


def test_a_fork_that_never_comes_to_its_function_is_a_new_interpreter_then(run_dir, parent_of):
    """Code that was imported may act in a fork: here it ends the first one of a watcher."""
    Path("ends.py").write_text(
        "import os, pathlib\n"
        "def end():\n"
        "    above = pathlib.Path(f'/proc/{os.getppid()}/comm').read_text()\n"
        "    if above == 'memfit shim\\n' and not pathlib.Path('ended').exists():\n"
        "        pathlib.Path('ended').touch()\n"
        "        os._exit(3)\n"
        "os.register_at_fork(after_in_child=end)\n"
        "def look(): return {}\n"
    )
    status, _ = ended(LocalBackend(run_dir, parent=parent_of("ends")), Job("look", target="ends:look"))
    assert (status.state, is_warm(status)) == ("completed", False) and Path("ended").exists()
    assert "did not come to its function" in (run_dir.job_dir("look") / "shim.log").read_text()


def test_a_fork_that_makes_no_progress_is_a_new_interpreter_then(tmp_path):
    class Group:
        """Holds up whoever enters it first."""

        path = tmp_path / "entered"

        def enter(self):
            if not self.path.exists():
                self.path.touch()
                signal.pause()

    order = {"attempt": 1, "command": (), "target": "builtins:dict", "arguments": {"x": 9}, "stdin": None, "ranks": 1}
    order |= {"cwd": str(tmp_path), "env": {}, "data_limit_bytes": None}
    pid, is_forked = spawn(order, tmp_path, Group(), forks=True, patience_seconds=0.5)
    assert not is_forked and Group.path.exists()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read_json(tmp_path / "result.json") == {"result": {"x": 9}}


def test_a_fork_without_its_folder_could_not_be_started(run_dir, parent):
    status, _ = ended(LocalBackend(run_dir, parent=parent), function("look", cwd="/nonexistent/folder"))
    assert status.state == "failed" and "could not be started: No such file or directory" in status.cause


def test_where_a_fork_cannot_be_followed_there_is_no_parent(run_dir, parent_of, monkeypatch):
    monkeypatch.setattr(os, "pidfd_open", lambda pid: (_ for _ in ()).throw(OSError(38, "not implemented")))
    assert Parent.start("user_code:look", os.environ) is None
