"""The tools that look at the tests: where their seconds go, which changes of the library they notice."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]


def _tool(name, folder="tools"):
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_seconds_are_summed_by_file_or_told_by_test(tmp_path):
    report, other = tmp_path / "report.xml", tmp_path / "other.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="x[1]" time="0.5"/>'
        '<testcase classname="tests.a" name="y" time="1.5"/><testcase classname="tests.b" name="z" time="0.25"/>'
        "</testsuite></testsuites>"
    )
    other.write_text('<testsuites><testcase classname="tests.b" name="long" time="1"/></testsuites>')
    tool = _tool("times")
    assert tool.seconds_of([report], by_test=False) == {"tests.a": 2.0, "tests.b": 0.25}
    assert tool.seconds_of([report, other], by_test=False) == {"tests.a": 2.0, "tests.b": 1.25}
    assert tool.seconds_of([report], by_test=True).most_common(1) == [("tests.a::y", 1.5)]


def test_a_change_of_each_kind_is_made_within_functions_and_leaves_a_module_that_can_be_read():
    text = (
        "LIMIT = 3\n\ndef f(a: int = 1) -> int:\n    if not a < 3 or a is None:\n        return a * 2\n"
        '    word = f"{a + 1}", zip(a, strict=True)\n\n    def g():\n        return True\n'
    )
    changes = list(_tool("mutants").changes_of("m.py", text))
    assert [(one.function, one.old, one.new) for one in changes] == [
        ("f", "not a < 3 or a is None", "(not a < 3 and a is None)"), ("f", "not a < 3", "a < 3"),
        ("f", "a < 3", "(a <= 3)"), ("f", "3", "4"), ("f", "a is None", "(a is not None)"),
        ("f", "return a * 2", "return None"), ("f", "a * 2", "(a / 2)"), ("f", "2", "3"),
        ("f.<locals>.g", "return True", "return None"), ("f.<locals>.g", "True", "False"),
    ]  # fmt: skip
    assert all(ast.parse(one.applied(text)) for one in changes)


def test_tests_that_run_the_changed_line_come_first_and_each_file_and_way_through_the_function_in_turn():
    change, on = (tool := _tool("mutants")).Change("src/memfit/jobs/_m.py", "f", 3, 0, 1, "1", "2"), {2, 3}
    ran = {"/jobs/t::a": on, "/jobs/t::b": on, "/data/c": {2, 3, 4}, "/jobs/t::d": {2}, "/jobs/u::f": on, "/jobs/e": on}
    assert "".join(one[-1] for one in tool.best(change, ran, tool.Counter({"/jobs/t::a": 9}), {"/jobs/e"})) == "bfcad"


@pytest.mark.parametrize(
    ("text", "is_left_out"),
    [
        ("pytestmark = pytest.mark.slow\n", True),
        ("pytestmark = [\n    pytest.mark.slow,\n]\n\n@pytest.mark.root\n", True),
        ("pytestmark = pytest.mark.slow\n\n@pytest.mark.core\n", None),
        ("@pytest.mark.slow\n", None),
        ("", None),
    ],
)
def test_a_file_is_not_imported_where_none_of_its_tests_is_asked_for(tmp_path, text, is_left_out):
    (tmp_path / "check_it.py").write_text(f"{text}\ndef test_it(): pass\n")
    ignores, found = _tool("conftest", "tests").pytest_ignore_collect, []
    (tmp_path / "helper.py").touch()
    for words in ("core or not (slow or long)", "", "root"):
        config = SimpleNamespace(option=SimpleNamespace(markexpr=words))
        found += [ignores(tmp_path / name, config) for name in ("check_it.py", "helper.py")]
    assert found == [is_left_out, True, None, None, None, True]


@pytest.mark.slow
def test_what_is_made_once_for_a_file_is_made_by_one_worker(tmp_path):
    """The groups of the scheduler hold with the versions of pytest and xdist that are installed."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "fixtures.py"):
        (tmp_path / "tests" / name).write_text((ROOT / "tests" / name).read_text())
    (tmp_path / "tests/test_once.py").write_text(
        "import os, time\nfrom pathlib import Path\nimport pytest\n\n"
        '@pytest.fixture(scope="module")\ndef made():\n    Path(f"made_{os.getpid()}").touch()\n\n'
        "def test_one(made):\n    time.sleep(0.3)\n\ndef test_two(made):\n    time.sleep(0.3)\n\ndef test_three(made):\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadscope", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "-c", "/dev/null", "--rootdir", ".", "tests"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout
    assert len(list(tmp_path.glob("made_*"))) == 1
