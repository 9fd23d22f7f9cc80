"""Facts: sizes in all units, words that white space may divide, and lines that prove them."""

import pytest

from memfit.diagnosis._facts import Pattern, find_facts, to_bytes, words
from memfit.diagnosis._text import Stream, clean


@pytest.mark.parametrize(
    ("number", "unit", "size"),
    [("512", "bytes", 512), ("1", "KiB", 1024), ("2.5", "GB", 5 << 29), ("1,024", "MiB", 1 << 30), ("9.9.9", "GiB", 0)],
)
def test_sizes_count_in_1024s(number, unit, size):
    assert to_bytes(number, unit) == size


def stream(*texts):
    return Stream([line for number, text in enumerate(texts, 1) for line in clean(text, "log", number)])


def test_a_fact_has_the_lines_that_its_words_stand_in():
    found = list(
        find_facts(stream("a", "Tried to al", "locate 5 apples", "b"), (Pattern("hang", words("to allocate 5")),))
    )
    assert [line.number for line in found[0].lines] == [2, 3]
    assert (found[0].number, found[0].file, found[0].place) == (2, "log", 1)


def test_a_pattern_may_refuse_its_match():
    pattern = Pattern(
        "hang", words(r"count (\d)"), lambda match, after: {"count": match[1]} if match[1] != "0" else None
    )
    assert [fact.values for fact in find_facts(stream("count 0", "count 3"), (pattern,))] == [{"count": "3"}]


def test_in_a_long_stream_only_what_is_near_to_telling_words_is_searched():
    texts = ["nothing here"] * 600
    texts[300] = "an error came"
    texts[305] = "magic word"
    texts[500] = "magic word"
    long = stream(*texts)
    assert [fact.number for fact in find_facts(long, (Pattern("hang", words("magic word")),))] == [306]
    assert len(long.lines) == 600
