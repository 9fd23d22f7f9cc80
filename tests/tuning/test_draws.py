"""Draws, refusals and exports of a study, from records alone: no job runs here."""

import json
import re
from pathlib import Path

import pytest

from memfit.errors import ConfigError, UsageError
from memfit.files import write_json
from memfit.pipeline import Order, RunConfig, StageSpec
from memfit.rundir import RunDir
from memfit.tuning import (
    Study,
    Trial,
    TuneSettings,
    draw,
    is_to_prune,
    make_study,
    read_param,
    read_trials,
    tune,
    why_infeasible,
    write_trial,
)
from tuning.studies import KIND, SPACE, config_of

GIB = 1 << 30
NUM, SLOTS = 16, 3


def settings_of(**more):
    return TuneSettings.model_validate(config_of(tune={"space": [*SPACE, KIND], "num_slots": SLOTS, **more})["tune"])


def go_on(settings, trials):
    """Go on with a study of a made-up objective from its first trials."""
    trials = [Trial.from_dict(json.loads(json.dumps(one.to_dict())), Path(one.name)) for one in trials]
    for number in range(len(trials), NUM):
        seen = trials[: max(0, number - SLOTS + 1)]
        params = draw(settings, seen, [], number)
        loss = (params["params.width"] - 4) ** 2 + params["params.lr"]
        state = "out_of_memory" if params["params.width"] > 7 else "completed"
        value = loss if state == "completed" else None
        trials.append(Trial(f"trial_{number:04d}", number, state, params, len(seen), value=value))
    return trials


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_study_cut_anywhere_draws_the_same_trials_again(sampler):
    settings = settings_of(sampler=sampler, seed=5)
    whole = go_on(settings, [])
    for cut in range(NUM):
        again = go_on(settings, whole[:cut])
        assert [(one.params, one.value) for one in again] == [(one.params, one.value) for one in whole]
    other = go_on(settings_of(sampler=sampler, seed=6), [])
    assert all(one.params != another.params for one, another in zip(whole, other, strict=True))


def test_a_record_with_numbers_that_are_not_finite_is_json_that_any_program_reads(tmp_path):
    run = RunDir.create(tmp_path, "study", fingerprint="0" * 64)
    (run.path / "trials").mkdir()
    written = Trial("trial_0000", 0, "failed", intermediate={1: 0.5, 2: float("inf"), 3: float("nan")})
    write_trial(run, written)
    text = (run.path / "trials" / "trial_0000.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["intermediate"] == {"1": 0.5, "2": "inf", "3": "nan"}
    (again,) = read_trials(run)
    assert repr(again.intermediate) == repr(written.intermediate)


def test_the_tpe_looks_at_results_past_its_startup_trials():
    settings = settings_of(seed=1)
    trials = go_on(settings, [])
    turned = [Trial(one.name, one.number, one.state, one.params, value=-(one.value or 0)) for one in trials]
    assert draw(settings, trials[:8], [], 20) == draw(settings, turned[:8], [], 20)
    assert draw(settings, trials, [], 20) != draw(settings, turned, [], 20)


def test_a_second_draw_of_a_trial_differs_and_is_drawn_again_alike():
    settings = settings_of()
    first = draw(settings, [], [], 0)
    refused = [{"params": first, "why": "too large"}]
    second = draw(settings, [], refused, 0)
    assert first != second == draw(settings, [], refused, 0)


def test_out_of_memory_and_refused_draws_are_told_as_pruned_and_a_failure_as_failed():
    params = {"params.lr": 0.1, "params.width": 3, "params.kind": "a"}
    refused = [{"params": params | {"params.width": 9}, "why": "too large"}]
    states = ("completed", "pruned", "out_of_memory", "timeout", "failed", "infeasible")
    trials = [
        Trial(f"trial_{number:04d}", number, state, {} if state == "infeasible" else params, refused=refused, value=0.5)
        for number, state in enumerate(states)
    ]
    told = make_study(settings_of(), trials).trials
    assert [one.state.name for one in told if one.user_attrs["memfit_state"] == "infeasible"] == ["PRUNED"] * 6
    own = {one.user_attrs["memfit_state"]: one for one in told if one.user_attrs["memfit_state"] != "infeasible"}
    assert {state: one.state.name for state, one in own.items()} == {
        "completed": "COMPLETE", "pruned": "PRUNED", "out_of_memory": "PRUNED", "timeout": "PRUNED", "failed": "FAIL",
    }  # fmt: skip
    assert {state for state, one in own.items() if one.value is not None} == {"completed"}


def test_a_trial_is_pruned_after_the_startup_trials_and_the_warm_up_alone():
    steps, worse = {step: 1.0 / step for step in range(1, 4)}, {1: 2.0, 2: 2.0}
    earlier = [Trial(f"trial_{n:04d}", n, "completed", {}, value=1 / 3, intermediate=steps) for n in range(4)]
    assert is_to_prune(make_study(settings_of(pruner_startup=4), earlier), worse)
    assert not is_to_prune(make_study(settings_of(pruner_startup=5), earlier), worse)
    assert not is_to_prune(make_study(settings_of(pruner_warmup=3), earlier), worse)
    assert not is_to_prune(make_study(settings_of(), earlier), {1: 0.5, 2: 0.4})
    assert is_to_prune(make_study(settings_of(), earlier), {1: float("nan"), 2: float("nan")})
    assert not is_to_prune(make_study(settings_of(), earlier), {1: 0.5, 2: float("nan")})
    assert not is_to_prune(make_study(settings_of(direction="maximize"), earlier), worse)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"space": [{"name": "params.lr", "low": 0.5, "high": 0.1}]}, "low (0.5) must be below high (0.1)"),
        ({"space": [{"name": "params.lr", "low": 0, "high": 1, "log": True}]}, "must be above 0 on a logarithmic"),
        ({"space": [{"name": "params.lr", "low": 0}]}, "give either choices, or low and high"),
        ({"space": [{"name": "params.lr", "choices": [1, 2], "log": True}]}, "log belongs to a range"),
        ({"space": [{"name": "params.lr", "choices": ["a", "a"]}]}, "choices name a value twice"),
        ({"space": [SPACE[0], SPACE[0]]}, "space names params.lr twice"),
        ({"epochs": "params.width"}, "params.width is searched, and epochs names it"),
        ({"space": []}, "space"),
        ({"sampler": "grid"}, "'tpe' or 'random'"),
        ({"objective": "loss"}, "objective"),
    ],
)
def test_a_bad_section_is_refused_in_three_parts_that_name_it(study, more, said):
    with pytest.raises(ConfigError) as caught:
        tune(study(tune=more))
    assert said in str(caught.value)
    assert "tune." in caught.value.what
    assert all((caught.value.rule, caught.value.remedy)) and caught.value.exit_code == 2
    assert RunDir.all(study().parent / "runs", "study") == []


