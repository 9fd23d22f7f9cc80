"""Footprints: merged, written and read back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import DamagedError, UsageError
from memfit.memory import Footprint, PhasePeak

SIZES = st.integers(0, 1 << 45)
NAMES = st.text(min_size=1, max_size=8)
BY_NAME = st.dictionaries(NAMES, SIZES, max_size=3)
PEAKS = st.builds(PhasePeak, SIZES, SIZES, SIZES, BY_NAME, st.floats(0, 1e6))
FOOTPRINTS = st.builds(Footprint, SIZES, SIZES, BY_NAME, BY_NAME, st.dictionaries(NAMES, PEAKS, max_size=3))


@pytest.mark.slow
@given(FOOTPRINTS)
def test_a_footprint_survives_json(footprint):
    assert Footprint.from_dict(json.loads(json.dumps(footprint.to_dict()))) == footprint


@given(FOOTPRINTS, FOOTPRINTS, FOOTPRINTS)
def test_neither_repeats_nor_order_nor_grouping_of_merges_matter(a, b, c):
    assert a.merge(a) == a and a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))


@given(FOOTPRINTS, FOOTPRINTS)
def test_a_merge_is_nowhere_below_either(a, b):
    merged = a.merge(b)
    for one in (a, b):
        assert merged.private_bytes >= one.private_bytes and merged.shared_bytes >= one.shared_bytes
        assert all(merged.device_bytes[name] >= size for name, size in one.device_bytes.items())
        assert all(merged.parts[name] >= size for name, size in one.parts.items())
        assert all(merged.phases[name].private_bytes >= peak.private_bytes for name, peak in one.phases.items())
        assert all(merged.phases[name].seconds >= peak.seconds for name, peak in one.phases.items())


def test_phases_of_a_merge_are_in_order_of_appearance():
    a = Footprint(3, phases={"load": PhasePeak(1), "train": PhasePeak(3)})
    b = Footprint(4, phases={"train": PhasePeak(2), "validate": PhasePeak(4)})
    assert list(a.merge(b).phases) == ["load", "train", "validate"]
    assert (a.merge(b).peak_phase, Footprint(1).peak_phase) == ("validate", None)


def test_a_measured_footprint_stands_in_for_a_declared_one_even_where_it_is_smaller():
    declared, measured = Footprint.declared("8GiB"), Footprint(100)
    assert declared.merge(measured) is measured and measured.merge(declared) is measured
    assert declared.merge(Footprint.declared("9GiB")).method == "declared"


@pytest.mark.parametrize("sizes", [{"private_bytes": -1}, {"private_bytes": 1, "shared_bytes": -1}])
def test_a_negative_size_is_refused(sizes):
    with pytest.raises(UsageError, match="-1"):
        Footprint(**sizes)


def test_what_another_version_wrote_is_not_read_as_something_else():
    with pytest.raises(DamagedError, match="colour"):
        Footprint.from_dict({"private_bytes": 1, "colour": "red"})
