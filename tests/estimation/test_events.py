"""Births and deaths of blocks, and the highest moment of each phase."""

from hypothesis import given
from hypothesis import strategies as st

from memfit.estimation import PARTS, Event, Trace, find_peaks


def test_what_dies_and_is_born_again_counts_once():
    events = [Event(1, 8, "forward"), Event(1, 0, "forward"), Event(2, 6, "forward"), Event(3, 1, "backward")]
    peaks = find_peaks(Trace(events, {1: "temporaries", 2: "activations", 3: "gradients"}))
    assert (peaks["forward"].num_bytes, peaks["forward"].parts) == (8, {"temporaries": 8})
    assert (peaks["backward"].num_bytes, peaks["backward"].parts) == (7, {"activations": 6, "gradients": 1})


def test_a_phase_in_which_all_only_dies_has_what_was_left_as_its_peak():
    events = [Event(1, 8, "forward"), Event(2, 4, "forward"), Event(1, 0, "step"), Event(2, 0, "step")]
    assert find_peaks(Trace(events, {1: "inputs", 2: "inputs"}))["step"].num_bytes == 4


@given(st.lists(st.tuples(st.integers(1, 99), st.sampled_from(PARTS), st.integers(0, 6)), max_size=30))
def test_the_parts_of_a_peak_add_up_to_it_and_none_is_higher_than_all_at_once(blocks):
    events, deaths = [], {}
    for number, (size, _, life) in enumerate(blocks):
        phase = ("build", "forward", "backward", "step")[min(3, number // 6)]
        events.append(Event(number, size, phase))
        deaths.setdefault(number + life, []).append(number)
        events += [Event(dead, 0, phase) for dead in deaths.pop(number, [])]
    trace = Trace(events, {number: part for number, (_, part, _) in enumerate(blocks)})
    for peak in find_peaks(trace).values():
        assert sum(peak.parts.values()) == peak.num_bytes <= sum(size for size, _, _ in blocks)
