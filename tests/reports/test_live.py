"""What is shown while a run goes on: lines for all, a table on a terminal."""

import io
import json
import os
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from memfit.reports import LiveRun, Room, describe, read_room, render, summarize, to_text, view_runs, view_summary
from memfit.rundir import read, read_events

GIB, MIB = 1 << 30, 1 << 20
FREE = {"name": "MemAvailable", "source": "/proc/meminfo", "limit_bytes": 8 * GIB}
REST = {"headroom_bytes": GIB, "reserve_bytes": 0, "promise": "none"}


def view_of(made, at=0.0):
    return read(made.run, now=lambda: made.start + at)


class Shown:
    """What a console got; ``terminal`` makes it one."""

    def __init__(self, width=80, terminal=False):
        self.file = io.StringIO()
        self.console = Console(file=self.file, width=width, force_terminal=terminal, color_system=None)
        self.live = LiveRun(self.console)

    @property
    def lines(self):
        return self.file.getvalue().splitlines()


def table_lines(view, width, room=None):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, record=True)
    room = room or Room(64 * GIB, 14 * GIB, "MemAvailable")
    console.print(render(view, room, width=width))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_what_a_command_left_in_shared_memory_is_said_also_where_its_end_has_no_line(commands):
    left = "it left 8.0 MiB in /dev/shm or another tmpfs"
    event = {"time": 1.0, "kind": "end", "job": "cmd_0001", "state": "completed", "cause": left}
    view = view_of(commands(1))
    assert describe(event, view) == f"the command completed: {left}"
    assert describe(event | {"cause": ""}, view) == ""
    many, shown = commands(20), Shown(width=200, terminal=True)
    tick = shown.live.show(many.run)
    many.job("cmd_0001", cause=left)
    many.end(1, "cmd_0001", cause=left)
    tick()
    shown.live.close()
    assert left in shown.file.getvalue()


def test_what_an_earlier_command_did_is_not_shown_again(finished):
    shown = Shown()
    tick = shown.live.show(finished.run)
    finished.event(8000, "resume", "fold_2", epoch=3, path="x", text="fold_2 continues after epoch 3")
    tick()
    shown.live.close()
    assert shown.lines[1:] == ["2026-11-21 11:13:20  fold_2 continues after epoch 3"]


def test_what_happens_after_the_last_tick_is_shown_at_the_end(made):
    shown = Shown(terminal=True)
    tick = shown.live.show(made.run)
    tick()
    made.job("fold_1", seconds=3)
    made.end(3, "fold_1")
    tick()
    shown.live.close()
    assert sum("fold_1 completed" in line for line in shown.lines) == 1


def test_a_line_that_is_still_being_written_waits_for_its_rest(made):
    shown = Shown()
    tick = shown.live.show(made.run)
    path = made.path / "events" / "host-1-1.jsonl"
    path.write_text('{"time":1795248000.0,"job":null,"kind":"plan","te')
    tick()
    shown.live.reader.read()
    assert len(shown.lines) == 1
    with open(path, "a") as lines:
        lines.write('xt":"3 of 3 at once"}\n')
    shown.live.close()
    assert shown.lines[1:] == ["2026-11-21 09:00:00  3 of 3 at once"]


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "epoch", "job": "fold_1", "num_epochs": 3},
        {"kind": "epoch", "job": "fold_1", "epoch": "three", "num_epochs": 4},
        {"kind": "step", "job": "fold_1"},
        {"kind": "oom", "job": "fold_1", "text": 7},
        {"kind": "microbatch", "job": "fold_1", "size": 4},
        {"kind": "run", "job": "fold_1", "state": "started"},
        {"kind": "end", "job": "fold_1"},
        {"kind": "admit", "job": "fold_1", "num_running": None, "why": "", "reservation_bytes": 1},
        {"kind": 7},
        {"kind": "plan", "text": "x", "time": "noon"},
        {"kind": "budget", "job": None, "binding": 3, "limits": []},
        {"kind": "budget", "job": None, "binding": FREE, "limits": [], "reserve_bytes": 0},
    ],
    ids=lambda fields: "-".join(map(str, fields.values()))[:30],
)
def test_what_a_job_records_under_a_known_name_cannot_make_its_readers_fail(made, fields):
    shown = Shown()
    shown.live.show(made.run)
    made.job("fold_1", "running", name="status.json")
    made.event(1, **({"time": made.start} | fields) if "time" not in fields else {"kind": "none"})
    if "time" in fields:
        (made.path / "events" / "host-9-9.jsonl").write_text('{"time":"noon","job":null,"kind":"plan","text":"x"}\n')
    shown.live.close()
    assert len(shown.lines) == 1
    view = view_of(made, 5)
    assert (view.num_commands, view.jobs["fold_1"].epochs_done) == (0, 0)
    assert table_lines(view, 80)


