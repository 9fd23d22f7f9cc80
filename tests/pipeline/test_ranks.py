"""A stage's function on several ranks: a real run, whose group is gloo's."""

import textwrap

import pytest

import memfit
from memfit.rundir import RunDir, read_events

CODE = """
    import torch
    import torch.distributed as group


    def train(ctx, width: int = 3):
        x = torch.ones(1) * (ctx.rank + 1)
        group.all_reduce(x)
        print("rank", ctx.rank, "of", group.get_world_size())
        ctx.report("sum", float(x), 1)
        made = ctx.once("made", lambda: {"by": ctx.rank})
        ctx.save("out", {"rank": ctx.rank})
        return {"sum": float(x), "rank": ctx.rank, "made_by": made["by"]}
"""


@pytest.mark.core
def test_a_function_runs_on_each_rank_and_rank_0_saves_and_reports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_ranks.py").write_text(textwrap.dedent(CODE))
    result = memfit.run("train_ranks:train", overrides=["resources.ranks=2"])
    assert result.exit_code == 0
    run = RunDir(result.path)
    assert result.metrics["train"] == {"sum": 3.0, "rank": 0, "made_by": 0}
    assert sorted((run.job_dir("train") / "out.log").read_text().split("\n")) == [
        "",
        "[rank1]: rank 1 of 2",
        "rank 0 of 2",
    ]
    reports = [event for event in read_events(run.events_dir) if event["kind"] == "report"]
    assert [event["value"] for event in reports] == [3.0]


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_same_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["sh", "-c", "exit $((WORLD_SIZE - 1))"]
    first = memfit.run(command, overrides=["resources.ranks=3", "retries=0"])
    assert first.statuses["cmd_0001"].exit_code == 2
    second = memfit.run(command, overrides=["resources.ranks=2", "retries=0"])
    assert (second.path, second.statuses["cmd_0001"].exit_code) == (first.path, 1)


def test_the_variable_of_the_watch_is_no_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMFIT_HANG_SECONDS", "90")
    assert memfit.run(["sh", "-c", 'test "$MEMFIT_HANG_SECONDS" = 90'], overrides=["resources.ranks=2"]).exit_code == 0
