"""Which ends of a job are tried again, with how much memory: a table of ends, and what holds for all sizes."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.jobs import ENDED, RESTARTS, End, JobStatus, Retry, SlurmBackend, Traits, what_follows
from memfit.memory import HOST, Footprint
from memfit.units import MIB

DEVICE = "device"
FAULT = "its own fault is not tried again"
SAVED = {"started": 5.0, "checkpointed": 6.0}
ON_GPU = {"evidence": {"place": "device"}, "footprint": Footprint(1, device_bytes={"a": 300 * MIB, "b": 100 * MIB})}
ON_HOST = {"evidence": {"place": "host"}}
HAD = Counter({HOST: 400 * MIB, DEVICE: 200 * MIB})
CAPACITY = Counter({HOST: 1000 * MIB, DEVICE: 800 * MIB})


HERE = Traits(queues_jobs=False, enforces_memory=False, patience_seconds=1.0)
OF_END = {name for name in End.__dataclass_fields__ if name != "status"}


def end_of(state, **facts):
    how = {"had": HAD, "capacity": CAPACITY, "traits": HERE} | {name: facts.pop(name) for name in OF_END & {*facts}}
    return End(JobStatus("job", state, **facts), **how)


def after(state, **facts):
    return what_follows(end_of(state, **facts))


def more(size, *, said, kind=HOST):
    return Retry(said, Counter({kind: size}))


@pytest.mark.parametrize(
    ("state", "facts", "follows"),
    [
        ("out_of_memory", {"asked": True, "restarts": Counter(outside=1)}, "its end was asked for"),
        (
            "preempted",
            {"restarts": Counter(outside=1)},
            "it was ended from outside memfit again, without a checkpoint in between",
        ),
        ("node_fail", {}, Retry("its watcher died; the job did not fail")),
        ("node_fail", {"cause": "n2 failed"}, Retry("n2 failed; the job did not fail")),
        (
            "preempted",
            {},
            Retry("it was ended from outside memfit; it goes on from its checkpoint", counts_as="outside"),
        ),
        ("timeout", SAVED, Retry("it met its time limit; it goes on from its checkpoint")),
        ("timeout", {**SAVED, "checkpointed": 5.0}, FAULT),  # that of the attempt before
        ("timeout", {"started": 5.0}, FAULT),
        ("timeout", {"checkpointed": 5.0}, FAULT),
        ("failed", SAVED, FAULT),
        ("failed", {"evidence": {"place": "device"}}, FAULT),
        ("completed", {"wants_more": True, "was_given_up": True}, "it completed"),
        ("out_of_memory", {"was_given_up": True, "is_stopping": True}, "it had the whole budget to itself"),
        ("preempted", {"is_stopping": True, "aside": Counter()}, "the run was asked to stop"),
        ("failed", {"aside": Counter()}, FAULT),
        *(
            (
                state,
                {"asked": True, "aside": Counter({HOST: 7})},
                Retry("it gave way to other jobs", Counter({HOST: 7}), "aside"),
            )
            for state in ("preempted", "cancelled", "node_fail", "out_of_memory")
        ),
        ("node_fail", {"restarts": Counter(retry=2)}, "it was restarted 2 times already (retries)"),
        ("preempted", {"retries": 0}, "it was restarted 0 times already (retries)"),
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
            {"peak_bytes": 100 * MIB, "restarts": Counter(retry=1)},
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
            "it ran out of device memory, and memfit has no more to give: --num-gpus 1 gives it a GPU here, and "
            "slurm.extra=[--constraint=...] larger ones in Slurm",
        ),
    ],
)
def test_what_follows_from_each_end(state, facts, follows):
    assert after(state, **facts) == follows


CLUSTER = {"traits": SlurmBackend.traits}


@pytest.mark.parametrize(
    ("state", "facts", "follows"),
    [
        ("preempted", {"restarts": Counter(outside=2)}, "outside"),
        ("node_fail", {"restarts": Counter(outside=2, retry=9)}, "outside"),
        ("timeout", SAVED, "outside"),
        ("timeout", {**SAVED, "restarts": Counter(outside=3)}, "outside"),
        ("preempted", {"restarts": Counter(outside=3)}, None),
        ("out_of_memory", {"restarts": Counter(outside=9)}, "retry"),
    ],
)
def test_on_a_cluster_three_ends_in_a_row_from_outside_are_no_retries(state, facts, follows):
    again = after(state, **facts, **CLUSTER)
    assert (again.counts_as if isinstance(again, Retry) else None) == follows


def test_on_a_cluster_the_last_retry_gets_no_more_than_the_others():
    assert after("out_of_memory", restarts=Counter(retry=1), **CLUSTER).needed == Counter({HOST: 600 * MIB})


FACTS = {
    "was_given_up": True,
    "is_stopping": True,
    "aside": Counter(),
    "asked": True,
    "wants_more": True,
    "evidence": {"place": "device"},
    "capacity": Counter({HOST: 400 * MIB}),
    "restarts": Counter(outside=3, retry=2),
    "checkpointed": 6.0,
}


def test_each_end_meets_a_line_of_the_table_and_each_line_is_met():
    met = set()
    for chosen in itertools.product([False, True], repeat=len(FACTS)):
        facts = {name: fact for (name, fact), is_chosen in zip(FACTS.items(), chosen, strict=True) if is_chosen}
        for state in ENDED:
            end = end_of(state, started=5.0, **facts)
            lines = [line for line in RESTARTS if state in line.states and line.known(end)]
            met.add(RESTARTS.index(lines[0]))
            found = what_follows(end)
            assert isinstance(found, str) == (lines[0].then == "end")
            # Whatever is known: no restart of a job that completed, or once the run was asked to stop.
            assert isinstance(found, str) or not (state == "completed" or end.is_stopping or end.was_given_up)
            assert isinstance(found, str) or found.counts_as == "aside" or not end.status.asked
    assert met == {*range(len(RESTARTS))}


sizes = st.integers(1, 1 << 40)


@given(peak=sizes, had=sizes, capacity=sizes)
def test_a_job_out_of_memory_is_given_half_as_much_again_up_to_the_whole_budget_which_it_had_not_yet(
    peak, had, capacity
):
    given = {"peak_bytes": peak, "had": Counter({HOST: had}), "capacity": Counter({HOST: capacity})}
    once, last = after("out_of_memory", **given), after("out_of_memory", restarts=Counter(retry=1), **given)
    took = max(peak, min(had, capacity))
    if took >= 0.99 * capacity:
        assert once == last and isinstance(once, str)
    else:
        assert last.needed == Counter({HOST: capacity})
        assert once.needed == Counter({HOST: min(capacity, round(1.5 * took))})
