"""YAML reads as YAML 1.2 does, keeps lines and texts, and comes back as it was."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.config._yaml import Plain, from_text, read_document, read_plain, read_value, write_document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.5e1", -5.0),
        ("+3", 3),
        ("-0", 0),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("True", True),
        ("FALSE", False),
        ("Null", None),
        ("~", None),
        ("", None),
    ],
)
def test_a_plain_scalar_is_what_it_looks_like(text: str, value: object) -> None:
    read = read_plain(text)
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    "text",
    ["on", "off", "yes", "no", "y", "12:30:00", "2024-01-31", "1_000", "0b11", "1e", ".", "-", "nan", "inf", "tRue",
     "9" * 5000, "\N{ARABIC-INDIC DIGIT ONE}"],
)  # fmt: skip
def test_what_only_yaml_1_1_or_python_reads_is_text(text: str) -> None:
    assert read_plain(text) == text
    assert from_text(text) == text


def test_a_number_that_is_not_one_is_read() -> None:
    assert math.isnan(Plain(".nan").value)  # type: ignore[arg-type]


def test_quotes_and_blocks_make_text() -> None:
    content = read_document("a: '3'\nb: \"true\"\nc: |\n  3\nd: >\n  3\n").content
    assert content == {"a": "3", "b": "true", "c": "3\n", "d": "3\n"}


def test_an_aliased_bomb_is_refused_before_it_grows() -> None:
    bomb = "a: &a [x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(30))
    with pytest.raises(ValueError, match="anchors"):
        read_document(bomb)


def test_a_text_of_an_override_is_never_a_mapping_by_accident() -> None:
    assert read_value("s3://a: b").content == "s3://a: b"
    assert read_value("  7 ").content == Plain("7")
    assert read_value("- x").content == "- x"


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=200)
LEAF = TEXT | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none()
KEY = TEXT.filter(lambda key: key and "." not in key)
TREE = st.recursive(LEAF, lambda inner: st.lists(inner) | st.dictionaries(KEY, inner), max_leaves=10)


def _value(content: object) -> object:
    if isinstance(content, Plain):
        return content.value
    if isinstance(content, list):
        return [_value(item) for item in content]
    return {key: _value(item) for key, item in content.items()} if isinstance(content, dict) else content


@given(tree=st.dictionaries(KEY, TREE, max_size=5), comment=TEXT)
def test_a_written_tree_reads_back_the_same(tree: dict[str, object], comment: str) -> None:
    text = write_document(tree, dict.fromkeys(tree, comment), "A header.\n\nOf three lines.")
    document = read_document(text)
    assert _value(document.content) == tree
    assert document.faults == []