def test_below_the_table_stands_how_far_each_stage_is(made):
    made.event(0, "run", state="started")
    made.stage(0, "prepare", "kept")
    made.stage(0, "fold", "running", "fold_1", "fold_2", "fold_3")
    made.stage(1, "fold", "completed", "fold_1")
    made.stage(1, "judge", "waiting")
    made.job("fold_1", seconds=60)
    made.job("fold_2", "running", name="status.json")
    lines = table_lines(view_of(made, 20), 80)
    assert lines[4] == "stages: prepare kept, fold 1 of 3, judge waiting"
    assert lines[5] == "completed 2, running 1, waiting 2; about 1m 40s of fold left"


def test_the_line_below_the_table_knows_the_cap_of_the_runs_config(made):
    made.event(0, "budget", binding=FREE, limits=[FREE, FREE | {"name": "cap", "limit_bytes": 64 * MIB}], **REST)
    made.job("fold_1", "running", name="status.json", used_bytes=24 * MIB)
    view = view_of(made)
    assert read_room(view) == Room(64 * MIB, 24 * MIB, "cap")


def test_a_watcher_from_elsewhere_goes_by_what_the_run_said(made):
    binding = FREE | {"name": "memory.max", "used_bytes": GIB}
    made.event(0, "budget", binding=binding, limits=[], **REST)
    made.job("fold_1", "running", name="status.json", used_bytes=24 * MIB)
    view = view_of(made)
    assert read_room(view, here=False) == Room(8 * GIB, GIB, "memory.max")
    made.admit(5, "fold_1", 1, limit_bytes=8 * GIB, used_bytes=3 * GIB, pss_bytes=0)
    assert read_room(view_of(made), here=False).used_bytes == 3 * GIB


def test_an_event_is_shown_by_its_own_text_and_one_without_has_no_line(commands):
    view = view_of(commands(3))
    event = {"time": 0.0, "kind": "aside", "job": "cmd_0003", "reason": "cmd_0001 waits", "now": False}
    text = "memfit asks cmd_0003 to checkpoint"
    assert describe(event | {"text": text}, view) == text
    assert describe(event, view) == ""


@pytest.mark.parametrize(("level", "num", "verbose", "is_told"), [
    ("verbose", 1, False, False), ("verbose", 1, True, True), ("table", 20, False, False), ("table", 20, True, True),
    ("table", 2, False, True), ("line", 20, False, True), ("of my own", 20, False, True),
])  # fmt: skip
def test_an_event_is_a_line_down_to_its_level(commands, level, num, verbose, is_told):
    made, shown = commands(num), Shown()
    shown.live.verbose = verbose
    shown.live.show(made.run)
    made.event(1, "grow", "cmd_0001", from_bytes=1, to_bytes=2, why="", text="cmd_0001 grew", level=level)
    shown.live.close()
    assert any("cmd_0001 grew" in line for line in shown.lines) == is_told


