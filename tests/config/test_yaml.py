"""Unquoted scalars read as YAML 1.2 reads them, whatever YAML 1.1 or Python make of them."""

import math

import pytest
from pydantic import Field

from memfit.config import Settings, read_plain, resolve
from memfit.errors import ConfigError


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
    ["on", "off", "010", "01.5", "yes", "no", "y", "12:30:00", "2024-01-31", "1_000", "0b11", "1e", ".", "-", "nan", "inf", "tRue",
     "9" * 5000, "\N{ARABIC-INDIC DIGIT ONE}"],
)  # fmt: skip
def test_what_only_yaml_1_1_or_python_reads_is_text(text: str) -> None:
    assert read_plain(text) == text


def test_a_number_that_is_not_one_is_read() -> None:
    assert math.isnan(read_plain(".nan"))  # type: ignore[arg-type]


class Free(Settings):
    text: str = ""
    params: dict[str, object] = Field(default_factory=dict)


def test_quotes_and_blocks_make_text(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "c.yaml"
    file.write_text("params:\n  a: '3'\n  b: \"true\"\n  c: |\n    3\n  d: >\n    3\n")
    assert resolve(Free, file=file, env={}).value.params == {"a": "3", "b": "true", "c": "3\n", "d": "3\n"}


def test_an_aliased_bomb_is_refused_before_it_grows(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "c.yaml"
    file.write_text("a: &a [x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(30)))
    with pytest.raises(ConfigError, match="anchors"):
        resolve(Free, file=file, env={})


@pytest.mark.parametrize(("text", "value"), [("s3://a: b", "s3://a: b"), ("  7 ", "7"), ("- x", "- x")])
def test_the_text_of_an_override_is_never_a_mapping_by_accident(text: str, value: str) -> None:
    assert resolve(Free, env={}, overrides=[f"text={text}"]).value.text == value
