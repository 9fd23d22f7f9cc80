"""Which ends of a job are tried again, with how much memory: a table of ends, and what holds for all sizes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.jobs import JobStatus, Retry, decide
from memfit.memory import HOST, Footprint
from memfit.units import MIB

DEVICE = "device"
FAULT = "its own fault is not tried again"
SAVED = {"started": 5.0, "checkpointed": 6.0}
ON_GPU = {"evidence": {"place": "device"}, "footprint": Footprint(1, device_bytes={"a": 300 * MIB, "b": 100 * MIB})}
ON_HOST = {"evidence": {"place": "host"}}
HAD = Counter({HOST: 400 * MIB, DEVICE: 200 * MIB})
CAPACITY = Counter({HOST: 1000 * MIB, DEVICE: 800 * MIB})


def after(state, *, had=HAD, capacity=CAPACITY, **facts):
    how = {name: facts.pop(name) for name in ("is_last", "was_preempted") if name in facts}
    return decide(JobStatus("job", state, **facts), had=had, capacity=capacity, **how)


def more(size, *, said, kind=HOST):
    return Retry(said, Counter({kind: size}))


@pytest.mark.parametrize(
    ("state", "facts", "follows"),
    [
        ("out_of_memory", {"asked": True, "was_preempted": True}, "its end was asked for"),
        (
            "preempted",
            {"was_preempted": True},
            "it was ended from outside memfit again, without a checkpoint in between",
        ),
        ("node_fail", {}, Retry("its watcher died, the job did not fail")),
        ("preempted", {}, Retry("it was ended from outside memfit; it goes on from its checkpoint")),
        ("timeout", SAVED, Retry("it met its time limit; it goes on from its checkpoint")),
        ("timeout", {**SAVED, "checkpointed": 5.0}, FAULT),  # that of the attempt before
        ("timeout", {"started": 5.0}, FAULT),
        ("timeout", {"checkpointed": 5.0}, FAULT),
        ("failed", SAVED, FAULT),
        ("failed", {"evidence": {"place": "device"}}, FAULT),
        ("completed", {"wants_more": True}, FAULT),
        ("cancelled", {"wants_more": True}, FAULT),
        (
            "failed",
            {"wants_more": True, "peak_bytes": 500 * MIB, **ON_GPU},
            more(750 * MIB, said="it ran out of memory at 500.0 MiB; it gets 750.0 MiB"),
        ),
        (
            "out_of_memory",
            {"peak_bytes": 100 * MIB, **ON_HOST},
            more(600 * MIB, said="it ran out of memory at 100.0 MiB; it gets 600.0 MiB"),
        ),
        (
            "out_of_memory",
            {"peak_bytes": 100 * MIB, "is_last": True},
            more(1000 * MIB, said="it ran out of memory at 100.0 MiB; it gets 1000.0 MiB"),
        ),
        (
            "out_of_memory",
            {"peak_bytes": 700 * MIB},
            more(1000 * MIB, said="it ran out of memory at 700.0 MiB; it gets 1000.0 MiB"),
        ),
        ("out_of_memory", {"peak_bytes": 990 * MIB}, "it had 990.0 MiB, and the whole budget is 1000.0 MiB"),
        (
            "out_of_memory",
            {"peak_bytes": 1, "had": Counter({HOST: 2000 * MIB})},
            "it had 1000.0 MiB, and the whole budget is 1000.0 MiB",
        ),
        (
            "out_of_memory",
            {"peak_bytes": 900 * MIB, **ON_GPU},
            more(450 * MIB, said="it ran out of device memory; it gets 450.0 MiB on each GPU", kind=DEVICE),
        ),
        (
            "out_of_memory",
            {"evidence": {"place": "device"}},  # nothing was measured
            more(300 * MIB, said="it ran out of device memory; it gets 300.0 MiB on each GPU", kind=DEVICE),
        ),
        (
            "out_of_memory",
            {**ON_GPU, "capacity": Counter({DEVICE: 300 * MIB})},
            "it had 300.0 MiB, and a GPU here gives one job 300.0 MiB",
        ),
        (
            "out_of_memory",
            {**ON_GPU, "capacity": Counter({HOST: 1000 * MIB})},
            "it ran out of device memory and was given no GPU: --num-gpus 1 gives it one",
        ),
    ],
)
def test_what_follows_from_each_end(state, facts, follows):
    assert after(state, **facts) == follows


sizes = st.integers(1, 1 << 40)


@given(peak=sizes, had=sizes, capacity=sizes)
def test_a_job_out_of_memory_is_given_half_as_much_again_up_to_the_whole_budget_which_it_had_not_yet(
    peak, had, capacity
):
    given = {"peak_bytes": peak, "had": Counter({HOST: had}), "capacity": Counter({HOST: capacity})}
    once, last = after("out_of_memory", **given), after("out_of_memory", is_last=True, **given)
    took = max(peak, min(had, capacity))
    if took >= 0.99 * capacity:
        assert once == last and isinstance(once, str)
    else:
        assert last.needed == Counter({HOST: capacity})
        assert once.needed == Counter({HOST: min(capacity, round(1.5 * took))})
