"""The figures of a message are held against each other before anything is claimed of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.diagnosis import Figures, Job, find_shortage, list_remedies
from reading import look

IN_USE = "Process {pid} has {size:.2f} GiB memory in use. "


def says(*, tried=0.25, total=80.0, free=0.2, allocated=70.0, unused=0.5, processes=(), own=None):
    """Return a message of torch 2.5; sizes in GiB, ``processes`` as pairs of number and size."""
    named = "".join(IN_USE.format(pid=pid, size=size) for pid, size in processes)
    named += "" if own is None else f"Including non-PyTorch memory, this process has {own:.2f} GiB memory in use. "
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried:.2f} GiB. GPU 3 has a total capacity of "
        f"{total:.2f} GiB of which {free:.2f} GiB is free. {named}Of the allocated memory {allocated:.2f} GiB is "
        f"allocated by PyTorch, and {unused:.2f} GiB is reserved by PyTorch but unallocated."
    )


def advice(text, job=None):
    return str(list_remedies(look(text), job))


def test_a_process_that_can_only_be_this_one_is_no_stranger_to_kill():
    text = says(tried=0.13, free=0.1, allocated=70.1, unused=0.7, processes=[(387, 79.8)])
    found = look(text)
    assert "kill" not in advice(text) and not any("Memory of others" in one for one in found.arithmetic)
    assert "Process 387 is this process" in " ".join(found.arithmetic)
    assert found.happened == "out of the GPU's memory"  # and not of its fragments: 0.7 GiB of 80 is nothing


def test_of_several_processes_only_one_that_holds_enough_can_be_this_one():
    text = says(free=0.1, allocated=60.0, unused=0.5, processes=[(11, 61.9), (12, 18.0)])
    found = look(text)
    assert "Process 11 is this process" in " ".join(found.arithmetic)
    assert "Process 12 holds 18.00 GiB" in advice(text)


@pytest.mark.parametrize("own", [None, 19.5])
def test_a_process_beside_this_one_is_a_stranger(own):
    text = says(free=0.5, allocated=17.5, unused=0.5, processes=[(11, 60.0)], own=own)
    held = "61.50 GiB" if own is None else "60.00 GiB"  # what the driver counts for this process is not only torch's
    assert f"Process 11 holds {held}" in advice(text) and "kill PID" in advice(text)


def test_free_memory_above_the_request_is_no_shortage_that_is_proved():
    text = says(tried=0.13, free=70.0, allocated=6.0, unused=0.0)
    found = look(text)
    assert (found.kind, found.confidence) == ("gpu", "likely")
    assert found.arithmetic[0] == "70.00 GiB of 80.00 GiB were free for 133.1 MiB: these figures show no shortage."
    [only] = list_remedies(found)
    assert "find what refused" in only.title
    assert find_shortage(text.encode()) == ""


def test_a_limit_of_the_process_below_the_free_memory_is_named():
    text = says(tried=0.5, free=70.0, allocated=6.0).replace("is free. ", "is free. 6.60 GiB allowed; ")
    found = look(text)
    assert found.confidence == "proved"
    assert "set_per_process_memory_fraction" in str(list_remedies(found))


@pytest.mark.parametrize("allocated", [0.0, 6.0])
def test_a_device_is_called_full_only_of_what_is_on_it(allocated):
    text = says(tried=8.0, free=2.0, allocated=allocated, unused=0.0)
    assert "full" not in advice(text)
    assert f"tensors hold {'0 B' if not allocated else '6.00 GiB'}" in advice(text)


def test_more_than_the_device_has_is_said_and_proves_nothing():
    found = look(says(total=8.0, free=0.0, allocated=17.0, unused=2.0, tried=1.0))
    assert (
        found.confidence == "likely"
        and "19.00 GiB held by this process, but the device has 8.00" in found.arithmetic[0]
    )


def test_a_size_that_no_machine_has_is_a_wrong_size():
    for text in ("CUDA out of memory. Tried to allocate more than 1EB memory.", says(tried=9e8)):
        [only] = list_remedies(look(text))
        assert "computed wrongly" in only.title


@pytest.mark.parametrize("api", ["CUDA", "HIP", "NPU", "MLU", "MUSA"])
def test_the_allocators_variable_is_the_emitters(api):
    text = says(allocated=60.0, unused=10.0, tried=12.0).replace("CUDA", api)
    assert look(text).emitter == f"torch.{api.lower()}"
    assert f"PYTORCH_{api}_ALLOC_CONF=expandable_segments:True" in advice(text)


def test_a_setting_that_a_device_does_not_have_is_not_advised():
    assert "ALLOC_CONF" not in advice(says(allocated=60.0, unused=10.0, tried=12.0).replace("CUDA", "XPU"))


@pytest.mark.parametrize(
    ("text", "word", "other"),
    [
        ("ValueError: No available memory for the cache blocks.", "gpu_memory_utilization=0.95", "torch_dtype"),
        (
            "MemoryError: std::bad_alloc: out_of_memory: RMM failure at: x.hpp:1: Maximum pool size",
            "RMM's pool",
            "ulimit",
        ),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.", "jax.checkpoint", "torch."),
        ("ResourceExhaustedError: OOM when allocating tensor with shape[9] on GPU:0", "TF_GPU_ALLOCATOR", "torch."),
    ],
)
def test_advice_is_in_the_words_of_the_library_that_printed_the_message(text, word, other):
    assert word in advice(text) and other not in advice(text)


RESTORE = 'Traceback (most recent call last):\n  File "t.py", line 9, in load\n    state = torch.load(path)\n'


@pytest.mark.parametrize(
    ("before", "job"), [(RESTORE, None), ("[rank3]: ", None), ("", Job(nodes=1, tasks_per_node=8, gpus_per_node=8))]
)
def test_others_may_be_ranks_of_the_job_and_are_not_killed(before, job):
    text = before + says(free=0.5, allocated=8.0)
    assert "kill PID" not in advice(text, job) and "LOCAL_RANK" in advice(text, job)
    if before == RESTORE:
        assert "map_location='cpu'" in list_remedies(look(text))[0].setting


FULL = Figures(total=1000, free=0, allocated=700, reserved=800, tried=100)


@pytest.mark.parametrize(
    ("figures", "wanted"),
    [
        (
            FULL,
            {"used": 1000, "slack": 100, "room": 0, "held": 800, "foreign": 200, "own_pids": (), "contradictions": {}},
        ),
        (Figures(), dict.fromkeys(("used", "slack", "room", "held", "foreign"))),
        (Figures(total=1000), {"used": None, "room": None, "foreign": None}),
        (Figures(free=5), {"used": None, "room": None}),
        (Figures(total=1000, free=1000), {"used": 0, "room": 1000, "foreign": None}),
        (Figures(total=1000, free=1001), {"used": None, "room": None}),
        (Figures(reserved=5), {"slack": None, "held": 5, "foreign": None}),
        (Figures(allocated=5), {"slack": None, "held": None}),
        (Figures(allocated=5, reserved=3), {"slack": 0}),
        (Figures(allowed=10, reserved=4), {"room": 6}),
        (Figures(allowed=10, reserved=14), {"room": 0}),
        (Figures(total=100, free=4, allowed=50, reserved=20), {"room": 4}),
        (Figures(total=100, free=0, reserved=120), {"foreign": 0}),
        (replace(FULL, own=900), {"held": 900, "foreign": 100}),
        # A process is this one if there is no room for it beside those that are named: 1 % of the device is rounding.
        (replace(FULL, processes={7: 900}), {"own_pids": (7,), "held": 900, "foreign": 100}),
        (replace(FULL, processes={7: 900}, own=850), {"own_pids": (), "held": 850}),
        (replace(FULL, processes={7: 210}), {"own_pids": (), "held": 800}),
        (replace(FULL, processes={7: 792, 8: 400}), {"own_pids": ()}),
        (replace(FULL, processes={7: 793, 8: 400}), {"own_pids": (7,), "held": 793}),
        (replace(FULL, processes={7: 850, 8: 900}), {"own_pids": (7, 8), "held": 900}),
        (replace(FULL, reserved=500, processes={7: 510}), {"own_pids": ()}),
        (replace(FULL, reserved=501, processes={7: 510}), {"own_pids": (7,)}),
        (Figures(total=1000, reserved=800, processes={7: 900}), {"own_pids": ()}),
        (Figures(total=1000, free=900, reserved=101, processes={7: 100}), {"own_pids": (7,)}),
    ],
)
def test_what_is_known_of_a_device_by_its_figures(figures, wanted):
    assert {name: getattr(figures, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("figures", "names"),
    [
        (Figures(tried=1 << 56), {"size"}),
        (Figures(tried=(1 << 56) - 1), set()),
        (Figures(total=1000, free=150, tried=100), {"room"}),
        (Figures(total=1000, free=149, tried=100), set()),
        (Figures(total=1000, free=150), set()),
        (Figures(total=1000, free=900, allowed=400, reserved=280, tried=100), {"room"}),
        (Figures(total=1000, free=900, allowed=400, reserved=281, tried=100), set()),
        (Figures(total=1000, free=1010), set()),
        (Figures(total=1000, free=1011), {"free"}),
        (Figures(total=1000, free=0, reserved=1010), set()),
        (Figures(total=1000, free=0, reserved=1011), {"held by this process"}),
        (Figures(free=5, reserved=9), set()),
    ],
)
def test_figures_that_contradict_each_other_or_a_shortage_are_named(figures, names):
    assert set(figures.contradictions) == names


SIZES = st.floats(0, 100).map(lambda size: round(size, 2))


@pytest.mark.slow
@given(tried=SIZES, total=SIZES, free=SIZES, allocated=SIZES, unused=SIZES, pid=SIZES, own=st.none() | SIZES)
def test_no_claim_survives_figures_that_contradict_it(tried, total, free, allocated, unused, pid, own):
    found = look(
        says(tried=tried, total=total, free=free, allocated=allocated, unused=unused, processes=[(7, pid)], own=own)
    )
    fits = tried and free <= total and free - tried > 0.05 * total + 0.01
    impossible = total and (free > 1.02 * total or allocated + unused > 1.02 * total)
    if fits or impossible:
        assert found.confidence == "likely"
    remedies = list_remedies(found)
    if fits:
        assert [one.title for one in remedies] == ["find what refused the request"]
    if pid + allocated + unused > total * 1.02:  # with a stranger of that size the device would hold more than it has
        assert own is not None or free > total or not any("Process 7 holds" in one.reason for one in remedies)