def test_a_commands_start_and_end_name_its_parameters(commands):
    made = commands(2)
    made.admit(0, "cmd_0002", 1)
    made.job("cmd_0002", "out_of_memory", seconds=3512.0)
    made.end(3512, "cmd_0002", "out_of_memory", "it met its wall")
    start, end = (describe(event, view_of(made)) for event in read_events(made.run.events_dir))
    assert start == "cmd_0002 fold=2 lr=1e-3 starts (1 running)"
    assert end == "cmd_0002 fold=2 lr=1e-3 out_of_memory: it met its wall"


def test_a_job_shows_the_phase_that_it_marked_or_its_logs_counter_or_that_it_runs(commands):
    made = commands(5)
    made.job("cmd_0001", "running", name="status.json", pid=1, phase="train")
    made.job("cmd_0002", "running", name="status.json", pid=2)
    made.job("cmd_0003", "running", name="status.json", pid=3, phase="train", stalled=True)
    made.job("cmd_0004", "running", name="status.json", pid=4)
    made.job("cmd_0005", "running", name="status.json")
    (made.run.job_dir("cmd_0001") / "out.log").write_text("Epoch 1/3\n")
    (made.run.job_dir("cmd_0002") / "err.log").write_text("validating\n 12%|#   | 120/1000 [00:10<01:00]\n")
    (made.run.job_dir("cmd_0004") / "out.log").write_text("training\nsaving model\n")
    lines = table_lines(view_of(made, 5), 80)
    for line, told in zip(lines[1:6], ("train", "120/1000 ~log", "stalled", "runs", "starts"), strict=True):
        assert f" {told}  " in line
    assert lines[0].split() == ["job", "phase", "memory", "peak", "reserved", "time", "ETA"]
    assert lines[6] == "running 5; 1 waiting for memory"
    assert max(map(len, lines)) <= 80


def test_where_a_terminal_is_narrow_jobs_go_by_what_differs_without_sizes(commands):
    made = commands(2)
    for name in ("cmd_0001", "cmd_0002"):
        made.job(name, "running", name="status.json", phase="train", used_bytes=100 * MIB)
    view = view_of(made, 30)
    assert "cmd_0001 fold=1 lr=1e-3 train" in table_lines(view, 80)[1]
    lines = table_lines(view, 57)
    assert lines[0].split() == ["job", "phase", "time", "ETA"]
    assert [line.split()[0] for line in lines[1:3]] == ["fold=1", "fold=2"], "lr is the same in all"
    assert "…" not in "".join(table_lines(view, 30)[:3])
    assert all(max(map(len, table_lines(view, width))) <= width for width in (30, 40, 50, 60, 70, 80))


def test_the_log_of_a_command_tells_when_it_ends(commands):
    made, shown, began = commands(1), Shown(width=120, terminal=True), time.time() - 11_000
    made.admit(0, "cmd_0001", 1)
    made.job("cmd_0001", "running", name="status.json", pid=1, started=began)
    log = made.run.job_dir("cmd_0001") / "out.log"
    tick, etas = shown.live.show(made.run), []
    for seconds, line in ((4_000, "epoch 1/5"), (10_000, "epoch 3/5")):
        log.write_text(line)
        os.utime(log, (began + seconds,) * 2)
        shown.live._next = 0.0
        tick()
        etas.append([line.split()[-2] for line in shown.lines if "~log" in line][-1])
    shown.live.close()
    assert etas == ["2h", "1h"], "4,000 s an epoch since the start, then 3,333 s"


@pytest.mark.parametrize(("silent", "is_told"), [(9.0, False), (11.0, True)])
def test_without_a_table_a_line_tells_after_a_silence_what_runs_and_what_others_wait_for(
    commands, monkeypatch, silent, is_told
):
    made, shown = commands(3), Shown(width=200)
    made.event(0, "run", state="started")
    made.admit(0, "cmd_0001", 1)
    made.job("cmd_0001", "running", name="status.json", phase="train")
    tick = shown.live.show(made.run)
    wait = {"reason": "it needs 300.0 MiB", "arithmetic": "", "on": "memory"}
    made.event(1, "wait", "cmd_0002", num_running=1, **wait, text="cmd_0002 waits: it needs 300.0 MiB")
    tick()
    num, now = len(shown.lines), time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now + silent)
    tick()
    assert len(shown.lines) - num == int(is_told)
    if is_told:
        assert ": cmd_0001 fold=1 lr=1e-3 train; 2 wait (it needs 300.0 MiB)" in shown.lines[-1]
        monkeypatch.setattr("time.monotonic", lambda: now + silent + 19)
        tick()
        assert len(shown.lines) - num == 1, "the next one comes after twice as long"
        monkeypatch.setattr("time.monotonic", lambda: now + silent + 21)
        tick()
        assert len(shown.lines) - num == 2


