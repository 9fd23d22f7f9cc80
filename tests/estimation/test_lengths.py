"""The lengths of a data set decide on the largest batch, and on how much of a batch is padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import DataError, UsageError
from memfit.estimation import describe_batches, equation_of_batch, read_lengths, split_batch

LENGTHS = [3, 1, 7, 7, 512, 20]


def test_a_line_is_a_length(tmp_path):
    (tmp_path / "lengths.txt").write_text("".join(f"{length}\n" for length in LENGTHS) + "\n")
    assert read_lengths(tmp_path / "lengths.txt").tolist() == LENGTHS


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("3\nfour\n", "'four'"),
        ("3\n-1\n", "-1 to 3"),
        ("16777217\n", "16777217"),
        ("3.5\n", r"'3\.5'"),
        (f"{1 << 64}\n", "too large"),
        ("", "it is empty"),
        (None, r"none\.txt holds no lengths: No such file"),
    ],
)
def test_what_is_no_length_is_refused_with_a_rule_and_a_remedy(tmp_path, content, said):
    path = tmp_path / "none.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=said) as error:
        read_lengths(path)
    assert "rule:" in str(error.value) and "do:" in str(error.value)


def test_a_batch_of_a_known_distribution():
    found = describe_batches(np.array([1, 3]), batch=2, max_length=4)  # of four pairs three have the longer one
    expected = {"mean_tokens": 2, "longest_tokens": 3, "truncated_share": 0, "num_samples": 2}
    assert {name: found[name] for name in expected} == expected
    assert found["saving"] == pytest.approx(1 - 2.5 / 4) and found["pad_share"] == pytest.approx(1 - 2 / 2.5)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=80), st.integers(1, 9), st.integers(1, 40))
def test_batches_are_those_of_the_sequences_cut_one_by_one(lengths, batch, most):
    found = describe_batches(np.array(lengths), batch=batch, max_length=most)
    cut = [min(n, most) for n in lengths]
    assert (found["num_samples"], found["longest_tokens"]) == (len(cut), max(cut))
    assert found["mean_tokens"] == pytest.approx(sum(cut) / len(cut))
    assert found["truncated_share"] == sum(n > most for n in lengths) / len(lengths)
    width = (1 - found["saving"]) * most
    assert sum(cut) / len(cut) <= width + 1e-9 and width <= max(*cut, 1, 1) + 1e-9
    equal = describe_batches(np.full(8, most), batch=batch, max_length=most)
    assert equal["saving"] == pytest.approx(0) and equal["pad_share"] == pytest.approx(0)


def test_batches_without_a_size_are_refused():
    with pytest.raises(UsageError, match="batch is 0"):
        describe_batches(np.array([1]), batch=0, max_length=8)
    with pytest.raises(UsageError, match="max_length is 0"):
        describe_batches(np.array([1]), batch=1, max_length=0)


@pytest.mark.proves("S4-32")
def test_the_size_of_a_batch_is_an_equation():
    assert equation_of_batch(8, 16, 1) == "8 samples x 16 microbatches x 1 device = 128 samples an update"
    assert equation_of_batch(1, 1, 2) == "1 sample x 1 microbatch x 2 devices = 2 samples an update"
    assert split_batch(128, 8) == 16
    with pytest.raises(UsageError, match=r"100 samples(?s:.*)take 96 samples"):
        split_batch(100, 8, world_size=2)
    with pytest.raises(UsageError, match="samples is 0"):
        equation_of_batch(0, 1, 1)
