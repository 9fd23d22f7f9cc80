"""From a trace's peaks to four figures: each bound is above its value, and each figure holds the one before."""

import pytest

from memfit.estimation import ABOVE, METRICS, PARTS, Event, Trace, bound_device, find_gpu, find_peaks, replay

MIB = 1 << 20
TRACE = Trace(
    [
        Event(1, 100 * MIB, "build"),
        Event(2, 60 * MIB, "forward"),
        Event(3, 30 * MIB, "forward"),
        Event(3, 0, "forward"),
        Event(4, 100 * MIB, "backward"),
        Event(2, 0, "backward"),
        Event(5, 200 * MIB, "step"),
    ],
    {1: "weights", 2: "activations", 3: "temporaries", 4: "gradients", 5: "optimizer"},
)


def bounded(gpu="A100-80GB", world_size=1):
    return bound_device(find_peaks(TRACE), replay(TRACE), find_gpu(gpu), TRACE, world_size=world_size)


@pytest.mark.parametrize("gpu", ["T4", "A100-80GB", "H200", "24GiB"])
def test_every_bound_is_above_its_value_and_every_figure_holds_the_one_before(gpu):
    figures, by_phase, parts = bounded(gpu)
    sizes = [figures[metric] for metric in METRICS]
    assert all(one.upper > one.value for one in (*sizes, *by_phase.values()))
    assert all(one.upper >= one.value for one in parts.values())
    assert [one.value for one in sizes] == sorted(one.value for one in sizes)
    assert [one.upper for one in sizes] == sorted(one.upper for one in sizes)


def test_the_highest_phase_is_the_allocated_figure_and_its_parts_are_shown():
    figures, by_phase, parts = bounded()
    assert figures["allocated_bytes"].value == by_phase["step"].value == 400 * MIB
    assert set(parts) == {"weights", "gradients", "optimizer"}


@pytest.mark.proves("C-23")
def test_what_lies_beside_the_allocator_is_the_context_and_the_communicators():
    one, _, _ = bounded()
    eight, _, _ = bounded(world_size=8)
    gpu = find_gpu("A100-80GB")
    assert one["device_bytes"].value - one["reserved_bytes"].value == gpu.context_bytes.value
    assert eight["device_bytes"].value - one["device_bytes"].value == gpu.nccl_bytes(8).value


def test_every_part_has_a_bound_of_its_own():
    assert set(ABOVE) == set(PARTS)
    assert all(share >= 0 for share in ABOVE.values())
