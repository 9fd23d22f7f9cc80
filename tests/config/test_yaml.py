"""A settings file reads as YAML 1.2, whatever YAML 1.1 or Python make of a value."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field
from ruamel.yaml import YAML

from memfit.config import Settings, read_file, read_plain, resolve, write_yaml
from memfit.errors import ConfigError


def test_a_number_that_is_not_one_is_read() -> None:
    assert math.isnan(read_plain(".nan"))  # type: ignore[arg-type]


class Free(Settings):
    text: str = ""
    params: dict[str, object] = Field(default_factory=dict)


#: What a file holds below ``a``.
MEANINGS: dict[str, object] = {
    **{f"a: {word}": word for word in ("yes", "no", "on", "off", "Y", "tRue", "nan", "inf", "nUll", "=", "<<")},
    **{f"a: {word}": word for word in ("1_000", "010", "09", "-010", "01.5", "0b11", "0X10", "+0x10", "1e", "1.2.3")},
    **{f"a: {word}": word for word in ("12:30:00", "190:20:30.15", "2024-01-31", "2024-01-31T12:30:00Z")},
    **{
        f"a: {word}": word for word in ("http://x:1", "x#y", "?x", "1 2", "9" * 5000, ".", "\N{ARABIC-INDIC DIGIT ONE}")
    },
    **dict.fromkeys(("a: true", "a: True", "a: TRUE"), True),
    **dict.fromkeys(("a:", "a: ~", "a: null", "a: Null", "a: NULL", "a: # none"), None),
    **dict.fromkeys(("a: 1e-4", "a: 1E-4", "a: 1.e-4", "a: 0.1e-3"), 0.0001),
    **dict.fromkeys((f"a: {number}" for number in ("0o20", "0x10", "16", "+16")), 16),
    **dict.fromkeys(("a: .inf", "a: .Inf", "a: +.INF", "a: 1e999"), math.inf),
    "a: -.Inf": -math.inf,
    "a: -.5e1": -5.0,
    "a: 0.": 0.0,
    "a: -0": 0,
    "a: FALSE": False,
    "a: '010'": "010",
    'a: "true"': "true",
    "a: 'it''s'": "it's",
    'a: "\\u00e9\\x41\\n"': "éA\n",
    "a: |\n  3\n  4\n": "3\n4\n",
    "a: |-\n  3\n": "3",
    "a: |+\n  3\n\n": "3\n\n",
    "a: >\n  3\n  4\n\n  5\n": "3 4\n5\n",
    "a: 3\n  4\n": "3 4",
    'a: "3\n  4"': "3 4",
    "a: 'x\ty'": "x\ty",
    "a: [1, 010, 2,]": [1, "010", 2],
    "a:\n- 1\n-\n- b: 1\n  c: 2\n": [1, None, {"b": 1, "c": 2}],
    "a: {b, c: }": {"b": None, "c": None},
    "a: {1: x, true: y, ~: z, 1.5: w}": {"1": "x", "true": "y", "~": "z", "1.5": "w"},
    "a: {'<<': 1}": {"<<": 1},
    "a:\r\n  b: 1\r\n": {"b": 1},
    "? a\n: 1": 1,
    "\ufeffa: 1": 1,
    "a: 1\n...\n": 1,
    "--- {a: 1}": 1,
    "%YAML 1.1\n---\na: yes\n": "yes",
    "%YAML 1.1\n---\na: 010\n": "010",
    "%YAML 1.2\n---\na: 1_0\n": "1_0",
    "b: &b 1\na: *b": 1,
    "b: &b {x: [1]}\na: *b": {"x": [1]},
    "b: &b 1\nc: &b 2\na: *b": 2,
    "a: !!str 010": "010",
    "a: !!str 3": "3",
}


@pytest.mark.parametrize("text", MEANINGS)
def test_a_text_has_one_meaning(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(text.encode())
    value, plain = read_file(file)["a"], text.removeprefix("a:").strip()
    assert (type(value), value) == (type(MEANINGS[text]), MEANINGS[text])
    if re.fullmatch(r"a: [\w.+:-]*", text):
        assert (type(read_plain(plain)), read_plain(plain)) == (type(value), value)


@pytest.mark.parametrize("text", ["", "\n", "# c\n", "---\n", "---\n...\n", "{}", "null", "~"])
def test_a_file_without_a_value_has_no_settings(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert read_file(file) == {}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\ta: 1", 1),
        ("a:\n\tb: 1", 2),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: @x", 1),
        ("a: \x01", 1),
        ("a: {b: 1", 1),
        ("b: {x: 1}\na: *b", 2),
        ("a: 1\n!x b: 3", 2),
        ("a: 1\nb: !!int 3", 2),
        ("a: 1\nb: !!str [x]", 2),
        ("a: 1\nb: !!set {x, y}", 2),
        ("a: 1\nb: !!python/object/apply:os.system [x]", 2),
        ("b: &b {x: 1}\na: {<<: *b}", 2),
        ("a:\n  <<: {b: 1}", 2),
        ("a: &a\n  b: *a", 1),
        ("a: *b\nb: &b 1", 1),
        ("%YAML 1.3\n---\na: 1", 1),
    ],
)
def test_a_text_that_is_no_settings_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"c\.yaml:{line}\b.* cannot be read"):
        read_file(file)


def test_an_aliased_bomb_is_refused_before_it_grows(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("b0: &b0 [x]\n" + "".join(f"b{i}: &b{i} [*b{i - 1}, *b{i - 1}]\n" for i in range(1, 30)))
    with pytest.raises(ConfigError, match="more than 100 aliases"):
        read_file(file)


@pytest.mark.parametrize(("count", "is_read"), [(100, True), (101, False)])
def test_a_file_may_have_a_hundred_aliases(tmp_path: Path, count: int, is_read: bool) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("a: &a x\nb: [" + "*a, " * count + "]\n")
    if is_read:
        assert read_file(file)["b"] == ["x"] * count
    else:
        with pytest.raises(ConfigError, match=r"c\.yaml:1:4 cannot be read: it has more than 100 aliases"):
            read_file(file)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("a: 1\nb: {c: 1, c: 2}\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:2:11 cannot be read: b\.c is set twice, first in line 2"):
        read_file(file)


def test_what_a_file_writes_reads_back_in_yaml_1_1_too() -> None:
    texts = ["no", "y", "010", "1e-05", "12:30", "2024-01-31", "0o7", "~", "", "=", " a", "a: b", "\x85", "é", "it's"]
    values = {"texts": texts, "numbers": [1e-05, 1e17, 0.1, math.inf, 3], "long key " * 20: "long text " * 20}
    written = write_yaml(values)
    for version in ((1, 1), (1, 2)):
        reader = YAML(typ="safe", pure=True)
        reader.version = version
        assert reader.load(written) == values
    assert "1.0e-05" in written


def test_a_process_that_reads_no_file_does_not_load_the_reader() -> None:
    code = "import sys, memfit.config, memfit.pipeline, memfit.cli; print('ruamel.yaml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(("text", "value"), [("s3://a: b", "s3://a: b"), ("  7 ", "7"), ("- x", "- x")])
def test_the_text_of_an_override_is_never_a_mapping_by_accident(text: str, value: str) -> None:
    assert resolve(Free, env={}, overrides=[f"text={text}"]).value.text == value
