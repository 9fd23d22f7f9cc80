"""Parameters and placeholders: which commands they make, and what is refused before any starts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import ConfigError, UsageError
from memfit.pipeline import chosen_units, expand, fill


def values(text):
    return [combination["a"] for combination in expand(["x", "{a}"], [f"a={text}"])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1..5", ["1", "2", "3", "4", "5"]),
        ("1..9..2", ["1", "3", "5", "7", "9"]),
        ("1..8..3", ["1", "4", "7"]),
        ("-2..1", ["-2", "-1", "0", "1"]),
        ("08..10", ["08", "09", "10"]),
        ("3..3", ["3"]),
        ("1e-3,1e-4", ["1e-3", "1e-4"]),
        ("1..3,7, 9", ["1", "2", "3", "7", "9"]),
        ('"a,b",c', ["a,b", "c"]),
        ('"1..3"', ["1..3"]),
        ('"1-5"', ["1-5"]),
        ("2020-01", ["2020-01"]),
        ("2024-01-31", ["2024-01-31"]),
        ("a-5", ["a-5"]),
        ('"say ""hi"""', ['say "hi"']),
        ('""', [""]),
        ("a=b", ["a=b"]),
        ("{b}", ["{b}"]),
        ("x..y", ["x..y"]),
        ("größer", ["größer"]),
    ],
)
def test_a_parameter_has_these_values(text, expected):
    assert values(text) == expected


def test_all_combinations_come_in_order_the_last_parameter_fastest():
    found = expand(["x", "{size}{fold}{lr}"], ['size="1,5", 2', "fold=1..2", "lr=a,b"])
    assert [tuple(combination.values()) for combination in found] == [*itertools.product(("1,5", "2"), "12", "ab")]
    assert list(found[0]) == ["size", "fold", "lr"]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1, unique=True))
def test_any_value_can_be_given_in_quotes(texts):
    quoted = ",".join('"' + text.replace('"', '""') + '"' for text in texts)
    assert values(quoted) == texts


def test_only_the_parameters_own_placeholders_are_replaced():
    command = ["{p}", "--a={a}", '{"a": {a}, "b": {"c": "{c}"}}', "${HOME}", "{}", "{a", "a}", "{{a}}", "{a }"]
    filled = fill(command, {"a": "{p}", "p": "prog"})
    assert filled == (
        "prog", "--a={p}", '{"a": {p}, "b": {"c": "{c}"}}', "${HOME}", "{}", "{a", "a}", "{{p}}", "{a }",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "params", "what", "remedy"),
    [
        ("{a}", ["a"], "is not name=values", "--param fold=1..5"),
        ("{a}", ["a=1-5"], "is no range", """for the text: --param 'a="1-5"'"""),
        ("{a}", ["a=2,1...5"], "is no range", "write a=1..5;"),
        ("{a}", ["a=1e-5..1e-3"], "is no range", "list other values: a=0.1,0.2;"),
        ("{a}", ["é=1"], "cannot name a parameter", "rename it"),
        ("{a}", ["1a=2"], "'1a' cannot name a parameter", "rename it"),
        ("{naïve}", ["naïve=1,2"], "'naïve' cannot name a parameter", "rename it"),
        ("{a}", ["a="], "has an empty value", 'a=""'),
        ("{a}", ["a=1,,2"], "has an empty value", 'a=""'),
        ("{a}", ["a=1,"], "has an empty value", 'a=""'),
        ("{a}", ['a="1'], "a quote at character 1", "as in CSV"),
        ("{a}", ['a=1,"b"c'], "a quote at character 3", "as in CSV"),
        ("{a}", ["a=5..1"], "is an empty range", "upward"),
        ("{a}", ["a=1..5..0"], "is an empty range", "upward"),
        ("{a}", ["a=1,2,1"], "the value a=1 is given twice", "second"),
        ("{a}", ["a=1", "a=2"], "the parameter a is given twice", "one place"),
        ("{a}", ["a=1..100001"], "100,001 commands are too many", "fewer"),
        ("{a}", ["a=1..999999999999999999"], "too many", "fewer"),
        ("{a}{b}", ["a=1..1000", "b=1..1000"], "1000 x 1000 = 1,000,000 commands are too many", "fewer"),
        ("train", ["a=1"], "the parameter a is not used", "{a}"),
        ("{fol} {fold}", ["fold=1"], "no parameter is named {fol}", "did you mean {fold}?"),
        ("{FOLD}", ["fold=1"], "no parameter is named {FOLD}", "did you mean {fold}?"),
    ],
)
def test_what_is_wrong_with_parameters_is_told_in_three_parts(command, params, what, remedy):
    with pytest.raises(UsageError) as caught:
        expand(["x", *command.split()], params)
    assert what in caught.value.what and remedy in caught.value.remedy and caught.value.rule


def test_without_parameters_there_is_one_command_as_it_stands():
    assert expand(["echo", "{x}"], []) == [{}]
    assert fill(["echo", "{x}"], {}) == ("echo", "{x}")
    several = fill(["join", "{fold}", "--out={dir}"], {"fold": ["a", "b c"], "dir": "d"})
    assert several == ("join", "a", "b c", "--out=d")


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("all", [0, 1, 2]),
        ("2", [1]),
        ("2-3", [1, 2]),
        ("3,1", [0, 2]),
        ("1-2, 2", [0, 1]),
        ("big", [2]),
        ("1 - 1", [0]),
    ],
)
def test_units_are_chosen_by_number_range_or_name(text, places):
    assert chosen_units(text, ["1", "2", "big"]) == places


@pytest.mark.parametrize(
    ("text", "is_well_formed"),
    [
        ("4", True),
        ("a", True),
        ("2-9", True),
        ("0", False),
        ("3-2", False),
        ("1-", True),
        ("", False),
        ("1,,2", False),
    ],
)
def test_a_choice_that_names_no_unit_is_refused_and_before_the_units_are_known_by_its_form(text, is_well_formed):
    with pytest.raises(ConfigError, match="names no unit"):
        chosen_units(text, ["1", "2", "big"])
    if is_well_formed:
        chosen_units(text, None)
    else:
        with pytest.raises(ConfigError, match="names no unit"):
            chosen_units(text, None)
