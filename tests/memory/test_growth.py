"""What grows is told, and of what a job died: rows of courses of memory, a line each second step."""

import numpy as np
import pytest

from memfit.memory import Level, Levels, explain_death, find_growth
from memfit.units import MIB

STEPS = 1000
at = np.arange(0, STEPS, 2.0)
GROWS, CACHE = 2.0 * at, 1000 * (1 - np.exp(-at / 150))
BUFFER, TEETH = np.minimum(8 * at, 1000), (5 * at) % 1000
LUMPS = np.floor(at / 20) * 40
CASES = [
    # course, epochs, until which step, limit above the base in MiB: what is told, and what it died of
    ("grows", GROWS, 1, 700, 1800, "sure", "growth"),
    ("grows in lumps", LUMPS, 1, 700, 1800, "sure", "growth"),
    ("grows under a cache", GROWS + CACHE, 1, 700, 2800, "early", "size"),
    ("grows, in a first epoch of several", GROWS, 2, 400, 900, "early", "open"),
    ("grows, and the first epoch ends before the limit", GROWS, 4, 200, 1000, "", "open"),
    ("grows past the first epoch", GROWS, 4, 700, 1800, "sure", "growth"),
    ("grows, and ends in time", GROWS / 4, 1, 700, 1800, "", "growth"),
    ("a cache that levels off", CACHE, 1, 400, 1150, "", "size"),
    ("a cache of the first epoch", np.minimum(4 * at, 1000), 4, 240, 1300, "", "open"),
    ("a cache, in the second epoch", np.minimum(4 * at, 1000), 4, 300, 1300, "", "size"),
    ("a buffer that fills", BUFFER, 1, 120, 1100, "early", "open"),
    ("a buffer that is full", BUFFER, 1, 600, 1100, "", "size"),
    ("the second tooth of a collector", TEETH, 1, 395, 1150, "early", "growth"),
    ("nothing", 0 * at, 1, 700, 1800, "", "size"),
]


def levels_of(course, until, **sizes):
    def one(number, low):
        step, low = float(at[number]), int((500 + low) * MIB) + 4096 * (number % 7)
        held = {name: int((500 + size) * MIB) for name, size in sizes.items()}
        return Level(1e9 + step / 10, step, low, low + 90 * MIB, **held)

    return [one(number, low) for number, low in enumerate(course) if at[number] <= until]


@pytest.mark.parametrize(("course", "epochs", "until", "limit", "told", "death"), [case[1:] for case in CASES],
                         ids=[case[0] for case in CASES])  # fmt: skip
def test_what_is_told_of_a_course_and_what_it_died_of(course, epochs, until, limit, told, death):
    levels, known = levels_of(course, until), {"epoch_steps": STEPS // epochs, "steps": STEPS}
    found = find_growth(levels, (500 + limit) * MIB, **known)
    assert ("" if found is None else "sure" if found.is_sure else "early") == told
    at_limit = max(one.peak for one in levels) + MIB
    assert explain_death(levels, at_limit, **known) == death


@pytest.mark.parametrize(
    ("rise", "told", "death"), [(np.minimum(4 * at, 1000), "", "open"), (3 * at, "sure", "growth")]
)
def test_after_a_resume_an_epoch_of_the_new_process_must_pass(rise, told, death):
    levels = [one._replace(step=one.step + 500) for one in levels_of(rise, 240 if death == "open" else 450)]
    found = find_growth(levels, 2300 * MIB, epoch_steps=250, steps=STEPS + 500)
    assert ("" if found is None else "sure" if found.is_sure else "early") == told
    assert explain_death(levels, max(one.peak for one in levels), epoch_steps=250, steps=STEPS + 500) == death
    again = [*levels[20:], *levels[:21]]  # ranks that begin again make steps once more
    assert (find_growth(again, 2300 * MIB, epoch_steps=250, steps=STEPS + 500) is None) == (found is None)


def test_growth_says_by_how_much_when_it_meets_its_limit_and_that_more_memory_is_no_cure():
    found = find_growth(levels_of(GROWS, 700), 2300 * MIB, epoch_steps=STEPS, steps=STEPS)
    assert found.slope == pytest.approx(2 * MIB, rel=0.01) and found.least <= found.slope <= found.most
    assert found.at == pytest.approx((1800 - 90) / 2, rel=0.01)
    assert found.at_time == pytest.approx(1e9 + found.at / 10, abs=1)
    assert found.text.startswith("it grows by 2.0 MiB a step (2.0 MiB to 2.0 MiB); at this rate it meets its limit of")
    assert found.text.endswith("More memory puts that off, it does not mend it.")
    assert found.to_dict()["is_sure"]


@pytest.mark.parametrize(("name", "most", "told", "death"), [
    ("resident", 1500, None, "copies"), ("resident", 2500, "copies", "copies"),
    ("reserved", 1500, None, "reserved"), ("reserved", 2500, "reserved", "reserved"),
])  # fmt: skip
def test_what_must_end_is_told_by_its_name_and_only_if_it_does_not_fit(name, most, told, death):
    levels = levels_of(GROWS, 700, **{"resident": 2500, "reserved": 2500, name: most})
    for number, one in enumerate(levels) if name == "reserved" else ():
        levels[number] = one._replace(resident=one.low)
    found = find_growth(levels, 2300 * MIB, steps=STEPS)
    assert (found and found.kind) == told and not (found and found.is_sure)
    assert explain_death(levels, max(one.peak for one in levels), steps=STEPS) == death


@pytest.mark.parametrize("num", [100, 128, 129, 1000])
def test_a_series_of_levels_is_bounded_each_as_long_as_the_others_and_keeps_lows_and_peaks(num):
    levels = Levels(128)
    for number in range(num):
        levels.add(Level(number, number, 5 if number == 42 else 10 + number, 99 if number == 7 else 20))
    assert num / 16 <= len(levels.lines) <= 128
    assert min(levels.lines, key=lambda one: one.low)[1:3] == (42, 5)
    assert max(one.peak for one in levels.lines) == 99
    steps = [one.step for one in levels.lines]
    assert max(np.diff(steps)) <= 2 * num / 64
