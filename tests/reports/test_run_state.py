"""A run read from its directory: in mid-run, continued, torn and with files missing."""

import io
import json
from contextlib import suppress
from dataclasses import replace

import pytest
from rich.console import Console

from memfit.errors import DamagedError
from memfit.reports import read_room, render, summarize, to_text, view_summary, write_page
from memfit.rundir import LEVELS, Reader, level_of, read

MIB = 1 << 20


def view_of(made, at=0.0):
    return read(made.run, now=lambda: made.start + at)


def reader_of(made, at=0.0):
    reader = Reader(made.run, now=lambda: made.start + at)
    reader.read()
    return reader


def step(made, at, epoch, step, num_steps=100, job="fold_1", **fields):
    made.event(at, "step", job, "host-7-7", epoch=epoch, step=step, num_steps=num_steps, **fields)


@pytest.fixture
def training(made):
    made.event(0, "run", state="started")
    made.admit(0, "fold_1", 1)
    made.job("fold_1", "running", name="status.json", used_bytes=200 * MIB, phase="train")
    return made


@pytest.mark.parametrize(
    ("steps", "now", "done", "eta"),
    [
        # Each step: when, its epoch, its number of 100, the number of epochs.
        ([(100, 1, 1, 4), (199, 1, 100, 4)], 199, 1, 300),
        # Validation between the epochs is part of the rate: 50 seconds of it for each epoch from here on.
        ([(100, 1, 1, 4), (199, 1, 100, 4), (250, 2, 1, 4)], 250, 1.01, 2.99 * 150),
        ([(100, 1, 1, 4), (199, 1, 100, 4), (250, 2, 1, 4)], 260, 1.01, 2.99 * 150 - 10),
        ([(100, 1, 1, None), (199, 1, 100, None)], 199, 1, None),
        # A clock that jumps.
        ([(100, 1, 1, 2), (50, 1, 50, 2)], -100, 0.01, None),
        ([(100, 1, 1, 2), (50, 1, 50, 2), (200, 1, 90, 2)], 1e6, 0.9, 0),
        # Steps that are done again start the rate anew.
        ([(0, 2, 1, 2), (10, 2, 50, 2), (1000, 1, 1, 2), (1010, 1, 51, 2)], 1010, 0.51, 29.8),
    ],
)
def test_the_time_left_is_the_epochs_left_at_the_mean_rate_so_far(training, steps, now, done, eta):
    for at, epoch, number, num_epochs in steps:
        step(training, at, epoch, number, num_epochs=num_epochs)
    row = view_of(training, now).jobs["fold_1"]
    assert (row.epochs_done, row.eta_seconds) == (pytest.approx(done), eta if eta is None else pytest.approx(eta))
    assert row.seconds == max(0, now)
    training.job("fold_1", "failed", seconds=10)
    assert view_of(training, now).jobs["fold_1"].eta_seconds is None


def test_epochs_alone_give_a_time_left_too(training):
    training.event(10, "epoch", "fold_1", epoch=1, num_epochs=5)
    assert view_of(training, 10).jobs["fold_1"].eta_seconds is None
    training.event(20, "epoch", "fold_1", epoch=2, num_epochs=5)
    row = view_of(training, 25).jobs["fold_1"]
    assert (row.eta_seconds, row.epochs_done, row.num_epochs) == (25, 2, 5)


def test_after_a_resume_the_time_between_the_attempts_does_not_count(training):
    step(training, 0, 1, 1, num_epochs=2)
    step(training, 99, 1, 100, num_epochs=2)
    training.event(5000, "run", state="continued")
    training.admit(5001, "fold_1", 1)
    step(training, 5100, 2, 1, num_epochs=2)
    step(training, 5110, 2, 11, num_epochs=2)
    assert view_of(training, 5110).jobs["fold_1"].eta_seconds == pytest.approx(89)