def test_a_single_command_that_prints_is_not_talked_over(commands, monkeypatch):
    made, shown = commands(1), Shown(width=200)
    header = json.loads((made.path / "run.json").read_text()) | {"combinations": [{}]}
    (made.path / "run.json").write_text(json.dumps(header))
    made.event(0, "run", state="started")
    made.job("cmd_0001", "running", name="status.json", pid=1)
    (made.run.job_dir("cmd_0001") / "out.log").write_text("loss 0.5")
    tick, now = shown.live.show(made.run), time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now + 11)
    tick()
    assert len(shown.lines) == 1
    os.utime(made.run.job_dir("cmd_0001") / "out.log", (0, 0))
    tick_again = now + 22
    monkeypatch.setattr("time.monotonic", lambda: tick_again)
    tick()
    assert len(shown.lines) == 2


@pytest.mark.slow
def test_of_a_thousand_jobs_the_table_shows_those_that_run_and_counts_the_others(commands):
    made = commands(1000)
    for number in range(1, 416):
        made.admit(number, f"cmd_{number:04d}", 8, limit_bytes=8 * GIB, used_bytes=GIB, pss_bytes=0)
        made.job(f"cmd_{number:04d}", "failed" if number in (7, 9) else "completed", at=number, seconds=10.0)
    for number in range(416, 424):
        made.job(f"cmd_{number:04d}", "running", name="status.json", at=420, used_bytes=MIB)
    lines = table_lines(view_of(made, 425), 80)
    assert [line.split()[0] for line in lines[1:12]] == [f"cmd_0{number}" for number in range(413, 424)]
    assert lines[12] == "completed 413, running 8, waiting 577, failed 2; about 12m 06s left"
    assert max(map(len, lines)) <= 80


def test_the_bar_shows_others_jobs_reserved_and_free_as_shares_of_the_limit(commands):
    made = commands(2)
    made.admit(0, "cmd_0001", 1, 2 * GIB)
    made.job("cmd_0001", "running", name="status.json", used_bytes=GIB)
    bar = table_lines(view_of(made), 80, Room(4 * GIB, 2 * GIB, "cap"))[-2]
    assert bar == f"[{'o' * 10}{'#' * 10}{'=' * 10}{'.' * 10}] # jobs = reserved o others . free"
    full = table_lines(view_of(made), 80, Room(GIB, 3 * GIB, "cap"))[-2]
    assert full.partition("]")[0] == "[" + "o" * 40


def test_a_cause_of_several_lines_is_shown_in_one_and_a_trial_of_a_jobs_own_by_its_text(made):
    shown = Shown()
    shown.live.show(made.run)
    made.job("fold_1", "failed", seconds=1)
    made.end(1, "fold_1", "failed", "it needs more.\n  rule: the cap.\n  do: raise it")
    made.event(2, "trial", "fold_1", name="trial_0001", text="my own trial 1 is over")
    shown.live.close()
    told = [line.partition("  ")[2] for line in shown.lines[1:]]
    assert told == ["fold_1 failed: it needs more.; rule: the cap.; do: raise it", "my own trial 1 is over"]


def test_a_terminal_is_given_back_when_nothing_was_shown():
    shown = Shown(terminal=True)
    shown.live.close()
    assert shown.lines == []


