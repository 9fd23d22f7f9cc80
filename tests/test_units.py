"""Sizes and durations, read and written."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import ConfigError
from memfit.units import GIB, KIB, MIB, TIB, format_bytes, format_duration, parse_bytes

STEP = {"B": 1, "KiB": KIB / 10, "MiB": MIB / 10, "GiB": GIB / 100, "TiB": TIB / 100}


@given(st.integers(0, 1 << 60))
def test_a_bare_number_is_that_many_bytes(count):
    assert parse_bytes(count) == parse_bytes(str(count)) == parse_bytes(f" {count} B ") == count


@given(st.integers(0, 10**6), st.sampled_from(["KiB", "kib", "K", "MiB", "m", "GiB", "G", "TiB", "t"]))
def test_binary_units_are_powers_of_1024(number, unit):
    assert parse_bytes(f"{number}{unit}") == number << (10 * ("kmgt".index(unit[0].lower()) + 1))


@given(st.integers(0, 10**6), st.sampled_from(["kB", "MB", "GB", "TB"]))
def test_decimal_units_are_powers_of_1000(number, unit):
    assert parse_bytes(f"{number} {unit}") == number * 1000 ** ("kmgt".index(unit[0].lower()) + 1)


@given(st.integers(0, 1 << 60))
def test_what_is_shown_reads_back_as_the_same_up_to_what_was_rounded_off(count):
    text = format_bytes(count)
    number, unit = text.split()
    # A size is shown in the largest unit of which there is one, so four to six digits stand before the unit.
    assert float(number) < 1024 or unit == "TiB"
    assert abs(parse_bytes(text) - count) <= STEP[unit] / 2 + 1
    assert format_bytes(-count) == (f"-{text}" if count else text)


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_a_larger_size_is_never_shown_as_a_smaller_one(a, b):
    low, high = sorted((a, b))
    assert parse_bytes(format_bytes(low)) <= parse_bytes(format_bytes(high))


@given(st.decimals(0, 10**6, places=3))
def test_a_fraction_of_a_unit_is_exact_to_the_byte(number):
    assert parse_bytes(f"{number:f}GiB") == int(Fraction(number) * GIB)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (MIB - 1, "1.0 MiB"), (GIB - 1, "1.00 GiB"),
     (1023 * MIB, "1023.0 MiB"), (TIB, "1.00 TiB"), (2000 * TIB, "2000.00 TiB"), (-1536, "-1.5 KiB")],
)  # fmt: skip
def test_a_size_is_shown_in_its_unit(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize("text", ["", "lots", "-1", "1.2.3GiB", "1e9", "8 PiB", "GiB", "0x10", "1,5G", "nan"])
def test_what_is_no_size_is_refused_by_its_name(text):
    with pytest.raises(ConfigError, match="is not a size") as caught:
        parse_bytes(text)
    assert f"'{text}'" in caught.value.what


@pytest.mark.parametrize(
    ("seconds", "text", "short"),
    [(0, "0.0s", "0.0s"), (59.94, "59.9s", "59.9s"), (59.97, "1m 00s", "1m 00s"), (3512, "58m 32s", "58m 32s"),
     (3599.6, "1h 00m 00s", "1h 00m"), (14397, "3h 59m 57s", "3h 59m"), (360000, "100h 00m 00s", "100h 00m")],
)  # fmt: skip
def test_a_duration_is_shown_in_hours_minutes_and_seconds(seconds, text, short):
    assert (format_duration(seconds), format_duration(seconds, short=True)) == (text, short)


@given(st.integers(60, 10**7))
def test_a_duration_of_whole_seconds_loses_none(seconds):
    parts = {word[-1]: int(word[:-1]) for word in format_duration(seconds).split()}
    assert parts.get("h", 0) * 3600 + parts["m"] * 60 + parts["s"] == seconds