def test_a_reader_that_looks_in_between_sees_what_a_reader_at_the_end_sees(training):
    early = Reader(training.run, now=lambda: training.start + 20)
    for at, number in ((1, 10), (2, 20), (3, 30)):
        step(training, at, 1, number, num_epochs=2)
        early.read()
    assert early.state().jobs["fold_1"] == view_of(training, 20).jobs["fold_1"]


def test_of_many_steps_the_last_counts(training):
    for number in range(1, 101):
        step(training, number, 1, number, num_epochs=2)
    view = Reader(training.run, now=lambda: training.start)
    assert len(view.read()) == 102
    assert view.state().jobs["fold_1"].epochs_done == 1


def test_a_job_has_reserved_what_it_was_admitted_with_or_grew_to_in_this_attempt(made):
    made.admit(0, "fold_1", 1, 100)
    made.event(1, "grow", "fold_1", from_bytes=100, to_bytes=300, why="free")
    made.admit(1, "fold_2", 1, 100)
    made.event(2, "grow", "fold_2", from_bytes=100, to_bytes=400, why="free")
    made.event(3, "retry", "fold_2", attempt=2, reservation_bytes=500, reason="it stepped aside")
    made.admit(4, "fold_2", 1, 500)
    made.admit(4, "fold_3", 1, None)  # of unknown size
    for name in ("fold_1", "fold_2", "fold_3"):
        made.job(name, "running", name="status.json")
    assert [row.reserved_bytes for row in view_of(made).jobs.values()] == [300, 500, None]


def test_a_job_that_is_queued_again_waits_and_is_read_anew_when_it_runs(commands):
    made = commands(3)
    made.admit(0, "cmd_0001", 1)
    made.job("cmd_0001", "out_of_memory", seconds=10)
    view = reader_of(made, 12)
    assert view.state().counts == {"waiting": 2, "out_of_memory": 1}
    made.event(11, "retry", "cmd_0001", attempt=2, reservation_bytes=1, reason="more")
    view.read()
    assert view.state().counts == {"waiting": 3}
    (made.path / "jobs/cmd_0001/outcome.json").unlink()
    made.job("cmd_0001", "running", name="status.json", at=12, attempt=2)
    made.admit(12, "cmd_0001", 1)
    view.read()
    assert (view.state().counts, view.state().jobs["cmd_0001"].attempt) == ({"running": 1, "waiting": 2}, 2)


def test_a_retry_that_a_stop_forestalled_leaves_the_job_as_it_ended(commands):
    made = commands(1)
    made.job("cmd_0001", "out_of_memory", seconds=10)
    made.event(11, "retry", "cmd_0001", attempt=2, reservation_bytes=1, reason="more")
    made.event(12, "stop", level=1, num_running=0)
    view = view_of(made)
    assert view.counts == {"out_of_memory": 1}


def test_a_job_that_was_just_admitted_runs_before_its_watcher_says_so(commands):
    made = commands(2)
    (made.path / "jobs" / "cmd_0001").mkdir()
    made.admit(10, "cmd_0001", 1)
    view = reader_of(made, 10.3)
    assert view.state().counts == {"running": 1, "waiting": 1}
    assert view.state().jobs["cmd_0001"].seconds == pytest.approx(0.3)
    made.event(20, "run", state="continued")
    view.read()
    assert view.state().counts == {"waiting": 2}


def test_the_files_of_a_job_that_ended_are_read_once(commands):
    made = commands(4)
    for number in (1, 2, 3):
        made.job(f"cmd_000{number}", seconds=10)
        made.event(10, "end", f"cmd_000{number}", state="completed", cause="")
    made.job("cmd_0004", "running", name="status.json")
    view = reader_of(made, 20)
    before = [*view.state().jobs.values()]
    for number in (1, 2, 3):
        (made.path / f"jobs/cmd_000{number}/outcome.json").write_text("damaged meanwhile")
    made.job("cmd_0004", seconds=30)
    view.read()
    assert [*view.state().jobs.values()][:3] == before[:3]
    assert view.state().jobs["cmd_0004"].state == "completed"
    made.event(50, "run", state="continued")
    view.read()
    with pytest.raises(DamagedError):
        [*view.state().jobs.values()]


