"""A study of trials: what its records say as JSON, as text and as a chart."""

import io
import json
import os
import re
import sys
from contextlib import suppress

import pytest
from rich.console import Console

from memfit.errors import DamagedError, UsageError
from memfit.reports import LiveRun, study_of, summarize_study, to_text, view_study, write_page
from memfit.rundir import Reader, read

GIB, MIB = 1 << 30, 1 << 20


def printed(view, run):
    console = Console(file=io.StringIO(), width=80)
    to_text(view(read(run)), console)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_a_study_without_an_ended_trial_knows_nothing_and_says_so(study):
    found = summarize_study(read(study.begin()))
    assert (found["best"], found["seconds_per_trial"], found["seconds_left"], found["trials"]) == (None, None, None, [])
    text = printed(view_study, study.run)
    assert "trials    0 of 40: none has begun" in text


@pytest.mark.parametrize(("direction", "best"), [("maximize", "trial_0001"), ("minimize", "trial_0000")])
def test_the_best_trial_is_by_the_direction_and_of_equal_ones_the_first(study, direction, best):
    run = study.begin(direction=direction)
    for number, value in enumerate([0.1, 0.3, 0.1, 0.3]):
        study.trial(number, value=value, by_unit={"1": value - 0.01, "2": value + 0.01})
    study.trial(4, "pruned", 9.0 if direction == "maximize" else -9.0)
    found = summarize_study(read(run))["best"]
    assert (found["trial"], found["n"]) == (best, 2)
    low, high = (f"{found['value'] + by:.4f}" for by in (-0.01, 0.01))
    said = f"mean of 2: 1 {low}, 2 {high}; standard error 0.0100"
    assert said in " ".join(printed(view_study, run).split())


@pytest.mark.proves("S2-27")
def test_the_time_left_is_from_measured_seconds_and_the_trials_at_once(study):
    run = study.begin(n_trials=10, num_slots=4)
    study.trial(0, value=0.1, seconds=100.0)
    study.trial(1, "pruned", 0.0, seconds=20.0)
    study.trial(2, "infeasible", params=None, seconds=0.0)
    found = summarize_study(read(run))
    assert (found["seconds_per_trial"], found["seconds_left"]) == (60.0, 60.0 * 7 / 4)
    for number in range(3, 9):
        study.trial(number, value=0.1, seconds=60.0)
    assert summarize_study(read(run))["seconds_left"] == pytest.approx(60.0), "the last one takes as long as any"
    study.trial(9, value=0.1)
    assert summarize_study(read(run))["seconds_left"] == 0.0


@pytest.mark.parametrize("name", ["params", "value", "by_unit", "intermediate", "measured", "cause", "job", "refused"])
def test_no_value_in_a_record_makes_a_reader_fail_but_by_the_files_name(searched, name):
    path = searched.path / "trials" / "trial_0001.json"
    found = json.loads(path.read_text())
    drawn = dict.fromkeys(found["params"])
    for value in (None, 3, -1e300, "x", [1], {"a": "x"}, {"1": None}, drawn, {"seconds": "x"}, {"peaks": [1]}):
        path.write_text(json.dumps(found | {name: value}))
        with suppress(DamagedError):
            printed(view_study, searched.run)
            write_page(searched.run, searched.path / "page.html")


def test_a_study_says_which_trials_a_rerun_may_not_repeat(study):
    run = study.begin()
    study.trial(0, value=0.1)
    study.trial(1, value=0.1, measured={"ran_out": "CUDA out of memory; 4 microbatches"})
    study.trial(2, "timeout", cause="it took 5m 00s")
    found = {one["trial"]: one["why"] for one in summarize_study(read(run))["differs"]}
    assert set(found) == {"trial_0001", "trial_0002"}
    assert "inside a step: CUDA out of memory; 4 microbatches" in found["trial_0001"]


