"""Which ends of a job are tried again, with how much memory: rows of ends, and what holds for all."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.jobs import ENDED, End, HeldByOthers, JobStatus, Retry, SlurmBackend, Traits, what_follows
from memfit.memory import HOST, Footprint
from memfit.units import MIB

DEVICE = "device"
FAULT = "its own fault is not tried again"
SAVED = {"started": 5.0, "checkpointed": 6.0}
ON_GPU = {"evidence": {"place": "device"}, "footprint": Footprint(1, device_bytes={"a": 300 * MIB, "b": 100 * MIB})}
GREW = {"evidence": {"place": "host", "ran_out_by": "growth"}}
GOES_ON = "it grew to 500.0 MiB; it goes on from its checkpoint with the same memory"
ON_HOST = {"evidence": {"place": "host", "ran_out_by": "size"}}
HAD = {HOST: 400 * MIB, DEVICE: 200 * MIB}
ALONE = {HOST: 1000 * MIB, DEVICE: 800 * MIB}
#: Others hold most of the host.
BESIDE = {"now": {HOST: 50 * MIB, DEVICE: 800 * MIB}, "held": HeldByOthers(700 * MIB, 2, 250 * MIB), "had": {}}
WHO = "2 other runs of memfit hold 700.0 MiB and processes that are not memfit's hold 250.0 MiB"

HERE = Traits(enforces_memory=False, least_bytes=16 * MIB)
OF_END = {name for name in End.__dataclass_fields__ if name != "status"}


def end_of(state, **facts):
    how = {"had": HAD, "alone": ALONE, "traits": HERE} | {name: facts.pop(name) for name in OF_END & {*facts}}
    how.setdefault("now", how["alone"])
    return End(JobStatus("job", state, **facts), **how)


def after(state, **facts):
    return what_follows(end_of(state, **facts))


def more(size, *, said, kind=HOST, gets_all=False):
    return Retry(said, {kind: size}, gets_all=gets_all)


def beside(size, said="it gave way to other jobs"):
    return Retry(said, {HOST: size} if size else {}, "aside")


@pytest.mark.proves("S1-43", "S3-43")
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
        # One that grew goes on with what it had, also if it had all there is. Without a checkpoint the first
        # verdict is not believed, the second is.
        ("out_of_memory", {**GREW, **SAVED, "peak_bytes": 500 * MIB}, more(500 * MIB, said=GOES_ON)),
        ("out_of_memory", {**GREW, **SAVED, "peak_bytes": 500 * MIB, "asked": True, "was_given_up": True,
         "gave_way": True, "alone": {HOST: 400 * MIB}}, more(400 * MIB, said=GOES_ON)),
        ("failed", {**GREW, **SAVED, "peak_bytes": 500 * MIB, "wants_more": True}, more(500 * MIB, said=GOES_ON)),
        ("failed", {**GREW, **SAVED}, FAULT),
        ("out_of_memory", {**GREW, **SAVED, "asked": True}, "its end was asked for"),
        ("out_of_memory", {**GREW, **SAVED, "is_stopping": True, "was_given_up": True}, "the run was asked to stop"),
        ("out_of_memory", {**GREW, **SAVED, "restarts": Counter(retry=2)}, "it was restarted 2 times already (retries)"),
        ("out_of_memory", {**GREW, "peak_bytes": 500 * MIB},
         more(750 * MIB, said="it ran out of memory at 500.0 MiB; it gets 750.0 MiB")),
        ("out_of_memory", {**GREW, "peak_bytes": 500 * MIB, "asked": True, "was_given_up": True},
         "it had the whole budget to itself"),
        ("out_of_memory", {**GREW, "started": 5.0, "checkpointed": 5.0, "peak_bytes": 500 * MIB, "restarts": Counter(retry=1)},
         "it grew to 500.0 MiB, and more memory would not mend that: it saved nothing to go on from"),
        ("preempted", {"is_stopping": True, "gave_way": True}, "the run was asked to stop"),
        ("completed", {"gave_way": True}, "it completed"),
        # It gave way: it comes again whatever it answered, and needs its peak or its forecast if one is known.
        *((state, {"asked": True, "gave_way": True, "peak_bytes": 90 * MIB}, beside(90 * MIB))
          for state in ("preempted", "cancelled", "node_fail", "out_of_memory", "failed")),
        ("preempted", {"gave_way": True}, beside(0)),
        ("preempted", {"gave_way": True, "peak_bytes": MIB}, beside(0)),
        ("preempted", {"gave_way": True, "peak_bytes": MIB, "expected": 300 * MIB}, beside(300 * MIB)),
        ("preempted", {"gave_way": True, "peak_bytes": 80 * MIB, "wants_more": True}, beside(100 * MIB)),
        ("preempted", {"gave_way": True, "peak_bytes": 80 * MIB, "alone": {}}, beside(0)),
        # Others hold a part of what there is: no end for good, and no retry is used up.
        ("out_of_memory", {"peak_bytes": 592 << 10, "restarts": Counter(retry=9), **BESIDE},
         beside(24 * MIB, f"it ran out of memory at 592.0 KiB: {WHO}")),
        ("out_of_memory", {"peak_bytes": 68 * MIB, **BESIDE},
         beside(102 * MIB, f"it ran out of memory at 68.0 MiB: {WHO}")),
        ("failed", {"peak_bytes": 49 * MIB, "wants_more": True, **BESIDE, "had": {HOST: 50 * MIB}},
         beside(75 * MIB, f"it ran out of memory at 49.0 MiB: {WHO}")),
        ("out_of_memory", {"peak_bytes": 30 * MIB, **BESIDE, "had": {HOST: 40 * MIB}},  # its own limit was smaller
         more(60 * MIB, said="it ran out of memory at 30.0 MiB; it gets 60.0 MiB")),
        ("out_of_memory", {"peak_bytes": 990 * MIB, **BESIDE}, "it had 990.0 MiB, and the whole budget is 1000.0 MiB"),
        ("out_of_memory", {"peak_bytes": 100 * MIB, "had": {}},  # a grant alone is no proof
         more(150 * MIB, said="it ran out of memory at 100.0 MiB; it gets 150.0 MiB")),
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
            more(600 * MIB, said="it ran out of memory at 100.0 MiB; it gets all that is free", gets_all=True),
        ),
        (
            "out_of_memory",
            {"peak_bytes": 700 * MIB},
            more(1000 * MIB, said="it ran out of memory at 700.0 MiB; it gets 1000.0 MiB"),
        ),
        ("out_of_memory", {"peak_bytes": 990 * MIB}, "it had 990.0 MiB, and the whole budget is 1000.0 MiB"),
        (
            "out_of_memory",
            {"peak_bytes": 1, "had": {HOST: 2000 * MIB}},
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
            {**ON_GPU, "alone": {DEVICE: 300 * MIB}},
            "it had 300.0 MiB, and a GPU here gives one job 300.0 MiB",
        ),
        (
            "out_of_memory",
            {**ON_GPU, "alone": {HOST: 1000 * MIB}},
            "it ran out of device memory, and memfit has no more to give: --num-gpus 1 gives it a GPU here, and "
            "slurm.extra=[--constraint=...] larger ones in Slurm",
        ),
    ],
)  # fmt: skip
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
    assert after("out_of_memory", restarts=Counter(retry=1), **CLUSTER).needed == {HOST: 600 * MIB}


FACTS = {
    "was_given_up": True,
    "is_stopping": True,
    "gave_way": True,
    "asked": True,
    "wants_more": True,
    "evidence": {"place": "device"},
    "alone": {HOST: 400 * MIB},
    "restarts": Counter(outside=3, retry=2),
    "checkpointed": 6.0,
}


def test_no_job_is_restarted_that_completed_or_was_stopped_and_each_that_gave_way_is():
    for chosen in itertools.product([False, True], repeat=len(FACTS)):
        facts = {name: fact for (name, fact), is_chosen in zip(FACTS.items(), chosen, strict=True) if is_chosen}
        for state in ENDED:
            end = end_of(state, started=5.0, **facts)
            is_over = state == "completed" or end.is_stopping or end.was_given_up
            found = what_follows(end)
            if is_over or end.gave_way or end.status.asked:
                assert isinstance(found, Retry) == (end.gave_way and not is_over)


sizes = st.integers(1, 1 << 40)


@given(peak=sizes, had=sizes, capacity=sizes)
def test_a_job_out_of_memory_is_given_half_as_much_again_and_the_last_time_all_unless_it_had_that(peak, had, capacity):
    given = {"peak_bytes": peak, "had": {HOST: had}, "alone": {HOST: capacity}}
    once, last = after("out_of_memory", **given), after("out_of_memory", restarts=Counter(retry=1), **given)
    took = max(peak, min(had, capacity))
    if took >= 0.99 * capacity:
        assert once == last and isinstance(once, str)
    else:
        assert last.needed == once.needed == {HOST: min(capacity, round(1.5 * max(took, HERE.least_bytes)))}
        assert last.gets_all and not once.gets_all


def test_a_request_that_is_refused_while_there_is_room_is_not_the_doing_of_others():
    killed, refused = (after("out_of_memory", peak_bytes=10 * MIB, exit_code=code, **BESIDE) for code in (-9, 1))
    assert (killed.counts_as, refused.counts_as) == ("aside", "retry")