def test_an_event_file_that_did_not_grow_is_not_opened_again(made, monkeypatch):
    made.event(0, "run", state="started")
    made.event(0, "phase", "fold_1", "host-2-2", phase="load")
    view = reader_of(made)
    opened = []
    monkeypatch.setattr("memfit.rundir.EventTail.read", lambda tail: opened.append(tail.path.name) or [])
    made.event(1, "phase", "fold_1", "host-2-2", phase="train")
    view.read()
    assert opened == ["host-2-2.jsonl"]


def test_a_runs_time_left_is_what_is_waiting_at_the_mean_time_shared_by_those_that_run(commands):
    made = commands(10)
    for number, state in ((1, "completed"), (2, "completed"), (3, "running"), (4, "running")):
        made.job(f"cmd_{number:04d}", state, at=0 if number < 3 else 10, seconds=10.0,
                 name="status.json" if state == "running" else "outcome.json")  # fmt: skip
    view = view_of(made, 14)
    assert view.left("cmd") == (6 * 10 + 2 * 6) / 2
    late = {name: job for name, job in view.jobs.items() if job.state == "running"}
    assert replace(view, jobs=late).left("cmd") is None


def test_commands_are_in_order_of_their_numbers(commands):
    made = commands(12)
    for name in ("cmd_0010", "cmd_0002", ".hidden", "cmd_10000"):
        (made.path / "jobs" / name).mkdir()
    view = view_of(made)
    assert [*view.jobs] == ["cmd_0002", "cmd_0010", "cmd_10000"]
    assert next(row.name for row in [*view.jobs.values()]) == "cmd_0002 fold=2 lr=1e-3"


def test_the_most_at_once_counts_jobs_of_the_last_command_that_admitted_any(made):
    made.event(0, "run", state="started")
    for number in (1, 2, 3):
        made.admit(2, f"fold_{number}", number)
    assert view_of(made).most_at_once == 3
    made.event(3, "run", state="preempted")
    made.event(4, "run", state="continued")
    assert view_of(made).most_at_once == 3
    made.admit(5, "fold_2", 1)
    assert view_of(made).most_at_once == 1


def test_the_wall_clock_is_the_last_commands(made):
    assert view_of(made, 50).wall_seconds == 0
    made.event(0, "run", state="started")
    made.event(60, "run", state="preempted")
    assert view_of(made, 1000).wall_seconds == 60
    made.event(100, "run", state="continued")
    assert view_of(made, 130).wall_seconds == 30
    made.event(200, "run", state="completed")
    view = view_of(made, 1000)
    assert (view.wall_seconds, view.num_commands) == (100, 2)


def test_a_command_that_was_refused_ended_with_its_last_event(made):
    made.event(0, "run", state="started")
    made.event(7, "wait", "fold_1", reason="x", arithmetic="")
    (made.path / "outcome.json").write_text('{"state": "failed", "cause": "fold_1 needs 900 TiB"}')
    assert view_of(made, 1000).wall_seconds == 7


def test_jobs_are_in_the_order_of_their_stages_and_numbers(made):
    for name in ("judge", "fold_10", "fold_2", "fold_1", "prepare"):
        made.job(name)
    (made.path / "jobs" / ".hidden").mkdir()
    rows = [*view_of(made).jobs.values()]
    assert [row.id for row in rows] == ["prepare", "fold_1", "fold_2", "fold_10", "judge"]
    assert [row.stage for row in rows[:2]] == ["prepare", "fold"]


