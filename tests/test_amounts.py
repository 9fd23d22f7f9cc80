"""Memory by scope: what a layout does not tell is never made up."""

import itertools
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.amounts import Amount, Layout
from memfit.units import GIB

SCOPES = ("task", "cpu", "gpu", "node", "job")
FULL = Layout(nodes=2, tasks_per_node=4, cpus_per_task=8, gpus_per_node=2)
#: The counts that a change from one scope to another takes.
NEEDS = {
    "node": set(), "job": {"nodes"}, "task": {"tasks_per_node"}, "cpu": {"tasks_per_node", "cpus_per_task"},
    "gpu": {"gpus_per_node"},
}  # fmt: skip


def test_a_node_has_what_all_that_is_on_it_has():
    found = {per: FULL.to(Amount(GIB, per), "node").bytes / GIB for per in SCOPES}
    assert found == {"task": 4, "cpu": 32, "gpu": 2, "node": 1, "job": 0.5}


@given(st.builds(Layout, *[st.integers(1, 64)] * 4), st.integers(1))
def test_a_task_has_what_its_cpus_have_whatever_lies_beside_it(layout, size):
    alone = Layout(cpus_per_task=layout.cpus_per_task)
    assert alone.to(Amount(size, "cpu"), "task") == layout.to(Amount(size, "cpu"), "task")
    assert Layout(processes_per_task=3).to(Amount(size, "process"), "task") == Amount(3 * size, "task")
    assert alone.to(Amount(size, "cpu"), "task") == Amount(size * layout.cpus_per_task, "task")
    assert alone.to(Amount(size, "task"), "cpu") == Amount(-(-size // layout.cpus_per_task), "cpu")


def test_another_scope_is_known_exactly_when_the_counts_between_them_are():
    for *counts, per, scope in itertools.product(*[(None, 3)] * 4, SCOPES, SCOPES):
        layout = Layout(*counts)
        needs = NEEDS[per] ^ NEEDS[scope] if {per, scope} == {"task", "cpu"} else NEEDS[per] | NEEDS[scope]
        needs = set() if per == scope else needs
        found = layout.to(Amount(3 * GIB + 1, per), scope)
        assert (found is not None) == all(getattr(layout, name) for name in needs), (layout, per, scope)


@given(st.builds(Layout, *[st.integers(1, 64)] * 4), st.sampled_from(SCOPES), st.sampled_from(SCOPES), st.integers(1))
def test_there_and_back_is_never_less(layout, per, scope, size):
    amount = Amount(size, per)
    assert layout.to(layout.to(amount, scope), per).bytes >= size


def test_an_amount_says_what_it_is_of_and_is_scaled_up_to_a_byte():
    words = {"task": "each task", "cpu": "each CPU", "gpu": "each GPU", "node": "each node", "job": "the job"}
    assert {per: str(Amount(GIB, per)) for per in SCOPES} == {per: f"1.00 GiB of {said}" for per, said in words.items()}
    assert Amount(10, "cpu").scaled(1.25) == Amount(13, "cpu")


@pytest.mark.proves("S3-03")
@pytest.mark.parametrize("do", [operator.add, operator.sub, operator.lt, operator.le, operator.gt, operator.ge, max])
@pytest.mark.parametrize(
    "other", [Amount(1, "node"), Amount(1, "process"), Amount(1, "task", "device"), Amount(1, "job")]
)
def test_amounts_of_different_scopes_or_places_are_neither_added_nor_compared(do, other):
    with pytest.raises(TypeError, match="different scopes or places"):
        do(Amount(1, "task"), other)


def test_amounts_of_one_scope_and_place_are():
    assert Amount(1, "gpu", "device") + Amount(2, "gpu", "device") == Amount(3, "gpu", "device")
    assert max(Amount(1, "task"), Amount(2, "task")) - Amount(1, "task") == Amount(1, "task")
    assert str(Amount(3, "process")) == "3 B of each process"
    assert Layout(tasks_per_node=2, gpus_per_node=2).to(Amount(3, "gpu", "device"), "node") == Amount(
        6, "node", "device"
    )
