"""What is shown while a run goes on: lines for all, a table on a terminal."""

import io

import pytest
from rich.console import Console

from memfit.memory import Budget
from memfit.reports import LiveRun, RunView
from memfit.reports._live import _read_budget, describe, render

GIB, MIB = 1 << 30, 1 << 20

LINES = """\
2026-11-21 09:00:02  prepare starts and is of unknown size (1 running): 7.00 GiB may be lent
2026-11-21 09:00:09  prepare completed (7.0s), peak 270.0 MiB
2026-11-21 09:00:10  fold_1 starts and is of unknown size (1 running): 7.00 GiB may be lent
2026-11-21 09:16:40  fold_1 epoch 1/2  train_loss 2.9307  num_steps 12
2026-11-21 09:16:42  2 of 3 at once (no more fit)
2026-11-21 09:16:43  fold_2 starts and reserves 300.0 MiB (2 running): 7.00 GiB may be lent; 1.00 GiB of 8.00 GiB used, jobs 512.0 MiB (PSS)
2026-11-21 09:16:44  fold_3 waits: it needs 300.0 MiB; 1.0 MiB may be lent
2026-11-21 09:58:42  fold_1 completed (58m 32s), peak 270.0 MiB; 600.0 MiB of 8.00 GiB used, jobs 270.0 MiB (PSS)
2026-11-21 09:58:43  fold_3 starts and reserves 300.0 MiB (2 running): 7.00 GiB may be lent
2026-11-21 10:06:40  fold_2 out_of_memory (49m 57s), peak 270.0 MiB: killed by the kernel for memory in phase train
2026-11-21 10:58:43  fold_3 completed (1h 00m 00s), peak 290.0 MiB
"""


class Shown:
    """What a console got; ``terminal`` makes it one."""

    def __init__(self, width=80, terminal=False):
        self.file = io.StringIO()
        self.console = Console(file=self.file, width=width, force_terminal=terminal, color_system=None)
        self.live = LiveRun(self.console)

    @property
    def lines(self):
        return self.file.getvalue().splitlines()


def table_lines(view, budget, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, record=True)
    console.print(render(view, budget))
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.fixture
def budget(tmp_path):
    (tmp_path / "tree" / "proc").mkdir(parents=True)
    (tmp_path / "tree/proc/meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {50 << 20} kB\n")
    return Budget.read(root=tmp_path / "tree", env={})


def test_each_event_is_one_stamped_line_where_there_is_no_terminal(finished):
    shown, files = Shown(), sorted((finished.path / "events").iterdir())
    contents = {path: path.read_text() for path in files}
    for path in files:
        path.write_text("")
    tick = shown.live.show(finished.run)
    for path, text in contents.items():
        path.write_text(text)
    tick()
    shown.live.close()
    assert shown.lines[0] == f"Run {finished.path}"
    assert "\n".join(shown.lines[1:]) + "\n" == LINES


def test_what_an_earlier_command_did_is_not_shown_again(finished):
    shown = Shown()
    tick = shown.live.show(finished.run)
    finished.event(8000, "resume", "fold_2", epoch=3, path="x")
    tick()
    shown.live.close()
    assert shown.lines[1:] == ["2026-11-21 11:13:20  fold_2 goes on after epoch 3"]


def test_what_happens_after_the_last_tick_is_shown_at_the_end(made):
    shown = Shown(terminal=True)
    tick = shown.live.show(made.run)
    tick()
    made.job("fold_1", seconds=3)
    made.end(3, "fold_1")
    tick()
    shown.live.close()
    assert sum("fold_1 completed (3.0s)" in line for line in shown.lines) == 1


def test_a_line_that_is_still_being_written_waits_for_its_rest(made):
    shown = Shown()
    tick = shown.live.show(made.run)
    path = made.path / "events" / "host-1-1.jsonl"
    path.write_text('{"time":1795248000.0,"job":null,"kind":"plan","wh')
    tick()
    shown.live._print_new_lines()
    assert len(shown.lines) == 1
    with open(path, "a") as lines:
        lines.write('y":"3 of 3 at once"}\n')
    shown.live.close()
    assert shown.lines[1:] == ["2026-11-21 09:00:00  3 of 3 at once"]


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "epoch", "job": "fold_1", "epoch": 3},
        {"kind": "epoch", "job": "fold_1", "epoch": "three", "num_epochs": 4},
        {"kind": "step", "job": "fold_1"},
        {"kind": "run", "job": "fold_1", "state": "started"},
        {"kind": "end", "job": "fold_1"},
        {"kind": "admit", "job": "fold_1", "num_running": None, "why": "", "reservation_bytes": 1},
        {"kind": 7},
        {"kind": "plan", "why": "x", "time": "noon"},
        {"kind": "budget", "job": None, "binding": 3, "limits": []},
    ],
    ids=lambda fields: "-".join(map(str, fields.values()))[:30],
)
def test_what_a_job_records_under_a_known_name_cannot_make_its_readers_fail(made, budget, fields):
    shown = Shown()
    shown.live.show(made.run)
    made.job("fold_1", "running", name="status.json")
    made.event(1, **({"time": made.start} | fields) if "time" not in fields else {"kind": "none"})
    if "time" in fields:
        (made.path / "events" / "host-9-9.jsonl").write_text('{"time":"noon","job":null,"kind":"plan","why":"x"}\n')
    shown.live.close()
    assert len(shown.lines) == 1
    view = RunView(made.run, now=lambda: made.start + 5)
    view.read()
    assert (view.started, view.row("fold_1").epochs_done) == (None, 0)
    assert table_lines(view, budget, 80)


