"""Sequences of about one length come together, in an order of (seed, epoch), by any number of workers."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.data import Padding, SequenceLoader, _position, pack
from memfit.errors import DataError, UsageError

PADDING = Padding(0, multiple_of=4)


@pytest.fixture(autouse=True)
def always_ahead(monkeypatch):
    """Threads make even what is made in no time."""
    monkeypatch.setattr(_position, "_LEAST_SECONDS", 0.0)


def rows(lengths):
    return [{"input_ids": [number + 1] * length, "labels": number} for number, length in enumerate(lengths)]


def lengths_of(number, seed=0):
    return np.random.default_rng(seed).integers(1, 60, number).tolist()


def plain(batches):
    return [{name: array.tolist() for name, array in batch.items()} for batch in batches]


def drawn(loader, epoch):
    loader.set_epoch(epoch)
    return [batch["labels"].tolist() for batch in loader]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=40),
    batch=st.sampled_from([None, 1, 3, 50]),
    max_tokens=st.sampled_from([None, 20, 64]),
    shuffle=st.sampled_from([None, 0, 5]),
    bucket=st.integers(1, 4),
)
def test_each_epoch_has_every_example_once_within_the_limits_and_as_many_batches(
    lengths, batch, max_tokens, shuffle, bucket
):
    if batch is None and max_tokens is None:
        batch = 4
    loader = SequenceLoader(rows(lengths), PADDING, batch=batch, max_tokens=max_tokens, shuffle=shuffle, bucket=bucket)
    most = loader.longest()["input_ids"].size
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        batches = list(loader)
        assert len(batches) == len(loader)
        assert sorted(itertools.chain(*(one["labels"].tolist() for one in batches))) == list(range(len(lengths)))
        for one, indices in zip(batches, loader.indices, strict=True):
            assert one["labels"].tolist() == indices.tolist()
            assert batch is None or len(indices) <= batch
            assert max_tokens is None or one["input_ids"].size <= max_tokens
            assert one["input_ids"].size <= most
    if shuffle is None:
        assert list(itertools.chain(*drawn(loader, 1))) == list(range(len(lengths)))


@pytest.mark.proves("S4-09", "C-21")
def test_the_order_is_of_seed_and_epoch_and_buckets_save_what_fills_up():
    data = rows(lengths_of(2000))
    one, again, other = (SequenceLoader(data, PADDING, batch=16, shuffle=seed) for seed in (1, 1, 2))
    assert drawn(one, 1) == drawn(again, 1) != drawn(one, 2)
    assert drawn(one, 1) != drawn(other, 1)
    shares = []
    for bucket in (50, 1):
        batches = list(SequenceLoader(data, PADDING, batch=16, shuffle=1, bucket=bucket))
        shares.append(
            sum(one["attention_mask"].sum() for one in batches) / sum(one["attention_mask"].size for one in batches)
        )
    assert shares[0] > 0.9 and shares[1] < 0.6


@pytest.mark.parametrize(
    ("how", "fingerprint", "batches"),
    [
        ({"batch": 2, "shuffle": 3, "bucket": 2}, "270ba9d250aa93a2", [[3, 7], [1, 4], [2, 0], [5, 6]]),
        ({"max_tokens": 24, "shuffle": 3}, "561a4618bf9fddf5", [[1, 4], [5, 6, 3], [2, 0, 7]]),
        ({"batch": 3}, "3c871ca5ba4dcb45", [[0, 1, 2], [3, 4, 5], [6, 7]]),
    ],
)
def test_the_order_of_an_epoch_and_its_fingerprint_stay_as_they_were_for_saved_states(how, fingerprint, batches):
    loader = SequenceLoader(rows([3, 9, 4, 8, 5, 7, 6, 2]), PADDING, **how)
    assert drawn(loader, 1) == batches
    assert loader.state_dict() == {"epoch": 1, "position": len(batches), "fingerprint": fingerprint}


def test_batches_of_one_budget_differ_from_epoch_to_epoch_though_their_number_does_not():
    loader = SequenceLoader(rows(lengths_of(500)), PADDING, max_tokens=256, shuffle=0)
    first, second = drawn(loader, 1), drawn(loader, 2)
    assert {frozenset(one) for one in first} != {frozenset(one) for one in second} and len(first) == len(second)


@pytest.mark.proves("S4-08")
@pytest.mark.parametrize("how", [{"batch": 8}, {"max_tokens": 300}])
def test_a_state_goes_on_at_its_batch_with_another_number_of_workers(how):
    data = pack(rows(lengths_of(200)))
    whole, first = (SequenceLoader(data, PADDING, shuffle=4, **how) for _ in range(2))
    whole.set_epoch(2)
    everything = plain(whole)
    first.set_epoch(2)
    head = plain(itertools.islice(first, 3))
    with SequenceLoader(data, PADDING, shuffle=4, num_workers=2, **how) as second:
        second.load_state_dict(first.state_dict())
        assert head + plain(second) == everything
        assert plain(second) == everything, "after its end an epoch begins again"
        second.set_epoch(2)
        assert len(plain(itertools.islice(second, 2))) == 2
        second.set_epoch(2)
        assert plain(second) == everything, "set_epoch goes back to the start"


def test_a_state_of_another_order_is_refused():
    data = rows(lengths_of(50))
    state = SequenceLoader(data, PADDING, batch=8, shuffle=1).state_dict()
    for other in (
        {"batch": 4, "shuffle": 1},
        {"batch": 8, "shuffle": 2},
        {"batch": 8, "shuffle": 1, "max_tokens": 256},
    ):
        with pytest.raises(UsageError, match="fingerprint"):
            SequenceLoader(data, PADDING, **other).load_state_dict(state)
    with pytest.raises(UsageError, match="fingerprint"):
        SequenceLoader(rows(lengths_of(50, 1)), PADDING, batch=8, shuffle=1).load_state_dict(state)


def test_a_kept_batch_never_changes():
    data = rows(lengths_of(80))
    kept = list(SequenceLoader(data, PADDING, batch=4, shuffle=1, num_workers=2))
    assert plain(kept) == plain(SequenceLoader(data, PADDING, batch=4, shuffle=1))


def test_an_example_that_is_wrong_is_named_by_whoever_makes_its_batch():
    mixed = [*rows([3, 4]), {"input_ids": [1]}]
    for num_workers in (0, 1):
        with pytest.raises(DataError, match="has no 'labels'"):
            list(SequenceLoader(mixed, PADDING, batch=4, num_workers=num_workers))


@pytest.mark.parametrize(
    "wrong", [{}, {"batch": 0}, {"batch": True}, {"max_tokens": 2.5}, {"batch": 1, "bucket": 0}, {"batch": 1, "shuffle": False},
              {"batch": 1, "shuffle": -1}, {"batch": 1, "num_workers": -1}, {"batch": 1, "num_workers": "auto"}]
)  # fmt: skip
def test_arguments_out_of_range_are_refused(wrong):
    with pytest.raises(UsageError, match=r"is a whole number of at least|neither batch nor max_tokens"):
        SequenceLoader(rows([1]), PADDING, **wrong)


def test_data_that_make_no_batch_are_refused():
    with pytest.raises(DataError, match="there are no examples"):
        SequenceLoader([], PADDING, batch=1)
    with pytest.raises(DataError, match=r"^example 1 takes 12 tokens by itself") as caught:
        SequenceLoader(rows([4, 9]), PADDING, max_tokens=8)
    assert caught.value.rule == "a batch has at most max_tokens=8, with what fills it up."
    assert caught.value.remedy == "raise max_tokens, or cut long examples: Padding(max_length=...)"
    with pytest.raises(DataError, match=r"the lengths have the shape \(1,\), and there are 2 examples"):
        SequenceLoader(rows([4, 9]), PADDING, max_tokens=80, lengths=[4])


def test_lengths_that_are_known_are_not_read_and_none_are_read_that_are_not_needed():
    class Counted(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

        def __iter__(self):
            raise AssertionError("all were read")

    data = Counted(rows([3, 4, 5, 6]))
    SequenceLoader(data, PADDING, batch=2)
    SequenceLoader(data, PADDING, batch=2, shuffle=1, bucket=1)
    SequenceLoader(data, PADDING, max_tokens=64, shuffle=1, lengths=[3, 4, 5, 6])
    data.lengths = [3, 4, 5, 6]
    SequenceLoader(data, PADDING, batch=2, shuffle=1)
    assert data.reads == 4, "the first one, to see what a batch holds"


def test_a_trainer_resumes_by_its_state_and_tries_its_longest_batch_before():
    pytest.importorskip("torch")
    from memfit.training import find_longest

    loader = SequenceLoader(rows(lengths_of(64)), PADDING, batch=8, shuffle=1)
    found = find_longest(loader)
    assert found.how == "known" and found.batch["input_ids"].shape == (8, 60) and loader.state_dict()["position"] == 0
