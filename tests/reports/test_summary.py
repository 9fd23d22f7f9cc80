"""The closing summary, as text and as JSON."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from memfit.reports import summarize, to_text, view_summary, write_page
from memfit.rundir import Reader, read

GIB, MIB = 1 << 30, 1 << 20


def printed(run, width, verbose=False):
    console = Console(file=io.StringIO(), width=width)
    to_text(view_summary(read(run), width, verbose=verbose), console)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


@pytest.mark.proves("S0-21")
def test_verbose_adds_what_enforces_the_limit_what_jobs_waited_for_and_how_exact_the_forecasts_were(finished):
    plain, told = (printed(finished.run, 120, verbose=verbose).splitlines() for verbose in (False, True))
    added = [line for line in told if line not in plain]
    assert added == [
        "limit     set by cgroup v2 /job; none",
        "waits     1.4 at once on average, 35 % of the time others waited for memory, the host's cores were 41 % busy, "
        "3 % idle for a disk",
        "forecast  3 % above the peaks (median of 1 job); too small: 0",
    ]


@pytest.mark.proves("S0-14")
def test_the_total_is_the_wall_clock_and_not_the_sum_of_folds_side_by_side(made):
    made.event(0, "run", state="started")
    made.event(70, "run", state="completed")
    for fold in (1, 2, 3):
        made.job(f"fold_{fold}", at=5, seconds=60, cpu_seconds=35.0)
    assert "1m 10s wall clock; the jobs used 1.5 cores on average" in printed(made.run, 120)
    made.event(100, "run", state="continued")
    made.event(102, "run", state="completed")
    assert "2.0s wall clock of the last command\n" in printed(made.run, 120)


def test_a_failed_job_comes_with_what_its_log_says_of_its_end(made):
    made.job("fold_1", state="failed", cause="exit code 1")
    made.job("fold_2", state="failed", cause="killed with SIGKILL by somebody else")
    made.job("fold_3")
    for fold, text in ((1, "OSError: [Errno 28] No space left on device"), (2, "Killed"), (3, "MemoryError")):
        (made.path / f"jobs/fold_{fold}/err.log").write_text(f"step 1\n{text}\n")
    text = printed(made.run, 160)
    assert "  diagnosis: disk full" in text and "line 2: OSError: [Errno 28]" in text
    assert text.count("diagnosis:") == 1  # of a kill memfit knows more than its log, and of a success there is nothing
    told = [one["diagnosis"] for one in summarize(read(made.run))["jobs"]]
    assert told[0].startswith("disk full") and told[1:] == [None, None]


def test_a_metric_that_is_not_finite_is_null_in_json_and_shown_in_the_text(made):
    for fold, value in ((1, float("nan")), (2, float("inf")), (3, 1.25)):
        made.job(f"fold_{fold}")
        made.result(f"fold_{fold}", icir=value)
    found = json.loads(json.dumps(summarize(read(made.run)), allow_nan=False))
    assert [fold["result"]["icir"] for fold in found["jobs"]] == [None, None, 1.25]
    assert found["stages"][0]["metrics"]["icir"] == {"mean": None, "sd": None, "n": 3}
    text = printed(made.run, 120)
    assert "nan" in text and "inf" in text and "1.2500" in text


def test_a_run_in_mid_run_is_summed_up(made):
    made.event(0, "run", state="started")
    made.admit(1, "fold_1", 1, None)
    made.job("fold_1", "running", name="status.json")
    (made.path / "jobs" / "fold_2").mkdir()
    found = summarize(read(made.run))
    assert [(fold["job"], fold["state"], fold["seconds"] is None) for fold in found["jobs"]] == [
        ("fold_1", "running", False),
        ("fold_2", "pending", True),
    ]
    assert (found["state"], found["plan"], found["stages"][0]["metrics"]) == ("running", None, {})
    assert "fold_1" not in printed(made.run, 80)  # no fold has failed
    assert "(running)" in printed(made.run, 80)


def test_an_empty_run_directory_is_summed_up(made):
    assert summarize(read(made.run))["jobs"] == []
    assert printed(made.run, 80).splitlines()[-1].strip() == "jobs (the logs and the memory of each)"
    assert "No job has left a sample" in write_page(made.run, made.path / "page.html").read_text()


def test_wrong_sizes_are_counted_and_named_with_what_helps(commands):
    made = commands(3)
    made.event(0, "run", state="started")
    made.event(1, "short", None, outgrew="cmd_0002", reason="cmd_0002 outgrew its 9 B and what is free is reserved")
    made.event(2, "short", None, outgrew="cmd_0001", reason="cmd_0001 outgrew its 9 B and what is free is reserved")
    made.event(3, "aside", "cmd_0003", to="cmd_0002", reason="cmd_0002 waits", now=False)
    assert (summarize(read(made.run))["outgrown"], summarize(read(made.run))["num_gave_way"]) == (
        {"cmd_0001": 1, "cmd_0002": 1},
        1,
    )
    assert (
        "cmd_0001, cmd_0002 needed more than was thought: no job started meanwhile, 2 times, and 1 restart. "
        "--memory SIZE tells memfit before"
    ) in " ".join(printed(made.run, 200).split())


def test_the_summary_of_commands_has_the_last_numbers_of_those_that_completed_beside_their_params(commands):
    made = commands(3)
    for fold, loss, state in ((1, 0.5, "completed"), (2, 0.25, "completed"), (3, 9.0, "preempted")):
        made.job(f"cmd_{fold:04}", state, exit_code=0)
        made.event(fold, "epoch", f"cmd_{fold:04}", epoch=3, num_epochs=3, valid_loss=loss)
    lines = printed(made.run, 80).splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("job  "))
    assert [line.split() for line in lines[at : at + 6]] == [
        ["job", "state", "time", "peak", "reserved", "epoch", "loss"],
        ["fold=1", "completed", "1m", "00s", "270.0", "MiB", "-", "3", "0.5000"],
        ["fold=2", "completed", "1m", "00s", "270.0", "MiB", "-", "3", "0.2500"],
        ["fold=3", "stopped", "1m", "00s", "270.0", "MiB", "-", "-", "-"],
        ["mean", "of", "2", "0.3750"],
        ["sd", "of", "2", "0.1768"],
    ]
    assert [job["reported"] for job in summarize(read(made.run))["jobs"]][1] == {"epoch": 3.0, "loss": 0.25}
    commands(3, "width")  # a mean over widths says nothing
    said = printed(made.run, 80)
    assert "     3  0.5000\nwidth=2  completed  " in said and "mean of" not in said


@pytest.mark.parametrize(
    ("log", "reported"),
    [
        ("epoch 1/2 loss 0.5 time 3.25\nepoch 2/2 loss 0.25\n", {"epoch": 2, "loss": 0.25}),
        ("{'eval_loss': 0.75, 'epoch': 1.5}\n{'eval_loss': 0.5, 'epoch': 2.0}\n", {"epoch": 2, "eval_loss": 0.5}),
        ("step 10/20: val_acc=0.5\rstep 20/20: val_acc=0.75\r", {"step": 20, "val_acc": 0.75}),
        ("epoch 2 step 7/9 loss 0.5\nepoch 3 begins\n", {"epoch": 2, "step": 7, "loss": 0.5}),
        ("fold 4 ic 0.0412\n", {"ic": 0.0412}),
        ("Fold=4: rank_ic=-4.1e-2, seconds 3\n", {"rank_ic": -0.041}),
        # As LightGBM 4.7 and XGBoost 3.2 print it.
        ("[10]\tvalid_0's l2: 1.21725\n[20]\tvalid_0's l2: 1.00\n", {"round": 20, "valid_0's l2": 1.0}),
        ("[13]\ttraining's auc: 0.9\tvalid_1's auc: 0.8\n", {"round": 13, "training's auc": 0.9, "valid_1's auc": 0.8}),
        ("[10]\tvalid's l2: 1.16482 + 0.0888897\n", {"round": 10, "valid's l2": 1.16482}),
        ("[0]\tvalidation-rmse:0.9\n[19]\tvalidation-rmse:0.5\n", {"round": 19, "validation-rmse": 0.5}),
        ("[9]\ttest-ndcg@10:0.5+0.02\n", {"round": 9, "test-ndcg@10": 0.5}),
        ("[0] NCCL INFO comm 0x7f nRanks 4\nmanifold 3 loss 0.5\nmy score 1\nnothing 0.5\n", {}),
    ],
)
def test_of_commands_that_report_nothing_the_summary_has_the_last_numbers_of_their_logs(commands, log, reported):
    made = commands(2)
    for job in ("cmd_0001", "cmd_0002"):
        made.job(job)
    (made.run.job_dir("cmd_0001") / "out.log").write_text("fold 1 ic 0.03\n")  # which counts nothing
    (made.run.job_dir("cmd_0002") / "out.log").write_text(log)
    assert summarize(read(made.run))["jobs"][1]["reported"] == reported
    assert all(f"  {name}" in printed(made.run, 120) for name in reported)


@pytest.mark.parametrize("cpu", [None, "busy", {"busy": "all"}, {}])
def test_what_bounds_a_run_is_left_out_where_it_is_not_known(commands, cpu):
    made = commands(2)
    made.event(0, "run", state="started")
    for number in (1, 2):
        made.admit(number, f"cmd_000{number}", number)
        made.end(50, f"cmd_000{number}")
        made.job(f"cmd_000{number}", at=number, seconds=49)
    made.event(60, "run", state="completed", cpu=cpu)
    assert "waits" not in printed(made.run, 120, verbose=True)
    assert summarize(read(made.run))["host_cpu"] == {}


def test_what_followed_a_run_to_its_end_sums_it_up_without_reading_the_outcomes_again(swept):
    reader = Reader(swept.run)
    reader.read()
    followed = [job for job in reader.state().jobs.values() if job.ended]
    fresh = summarize(read(swept.run))
    for job in followed:
        (swept.run.job_dir(job.id) / "outcome.json").unlink()
    assert followed and summarize(reader.state())["jobs"] == fresh["jobs"]


def test_an_attempt_that_the_user_stopped_is_no_restart_of_memfits(commands):
    made = commands(1)
    made.job("cmd_0001", "preempted", at=0, seconds=10, name="outcome_1.json")
    made.job("cmd_0001", at=100, seconds=10, attempt=2)
    assert summarize(read(made.run))["num_restarts"] == 0
    assert "restarts" not in printed(made.run, 120)


def test_of_very_many_commands_those_of_note_are_the_first_rows_and_the_others_are_counted(commands):
    made = commands(200)
    for number in range(1, 201):
        made.job(f"cmd_{number:04d}", "failed" if number == 77 else "completed", at=number, seconds=1)
    text = printed(made.run, 120)
    first, second = [line.split()[:2] for line in text.splitlines() if line.startswith("fold=")][:2]
    assert (first, second) == (["fold=77", "failed"], ["fold=1", "completed"])
    assert "and 140 more; --json lists all" in text


@pytest.mark.parametrize("report", [5, "all is well", ["x", 2], None])
def test_only_a_list_of_texts_is_taken_for_report_lines(made, report):
    made.job("prepare")
    made.result("prepare", report=report, loss=0.5)
    assert "loss: 0.5000" in printed(made.run, 80)


def test_what_the_agent_recorded_of_a_lost_rank_wins_over_the_log_of_a_rank_that_waited(with_ranks):
    made = with_ranks("failed")
    state, lost = read(made.run), "rank 1 was ended by SIGKILL in microbatch of step 8"
    waited = "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4711\n"
    (made.run.job_dir("fold_1") / "err.log").write_text(waited)
    for evidence, is_told in ({}, True), ({"rank": 1}, False):
        job = replace(state.jobs["fold_1"], cause=lost, evidence=evidence)
        console = Console(file=io.StringIO(), width=90)
        to_text(view_summary(replace(state, jobs={"fold_1": job}), 90), console)
        assert ("diagnosis: collective timeout" in console.file.getvalue()) is is_told