@pytest.fixture
def running(made):
    """Seven folds in the states that make the widest cells, in mid-run."""
    made.event(0, "run", state="started")
    wide = 1023 * MIB + 900 * 1024
    for fold, state in enumerate(["completed", "out_of_memory", "running", "running", "node_fail"], 8):
        made.admit(1, f"fold_{fold}", 2, wide)
        made.event(3600, "step", f"fold_{fold}", epoch=1, step=10, num_steps=100, num_epochs=100)
        made.event(7200, "step", f"fold_{fold}", epoch=12, step=50, num_steps=100, num_epochs=100)
        name = "status.json" if state == "running" else "outcome.json"
        sizes = {"peak_bytes": wide, "used_bytes": wide if state == "running" else 0}
        made.job(f"fold_{fold}", state, seconds=90000.0, name=name, phase="checkpoint", **sizes)
    return made


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_is_whole_at_this_width(running, budget, width):
    view = RunView(running.run, now=lambda: running.start + 7200)
    view.read()
    lines = table_lines(view, budget, width)
    assert lines[0].split() == ["fold", "phase", "epoch", "memory", "peak", "reserved", "time", "ETA"]
    sizes = ["1023.9", "MiB"]
    assert lines[1].split() == ["8", "completed", "11.5/100", "-", *sizes * 2, "25h", "00m", "-"]
    assert lines[3].split() == ["10", "checkpoint", "11.5/100", *sizes * 3, "2h", "00m", "7h", "45m"]
    assert lines[2].split()[:2] == ["9", "out_of_memory"]
    assert "…" not in "".join(lines)
    assert len(lines) == 7 and max(map(len, lines)) <= width
    assert lines[6] == "folds use 2.00 GiB; 50.00 GiB free of 64.00 GiB (MemAvailable)"


def test_while_the_panel_is_prepared_the_table_shows_that(made, budget):
    made.admit(0, "prepare", 1, None)
    made.job("prepare", "running", name="status.json", phase="build", used_bytes=50 * MIB)
    view = RunView(made.run, now=lambda: made.start + 5)
    view.read()
    assert table_lines(view, budget, 80)[1].split() == [
        "prepare",
        "build",
        "-",
        "50.0",
        "MiB",
        "270.0",
        "MiB",
        "-",
        "5.0s",
        "-",
    ]


def test_a_stop_says_what_happens_and_a_finished_run_that_nothing_is_left(made):
    view = RunView(made.run)
    asked, now = ({"time": 0.0, "kind": "stop", "level": level, "num_running": n} for level, n in ((1, 2), (2, 1)))
    assert describe(asked, view) == "asking 2 running jobs to stop at a checkpoint; a second Ctrl-C ends them now"
    assert describe(now, view) == "ending 1 running job now"
    done = {"time": 0.0, "kind": "done", "num_done": 5}
    assert describe(done, view) == "all 5 folds were done already; --new starts over"


def test_the_table_shows_how_much_of_the_panel_is_built(made, budget):
    made.admit(0, "prepare", 1, None)
    made.job("prepare", "running", name="status.json", phase="build", used_bytes=50 * MIB)
    made.event(3, "progress", "prepare", phase="build", done=459, total=1000)
    view = RunView(made.run, now=lambda: made.start + 5)
    view.read()
    assert table_lines(view, budget, 80)[1].split()[:4] == ["prepare", "build", "45", "%"]


def test_the_line_below_the_table_knows_the_cap_of_the_runs_config(made):
    made.event(0, "budget", binding={}, limits=[{"name": "MemAvailable"}, {"name": "cap", "limit_bytes": 64 * MIB}])
    made.job("fold_1", "running", name="status.json", used_bytes=24 * MIB)
    view = RunView(made.run)
    view.read()
    found = _read_budget(view)
    assert (found.binding.name, found.headroom_bytes) == ("cap", 40 * MIB)


def test_a_terminal_is_given_back_when_nothing_was_shown():
    shown = Shown(terminal=True)
    shown.live.close()
    assert shown.lines == []
