"""Trackers show a run's epochs and why it ended; one that fails or hangs costs the run nothing."""

import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("tensorboard")
pytest.importorskip("wandb")

from jobs.contract import wait_until  # noqa: E402
from memfit import run  # noqa: E402
from memfit.errors import ConfigError, UsageError  # noqa: E402
from memfit.integrations import _track  # noqa: E402
from memfit.memory import is_locked  # noqa: E402
from memfit.rundir import RunDir, read  # noqa: E402

JOB = """
import os, sys, time
from memfit.rundir import record
for epoch in (1, 2, 3):
    record("epoch", epoch=epoch, num_epochs=3, train_loss=1 / epoch, memory={"cpu": {"weights_bytes": 1000}})
exec(open(os.path.join(os.path.dirname(__file__), "then.py")).read())
"""
KEY = "0123456789abcdef" * 2 + "fedcba98"


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(_track, "_LAST_SECONDS", 15.0)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # to read it
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "then.py").touch()

    def make(track, command=f"exec {sys.executable} {tmp_path}/job.py"):
        path = tmp_path / "config.yaml"
        path.write_text(
            f"schema_version: 1\nexperiment: shown\nruns_dir: {tmp_path}/runs\n"
            f"stages: {{work: {{run: {command}}}}}\ntrack: {track}\n"
        )
        return path

    return make


def tensorboard(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(path / "tensorboard"))
    found.Reload()
    tensors = {tag: found.Tensors(tag) for tag in found.Tags()["tensors"]}
    shown = {tag: [(one.step, make_ndarray(one.tensor_proto).item()) for one in ones] for tag, ones in tensors.items()}
    return shown, " ".join(f"{tag} {one[-1][1].decode()}" for tag, one in shown.items() if tag.endswith("/end"))


def wandb(path):
    """The numbers are counted alone: the file is no public format."""
    content = b"".join(file.read_bytes() for file in path.glob("wandb/offline-run-*/*.wandb"))
    return {name: content.count(name.encode()) for name in ("work/train_loss",)}, content.decode("latin-1")


def mlflow(path):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(path / "mlflow").as_uri())
    [found] = client.search_runs([client.get_experiment_by_name("memfit").experiment_id])
    history = client.get_metric_history(found.info.run_id, "work/train_loss")
    return {"work/train_loss": [(one.step, one.value) for one in history]}, f"{found.data.tags} {found.info.status}"


READ = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


def told(path):
    return [(one["kind"], one["to"]) for one in RunDir(path).events() if one["kind"].startswith("track")]


@pytest.mark.parametrize("name", READ)
def test_each_shows_the_epochs_of_each_job_and_why_it_ended(config, tmp_path, name):
    pytest.importorskip(name, reason=f"{name} is not installed")
    (tmp_path / "then.py").write_text("sys.exit(7)")
    result = run(config(f"{{to: [{name}], offline: true}}"))
    assert result.state == "failed" and told(result.path) == [("tracking", name), ("tracked", name)]
    shown, ends = READ[name](result.path)
    if name in ("tensorboard", "mlflow"):
        assert [(step, round(loss, 3)) for step, loss in shown["work/train_loss"]] == [(1, 1.0), (2, 0.5), (3, 0.333)]
    else:
        assert shown["work/train_loss"]
    assert "exit code 7" in ends
    if name == "tensorboard":
        assert shown["work/memory/cpu/weights_bytes"] == [(1, 1000.0), (2, 1000.0), (3, 1000.0)]
    if name == "mlflow":
        assert "FAILED" in ends


@pytest.mark.parametrize(
    ("death", "cause"),
    [
        ("os.kill(os.getpid(), 9)", "killed with SIGKILL by somebody else"),
        ("bytearray(1<<50)", "out_of_memory: exit code 1; it said: MemoryError"),
    ],
)
def test_a_run_is_closed_with_the_proven_cause_of_a_jobs_death(config, tmp_path, death, cause):
    (tmp_path / "then.py").write_text(death)
    result = run(config("{to: [wandb], offline: true}\nretries: 0"))
    assert result.state == "failed" and told(result.path)[-1] == ("tracked", "wandb")
    assert cause in wandb(result.path)[1]


def test_a_run_is_closed_with_the_cause_when_the_supervisor_was_killed_and_goes_on_with_the_next(config, tmp_path):
    path = config("{to: [tensorboard], offline: true}")
    (tmp_path / "then.py").write_text(f"while not os.path.exists('{tmp_path}/go'): time.sleep(0.05)\nsys.exit(7)")
    supervisor = subprocess.Popen([sys.executable, "-m", "memfit", "run", str(path)], stdout=subprocess.DEVNULL)
    wait_until(lambda: bool([*tmp_path.glob("runs/shown/*/tracked_tensorboard.json")]))
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    [one] = RunDir.all(tmp_path / "runs", "shown")
    assert read(one).jobs["work"].shown == "running" and is_locked(one.path / "tensorboard.lock")
    (tmp_path / "go").touch()
    wait_until(lambda: not is_locked(one.path / "tensorboard.lock"))
    ends = tensorboard(one.path)[1]
    assert "work/end failed: exit code 7" in ends
    assert "run/end interrupted: memfit itself was killed; work failed: exit code 7" in ends
    (tmp_path / "then.py").write_text("")
    again = run(path)
    assert again.path == one.path and told(again.path)[-1] == ("tracked", "tensorboard")
    assert "interrupted" not in tensorboard(one.path)[1]


@pytest.mark.proves("S4-47")
@pytest.mark.parametrize("fault", ["raise OSError('no')", "import time; time.sleep(600)"])
def test_one_that_fails_or_hangs_is_given_up_and_shows_all_when_the_run_starts_again(
    config, tmp_path, monkeypatch, fault
):
    monkeypatch.setattr(_track, "_LAST_SECONDS", 2.0)
    broken = tmp_path / "broken" / "tensorboard"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(fault)
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    path = config("{to: [tensorboard]}", f"{sys.executable} {tmp_path}/job.py && test -e {tmp_path}/there")
    result = run(path)
    assert result.state == "failed"  # the job's own end, and no other
    assert ("track_failed", "tensorboard") in told(result.path)
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setattr(_track, "_LAST_SECONDS", 15.0)
    (tmp_path / "there").touch()
    again = run(path)
    assert (again.path, again.state) == (result.path, "completed")
    assert [step for step, _ in tensorboard(again.path)[0]["work/train_loss"]] == [1, 2, 3, 1, 2, 3]  # both attempts
    assert told(again.path)[-1] == ("tracked", "tensorboard")


def test_a_server_that_answers_with_errors_holds_nothing_up_and_the_key_is_in_no_file(config, monkeypatch):
    monkeypatch.setattr(_track, "_LAST_SECONDS", 3.0)
    asked = []

    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.path)
            self.send_response(500)
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OUR_KEY", KEY)
    result = run(config("{to: [wandb], key_variable: OUR_KEY}"))
    server.shutdown()
    server.server_close()
    assert result.state == "completed" and asked
    assert ("track_failed", "wandb") in told(result.path)
    for path in result.path.parent.parent.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


@pytest.mark.proves("S4-29")
def test_without_a_key_it_starts_only_where_offline_is_said(config, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(UsageError, match="WANDB_API_KEY is not set"):
        run(config("{to: [wandb]}"))


@pytest.mark.parametrize("value", [KEY, "my key"])
def test_a_key_in_clear_is_refused_with_the_line_that_is_right(config, value):
    with pytest.raises(ConfigError, match="key_variable: WANDB_API_KEY"):
        run(config(f"{{to: [wandb], key_variable: '{value}'}}"))
