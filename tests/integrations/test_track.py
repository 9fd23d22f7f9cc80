"""TensorBoard and Weights & Biases show a run's epochs; one that fails or hangs costs the run nothing."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("tensorboard")
pytest.importorskip("wandb")

from memfit import run  # noqa: E402
from memfit.errors import ConfigError, UsageError  # noqa: E402
from memfit.integrations import _track  # noqa: E402
from memfit.rundir import RunDir  # noqa: E402

JOB = """
from memfit.rundir import record
for epoch in (1, 2, 3):
    record("epoch", epoch=epoch, num_epochs=3, train_loss=1 / epoch, memory={"cpu": {"weights_bytes": 1000}})
"""
KEY = "0123456789abcdef" * 2 + "fedcba98"  # pragma: allowlist secret


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(_track, "_LAST_SECONDS", 15.0)
    (tmp_path / "job.py").write_text(JOB)

    def make(track, command=f"{sys.executable} {tmp_path}/job.py"):
        path = tmp_path / "config.yaml"
        path.write_text(
            f"schema_version: 1\nexperiment: shown\nruns_dir: {tmp_path}/runs\n"
            f"stages: {{work: {{run: {command}}}}}\ntrack: {track}\n"
        )
        return path

    return make


def scalars(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(path / "tensorboard"))
    found.Reload()
    shown = {tag: found.Tensors(tag) for tag in found.Tags()["tensors"]}
    return {
        tag: [(one.step, round(float(make_ndarray(one.tensor_proto)), 3)) for one in ones]
        for tag, ones in shown.items()
    }


def told(path):
    return [(one["kind"], one["to"]) for one in RunDir(path).events() if one["kind"].startswith("track")]


def test_both_show_each_epoch_of_each_job(config):
    result = run(config("{to: [tensorboard, wandb], offline: true}"))
    assert result.state == "completed"
    assert scalars(result.path) == {
        "work/train_loss": [(1, 1.0), (2, 0.5), (3, 0.333)],
        "work/memory/cpu/weights_bytes": [(1, 1000.0), (2, 1000.0), (3, 1000.0)],
    }
    (file,) = result.path.glob("wandb/offline-run-*/*.wandb")
    assert b"work/train_loss" in file.read_bytes()
    assert sorted(told(result.path)) == [
        (kind, to) for kind in ("tracked", "tracking") for to in ("tensorboard", "wandb")
    ]


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
    assert [step for step, _ in scalars(again.path)["work/train_loss"]] == [1, 2, 3, 1, 2, 3]  # both attempts
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


def test_without_a_key_it_starts_only_where_offline_is_said(config, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(UsageError, match="WANDB_API_KEY is not set"):
        run(config("{to: [wandb]}"))


@pytest.mark.parametrize("value", [KEY, "my key"])
def test_a_key_in_clear_is_refused_with_the_line_that_is_right(config, value):
    with pytest.raises(ConfigError, match="key_variable: WANDB_API_KEY"):
        run(config(f"{{to: [wandb], key_variable: '{value}'}}"))