def test_a_study_shows_the_ends_of_its_trials_and_how_far_it_is(study):
    shown, run, made = Shown(), study.begin(), study.made
    study.trial(0, value=0.01, intermediate={2: 0.01})
    tick = shown.live.show(run)
    job = "trial_0001.fold_1"
    made.stage(1, "fold", "running", job)
    made.admit(1, job, 1)
    made.event(2, "epoch", job, epoch=1, num_epochs=2, text=f"{job} epoch 1/2")
    made.job(job)
    made.end(60, job)
    study.trial(1, value=0.0341)
    made.event(60, "trial", name="trial_0001", state="completed", text="trial_0001 completed: rank_ic 0.0341")
    study.trial(2, "pruned", 0.001, num_seen=1, intermediate={2: 0.001})
    made.event(61, "trial", name="trial_0002", state="pruned", text="trial_0002 pruned")
    tick()
    shown.live.close()
    assert shown.lines[:2] == [
        f"Run {run.path}",
        "trials 1 of 40: 1 completed; best rank_ic 0.0100 (trial_0000); about 19m 30s left",
    ]
    assert [line.partition("  ")[2] for line in shown.lines[2:]] == [
        "trial_0001 completed: rank_ic 0.0341",
        "trial_0002 pruned",
    ]


def test_quiet_prints_the_trials_of_a_study_that_failed(study):
    file = io.StringIO()
    live, run = LiveRun(Console(file=file, width=80), quiet=True), study.begin()
    live.show(run)
    for number, state in enumerate(["completed", "pruned", "failed", "infeasible"]):
        study.trial(number, state, 0.1, cause="no")
        study.made.event(
            number, "trial", name=f"trial_{number:04d}", state=state, text=f"trial_{number:04d} {state}: no"
        )
    live.close()
    assert [line.partition("  ")[2] for line in file.getvalue().splitlines()] == [
        "trial_0002 failed: no",
        "trial_0003 infeasible: no",
    ]


def test_above_the_table_of_a_study_stands_how_far_it_is(study):
    shown, run = Shown(width=100, terminal=True), study.begin(n_trials=2)
    study.trial(0, value=0.0341)
    study.trial(1, "running")
    study.made.event(0, "run", state="started")
    study.made.stage(1, "fold", "running", "trial_0001.fold_1")
    study.made.job("trial_0001.fold_1", "running", name="status.json")
    tick = shown.live.show(run)
    tick()
    lines = [line.rstrip() for line in shown.lines]
    shown.live.close()
    headline = "trials 1 of 2: 1 completed, 1 running; best rank_ic 0.0341 (trial_0000); about 1m 00s left"
    assert lines[1] == headline, "where it stands at the start"
    at = next(at for at, line in enumerate(lines) if headline in line and at > 1)
    assert lines[at + 1].startswith("job ") and lines[at + 2].startswith("trial_0001.fold_1 ")
    assert lines[at + 3] == "running 1", "the time left is that of the study"


def test_growth_of_a_running_job_is_said_once_also_to_who_looks_on_later(growing):
    said = f"fold_1: {growing.growth.text}"
    for _ in range(2):
        shown = Shown(width=400)
        tick = shown.live.show(growing.run)
        growing.event(1, "growth", "fold_1", text=growing.growth.text)
        for _ in range(2):
            shown.live._next = 0.0
            tick()
        shown.live.close()
        assert shown.file.getvalue().count("grows by 8.0 MiB a step") == shown.file.getvalue().count(said) == 1


def test_growth_is_told_in_the_list_of_runs_in_the_summary_and_in_json(growing):
    view, said = view_of(growing, 60), f"fold_1: {growing.growth.text}"
    sizes = {"used_bytes": 0, "reserved_bytes": 0}
    one = SimpleNamespace(run=growing.run, counts={}, problem="", is_live=True, supervisor=7, running=view.running,
                          to_dict=lambda: sizes)  # fmt: skip
    for parts in (view_runs([one]), view_summary(view, 80)):
        to_text(parts, (shown := Shown(width=400)).console)
        assert shown.file.getvalue().count(said) == 1
    assert summarize(view)["jobs"][0]["growth"] == growing.growth.to_dict()