@pytest.mark.slow
def test_of_hundreds_of_trials_the_best_ten_and_each_cause_of_failure_are_printed(study):
    run = study.begin(n_trials=300)
    for number in range(200):
        study.trial(number, value=number / 1000)
    for number in range(200, 300):
        job = f"trial_{number:04d}.fold_1"
        study.trial(number, "failed", cause=f"ValueError: {number % 3}", kind="ValueError", job=job)
    lines = printed(view_study, run).splitlines()
    names = [line.split()[0] for line in lines if line.startswith("trial_") and "completed" in line]
    assert names == [f"trial_{number:04d}" for number in range(199, 189, -1)]
    assert "the best 10 of 200 that completed; memfit report shows all" in lines
    assert sum(" failed: ValueError: " in line for line in lines) == 3 and max(map(len, lines)) <= 80


def test_the_peak_on_the_device_is_shown_where_there_is_one(study):
    run = study.begin()
    study.trial(0, value=0.1, measured={"device_peaks": {"fold": 3 * GIB}})
    text = printed(view_study, run)
    assert "    peak  device peak\n" in text and "270.0 MiB     3.00 GiB\n" in text


def test_a_run_that_is_no_study_is_refused(finished):
    with pytest.raises(UsageError, match="is no study"):
        summarize_study(read(finished.run))


def test_the_line_of_a_study_says_how_far_it_is(study):
    run = study.begin()
    reader = Reader(run)
    assert study_of(reader.state()).headline() == "trials 0 of 40: none has begun"
    for number in range(7):
        study.trial(number, value=0.001 * number)
    study.trial(7, value=0.0341)
    for number in range(8, 11):
        study.trial(number, "pruned", 0.0)
    study.trial(11, "failed")
    for number in range(12, 15):
        study.trial(number, "running")
    assert study_of(reader.state()).headline() == (
        "trials 12 of 40: 8 completed, 3 pruned, 1 failed, 3 running; best rank_ic 0.0341 (trial_0007); "
        "about 14m 00s left"
    )


def test_a_study_that_has_not_written_its_settings_yet_is_none_yet(study):
    assert study_of(read(study.run)) is None
    assert "<h2>Study</h2>" not in write_page(study.run, study.path / "page.html").read_text()


def test_a_record_is_read_again_only_when_its_file_changed(study):
    run, path = study.begin(), study.path / "trials" / "trial_0000.json"
    study.trial(0, "running")
    reader = Reader(run)
    assert "1 running" in study_of(reader.state()).headline()
    before, text = path.stat(), path.read_text()
    path.write_text(text.replace('"running"', '"completed"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "1 running" in study_of(reader.state()).headline(), "the time of the file is the same"
    study.trial(0, value=0.5)
    assert "1 completed; best rank_ic 0.5000 (trial_0000)" in study_of(reader.state()).headline()


@pytest.mark.proves("S2-28")
@pytest.mark.slow
def test_a_real_study_is_followed_and_summed_up(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    from memfit.tuning import read_trials, tune

    monkeypatch.chdir(tmp_path)
    code = "import sys; x = float(sys.argv[1]); assert x > 0.3, 'too low'; print('loss', (x - 1) ** 2)"
    searched = {"name": "params.x", "choices": [0.1, 0.9]}
    config = {
        "experiment": "demo", "retries": 0, "params": {"x": 0.5},
        "stages": {"trial": {"run": [sys.executable, "-c", code, "{params.x}"]}},
        "tune": {"space": [searched], "objective": "trial.loss", "direction": "minimize", "n_trials": 6, "sampler": "random"},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    live, ended = LiveRun(console), []

    def follow(run):
        tick = live.show(run)

        def count():
            tick()
            ended.append(sum(trial.is_over for trial in read_trials(run)))

        return count

    result = tune(config, view=follow)
    live.close()
    assert ended == sorted(ended) and len(set(ended)) >= 4, "records are there while the study goes on"
    run = live.reader.run
    found = summarize_study(read(run))
    ends = re.findall(r"  (trial_\d+) (?:completed|failed)", console.file.getvalue())
    assert sorted(ends) == [f"trial_{number:04d}" for number in range(6)]
    assert found["num_ended"] == 6 and found["best"]["trial"] == result.best.name
    assert "train     memfit run " in printed(view_study, run)
