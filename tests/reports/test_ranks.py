"""Ranks in the live table, the summary and the page of a run."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from memfit.reports import Room, print_summary, render, summarize, write_page
from memfit.rundir import read

GIB, MIB = 1 << 30, 1 << 20
LOST = "rank 1 was ended by SIGKILL in microbatch of step 8"


def rank(number, place, **more):
    return {
        "rank": number,
        "pid": 70 + number,
        "place": place,
        "step": 12,
        "pss_bytes": 200 * MIB,
        "device_bytes": 0,
        "peak_bytes": 300 * MIB,
    } | more


def with_ranks(made, state, name):
    made.event(1, "run", state="started")
    made.event(2, "admit", "fold_1", num_running=1, why="it fits", reservation_bytes=GIB, text="fold_1 starts")
    lost = {"rank": 1, "generation": 0, "code": -9, "place": "microbatch", "step": 8, "text": f"fold_1 {LOST}"}
    made.event(3, "rank_lost", "fold_1", file="host-70-1", **lost)
    ranks = [rank(0, "vote"), rank(1, "microbatch", device_bytes=2 * GIB)]
    made.job("fold_1", state, name=name, ranks=ranks, used_bytes=410 * MIB)
    return read(made.run, now=lambda: made.start + 60)


def shown(what):
    console = Console(file=io.StringIO(), width=90)
    what(console)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


@pytest.mark.proves("S3-26")
def test_the_table_has_a_line_for_each_rank_of_a_running_job(made):
    state = with_ranks(made, "running", "status.json")
    lines = shown(lambda console: console.print(render(state, Room(8 * GIB, GIB, "MemAvailable"))))
    assert "rank 0 vote 12 200.0 MiB 300.0 MiB 29 %" in lines
    assert "rank 1 microbatch 12 200.0 MiB + 2.00 GiB 300.0 MiB 29 %" in lines


def test_summary_and_page_tell_which_ranks_were_lost_and_the_peak_of_each(made, tmp_path):
    state = with_ranks(made, "completed", "outcome.json")
    lines = shown(lambda console: print_summary(state, console))
    assert f"lost {LOST} (generation 0)" in lines
    assert "ranks 2, with peaks of 300.0 MiB, 300.0 MiB (proportional sizes)" in lines
    (job,) = summarize(state)["jobs"]
    assert job["ranks_lost"] == [f"{LOST} (generation 0)"]
    assert [one["place"] for one in job["ranks"]] == ["vote", "microbatch"]
    page = write_page(made.run, tmp_path / "page.html").read_text()
    assert "<h2>Ranks</h2>" in page and f"{LOST} (generation 0)" in page


def test_what_the_agent_recorded_of_a_lost_rank_wins_over_the_log_of_a_rank_that_waited(made):
    state = with_ranks(made, "failed", "outcome.json")
    waited = "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4711\n"
    (made.run.job_dir("fold_1") / "err.log").write_text(waited)
    for evidence, is_told in ({}, True), ({"rank": 1}, False):
        job = replace(state.jobs["fold_1"], cause=LOST, evidence=evidence)
        lines = shown(lambda console, job=job: print_summary(replace(state, jobs={"fold_1": job}), console))
        assert any("diagnosis: collective timeout" in line for line in lines) is is_told
