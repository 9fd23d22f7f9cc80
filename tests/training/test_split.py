"""How batches are cut: by sample, by group, not at all, and what is refused."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from memfit.errors import UsageError
from memfit.training import WHOLE, ByGroup, BySample, SafeStep

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    names: list
    note: str = "same"
    made: int = field(default=7, init=False)


def numbers(num):
    return torch.arange(float(num))


def test_every_kind_of_container_is_cut_and_keeps_its_kind():
    batch = {
        "pair": Pair(numbers(5), np.arange(5)),
        "list": [numbers(5), (numbers(5), None)],
        "record": Record(numbers(5), ["a", "b", "c", "d", "e"]),
        "ordered": OrderedDict(z=numbers(5)),
        "ragged": [[1], [2, 3], [], [4], [5]],
        "shared": [torch.tensor(3.0)],
        "number": 4,
    }
    split = BySample()
    assert split.count(batch) == 5
    part = split.take(batch, 1, 3)
    assert type(part["pair"]) is Pair and part["pair"].x.tolist() == [1, 2] and part["pair"].y.tolist() == [1, 2]
    assert type(part["list"]) is list and type(part["list"][1]) is tuple and part["list"][1][1] is None
    assert type(part["record"]) is Record and part["record"].names == ["b", "c"]
    assert (part["record"].note, part["record"].made) == ("same", 7)
    assert type(part["ordered"]) is OrderedDict and part["ordered"]["z"].tolist() == [1, 2]
    assert part["ragged"] == [[2, 3], []]
    assert part["shared"][0].item() == 3.0 and part["number"] == 4
    assert batch["record"].names == ["a", "b", "c", "d", "e"]


def test_parts_are_views_of_the_batch():
    x = numbers(6)
    part = BySample().take((x,), 2, 4)[0]
    assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_unequal_lengths_are_refused_and_both_places_named():
    with pytest.raises(UsageError) as caught:
        BySample().count({"x": numbers(4), "deep": [numbers(4), {"y": numbers(3)}]})
    assert "4 samples at batch['x'] and 3 at batch['deep'][1]['y']" in caught.value.what


@pytest.mark.parametrize("batch", [None, 3, torch.tensor(1.0), {}, object(), (numbers(4), object()), {1, 2}])
def test_what_cannot_be_cut_is_one_unit(batch):
    assert BySample().count(batch) == 1


def test_groups_stay_whole_and_their_ids_may_be_any_kind():
    x = numbers(6)
    for ids in ([3, 3, 1, 2, 2, 2], torch.tensor([3, 3, 1, 2, 2, 2]), np.array(["c", "c", "a", "b", "b", "b"])):
        split = ByGroup(lambda batch, ids=ids: ids)
        assert split.count((x,)) == 3
        assert [split.take((x,), start, start + 1)[0].tolist() for start in range(3)] == [[0, 1], [2], [3, 4, 5]]
        assert split.take((x,), 1, 3)[0].tolist() == [2, 3, 4, 5]


def test_a_group_in_two_pieces_is_refused_by_name():
    with pytest.raises(UsageError, match=r"Group 7 stands in 2 places"):
        ByGroup(lambda batch: [7, 8, 7]).count(numbers(3))


@pytest.mark.parametrize("ids", [[1, 1], [[1], [1], [1]], []])
def test_group_ids_are_one_for_each_sample(ids):
    with pytest.raises(UsageError, match="one group id for each sample"):
        ByGroup(lambda batch: ids).count(numbers(3))


def test_a_whole_batch_is_one_unit_and_stays_the_object_it_is():
    batch = [numbers(4)]
    assert WHOLE.count(batch) == 1
    assert WHOLE.take(batch, 0, 1) is batch
    assert repr(WHOLE) == "WHOLE"


def test_a_loss_may_take_fields_out_of_the_batch_also_when_the_step_is_repeated():
    seen = []

    def loss(model, batch):
        seen.append((sorted(batch), len(batch["more"])))
        x, more = batch.pop("x"), batch["more"].pop()
        if len(seen) == 1:
            raise MemoryError
        return (model(x[:, None]) * more[:, None]).sum(), len(x)

    model, batch = torch.nn.Linear(1, 1), {"x": numbers(2).float(), "more": [numbers(2)]}
    step = SafeStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, microbatch_size=None)
    assert step(batch).num_ooms == 1
    assert seen == [(["more", "x"], 1)] * 2
    assert sorted(batch) == ["more", "x"] and len(batch["more"]) == 1


class Counted(list):
    """A list that counts how many of its items were looked at."""

    looked = 0

    def __iter__(self):
        for item in super().__iter__():
            Counted.looked += 1
            yield item


@pytest.mark.parametrize(
    "make",
    [
        lambda num: Counted(["a"] * num),
        lambda num: Counted([7] * num),
        lambda num: Counted([Counted([7] * 100) for _ in range(num)]),
    ],
)
def test_what_a_long_plain_list_costs_does_not_grow_with_it(make):
    looked = []
    for num in (100, 1000):
        Counted.looked = 0
        batch = {"x": numbers(num), "plain": make(num)}
        assert BySample().count(batch) == num
        assert len(BySample().take(batch, 1, 4)["plain"]) == 3
        looked.append(Counted.looked)
    assert looked[0] == looked[1]


def test_a_long_plain_tuple_is_one_leaf_and_one_that_holds_a_tensor_is_looked_through():
    values = tuple(range(26))
    assert BySample().take((values, numbers(3)), 0, 2)[0] is values
    assert BySample().count((*values, numbers(3))) == 3
    assert BySample().take((*values, numbers(3)), 0, 2)[-1].tolist() == [0, 1]


@pytest.mark.parametrize("number", [3, 40])
def test_the_texts_that_a_loader_collects_are_cut_with_their_samples(number):
    samples = [(torch.tensor([float(i)]), f"name {i}", Pair(f"x {i}", "y")) for i in range(number)]
    batch = default_collate(samples)
    assert BySample().count(batch) == number
    part = BySample().take(batch, 1, 3)
    assert tuple(part[1]) == ("name 1", "name 2")
    assert part[0].tolist() == [[1.0], [2.0]] and tuple(part[2].x) == ("x 1", "x 2")


def test_a_named_tuple_of_texts_is_a_record_and_goes_into_every_part():
    batch = {"x": torch.ones(4, 1), "meta": Pair("train", "v1")}
    assert BySample().count(batch) == 4
    assert BySample().take(batch, 0, 2)["meta"] == Pair("train", "v1")
