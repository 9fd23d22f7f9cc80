"""People are told of a run by a service that may be down, refuse or hang; the run is as without it."""

import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("apprise")

from memfit import run  # noqa: E402
from memfit.errors import ConfigError, UsageError  # noqa: E402
from memfit.integrations import NotifySettings, _notify, notifier_of  # noqa: E402
from memfit.rundir import EventWriter, RunDir  # noqa: E402

SECRET = "s3cr3t-webhook-path"


@pytest.fixture
def service(monkeypatch):
    """A loopback service: what it was sent, and the status that it answers, None to hang."""
    monkeypatch.setattr(_notify, "_SEND_SECONDS", 4.0)
    monkeypatch.setattr(_notify, "_PAUSES", (0.1,))
    monkeypatch.setattr(_notify, "_LAST_SECONDS", 20.0)

    class Service:
        status, sent = 200, []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            Service.sent.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            if Service.status is None:
                time.sleep(8)
                return
            self.send_response(Service.status)
            self.end_headers()

        def log_message(self, *_):
            pass

    Service.sent = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OUR_HOOK", f"json://127.0.0.1:{server.server_port}/{SECRET}")
    yield Service
    server.shutdown()
    server.server_close()


def config(folder, notify):
    path = folder / "config.yaml"
    path.write_text(
        f"schema_version: 1\nexperiment: told\nstages: {{work: {{run: sleep 1}}}}\nruns_dir: {folder}/runs\n"
        f"notify: {notify}\n"
    )
    return path


@pytest.mark.proves("S4-50")
@pytest.mark.parametrize("status", [200, 500, None])
def test_the_start_and_the_end_are_told_and_a_service_that_fails_costs_nothing(tmp_path, service, status, monkeypatch):
    service.status = status
    if status is None:
        monkeypatch.setattr(_notify, "_SEND_SECONDS", 1.0)
    result = run(config(tmp_path, "{url_variable: OUR_HOOK}"))
    assert (result.state, result.exit_code) == ("completed", 0)
    events = [one for one in RunDir(result.path).events() if one["kind"].startswith("notif")]
    if status == 200:
        assert len(service.sent) == 2 and "started" in service.sent[0] and "completed" in service.sent[1]
        assert [one["kind"] for one in events] == ["notified", "notified"]
    else:
        assert {one["kind"] for one in events} == {"notify_failed"}
        assert events[0]["why"] == ("no answer within 1 s" if status is None else "the service refused it")
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_an_out_of_memory_is_told_at_once_and_progress_now_and_then(tmp_path, service, monkeypatch):
    monkeypatch.setenv("SITE_PASSWORD", "s3cret-a")
    run_dir = RunDir.create(tmp_path, "demo", "0123abcd" * 8)
    events = EventWriter(run_dir.events_dir)
    events.write("oom", text="fold_0 is of an earlier start")
    settings = NotifySettings(url_variable="OUR_HOOK", every_seconds=3)
    notifier = notifier_of(settings, run_dir, events)
    with (run_dir.events_dir / "an-older-memfit-1.jsonl").open("w") as file:  # it masked nothing
        file.write('{"time": 1, "job": "fold_1", "kind": "death", "text": "fold_1 said: s3cret-a"}\n')
    events.write("oom", text="fold_1 is out of device memory")
    events.write("growth", job="fold_1", text="fold_1: it grows by 8.0 MiB a step")
    for epoch in (1, 2, 3):
        events.write("epoch", job="fold_1", epoch=epoch, text=f"fold_1 epoch {epoch}/3")
    end = time.monotonic() + 60
    while "fold_1 epoch 3/3" not in "".join(service.sent) and time.monotonic() < end:
        time.sleep(0.1)
    notifier.close("completed")
    events.close()
    told = "".join(service.sent)
    assert "fold_1 said: ***" in told and "s3cret-a" not in told
    assert "fold_1 is out of device memory" in told and "fold_1: it grows by 8.0 MiB a step" in told
    assert "earlier start" not in told
    assert "epoch 1/3" not in told and told.count("epoch 3/3") == 2  # once as progress, once at the end


@pytest.mark.parametrize("name", ["url_variable", "url_file"])
def test_an_address_in_clear_is_refused_with_the_line_that_is_right_and_is_not_shown(tmp_path, name):
    with pytest.raises(ConfigError, match="write url_variable: NOTIFY_URL") as caught:
        run(config(tmp_path, f"{{{name}: 'https://discord.com/api/webhooks/{SECRET}'}}"))
    assert SECRET not in str(caught.value) and "discord.com" in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_variable_that_is_not_set_is_told_before_a_job_starts(tmp_path):
    with pytest.raises(UsageError, match=r"url_variable NONE_SUCH cannot be read: it is not set"):
        run(config(tmp_path, "{url_variable: NONE_SUCH}"))
    assert not list(tmp_path.glob("runs/told/*/jobs/*"))


def test_a_file_holds_the_address_too(tmp_path, service, monkeypatch):
    (tmp_path / "hook").write_text(os.environ["OUR_HOOK"] + "\n")
    monkeypatch.delenv("OUR_HOOK")
    run_dir = RunDir.create(tmp_path, "demo", "0123abcd" * 8)
    events = EventWriter(run_dir.events_dir)
    notifier_of(NotifySettings(url_file=str(tmp_path / "hook")), run_dir, events).close("completed")
    events.close()
    assert len(service.sent) == 1 and "completed" in service.sent[0]
