"""The benchmark of a search counts what it says: useful trials, refused draws, kills, wasted epochs."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memfit.tuning import Trial

pytest.importorskip("optuna")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a module of the benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__


def test_useful_trials_are_those_that_completed_or_were_pruned(benchmark):
    tune = benchmark("tune")
    states = ["completed", "pruned", "out_of_memory", "failed", "infeasible", "completed"]
    found = tune.Figures(states, seconds=90.0, kills=0, num_refused=5)
    assert (found.num_useful, found.an_hour) == (3, 120.0)
    assert found.share_refused == 0.5  # 5 of 5 refused and 5 drawn; the infeasible trial has no other draws
    assert tune.Figures([], 1.0, 0).share_refused == 0.0


def test_a_pool_lives_if_nothing_was_killed_and_it_came_to_its_end(benchmark):
    tune = benchmark("tune")
    assert tune.Figures(["completed"], 1.0, 0).lives
    assert not tune.Figures(["completed"], 1.0, 1).lives
    assert not tune.Figures(["completed"], 1.0, 0, ended="exit 1").lives


def test_spans_that_touch_do_not_overlap(benchmark):
    tune = benchmark("tune")
    assert tune.at_once([(0, 2), (2, 3), (1, 2)]) == 2
    assert tune.at_once([]) == 0


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


def test_studies_of_several_seeds_add_up_against_the_largest_pool_of_each(benchmark):
    tune = benchmark("tune")
    one, two = "Optuna, 1 guarded at the whole limit", "Optuna, 2 guarded at the whole limit"
    killed = tune.Figures(["completed"], 5.0, 1, ended="killed")
    first = {"memfit": tune.Figures(["completed"] * 4, 100.0, 0), one: tune.Figures(["pruned"] * 4, 200.0, 0)}
    second = {"memfit": tune.Figures(["pruned"] * 2, 50.0, 0), one: tune.Figures(["completed"] * 2, 90.0, 0)}
    found = tune.add_up([{**first, two: killed}, {**second, two: tune.Figures(["completed"] * 2, 70.0, 0)}])
    assert (found["memfit"].num_useful, found["memfit"].seconds) == (6, 150.0)
    pool = found["Optuna, the largest pool that lives at the whole limit"]
    assert (pool.num_useful, pool.seconds, pool.lives) == (6, 270.0, True)
    assert tune.report(found)
    assert list(tune.add_up([{"memfit": first["memfit"], one: killed}])) == ["memfit"]


def test_a_pool_runs_the_draws_that_it_is_given_in_their_order(benchmark, monkeypatch, tmp_path):
    peer = benchmark("tune_peer")
    monkeypatch.setattr(peer, "ProcessPoolExecutor", lambda num, *_: ThreadPoolExecutor(num))
    monkeypatch.setattr(peer, "_train", lambda *_: ("completed", 1.0))
    sizes = {"batch_size": 262_144, "num_layers": 2, "learning_rate": 0.001}
    draws = [{**sizes, "hidden_size": size} for size in (96, 32, 64)]
    study = peer.Peer(2, len(draws), 0, 0, 5, tmp_path / "result.json", draws)
    study.run()
    assert [study.trials[number].params for number in range(3)] == draws
    assert set(study.states.values()) == {"completed"}


def test_a_third_of_the_trained_space_does_not_fit_and_two_fifths_of_the_other(benchmark):
    job, told = benchmark("tune_job"), benchmark("tune_told")
    chance = random.Random(1)
    sizes = [job.BATCH_SIZES, job.HIDDEN_SIZES, job.NUM_LAYERS]
    names = ("batch_size", "hidden_size", "num_layers")
    drawn = [job.Params(**{name: chance.choice(of) for name, of in zip(names, sizes, strict=True)}) for _ in range(600)]
    too_large = sum(job.least_bytes(one) > 2290 << 20 for one in drawn) / len(drawn)
    assert 0.28 < too_large < 0.40
    assert round(told.share_too_large(), 3) == round(11 / 27, 3)


@pytest.mark.slow
def test_what_is_refused_by_arithmetic_never_runs_out_of_memory(benchmark):
    told = benchmark("tune_told")
    refused = told.by_memfit(1.0, seed=0, num_trials=15)
    assert refused.num_out_of_memory == 0 < refused.num_refused
    assert told.by_memfit(None, seed=0, num_trials=15).num_out_of_memory > 0
    assert told.plain("FAIL", "random", 0, 15).num_refused == 0


def test_a_failed_trial_of_zero_is_the_best_of_the_search_written_by_hand(benchmark):
    found = benchmark("tune_original").by_hand()
    assert found["best_failed"] and found["num_failed"] > 0


def test_epochs_after_the_pruning_one_and_epochs_trained_twice_are_counted(benchmark):
    pruned = Trial("trial_0001", 1, "pruned", {"params.lr": 0.25}, intermediate={1: 2.0, 2: 1.0})
    done = Trial("trial_0000", 0, "completed", {"params.lr": 0.5}, measured={"seconds": 2.0})
    slower = Trial("trial_0002", 2, "completed", {"params.lr": 0.75}, measured={"seconds": 3.0})
    journal = ["0.25 1", "0.25 2", "0.25 3", "0.25 4", "0.5 1", "0.5 1"]
    found = benchmark("tune_original").figures_of([done, pruned, slower], journal)
    assert (found["wasted_epochs"], found["twice"]) == (2, 1)
    assert (found["num_slower"], found["num_completed"]) == (1, 2)