@pytest.mark.proves("S1-25")
def test_stages_say_what_is_kept_why_others_run_and_what_that_saves(made):
    made.event(0, "run", state="continued")
    made.stage(0, "prepare", "reused", why="/runs/demo/run_1/checkpoints/stage_prepare.json", seconds=7.5)
    made.stage(0, "fold", "kept", "fold_1", "fold_2", seconds=100.0)
    made.stage(0, "fold", "running", "fold_3", "fold_4", why="code of train changed")
    made.stage(0, "judge", "waiting")
    made.job("fold_1", seconds=50.0)
    made.result("prepare", num_dates=9)
    for name in ("fold_1", "fold_2"):
        made.result(name, rank_ic=0.5)
    made.job("fold_3", "running", name="status.json", at=10)
    view = reader_of(made, 20)
    rows = [*view.state().jobs.values()]
    assert [(row.id, row.shown) for row in rows] == [
        ("prepare", "reused"), ("fold_1", "kept"), ("fold_2", "kept"), ("fold_3", "running"),
    ]  # fmt: skip
    assert (rows[0].result, rows[2].result, rows[2].seconds) == ({"num_dates": 9}, {"rank_ic": 0.5}, None)
    assert view.state().counts == {"completed": 3, "running": 1, "waiting": 2}
    assert [view.state().stages[name].saved_seconds for name in ("prepare", "fold")] == [7.5, 100]
    assert view.state().stages["fold"].why == "fold_3 and fold_4: code of train changed"
    assert view.state().left("fold") == 90
    made.event(30, "run", state="continued")
    view.read()
    assert view.state().stages == {}


def test_a_gate_that_stopped_the_run_and_what_it_skipped_are_no_failures(made):
    made.stage(0, "prepare", "stopped", why="the first fold loses money")
    made.stage(0, "judge", "skipped", why="prepare stopped the run: the first fold loses money")
    made.job("prepare")
    made.result("prepare", sharpe=-1.0)
    view = view_of(made)
    assert view.counts == {"skipped": 1, "stopped": 1}
    assert view.jobs["prepare"].result == {"sharpe": -1.0}


def test_a_job_that_ended_well_and_left_no_result_has_failed(made):
    made.stage(0, "prepare", "failed", why="its result is not there")
    made.job("prepare")
    assert view_of(made).jobs["prepare"].shown == "failed"


def test_a_torn_last_record_and_broken_lines_are_passed_over(made):
    made.event(0, "run", state="started")
    path = made.path / "events" / "host-1-1.jsonl"
    path.write_text(path.read_text() + 'nonsense\n[1]\n{"time":1,"kin')
    view = reader_of(made)
    assert view.state().num_commands == 1
    with open(path, "a") as lines:
        lines.write('d":"plan","job":null,"why":"late"}\n')
    assert [event["why"] for event in view.read()] == ["late"]


@pytest.mark.parametrize("name", ["plan.json", "graph.json", "checkpoints/stage_prepare.json", "jobs/fold_1/outcome.json",
                                  "checkpoints/fold_1.json", "outcome.json", "events"])  # fmt: skip
def test_a_reader_copes_with_a_missing_part(finished, name):
    path = finished.path / name
    if path.is_dir():
        for file in path.iterdir():
            file.unlink()
    else:
        path.unlink()
    view = view_of(finished, 9000)
    rows = [*view.jobs.values()]
    by_job = {row.id: row for row in rows}
    names = ["prepare", "fold_1", "fold_2", "fold_3"]
    assert list(by_job) == (sorted(names) if name == "graph.json" else names)  # the graph has the order of the stages
    assert by_job["fold_3"].result["num_dates"] == 544
    assert (view.run.plan is None) == (name == "plan.json")
    assert (by_job["fold_1"].result == {}) == (name == "checkpoints/fold_1.json")


def test_a_file_that_was_changed_from_outside_is_named(finished):
    (finished.path / "plan.json").write_text('{"why"')
    with pytest.raises(DamagedError, match=r"plan\.json"):
        _ = view_of(finished).run.plan