# Refusals


LIMITS = {"host": 16 * GIB, "device": None}


@pytest.mark.proves("S2-26")
def test_an_out_of_memory_refuses_what_is_estimated_at_more_unless_one_that_large_completed():
    def of(name, state, gib):
        return Trial(name, 0, state, {}, measured={"estimates": {"fold": gib * GIB}, "failed_stage": "fold"})

    def why(gib, *seen, limits=LIMITS):
        order = Order(RunConfig(experiment="x"), [StageSpec("fold", memory_bytes=gib * GIB)])
        return why_infeasible(order, seen, limits)

    ran_out = of("trial_0003", "out_of_memory", 10)
    said = "fold is estimated at 12.00 GiB; trial_0003 was estimated at 10.00 GiB and ran out of memory"
    assert why(12, ran_out) == said
    assert why(9, ran_out) == ""
    assert why(12, ran_out, of("trial_0004", "completed", 13)) == ""
    # An estimate far below the limit does not say why it ran out.
    assert why(3, of("trial_0003", "out_of_memory", 2)) == ""
    assert why(17) == "fold takes at least 17.00 GiB by its estimate; the host has 16.00 GiB"
    assert why(16) == why(17, limits={"host": None, "device": None}) == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lr=1e-5..1e-3:log", {"low": 1e-5, "high": 1e-3, "log": True}),
        ("lr=0.1..0.9", {"low": 0.1, "high": 0.9}),
        ("layers=-2..4", {"low": -2, "high": 4}),
        ("layers=1..7..2", {"choices": [1, 3, 5, 7]}),
        ('opt="a,b", sgd,0050,true,1e-3', {"choices": ["a,b", "sgd", "0050", True, 0.001]}),
        ("lr=1..2,5", "cannot be searched"),
        ("a.b=1,2", "cannot be searched"),
        ("lr=0.1..b", "is no range of whole numbers"),
        ("lr=1,", "has an empty value"),
        ('lr="1', "is not closed"),
        ("lr", "--param lr is not name=values"),
    ],
)
def test_a_searched_parameter_is_read_as_run_reads_it_and_a_range_may_be_of_real_numbers(text, found):
    if isinstance(found, str):
        with pytest.raises(UsageError, match=re.escape(found)):
            read_param(text)
    else:
        assert read_param(text) == {"name": f"params.{text.partition('=')[0]}", **found}


# Records


@pytest.fixture
def recorded(tmp_path):
    """A study of six trials that ended, one that runs, and one of unknown settings, as its files."""
    run = RunDir.create(tmp_path, "study", "0123abcd" * 8)
    settings = settings_of()
    found = {"schema_version": 1, "name": "study", "settings": settings.model_dump(mode="json"), "basis": ""}
    write_json(run.path / "study.json", found | {"limits": {"host": GIB, "device": None}})
    (run.path / "trials").mkdir()
    params = {"params.lr": 0.1, "params.width": 3, "params.kind": "a"}
    refused = [{"params": params | {"params.width": 9}, "why": "too large"}]
    for number, state in enumerate(("completed", "pruned", "completed", "out_of_memory", "failed", "completed")):
        more = {"value": 1.5, "intermediate": {1: 2.0, 2: 1.0 + number}, "refused": refused[number:]}
        write_trial(run, Trial(f"trial_{number:04d}", number, state, params, **more))
    write_trial(run, Trial("trial_0006", 6, "running", params))
    write_trial(run, Trial("canary_1", state="completed", value=0.1))
    return run


def test_of_equal_trials_the_first_is_the_best_and_a_failed_one_never_is(recorded):
    study = Study.open(recorded)
    assert study.best.name == "trial_0000"
    for one in study.trials[:3]:
        write_trial(recorded, Trial(one.name, one.number, "failed", one.params, kind="ValueError"))
    assert Study.open(recorded).best.name == "trial_0005"
    assert [one.value for one in read_trials(recorded) if one.state == "failed"][:3] == [None] * 3
