"""What makes a training fit: changes in order, the options that say them, and the largest batch."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimation import Estimate, Interval, Setup, find_batch, find_gpu, list_changes, list_options, rank_changes

GPU = find_gpu("10GiB")
GIB = 1 << 30
METRICS = ("allocated_bytes", "active_bytes", "reserved_bytes", "device_bytes")


def answers(need):
    """A checking function by the bytes that a setup needs, with the setups it was asked for."""
    asked = []

    def check(setup):
        asked.append(setup)
        size = Interval(int(need(setup) * 0.9), int(need(setup)))
        verdict = "fits" if size.upper <= GPU.total_bytes else "does not fit"
        return Estimate(dict.fromkeys(METRICS, size), {}, {"forward": size}, "formula", GPU, verdict)

    return check, asked


def test_what_keeps_the_training_comes_before_what_changes_it():
    kept = [change.same_training for change in list_changes(Setup(batch=8))]
    assert kept == sorted(kept, reverse=True)
    assert {True, False} == set(kept)


def test_a_smaller_batch_keeps_the_samples_of_an_update_also_of_odd_numbers():
    for batch in (2, 5, 6, 9, 49, 97):
        [change] = [one for one in list_changes(Setup(batch=batch)) if one.setup.batch != batch]
        assert change.setup.batch * change.setup.num_microbatches == batch


def test_inference_is_not_answered_with_changes_of_a_training():
    changes = list(list_changes(Setup(batch=4, optimizer="none")))
    assert {change.setup.optimizer for change in changes} == {"none"}
    assert all(change.setup.lora_rank == 0 and change.setup.num_microbatches == 1 for change in changes)
    assert any(change.setup.quantization == "nf4" for change in changes)


@given(
    st.builds(
        Setup,
        batch=st.integers(1, 9),
        optimizer=st.sampled_from(["adamw", "adamw8bit", "sgd", "none"]),
        attention=st.sampled_from(["sdpa", "eager"]),
        gradient_checkpointing=st.sampled_from(["none", "selective", "full"]),
        lora_rank=st.sampled_from([0, 8]),
        master_weights=st.booleans(),
        loss_chunks=st.sampled_from([1, 8]),
    )
)
def test_every_change_is_said_by_options_and_changes_something(setup):
    for change in list_changes(setup):
        assert change.options
        assert change.setup != setup
        assert change.cost


@given(st.integers(1, 64), st.booleans(), st.sampled_from(["none", "selective", "full"]))
def test_no_options_are_needed_to_stay(batch, foreach, blocks):
    setup = Setup(batch=batch, foreach=foreach, gradient_checkpointing=blocks)
    assert list_options(setup, replace(setup)) == ()


def test_the_first_change_that_fits_is_taken_and_what_is_hopeless_is_not_checked():
    def need(setup):
        return (4 if setup.gradient_checkpointing == "full" else 12) * GIB

    check, asked = answers(need)
    (change, found), *_ = rank_changes(Setup(batch=1), GPU, need, check)
    assert change.options == ("--gradient-checkpointing",)
    assert found.verdict == "fits"
    assert {setup.gradient_checkpointing for setup in asked} == {"full"}


@pytest.mark.proves("S3-14")
def test_changes_add_up_where_none_is_enough_and_those_that_save_nothing_stay_out():
    def need(setup):
        activations = setup.batch * (1 if setup.gradient_checkpointing == "full" else 4)
        return (4 + activations) * GIB

    check, _ = answers(need)
    (change, _), *_ = rank_changes(Setup(batch=8), GPU, need, check)
    assert change.setup.batch * change.setup.num_microbatches == 8
    assert need(change.setup) <= GPU.total_bytes
    assert "--train foreach=false" not in change.options
    assert not any(option.startswith("--train loss_chunks") for option in change.options)


def test_nothing_is_promised_where_nothing_fits():
    check, asked = answers(lambda _: 99 * GIB)
    assert rank_changes(Setup(batch=8), GPU, lambda _: 99 * GIB, check) == []
    assert asked == []


def test_checks_are_few_where_the_guess_is_wrong():
    check, asked = answers(lambda _: 99 * GIB)
    assert rank_changes(Setup(batch=8), GPU, lambda _: 0, check) == []
    assert len(asked) == 10


@pytest.mark.parametrize("needed", [6, 20])
def test_what_learns_is_ranked_by_how_little_it_changes_and_what_loses_its_updates_is_last(needed):
    def need(setup):
        return (needed if setup == Setup() else 7 if setup.gradient_checkpointing == "full" else 30) * GIB

    check, _ = answers(need)
    ranked = rank_changes(Setup(), GPU, need, check, learns=lambda one: one.dtype != "bf16" or one.lora_rank > 0)
    ways = [(one.setup.dtype, one.setup.optimizer, one.setup.lora_rank) for one, _ in ranked]
    wide = [("bf16-amp", "adamw", 0), ("bf16-amp", "paged_adamw", 0), ("bf16-amp", "adamw", 0)]
    assert ways == [*wide, *[("bf16", "adamw", 0)] * (needed == 20)]
    assert not any(change.same_training for change, _ in ranked[:3])


@pytest.mark.proves("S4-42", "C-22")
@pytest.mark.parametrize("wrong", [0.3, 0.9, 1.0, 1.2, 4.0])
@pytest.mark.parametrize("each", [0.01, 0.3, 1.0])
def test_the_largest_batch_is_found_also_by_a_wrong_guess(each, wrong):
    def need(setup):
        return (1 + setup.batch * each) * GIB

    check, asked = answers(need)
    setups = [Setup(batch=number) for number in range(1, 2000)]
    chosen, found = find_batch(setups, GPU, lambda setup: int(need(setup) * wrong), check, most_checks=20)
    assert chosen.batch == int(9 / each + 1e-9)
    assert found.verdict == "fits"
    assert len(asked) <= 14


def test_of_few_checks_the_largest_that_is_known_to_fit_is_taken():
    check, asked = answers(lambda setup: setup.batch * GIB // 100)
    setups = [Setup(batch=number) for number in range(1, 4000)]
    chosen, found = find_batch(setups, GPU, lambda setup: 1 + setup.batch % 7, check, most_checks=6)
    assert len(asked) <= 7
    assert found.verdict == "fits"
    assert chosen.batch <= 1000


@pytest.mark.parametrize(("fixed", "each"), [(1, 0.01), (4, 0.3), (8, 1.0), (0.5, 4.0)])
def test_the_largest_batch_is_found_by_what_was_checked_where_nothing_guesses(fixed, each):
    check, asked = answers(lambda setup: (fixed + setup.batch * each) * GIB)
    setups = [Setup(batch=number) for number in range(1, 1 << 14)]
    chosen, found = find_batch(setups, GPU, None, check)
    assert chosen.batch == int((10 - fixed) / each + 1e-9)
    assert found.verdict == "fits"
    assert asked[0].batch == 1
    assert len(asked) <= 8


def test_where_no_batch_fits_the_smallest_is_answered():
    check, _ = answers(lambda _: 99 * GIB)
    chosen, found = find_batch([Setup(batch=1), Setup(batch=2)], GPU, lambda _: 1, check)
    assert (chosen.batch, found.verdict) == (1, "does not fit")


@pytest.mark.proves("S4-15")
def test_changes_are_ordered_by_what_they_cost():
    options = [change.options[0].removeprefix("--train ") for change in list_changes(Setup(batch=2, attention="eager"))]
    order = ["attention=sdpa", "foreach=false", "loss_chunks=8", "--batch 1", "gradient_checkpointing=selective"]
    places = [options.index(option) for option in order]
    assert all(before < after for before, after in pairwise(places))