HOSTILE = ["absent", "9" * 400, "1e400", "-1e400", "NaN", "9" * 18, "-1", "1e300", '"x"', "null", "[1]", "{}", "true"]
BUDGET = {"limits": "[]", "reserve_bytes": "3", "headroom_bytes": "3", "promise": '"p"', "job": "null"}
EVENTS = {
    "admit": {"job": '"fold_1"', "num_running": "1", "why": '"w"', "reservation_bytes": "7"},
    "grow": {"job": '"fold_1"', "from_bytes": "1", "to_bytes": "9", "why": '"w"'},
    "epoch": {"job": '"fold_1"', "epoch": "1", "num_epochs": "2", "loss": "0.5", "memory": '{"cpu": {"a": 3}}'},
    "step": {"job": '"fold_1"', "epoch": "1", "step": "1", "num_steps": "2", "num_epochs": "3"},
    "stage": {"stage": '"fold"', "state": '"kept"', "why": '""', "jobs": '["fold_1"]', "seconds": "3"},
    "budget": {"binding": '{"name": "a", "source": "s", "limit_bytes": 9}', **BUDGET},
    "budget ": {"binding": '{"name": "a", "source": "s", "limit_bytes": HERE}', **BUDGET},
    "end": {"job": '"fold_1"', "state": '"completed"', "cause": '""', "used_bytes": "7", "limit_bytes": "7"},
    "oom": {"job": '"fold_1"', "text": '"t"', "level": '"line"'},
    "run": {"state": '"completed"', "cpu": '{"busy": HERE, "disk": 0.1}', "job": "null"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVENTS)
def test_no_value_in_an_event_makes_a_reader_of_the_run_fail(finished, kind):
    path, view, fields = finished.path / "events" / "job-1-1.jsonl", reader_of(finished), EVENTS[kind]
    series = finished.path / "jobs" / "fold_1" / "memory.jsonl"
    sizes = ("private_bytes", "shared_bytes", "rss_bytes", "pss_bytes", "peak_bytes")
    sample = {"num_processes": 1, **dict.fromkeys(sizes, 9)}
    start = finished.start + 100
    series.write_text(json.dumps(sample | {"time": start, "phase": "train", "device_bytes": {}}) + "\n")
    given = {"time": str(start), "kind": f'"{kind.strip()}"'}
    for name, value in ((name, value) for name in [*given, *fields] for value in HOSTILE):
        words = given | fields | ({} if "HERE" in str(fields) else {name: value})
        words = {one: text for one, text in words.items() if text != "absent"}
        line = "{" + ", ".join(f'"{one}": {text}' for one, text in words.items()) + "}\n"
        with open(path, "a") as lines:
            lines.write(line.replace("HERE", value))
        events, state = view.read(), view.state()
        assert all(level_of(event) in LEVELS for event in events)
        render(state, read_room(state, here=False))
        json.dumps(summarize(state), allow_nan=False)
        to_text(view_summary(state, 80, verbose=True), Console(file=io.StringIO()))
    write_page(view.run, finished.path / "page.html")


@pytest.mark.parametrize("name", ["started", "ended", "peak_bytes", "used_bytes", "cpu_seconds", "attempt"])
def test_no_value_in_an_outcome_makes_a_reader_fail_but_by_the_files_name(finished, name):
    path = finished.path / "jobs" / "fold_1" / "outcome.json"
    plain = json.loads(path.read_text())
    for value in HOSTILE[1:]:
        path.write_text(json.dumps(plain | {name: "HERE"}).replace('"HERE"', value))
        with suppress(DamagedError):
            view = view_of(finished)
            render(view, read_room(view, here=False))
            write_page(view.run, finished.path / "page.html")


def test_a_run_that_is_followed_from_its_first_moment_shows_the_stages_and_params_that_are_written_later(made):
    stages = (made.path / "graph.json").read_bytes()
    (made.path / "graph.json").unlink()
    header = json.loads((made.path / "run.json").read_text())
    (made.path / "run.json").write_text(json.dumps(header | {"units": [{"lr": "0.1"}]}))
    reader = reader_of(made)
    assert not reader.state().graph and not reader.state().params
    (made.path / "graph.json").write_bytes(stages)
    first = next(iter(json.loads(stages)["stages"]))["name"]
    assert reader.state().params == {f"{first}_0001": {"lr": "0.1"}} and first in reader.state().graph
