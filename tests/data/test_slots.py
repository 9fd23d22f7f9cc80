"""Memory of batches: lent, kept by whoever holds an array of it, and free again."""

import sys

import numpy as np
import pytest

from memfit.data._slots import Slots


@pytest.mark.parametrize("shared", [False, True])
def test_a_slot_is_free_again_when_the_last_view_of_it_is_gone(shared):
    slots = Slots(4096, shared=shared)
    slot = slots.take()
    view = slots.lend(slot)[:16].view(np.int64)
    view[:] = 7
    assert slots.num_free == 0 and slots.take() is not slot
    del view
    assert slots.num_free == 1 and slots.take() is slot
    assert slots.num_made == 2


def test_no_python_runs_when_a_batch_is_dropped_so_that_a_ctrl_c_then_is_not_lost():
    slots = Slots(4096)
    lent = [slots.lend(slots.take()) for _ in range(3)]
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(frame.f_code.co_name) if event == "call" else None)
    lent.clear()
    sys.setprofile(None)
    assert calls == []
    assert slots.num_free == 3
