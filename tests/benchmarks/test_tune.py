"""The benchmark of a search counts what it says: useful trials, refused draws, kills, wasted epochs."""

import pytest

from memfit.tuning import Trial

pytest.importorskip("optuna")


def test_useful_trials_are_those_that_completed_or_were_pruned(benchmark):
    tune = benchmark("tune")
    states = ["completed", "pruned", "out_of_memory", "failed", "infeasible", "completed"]
    found = tune.Figures(states, seconds=90.0, kills=0, num_refused=5)
    assert (found.num_useful, found.an_hour) == (3, 120.0)
    assert found.share_refused == 0.5  # 5 of 5 refused and 5 drawn; the infeasible trial has no other draws
    assert tune.Figures([], 1.0, 0).share_refused == 0.0


@pytest.mark.parametrize(("seconds", "kills", "is_met"), [(100.0, 0, True), (100.0, 1, False), (200.0, 0, False)])
def test_the_aim_is_met_against_the_largest_pool_that_lives_and_without_a_kill(
    benchmark, capsys, seconds, kills, is_met
):
    tune = benchmark("tune")
    table = {
        "memfit": tune.Figures(["completed"] * 4, seconds, kills),
        "Optuna, 1 guarded at the whole limit": tune.Figures(["completed"] * 4, 150.0, 0),
        "Optuna, 2 guarded at the whole limit": tune.Figures(["completed"] * 4, 10.0, 1, ended="killed"),
    }
    assert tune.report(table) is is_met
    assert ("MISSED" in capsys.readouterr().out) is not is_met


@pytest.mark.slow
def test_what_is_refused_by_arithmetic_never_runs_out_of_memory(benchmark):
    told = benchmark("tune_told")
    refused = told.by_memfit(1.0, seed=0, num_trials=15)
    assert refused.num_out_of_memory == 0 < refused.num_refused
    assert told.by_memfit(None, seed=0, num_trials=15).num_out_of_memory > 0
    assert told.plain("FAIL", "random", 0, 15).num_refused == 0


def test_epochs_after_the_pruning_one_and_epochs_trained_twice_are_counted(benchmark):
    pruned = Trial("trial_0001", 1, "pruned", {"params.lr": 0.25}, intermediate={1: 2.0, 2: 1.0})
    done = Trial("trial_0000", 0, "completed", {"params.lr": 0.5}, measured={"seconds": 2.0})
    slower = Trial("trial_0002", 2, "completed", {"params.lr": 0.75}, measured={"seconds": 3.0})
    journal = ["0.25 1", "0.25 2", "0.25 3", "0.25 4", "0.5 1", "0.5 1"]
    found = benchmark("tune_original").figures_of([done, pruned, slower], journal)
    assert (found["wasted_epochs"], found["twice"]) == (2, 1)
    assert (found["num_slower"], found["num_completed"]) == (1, 2)
