"""Examples of several lengths become rectangular arrays with masks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.data import Padding
from memfit.errors import DataError, UsageError

SIDES = st.sampled_from(["left", "right"])
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=9)


def expected(row, width, fill, side, most, truncate):
    kept = row if most is None else (row[:most] if truncate == "right" else row[-most:])
    rest = [fill] * (width - len(kept))
    return kept + rest if side == "right" else rest + kept


@given(
    rows=st.lists(st.tuples(IDS, IDS), min_size=1, max_size=5),
    side=SIDES,
    truncate=SIDES,
    multiple=st.sampled_from([1, 4]),
    most=st.sampled_from([None, 4, 8]),
)
def test_a_batch_is_what_filling_up_each_row_by_hand_gives(rows, side, truncate, multiple, most):
    padding = Padding(7, multiple_of=multiple, max_length=most, side=side, truncate=truncate)
    batch = padding([{"input_ids": ids, "labels": labels} for ids, labels in rows])
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    for place, name, fill in ((0, "input_ids", 7), (1, "labels", -100)):
        column = [row[place] for row in rows]
        longest = min(max(1, *(len(row) for row in column)) if len(column) > 1 else max(1, len(column[0])), most or 99)
        width = -(-longest // multiple) * multiple
        assert batch[name].dtype == np.int64
        assert batch[name].tolist() == [expected(row, width, fill, side, most, truncate) for row in column]
        if name == "input_ids":
            ones = [expected([1] * len(row), width, 0, side, most, truncate) for row in column]
            assert batch["attention_mask"].tolist() == ones


@pytest.mark.proves("S4-08")
def test_masks_and_types_are_filled_up_with_0_and_a_given_mask_is_kept():
    rows = [
        {
            "input_ids": [5, 6],
            "attention_mask": [1, 0],
            "token_type_ids": [1, 1],
            "decoder_input_ids": [9],
            "score": 0.5,
        },
        {"input_ids": [5], "attention_mask": [1], "token_type_ids": [1], "decoder_input_ids": [9, 9], "score": 2.0},
    ]
    batch = Padding(pad_id=3)(rows)
    assert batch["attention_mask"].tolist() == [[1, 0], [1, 0]] and batch["token_type_ids"].tolist() == [[1, 1], [1, 0]]
    assert batch["decoder_input_ids"].tolist() == [[9, 3], [9, 9]]
    assert batch["decoder_attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch["score"].tolist() == [0.5, 2.0] and batch["score"].dtype == np.float32


def test_a_label_mask_tells_labels_from_what_fills_them_up_where_both_are_the_same_number():
    rows = [{"labels": [0, 4]}, {"labels": [0]}]
    assert Padding(0, label_pad=0, with_label_mask=True)(rows)["label_mask"].tolist() == [[1, 1], [1, 0]]
    assert "label_mask" not in Padding(0)(rows)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"input_ids": [1]}, {"ids": [1]}], "example 1 of a batch has no 'input_ids'"),
        ([{"input_ids": "a text"}], "the field 'input_ids' of an example is of the type <U6"),
        ([{"input_ids": [0.5]}], "of the type float64"),
        ([{"input_ids": [[1]]}], r"of the shape \(1, 1\)"),
        ([{"input_ids": [1]}, {"input_ids": 1}], "a number in one example and a sequence in another"),
        (["a text"], "an example is 'a text'"),
    ],
)
def test_what_is_no_example_is_refused_by_name(rows, said):
    with pytest.raises(DataError, match=said):
        Padding(0)(rows)


@pytest.mark.parametrize(
    "wrong", [{"multiple_of": 0}, {"max_length": 0}, {"side": "top"}, {"multiple_of": 8, "max_length": 12}]
)
def test_a_padding_that_cannot_be_is_refused(wrong):
    with pytest.raises(UsageError, match=r"a padding cannot have|is a whole number of at least 1"):
        Padding(0, **wrong)
